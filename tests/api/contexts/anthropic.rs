//! Exchanges in the Anthropic format: stored as given, and sent in both formats.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::Response;
use crate::support::lists::{
    assert_anthropic_accepts, assert_openai_accepts, tokens_of_anthropic, tokens_of_openai,
};
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/sessions/s/exchanges";
const PNG: &str = "iVBORw0KGgo=";

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn image() -> Value {
    json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}})
}

fn tool_use(id: &str, input: &Value) -> Value {
    json!({"type": "tool_use", "id": id, "name": "find", "input": input})
}

/// Returns a turn with every kind of block, as the API accepts it.
fn turn() -> Vec<Value> {
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="});
    let plain = json!({"type": "text", "media_type": "text/plain", "data": "The kumquat is ripe."});
    let citations = json!([{"type": "web_search_result_location", "url": "https://e.org", "title": null,
        "encrypted_index": "abc", "cited_text": "Durian season."}]);
    let found = json!([{"type": "web_search_result", "url": "https://e.org", "title": "Fruit",
        "encrypted_content": "xyz", "page_age": null}]);
    vec![
        json!({"role": "user", "content": [
            text("Look:"), image(), {"type": "document", "title": "Plan", "source": pdf}, {"type": "document", "source": plain},
        ]}),
        json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm, quetzal.", "signature": "c2ln"}, text("I search. "),
            tool_use("toolu_1", &json!({"q": "rambutan", "n": [1, null]})), tool_use("toolu_2", &json!({})),
        ]}),
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": true, "content": "no lychee"},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("one"), image()]},
            text("And?"), text("Well?"),
        ]}),
        json!({"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "durian"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": found},
            text("According to "), {"type": "text", "text": "the papaya page", "citations": citations},
        ]}),
        json!({"role": "user", "content": [text("Thanks.")]}),
        json!({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "cmVk"}, text("Bye.")]}),
    ]
}

