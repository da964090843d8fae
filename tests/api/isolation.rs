//! No route distinguishes data of another tenant from data that does not exist. The routes come from the OpenAPI
//! document, so that new ones are covered.
//!
//! One tenant has data. Two other tenants have no data and a key with all scopes. One uses the ids of that data, the
//! other one uses unknown ids. Both must get the same responses, and all data must stay unchanged. Requests are
//! generated from the schemas of the document. If a schema does not describe a body completely, [`bodies`] has one.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use crate::support::factor::test_factor;
use precis::domain::api_key::Scope;
use precis::domain::id::TenantId;
use precis::service::keys::create_key;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use test_case::test_case;

/// A word in every text of the tenant's data.
const MARK: &str = "xylophon";
/// Routes that return no data of tenants.
const ROUTES_WITHOUT_DATA: [&str; 3] = ["/livez", "/metrics", "/readyz"];

/// The ids in the requests. Existing and unknown ids have the same length, because the sizes of responses are compared.
struct Ids {
    session: &'static str,
    user: &'static str,
}

const THEIRS: Ids = Ids { session: "session-aaaa", user: "user-aaaa" };
const NOWHERE: Ids = Ids { session: "session-zzzz", user: "user-zzzz" };

#[derive(Clone, Debug)]
struct Request {
    path: String,
    header: Option<(String, String)>,
    body: Option<(String, String)>,
}

struct Operation<'a> {
    document: &'a Value,
    method: Method,
    path: &'a str,
    about: &'a Value,
}

fn operations(document: &Value) -> Vec<Operation<'_>> {
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let method = method.to_uppercase().parse().expect("a method");
            if !ROUTES_WITHOUT_DATA.contains(&path.as_str()) {
                found.push(Operation { document, method, path, about: operation });
            }
        }
    }
    assert!(found.len() >= 14);
    found
}

