//! `/openapi.json` and `/docs`

use crate::support::app::TestApp;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

fn committed() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi/openapi.json");
    std::fs::read_to_string(path).expect("the committed document")
}

fn document() -> Value {
    serde_json::from_str(&committed()).expect("JSON")
}

/// Returns every operation with its path and method.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().expect("paths").iter();
    let operations = paths.flat_map(|(path, item)| {
        let item = item.as_object().expect("a path item").iter();
        item.map(|(method, operation)| (path.as_str(), method.as_str(), operation))
    });
    let operations: Vec<_> = operations.collect();
    assert!(operations.len() >= 17);
    operations
}

#[tokio::test]
async fn served_document_equals_the_committed_one() {
    let app = TestApp::on_sqlite(&[]).await;
    let response = app.get("/openapi.json").await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.json(), document());
    let current = precis::http::openapi().to_pretty_json().expect("JSON") + "\n";
    assert!(committed() == current, "outdated: cargo run -q -- openapi > openapi/openapi.json");
}

#[test]
fn every_reference_resolves() {
    fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let document = document();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    for reference in &found {
        let pointer = reference.strip_prefix('#').expect("a reference inside the document");
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    assert!(found.len() >= 20, "{found:?}");
}

#[test]
fn every_operation_is_complete() {
    let document = document();
    assert!(document["openapi"].as_str().expect("a version").starts_with("3.1."));
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    let tags = document["tags"].as_array().expect("tags");
    let mut ids = BTreeSet::new();
    for (path, method, operation) in operations(&document) {
        let at = format!("{method} {path}");
        assert!(
            ids.insert(operation["operationId"].as_str().expect("an id")),
            "{at}: its id is another's too"
        );
        assert!(!operation["summary"].as_str().expect("a summary").is_empty(), "{at}");
        assert!(!operation["description"].as_str().expect("a description").is_empty(), "{at}");
        // An open route has an empty list.
        assert_eq!(
            operation["security"].as_array().expect("security").is_empty(),
            ["/livez", "/readyz"].contains(&path)
        );
        let tag = &operation["tags"][0];
        assert!(tags.iter().any(|known| known["name"] == *tag), "{at}: {tag}");
        let responses = operation["responses"].as_object().expect("responses");
        assert!(responses.keys().any(|status| status.starts_with('2')), "{at}: no success");
        for (status, response) in responses {
            if status.parse::<u16>().expect("a status") < 400 {
                assert!(response["description"].is_string(), "{at}: {status}");
                continue;
            }
            let reference = response["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
            let response = reference.and_then(|pointer| document.pointer(pointer));
            let response =
                response.unwrap_or_else(|| panic!("{at}: {status} is not in components/responses"));
            assert!(response["description"].is_string(), "{at}: {status}");
            let problem = &response["content"]["application/problem+json"]["schema"]["$ref"];
            assert_eq!(*problem, "#/components/schemas/Problem", "{at}: {status}");
        }
        let takes_body = matches!(method, "put" | "patch")
            || (method == "post"
                && ["/exchanges", "/sync", "/context", "/fork", "/revisions", "/tools/{name}"]
                    .iter()
                    .any(|end| path.ends_with(end)));
        assert_eq!(
            operation["requestBody"]["content"]["application/json"]["schema"].is_object(),
            takes_body,
            "{at}"
        );
        let content = &operation["requestBody"]["content"]["application/json"];
        assert_eq!(content["examples"].is_object(), takes_body, "{at}: examples");
    }
    assert_eq!(document["servers"][0]["url"], "/");
    for (name, schema) in document["components"]["schemas"].as_object().expect("schemas") {
        assert!(schema["description"].is_string(), "{name} has no description");
    }
}

/// Generators name a type after its schema, or number it. A field that is always null has no type in some of them, and an
/// object without fields is an empty one.
#[test]
fn every_generated_type_has_a_name_and_fields() {
    fn check(schema: &Value, at: &str) {
        for (index, variant) in
            ["oneOf", "anyOf"].iter().filter_map(|of| schema[*of].as_array()).flatten().enumerate()
        {
            let at = format!("{at}/{index}");
            assert!(
                variant["$ref"].is_string() || variant["type"] != "object",
                "{at}: a variant without a name"
            );
            check(variant, &at);
        }
        if let Some(items) = schema.get("items") {
            assert!(!items["properties"].is_object(), "{at}: items without a name");
            check(items, &format!("{at}/items"));
        }
        let is_object = schema["type"] == "object" || schema["type"] == json!(["object", "null"]);
        let is_open = schema["additionalProperties"] == true;
        assert!(!is_object || is_open || schema["properties"].is_object(), "{at}: an object without fields");
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let at = format!("{at}.{name}");
            assert_ne!(field["type"], "null", "{at}");
            assert!(!field["properties"].is_object(), "{at}: an object without a name");
            check(field, &at);
        }
    }
    let document = document();
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    for (name, schema) in schemas {
        assert!(name.chars().all(char::is_alphanumeric), "{name}");
        check(schema, name);
    }
    assert!(schemas.len() >= 60, "{}", schemas.len());
}

#[test]
fn every_parameter_is_declared() {
    let document = document();
    for (path, method, operation) in operations(&document) {
        let at = format!("{method} {path}");
        let in_path: BTreeSet<_> =
            path.split('{').skip(1).filter_map(|rest| rest.split('}').next()).collect();
        let parameters: Vec<_> = operation["parameters"].as_array().into_iter().flatten().collect();
        let mut names = BTreeSet::new();
        for parameter in &parameters {
            let (name, place) = (parameter["name"].as_str().expect("a name"), &parameter["in"]);
            assert!(names.insert((name, place.as_str())), "{at}: {name} twice");
            assert!(parameter["schema"].is_object() && parameter["description"].is_string(), "{at}: {name}");
            let required = place == "path" || matches!((path, name), ("/search", "q") | (_, "after"));
            assert_eq!(parameter["required"] == true, required, "{at}: {name}");
        }
        let declared = parameters.iter().filter(|parameter| parameter["in"] == "path");
        let declared: BTreeSet<_> = declared.filter_map(|parameter| parameter["name"].as_str()).collect();
        assert_eq!(declared, in_path, "{at}");
    }
}

#[test]
fn content_schema_is_text_or_parts() {
    let document = document();
    let content = &document["components"]["schemas"]["Content"]["oneOf"];
    assert_eq!((&content[0]["type"], &content[1]["type"]), (&"string".into(), &"array".into()));
    let schema = |pointer: &str| document.pointer(pointer).unwrap_or_else(|| panic!("{pointer}")).to_string();
    for pointer in [
        "/components/schemas/QuestionAndAnswer/properties/user_message",
        "/components/schemas/QuestionAndAnswer/properties/assistant_reply",
        "/components/schemas/ContextRequest/properties/user_message",
    ] {
        assert!(schema(pointer).contains("#/components/schemas/Content"), "{}", schema(pointer));
    }
}

/// The operation of a link must exist and have the parameters that the link sets.
#[test]
fn every_link_resolves() {
    let document = document();
    let operations = operations(&document);
    let mut followed = 0;
    for (path, method, operation) in &operations {
        let links = operation["responses"].as_object().expect("responses").values();
        for link in
            links.filter_map(|response| response["links"].as_object()).flat_map(|links| links.values())
        {
            let (_, _, target) = operations
                .iter()
                .find(|(_, _, target)| target["operationId"] == link["operationId"])
                .unwrap_or_else(|| panic!("{method} {path}: {link}"));
            let takes = |given: &str| {
                let parameters = target["parameters"].as_array().expect("parameters").iter();
                let name = |parameter: &Value| {
                    Some(format!("{}.{}", parameter["in"].as_str()?, parameter["name"].as_str()?))
                };
                parameters.filter_map(name).any(|name| name == given)
            };
            for (parameter, value) in link["parameters"].as_object().expect("parameters") {
                assert!(takes(parameter), "{method} {path}: {parameter}: {link}");
                let value = value.as_str().expect("an expression");
                let known = ["$request.path.", "$response.body#/", "$response.header."];
                assert!(known.iter().any(|known| value.starts_with(known)), "{value}");
            }
            followed += 1;
        }
    }
    assert!(followed >= 15, "{followed}");
}

const UNKNOWN: &str = "unknown_field";

/// A body with an unknown field in one of its objects.
struct WithUnknownField {
    body: Value,
    field: String,
    /// The names of the object's fields; `None` if the object keeps all fields, as messages do.
    names: Option<BTreeSet<String>>,
}

/// Returns a value of the schema for each object in it.
fn with_unknown_fields(document: &Value, schema: &Value) -> Vec<WithUnknownField> {
    let reference = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    let schema = reference.map_or(schema, |pointer| document.pointer(pointer).expect("a schema"));
    let variants = ["oneOf", "anyOf"].iter().filter_map(|of| schema[*of].as_array()).flatten();
    let mut found: Vec<_> = variants.flat_map(|variant| with_unknown_fields(document, variant)).collect();
    for mut inner in with_unknown_fields_of_items(document, schema) {
        inner.body = json!([inner.body]);
        inner.field.insert_str(0, if inner.field.starts_with('[') { "[0]" } else { "[0]." });
        found.push(inner);
    }
    let Some(properties) = schema["properties"].as_object() else { return found };
    let is_closed = schema["additionalProperties"] == false;
    let names = is_closed.then(|| properties.keys().cloned().collect());
    found.push(WithUnknownField { body: json!({UNKNOWN: 1}), field: UNKNOWN.to_owned(), names });
    for (name, property) in properties {
        for inner in with_unknown_fields(document, property) {
            let separator = if inner.field.starts_with('[') { "" } else { "." };
            let field = format!("{name}{separator}{}", inner.field);
            found.push(WithUnknownField { body: json!({name: inner.body}), field, ..inner });
        }
    }
    found
}

fn with_unknown_fields_of_items(document: &Value, schema: &Value) -> Vec<WithUnknownField> {
    if schema["items"].is_object() { with_unknown_fields(document, &schema["items"]) } else { Vec::new() }
}

/// The error of an unknown field lists the fields of its object, at any depth, and the document says which objects reject
/// unknown fields. All fields of messages are kept.
#[tokio::test]
async fn errors_of_unknown_fields_list_the_fields_of_the_schema() {
    let (app, document) = (TestApp::on_sqlite(&[]).await, document());
    let (mut rejected, mut kept) = (BTreeSet::new(), 0);
    for (path, method, operation) in operations(&document) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        // The tool itself checks its arguments.
        if schema.is_null() || path.ends_with("/tools/{name}") {
            continue;
        }
        // The variants of a union accept the fields of each other, so that the error can say what does not belong together.
        let mut cases: BTreeMap<(String, String), Option<BTreeSet<String>>> = BTreeMap::new();
        for WithUnknownField { body, field, names } in with_unknown_fields(&document, schema) {
            let known = cases.entry((body.to_string(), field)).or_insert_with(|| names.clone());
            *known = known.take().zip(names).map(|(known, names)| &known | &names);
        }
        for ((body, field), names) in cases {
            let filled = path.replace("{session_id}", "s").replace("{user_id}", "ada");
            let method: Method = method.to_uppercase().parse().expect("a method");
            let response = app.request(method, &filled).json(&body).await;
            let errors = response.json()["errors"].as_array().cloned().unwrap_or_default();
            let error = errors.iter().find(|error| error["field"] == *field);
            let Some(names) = names else {
                assert!(error.is_none(), "{path}: {body}: {response}");
                kept += 1;
                continue;
            };
            let detail = error.and_then(|error| error["detail"].as_str());
            let detail =
                detail.unwrap_or_else(|| panic!("{path}: no error of {field} in {body}: {response}"));
            // The second form is that of a value of several types.
            let listed = detail.split_once(" takes ").or_else(|| detail.split_once(" must be one of "));
            let (_, listed) = listed.unwrap_or_else(|| panic!("{path}: {body}: {detail}"));
            let listed = listed.replace('`', "");
            assert_eq!(
                listed.split(", ").map(str::to_owned).collect::<BTreeSet<_>>(),
                names,
                "{path}: {field}"
            );
            rejected.insert(format!("{path} {field}"));
        }
    }
    let nested = format!("/sessions/{{session_id}}/context skills[0].{UNKNOWN}");
    assert!(rejected.len() >= 9 && rejected.contains(&nested) && kept >= 10, "{rejected:?}, {kept}");
}

