//! Fixtures, requests and the checks that every response must pass.
//!
//! Messages are JSON text and not values, because they must be returned byte for byte.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::model_server::{Call, ModelServer};
use precis::domain::consolidation::{Mode, Policy};
use precis::domain::tokens::Tokenizer;
use precis::service::RetentionConfig;
use precis::service::contexts::Context;
use precis::service::{PoolNames, ServiceConfig};
use precis::storage::DefaultRetention;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::time::Duration;

/// Timeout for events that must happen. Generous, so that a busy machine does not fail a test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a service with this model as its only one.
pub(crate) async fn start(backend: &Backend, model: &ModelServer, set: Set<'_>) -> TestApp {
    // A busy machine needs more time than users should wait.
    let mut set = set.to_vec();
    if !set.iter().any(|(path, _)| *path == "consolidation.inline_wait") {
        set.push(("consolidation.inline_wait", "2min"));
    }
    TestApp::start_with_model(backend, &model.base_url(), &set).await
}

/// The parts of a context response that the tests inspect.
#[derive(Debug, Deserialize)]
pub(crate) struct Answer {
    pub(crate) messages: Vec<Box<RawValue>>,
    pub(crate) inserted: usize,
    pub(crate) coverage: Coverage,
    pub(crate) summary: SummaryRef,
    pub(crate) consolidation: Report,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Coverage {
    pub(crate) last_seq: usize,
    pub(crate) summary_through: usize,
    pub(crate) verbatim_from: usize,
    pub(crate) omitted: Vec<Omitted>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Omitted {
    pub(crate) from_seq: usize,
    pub(crate) to_seq: usize,
    pub(crate) reason: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SummaryRef {
    pub(crate) revision: usize,
    pub(crate) words: usize,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Report {
    pub(crate) outcome: String,
    pub(crate) messages: usize,
    pub(crate) meta: bool,
    pub(crate) model: Option<String>,
    pub(crate) retry_at: Option<String>,
    pub(crate) reason: Option<String>,
}

impl Answer {
    pub(crate) fn outcome(&self) -> &str {
        &self.consolidation.outcome
    }

    /// Returns the text of the system message, or an empty text without one.
    pub(crate) fn system(&self) -> String {
        let message: Value =
            self.messages.first().map_or(Value::Null, |first| serde_json::from_str(first.get()).unwrap());
        if message["role"] == "system" {
            message["content"].as_str().unwrap().to_owned()
        } else {
            String::new()
        }
    }

    /// Returns the messages of the tail, without inserted tool calls and results.
    pub(crate) fn verbatim(&self) -> Vec<&str> {
        // A list that would begin with the assistant has an opening.
        let openings =
            ["\"(The conversation began earlier.)", "\"(The summary has the beginning of this turn"];
        let is_opening = |message: &str| openings.iter().any(|text| message.contains(text));
        let messages =
            self.messages.iter().map(|message| message.get()).filter(|message| !is_opening(message));
        let inserted = ["\"No result of this call had been recorded at this point.\"", "\"earlier_call\""];
        let verbatim: Vec<&str> = messages
            .clone()
            .skip(usize::from(!self.system().is_empty()))
            .filter(|message| !inserted.iter().any(|text| message.contains(text)))
            .collect();
        let list = messages.count() - usize::from(!self.system().is_empty());
        assert_eq!(list - verbatim.len(), self.inserted, "{:?}", self.messages);
        verbatim
    }

    /// Checks that summary, omitted ranges and verbatim part cover 1 … `last_seq` exactly once, and that the verbatim part
    /// is byte for byte as it was sent, except for nulls.
    pub(crate) fn verify(&self, given: &[String]) {
        let report = &self.consolidation;
        assert_eq!(report.reason.is_some(), report.outcome == "failed", "{report:?}");
        let coverage = &self.coverage;
        assert_eq!(coverage.last_seq, given.len(), "{coverage:?}");
        let mut next = coverage.summary_through + 1;
        let is_redacted = |omitted: &&Omitted| omitted.reason == "redacted";
        for omitted in coverage.omitted.iter().filter(|omitted| !is_redacted(omitted)) {
            assert_eq!(omitted.from_seq, next, "a hole or a double: {coverage:?}");
            assert!(omitted.to_seq >= omitted.from_seq, "{coverage:?}");
            next = omitted.to_seq + 1;
        }
        assert_eq!(coverage.verbatim_from, next, "a hole or a double: {coverage:?}");
        assert!(next <= given.len() + 1, "{coverage:?}");
        // A placeholder is sent for each redacted message.
        let mut after = next;
        for redacted in coverage.omitted.iter().filter(is_redacted) {
            assert!(redacted.from_seq >= after && redacted.to_seq <= coverage.last_seq, "{coverage:?}");
            after = redacted.to_seq + 2;
            for message in &given[redacted.from_seq - 1..redacted.to_seq] {
                assert!(message.contains(r#""content":"[redacted]""#), "{coverage:?}: {message}");
            }
        }
        let expected: Vec<String> = given[next - 1..].iter().map(|message| without_nulls(message)).collect();
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        // Results follow their calls. All other messages keep their order.
        let parts = |list: &[&str]| -> (Vec<String>, Vec<String>) {
            let is_result = |message: &String| message.contains(r#""role":"tool""#);
            let (mut results, others): (Vec<String>, Vec<String>) =
                list.iter().map(|message| (*message).to_owned()).partition(is_result);
            results.sort_unstable();
            (results, others)
        };
        assert_eq!(parts(&self.verbatim()), parts(&expected), "verbatim from {next} on");
    }
}

/// Returns a message without the fields that are null. Messages with such fields have their fields in alphabetical order.
fn without_nulls(message: &str) -> String {
    // A message with calls needs the field `content`.
    let is_omitted = |(name, value): (&String, &Value)| value.is_null() && name != "content";
    match serde_json::from_str(message) {
        Ok(Value::Object(mut fields)) if fields.iter().any(is_omitted) => {
            fields.retain(|name, value| !is_omitted((name, &*value)));
            Value::Object(fields).to_string()
        }
        _ => message.to_owned(),
    }
}

/// A service configuration in which 5 messages are due, of which 2 stay.
pub(crate) fn config() -> ServiceConfig {
    ServiceConfig {
        policy: Policy {
            threshold: 4,
            keep_recent: 2,
            max_history_messages: 20,
            max_context_bytes: 1 << 20,
            retry_initial: Duration::from_mins(1),
            ..Policy::default()
        },
        mode: Mode::Inline,
        recent_on_failure: false,
        pools: Some(PoolNames { consolidation: "p".to_owned(), meta: "p".to_owned() }),
        inline_wait: PATIENCE,
        daily_token_limit: None,
        tokenizer: Tokenizer::default(),
        key_share: 0.5,
        context_cache_bytes: 1 << 20,
        memory_max_bytes: 1000,
        default_user: None,
        recall: None,
        max_fork_messages: 1000,
        allow_rewind: true,
        retention: RetentionConfig {
            default: DefaultRetention::default(),
            interval: Duration::from_mins(10),
            max_sessions_per_second: 50,
        },
        search: None,
        rerank: None,
    }
}

/// A user message that contains its `seq` and JSON that careless re-encoding would change.
pub(crate) fn user(seq: usize) -> String {
    format!(
        r#"{{"x-n":1.0,"role":"user","content":"m{seq} a \u0022question\u0022 <é>\u2028","big":12345678901234567890123}}"#
    )
}

/// An assistant message that contains its `seq`.
pub(crate) fn assistant(seq: usize) -> String {
    format!(r#"{{"content":[{{"text":"m{seq} an answer","type":"text"}}],"role":"assistant"}}"#)
}

/// Alternating messages with these `seq`s, a user message first.
pub(crate) fn turns(seqs: std::ops::RangeInclusive<usize>) -> Vec<String> {
    seqs.map(|seq| if seq % 2 == 1 { user(seq) } else { assistant(seq) }).collect()
}

/// Appends messages as one exchange.
pub(crate) async fn record(app: &TestClient, session: &str, messages: &[String]) {
    let body = format!("{{\"messages\":[{}]}}", messages.join(","));
    app.post(&format!("/sessions/{session}/exchanges"), body).await.ok(201);
}

/// Requests a context with all fields and checks its coverage.
pub(crate) async fn context(app: &TestClient, session: &str, body: &Value, given: &[String]) -> Answer {
    let mut body = body.clone();
    body["fields"] = json!("all");
    let response = app.post(&format!("/sessions/{session}/context"), body).await;
    response.ok(200);
    let answer: Answer = serde_json::from_str(&response.text).unwrap();
    answer.verify(given);
    answer
}

/// Requests a context without options: see [`context`].
pub(crate) async fn plain(app: &TestClient, session: &str, given: &[String]) -> Answer {
    context(app, session, &json!({}), given).await
}

pub(crate) async fn state(app: &TestClient, session: &str) -> Value {
    app.get(&format!("/sessions/{session}")).await.ok(200)
}

/// Waits until the session satisfies a condition.
pub(crate) async fn until(app: &TestClient, session: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let poll = async {
        loop {
            let state = state(app, session).await;
            if wanted(&state) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.expect("the session gets to where it should")
}

/// Returns the revisions of a session, oldest first.
pub(crate) async fn revisions(app: &TestClient, session: &str) -> Vec<Value> {
    let list = app.get(&format!("/sessions/{session}/revisions?limit=1000")).await;
    let mut revisions = list["items"].as_array().unwrap().clone();
    revisions.reverse();
    revisions
}

/// Consolidates the session now.
pub(crate) async fn consolidate(app: &TestClient, session: &str) -> (StatusCode, Value) {
    let request = app.request(Method::POST, &format!("/sessions/{session}/consolidations"));
    let response = request.await;
    (StatusCode::from_u16(response.status).unwrap(), response.json())
}

/// Returns the lines of the data block in a prompt, without those that state the time.
pub(crate) fn lines(call: &Call) -> Vec<Value> {
    let user = call.user();
    let (_, block) = user.split_once("\n<conversation>\n").expect("the block begins");
    let (block, _) = block.split_once("\n</conversation>\n").expect("the block ends");
    let lines = block.lines().map(|line| serde_json::from_str(line).expect("one JSON value per line"));
    lines.filter(|line: &Value| line["role"].is_string()).collect()
}

/// Returns the `seq`s that messages of [`user`] and others mention in a text: `m1 …`.
pub(crate) fn named(text: &str) -> Vec<usize> {
    let seqs = text.split_whitespace().filter_map(|word| word.strip_prefix('m')?.parse().ok());
    seqs.collect()
}

/// Returns the `seq`s of the messages in a prompt, from the beginning of each line.
pub(crate) fn seen(call: &Call) -> Vec<usize> {
    let lines = lines(call);
    let first = |line: &Value| named(line["text"].as_str().unwrap_or_default()).first().copied();
    lines.iter().filter_map(first).collect()
}

/// The text to which [`covering`] compresses a summary.
pub(crate) const COMPRESSED: &str = "So far.";

pub(crate) fn is_meta(call: &Call) -> bool {
    call.user().starts_with("Compress this summary")
}

/// A model whose summaries list the `seq`s of their messages, so that missing and repeated messages are visible. It
/// compresses summaries to [`COMPRESSED`].
pub(crate) fn covering(call: &Call) -> String {
    if is_meta(call) {
        return COMPRESSED.to_owned();
    }
    let seqs = seen(call).iter().map(|seq| format!("m{seq}")).collect::<Vec<_>>();
    format!("It covers {} .", seqs.join(" "))
}

/// Returns the number of messages of the tail in a context.
pub(crate) fn sent(context: &Context) -> usize {
    let messages: Vec<serde_json::Value> = serde_json::from_str(&context.list.messages).expect("a list");
    messages.iter().filter(|message| message["role"] != "system").count()
}