/// Bodies by the name of their schema or by media type, for schemas whose generated values would mostly be rejected.
fn bodies(name: &str, ids: &Ids) -> Vec<String> {
    let turn = json!({"user_message": "hello", "assistant_reply": "hi"});
    let mut of_user = turn.clone();
    of_user["user_id"] = ids.user.into();
    let lines = "{\"role\":\"user\",\"content\":\"hello\"}\n{\"role\":\"assistant\",\"content\":\"hi\"}\n";
    match name {
        "ExchangeRequest" => vec![turn.to_string(), of_user.to_string()],
        "SyncRequest" => {
            let list = json!({"messages": [{"role": "user", "content": "hello"}]});
            vec![list.to_string(), json!({"messages": []}).to_string()]
        }
        "application/x-ndjson" => vec![lines.to_owned()],
        // Arguments of the three tools. Each tool also receives those of the others, like a mistake of a model.
        "ToolRequest" => {
            let search = json!({"query": MARK, "max_results": 50});
            vec!["{}".to_owned(), json!({"content": "mine"}).to_string(), search.to_string()]
        }
        _ => Vec::new(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl Operation<'_> {
    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let reference = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
        reference.map_or(schema, |pointer| self.document.pointer(pointer).expect("a schema"))
    }

    /// Returns a value for a field or parameter.
    fn sample(&self, name: &str, schema: &Value, ids: &Ids) -> Value {
        match name {
            "session_id" | "forked_from" => return ids.session.into(),
            "user_id" => return ids.user.into(),
            "revision" => return 1.into(),
            "q" => return MARK.into(),
            _ => {}
        }
        let schema = self.resolve(schema);
        if let Some(choice) = ["oneOf", "anyOf"].iter().find_map(|of| schema[*of].as_array()) {
            let sound = choice.iter().find(|choice| choice["type"] != "null").expect("a choice");
            return self.sample(name, sound, ids);
        }
        if let Some(value) = schema["enum"].get(0).or(schema.get("example")) {
            return value.clone();
        }
        let kind = if schema["type"].is_array() { &schema["type"][0] } else { &schema["type"] };
        match kind.as_str() {
            Some("integer" | "number") => schema.get("minimum").cloned().unwrap_or(1.into()),
            Some("boolean") => true.into(),
            Some("array") => json!([]),
            Some("object") => self.object(schema, ids, true),
            _ => "text".into(),
        }
    }

    fn object(&self, schema: &Value, ids: &Ids, whole: bool) -> Value {
        let required =
            |name: &str| schema["required"].as_array().is_some_and(|list| list.contains(&name.into()));
        let fields = schema["properties"].as_object().into_iter().flatten();
        let fields = fields.filter(|(name, _)| whole || required(name));
        Value::Object(fields.map(|(name, schema)| (name.clone(), self.sample(name, schema, ids))).collect())
    }

    fn bodies(&self, ids: &Ids) -> Vec<Option<(String, String)>> {
        let Some(content) = self.about["requestBody"]["content"].as_object() else {
            return vec![None];
        };
        let mut found = Vec::new();
        for (media_type, content) in content {
            let schema = &content["schema"];
            let name = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()).unwrap_or(media_type);
            let mut of_type = bodies(name, ids);
            if of_type.is_empty() {
                let schema = self.resolve(schema);
                of_type = [true, false].map(|whole| self.object(schema, ids, whole).to_string()).to_vec();
            }
            found.extend(of_type.into_iter().map(|body| Some((media_type.clone(), body))));
        }
        found
    }

    fn parameters(&self, place: &str) -> Vec<(&str, &Value)> {
        let all = self.about["parameters"].as_array().into_iter().flatten();
        let here = all.filter(|parameter| parameter["in"] == place);
        here.map(|parameter| (parameter["name"].as_str().expect("a name"), &parameter["schema"])).collect()
    }

    /// Returns the paths with these ids, one for each value of an enumeration.
    fn paths(&self, ids: &Ids) -> Vec<String> {
        let mut paths = vec![self.path.to_owned()];
        for (name, schema) in self.parameters("path") {
            let words = self.resolve(schema)["enum"].as_array().cloned();
            let words = words.unwrap_or_else(|| vec![self.sample(name, schema, ids)]);
            let fill = |path: &String| {
                let fill = |word: &Value| path.replace(&format!("{{{name}}}"), &text(word));
                words.iter().map(fill).collect::<Vec<_>>()
            };
            paths = paths.iter().flat_map(fill).collect();
        }
        assert!(paths.iter().all(|path| !path.contains('{')), "{paths:?}");
        paths
    }

    /// Returns the requests with these ids. Those with other ids differ in nothing else.
    fn requests(&self, ids: &Ids, pages: &BTreeMap<String, String>) -> Vec<Request> {
        self.paths(ids).iter().flat_map(|path| self.requests_to(path, ids, pages)).collect()
    }

    /// Returns requests without parameters, with each parameter, and with each header; each of them with each body.
    fn requests_to(&self, path: &str, ids: &Ids, pages: &BTreeMap<String, String>) -> Vec<Request> {
        // A search needs a query; it searches for existing text.
        let q = self.parameters("query").iter().any(|(name, _)| *name == "q");
        let path = if q { format!("{path}?q={MARK}") } else { path.to_owned() };
        let mut heads = vec![(path.clone(), None)];
        for (name, schema) in self.parameters("query") {
            let value = match (name, pages.get(self.path)) {
                ("cursor", Some(page)) => page.clone(),
                _ => text(&self.sample(name, schema, ids)),
            };
            if !(q && name == "q") {
                let sign = if q { '&' } else { '?' };
                heads.push((format!("{path}{sign}{name}={value}"), None));
            }
        }
        for (name, schema) in self.parameters("header") {
            let values = match name.to_lowercase().as_str() {
                "if-match" => ["\"1\"", "\"2\"", "*"].map(str::to_owned).to_vec(),
                "idempotency-key" => vec!["key".to_owned()],
                _ => vec![text(&self.sample(name, schema, ids))],
            };
            heads.extend(values.into_iter().map(|value| (path.clone(), Some((name.to_owned(), value)))));
        }
        let bodies = self.bodies(ids);
        let with = |(path, header): (String, Option<_>)| {
            bodies
                .iter()
                .map(move |body| Request { path: path.clone(), header: header.clone(), body: body.clone() })
                .collect::<Vec<_>>()
        };
        heads.into_iter().flat_map(with).collect()
    }

    async fn ask(&self, app: &TestClient, request: &Request) -> Response {
        let mut sent = app.request(self.method.clone(), &request.path);
        if let Some((name, value)) = &request.header {
            sent = sent.header(name, value);
        }
        if let Some((media_type, body)) = &request.body {
            sent = sent.header("content-type", media_type).body(body.clone());
        }
        sent.await
    }
}

