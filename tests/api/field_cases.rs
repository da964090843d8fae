//! Failures that users of other products reported: lists of messages that a provider rejects for ever, and a message or a time that ends
//! the memory of a client, because each later list contains it. Every message goes in by exchange, by sync and by import, and out in
//! both formats.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::lists::{
    assert_anthropic_accepts, assert_gemini_accepts, assert_openai_accepts, assert_strict_accepts,
    tokens_of_anthropic, tokens_of_openai,
};
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

/// Half of a surrogate pair, as encoders write it.
const HALF: &str = r"\ud83d";

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn calls(calls: &[Value]) -> Value {
    json!({"role": "assistant", "content": null, "tool_calls": calls})
}

fn result(id: &str, content: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": content})
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Stores JSON texts by exchange, by sync, and as an import. The sessions have the same history, and a sync of the same list finds it.
async fn store(app: &TestApp, session: &str, messages: &[String]) {
    let list = format!(r#"{{"messages":[{}]}}"#, messages.join(","));
    app.post(&format!("/sessions/{session}/exchanges"), list.clone()).await.ok(201);
    app.post(&format!("/sessions/{session}-sync/sync"), list.clone()).await.ok(201);
    let import = app.request(Method::POST, &format!("/sessions/{session}-import/import"));
    import.header("content-type", "application/x-ndjson").body(messages.join("\n")).await.ok(201);
    let history = app.history(session).await;
    for other in ["sync", "import"] {
        let other = format!("{session}-{other}");
        assert_eq!(app.history(&other).await, history, "{other}");
        app.post(&format!("/sessions/{other}/sync"), list.clone()).await.ok(200);
    }
    app.post(&format!("/sessions/{session}/sync"), list).await.ok(200);
}

/// Stores messages, and returns the lists that the formats `openai` and `anthropic` have, after all profiles were checked.
async fn lists(app: &TestApp, session: &str, messages: &[Value]) -> [Vec<Value>; 2] {
    store(app, session, &messages.iter().map(Value::to_string).collect::<Vec<_>>()).await;
    rendered(app, session).await
}

async fn rendered(app: &TestApp, session: &str) -> [Vec<Value>; 2] {
    let path = format!("/sessions/{session}/context");
    for (profile, assert_accepts) in [
        ("openai", assert_openai_accepts as fn(&[Value])),
        ("gemini", assert_gemini_accepts),
        ("strict", assert_strict_accepts),
    ] {
        for body in [json!({"profile": profile}), json!({"profile": profile, "user_message": "And now?"})] {
            let context = app.post(&path, body).await.ok(200);
            assert_accepts(context["messages"].as_array().expect("a list"));
        }
    }
    let openai = app.post(&path, "{}").await.ok(200);
    let openai_list = openai["messages"].as_array().expect("a list").clone();
    assert_eq!(openai["tokens"]["total"], tokens_of_openai(&openai_list) - 3);
    let response = app.post(&path, json!({"format": "anthropic"})).await;
    let anthropic = response.ok(200);
    assert_anthropic_accepts(&anthropic);
    assert_eq!(anthropic["tokens"]["total"], tokens_of_anthropic(&response.text) - 3);
    assert_eq!(openai["inserted"], anthropic["inserted"]);
    [openai_list, anthropic["messages"].as_array().expect("a list").clone()]
}

/// A02, A04, A12: results follow their calls, and only the surplus one is an orphan.
#[test_case(&[calls(&[call("t1", "a", "{}"), call("t2", "b", "{}")]), result("t1", "1"), result("t1", "again"), result("t2", "2")]; "a result twice")]
#[test_case(&[calls(&[call("t1", "a", "{}"), call("t2", "b", "{}")]), result("x", "again"), result("t1", "1"), result("t2", "2")]; "an orphaned result")]
#[test_case(&[calls(&[call("t1", "a", "{}")]), calls(&[call("t2", "b", "{}")]), result("t2", "2"), result("t1", "1"), result("t1", "again")]; "calls in two messages")]
#[tokio::test]
async fn results_follow_their_calls(turn: &[Value]) {
    let app = TestApp::on_sqlite(&[]).await;
    let [openai, anthropic] = lists(&app, "s", &[&[said("user", "Go.")], turn].concat()).await;
    let text = json!([openai, anthropic]).to_string();
    assert!(!text.contains("No result of this call"), "{text}");
    let names: Vec<&Value> = openai
        .iter()
        .flat_map(|message| message["tool_calls"].as_array().into_iter().flatten())
        .map(|call| &call["function"]["name"])
        .collect();
    assert_eq!(names, ["a", "b", "earlier_call"]);
    assert_eq!(openai.last().expect("a result")["content"], "again", "the surplus result comes last");
}

#[test_case(json!([{"type": "text", "text": "A reminder."}, {"type": "tool_result", "tool_use_id": "t1", "content": "1"}]); "in the same message")]
#[test_case(json!([{"type": "tool_result", "tool_use_id": "t1", "content": "1"}, {"type": "text", "text": "A reminder."}]); "after the result")]
#[tokio::test]
async fn reminder_follows_the_result(content: Value) {
    let app = TestApp::on_sqlite(&[]).await;
    let turn = [
        said("user", "Go."),
        json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "a", "input": {}}]}),
        json!({"role": "user", "content": content}),
    ];
    let [openai, anthropic] = lists(&app, "s", &turn).await;
    assert_eq!(openai[2], result("t1", "1"));
    assert_eq!(openai[3]["content"], json!([{"type": "text", "text": "A reminder."}]));
    let expected = json!([
        {"type": "tool_result", "tool_use_id": "t1", "content": "1"}, {"type": "text", "text": "A reminder."},
    ]);
    assert_eq!(anthropic[2]["content"], expected);
}

