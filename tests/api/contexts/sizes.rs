//! The limit of the size of a context.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::lists::assert_openai_accepts;
use serde_json::{Value, json};
use test_case::test_case;

const MAX_BYTES: usize = 3000;

/// Returns the messages of a turn. Each third one calls a tool with a large result.
fn turn(number: usize) -> Vec<Value> {
    let text = "x".repeat(number * 7919 % 1500);
    let mut messages = vec![json!({"role": "user", "content": format!("{number} {text}")})];
    if number.is_multiple_of(3) {
        let call = json!({"id": format!("c{number}"), "type": "function", "function": {"name": "look", "arguments": "{}"}});
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
        let result = "r".repeat(1600);
        messages.push(json!({"role": "tool", "tool_call_id": format!("c{number}"), "content": result}));
    }
    messages.push(json!({"role": "assistant", "content": "Noted."}));
    messages
}

/// The same session is read with a copy of it in memory and without one.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_contains_the_newest_messages_within_its_size(backend: Backend) {
    let max = MAX_BYTES.to_string();
    let off = ("consolidation.mode", "off");
    let set = [("limits.max_message_bytes", max.as_str()), ("limits.max_context_bytes", &max), off];
    let without_copies: Set<'_> = &[set[0], set[1], off, ("limits.max_context_cache_bytes", "0")];
    let (app, reader) =
        (TestApp::start(&backend, &set).await, TestApp::start(&backend, without_copies).await);
    let mut stored: Vec<Value> = Vec::new();
    for number in 1..=30 {
        let messages = turn(number);
        app.record("demo", &messages).await;
        stored.extend(messages);
        let mut contexts = Vec::new();
        for app in [&app, &reader] {
            contexts.push(app.post("/sessions/demo/context", "{}").await.ok(200));
        }
        assert_eq!(contexts[0], contexts[1]);
        let context = contexts.remove(0);
        let (coverage, messages) = (&context["coverage"], context["messages"].as_array().expect("a list"));
        let from = usize::try_from(coverage["verbatim_from"].as_u64().expect("a number")).expect("small");
        let is_cut = from > 1;
        let omitted = json!([{"from_seq": 1, "to_seq": from - 1, "reason": "max_context_bytes"}]);
        assert_eq!(coverage["omitted"], if is_cut { omitted } else { json!([]) }, "{coverage}");
        assert_eq!(coverage["last_seq"], stored.len());
        assert_openai_accepts(messages);
        let system = messages.first().filter(|first| first["role"] == "system");
        let notice = system
            .is_some_and(|system| system["content"].as_str().is_some_and(|text| text.contains("## Notice")));
        assert!(notice || !is_cut, "the agent is told: {context:#}");
        // A list that would begin with the assistant has an opening.
        let has_opening = stored[from - 1]["role"] == "assistant";
        let verbatim = &messages[usize::from(system.is_some()) + usize::from(has_opening)..];
        assert_eq!(verbatim, &stored[from - 1..]);
        let bytes =
            |messages: &[Value]| messages.iter().map(|message| message.to_string().len()).sum::<usize>();
        assert!(bytes(verbatim) <= MAX_BYTES, "{}", bytes(verbatim));
        // More than the next turn would not fit.
        let earlier = stored[..from - 1].iter().rposition(|message| message["role"] == "user");
        assert!(earlier.is_none_or(|earlier| bytes(&stored[earlier..]) > MAX_BYTES));
    }
    assert!(stored.len() > 60);
}