/// An undeclared parameter is rejected by name, because ignoring `?dry_run=true` would erase a session. The routes for
/// operators are an exception.
#[tokio::test]
async fn undocumented_parameters_are_rejected() {
    let (app, document) = (TestApp::on_sqlite(&[]).await, document());
    app.record("s", &[json!({"role": "user", "content": "kept"})]).await;
    let mut requests_sent = 0;
    for (path, method, operation) in
        operations(&document).into_iter().filter(|of| of.2["tags"][0] != "operations")
    {
        let filled = path.replace("{session_id}", "s").replace("{user_id}", "default");
        let filled = filled.replace("{revision}", "0").replace("{seq}", "1").replace("{name}", "memory_read");
        let method: Method = method.to_uppercase().parse().expect("a method");
        let mut request = app.request(method, &format!("{filled}?q=kept&dry_run=true"));
        let media_type =
            operation["requestBody"]["content"].as_object().and_then(|types| types.keys().next());
        if let Some(media_type) = media_type {
            request = request.header("content-type", media_type).body("{}");
        }
        let fields = request.await.fields();
        assert!(fields.iter().any(|field| field.trim_start_matches('?') == "dry_run"), "{path}: {fields:?}");
        requests_sent += 1;
    }
    assert!(requests_sent >= 20, "{requests_sent}");
    assert_eq!(app.get("/sessions/s").await["message_count"], 1);
}

/// The binary contains the whole page, so it works without internet access.
#[tokio::test]
async fn documentation_page_loads_nothing_from_other_hosts() {
    let app = TestApp::on_sqlite(&[]).await;
    let page = app.get("/docs/").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html")));
    let mut loaded = 0;
    for tag in page.text.split('<').filter(|tag| tag.starts_with("script") || tag.starts_with("link")) {
        let source = ["src=\"", "href=\""].iter().find_map(|attribute| tag.split_once(attribute));
        let source = source.and_then(|(_, rest)| rest.split('"').next());
        let source = source.unwrap_or_else(|| panic!("<{tag} loads what?"));
        assert!(!source.contains("//"), "{source}");
        let file = app.get(&format!("/docs/{}", source.trim_start_matches("./"))).await;
        assert_eq!(file.status, 200, "{source}");
        loaded += 1;
    }
    assert!(loaded >= 4, "{loaded}");
    let start = app.get("/docs/swagger-initializer.js").await;
    assert!(start.text.contains("\"/openapi.json\"") && !start.text.contains("https://"), "{}", start.text);
}