/// Returns a response without ids and times, which differ between equal requests.
fn comparable(response: &Response, ids: &Ids) -> Value {
    fn plain(text: &str, ids: &Ids) -> String {
        text.replace(ids.session, "{session}").replace(ids.user, "{user}")
    }
    fn walk(value: Value, ids: &Ids) -> Value {
        match value {
            Value::String(text) if is_time(&text) => "{time}".into(),
            Value::String(text) => plain(&text, ids).into(),
            Value::Array(items) => items.into_iter().map(|item| walk(item, ids)).collect(),
            Value::Object(fields) => {
                fields.into_iter().map(|(name, value)| (name, walk(value, ids))).collect()
            }
            other => other,
        }
    }
    // The length of a successful response depends on the digits of its times.
    let varies = |name: &str| {
        ["date", "x-request-id"].contains(&name) || (name == "content-length" && response.status < 400)
    };
    let headers = response.headers().iter().filter(|(name, _)| !varies(name));
    let headers: Map<String, Value> =
        headers.map(|(name, value)| (name.clone(), plain(value, ids).into())).collect();
    let line = |line: &str| {
        serde_json::from_str(line).map_or_else(|_| plain(line, ids).into(), |line| walk(line, ids))
    };
    let body: Vec<Value> = response.text.lines().map(line).collect();
    json!({"status": response.status, "headers": headers, "body": body})
}

fn is_time(text: &str) -> bool {
    time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339).is_ok()
}

/// Creates two sessions with two revisions each, and a memory document with two versions.
async fn fill(app: &TestClient) {
    for session in [THEIRS.session, "another"] {
        for turn in 0..8 {
            let body = json!({
                "user_message": format!("{MARK}: question {turn} of {session} is about plan {turn}."),
                "assistant_reply": format!("{MARK}: the answer to question {turn} is plan {turn}, decided on day {turn}."),
                "user_id": THEIRS.user,
                "metadata": {MARK: turn},
            });
            let path = format!("/sessions/{session}/exchanges");
            let request = app.request(Method::POST, &path).header("idempotency-key", "key").json(&body);
            if turn == 0 {
                request.await.ok(201);
            } else {
                app.post(&path, &body).await.ok(201);
            }
            if turn % 3 == 2 {
                app.context(session, &json!({"user_id": THEIRS.user})).await;
            }
        }
    }
    let fork = json!({"through_seq": 2, "new_id": "fork"});
    app.post(&format!("/sessions/{}/fork", THEIRS.session), fork).await.ok(201);
    for version in 1..3 {
        let memory = json!({"content": format!("{MARK} {version}")});
        app.put(&format!("/users/{}/memory", THEIRS.user), &memory).await.ok(200);
    }
    for path in ["/retention", &format!("/users/{}/retention", THEIRS.user)] {
        app.put(path, json!({"after_last_exchange": "400d"})).await.ok(200);
    }
}

