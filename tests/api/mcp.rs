//! `/mcp`: behaviour of the Model Context Protocol. `tests/clients.rs` runs the official client.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Request, TestClient, assert_includes};
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

fn message(app: &TestClient, method: &str, params: &Value) -> Request {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    app.request(Method::POST, "/mcp").header("accept", "application/json, text/event-stream").json(&body)
}

async fn result(request: Request) -> Value {
    let response = request.await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_includes(&response, &json!({"jsonrpc": "2.0", "id": 1}));
    assert!(response["result"].is_object(), "{response}");
    response["result"].clone()
}

fn tool(app: &TestClient, name: &str, arguments: &Value) -> Request {
    message(app, "tools/call", &json!({"name": name, "arguments": arguments}))
}

/// Returns the text of a tool result, and `true` if it is an error.
async fn called(request: Request) -> (String, bool) {
    let result = result(request).await;
    assert_eq!(result["content"].as_array().map(Vec::len), Some(1), "{result}");
    let text = result["content"][0]["text"].as_str().expect("a text").to_owned();
    (text, result["isError"].as_bool().expect("a flag"))
}

async fn names(request: Request) -> Vec<String> {
    let tools = result(request).await["tools"].clone();
    tools
        .as_array()
        .expect("a list")
        .iter()
        .map(|tool| tool["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mcp_requests_work_on_any_replica(backend: Backend) {
    let (one, other) = (TestApp::start(&backend, &[]).await, TestApp::start(&backend, &[]).await);
    let hello = json!({
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
    });
    let welcome = result(message(&one, "initialize", &hello)).await;
    assert_eq!(welcome["protocolVersion"], "2025-06-18");
    assert_eq!(welcome["serverInfo"]["name"], "precis");
    assert!(welcome["capabilities"]["tools"].is_object(), "{welcome}");
    assert_eq!(welcome["instructions"], one.get("/skills/memory").await.text);
    // The other replica has not seen an `initialize` request.
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    other.post("/mcp", &ready).await.ok(202);
    let tools = result(message(&other, "tools/list", &json!({}))).await["tools"].clone();
    let definitions = one.get("/tools?format=anthropic").await.ok(200);
    for (tool, definition) in
        tools.as_array().expect("a list").iter().zip(definitions["tools"].as_array().expect("a list"))
    {
        assert_includes(tool, &json!({"name": definition["name"], "description": definition["description"]}));
        let (schema, ours) = (&tool["inputSchema"], &definition["input_schema"]);
        assert_eq!(schema["required"], ours["required"]);
        for (name, property) in ours["properties"].as_object().expect("properties") {
            assert_eq!(schema["properties"][name], *property);
        }
        assert_eq!(
            tool["annotations"]["readOnlyHint"],
            !["memory_write", "memory_append", "memory_replace"].iter().any(|name| tool["name"] == *name)
        );
    }
    let (text, is_error) = called(tool(&one, "memory_write", &json!({"content": "Likes tea."}))).await;
    assert!(!is_error && text.contains("version 1"), "{text}");
    assert_eq!(one.get("/users/default/memory/revisions").await["items"][0]["author"], "mcp");
    let read = result(tool(&other, "memory_read", &json!({}))).await;
    assert_eq!(read["content"], json!([{"type": "text", "text": "Likes tea."}]));
    assert_includes(&read, &json!({"structuredContent": {"version": 1}, "isError": false}));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mcp_headers_determine_session_and_user(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn = json!({"user_message": "a", "assistant_reply": "b", "user_id": "ada"}).to_string();
    app.post("/sessions/caf%C3%A9%2F1/exchanges", turn).await.ok(201);
    for user in ["ada", "bo", "default"] {
        app.put(&format!("/users/{user}/memory"), json!({"content": user}).to_string()).await.ok(200);
    }
    let read = |arguments: Value| tool(&app, "memory_read", &arguments);
    // A call that names a user binds the session, as in HTTP.
    let bound = read(json!({"session_id": "bound", "user_id": "bo"}));
    assert_eq!(called(bound).await, ("bo".to_owned(), false));
    app.post("/sessions/bound/context", r#"{"user_id":"ada"}"#).await.problem(409, "session-user-mismatch");
    let session = |request: Request| request.header("x-precis-session", "caf%C3%A9%2F1");
    for (request, text, is_error) in [
        (read(json!({})), "default", false),
        (read(json!({"user_id": "bo"})), "bo", false),
        (read(json!({"session_id": "café/1", "user_id": null})), "ada", false),
        (read(json!({"session_id": "new", "user_id": "bo"})), "bo", false),
        (session(read(json!({}))), "ada", false),
        (read(json!({})).header("x-precis-user", "bo"), "bo", false),
        (read(json!({})).header("x-precis-user", "bo").header("x-precis-session", "new"), "bo", false),
        (session(read(json!({}))).header("x-precis-user", "bo"), "belongs to another user", true),
        (read(json!({"session_id": "café/1", "user_id": "bo"})), "belongs to another user", true),
        (read(json!({"session_id": ""})), "`session_id` must not be empty", true),
        (read(json!({"user_id": 7})), "`user_id` must be a string", true),
        // With a header, the tools have no arguments for session and user, and reject them.
        (read(json!({"user_id": "bo"})).header("x-precis-user", "ada"), "`user_id` is no argument", true),
        (session(read(json!({"session_id": "other"}))), "`session_id` is no argument", true),
    ] {
        let (output, error) = called(request).await;
        assert!(output.contains(text) && error == is_error, "{output}: expected {text}");
    }
    let arguments = async |request: Request| {
        let tools = result(request).await["tools"].clone();
        let properties = tools[0]["inputSchema"]["properties"].as_object().expect("properties").clone();
        properties.keys().cloned().collect::<Vec<_>>()
    };
    let list = || message(&app, "tools/list", &json!({}));
    assert_eq!(arguments(list()).await, ["session_id", "user_id"]);
    assert_eq!(arguments(session(list())).await, [""; 0]);
    for (name, value) in [("x-precis-user", "%zz"), ("x-precis-session", "")] {
        let rejected = read(json!({})).header(name, value).await;
        assert_eq!(rejected.fields(), [name]);
    }
}

/// Like `isolation` for the routes of the OpenAPI document: data of another tenant looks like missing data.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mcp_tools_do_not_reveal_other_tenants(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let owner = app.with_key(backend.key("owner", Scope::Admin).await.expose());
    let turn = json!({"user_message": "xylophon", "assistant_reply": "b", "user_id": "ada"}).to_string();
    owner.post("/sessions/theirs/exchanges", turn).await.ok(201);
    owner.put("/users/ada/memory", r#"{"content":"xylophon"}"#).await.ok(200);
    let stranger = app.with_key(backend.key("stranger", Scope::Admin).await.expose());
    for (name, arguments) in [
        ("memory_read", json!({})),
        ("search_history", json!({"query": "xylophon"})),
        ("memory_write", json!({"content": "mine"})),
        ("memory_read", json!({})),
    ] {
        let ask = async |session: &str, user: Option<&str>, by_header: bool| {
            let mut arguments = arguments.clone();
            if !by_header {
                arguments["session_id"] = session.into();
                arguments["user_id"] = user.into();
            }
            let mut request = tool(&stranger, name, &arguments);
            if by_header {
                request = request.header("x-precis-session", session);
                request =
                    user.into_iter().fold(request, |request, user| request.header("x-precis-user", user));
            }
            let response = result(request).await;
            assert!(!response.to_string().contains("xylophon"), "{response}");
            response
        };
        for by_header in [true, false] {
            for user in [None, Some("bo")] {
                let mut responses =
                    [ask("theirs", user, by_header).await, ask("nowhere", user, by_header).await];
                for response in &mut responses {
                    // The second write has another version and time.
                    response["structuredContent"]["version"].take();
                    response["structuredContent"]["updated_at"].take();
                    if name == "memory_write" {
                        response["content"].take();
                    }
                }
                assert_eq!(responses[0], responses[1], "{name}");
            }
        }
    }
    assert_eq!(owner.get("/users/ada/memory").await["content"], "xylophon");
    assert_eq!(owner.get("/users/ada/memory").await["version"], 1);
    message(&app, "tools/list", &json!({})).await.problem(401, "unauthorized");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mcp_key_with_read_scope_lists_and_calls_reading_tools_only(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let reader = app.with_key(backend.key("acme", Scope::Read).await.expose());
    let writer = app.with_key(backend.key("acme", Scope::Write).await.expose());
    let list = |app: &TestClient| message(app, "tools/list", &json!({}));
    assert_eq!(names(list(&reader)).await, ["memory_read", "search_history"]);
    assert_eq!(
        names(list(&writer)).await,
        ["memory_read", "memory_write", "memory_append", "memory_replace", "search_history"]
    );
    let write = json!({"content": "Likes tea.", "user_id": "ada"});
    let (output, is_error) = called(tool(&reader, "memory_write", &write)).await;
    assert!(is_error && output.contains("scope write"), "{output}");
    let (output, is_error) = called(tool(&reader, "memory_delete", &json!({}))).await;
    assert!(is_error && output.contains("The tools are memory_read, search_history."), "{output}");
    assert!(!called(tool(&writer, "memory_write", &write)).await.1);
    let read = json!({"user_id": "ada"});
    assert_eq!(called(tool(&reader, "memory_read", &read)).await, ("Likes tea.".to_owned(), false));
    // Without a user, the error names the way that the connection has.
    let read = || tool(&reader, "memory_read", &json!({}));
    for (request, advice) in [
        (
            read(),
            "this call has no user, and a memory document belongs to a user. Name the user with `user_id`",
        ),
        (read().header("x-precis-session", "s"), "this session has no user"),
        (read().header("x-precis-session", "s"), "x-precis-user"),
    ] {
        let (output, is_error) = called(request).await;
        assert!(is_error && output.contains(advice), "{output}");
    }
}

#[tokio::test]
async fn mcp_invalid_arguments_are_reported_to_the_model() {
    let app = TestApp::on_sqlite(&[("memory.max_bytes", "20")]).await;
    for (name, arguments, text) in [
        (
            "memory_delete",
            json!({}),
            "The tools are memory_read, memory_write, memory_append, memory_replace, search_history",
        ),
        ("memory_write", json!({}), "`content` is missing"),
        ("memory_write", json!({"content": "twenty-one characters"}), "at most 20"),
        ("search_history", json!({"query": "a", "max_results": 0}), "from 1 to 50"),
    ] {
        let (output, is_error) = called(tool(&app, name, &arguments)).await;
        assert!(is_error && output.contains(text), "{output}");
    }
    for none in [json!({"name": "memory_read"}), json!({"name": "memory_read", "arguments": null})] {
        let without = message(&app, "tools/call", &none);
        assert_eq!(called(without).await, ("Your memory document is empty.".to_owned(), false), "{none}");
    }
}

#[tokio::test]
async fn invalid_mcp_message_is_rejected_with_a_problem() {
    let app = TestApp::on_sqlite(&[("limits.max_json_depth", "10"), ("limits.max_body_bytes", "1000")]).await;
    app.post("/mcp", "{").await.problem(400, "malformed-json");
    assert_eq!(app.post("/mcp", "[]").await.fields(), ["body"]);
    assert_eq!(
        app.post("/mcp", format!(r#"{{"a":{}{}}}"#, "[".repeat(10), "]".repeat(10))).await.fields(),
        ["body"]
    );
    app.post("/mcp", format!("{:1001}", "{}")).await.problem(413, "body-too-large");
    for corrupt_message in [
        r#"{"method":"tools/list"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":["memory_read"]}"#,
    ] {
        let output = app.post("/mcp", corrupt_message).await.problem(400, "bad-request");
        assert!(output.contains("JSON-RPC"), "{output}");
    }
    let text = app.request(Method::POST, "/mcp").header("content-type", "text/plain").body("{}");
    text.await.problem(415, "unsupported-media-type");
    for method in [Method::GET, Method::DELETE, Method::PUT] {
        let response = app.request(method, "/mcp").await;
        response.problem(405, "method-not-allowed");
        assert_eq!(response.header("allow"), Some("POST"));
    }
    let old = message(&app, "tools/list", &json!({})).header("mcp-protocol-version", "1999-01-01");
    let output = old.await.problem(400, "bad-request");
    assert!(output.contains("1999-01-01"), "{output}");
    // Errors that the protocol defines are protocol errors.
    let unknown = message(&app, "tools/eat", &json!({})).await;
    assert_eq!(unknown["error"]["code"], -32601, "{unknown}");
}

#[tokio::test]
async fn invalid_mcp_parameters_are_reported_as_protocol_errors() {
    let app = TestApp::on_sqlite(&[]).await;
    for (method, params, wrong) in [
        (
            "tools/call",
            json!({"name": "memory_read", "arguments": "{}"}),
            "params.arguments: must be an object",
        ),
        (
            "tools/call",
            json!({"name": "memory_read", "arguments": []}),
            "params.arguments: must be an object",
        ),
        ("tools/call", json!({"arguments": {}}), "params.name: missing"),
        ("tools/call", json!({"name": 7}), "params.name: must be a string"),
        ("tools/call", json!(null), "params: missing"),
        (
            "tools/list",
            json!({"cursor": ""}),
            "params.cursor: unknown: there is one page, and so no cursor. Leave it out.",
        ),
        (
            "prompts/list",
            json!({"cursor": "x"}),
            "params.cursor: unknown: there is one page, and so no cursor. Leave it out.",
        ),
        ("resources/read", json!({}), "params.uri: missing"),
        ("resources/read", json!({"uri": 5}), "params.uri: must be a string"),
        ("prompts/get", json!({"name": 5}), "params.name: must be a string"),
        ("initialize", json!({}), "params.protocolVersion: missing"),
        ("initialize", json!({"protocolVersion": 7}), "params.protocolVersion: must be a string"),
        ("server/discover", json!(null), "params: missing"),
    ] {
        let response = message(&app, method, &params).await;
        assert_includes(&response, &json!({"id": 1, "error": {"code": -32602}}));
        assert_eq!(response["error"]["message"], wrong, "{method}");
    }
}

/// A later version of the protocol may define them.
#[tokio::test]
async fn unknown_mcp_parameters_are_ignored() {
    let app = TestApp::on_sqlite(&[]).await;
    let meta = json!({"progressToken": 1});
    for list in [json!({"_meta": meta, "cursor": null}), json!({"later": true}), json!(null)] {
        assert_eq!(names(message(&app, "tools/list", &list)).await.len(), 5, "{list}");
    }
    let call = json!({"name": "memory_read", "later": true, "_meta": meta});
    assert!(!called(message(&app, "tools/call", &call)).await.1);
}

/// The version of March 2025 has batches, which are not supported.
#[tokio::test]
async fn mcp_client_with_older_version_is_offered_a_supported_one() {
    let app = TestApp::on_sqlite(&[]).await;
    for (asked, agreed) in [
        ("2024-10-07", "2025-11-25"),
        ("2024-11-05", "2024-11-05"),
        ("2025-03-26", "2025-03-26"),
        ("2025-06-18", "2025-06-18"),
        ("2025-11-25", "2025-11-25"),
        ("2099-01-01", "2025-11-25"),
    ] {
        let hello = json!({
            "protocolVersion": asked, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        });
        let welcome = result(message(&app, "initialize", &hello)).await;
        assert_eq!(welcome["protocolVersion"], agreed, "{asked}");
    }
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    assert_eq!(app.post("/mcp", json!([ping]).to_string()).await.fields(), ["body"]);
}

/// precis sends no requests to clients, so a response is an error.
#[tokio::test]
async fn mcp_notifications_are_accepted_and_responses_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    let send = async |message: Value| {
        let sent = app.post("/mcp", &message).unchecked().await.expect("a response");
        (sent.status().as_u16(), sent.text().await.expect("a text"))
    };
    for method in ["notifications/initialized", "notifications/cancelled", "notifications/other"] {
        assert_eq!(send(json!({"jsonrpc": "2.0", "method": method})).await, (202, String::new()), "{method}");
    }
    for response in [json!({"result": {}}), json!({"error": {"code": -32603, "message": "no"}})] {
        let mut message = json!({"jsonrpc": "2.0", "id": 1});
        message.as_object_mut().expect("an object").extend(response.as_object().expect("an object").clone());
        let (status, output) = send(message).await;
        let output: Value = serde_json::from_str(&output).expect("JSON");
        assert_eq!((status, &output["error"]["code"]), (400, &json!(-32600)), "{output}");
    }
}

#[tokio::test]
async fn mcp_checks_the_host_like_other_routes() {
    let app = TestApp::on_sqlite(&[("server.allowed_hosts", "memory")]).await;
    let called = |host: &str| message(&app, "tools/list", &json!({})).header("host", host);
    assert_eq!(names(called("memory:8080")).await.len(), 5);
    called("evil.example").await.problem(403, "host-not-allowed");
}

/// Clients of four generations: each gets the version that it asks for, and its requests work.
#[tokio::test]
async fn each_supported_version_is_negotiated_and_served() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        for path in ["/mcp", "/mcp/"] {
            let send = |method: &str, params: Value| {
                let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
                let request = app.post(path, body).header("accept", "application/json, text/event-stream");
                // The versions up to 2025-03-26 do not have this header.
                if method == "initialize" || version <= "2025-03-26" {
                    request
                } else {
                    request.header("mcp-protocol-version", version)
                }
            };
            let hello = json!({
                "protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
            });
            let welcome = result(send("initialize", hello)).await;
            assert_eq!(welcome["protocolVersion"], version);
            for capability in ["tools", "resources", "prompts"] {
                assert!(welcome["capabilities"][capability].is_object(), "{welcome}");
            }
            app.post(path, json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await.ok(202);
            let listed = result(send("tools/list", json!({}))).await;
            for tool in listed["tools"].as_array().expect("a list") {
                assert!(tool["title"].is_string() && tool["outputSchema"]["type"] == "object", "{tool}");
            }
            // The data of each tool has the fields of its schema.
            for (tool, arguments) in [
                ("memory_write", json!({"content": "Likes tea."})),
                ("memory_read", json!({})),
                ("search_history", json!({"query": "tea"})),
            ] {
                let called = result(send("tools/call", json!({"name": tool, "arguments": arguments}))).await;
                let definition =
                    listed["tools"].as_array().expect("a list").iter().find(|known| known["name"] == tool);
                let schema = &definition.expect("it is listed")["outputSchema"];
                let fields =
                    |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
                assert_eq!(fields(&called["structuredContent"]), fields(&schema["properties"]), "{tool}");
            }
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mcp_resources_are_memory_document_and_summaries(backend: Backend) {
    let set = [("consolidation.threshold", "4"), ("consolidation.keep_recent", "1")];
    let app = TestApp::start(&backend, &set).await;
    let app = app.with_key(backend.key("acme", Scope::Write).await.expose());
    app.put("/users/ada/memory", r#"{"content":"Likes tea."}"#).await.ok(200);
    app.record_for("s/1".replace('/', "%2F").as_str(), "ada").await;
    app.record_turns("s%2F1", 0..2).await;
    app.context("s%2F1", &json!({})).await;
    let summary = app.get("/sessions/s%2F1").await["summary"]["text"].as_str().expect("a text").to_owned();
    assert!(!summary.is_empty());
    let uris = async |request: Request, list: &str, field: &str| {
        let items = result(request).await[list].as_array().expect("a list").clone();
        items.into_iter().map(|item| item[field].as_str().expect("a URI").to_owned()).collect::<Vec<_>>()
    };
    let list = || message(&app, "resources/list", &json!({}));
    let templates = || message(&app, "resources/templates/list", &json!({}));
    let session = |request: Request| request.header("x-precis-session", "s%2F1");
    assert_eq!(uris(list(), "resources", "uri").await, ["precis://memory"]);
    assert_eq!(uris(session(list()), "resources", "uri").await, ["precis://memory", "precis://summary"]);
    let template = "precis://sessions/{session_id}/summary";
    assert_eq!(uris(templates(), "resourceTemplates", "uriTemplate").await, [template]);
    assert_eq!(uris(session(templates()), "resourceTemplates", "uriTemplate").await, [""; 0]);
    let read = |uri: &str| message(&app, "resources/read", &json!({"uri": uri}));
    let of_session = "precis://sessions/s%2F1/summary";
    for (request, text) in [
        (session(read("precis://memory")), "Likes tea."),
        (read("precis://memory").header("x-precis-user", "ada"), "Likes tea."),
        (read("precis://memory").header("x-precis-user", "bo"), ""),
        (session(read("precis://summary")), &*summary),
        (read(of_session), &*summary),
    ] {
        let contents = result(request).await["contents"].clone();
        assert_eq!(contents[0]["text"], text, "{contents}");
    }
    for (request, code, text) in [
        (read("precis://memory"), -32602, "x-precis-user"),
        (session(read("precis://memory")).header("x-precis-user", "bo"), -32602, "belongs to another user"),
        (session(read("precis://summary")).header("x-precis-user", "bo"), -32602, "belongs to another user"),
        (session(read(of_session)), -32002, "there is no resource"),
        (read("precis://summary"), -32002, "there is no resource"),
        (read("precis://sessions/none/summary"), -32002, "the session \"none\" does not exist"),
        (
            read("precis://summary").header("x-precis-session", "new"),
            -32002,
            "the session \"new\" does not exist",
        ),
        (read("file:///etc/passwd"), -32002, "there is no resource"),
    ] {
        let response = request.await;
        assert_eq!(response["error"]["code"], code, "{response}");
        assert!(response["error"]["message"].as_str().expect("a text").contains(text), "{response}");
    }
}

#[tokio::test]
async fn mcp_prompt_is_the_memory_guide() {
    let app = TestApp::on_sqlite(&[]).await;
    let listed = result(message(&app, "prompts/list", &json!({}))).await;
    assert_eq!(listed["prompts"][0]["name"], "memory_guide");
    let prompt = result(message(&app, "prompts/get", &json!({"name": "memory_guide"}))).await;
    assert_eq!(prompt["messages"][0]["content"]["text"], app.get("/skills/memory").await.text);
    let unknown = message(&app, "prompts/get", &json!({"name": "other"})).await;
    assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
}

#[tokio::test]
async fn well_known_paths_are_missing_without_a_key_too() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let _key = backend.key("acme", Scope::Read).await;
    for path in ["oauth-protected-resource", "oauth-protected-resource/mcp", "oauth-authorization-server"] {
        app.get(&format!("/.well-known/{path}")).await.problem(404, "route-not-found");
    }
}
