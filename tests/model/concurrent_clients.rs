//! Clients that work on the same sessions at the same time. The order of their exchanges is undefined. Every
//! acknowledged exchange must be stored once, complete and in the order of its client, and no other messages.

use super::harness::Answer;
use super::operations::Mode;
use super::state_checks;
use super::support::client::TestClient;
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use reqwest::Method;
use serde_json::{Value, json};
use std::fmt;

/// The actions of one client, which it performs one after another.
#[derive(Clone)]
pub(super) struct Actions(Vec<Action>);

impl fmt::Debug for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line per client, also in the alternate form that proptest prints.
        write!(f, "{:?}", self.0)
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    AppendExchange(u8),
    /// Sends two identical requests at the same time.
    AppendTwice(u8),
    AppendWithToolCall(u8),
    /// Reads the history, and sends it with new messages, twice at the same time.
    Sync(u8),
    BuildContext(u8),
    Consolidate(u8),
    Restore(u8),
    /// Edits the summary, unless another client changes it at the same time.
    Edit(u8),
}

struct AcknowledgedExchange {
    session: u8,
    first_seq: usize,
    messages: Vec<String>,
}

impl AcknowledgedExchange {
    fn last_seq(&self) -> usize {
        self.first_seq + self.messages.len() - 1
    }
}

pub(super) fn clients() -> impl Strategy<Value = [Actions; 3]> {
    let action = (0..2_u8).prop_flat_map(|session| {
        prop_oneof![
            4 => Just(Action::AppendExchange(session)),
            2 => Just(Action::AppendWithToolCall(session)),
            2 => Just(Action::AppendTwice(session)),
            3 => Just(Action::Sync(session)),
            4 => Just(Action::BuildContext(session)),
            1 => Just(Action::Consolidate(session)),
            1 => Just(Action::Restore(session)),
            1 => Just(Action::Edit(session)),
        ]
    });
    let actions = vec(action, 0..=10).prop_map(Actions);
    [actions.clone(), actions.clone(), actions]
}

/// Runs all actions as clients of one tenant.
pub(super) async fn run(apps: &[TestClient; 3], clients: [Actions; 3]) {
    let app = &apps[0];
    // Every action expects both sessions to exist.
    let first = vec![append(app, 0, false, "a0", 1).await, append(app, 1, false, "b0", 1).await];
    let clients = clients.iter().enumerate();
    let running = clients.map(|(number, actions)| run_client(&apps[number % 2], number, actions));
    let mut acknowledged = join_all(running).await;
    acknowledged.push(first);
    for session in 0..2 {
        let history = state_checks::history(app, session).await;
        assert!(history.iter().map(|(seq, ..)| *seq).eq(1..=history.len()), "positions have no gap");
        let mut messages = 0;
        for client in &acknowledged {
            let mut last_seq = 0;
            for exchange in client.iter().filter(|exchange| exchange.session == session) {
                assert!(exchange.first_seq > last_seq, "the exchanges of a client keep their order");
                last_seq = exchange.last_seq();
                let stored = history[exchange.first_seq - 1..last_seq].iter().map(|(_, json, ..)| json);
                assert!(
                    stored.eq(&exchange.messages),
                    "an exchange is complete at the acknowledged position"
                );
                messages += exchange.messages.len();
            }
        }
        // All texts differ and have a position, so equal counts mean that no exchange is stored twice or unexpectedly.
        assert_eq!(messages, history.len());
        check_revisions(app, session, history.len()).await;
        let context = build_context(app, session, Mode::Off).await;
        assert_eq!(context.coverage.last_seq, history.len());
        verify(app, session, &context).await;
    }
}

async fn run_client(app: &TestClient, number: usize, actions: &Actions) -> Vec<AcknowledgedExchange> {
    let mut acknowledged: Vec<AcknowledgedExchange> = Vec::new();
    for (step, action) in actions.0.iter().enumerate() {
        let mark = format!("c{number}-{step}");
        let path = |session: u8, rest: &str| format!("/sessions/s{session}/{rest}");
        match *action {
            Action::AppendExchange(session) => acknowledged.push(append(app, session, false, &mark, 1).await),
            Action::AppendWithToolCall(session) => {
                acknowledged.push(append(app, session, true, &mark, 1).await);
            }
            Action::AppendTwice(session) => acknowledged.push(append(app, session, false, &mark, 2).await),
            Action::Sync(session) => acknowledged.extend(sync(app, session, &mark).await),
            Action::BuildContext(session) => {
                let context = build_context(app, session, Mode::Inline).await;
                let own = acknowledged.iter().rfind(|exchange| exchange.session == session);
                let last_seq = own.map_or(1, AcknowledgedExchange::last_seq);
                assert!(
                    context.coverage.last_seq >= last_seq,
                    "a context contains the client's earlier exchanges"
                );
                verify(app, session, &context).await;
            }
            Action::Consolidate(session) => {
                let response = app.request(Method::POST, &path(session, "consolidations")).await;
                // 409: another consolidation is running. 502: a restore or an edit discarded the result.
                assert!([200, 201, 409, 502].contains(&response.status), "{response:?}");
            }
            Action::Restore(session) => {
                app.request(Method::POST, &path(session, "revisions/0/restore")).await.ok(201);
            }
            Action::Edit(session) => {
                let summary = app.get(&format!("/sessions/s{session}")).await["summary"].clone();
                let text = format!("{} Edited as {mark}.", summary["text"].as_str().expect("a text"));
                let body = json!({"summary": text, "based_on": summary["revision"]});
                let response = app.post(&path(session, "revisions"), body).await;
                if response.status == 201 {
                    assert_eq!(response["text"], text);
                } else {
                    // Another client has changed the summary, or there is none.
                    assert_eq!(response.status, 409, "{response:?}");
                }
            }
        }
    }
    acknowledged
}