/// Returns all data that the tenant can read, and the cursor of the second page of each list.
async fn state(
    app: &TestClient,
    operations: &[Operation<'_>],
) -> (BTreeMap<String, Value>, BTreeMap<String, String>) {
    let (mut state, mut pages) = (BTreeMap::new(), BTreeMap::new());
    for operation in operations.iter().filter(|operation| operation.method == Method::GET) {
        for request in operation.requests(&THEIRS, &BTreeMap::new()) {
            let response = operation.ask(app, &request).await;
            let seen = comparable(&response, &NOWHERE);
            if request.path.contains('?')
                && let Some(next) = seen["body"][0]["next"].as_str()
            {
                pages.insert(operation.path.to_owned(), next.to_owned());
            }
            state.insert(request.path, seen);
        }
    }
    (state, pages)
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_returns_data_of_another_tenant(backend: Backend) {
    let set = [("consolidation.threshold", "4"), ("consolidation.keep_recent", "1")];
    let app = TestApp::start(&backend, &set).await;
    let document = serde_json::to_value(precis::http::openapi()).expect("JSON");
    let operations = operations(&document);
    let owner = app.with_key(backend.key("owner", Scope::Admin).await.expose());
    fill(&owner).await;
    let store = backend.store().await;
    let (before, pages) = state(&owner, &operations).await;
    assert!(pages.len() >= 3, "lists with a second page: {pages:?}");

    let mut tenants = 0;
    let mut new_tenant = async || {
        tenants += 1;
        let tenant = TenantId::new(format!("other-{tenants:04}")).expect("a tenant");
        let key = create_key(&store, &tenant, None, Scope::Admin).await.expect("a key");
        app.with_key(key.expose())
    };
    let mut requests_sent = 0;
    for operation in &operations {
        let at = format!("{} {}", operation.method, operation.path);
        let requests =
            operation.requests(&THEIRS, &pages).into_iter().zip(operation.requests(&NOWHERE, &pages));
        let (mut is_valid, mut owner_sees_difference) = (false, false);
        for (theirs, nowhere) in requests {
            // Each request has new tenants, because a write creates data.
            let (one, other) = (new_tenant().await, new_tenant().await);
            let (response, reference) =
                (operation.ask(&one, &theirs).await, operation.ask(&other, &nowhere).await);
            assert_eq!(
                comparable(&response, &THEIRS),
                comparable(&reference, &NOWHERE),
                "{at}: {theirs:?}: the response reveals if data of another tenant exists"
            );
            assert!(!format!("{response:?}").contains(MARK), "{at}: {response:?}");
            assert!(response.status < 500, "{at}: {response:?}");
            is_valid |= ![400, 415, 422].contains(&response.status);
            if operation.method == Method::GET {
                let (own, none) =
                    (operation.ask(&owner, &theirs).await, operation.ask(&owner, &nowhere).await);
                owner_sees_difference |= comparable(&own, &THEIRS) != comparable(&none, &NOWHERE);
            }
            requests_sent += 1;
        }
        assert!(is_valid, "{at}: every request was malformed. Add a body to `bodies`.");
        if operation.method != Method::GET {
            assert_eq!(state(&owner, &operations).await.0, before, "{at}: changed data of another tenant");
        }
        let names_data = operation.path.contains("{session_id}") || operation.path.contains("{user_id}");
        assert!(
            owner_sees_difference || !names_data || operation.method != Method::GET,
            "{at}: its owner sees no difference either. Create data in `fill`."
        );
    }
    assert!(requests_sent >= 35, "{requests_sent}");
}

/// Requests of one tenant that name no user, or a mistyped session, while two users have documents.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_without_a_user_returns_the_document_of_a_user(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let app = app.with_key(backend.key("acme", Scope::Write).await.expose());
    for user in ["ada", "bo"] {
        app.record_for(&format!("of-{user}"), user).await;
        let document = json!({"content": format!("{MARK} of {user}")});
        let written = app.post(&format!("/sessions/of-{user}/tools/memory_write"), &document).await.ok(200);
        assert_eq!((&written["user_id"], &written["is_error"]), (&json!(user), &json!(false)));
    }
    let mcp = |name: &str, arguments: &Value| {
        let params = json!({"name": name, "arguments": arguments});
        app.post("/mcp", json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))
    };
    let needs_user = |response: &Value| {
        let text = response.to_string();
        assert!(text.contains("has no user") && text.contains("Nothing was done"), "{response}");
        assert!(!text.contains(MARK), "{response}");
    };
    for session in ["new", "of-Ada", "of-ada "] {
        let context = app.context(&session.replace(' ', "%20"), &json!({})).await;
        let expected = json!({"user_id": null, "exists": false, "memory": {"version": 0}, "messages": []});
        assert_includes(&context, &expected);
        for (tool, arguments) in [("memory_read", json!({})), ("memory_write", json!({"content": "leaked"}))]
        {
            let path = format!("/sessions/{}/tools/{tool}", session.replace(' ', "%20"));
            let response = app.post(&path, &arguments).await.ok(200);
            assert_eq!((&response["is_error"], &response["user_id"]), (&json!(true), &Value::Null));
            needs_user(&response);
            needs_user(&mcp(tool, &arguments).await.ok(200));
            let by_header = mcp(tool, &arguments).header("x-precis-session", session.replace(' ', "%20"));
            needs_user(&by_header.await.ok(200));
            let mut with_session = arguments.clone();
            with_session["session_id"] = session.into();
            needs_user(&mcp(tool, &with_session).await.ok(200));
        }
        let search = json!({"query": "a", "session_id": session});
        assert!(!mcp("search_history", &search).await.text.contains("of-ada"), "{session}");
    }
    // A session that never had a user shows only itself.
    app.record("nobody", &[json!({"role": "user", "content": "a"})]).await;
    let context = app.context("nobody", &json!({})).await;
    assert_includes(&context, &json!({"user_id": null, "exists": true, "memory": {"version": 0}}));
    let found = app.post("/sessions/nobody/tools/search_history", r#"{"query":"a"}"#).await.ok(200);
    let sessions = found["data"]["hits"].as_array().expect("hits").iter().map(|hit| &hit["session_id"]);
    assert_eq!(sessions.collect::<Vec<_>>(), ["nobody"]);
    needs_user(&app.post("/sessions/nobody/tools/memory_read", "{}").await.ok(200));
    // Each user still has only their own document.
    for (session, user, other) in [("of-ada", "ada", "bo"), ("of-bo", "bo", "ada"), ("fresh", "bo", "ada")] {
        let context = app.context(session, &json!({"user_id": user})).await;
        assert_eq!(context["user_id"], user);
        let text = context["messages"].to_string();
        assert!(
            text.contains(&format!("{MARK} of {user}")) && !text.contains(&format!("of {other}")),
            "{text}"
        );
        app.post(&format!("/sessions/{session}/context"), json!({"user_id": other}))
            .await
            .problem(409, "session-user-mismatch");
        let read = app.post(&format!("/sessions/{session}/tools/memory_read"), "{}").await.ok(200);
        assert_eq!(read["content"], format!("{MARK} of {user}"));
    }
    assert_eq!(app.get("/users/default/memory").await["version"], 0);
}

/// Returns requests of more than 64 KiB, which are parsed and counted on a thread, beside one of each operation.
fn requests_of_all_routes(operations: &[Operation<'_>]) -> Vec<(Method, Request)> {
    let large = format!("{MARK} {}", "is a word. ".repeat(8000));
    let json = |path: &str, body: Value| {
        let body = Some(("application/json".to_owned(), body.to_string()));
        (Method::POST, Request { path: path.to_owned(), header: None, body })
    };
    let session = format!("/sessions/{}", THEIRS.session);
    let list = json!([{"role": "user", "content": large}, {"role": "assistant", "content": "yes"}]);
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "search_history", "arguments": {"query": MARK}}});
    let mut requests = vec![
        json(&format!("{session}/exchanges"), json!({"messages": list})),
        json("/sessions/listed/sync", json!({"messages": list, "on_divergence": "fork"})),
        json(&format!("{session}/context"), json!({"user_message": large})),
        json("/mcp", call),
    ];
    for operation in operations {
        let first = operation.requests(&THEIRS, &BTreeMap::new()).swap_remove(0);
        requests.push((operation.method.clone(), first));
    }
    requests
}