#[tokio::test]
async fn reminder_between_call_and_result_follows_the_result() {
    let app = TestApp::on_sqlite(&[]).await;
    for role in ["user", "system", "developer"] {
        let turn = [
            said("user", "Go."),
            calls(&[call("t1", "a", "{}")]),
            said(role, "A reminder."),
            result("t1", "1"),
            said("assistant", "Done."),
        ];
        let [openai, _] = lists(&app, role, &turn).await;
        let sent = if role == "user" { "user" } else { "system" };
        assert_eq!(openai[2..4], [result("t1", "1"), said(sent, "A reminder.")]);
    }
}

/// A05: ids that are repeated or missing within one message.
#[test_case(["d", "d"], ["d", "d"]; "the same id")]
#[test_case(["", ""], ["", ""]; "empty ids")]
#[test_case(["a", "b"], ["", ""]; "results without ids")]
#[test_case(["functions.f:0", "functions.f:1"], ["functions.f:0", "functions.f:1"]; "other characters")]
#[tokio::test]
async fn repeated_ids_are_made_unique(ids: [&str; 2], of_results: [&str; 2]) {
    let app = TestApp::on_sqlite(&[]).await;
    let turn = [
        said("user", "Go."),
        calls(&[call(ids[0], "first", "{}"), call(ids[1], "second", "{}")]),
        result(of_results[0], "of the first"),
        result(of_results[1], "of the second"),
    ];
    let [openai, _] = lists(&app, "s", &turn).await;
    assert_eq!(app.history("s").await, turn, "stored as sent");
    for (index, content) in ["of the first", "of the second"].iter().enumerate() {
        assert_eq!(openai[2 + index]["tool_call_id"], openai[1]["tool_calls"][index]["id"]);
        assert_eq!(openai[2 + index]["content"], *content);
    }
}

#[tokio::test]
async fn calls_and_results_without_ids_are_accepted() {
    let app = TestApp::on_sqlite(&[]).await;
    let turn = [
        said("user", "Go."),
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.5}}}, {"type": "x"}, 7]}),
        json!({"role": "tool", "content": {"found": true}}),
    ];
    let [openai, _] = lists(&app, "s", &turn).await;
    assert_eq!(openai[1]["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"a\":1.5}"}));
    assert_eq!(openai[1]["tool_calls"][1]["function"], json!({"name": "unnamed_tool", "arguments": "{}"}));
    assert_eq!(openai[2]["content"], "{\"found\":true}");
}