fn body(messages: &[Value]) -> Value {
    json!({"format": "anthropic", "messages": messages})
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_exchange_is_returned_without_loss(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn = turn();
    let stored = app.post(PATH, body(&turn)).await.ok(201);
    // The two results and the rest of their message are messages of their own.
    assert_eq!((&stored["first_seq"], &stored["message_count"]), (&json!(1), &json!(8)));
    let history = app.history("s").await;
    let part = |blocks: &[usize]| {
        let blocks: Vec<&Value> = blocks.iter().map(|at| &turn[2]["content"][*at]).collect();
        json!({"role": "user", "content": blocks})
    };
    let parts = [part(&[0]), part(&[1]), part(&[2, 3])];
    assert_eq!(history, [&turn[..2], &parts, &turn[3..]].concat());
    // The first context reads the messages from the database, the second one from memory.
    for _ in 0..2 {
        let response = app.post("/sessions/s/context", json!({"format": "anthropic"})).await;
        let context = response.ok(200);
        assert_eq!(context["messages"], Value::from(turn.clone()));
        assert_eq!((&context["inserted"], &context["cache"]["stable_messages"]), (&json!(0), &json!(6)));
        assert_anthropic_accepts(&context);
        assert_eq!(context["tokens"]["total"], tokens_of_anthropic(&response.text) - 3);
    }

    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "find", "arguments": arguments}});
    let sent = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let expected = json!([
        {"role": "user", "content": [
            text("Look:"), sent(&format!("data:image/png;base64,{PNG}")),
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjQ=", "filename": "Plan"}},
            text("The kumquat is ripe."),
        ]},
        {"role": "assistant", "content": "I search. ",
            "tool_calls": [call("toolu_1", r#"{"n":[1,null],"q":"rambutan"}"#), call("toolu_2", "{}")]},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error:\nno lychee"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one\n(an image that can't be shown here)"},
        {"role": "user", "content": [text("And?"), text("Well?")]},
        {"role": "assistant", "content": [text("According to "), text("the papaya page")]},
        {"role": "user", "content": [text("Thanks.")]},
        {"role": "assistant", "content": "Bye."},
    ]);
    for fields in ["standard", "all"] {
        let context = app.context("s", &json!({"fields": fields})).await;
        assert_eq!(context["messages"], expected);
        let messages = context["messages"].as_array().expect("a list");
        assert_openai_accepts(messages);
        assert_eq!(context["tokens"]["total"], tokens_of_openai(messages) - 3);
    }
    for word in ["kumquat", "rambutan", "lychee", "papaya"] {
        assert_eq!(
            app.get(&format!("/search?q={word}")).await["items"].as_array().map(Vec::len),
            Some(1),
            "{word}"
        );
    }
    assert_eq!(app.get("/search?q=lychee&role=tool").await["items"][0]["seq"], 3);
    assert_eq!(app.get("/search?q=quetzal").await["items"], json!([]), "thinking is not searched");

    let export = app.get("/sessions/s/export").await;
    app.delete("/sessions/s").await.ok(204);
    let import =
        app.request(Method::POST, "/sessions/s/import").header("content-type", "application/x-ndjson");
    import.body(export.text.clone()).await.ok(201);
    assert_eq!(app.history("s").await, history);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_of_both_formats_is_valid_in_both(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let call = json!({"id": "toolu_1", "type": "function", "function": {"name": "find", "arguments": "{}"}});
    let chat = [
        json!({"role": "user", "content": "Go."}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "toolu_1", "content": "found"}),
    ];
    // Repeated ids, an unanswered call, a result without a call, and blocks that end with thinking or are blank.
    let other = [
        json!({"role": "assistant", "content": [tool_use("toolu_1", &json!({})), tool_use("toolu_9", &json!({}))]}),
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "cache_control": {"type": "ephemeral"},
                "content": [text(" "), {"type": "text", "text": "b", "cache_control": null}]},
            {"type": "tool_result", "tool_use_id": "lost"}, text(""),
        ]}),
        json!({"role": "assistant", "content": [text("Cut "), {"type": "thinking", "thinking": "Hm", "signature": "s"}]}),
        json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}]}),
        json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}, image()]}),
        json!({"role": "user", "content": "Hi."}),
        json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "usage": {},
            "content": [{"type": "text", "text": "Done.", "citations": null}]}),
    ];
    for round in 0..3 {
        app.record("s", &chat).await;
        app.post(PATH, body(&other)).await.ok(201);
        let short =
            json!({"format": "anthropic", "user_message": [image()], "assistant_reply": [text("I see.")]});
        app.post(PATH, short).await.ok(201);
        let response = app
            .post(
                "/sessions/s/context",
                json!({"format": "anthropic", "user_message": [image()], "cache_control": true}),
            )
            .await;
        let context = response.ok(200);
        assert_anthropic_accepts(&context);
        assert_eq!(
            context["tokens"]["total"],
            tokens_of_anthropic(&response.text) - 3,
            "round {round}: {context:#}"
        );
        assert!(!response.text.contains(r#""citations":null"#), "{}", response.text);
        let context = app.context("s", &json!({})).await;
        let messages = context["messages"].as_array().expect("a list");
        assert_openai_accepts(messages);
        assert_eq!(context["tokens"]["total"], tokens_of_openai(messages) - 3);
    }
}

/// Dumps and other servers of the format have blocks that the API rejects: a call without input, an empty signature.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_blocks_are_completed_or_left_out(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let given = [
        json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm, quetzal.", "signature": ""}, text("Calling."),
            {"type": "tool_use", "id": "a", "name": "find", "input": null}, {"type": "tool_use", "id": "b", "name": "find"},
        ]}),
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": null, "is_error": null},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "tool_reference", "tool_name": "find"}]},
        ]}),
    ];
    app.post(PATH, body(&given)).await.ok(201);
    let response = app.post("/sessions/s/context", json!({"format": "anthropic"})).await;
    let context = response.ok(200);
    let sent = json!([text("Calling."), tool_use("a", &json!({})), tool_use("b", &json!({}))]);
    assert_eq!(context["messages"][1]["content"], sent);
    assert_anthropic_accepts(&context);
    assert_eq!(context["tokens"]["total"], tokens_of_anthropic(&response.text) - 3);
    assert_eq!(app.history("s").await[0], given[0]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_fields_of_blocks_are_counted(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let long = "so it is ".repeat(1000);
    let pdf = json!({"type": "url", "url": "https://e.org/a.pdf"});
    let mut noted = image();
    noted["source"]["note"] = long.clone().into();
    let result = |content: Value| json!({"type": "tool_result", "tool_use_id": "a", "content": [content]});
    let blocks = [
        json!({"type": "document", "title": "Plan", "context": long, "source": pdf}),
        noted.clone(),
        json!({"type": "search_result", "title": "t", "source": "s", "content": [text(&long)]}),
        result(noted),
        result(json!({"type": "text", "text": "a", "note": long})),
    ];
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("/sessions/s{index}");
        let turn = json!([{"role": "assistant", "content": [tool_use("a", &json!({}))]}, {"role": "user", "content": [block]}]);
        app.post(&format!("{path}/exchanges"), json!({"format": "anthropic", "messages": turn}))
            .await
            .ok(201);
        let response = app.post(&format!("{path}/context"), json!({"format": "anthropic"})).await;
        let context = response.ok(200);
        assert!(response.text.contains(&long), "{block}");
        let total = context["tokens"]["total"].as_u64().expect("a number");
        assert!((3000..5000).contains(&total), "{total} tokens: {block}");
        assert_eq!(context["tokens"]["total"], tokens_of_anthropic(&response.text) - 3, "{block}");
        let limited = json!({"format": "anthropic", "max_tokens": total + 2, "mode": "off"});
        let limited = app.post(&format!("{path}/context"), limited).await;
        // Only results of tools are shortened. The call is omitted before the newest turn, which a document of the user is.
        let coverage = &limited.json()["coverage"];
        let is_counted = coverage["shortened"][0]["seq"] == 2 || coverage["omitted"][0]["to_seq"] == 1;
        assert!(limited.status == 422 || is_counted, "{block}");
    }
}

