//! Compares the state that the service returns, through every route that shows it, with the reference model.

use super::reference_model::{Session, Tenant, USERS};
use super::response::send;
use super::support::app::TestApp;
use reqwest::Method;
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
    message: Box<RawValue>,
}

#[derive(Deserialize)]
struct Page<T> {
    items: Vec<T>,
    next: Option<String>,
}

/// Returns all items of a list, page by page. `path` ends with `?` or `&`.
async fn all_pages<T: for<'a> Deserialize<'a>>(app: &TestApp, path: &str, limit: usize) -> Vec<T> {
    let (mut items, mut cursor) = (Vec::new(), String::new());
    loop {
        let response = send(app.request(Method::GET, &format!("{path}limit={limit}{cursor}"))).await;
        response.ok(200);
        let page: Page<T> = serde_json::from_str(&response.text).expect("a page");
        assert!(
            page.items.len() <= limit && (page.next.is_none() || page.items.len() == limit),
            "{response:?}"
        );
        items.extend(page.items);
        let Some(next) = page.next else { return items };
        cursor = format!("&cursor={next}");
    }
}

/// A message with its position, its JSON text and its time.
pub(super) type ListedMessage = (usize, String, String);

pub(super) async fn history(app: &TestApp, id: u8) -> Vec<ListedMessage> {
    list_messages(app, &format!("/sessions/s{id}/messages?"), 1000).await
}

async fn list_messages(app: &TestApp, path: &str, limit: usize) -> Vec<ListedMessage> {
    let items = all_pages::<Item>(app, path, limit).await.into_iter();
    items.map(|item| (item.seq, item.message.get().to_owned(), item.created_at)).collect()
}

impl Tenant {
    pub(super) async fn check_all(&self, app: &TestApp) {
        for id in 0..3 {
            self.check_session(app, id).await;
            self.check_messages(app, id, false, 3, 0).await;
            self.check_revisions(app, id, 2).await;
        }
        for user in 0..3 {
            self.check_memory(app, user).await;
            self.check_sessions(app, Some(user), 2).await;
        }
        self.check_sessions(app, None, 2).await;
    }

    pub(super) async fn check_session(&self, app: &TestApp, id: u8) {
        let response = send(app.request(Method::GET, &format!("/sessions/s{id}"))).await;
        match self.sessions.get(&id) {
            Some(session) => session.assert_matches(&response.ok(200), id),
            None => response.problem(404, "session-not-found"),
        }
    }

    pub(super) async fn check_messages(
        &self,
        app: &TestApp,
        id: u8,
        descending: bool,
        limit: usize,
        after: usize,
    ) {
        let path = format!("/sessions/s{id}/messages");
        let Some(session) = self.sessions.get(&id) else {
            return send(app.request(Method::GET, &path)).await.problem(404, "session-not-found");
        };
        let order = if descending { "desc" } else { "asc" };
        let listed = list_messages(app, &format!("{path}?order={order}&after_seq={after}&"), limit).await;
        let expected = (1..).zip(&session.history).skip(after);
        let mut expected: Vec<ListedMessage> =
            expected.map(|(seq, message)| (seq, message.json.clone(), message.created_at.clone())).collect();
        if descending {
            expected.reverse();
        }
        assert_eq!(listed, expected);
    }

    pub(super) async fn check_revisions(&self, app: &TestApp, id: u8, limit: usize) {
        let path = format!("/sessions/s{id}/revisions");
        let Some(session) = self.sessions.get(&id) else {
            return send(app.request(Method::GET, &path)).await.problem(404, "session-not-found");
        };
        let listed: Vec<Value> = all_pages(app, &format!("{path}?"), limit).await;
        let expected = session.revisions.iter().rev().map(|revision| revision.json.clone());
        assert_eq!(listed, expected.collect::<Vec<_>>());
    }

    /// The list is ordered by the latest activity.
    pub(super) async fn check_sessions(&self, app: &TestApp, user: Option<u8>, limit: usize) {
        let of = user.map_or(String::new(), |user| format!("user_id={}&", USERS[usize::from(user)]));
        let listed: Vec<Value> = all_pages(app, &format!("/sessions?{of}"), limit).await;
        let mut expected: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, session)| user.is_none_or(|user| session.user == user))
            .collect();
        let at = |text: &str| OffsetDateTime::parse(text, &Rfc3339).expect("a time");
        expected.sort_by_key(|(id, session)| Reverse((at(&session.updated_at), **id)));
        let ids: Vec<_> = expected.iter().map(|(id, _)| json!(format!("s{id}"))).collect();
        assert_eq!(listed.iter().map(|session| session["session_id"].clone()).collect::<Vec<_>>(), ids);
        for (state, (id, session)) in listed.iter().zip(expected) {
            session.assert_matches(state, *id);
        }
    }

    pub(super) async fn check_memory(&self, app: &TestApp, user: u8) {
        let path = format!("/users/{}/memory", USERS[usize::from(user)]);
        let response = send(app.request(Method::GET, &path)).await;
        let (version, document) = (self.memory_version(user), response.ok(200));
        assert_eq!(
            (&document["version"], &document["content"]),
            (&json!(version), &json!(self.memory(user)))
        );
        assert_eq!(response.etag, Some(format!("\"{version}\"")));
        let versions: Vec<Value> = all_pages(app, &format!("{path}/revisions?"), 2).await;
        let pair = |version: &Value| (version["version"].clone(), version["content"].clone());
        let expected = (1..).zip(self.memories.get(&user).into_iter().flatten());
        let expected: Vec<_> =
            expected.map(|(version, content): (i64, _)| (json!(version), json!(content))).collect();
        assert_eq!(versions.iter().rev().map(pair).collect::<Vec<_>>(), expected);
    }
}

impl Session {
    fn assert_matches(&self, state: &Value, id: u8) {
        let (last, cursor) = (self.history.len(), self.cursor());
        let expected = json!({
            "session_id": format!("s{id}"), "user_id": USERS[usize::from(self.user)],
            "last_seq": last, "message_count": last, "cursor": cursor, "tail_messages": last - cursor,
            "updated_at": self.updated_at,
            "metadata": serde_json::from_str::<Value>(&self.metadata).expect("JSON"),
        });
        for (field, expected) in expected.as_object().expect("an object") {
            assert_eq!(&state[field], expected, "{field}: {state}");
        }
        let summary = &state["summary"];
        assert_eq!(
            (&summary["revision"], &summary["text"]),
            (&json!(self.revisions.len()), &json!(self.summary()))
        );
        let consolidation = &state["consolidation"];
        assert_eq!(consolidation["failures"], self.failures, "{state}");
        assert_ne!(consolidation["state"], "running", "{state}");
        if self.failures == 0 {
            assert_eq!(consolidation["state"], "idle", "{state}");
        }
        assert_eq!(state["tokens"]["tail"], self.tail_tokens(), "{state}");
    }
}
