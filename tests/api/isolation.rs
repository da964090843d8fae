//! No route distinguishes data of another tenant from data that does not exist. The routes come from the OpenAPI
//! document, so that new ones are covered.
//!
//! One tenant has data. Two other tenants have no data and a key with all scopes. One uses the ids of that data, the
//! other one uses unknown ids. Both must get the same responses, and nothing may change. Requests are
//! made from the document: each parameter, header and body by its schema. Where a body is more than its schema says,
//! [`bodies`] has one.

use crate::answer::{Answer, send};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use precis::domain::api_key::Scope;
use precis::domain::id::TenantId;
use precis::service::keys::create_key;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use test_case::test_case;

/// A word in every text of the tenant's data.
const MARK: &str = "xylophon";
/// Routes that return no data of tenants.
const OF_NOBODY: [&str; 3] = ["/livez", "/metrics", "/readyz"];

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
            if !OF_NOBODY.contains(&path.as_str()) {
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
        "application/x-ndjson" => vec![lines.to_owned()],
        // Each of them is of some tool; for the others they are a mistake of the model.
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

    /// A value for a field or parameter of this name.
    fn sample(&self, name: &str, schema: &Value, ids: &Ids) -> Value {
        match name {
            "session_id" => return ids.session.into(),
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

    /// The paths with these ids or those: one for each word that a parameter may be.
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

    /// The same requests about these ids or those.
    fn requests(&self, ids: &Ids, pages: &BTreeMap<String, String>) -> Vec<Request> {
        self.paths(ids).iter().flat_map(|path| self.requests_to(path, ids, pages)).collect()
    }

    /// Plain, with each parameter, with each header; each with each body.
    fn requests_to(&self, path: &str, ids: &Ids, pages: &BTreeMap<String, String>) -> Vec<Request> {
        // What a request can't do without is in each: whoever searches, searches for what is there.
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

    async fn ask(&self, app: &TestApp, request: &Request) -> Answer {
        let mut asked = app.request(self.method.clone(), &request.path);
        if let Some((name, value)) = &request.header {
            asked = asked.header(name, value);
        }
        if let Some((media_type, body)) = &request.body {
            asked = asked.header("content-type", media_type).body(body.clone());
        }
        send(asked).await
    }
}

/// An answer without what differs between any two: ids of ours, and times.
fn comparable(answer: &Answer, ids: &Ids) -> Value {
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
    // The length of a success depends on how many digits its times have.
    let varies = |name: &str| {
        ["date", "x-request-id"].contains(&name) || (name == "content-length" && answer.status < 400)
    };
    let headers = answer.headers().iter().filter(|(name, _)| !varies(name));
    let headers: Map<String, Value> =
        headers.map(|(name, value)| (name.clone(), plain(value, ids).into())).collect();
    let line = |line: &str| {
        serde_json::from_str(line).map_or_else(|_| plain(line, ids).into(), |line| walk(line, ids))
    };
    let body: Vec<Value> = answer.text.lines().map(line).collect();
    json!({"status": answer.status, "headers": headers, "body": body})
}

fn is_time(text: &str) -> bool {
    time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339).is_ok()
}

/// Two sessions of two revisions, a memory document of two versions.
async fn fill(app: &TestApp) {
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
                send(request).await.ok(201);
            } else {
                app.post(&path, &body).await;
            }
            if turn % 3 == 2 {
                app.context(session, &json!({"user_id": THEIRS.user})).await;
            }
        }
    }
    for version in 1..3 {
        let memory = json!({"content": format!("{MARK} {version}")});
        send(app.request(Method::PUT, &format!("/users/{}/memory", THEIRS.user)).json(&memory)).await.ok(200);
    }
}

/// All that the tenant can see of its data, and the marks of the second page of each list.
async fn state(
    app: &TestApp,
    operations: &[Operation<'_>],
) -> (BTreeMap<String, Value>, BTreeMap<String, String>) {
    let (mut state, mut pages) = (BTreeMap::new(), BTreeMap::new());
    for operation in operations.iter().filter(|operation| operation.method == Method::GET) {
        for request in operation.requests(&THEIRS, &BTreeMap::new()) {
            let answer = operation.ask(app, &request).await;
            let seen = comparable(&answer, &NOWHERE);
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
    let document = serde_json::to_value(precis::http::openapi::document()).expect("JSON");
    let operations = operations(&document);
    let owner = app.with_key(backend.key("owner", Scope::Admin).await.expose());
    fill(&owner).await;
    let (before, pages) = state(&owner, &operations).await;
    assert!(pages.len() >= 3, "lists with a second page: {pages:?}");

    let store = backend.store().await;
    let mut tenants = 0;
    let mut stranger = async || {
        tenants += 1;
        let tenant = TenantId::new(format!("stranger-{tenants:04}")).expect("a tenant");
        let key = create_key(&store, &tenant, None, Scope::Admin).await.expect("a key");
        app.with_key(key.expose())
    };
    let mut asked = 0;
    for operation in &operations {
        let at = format!("{} {}", operation.method, operation.path);
        let requests =
            operation.requests(&THEIRS, &pages).into_iter().zip(operation.requests(&NOWHERE, &pages));
        let (mut sound, mut told_apart) = (false, false);
        for (theirs, nowhere) in requests {
            // Strangers of their own for each request: the first write would give them data.
            let (one, other) = (stranger().await, stranger().await);
            let (answer, reference) =
                (operation.ask(&one, &theirs).await, operation.ask(&other, &nowhere).await);
            assert_eq!(
                comparable(&answer, &THEIRS),
                comparable(&reference, &NOWHERE),
                "{at}: {theirs:?}: what exists, and what doesn't, of another tenant"
            );
            assert!(!format!("{answer:?}").contains(MARK), "{at}: {answer:?}");
            assert!(answer.status < 500, "{at}: {answer:?}");
            sound |= ![400, 415, 422].contains(&answer.status);
            if operation.method == Method::GET {
                let (own, none) =
                    (operation.ask(&owner, &theirs).await, operation.ask(&owner, &nowhere).await);
                told_apart |= comparable(&own, &THEIRS) != comparable(&none, &NOWHERE);
            }
            asked += 1;
        }
        assert!(sound, "{at}: every request was malformed. A new body? Give one in `bodies`.");
        if operation.method != Method::GET {
            assert_eq!(state(&owner, &operations).await.0, before, "{at}: changed what is another tenant's");
        }
        let names_data = operation.path.contains("{session_id}") || operation.path.contains("{user_id}");
        assert!(
            told_apart || !names_data || operation.method != Method::GET,
            "{at}: its owner sees no difference either. New data? Make some in `fill`."
        );
    }
    assert!(asked >= 35, "{asked}");
}
