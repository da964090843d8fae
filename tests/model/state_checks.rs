//! Compares the state that the service returns, through every route that shows it, with the reference model.

use super::reference_model::{Message, Session, Tenant, USERS};
use super::support::client::{TestClient, assert_includes};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::cmp::Reverse;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

#[derive(Deserialize)]
struct Item {
    seq: usize,
    created_at: String,
    redacted_at: Option<String>,
    message: Box<RawValue>,
}

/// A message with its position, its JSON text, its time and the time of its redaction.
pub(super) type ListedMessage = (usize, String, String, Option<String>);

pub(super) async fn history(app: &TestClient, id: u8) -> Vec<ListedMessage> {
    list_messages(app, &format!("/sessions/s{id}/messages"), 1000).await
}

async fn list_messages(app: &TestClient, path: &str, limit: usize) -> Vec<ListedMessage> {
    let items = app.all_pages::<Item>(path, limit).await.into_iter();
    items.map(|item| (item.seq, item.message.get().to_owned(), item.created_at, item.redacted_at)).collect()
}

impl Tenant {
    pub(super) async fn check_all(&self, app: &TestClient) {
        let ids = (0..3).map(|id| format!("s{id}"));
        for name in ids.chain(self.branches.keys().cloned()) {
            self.check_session(app, &name).await;
            self.check_messages(app, &name, false, 3, 0).await;
            self.check_revisions(app, &name, 2).await;
            self.check_redactions(app, &name).await;
        }
        for user in 0..3 {
            self.check_memory(app, user).await;
            self.check_sessions(app, Some(user), 2).await;
        }
        self.check_sessions(app, None, 2).await;
    }

    pub(super) async fn check_session(&self, app: &TestClient, name: &str) {
        let response = app.get(&format!("/sessions/{name}")).await;
        match self.find(name) {
            Some(session) => session.assert_matches(&response.ok(200), name),
            None => drop(response.problem(404, "session-not-found")),
        }
    }

    pub(super) async fn check_messages(
        &self,
        app: &TestClient,
        name: &str,
        descending: bool,
        limit: usize,
        after: usize,
    ) {
        let path = format!("/sessions/{name}/messages");
        let Some(session) = self.find(name) else {
            return drop(app.get(&path).await.problem(404, "session-not-found"));
        };
        let order = if descending { "desc" } else { "asc" };
        let listed = list_messages(app, &format!("{path}?order={order}&after_seq={after}"), limit).await;
        let expected = (1..).zip(&session.history).skip(after);
        let listed_message = |(seq, message): (usize, &Message)| {
            let redacted_at = message.redaction.as_ref().and_then(|record| record["redacted_at"].as_str());
            (seq, message.json.clone(), message.created_at.clone(), redacted_at.map(str::to_owned))
        };
        let mut expected: Vec<ListedMessage> = expected.map(listed_message).collect();
        if descending {
            expected.reverse();
        }
        assert_eq!(listed, expected);
    }

    pub(super) async fn check_revisions(&self, app: &TestClient, name: &str, limit: usize) {
        let path = format!("/sessions/{name}/revisions");
        let Some(session) = self.find(name) else {
            return drop(app.get(&path).await.problem(404, "session-not-found"));
        };
        let listed: Vec<Value> = app.all_pages(&path, limit).await;
        let expected = session.revisions.iter().rev().map(|revision| revision.json.clone());
        assert_eq!(listed, expected.collect::<Vec<_>>());
    }

    pub(super) async fn check_redactions(&self, app: &TestClient, name: &str) {
        let path = format!("/sessions/{name}/redactions");
        let Some(session) = self.find(name) else {
            return drop(app.get(&path).await.problem(404, "session-not-found"));
        };
        let listed: Vec<Value> = app.all_pages(&path, 2).await;
        assert_eq!(listed, session.redactions());
    }

    /// The list is ordered by the latest activity.
    pub(super) async fn check_sessions(&self, app: &TestClient, user: Option<u8>, limit: usize) {
        let of = user.map_or(String::new(), |user| format!("?user_id={}", USERS[usize::from(user)]));
        let listed: Vec<Value> = app.all_pages(&format!("/sessions{of}"), limit).await;
        let named = self.sessions.iter().map(|(id, session)| (format!("s{id}"), session));
        let branches = self.branches.iter().map(|(name, session)| (name.clone(), session));
        let mut expected: Vec<_> = named
            .chain(branches)
            .filter(|(_, session)| user.is_none_or(|user| session.user == Some(user)))
            .collect();
        let at = |text: &str| OffsetDateTime::parse(text, &Rfc3339).expect("a time");
        expected.sort_by_key(|(name, session)| Reverse((at(&session.updated_at), name.clone())));
        let ids: Vec<_> = expected.iter().map(|(name, _)| json!(name)).collect();
        assert_eq!(listed.iter().map(|session| session["session_id"].clone()).collect::<Vec<_>>(), ids);
        for (state, (name, session)) in listed.iter().zip(expected) {
            session.assert_matches(state, &name);
        }
    }

    pub(super) async fn check_memory(&self, app: &TestClient, user: u8) {
        let path = format!("/users/{}/memory", USERS[usize::from(user)]);
        let response = app.get(&path).await;
        let (version, document) = (self.memory_version(user), response.ok(200));
        assert_includes(&document, &json!({"version": version, "content": self.memory(user)}));
        assert_eq!(response.header("etag"), Some(format!("\"{version}\"").as_str()));
        let versions: Vec<Value> = app.all_pages(&format!("{path}/revisions"), 2).await;
        let pair = |version: &Value| (version["version"].clone(), version["content"].clone());
        let expected = (1..).zip(self.memories.get(&user).into_iter().flatten());
        let expected: Vec<_> =
            expected.map(|(version, content): (i64, _)| (json!(version), json!(content))).collect();
        assert_eq!(versions.iter().rev().map(pair).collect::<Vec<_>>(), expected);
    }
}

impl Session {
    fn assert_matches(&self, state: &Value, name: &str) {
        let (last, cursor) = (self.history.len(), self.cursor());
        let expected = json!({
            "session_id": name, "forked_from": self.forked_from,
            "user_id": self.user.map(|user| USERS[usize::from(user)]),
            "last_seq": last, "message_count": last, "cursor": cursor, "tail_messages": last - cursor,
            "updated_at": self.updated_at,
            "metadata": serde_json::from_str::<Value>(&self.metadata).expect("JSON"),
            "summary": {"revision": self.revisions.len(), "text": self.summary()},
            "consolidation": {"failures": self.failures},
            "tokens": {"tail": self.tail_tokens()},
        });
        assert_includes(state, &expected);
        let consolidation = &state["consolidation"];
        assert_ne!(consolidation["state"], "running", "{state}");
        if self.failures == 0 {
            assert_eq!(consolidation["state"], "idle", "{state}");
        }
    }
}