/// Imports plain lines.
async fn import(app: &TestApp, session: &str, messages: &[Value]) -> Response {
    let lines: Vec<String> = messages.iter().map(Value::to_string).collect();
    let request = app.request(Method::POST, &format!("/sessions/{session}/import"));
    request.header("content-type", "application/x-ndjson").body(lines.join("\n")).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_accepts_the_messages_of_an_exchange_in_either_format(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let mut timed = turn();
    timed[2]["created_at"] = json!("2026-02-03T10:15:00Z");
    let chat = [
        json!({"role": "user", "content": "Go.", "extra": {"a": 1}}),
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}},
        ]}),
        json!({"role": "tool", "tool_call_id": "call_1", "content": "found"}),
    ];
    let list = [&timed[..], &chat].concat();
    app.post(PATH, body(&list)).await.ok(201);
    let imported = import(&app, "imported", &list).await.ok(201);
    let history = app.history("s").await;
    assert_eq!((app.history("imported").await, &imported["messages"]), (history.clone(), &json!(11)));
    for format in ["anthropic", "openai"] {
        let options = json!({"format": format, "fields": "all", "include_extra": true});
        let context = async |session| app.context(session, &options).await;
        let (exchanged, imported) = (context("s").await, context("imported").await);
        for part in ["messages", "tokens", "inserted", "extra"] {
            assert_eq!(imported[part], exchanged[part], "{format}");
        }
    }
    assert_eq!(app.get("/search?q=lychee&session_id=imported").await["items"][0]["seq"], 3);
    // The three messages from one line have its time.
    let page = app.get("/sessions/imported/messages").await;
    for at in 2..5 {
        assert_eq!(page["items"][at]["created_at"], "2026-02-03T10:15:00Z", "{at}");
    }
    // A repetition is recognised, and the export of the session has the same messages and times.
    assert_eq!(import(&app, "imported", &list).await.ok(200), imported);
    let export = app.get("/sessions/imported/export").await.text;
    let request = app.request(Method::POST, "/sessions/copy/import");
    request.header("content-type", "application/x-ndjson").body(export).await.ok(201);
    assert_eq!(app.get("/sessions/copy/messages").await.text, page.text);

    let result = json!({"type": "tool_result", "tool_use_id": "a"});
    for (line, field) in [
        (json!({"role": "robot", "content": [result]}), "role"),
        (json!({"role": "user", "content": [result], "extra": {"large": "x".repeat(16 * 1024)}}), "extra"),
    ] {
        let response = import(&app, "t", &[turn()[0].clone(), line]).await;
        assert_eq!(response.fields(), [format!("line 2, {field}")]);
    }
    app.get("/sessions/t").await.problem(404, "session-not-found");
}

