//! Clients at the same time on the same sessions. The order is nobody's to say; but what was acknowledged is there once
//! and whole, each client's in the order in which it was sent, and nothing is there that was not.

use super::answer::send;
use super::contract::{Message, messages};
use super::story::Form;
use super::support::app::TestApp;
use super::visible;
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use reqwest::Method;
use serde_json::{Value, json};
use std::fmt;

/// What each of three clients does, one after the other.
pub(super) type Crowd = [Client; 3];

#[derive(Clone)]
pub(super) struct Client(Vec<Act>);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line for each client.
        write!(f, "{:?}", self.0)
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    /// Sent twice at once with one key.
    Twice(u8),
    Exchange(u8),
    Tool(u8),
    Context(u8),
    Consolidate(u8),
    Restore(u8),
}

/// What was acknowledged: the first `seq`, and the messages.
struct Told {
    session: u8,
    first: usize,
    messages: Vec<String>,
}

pub(super) fn crowds() -> impl Strategy<Value = Crowd> {
    let act = (0..2_u8).prop_flat_map(|session| {
        prop_oneof![
            4 => Just(Act::Exchange(session)),
            2 => Just(Act::Tool(session)),
            2 => Just(Act::Twice(session)),
            4 => Just(Act::Context(session)),
            1 => Just(Act::Consolidate(session)),
            1 => Just(Act::Restore(session)),
        ]
    });
    let client = vec(act, 0..=10).prop_map(Client);
    [client.clone(), client.clone(), client]
}

/// All of them have the first two clients' tenant.
pub(super) async fn run(apps: &[TestApp; 3], crowd: Crowd) {
    let app = &apps[0];
    // So that there are the sessions.
    let mut told =
        vec![vec![record(app, 0, Form::User, "a0", 1).await, record(app, 1, Form::User, "b0", 1).await]];
    let clients = crowd.iter().enumerate().map(|(number, client)| live(&apps[number % 2], number, client));
    told.extend(join_all(clients).await);
    for session in 0..2 {
        let history = visible::history(app, session).await;
        assert!(history.iter().map(|(seq, _)| *seq).eq(1..=history.len()), "seqs have no hole");
        let history: Vec<Message> = history.into_iter().map(|(_, message)| message).collect();
        let mut acknowledged = 0;
        for client in &told {
            let mut behind = 0;
            for Told { first, messages, .. } in client.iter().filter(|told| told.session == session) {
                assert!(*first > behind, "a client's exchanges stay in their order");
                behind = first + messages.len() - 1;
                let stored = history[first - 1..behind].iter().map(|message| &message.json);
                assert!(stored.eq(messages), "an exchange is whole, at the place that was said");
                acknowledged += messages.len();
            }
        }
        // Each text is another, and all have their place: so none is there twice, and none that was not acknowledged.
        assert_eq!(acknowledged, history.len());
        chained(app, session, history.len()).await;
        let context = app.context(&format!("s{session}"), &json!({"mode": "off"})).await;
        covered(&context, history.len());
    }
}

async fn live(app: &TestApp, number: usize, client: &Client) -> Vec<Told> {
    let mut told: Vec<Told> = Vec::new();
    for (step, act) in client.0.iter().enumerate() {
        let mark = format!("c{number}-{step}");
        let path = |session: u8, rest: &str| format!("/sessions/s{session}/{rest}");
        match *act {
            Act::Exchange(session) => told.push(record(app, session, Form::Turn, &mark, 1).await),
            Act::Tool(session) => told.push(record(app, session, Form::Tool, &mark, 1).await),
            Act::Twice(session) => told.push(record(app, session, Form::Turn, &mark, 2).await),
            Act::Context(session) => {
                let context = app.context(&format!("s{session}"), &json!({"mode": "inline"})).await;
                let own = told.iter().rfind(|told| told.session == session);
                let own = own.map_or(1, |told| told.first + told.messages.len() - 1);
                let last = number_of(&context["coverage"]["last_seq"]);
                assert!(last >= own, "a context has what its client has recorded before: {own}, {context}");
                covered(&context, last);
            }
            Act::Consolidate(session) => {
                let answer = send(app.request(Method::POST, &path(session, "consolidations"))).await;
                // 409: another is at it. 502: it was lost to a restore.
                assert!([200, 201, 409, 502].contains(&answer.status), "{answer:?}");
            }
            Act::Restore(session) => {
                send(app.request(Method::POST, &path(session, "revisions/0/restore"))).await.ok(201);
            }
        }
    }
    told
}

/// Records an exchange, sent so often at once with one key.
async fn record(app: &TestApp, session: u8, form: Form, mark: &str, times: usize) -> Told {
    let messages = messages(form, mark);
    let body = format!(r#"{{"messages":[{}]}}"#, messages.join(","));
    let request = || {
        let request = app.request(Method::POST, &format!("/sessions/s{session}/exchanges"));
        request.header("idempotency-key", mark).header("content-type", "application/json").body(body.clone())
    };
    let answers = join_all((0..times).map(|_| send(request()))).await;
    let first = answers[0].ok(201);
    assert!(answers.iter().all(|answer| answer.ok(201) == first), "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| !answer.replayed).count(), 1, "{answers:?}");
    Told { session, first: number_of(&first["first_seq"]), messages }
}

fn number_of(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))).expect("small")
}

/// Each consolidation goes on where the cursor was, each restore sets it back, and the last is the session's.
async fn chained(app: &TestApp, session: u8, last_seq: usize) {
    let list = app.get(&format!("/sessions/s{session}/revisions?limit=1000")).await;
    let mut cursor = 0;
    let list = list["items"].as_array().expect("items");
    for (revision, number) in list.iter().rev().zip(1..) {
        assert_eq!(number_of(&revision["revision"]), number);
        if revision["kind"] == "restore" {
            cursor = 0;
        } else {
            assert_eq!(number_of(&revision["from_seq"]), cursor + 1, "{revision}");
            cursor = number_of(&revision["to_seq"]);
        }
        assert_eq!(number_of(&revision["cursor"]), cursor);
        assert!(cursor < last_seq);
    }
    let state = app.get(&format!("/sessions/s{session}")).await;
    assert_eq!((number_of(&state["cursor"]), number_of(&state["summary"]["revision"])), (cursor, list.len()));
    assert_eq!(state["summary"]["text"], list.first().map_or(json!(""), |newest| newest["text"].clone()));
}

/// Summary, omitted ranges and verbatim part cover 1 … `last_seq`, each message once.
fn covered(context: &Value, last_seq: usize) {
    let coverage = &context["coverage"];
    let mut next = number_of(&coverage["summary_through"]) + 1;
    for omitted in coverage["omitted"].as_array().expect("ranges") {
        assert_eq!(number_of(&omitted["from_seq"]), next, "{coverage}");
        next = number_of(&omitted["to_seq"]) + 1;
    }
    assert_eq!((number_of(&coverage["verbatim_from"]), number_of(&coverage["last_seq"])), (next, last_seq));
    let messages = context["messages"].as_array().expect("messages");
    let verbatim = messages.iter().filter(|message| message["role"] != "system").count();
    assert_eq!(next - 1 + verbatim, last_seq, "{context}");
}
