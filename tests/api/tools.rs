//! `GET /tools` and `POST /sessions/{session_id}/tools/{name}`.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

async fn call(app: &TestClient, session: &str, tool: &str, body: &Value) -> Response {
    app.post(&format!("/sessions/{session}/tools/{tool}"), body.to_string()).await
}

#[tokio::test]
async fn tool_definitions_have_the_format_of_the_model_api() {
    let app = TestApp::on_sqlite(&[]).await;
    let openai = app.get("/tools?format=openai").await.ok(200);
    assert_eq!(app.get("/tools").await.ok(200), openai);
    let anthropic = app.get("/tools?format=anthropic").await.ok(200);
    let pairs = openai["tools"].as_array().expect("a list").iter();
    let pairs: Vec<_> = pairs.zip(anthropic["tools"].as_array().expect("a list")).collect();
    let names: Vec<_> =
        pairs.iter().map(|(_, anthropic)| anthropic["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["memory_read", "memory_write", "memory_append", "memory_replace", "search_history"]);
    for (openai, anthropic) in pairs {
        assert_eq!(openai["type"], "function");
        let function = &openai["function"];
        assert_eq!(function["name"], anthropic["name"]);
        assert_eq!(function["description"], anthropic["description"]);
        assert_eq!(function["parameters"], anthropic["input_schema"]);
        assert_eq!(function["parameters"]["type"], "object");
    }
    assert_eq!(app.get("/tools?format=gemini").await.fields(), ["format"]);
    assert_eq!(app.get("/tools?api=openai").await.fields(), ["api"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tool_calls_of_all_formats_are_executed(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    // A tool call of chat completions, with additional fields.
    let write = json!({"id": "call_1", "type": "function", "index": 0, "function": {
        "name": "memory_write", "arguments": r###"{"content": "## Ada\nLikes tea."}"###,
    }});
    let response = call(&app, "s", "memory_write", &write).await.ok(200);
    assert_includes(&response, &json!({"tool": "memory_write", "is_error": false}));
    let data = json!({
        "user_id": "default", "session_exists": false, "version": 1, "words": 3, "hint": null,
    });
    assert_eq!((&response["user_id"], &response["data"]), (&json!("default"), &data));
    assert_eq!(app.get("/users/default/memory/revisions").await["items"][0]["author"], "tool");
    let content = response["content"].as_str().expect("a text");
    assert!(content.contains("version 1") && content.contains("## Your Memory"), "{content}");
    assert_eq!(response["result"], json!({"role": "tool", "tool_call_id": "call_1", "content": content}));
    // A block of the messages API.
    let read = json!({"type": "tool_use", "id": "toolu_1", "name": "memory_read", "input": {}});
    let response = call(&app, "s", "memory_read", &read).await.ok(200);
    let block = json!({
        "type": "tool_result", "tool_use_id": "toolu_1", "content": "## Ada\nLikes tea.", "is_error": false,
    });
    assert_eq!(response["result"], block);
    assert_includes(&response["data"], &json!({"version": 1, "words": 3}));
    // Arguments alone; without arguments, no body.
    let response = call(&app, "s", "memory_write", &json!({"content": "Likes coffee."})).await.ok(200);
    assert_includes(&response, &json!({"result": null, "data": {"version": 2}}));
    let response = app.request(Method::POST, "/sessions/s/tools/memory_read").await.ok(200);
    assert_eq!(response["content"], "Likes coffee.");
    let nulls = call(&app, "s", "memory_read", &json!({"type": null, "function": null})).await.ok(200);
    assert_eq!(nulls, response);
    let openai = |arguments: Value| json!({"id": "c", "type": "function", "function": {"name": "memory_read", "arguments": arguments}});
    let anthropic =
        |input: Value| json!({"type": "tool_use", "id": "t", "name": "memory_read", "input": input});
    for none in [
        openai(Value::Null),
        openai("null".into()),
        openai("".into()),
        anthropic(Value::Null),
        anthropic("null".into()),
    ] {
        let output = call(&app, "s", "memory_read", &none).await.ok(200);
        assert_includes(&output, &json!({"content": response["content"], "is_error": false}));
    }
    // A document that was never written has version 0; a blank one does not.
    let empty = |version: i64, updated_at: Value, content: &str| {
        json!({
            "user_id": "bo", "session_exists": false, "version": version, "words": 0, "updated_at": updated_at,
            "content": content,
        })
    };
    let never = app.post("/sessions/t/tools/memory_read?user_id=bo", "{}").await.ok(200);
    assert_eq!(never["data"], empty(0, Value::Null, ""));
    app.put("/users/bo/memory", r#"{"content":" \n"}"#).await.ok(200);
    let written = app.get("/users/bo/memory").await["updated_at"].clone();
    let blank = app.post("/sessions/t/tools/memory_read?user_id=bo", "{}").await.ok(200);
    assert_eq!(
        (&blank["content"], &never["content"]),
        (&json!("Your memory document is empty."), &blank["content"])
    );
    assert_eq!(blank["data"], empty(1, written, " \n"));
    // The replaced version is kept, and the next context contains the new one.
    let versions = app.get("/users/default/memory/revisions").await;
    let contents: Vec<_> =
        versions["items"].as_array().expect("a list").iter().map(|item| &item["content"]).collect();
    assert_eq!(contents, ["Likes coffee.", "## Ada\nLikes tea."]);
    let next = app.context("s", &json!({})).await;
    assert_eq!(next["messages"][0]["content"], "## Your Memory\n\nLikes coffee.");
    // Tool calls do not create a session.
    app.get("/sessions/s").await.problem(404, "session-not-found");
    // The result can be stored in the history unchanged.
    let turn = [
        json!({"role": "user", "content": "I like tea."}),
        json!({"role": "assistant", "content": null, "tool_calls": [write]}),
        json!({"role": "tool", "tool_call_id": "call_1", "content": content}),
        json!({"role": "assistant", "content": "Noted."}),
    ];
    assert_eq!(app.record("s", &turn).await["last_seq"], 4);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_determines_the_user_of_a_tool_call(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for (session, user) in [("a", "ada"), ("b", "bo")] {
        let turn = json!({"user_message": "a", "assistant_reply": "b", "user_id": user});
        app.post(&format!("/sessions/{session}/exchanges"), &turn).await.ok(201);
        let content = json!({"content": format!("{user}'s")});
        let written = call(&app, session, "memory_write", &content).await.ok(200);
        assert_includes(
            &written,
            &json!({"user_id": user, "exists": true, "data": {"session_exists": true}}),
        );
        let text = written["content"].as_str().expect("a text");
        assert!(text.ends_with(&format!("of the user \"{user}\".")), "{text}");
    }
    // An id that may be mistyped: the response names the user and the missing session, also to the model.
    let written = call(&app, "a\"2", "memory_write", &json!({"content": ""})).await.ok(200);
    assert_includes(
        &written,
        &json!({"user_id": "default", "exists": false, "data": {"session_exists": false}}),
    );
    let text = written["content"].as_str().expect("a text");
    assert!(text.contains(r#"The session "a\"2" has no messages yet and names no user"#), "{text}");
    let found = call(&app, "a2", "search_history", &json!({"query": "x"})).await.ok(200);
    assert_includes(&found["data"], &json!({"user_id": "default", "session_exists": false, "hits": []}));
    for (path, content) in [
        ("a/tools/memory_read", "ada's"),
        ("a/tools/memory_read?user_id=ada", "ada's"),
        ("b/tools/memory_read", "bo's"),
        ("new/tools/memory_read?user_id=ada", "ada's"),
        // The call before has bound the session.
        ("new/tools/memory_read", "ada's"),
        ("newer/tools/memory_read", "Your memory document is empty."),
    ] {
        let response = app.post(&format!("/sessions/{path}"), "{}").await.ok(200);
        assert_eq!(response["content"], content, "{path}");
    }
    app.post("/sessions/a/tools/memory_read?user_id=bo", "{}").await.problem(409, "session-user-mismatch");
    assert_eq!(app.post("/sessions/a/tools/memory_read?user_id=", "{}").await.fields(), ["user_id"]);
    assert_eq!(app.post("/sessions/a/tools/memory_read?user=ada", "{}").await.fields(), ["user"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tool_call_requires_the_scope_of_the_tool(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let reader = app.with_key(backend.key("acme", Scope::Read).await.expose());
    let writer = app.with_key(backend.key("acme", Scope::Write).await.expose());
    let content = json!({"content": "Likes tea."});
    let written = writer.post("/sessions/s/tools/memory_write?user_id=ada", &content).await;
    assert_eq!(written.ok(200)["user_id"], "ada");
    let rejected =
        call(&reader, "s", "memory_write", &json!({"content": "x"})).await.problem(403, "forbidden");
    assert!(rejected.contains("scope write"), "{rejected}");
    let unknown = call(&reader, "s", "memory_delete", &json!({})).await.problem(404, "tool-not-found");
    assert!(unknown.contains("The tools are memory_read, search_history."), "{unknown}");
    assert_eq!(call(&reader, "s", "memory_read", &json!({})).await.ok(200)["content"], "Likes tea.");
    assert_eq!(call(&app, "s", "memory_read", &json!({})).await.status, 401);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_history_searches_all_sessions_of_the_user(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turns = [
        ("garden", "ada", "When is the rhubarb ripe?\n\n2. 2026-01-01 forged", "In <April> & May."),
        ("kitchen", "ada", "Rhubarb cake, please.", "With custard?"),
        ("other", "bo", "My rhubarb is mine.", "Yes."),
    ];
    for (session, user, said, reply) in turns {
        let turn = json!({"user_message": said, "assistant_reply": reply, "user_id": user});
        app.post(&format!("/sessions/{session}/exchanges"), &turn).await.ok(201);
    }
    let search = async |arguments: Value| call(&app, "garden", "search_history", &arguments).await.ok(200);
    let found = search(json!({"query": "rhubarb", "days": 1})).await;
    let content = found["content"].as_str().expect("a text");
    let hits = found["data"]["hits"].as_array().expect("hits");
    let sessions: Vec<_> = hits.iter().map(|hit| hit["session_id"].as_str().expect("an id")).collect();
    assert_eq!(hits.len(), 2, "{found}");
    assert!(sessions.contains(&"garden") && sessions.contains(&"kitchen"), "{found}");
    let place = sessions.iter().position(|session| *session == "garden").expect("it is there");
    let hit = &hits[place];
    let minute = &hit["created_at"].as_str().expect("a time")[..16].replace('T', " ");
    let snippet = "When is the **rhubarb** ripe? 2. 2026-01-01 forged";
    let lines = format!(
        "\n\n{}. {minute} UTC, session \"garden\" (this one), message 1, user: {snippet}\n   after, message 2, assistant: In \
         <April> & May.",
        place + 1
    );
    assert!(content.starts_with("2 found, best first.") && content.contains(&lines), "{content}");
    assert_includes(hit, &json!({"seq": 1, "role": "user", "snippet": snippet}));
    let after = json!([{"seq": 2, "role": "assistant", "text": "In <April> & May."}]);
    assert_includes(hit, &json!({"before": [], "after": after}));
    let long = "rain ".repeat(50);
    let [one, two, three] = [("call_1", "a.b"), ("call_2", "c"), ("call_3", "d")].map(
        |(id, name)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{\n}"}}),
    );
    let turn = [
        json!({"role": "user", "content": long}),
        json!({"role": "user", "content": "Is the zucchini ripe?"}),
        json!({"role": "assistant", "content": "I look.", "tool_calls": [one, two]}),
        json!({"role": "tool", "tool_call_id": "call_1", "content": "zucchini: no"}),
        json!({"role": "assistant", "content": null, "tool_calls": [three]}),
    ];
    app.record("garden", &turn).await;
    let beside = search(json!({"query": "zucchini"})).await;
    let content = beside["content"].as_str().expect("a text");
    let (cut, calls) = (format!("{}…", &long[..200]), "I look.; calls a.b({ }); calls c({ })");
    for lines in [
        format!(
            "message 4, user: Is the **zucchini** ripe?\n   before, message 3, user: {cut}\n   after, message 5, \
             assistant: {calls}"
        ),
        format!(
            "message 6, tool: **zucchini**: no\n   before, message 5, assistant: {calls}\n   after, message 7, \
             assistant: calls d({{ }})"
        ),
    ] {
        assert!(content.contains(&lines), "{content}");
    }
    assert_eq!(
        search(json!({"query": "rhubarb", "max_results": 1})).await["data"]["hits"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(
        search(json!({"query": "rhubarb -cake"})).await["data"]["hits"].as_array().map(Vec::len),
        Some(1)
    );
    let none = search(json!({"query": "zeppelin"})).await;
    assert_includes(&none, &json!({"is_error": false, "data": {"hits": [], "marks": null}}));
    let mistake = search(json!({"query": "-cake"})).await;
    assert!(mistake["content"].as_str().expect("a text").contains("leave out"), "{mistake}");
    assert_eq!(mistake["is_error"], true);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_the_memory_document_are_changed(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let content = async || app.get("/users/default/memory").await["content"].clone();
    for (tool, arguments, document) in [
        ("memory_append", json!({"text": "Likes tea."}), "Likes tea."),
        ("memory_append", json!({"text": "Lives in Ulm.\n"}), "Likes tea.\nLives in Ulm.\n"),
        ("memory_append", json!({"text": "Has a dog."}), "Likes tea.\nLives in Ulm.\nHas a dog."),
        (
            "memory_replace",
            json!({"old_text": "Ulm", "new_text": "Köln"}),
            "Likes tea.\nLives in Köln.\nHas a dog.",
        ),
        ("memory_replace", json!({"old_text": "\nHas a dog.", "new_text": ""}), "Likes tea.\nLives in Köln."),
    ] {
        let response = call(&app, "s", tool, &arguments).await.ok(200);
        assert_eq!(response["is_error"], false, "{response}");
        assert_eq!(content().await, document);
    }
    for (old_text, problem) in [("Bonn", "is not in"), ("Li", "occurs 2 times")] {
        let response =
            call(&app, "s", "memory_replace", &json!({"old_text": old_text, "new_text": "x"})).await.ok(200);
        assert!(response["content"].as_str().expect("a text").contains(problem), "{response}");
    }
    assert_eq!(app.get("/users/default/memory").await["version"], 5);
    // Concurrent edits: none is lost.
    let edits =
        (0..10).map(|number| {
            let app = &app;
            async move {
                call(app, "s", "memory_append", &json!({"text": format!("Fact {number}.")})).await.ok(200)
            }
        });
    futures_util::future::join_all(edits).await;
    let content = content().await;
    for number in 0..10 {
        let fact = format!("Fact {number}.");
        assert_eq!(content.as_str().expect("a text").matches(&fact).count(), 1, "{content}");
    }
}

/// A model that calls the tool nevertheless receives an explanation.
#[tokio::test]
async fn search_history_is_not_offered_without_index() {
    let app = TestApp::on_sqlite(&[("search.enabled", "false")]).await;
    let names = app.get("/tools?format=anthropic").await.ok(200);
    let names: Vec<_> =
        names["tools"].as_array().expect("a list").iter().map(|tool| tool["name"].clone()).collect();
    assert_eq!(names, ["memory_read", "memory_write", "memory_append", "memory_replace"]);
    assert!(!app.get("/skills/memory").await.text.contains("search_history"));
    let asked = json!({"include_memory_skill": true});
    assert!(!app.context("s", &asked).await["messages"].to_string().contains("search_history"));
    let output = call(&app, "s", "search_history", &json!({"query": "tea"})).await.ok(200);
    assert!(output["content"].as_str().expect("a text").contains("switched off"), "{output}");
    assert_eq!(output["is_error"], true);
}

#[tokio::test]
async fn invalid_arguments_are_reported_to_the_model() {
    let app = TestApp::on_sqlite(&[("memory.max_bytes", "20")]).await;
    let openai = |arguments: &str, tool: &str| json!({"id": "c", "type": "function", "function": {"name": tool, "arguments": arguments}});
    for (tool, body, output) in [
        ("memory_write", openai("{}", "memory_write"), "`content` is missing"),
        ("memory_write", openai(r#"{"content": "a"#, "memory_write"), "not JSON"),
        ("memory_write", openai(r#"{"content": "twenty-one characters"}"#, "memory_write"), "at most 20"),
        ("memory_write", openai(r#"{"content": "\ud80"}"#, "memory_write"), "not JSON"),
        ("memory_write", json!({"content": "a", "mode": "append"}), "`mode` is no argument"),
        ("memory_append", json!({"text": " "}), "`text` is empty"),
        ("memory_append", json!({"text": "twenty-one characters"}), "at most 20"),
        ("memory_replace", json!({"old_text": "", "new_text": "a"}), "`old_text` is empty"),
        ("memory_replace", json!({"old_text": "a"}), "`new_text` is missing"),
        ("memory_replace", json!({"old_text": "a", "new_text": "b"}), "document is empty"),
        ("memory_read", json!({"user": "bo"}), "no arguments"),
        ("search_history", json!({"query": "a", "max_results": 51}), "from 1 to 50"),
        ("search_history", json!({}), "`query` is missing"),
    ] {
        let response = call(&app, "s", tool, &body).await.ok(200);
        let content = response["content"].as_str().expect("a text");
        assert!(content.contains(output) && content.contains("Nothing was"), "{content}");
        assert_includes(&response, &json!({"is_error": true, "data": null}));
        if body["id"].is_string() {
            assert_eq!(response["result"], json!({"role": "tool", "tool_call_id": "c", "content": content}));
        }
    }
    let block = json!({"type": "tool_use", "id": "t", "name": "memory_write", "input": {"text": "a"}});
    let response = call(&app, "s", "memory_write", &block).await.ok(200);
    assert_includes(&response["result"], &json!({"is_error": true, "tool_use_id": "t"}));
    assert_eq!(app.get("/users/default/memory").await["version"], 0);
}

#[tokio::test]
async fn invalid_tool_request_is_rejected_with_a_problem() {
    let app = TestApp::on_sqlite(&[]).await;
    let at = |tool: &str| format!("/sessions/s/tools/{tool}");
    let problem = app.post(&at("memory_delete"), "{}").await.problem(404, "tool-not-found");
    // The same text as over MCP.
    assert!(
        problem.contains(
            "The tools are memory_read, memory_write, memory_append, memory_replace, search_history."
        ),
        "{problem}"
    );
    for (body, fields) in [
        (r#"{"type":"function","function":{"name":"memory_read"}}"#, &["id"][..]),
        (r#"{"type":"tool_use","id":"a","name":"memory_write","input":{}}"#, &["name"]),
        (
            r#"{"type":"function","id":"a","function":{"name":"memory_write","arguments":"{}"}}"#,
            &["function.name"],
        ),
        (r#"{"type":"function_call","call_id":"a","name":"memory_read","arguments":"{}"}"#, &["type"]),
        ("[]", &["body"]),
        ("null", &["body"]),
    ] {
        assert_eq!(app.post(&at("memory_read"), body).await.fields(), fields, "{body}");
    }
    app.post(&at("memory_read"), "{").await.problem(400, "malformed-json");
    let text = app.request(Method::POST, &at("memory_read")).header("content-type", "text/plain").body("{}");
    text.await.problem(415, "unsupported-media-type");
}

#[tokio::test]
async fn memory_write_of_long_document_returns_a_hint() {
    let app = TestApp::on_sqlite(&[]).await;
    for (words, hinted) in [(330, false), (331, true)] {
        let content = json!({"content": "tea ".repeat(words)});
        let response = call(&app, "s", "memory_write", &content).await.ok(200);
        assert_includes(&response, &json!({"data": {"words": words}, "is_error": false}));
        assert_eq!(response["data"]["hint"].is_string(), hinted, "{words}");
        assert_eq!(response["content"].as_str().expect("a text").contains("about 300"), hinted, "{words}");
    }
}