/// A14: notes of a hook or an agent between other messages.
#[test_case("system", &[said("user", "a"), said("system", "A note."), said("assistant", "b")])]
#[test_case("developer", &[said("user", "a"), said("assistant", "b"), said("developer", "A note."), said("user", "c")])]
#[test_case("system", &[said("user", "a"), said("system", "A note."), said("system", "Another."), said("assistant", "b")]; "two")]
#[tokio::test]
async fn system_messages_stand_between_others(role: &str, turn: &[Value]) {
    let app = TestApp::on_sqlite(&[]).await;
    let [openai, anthropic] = lists(&app, "s", turn).await;
    assert_eq!(app.history("s").await, turn, "stored as sent");
    assert!(openai.contains(&said("system", "A note.")), "{openai:?}");
    let mark = json!([{"type": "text", "text": "(system message)"}, {"type": "text", "text": "A note."}]);
    let is_marked = |message: &Value| {
        let content = message["content"].as_array().expect("blocks");
        message["role"] == "user" && content.windows(2).any(|pair| json!(pair) == mark)
    };
    assert!(anthropic.iter().any(is_marked), "{anthropic:?}");
    let all = app.context("s", &json!({"fields": "all"})).await;
    assert!(all["messages"].as_array().expect("a list").contains(&said(role, "A note.")), "{all}");
    assert_ne!(app.get("/search?q=note&session_id=s").await["items"], json!([]));
}

/// The first system message of a list is the system prompt. A history that was recorded with it is the same list.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leading_instructions_match_a_history_with_and_without_them(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn = [said("system", "Be kind."), said("user", "a"), said("assistant", "b")];
    for (session, recorded) in [("with", &turn[..]), ("without", &turn[1..])] {
        app.record(session, recorded).await;
        let path = format!("/sessions/{session}/sync");
        let list = |messages: &[Value]| json!({"messages": messages});
        let stored = recorded.len();
        assert_eq!(app.post(&path, list(&turn)).await.ok(200)["matched"], stored);
        let longer = [&turn[..], &[said("user", "c"), said("developer", "note")]].concat();
        let synced = app.post(&path, list(&longer)).await.ok(201);
        assert_eq!((&synced["matched"], &synced["appended"]), (&json!(stored), &json!(2)));
    }
}

