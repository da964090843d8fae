//! Messages as clients of many providers record them: stored as given, found by search, and sent in their standard form or
//! with all fields.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::lists::{
    assert_anthropic_accepts, assert_openai_accepts, tokens_of_anthropic, tokens_of_openai,
};
use serde_json::{Value, json};
use test_case::test_case;

/// A recorded message, its standard form, and its form with all fields.
struct Shape {
    given: Value,
    standard: Value,
    all: Value,
}

fn shape(given: Value, standard: Value, all: Value) -> Shape {
    Shape { given, standard, all }
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn said(content: &Value) -> Value {
    json!({"role": "assistant", "content": content})
}

fn asked(content: &Value) -> Value {
    json!({"role": "user", "content": content})
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn calls(content: Option<Value>, calls: &[Value]) -> Value {
    let mut message = json!({"role": "assistant", "tool_calls": calls});
    if let Some(content) = content {
        message["content"] = content;
    }
    message
}

fn result(id: &str, content: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": content})
}

/// Returns messages that are kept as they are in all forms.
fn standard_shapes() -> Vec<Value> {
    vec![
        asked(
            &json!([text("Look:"), {"type": "image_url", "image_url": {"url": "https://e.org/a.png", "detail": "low"}}]),
        ),
        said(&json!([text("One."), text("Two.")])),
        calls(Some(Value::Null), &[call("c1", "find", "{}")]),
        result("c1", "found"),
        calls(Some(Value::Null), &[call("c2", "find", "{}")]),
        result("c2", ""),
        json!({"role": "user", "name": "ada", "content": "a \"quoted\" text \\"}),
    ]
}

const UNSHOWN_IMAGE: &str = "(an image that can't be shown here)";

fn converted_texts() -> Vec<Shape> {
    let thinking = json!({"type": "thinking", "thinking": [text("Hm, quetzal.")]});
    let reasoning = json!({"type": "reasoning", "text": "Hm, quetzal."});
    let image = json!({"type": "image_url", "image_url": {"url": "https://e.org/a.png"}});
    let dump = json!({"role": "assistant", "content": "Dumped.", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "tool_calls": null});
    let cached = json!({"type": "text", "text": "Cached.", "cache_control": {"type": "ephemeral"}});
    vec![
        // Text parts of the Responses API.
        shape(
            asked(&json!([{"type": "input_text", "text": "Given."}])),
            asked(&json!([text("Given.")])),
            asked(&json!([{"type": "input_text", "text": "Given."}])),
        ),
        shape(
            said(&json!([{"type": "output_text", "text": "Written.", "annotations": [], "logprobs": null}])),
            said(&json!("Written.")),
            said(&json!([{"type": "output_text", "text": "Written.", "annotations": []}])),
        ),
        shape(
            asked(&json!([{"type": "input_image", "image_url": "https://e.org/a.png", "file_id": null}])),
            asked(&json!([image])),
            asked(&json!([{"type": "input_image", "image_url": "https://e.org/a.png"}])),
        ),
        shape(
            asked(&json!([{"type": "input_file", "file_id": "f", "filename": "a.pdf"}])),
            asked(&json!([{"type": "file", "file": {"file_id": "f", "filename": "a.pdf"}}])),
            asked(&json!([{"type": "input_file", "file_id": "f", "filename": "a.pdf"}])),
        ),
        shape(
            asked(&json!([{"type": "input_file", "file_url": "https://e.org/a.pdf", "filename": "a.pdf"}])),
            asked(&json!([text("(the file \"a.pdf\" that can't be shown here)")])),
            asked(&json!([{"type": "input_file", "file_url": "https://e.org/a.pdf", "filename": "a.pdf"}])),
        ),
        // Reasoning.
        shape(
            said(&json!([thinking, text("Thought.")])),
            said(&json!("Thought.")),
            said(&json!([thinking, text("Thought.")])),
        ),
        shape(said(&json!([reasoning])), said(&json!("")), said(&json!([reasoning]))),
        shape(
            json!({"role": "assistant", "reasoning_content": "Hm, quetzal.", "content": "Reasoned."}),
            said(&json!("Reasoned.")),
            json!({"role": "assistant", "reasoning_content": "Hm, quetzal.", "content": "Reasoned."}),
        ),
        // Nulls, empty lists, and fields of one provider.
        shape(
            dump,
            said(&json!("Dumped.")),
            json!({"role": "assistant", "content": "Dumped.", "annotations": []}),
        ),
        shape(
            json!({"role": "assistant", "content": null, "refusal": "Refused."}),
            said(&json!("Refused.")),
            json!({"role": "assistant", "refusal": "Refused."}),
        ),
        shape(
            json!({"role": "assistant", "content": "Well.", "refusal": "Refused."}),
            said(&json!([text("Well."), text("Refused.")])),
            json!({"role": "assistant", "content": "Well.", "refusal": "Refused."}),
        ),
        shape(
            said(&json!([{"type": "refusal", "refusal": "Refused."}])),
            said(&json!("Refused.")),
            said(&json!([{"type": "refusal", "refusal": "Refused."}])),
        ),
        shape(asked(&json!([cached])), asked(&json!([text("Cached.")])), asked(&json!([cached]))),
        shape(asked(&json!([])), asked(&json!("")), asked(&json!(""))),
        // Empty answers: the length limit or a content filter.
        shape(json!({"role": "assistant"}), said(&json!("")), said(&json!(""))),
        shape(said(&Value::Null), said(&json!("")), said(&json!(""))),
        // A spoken answer.
        shape(
            json!({"role": "assistant", "content": null, "audio": {"id": "a", "data": "AAAA", "transcript": "Spoken."}}),
            said(&json!("Spoken.")),
            json!({"role": "assistant", "audio": {"id": "a", "data": "AAAA", "transcript": "Spoken."}}),
        ),
    ]
}

fn converted_names_and_attachments() -> Vec<Shape> {
    vec![
        // Attachments without their data, which providers reject.
        shape(
            asked(
                &json!([{"type": "image_url", "image_url": {"url": null}}, {"type": "image_url", "image_url": ""}]),
            ),
            asked(&json!([text(UNSHOWN_IMAGE), text(UNSHOWN_IMAGE)])),
            asked(&json!([{"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": ""}])),
        ),
        shape(
            asked(
                &json!([{"type": "input_audio", "input_audio": {"format": "wav"}}, {"type": "file", "file": {"filename": "a.pdf"}}]),
            ),
            asked(&json!([
                text("(audio that can't be shown here)"),
                text("(the file \"a.pdf\" that can't be shown here)")
            ])),
            asked(
                &json!([{"type": "input_audio", "input_audio": {"format": "wav"}}, {"type": "file", "file": {"filename": "a.pdf"}}]),
            ),
        ),
        // Names that OpenAI rejects.
        shape(
            json!({"role": "user", "name": "Ada <Lovelace>", "content": "Named."}),
            json!({"role": "user", "name": "Ada__Lovelace_", "content": "Named."}),
            json!({"role": "user", "name": "Ada <Lovelace>", "content": "Named."}),
        ),
        shape(
            json!({"role": "user", "name": " ", "tool_call_id": "", "content": "Not named."}),
            asked(&json!("Not named.")),
            json!({"role": "user", "name": " ", "tool_call_id": "", "content": "Not named."}),
        ),
    ]
}

fn converted_calls() -> Vec<Shape> {
    let image = json!({"type": "image_url", "image_url": {"url": "https://e.org/a.png"}});
    let custom = json!({"id": "c3", "type": "custom", "custom": {"name": "run", "input": "ls \"x\""}});
    let old_call = calls(Some(Value::Null), &[call("function_find", "find", "{\"q\":1}")]);
    vec![
        shape(
            json!({"role": "assistant", "content": null, "tool_calls": [custom]}),
            calls(Some(Value::Null), &[call("c3", "run", r#"{"input":"ls \"x\""}"#)]),
            json!({"role": "assistant", "content": null, "tool_calls": [custom]}),
        ),
        shape(
            json!({"role": "tool", "tool_call_id": "c3", "name": "run", "content": null}),
            result("c3", ""),
            json!({"role": "tool", "tool_call_id": "c3", "name": "run", "content": ""}),
        ),
        shape(
            json!({"role": "assistant", "content": [], "tool_calls": [
                {"index": 0, "id": "c4", "function": {"name": "find", "arguments": "{}", "strict": null}}]}),
            calls(Some(Value::Null), &[call("c4", "find", "{}")]),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"index": 0, "id": "c4", "function": {"name": "find", "arguments": "{}"}}]}),
        ),
        shape(
            json!({"role": "tool", "tool_call_id": "c4", "content": [text("A"), {"type": "output_text", "text": "B"}, image]}),
            json!({"role": "tool", "tool_call_id": "c4", "content": "A\nB\n(an image that can't be shown here)"}),
            json!({"role": "tool", "tool_call_id": "c4", "content": [text("A"), {"type": "output_text", "text": "B"}, image]}),
        ),
        shape(
            json!({"role": "assistant", "content": null, "function_call": {"name": "find", "arguments": "{\"q\":1}"}}),
            old_call.clone(),
            old_call,
        ),
        shape(
            json!({"role": "function", "name": "find", "content": "Legacy."}),
            result("function_find", "Legacy."),
            result("function_find", "Legacy."),
        ),
    ]
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shape_is_kept_and_sent_in_both_forms(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let same = standard_shapes().into_iter().map(|same| shape(same.clone(), same.clone(), same));
    let shapes: Vec<Shape> = same
        .chain(converted_texts())
        .chain(converted_names_and_attachments())
        .chain(converted_calls())
        .collect();
    let column = |of: fn(&Shape) -> &Value| shapes.iter().map(of).cloned().collect::<Vec<_>>();
    let given = column(|shape| &shape.given);
    for part in given.chunks(5) {
        app.record("s", part).await;
    }
    assert_eq!(app.history("s").await, given);
    // The first context reads the messages from the database, the second one from memory.
    for _ in 0..2 {
        let context = app.context("s", &json!({})).await;
        for (sent, expected) in
            context["messages"].as_array().expect("a list").iter().zip(column(|s| &s.standard))
        {
            assert_eq!(*sent, expected);
        }
        let sent = context["messages"].as_array().expect("a list");
        assert_eq!(sent.len(), shapes.len());
        assert_openai_accepts(sent);
        assert_eq!(context["tokens"]["total"], tokens_of_openai(sent) - 3);
        let context = app.context("s", &json!({"fields": "all"})).await;
        for (sent, expected) in context["messages"].as_array().expect("a list").iter().zip(column(|s| &s.all))
        {
            assert_eq!(*sent, expected);
        }
    }
    for word in ["Given", "Written", "Thought", "Reasoned", "Refused", "Spoken", "Cached", "Legacy", "Dumped"]
    {
        let found = app.get(&format!("/search?q={word}")).await;
        assert_ne!(found["items"], json!([]), "{word}");
    }
    assert_eq!(app.get("/search?q=quetzal").await["items"], json!([]), "reasoning is not searched");
    // Messages without text become valid messages of the other format, too.
    let response = app.post("/sessions/s/context", json!({"format": "anthropic"})).await;
    let context = response.ok(200);
    assert_anthropic_accepts(&context);
    assert_eq!(context["tokens"]["total"], tokens_of_anthropic(&response.text) - 3);
    // A block of text has any name.
    assert!(context["messages"].to_string().contains(r#""Ada <Lovelace>:""#), "{context}");
}

/// Fields of assistants and tools that are sent on request count, and the budget limits them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_sent_fields_are_counted(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let long = "so it is ".repeat(1000);
    let fields = [
        json!({"role": "assistant", "content": "a", "reasoning_content": long}),
        json!({"role": "assistant", "content": "a", "provider_specific_fields": {"deep": [{"text": long}]}}),
        json!({"role": "assistant", "content": null, "audio": {"id": "a", "data": long, "transcript": "a"}}),
        json!({"role": "assistant", "content": [{"type": "reasoning", "text": long}]}),
        json!({"role": "assistant", "content": "a", "tool_calls": [
            {"id": "c", "type": "function", "note": long, "function": {"name": "f", "arguments": "{}"}}]}),
    ];
    for (index, message) in fields.iter().enumerate() {
        let session = format!("s{index}");
        app.record(&session, std::slice::from_ref(message)).await;
        let total = async |body: Value| {
            let context = app.context(&session, &body).await;
            assert_eq!(context.to_string().contains(&long), body["fields"] == "all", "{context}");
            context["tokens"]["total"].as_i64().expect("a number")
        };
        assert!(total(json!({})).await < 900, "{message}");
        assert_eq!(
            app.get(&format!("/sessions/{session}")).await["tokens"]["history"],
            total(json!({"fields": "standard"})).await - inserted(message)
        );
        let all = total(json!({"fields": "all"})).await;
        assert!((3000..5000).contains(&all), "{all} tokens: {message}");
        let limited = json!({"fields": "all", "max_tokens": all + 2, "mode": "off"});
        app.post(&format!("/sessions/{session}/context"), limited).await.problem(422, "budget-too-small");
        app.context(&session, &json!({"max_tokens": 900})).await;
    }
}

/// Returns the tokens of the inserted result of a call, and of the opening of a list that begins with the assistant.
fn inserted(message: &Value) -> i64 {
    let result = result("c", "No result of this call had been recorded at this point.");
    let opening = json!({"role": "user", "content": "(The conversation began earlier.)"});
    let mut inserted = Vec::new();
    inserted.extend(message.get("tool_calls").map(|_| result));
    inserted.extend((message["role"] == "assistant").then_some(opening));
    i64::try_from(tokens_of_openai(&inserted) - 3).expect("small")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extra_is_kept_and_returned_next_to_the_list(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let extra = |id: u32| json!({"adapter": {"id": id, "system": null, "messages": null}});
    let turn = [
        json!({"role": "assistant", "content": "zebra", "extra": extra(1)}),
        json!({"role": "user", "content": "a"}),
        json!({"role": "tool", "tool_call_id": "lost", "content": "b", "extra": extra(3)}),
        json!({"role": "user", "content": "c", "extra": extra(4)}),
        json!({"role": "user", "content": "d", "extra": null}),
    ];
    app.record("s", &turn).await;
    assert_eq!(app.history("s").await, turn);
    let plain = app.context("s", &json!({"system_prompt": "Be kind.", "fields": "all"})).await;
    assert_eq!((plain.get("extra"), plain.to_string().contains("adapter")), (None, false));
    for format in ["openai", "anthropic"] {
        let options = json!({"system_prompt": "Be kind.", "include_extra": true, "format": format});
        let context = app.context("s", &options).await;
        assert_eq!(context["tokens"]["system"], plain["tokens"]["system"]);
        assert!(!context["messages"].to_string().contains("adapter"));
        let found = context["extra"].as_array().expect("a list");
        let seqs: Vec<_> = found.iter().map(|found| found["seq"].as_i64().expect("a number")).collect();
        assert_eq!(seqs, [1, 3, 4]);
        for found in found {
            let position = usize::try_from(found["position"].as_u64().expect("a number")).expect("small");
            let seq = usize::try_from(found["seq"].as_u64().expect("a number")).expect("small");
            assert_eq!(found["extra"], extra(u32::try_from(seq).expect("small")));
            let text = turn[seq - 1]["content"].to_string();
            assert!(context["messages"][position]["content"].to_string().contains(&text), "{context:#}");
        }
    }
    assert_eq!(
        app.context("s", &json!({"include_extra": true, "max_tokens": 20, "mode": "off"})).await["extra"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(app.context("new", &json!({"include_extra": true})).await["extra"], json!([]));
    assert_eq!(app.get("/search?q=adapter").await["items"], json!([]), "data of adapters is not searched");
    let with = |extra: &Value| json!({"messages": [{"role": "user", "content": "e", "extra": extra}]});
    let large = json!({"large": "x".repeat(16 * 1024)});
    assert_eq!(app.post("/sessions/s/exchanges", with(&large)).await.fields(), ["messages[0].extra"]);
    assert_eq!(app.get("/sessions/s").await["last_seq"], 5);
    app.post("/sessions/s/exchanges", with(&json!("no object"))).await.ok(201);
    let context = app.context("s", &json!({"include_extra": true})).await;
    assert_eq!(context["extra"].as_array().map(Vec::len), Some(3));
}