/// With the share of a key, each key has one permit to run, one thread and one connection.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_all_routes_end_with_one_thread_and_one_connection(backend: Backend) {
    let set = [
        ("limits.max_concurrent_requests", "2"),
        ("limits.max_key_share", "0.25"),
        ("limits.max_body_bytes", "4000000"),
        ("limits.queue_timeout", "60s"),
        ("database.max_connections", "1"),
        ("database.acquire_timeout", "60s"),
        ("consolidation.threshold", "4"),
        ("consolidation.keep_recent", "1"),
    ];
    let app = TestApp::start(&backend, &set).await;
    let keys = [backend.key("owner", Scope::Admin).await, backend.key("owner", Scope::Admin).await];
    let [one, other] = keys.map(|key| app.with_key(key.expose()));
    let document = serde_json::to_value(precis::http::openapi()).expect("JSON");
    let operations = operations(&document);
    let requests = requests_of_all_routes(&operations);
    let send = async |client: &TestClient, (method, request): &(Method, Request)| {
        let mut asked = client.request(method.clone(), &request.path);
        if let Some((media_type, body)) = &request.body {
            asked = asked.header("content-type", media_type).body(body.clone());
        }
        let response = asked.unchecked().await.expect("a response");
        let status = response.status().as_u16();
        // An export ends early if the other request erases its session.
        drop(response.bytes().await);
        status
    };
    for (number, first) in requests.iter().enumerate() {
        // Others of the list have erased or rewound it.
        fill_once(&one).await;
        // Without a factor, a quarter of the pairs: each route meets one of the first four requests, which are large.
        let every = if test_factor() > 1 { 1 } else { 4 };
        for second in requests[number..].iter().step_by(every) {
            let both = async { tokio::join!(send(&one, first), send(&other, second)) };
            let ended = tokio::time::timeout(Duration::from_secs(50), both).await;
            let (a, b) = ended.unwrap_or_else(|_| panic!("{first:?} and {second:?} wait for each other"));
            assert!(a < 500 && b < 500, "{a} of {first:?}, {b} of {second:?}");
        }
    }
}

/// Stores a few turns.
async fn fill_once(app: &TestClient) {
    for turn in 0..3 {
        let body = json!({"user_message": format!("{MARK} {turn}"), "assistant_reply": "yes", "user_id": THEIRS.user});
        app.post(&format!("/sessions/{}/exchanges", THEIRS.session), body).await.ok(201);
    }
}