/// A08, A10: names, ids and arguments of recorded calls that a provider rejects.
#[tokio::test]
async fn calls_are_repaired_alike_in_both_formats() {
    let app = TestApp::on_sqlite(&[]).await;
    let long = "x".repeat(100);
    let turn = [
        said("user", "Go."),
        calls(&[
            call("a", "multi_tool_use.parallel", r#"{"command": "ls -"#),
            call("b", "1 st", "[1]"),
            call(&long, &long, &format!(r#"{{"cut":"{HALF}"}}"#)),
            call("c", "", ""),
        ]),
    ];
    let [openai, anthropic] = lists(&app, "s", &turn).await;
    let functions: Vec<Value> = openai[1]["tool_calls"]
        .as_array()
        .expect("calls")
        .iter()
        .map(|call| {
            let function = &call["function"];
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
            json!([function["name"], arguments])
        })
        .collect();
    let blocks: Vec<Value> = anthropic[1]["content"]
        .as_array()
        .expect("blocks")
        .iter()
        .map(|block| json!([block["name"], block["input"]]))
        .collect();
    assert_eq!(functions, blocks);
    let expected = json!([
        ["multi_tool_use_parallel", {"arguments": "{\"command\": \"ls -"}],
        ["_1_st", {"arguments": "[1]"}],
        [long[..64], {"cut": "\u{fffd}"}],
        ["unnamed_tool", {}],
    ]);
    assert_eq!(Value::from(functions), expected);
    let all = app.context("s", &json!({"fields": "all"})).await;
    assert_eq!(all["messages"][1]["tool_calls"], turn[1]["tool_calls"], "all keeps the recording");
}

/// A13: a call of the provider's own tool whose result never came.
#[tokio::test]
async fn open_call_of_the_provider_is_sent_in_the_last_message_only() {
    let app = TestApp::on_sqlite(&[]).await;
    let search = |id: &str| json!({"type": "server_tool_use", "id": id, "name": "web_search", "input": {}});
    let found = |id: &str| json!({"type": "web_search_tool_result", "tool_use_id": id, "content": []});
    let text = |text: &str| json!({"type": "text", "text": text});
    let paused = json!({"role": "assistant", "content": [text("I search."), search("srvtoolu_1")]});
    let turn = [said("user", "Go."), paused.clone()];
    let [_, anthropic] = lists(&app, "s", &turn).await;
    assert_eq!(anthropic[1], paused, "the provider goes on");
    let context = app.context("s", &json!({"format": "anthropic", "user_message": "Well?"})).await;
    assert_eq!(context["messages"][1]["content"], json!([text("I search.")]));
    let more = [&turn[..], &[said("user", "Well?"), said("assistant", "Sorry.")]].concat();
    let [_, anthropic] = lists(&app, "t", &more).await;
    assert_eq!(anthropic[1]["content"], json!([text("I search.")]));
    // The turn went on with the result, in a second message.
    let resumed = json!({"role": "assistant", "content": [found("srvtoolu_1"), text("Found.")]});
    let [_, anthropic] =
        lists(&app, "u", &[&turn[..], &[resumed.clone(), said("user", "Thanks.")]].concat()).await;
    assert_eq!(
        anthropic[1]["content"],
        json!([text("I search."), search("srvtoolu_1"), found("srvtoolu_1"), text("Found.")])
    );
    let [_, anthropic] = lists(&app, "v", &[said("user", "Go."), resumed]).await;
    assert_eq!(anthropic[1]["content"], json!([text("Found.")]), "a result without its call");
}

/// A17: images whose declared type or data is wrong.
#[test_case("data:image/png;base64,/9j/4AAQSkZJRg==" => Some("data:image/jpeg;base64,/9j/4AAQSkZJRg==".to_owned()); "another type")]
#[test_case("data:image/jpg;base64,/9j/4AAQSkZJRg==" => Some("data:image/jpeg;base64,/9j/4AAQSkZJRg==".to_owned()); "a name that is no type")]
#[test_case("DATA:IMAGE/PNG;BASE64,iVBORw0K\r\nGgoAAAAN" => Some("data:image/png;base64,iVBORw0KGgoAAAAN".to_owned()); "line breaks and capitals")]
#[test_case("data:image/gif;base64,UklGRgAAAABXRUJQ" => Some("data:image/webp;base64,UklGRgAAAABXRUJQ".to_owned()); "WebP")]
#[test_case("data:image/png;base64,aGVsbG8=" => None; "a text")]
#[test_case("data:image/png;base64,iVBORw0K*" => None; "damaged")]
#[test_case("data:image/png;base64," => None; "empty")]
#[test_case("data:image/svg+xml;base64,PHN2Zy8+" => None; "SVG")]
#[test_case("file:///tmp/a.png" => None; "a local file")]
#[tokio::test]
async fn images_are_what_their_data_says(url: &str) -> Option<String> {
    let app = TestApp::on_sqlite(&[]).await;
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    let source = match url.split_once(',') {
        Some((head, data)) => {
            let media_type = head[5..].split(';').next();
            json!({"type": "base64", "media_type": media_type, "data": data})
        }
        None => json!({"type": "url", "url": url}),
    };
    let block = json!({"type": "image", "source": source});
    let mut sent = Vec::new();
    for (session, content) in [("part", part), ("block", block)] {
        let text = json!({"type": "text", "text": "Look."});
        let [openai, anthropic] =
            lists(&app, session, &[json!({"role": "user", "content": [text, content]})]).await;
        let image = &openai[0]["content"][1];
        let url = image["image_url"]["url"].as_str().map(str::to_owned);
        let source = &anthropic[0]["content"][1]["source"];
        let of_block = source["data"]
            .as_str()
            .map(|data| format!("data:{};base64,{data}", source["media_type"].as_str().expect("a type")));
        assert_eq!(url, of_block, "{openai:?} {anthropic:?}");
        if url.is_none() {
            assert_eq!(image["text"], "(an image that can't be shown here)");
        }
        sent.push(url);
    }
    assert_eq!(sent[0], sent[1]);
    sent.remove(0)
}

/// A19, A20: a failed turn, and a list that begins in the middle of a turn.
#[tokio::test]
async fn lists_begin_with_the_user_and_alternate_on_request() {
    let set: Set<'_> = &[("consolidation.threshold", "20"), ("consolidation.keep_recent", "5")];
    let app = TestApp::on_sqlite(set).await;
    let mut task = vec![said("user", "Work on it.")];
    for round in 0..60 {
        let id = format!("c{round}");
        task.extend([calls(&[call(&id, "step", "{}")]), result(&id, "ok")]);
    }
    for part in task.chunks(11) {
        app.record("task", part).await;
        let [openai, _] = rendered(&app, "task").await;
        assert_eq!(openai.iter().find(|message| message["role"] != "system").expect("one")["role"], "user");
    }
    let failed = [said("user", "a"), said("user", "b"), said("assistant", "c"), said("assistant", "d")];
    app.record("failed", &failed).await;
    let strict = app.context("failed", &json!({"profile": "strict", "user_message": "e"})).await;
    let expected = json!([said("user", "a\n\nb"), said("assistant", "c\n\nd"), said("user", "e")]);
    assert_eq!(strict["messages"], expected);
    app.record("interrupted", &[said("user", "a"), calls(&[call("c", "f", "{}")]), result("c", "ok")]).await;
    let strict = app.context("interrupted", &json!({"profile": "strict", "user_message": "e"})).await;
    assert_eq!(strict["messages"][3], said("assistant", "(no answer)"));
    assert_eq!(strict["inserted"], 1);
}

/// Gemini needs the signature of the thought before the first call of each step, and documents one for calls of other models.
#[tokio::test]
async fn signatures_of_thoughts_come_back() {
    let app = TestApp::on_sqlite(&[]).await;
    let mut signed = call("a", "f", "{}");
    signed["extra_content"] = json!({"google": {"thought_signature": "c2lnbmVk"}});
    let turn = [
        said("user", "a"),
        calls(&[signed, call("b", "g", "{}")]),
        result("a", "1"),
        result("b", "2"),
        calls(&[call("c", "h", "{}")]),
    ];
    let [openai, _] = lists(&app, "s", &turn).await;
    assert!(!json!(openai).to_string().contains("extra_content"));
    let gemini = app.context("s", &json!({"profile": "gemini"})).await;
    let signature = |message: usize, call: usize| {
        gemini["messages"][message]["tool_calls"][call]["extra_content"]["google"]["thought_signature"]
            .clone()
    };
    assert_eq!((signature(1, 0), signature(1, 1)), (json!("c2lnbmVk"), Value::Null));
    assert_eq!(signature(4, 0), "skip_thought_signature_validator");
    assert_eq!(gemini["messages"][3]["name"], "g");
}

/// A25: an answer without text.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_without_text_is_stored(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body = json!({"user_message": "a", "assistant_reply": null});
    app.post("/sessions/s/exchanges", body).await.ok(201);
    assert_eq!(app.history("s").await, [said("user", "a"), said("assistant", "")]);
    let body = json!({"messages": [said("user", "b")], "user_message": null, "assistant_reply": null});
    app.post("/sessions/s/exchanges", body).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["last_seq"], 3);
    rendered(&app, "s").await;
}

/// A26, A27: calls and results that overlap for longer than the limit of messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_calls_stop_neither_cursor_nor_context(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let start = |job: usize| calls(&[call(&format!("bg{job}"), "start", "{}")]);
    app.record("a26", &[said("user", "Crawl 0"), start(0)]).await;
    for job in 0..60 {
        let done = format!("{job} done");
        let turn = [
            said("user", &format!("And {}", job + 1)),
            start(job + 1),
            result(&format!("bg{job}"), "ok"),
            said("assistant", &done),
        ];
        app.record("a26", &turn).await;
    }
    let context = app.context("a26", &json!({"user_message": "How many?"})).await;
    let coverage = &context["coverage"];
    assert_eq!((&coverage["omitted"], &coverage["last_seq"]), (&json!([]), &json!(242)));
    assert!(coverage["summary_through"].as_i64() >= Some(142), "{coverage}");
    rendered(&app, "a26").await;
    app.stop().await;
    let app = TestApp::start(&backend, &[("consolidation.mode", "off")]).await;
    let turns: Vec<Value> =
        [said("user", "q"), said("assistant", "a")].into_iter().cycle().take(230).collect();
    app.record("a27", &turns).await;
    app.record("a27", &[result("x", "late"), said("assistant", "ok")]).await;
    let context = app.context("a27", &json!({})).await;
    let sent =
        context["messages"].as_array().expect("a list").iter().filter(|message| message["role"] != "system");
    assert_eq!((sent.count(), &context["inserted"]), (201, &json!(1)));
}

