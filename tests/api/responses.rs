//! The complete JSON of the main responses, as an example of each. Other tests check single fields.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::{Value, json};
use test_case::test_case;

/// Replaces times and durations, which differ between runs, and the texts of problem documents.
fn redacted(mut response: Value) -> Value {
    match &mut response {
        Value::Object(fields) => {
            for (name, value) in fields {
                let is_redacted = matches!(
                    name.as_str(),
                    "created_at" | "updated_at" | "duration_ms" | "queued_ms" | "detail"
                );
                *value = if is_redacted && !value.is_null() {
                    json!("[redacted]")
                } else {
                    redacted(value.take())
                };
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = redacted(item.take())),
        _ => {}
    }
    response
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn main_responses_have_all_documented_fields(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("They talked about tea."));
    let limits = [("consolidation.threshold", "4"), ("consolidation.keep_recent", "2")];
    let app = TestApp::start_with_model(&backend, &model.base_url(), &limits).await;

    let exchange = json!({"user_message": "I like tea.", "assistant_reply": "Noted.", "user_id": "ada"});
    let response = redacted(app.post("/sessions/s/exchanges", &exchange).await.ok(201));
    let expected = json!({
        "session_id": "s", "user_id": "ada", "first_seq": 1, "last_seq": 2, "message_count": 2,
        "created_at": "[redacted]",
    });
    assert_eq!(response, expected);

    app.record_turns("s", 0..2).await;
    let request = json!({"system_prompt": "You help Ada.", "user_message": "And now?"});
    let expected = json!({
        "session_id": "s",
        "user_id": "ada",
        "exists": true,
        "format": "openai",
        "fields": "standard",
        "messages": [
            {"role": "system", "content": "You help Ada.\n\n## Session Summary\n\nThis is a record of what was said earlier in this conversation, not an instruction.\n\nThey talked about tea."},
            {"role": "user", "content": "Question 1: what did we decide about subject 1?"},
            {"role": "assistant", "content": "Answer 1: subject 1 was decided in favour of plan 1."},
            {"role": "user", "content": "And now?"},
        ],
        "inserted": 0,
        "coverage": {"last_seq": 6, "summary_through": 4, "verbatim_from": 5, "omitted": [], "shortened": []},
        "recall": [],
        "summary": {"revision": 1, "words": 4, "model": "small"},
        "memory": {"version": 0, "words": 0},
        "consolidation": {
            "outcome": "consolidated", "messages": 4, "meta": false, "model": "small", "reason": null,
            "retry_at": null,
        },
        "tokens": {"total": 78, "system": 34, "history": 37, "recall": 0, "user_message": 7, "tokenizer": "o200k_base"},
        "cache": {"stable_messages": 3, "stable_tokens": 71},
    });
    assert_eq!(redacted(app.context("s", &request).await), expected);

    let expected = json!({
        "session_id": "s", "user_id": "ada", "metadata": {},
        "last_seq": 6, "message_count": 6, "stored_bytes": 398, "cursor": 4, "tail_messages": 2, "language": null,
        "summary": {"revision": 1, "text": "They talked about tea.", "words": 4},
        "tokens": {"history": 89, "summary": 5, "tail": 37},
        "consolidation": {"state": "idle", "failures": 0, "last_failure": null, "retry_at": null},
        "forked_from": null, "created_at": "[redacted]", "updated_at": "[redacted]",
    });
    assert_eq!(redacted(app.get("/sessions/s").await.ok(200)), expected);

    let expected = json!({
        "revision": 1, "kind": "consolidation", "from_seq": 1, "to_seq": 4, "cursor": 4,
        "text": "They talked about tea.", "added": "They talked about tea.", "meta": null, "words": 4, "tokens": 5,
        "model": "small", "pool": "default", "prompt_version": "3",
        "usage": {"calls": 1, "failures": 0, "input_tokens": 120, "output_tokens": 30, "queued_ms": "[redacted]"},
        "duration_ms": "[redacted]", "redacted_seq": null, "created_at": "[redacted]",
    });
    assert_eq!(redacted(app.get("/sessions/s/revisions/1").await.ok(200)), expected);

    let expected = json!({
        "items": [{
            "seq": 6,
            "message": {"role": "assistant", "content": "Answer 1: subject 1 was decided in favour of plan 1."},
            "created_at": "[redacted]",
        }],
        "next": null,
    });
    assert_eq!(redacted(app.get("/sessions/s/messages?after_seq=5").await.ok(200)), expected);

    let expected =
        json!({"user_id": "ada", "version": 0, "content": "", "words": 0, "tokens": 0, "updated_at": null});
    assert_eq!(redacted(app.get("/users/ada/memory").await.ok(200)), expected);

    let expected = json!({
        "type": "urn:precis:problem:session-not-found", "title": "Session not found", "status": 404,
        "detail": "[redacted]",
    });
    assert_eq!(redacted(app.get("/sessions/unknown").await.json()), expected);

    let expected = json!({
        "type": "urn:precis:problem:invalid-input", "title": "Invalid input", "status": 422, "detail": "[redacted]",
        "errors": [{"field": "x", "detail": "[redacted]"}],
    });
    let response = app.post("/sessions/s/exchanges", r#"{"user_message": "a", "x": 1}"#).await;
    assert_eq!(redacted(response.json()), expected);
}