/// Appends an exchange by this number of identical requests at the same time, with one idempotency key.
async fn append(
    app: &TestClient,
    session: u8,
    tool_call: bool,
    mark: &str,
    requests: usize,
) -> AcknowledgedExchange {
    let messages = messages(tool_call, mark);
    let body = format!(r#"{{"messages":[{}]}}"#, messages.join(","));
    let path = format!("/sessions/s{session}/exchanges");
    let request = || app.post(&path, &body).header("idempotency-key", mark).send();
    let responses = join_all((0..requests).map(|_| request())).await;
    let first = responses[0].ok(201);
    assert!(responses.iter().all(|response| response.ok(201) == first), "{responses:?}");
    assert_eq!(responses.iter().filter(|response| !response.is_replay()).count(), 1, "{responses:?}");
    AcknowledgedExchange { session, first_seq: as_usize(&first["first_seq"]), messages }
}

/// Sends the history with two new messages as a complete list, twice at the same time. Returns `None` if another exchange came
/// first.
async fn sync(app: &TestClient, session: u8, mark: &str) -> Option<AcknowledgedExchange> {
    let history = state_checks::history(app, session).await;
    let messages = messages(false, mark);
    let list: Vec<&str> =
        history.iter().map(|(_, json, ..)| json).chain(&messages).map(String::as_str).collect();
    let body = format!(r#"{{"messages":[{}]}}"#, list.join(","));
    let path = format!("/sessions/s{session}/sync");
    let responses = join_all((0..2).map(|_| app.post(&path, &body).send())).await;
    let mut statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    statuses.sort_unstable();
    if statuses == [409, 409] {
        for response in &responses {
            response.problem(409, "history-diverged");
            assert_eq!(response.json()["diverged_at"], history.len() + 1, "{response:?}");
        }
        return None;
    }
    assert_eq!(statuses, [200, 201], "{responses:?}");
    let first = responses.iter().find(|response| response.status == 201)?;
    assert_eq!((as_usize(&first["matched"]), as_usize(&first["appended"])), (history.len(), 2), "{first:?}");
    Some(AcknowledgedExchange { session, first_seq: as_usize(&first["first_seq"]), messages })
}

/// Returns messages as JSON that must be stored byte for byte. The mark makes them unique.
fn messages(tool_call: bool, mark: &str) -> Vec<String> {
    let text = |role: &str, text: &str| {
        format!(
            r#"{{"n":1.0,"role":"{role}","content":"{text} \u00e9é {mark} is about plan {mark}.","x":[null]}}"#
        )
    };
    let (question, answer) = (text("user", "Question"), text("assistant", "Answer"));
    if !tool_call {
        return vec![question, answer];
    }
    let call =
        json!({"id": format!("c-{mark}"), "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [call]}).to_string();
    let result =
        json!({"role": "tool", "tool_call_id": format!("c-{mark}"), "content": format!("Result {mark}.")});
    vec![question, call, result.to_string(), answer]
}

async fn build_context(app: &TestClient, session: u8, mode: Mode) -> Answer {
    let response = app
        .post(&format!("/sessions/s{session}/context"), json!({"mode": mode.name(), "fields": "all"}))
        .await;
    response.ok(200);
    serde_json::from_str(&response.text).expect("a context")
}

/// Checks that a context covers the history up to its last message.
async fn verify(app: &TestClient, session: u8, context: &Answer) {
    let history = state_checks::history(app, session).await.into_iter().take(context.coverage.last_seq);
    context.verify(&history.map(|(_, json, ..)| json).collect::<Vec<_>>());
}

/// Checks that each consolidation begins after the cursor, that each restore resets the cursor, that edits keep it, and that the
/// session has the state of the last revision.
async fn check_revisions(app: &TestClient, session: u8, last_seq: usize) {
    let list = app.get(&format!("/sessions/s{session}/revisions?limit=1000")).await;
    let list = list["items"].as_array().expect("items");
    let mut cursor = 0;
    for (revision, number) in list.iter().rev().zip(1..) {
        assert_eq!(as_usize(&revision["revision"]), number);
        if revision["kind"] == "restore" {
            cursor = 0;
        } else if revision["kind"] == "edit" {
            assert!(cursor > 0, "an edit replaces a summary");
        } else {
            assert_eq!(as_usize(&revision["from_seq"]), cursor + 1, "{revision}");
            cursor = as_usize(&revision["to_seq"]);
        }
        assert_eq!(as_usize(&revision["cursor"]), cursor);
        assert!(cursor < last_seq);
    }
    let state = app.get(&format!("/sessions/s{session}")).await;
    assert_eq!((as_usize(&state["cursor"]), as_usize(&state["summary"]["revision"])), (cursor, list.len()));
    assert_eq!(state["summary"]["text"], list.first().map_or(json!(""), |newest| newest["text"].clone()));
}

fn as_usize(value: &Value) -> usize {
    value
        .as_u64()
        .and_then(|value| value.try_into().ok())
        .unwrap_or_else(|| panic!("{value} is not a position"))
}