/// B01: half of a surrogate pair in any string of any body.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn halves_of_surrogate_pairs_are_replaced(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body = format!(
        r#"{{"user_message": "cut {HALF}", "assistant_reply": "\uDE00b", "metadata": {{"{HALF}": 1}}}}"#
    );
    app.post("/sessions/s/exchanges", body).await.ok(201);
    assert_eq!(app.history("s").await, [said("user", "cut \u{fffd}"), said("assistant", "\u{fffd}b")]);
    assert_eq!(app.get("/sessions/s").await["metadata"], json!({"\u{fffd}": 1}));
    store(&app, "t", &[format!(r#"{{"role":"user","content":"cut {HALF}","x":["{HALF}","\ud83d\ude00"]}}"#)])
        .await;
    assert_eq!(app.history("t").await[0]["x"], json!(["\u{fffd}", "\u{1f600}"]));
    let context = format!(r#"{{"user_message": "{HALF}", "system_prompt": "{HALF}."}}"#);
    let context = app.post("/sessions/s/context", context).await.ok(200);
    assert_eq!(context["messages"][0]["content"], "\u{fffd}.");
    app.put("/users/u/memory", format!(r#"{{"content": "a{HALF}"}}"#)).await.ok(200);
    assert_eq!(app.get("/users/u/memory").await["content"], "a\u{fffd}");
    for body in [
        format!(r#"{{"content": "b{HALF}"}}"#),
        format!(
            r#"{{"id": "c", "type": "function", "function": {{"name": "memory_write", "arguments": "{{\"content\": \"b\{HALF}\"}}"}}}}"#
        ),
    ] {
        let written = app.post("/sessions/s/tools/memory_write", body).await.ok(200);
        assert_eq!(written["is_error"], false, "{written}");
        assert_eq!(app.get("/users/default/memory").await["content"], "b\u{fffd}");
    }
    let message = format!(
        r#"{{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {{"name": "memory_write", "arguments": {{"content": "c{HALF}"}}}}}}"#
    );
    let request = app.request(Method::POST, "/mcp").header("content-type", "application/json").body(message);
    request.header("mcp-protocol-version", "2025-06-18").await.ok(200);
    assert_eq!(app.get("/users/default/memory").await["content"], "c\u{fffd}");
}

/// B02: NUL from binary output.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nul_is_removed_from_documents(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let written = app.post("/sessions/s/tools/memory_write", json!({"content": "a\0b"})).await.ok(200);
    assert_eq!(written["is_error"], false, "{written}");
    assert_eq!(app.get("/users/default/memory").await["content"], "ab");
    app.put("/users/default/memory", json!({"content": "\0c\0"})).await.ok(200);
    assert_eq!(app.get("/users/default/memory").await["content"], "c");
    lists(&app, "s", &[said("user", "a\0b")]).await;
    assert_eq!(app.history("s").await, [said("user", "a\0b")], "a message is stored as sent");
}

/// B07: a clock that is ahead, and other notations of times.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_of_clients_are_understood(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let now = || time::OffsetDateTime::now_utc();
    let text = |time: time::OffsetDateTime| {
        time.format(&time::format_description::well_known::Rfc3339).expect("a time")
    };
    let (before, ahead) = (text(now()), text(now() + time::Duration::minutes(10)));
    let stored = async |session: &str| {
        app.get(&format!("/sessions/{session}/messages")).await["items"][0]["created_at"]
            .as_str()
            .expect("a time")
            .to_owned()
    };
    let turn = json!({"user_message": "a", "assistant_reply": "b", "created_at": ahead});
    for _ in 0..2 {
        let request = app.post("/sessions/ahead/exchanges", &turn).header("idempotency-key", "k");
        let response = request.await.ok(201);
        let created_at = response["created_at"].as_str().expect("a time").to_owned();
        assert!((&*before..=&*text(now())).contains(&&*created_at), "{created_at}");
    }
    assert_eq!(app.get("/sessions/ahead").await["last_seq"], 2, "a repetition is the same request");
    let notations = [
        json!("2026-05-01T11:30:00Z"),
        json!("2026-05-01T13:30:00+02:00"),
        json!("2026-05-01T11:30:00"),
        json!("2026-05-01 11:30:00.000"),
        json!(1_777_635_000),
        json!(1_777_635_000_000_i64),
    ];
    for (index, time) in notations.iter().enumerate() {
        let turn = json!({"user_message": "a", "assistant_reply": "b", "created_at": time});
        app.post(&format!("/sessions/e{index}/exchanges"), turn).await.ok(201);
        let message = json!({"role": "user", "content": "a", "created_at": time});
        app.post(&format!("/sessions/y{index}/sync"), json!({"messages": [message]})).await.ok(201);
        for session in [format!("e{index}"), format!("y{index}")] {
            assert_eq!(stored(&session).await, "2026-05-01T11:30:00Z", "{time}");
        }
    }
    let message = |time: Value| json!({"messages": [{"role": "user", "content": "a", "created_at": time}]});
    for (session, time) in [("future", json!(ahead)), ("unknown", json!("tomorrow")), ("list", json!([]))] {
        app.post(&format!("/sessions/{session}/sync"), message(time)).await.ok(201);
        let time = stored(session).await;
        assert!((&*before..=&*text(now())).contains(&&*time), "{session}: {time}");
    }
}