/// The official type of the messages API rejects these blocks, or their text would be lost.
#[tokio::test]
async fn unusual_blocks_are_kept_and_repaired() {
    let app = TestApp::on_sqlite(&[]).await;
    let result = |content: Value| json!({"type": "tool_result", "tool_use_id": "a", "content": content});
    let unknown = json!([text("a"), {"type": "whatever", "text": "named"}]);
    let search_result =
        json!({"type": "search_result", "title": "t", "source": "s", "content": [text("found")]});
    let cases = [
        ("user", json!({"type": "whatever"}), r#"a part of the type \"whatever\""#),
        ("user", tool_use("a", &json!({})), "tool_use"),
        ("assistant", tool_use("", &json!({})), "call_"),
        ("assistant", tool_use("a", &json!([1])), r#"{"arguments":"[1]"}"#),
        ("assistant", json!({"type": "tool_result", "tool_use_id": "a"}), "tool_result"),
        ("assistant", image(), "an image"),
        ("user", json!({"type": "tool_result"}), "earlier_call"),
        ("user", result(unknown), "whatever"),
        ("user", result(json!([image(), "a text"])), "a text"),
        ("user", result(json!([{"type": "text", "text": null}])), "tool_result"),
        ("user", result(json!({"text": "an object"})), "an object"),
        ("user", result(json!([{"type": "image"}])), "an image"),
        ("user", result(json!([search_result])), "found"),
        ("user", json!({"type": "document", "source": null}), "a file"),
        ("user", json!({"type": "tool_result", "tool_use_id": "a", "is_error": "yes"}), "earlier_call"),
    ];
    for (index, (role, block, sent)) in cases.iter().enumerate() {
        let path = format!("/sessions/s{index}");
        let given = json!({"role": role, "content": [block]});
        app.post(&format!("{path}/exchanges"), json!({"messages": [given]})).await.ok(201);
        assert_eq!(app.history(&format!("s{index}")).await, [given]);
        let response = app.post(&format!("{path}/context"), json!({"format": "anthropic"})).await;
        assert_anthropic_accepts(&response.ok(200));
        assert_eq!(response.json()["tokens"]["total"], tokens_of_anthropic(&response.text) - 3, "{block}");
        assert!(response.text.contains(sent), "no {sent}: {}", response.text);
        let context = app.context(&format!("s{index}"), &json!({})).await;
        assert_openai_accepts(context["messages"].as_array().expect("a list"));
    }
    let results = json!([{"type": "tool_result", "tool_use_id": "a"}]);
    let response =
        app.post("/sessions/s/context", json!({"format": "anthropic", "user_message": results})).await;
    assert_eq!(response.fields(), ["user_message"]);
    app.get("/sessions/s").await.problem(404, "session-not-found");
}
