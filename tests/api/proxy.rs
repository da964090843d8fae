//! `/v1/…` and `/proxy/{session_id}/v1/…`: clients of model providers get a memory, and their upstream sees valid lists.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::Request;
use crate::support::model_server::{Behaviour, Call, ModelServer, refused_base_url};
use futures_util::future::join_all;
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;

/// A service whose upstreams are a scripted server, for both protocols. It answers each call with a text about its last message.
struct Proxied {
    app: TestApp,
    upstream: ModelServer,
    _backend: Option<Backend>,
}

type Headers = &'static [(&'static str, &'static str)];

const OPENAI: &str = "/v1/chat/completions";
const ANTHROPIC: &str = "/v1/messages";
const PROTOCOLS: [&str; 2] = [OPENAI, ANTHROPIC];

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// Returns the answer of the upstream.
fn answer_to(text: &str) -> String {
    format!("Noted: {text} is what you said, without doubt.")
}

/// Returns all texts of a message.
fn text(message: &Value) -> String {
    match &message["content"] {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        content => content.as_str().unwrap_or_default().to_owned(),
    }
}

fn texts(messages: &[Value]) -> Vec<String> {
    messages.iter().map(text).collect()
}

impl Proxied {
    async fn start(backend: &Backend, set: Set<'_>) -> Self {
        let upstream = ModelServer::start().await;
        upstream.default(Behaviour::reply(|call| {
            let last = call.body["messages"].as_array().and_then(|list| list.last()).map(text);
            answer_to(last.unwrap_or_default().rsplit('\n').next().unwrap_or_default())
        }));
        let url = upstream.base_url();
        let set: Vec<(&str, &str)> =
            [("proxy.openai.base_url", url.as_str()), ("proxy.anthropic.base_url", url.as_str())]
                .into_iter()
                .chain(set.iter().copied())
                .collect();
        Self { app: TestApp::start(backend, &set).await, upstream, _backend: None }
    }

    async fn on_sqlite(set: Set<'_>) -> Self {
        let backend = Backend::sqlite().await;
        let proxied = Self::start(&backend, set).await;
        Self { _backend: Some(backend), ..proxied }
    }

    /// Returns a request with a list for the session `s`.
    fn request(&self, path: &str, list: &[Value], stream: bool) -> Request {
        let body = json!({"model": "m-1", "max_tokens": 50, "messages": list, "stream": stream});
        self.app.post(&format!("/proxy/s{path}"), body)
    }

    /// Sends a list, whose turn is stored, and returns the range of its messages.
    async fn ask(&self, list: &[Value]) -> String {
        let response = self.request(OPENAI, list, false).await;
        response.ok(200);
        let stored = response.header("x-precis-stored").filter(|stored| *stored != "none");
        stored.unwrap_or_else(|| panic!("{response}")).to_owned()
    }

    fn last_call(&self) -> Call {
        self.upstream.calls().pop().expect("a call")
    }

    /// Returns the list of the last call of the upstream.
    fn sent(&self) -> Vec<Value> {
        self.last_call().body["messages"].as_array().expect("a list").clone()
    }

    async fn history(&self) -> Vec<String> {
        texts(&self.history_of("s").await)
    }

    /// Returns the messages of a session, which perhaps does not exist.
    async fn history_of(&self, session: &str) -> Vec<Value> {
        let response = self.app.get(&format!("/sessions/{session}")).await;
        if response.status == 404 { Vec::new() } else { self.app.history(session).await }
    }

    async fn branches(&self) -> usize {
        let page = self.app.get("/sessions?forked_from=s").await.ok(200);
        page["items"].as_array().expect("a list").len()
    }
}

/// Returns the text of an answer, from a stream or an object of either protocol.
fn answer(body: &str) -> String {
    let read = |json: &str| -> Option<String> {
        let event: Value = serde_json::from_str(json).ok()?;
        let choice = &event["choices"][0];
        let texts = [&choice["delta"]["content"], &choice["message"]["content"], &event["delta"]["text"]];
        let given = texts.into_iter().find_map(|given| given.as_str().map(str::to_owned));
        given.or_else(|| event["content"].is_array().then(|| text(&event)))
    };
    if body.starts_with('{') {
        return read(body).unwrap_or_default();
    }
    body.lines().filter_map(|line| read(line.strip_prefix("data: ")?)).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complete_lists_are_stored_once_and_sent_whole_without_a_window(backend: Backend) {
    let proxied = Proxied::start(&backend, &[]).await;
    for (number, path) in PROTOCOLS.into_iter().enumerate() {
        let session = format!("s{number}");
        let mut list = Vec::new();
        for turn in 1..=6 {
            let question = format!("Question {turn} about the ferry");
            list.push(user(&question));
            let body = json!({"model": "m", "max_tokens": 9, "messages": list, "stream": turn % 2 == 0, "x": [1.50]});
            let response = proxied.app.post(&format!("/proxy/{session}{path}"), body).await;
            response.ok_text(200);
            assert_eq!(answer(&response.text), answer_to(&question));
            list.push(assistant(&answer_to(&question)));
            let sent = proxied.sent();
            assert_eq!(texts(&sent), texts(&list[..list.len() - 1]));
            let body = proxied.last_call().body;
            assert_eq!(
                (&body["x"], &body["max_tokens"], &body["model"]),
                (&json!([1.50]), &json!(9), &json!("m"))
            );
            let header = |name: &str| response.header(name).unwrap_or_default().to_owned();
            assert_eq!(header("x-precis-stored"), format!("{}-{}", turn * 2 - 1, turn * 2));
            let before = if turn == 1 { "none".to_owned() } else { format!("1-{}", turn * 2 - 2) };
            assert_eq!(header("x-precis-coverage"), format!("summary=none; verbatim={before}; omitted=none"));
            assert_eq!(header("x-precis-session"), session);
            assert!(header("x-precis-tokens").parse::<usize>().expect("tokens") > 5);
            assert_eq!(header("x-precis-memory"), "");
        }
        let history = proxied.app.history(&session).await;
        assert_eq!(texts(&history), texts(&list));
        let mark = json!({"precis": {"proxy": true}});
        assert!(history.iter().all(|message| message["role"] == "user" || message["extra"] == mark));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_conversation_fits_its_window_whatever_the_client_sends(backend: Backend) {
    let set = &[("proxy.context_window", "9000"), ("proxy.models.m.context_window", "1500")];
    let proxied = Proxied::start(&backend, set).await;
    for (number, path) in PROTOCOLS.into_iter().cycle().take(6).enumerate() {
        let session = format!("s{number}");
        let system = json!("You plan trips. Answer in one line.");
        let mut all = Vec::new();
        let mut summarised = false;
        for turn in 1..=25 {
            let question =
                format!("Day {turn}: my hotel number {turn} is called Villa {turn}, near harbour {turn}.");
            all.push(user(&format!("{question} {}", "It is a long story. ".repeat(8))));
            let keep = [usize::MAX, 5, 1][number / 2];
            let list = &all[all.len().saturating_sub(keep)..];
            let mut body = json!({"model": "m-1", "max_tokens": 100, "stream": turn % 2 == 0});
            if path == OPENAI {
                body["messages"] = [&[json!({"role": "system", "content": system})], list].concat().into();
            } else {
                (body["messages"], body["system"]) = (list.into(), system.clone());
            }
            let response = proxied.app.post(&format!("/proxy/{session}{path}"), body).await;
            response.ok_text(200);
            all.push(assistant(&answer(&response.text)));
            let tokens: i64 = response.header("x-precis-tokens").expect("tokens").parse().expect("a number");
            assert!(tokens + 100 <= 1500, "{response:?}");
            let coverage = response.header("x-precis-coverage").expect("coverage");
            assert!(coverage.ends_with("omitted=none"), "{coverage}");
            let call = proxied.last_call();
            assert!(call.system().starts_with("You plan trips. Answer in one line."), "{:?}", call.system());
            summarised |= call.system().contains("## Session Summary");
            let newest = text(proxied.sent().last().expect("a message"));
            assert!(newest.contains(&question), "{newest}");
        }
        assert!(summarised);
        assert_eq!(texts(&proxied.app.history(&session).await), texts(&all), "{number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edited_regenerated_and_repeated_requests_continue_as_after_a_rewind() {
    let proxied = Proxied::on_sqlite(&[]).await;
    let first = [user("What is the capital of Portugal?")];
    proxied.ask(&first).await;
    let mut list = first.to_vec();
    list.extend([assistant(&answer_to("What is the capital of Portugal?")), user("And its river?")]);
    proxied.ask(&list).await;
    assert_eq!(proxied.history().await.len(), 4);
    // The response was lost: the model answers the same.
    proxied.ask(&list).await;
    assert_eq!((proxied.history().await.len(), proxied.branches().await), (4, 0));
    // Regenerated: the new answer takes the place of the old one.
    proxied.upstream.push(Behaviour::answer("The Tagus."));
    assert_eq!(proxied.ask(&list).await, "4-4");
    assert_eq!(texts(&proxied.sent()), texts(&list), "the old answer is not sent");
    assert_eq!(proxied.history().await[3], "The Tagus.");
    assert_eq!(proxied.branches().await, 1);
    // Edited.
    list[2] = user("And its mountains?");
    assert_eq!(proxied.ask(&list).await, "3-4");
    let answer = answer_to("And its mountains?");
    assert_eq!(proxied.history().await[2..], ["And its mountains?".to_owned(), answer.clone()]);
    assert_eq!(proxied.branches().await, 2);
    // An upstream that fails leaves the session as it is.
    proxied.upstream.push(Behaviour::fail(500, "down"));
    list[2] = user("And its lakes?");
    let response = proxied.request(OPENAI, &list, false).unchecked().await.expect("a response");
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-precis-stored"]),
        (500, &"none".parse().expect("a value"))
    );
    assert_eq!(proxied.history().await[2..], ["And its mountains?".to_owned(), answer]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edit_of_a_summarised_message_forgets_what_followed_it() {
    let proxied =
        Proxied::on_sqlite(&[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")]).await;
    let mut list = Vec::new();
    for turn in 1..=8 {
        list.push(user(&format!("The secret word of day {turn} is banana{turn}.")));
        proxied.ask(&list).await;
        list.push(assistant(&answer_to(&text(&list[list.len() - 1]))));
    }
    assert!(proxied.last_call().system().contains("banana2"));
    let mut edited = list[..2].to_vec();
    edited.push(user("Let us begin again."));
    let stored = proxied.ask(&edited).await;
    let call = proxied.last_call();
    assert!(
        !call.system().contains("banana2") && !texts(&proxied.sent()).concat().contains("banana2"),
        "{call:?}"
    );
    assert!(format!("{}{:?}", call.system(), proxied.sent()).contains("banana1"));
    assert_eq!((stored.as_str(), proxied.history().await.len(), proxied.branches().await), ("3-4", 4, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_about_the_conversation_are_forwarded_unchanged() {
    let proxied = Proxied::on_sqlite(&[]).await;
    proxied.ask(&[user("How do I bake bread without yeast?")]).await;
    let quoted = format!(
        "### Task: Generate a title.\n<chat_history>\nUSER: How do I bake bread without yeast?\nASSISTANT: {}\n</chat_history>",
        answer_to("How do I bake bread without yeast?")
    );
    let other = [user("Hello"), assistant("Hi."), user("Translate: good day")];
    let suggestion =
        [user("How do I bake bread without yeast?"), user("[SUGGESTION MODE: propose a prompt]")];
    for list in [&[user(&quoted)][..], &other, &suggestion] {
        let body = json!({"messages": list, "model":"m", "temperature": 1.0}).to_string();
        let response = proxied.app.post("/proxy/s/v1/chat/completions", &body).await;
        response.ok(200);
        assert_eq!(response.header("x-precis-memory"), Some("off; reason=unrelated"));
        assert_eq!(response.header("x-precis-stored"), Some("none"));
        assert_eq!(proxied.last_call().body, serde_json::from_str::<Value>(&body).expect("JSON"));
    }
    assert_eq!(proxied.history().await.len(), 2);
    proxied.ask(&[user("And with milk?")]).await;
    assert_eq!((proxied.history().await.len(), proxied.branches().await), (4, 0), "the newest message alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_memory_say_why() {
    let proxied = Proxied::on_sqlite(&[("sessions.allow_rewind", "false")]).await;
    let list = json!([user("a")]);
    let cases = [
        ("/v1/chat/completions", json!({"messages": list, "model": "m"}), "no-session"),
        ("/proxy/s/v1/chat/completions", json!({"messages": list, "model": "m", "n": 2}), "n"),
        ("/proxy/s/v1/chat/completions", json!({"messages": list, "model": "m", "store": true}), "store"),
        (
            "/proxy/s/v1/chat/completions",
            json!({"messages": [{"role": "critic"}], "model": "m"}),
            "unreadable-messages",
        ),
        ("/proxy/s/v1/chat/completions", json!({"messages": "none", "model": "m"}), "unrelated"),
        (
            "/v1/messages",
            json!({"messages": list, "model": "m", "metadata": {"user_id": "ada"}}),
            "no-session",
        ),
    ];
    for (path, body, reason) in cases {
        let response = proxied.app.post(path, &body).await;
        response.ok(200);
        assert_eq!(response.header("x-precis-memory"), Some(format!("off; reason={reason}").as_str()));
        assert_eq!(proxied.last_call().body, body);
    }
    proxied.ask(&[user("one"), assistant("two"), user("three")]).await;
    let response = proxied.request(OPENAI, &[user("one"), assistant("two"), user("four")], false).await;
    assert_eq!(response.header("x-precis-memory"), Some("off; reason=rewind-forbidden"));
    assert_eq!(proxied.history().await.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_and_user_come_from_path_headers_and_body() {
    let proxied = Proxied::on_sqlite(&[]).await;
    let body = |user_id: Value| json!({"messages": [user("Hello")], "model": "m", "user": "bob", "metadata": {"user_id": user_id}});
    let claude = r#"{"device_id":"d","account_uuid":"a","session_id":"of-claude"}"#;
    let cases: [(&str, Headers, Value, &str, &str); 6] = [
        ("/proxy/of%20path/v1/chat/completions", &[("x-precis-session", "x")], json!("-"), "of path", "bob"),
        (OPENAI, &[("x-precis-session", "caf%C3%A9"), ("x-session-id", "y")], json!("-"), "café", "bob"),
        (OPENAI, &[("x-session-id", "of-client"), ("x-precis-user", "ada")], json!("-"), "of-client", "ada"),
        (ANTHROPIC, &[], json!(claude), "of-claude", "default"),
        (ANTHROPIC, &[], json!("user_1f_account__session_of-old"), "of-old", "default"),
        (
            ANTHROPIC,
            &[("x-claude-code-session-id", "c"), ("x-claude-code-agent-id", "e")],
            json!("-"),
            "c/e",
            "default",
        ),
    ];
    for (path, headers, user_id, session, user) in cases {
        let request = proxied.app.post(path, body(user_id));
        let response =
            headers.iter().fold(request, |request, (name, value)| request.header(name, value)).await;
        response.ok(200);
        let path = session.replace(' ', "%20").replace('/', "%2F").replace('é', "%C3%A9");
        let state = proxied.app.get(&format!("/sessions/{path}")).await.ok(200);
        assert_eq!((&state["last_seq"], &state["user_id"]), (&json!(2), &json!(user)), "{session}");
        assert!(proxied.last_call().headers.keys().all(|name| !name.as_str().starts_with("x-precis")));
    }
    let response = proxied.app.post(OPENAI, body(json!("-"))).header("x-precis-session", "of-client").await;
    response.problem(409, "session-user-mismatch");
    let response = proxied.app.post("/proxy/%00/v1/chat/completions", body(json!("-"))).await;
    assert_eq!(response.fields(), ["session_id"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_of_a_client_that_disconnects_is_stored_with_a_mark(backend: Backend) {
    let proxied = Proxied::start(&backend, &[]).await;
    for (number, path) in PROTOCOLS.into_iter().enumerate() {
        let session = format!("s{number}");
        let question = [user("Tell me a story of the sea.")];
        proxied.upstream.push(Behaviour::HangAfter("Once upon a time, ".to_owned()));
        let body = json!({"messages": question, "model": "m", "stream": true, "max_tokens": 99});
        let url = format!("/proxy/{session}{path}");
        let mut response = proxied.app.post(&url, &body).unchecked().await.expect("a response");
        let mut received = String::new();
        while !answer(&received).contains("a time, ") {
            received += &String::from_utf8_lossy(&response.chunk().await.expect("a chunk").expect("more"));
        }
        drop(response);
        proxied.upstream.until_idle().await;
        let stored = async || proxied.history_of(&session).await;
        while stored().await.len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let history = stored().await;
        assert_eq!(texts(&history), ["Tell me a story of the sea.", "Once upon a time, "]);
        assert_eq!(history[1]["extra"], json!({"precis": {"proxy": true, "partial": true}}));
        // The client continues with the part that it has shown.
        let next = [question[0].clone(), assistant("Once upon a"), user("Go on.")];
        let response = proxied.app.post(&url, json!({"messages": next, "model": "m", "max_tokens": 9})).await;
        response.ok(200);
        assert_eq!(response.header("x-precis-stored"), Some("3-4"));
        // Or it repeats the request.
        let response =
            proxied.app.post(&url, json!({"messages": question, "model": "m", "max_tokens": 9})).await;
        response.ok(200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_tool_call_is_not_stored() {
    let proxied = Proxied::on_sqlite(&[]).await;
    let delta = |delta: Value| {
        format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}))
    };
    let call = |index: usize, id: &str, arguments: &str| {
        delta(
            json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}]}),
        )
    };
    let more = delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}));
    let parts = [
        delta(json!({"role": "assistant", "content": null})),
        call(0, "c1", "{\"a\": "),
        more,
        call(1, "c2", "{\"b"),
    ];
    // The client leaves in the pause between the two parts.
    proxied
        .upstream
        .push(Behaviour::Slow(Duration::from_secs(1), vec![parts.concat(), ": wait\n\n".to_owned()]));
    let mut response =
        proxied.request(OPENAI, &[user("Look twice.")], true).unchecked().await.expect("a response");
    let chunk = response.chunk().await.expect("a chunk").expect("more");
    assert!(chunk.starts_with(b"data: "));
    drop(response);
    while proxied.history().await.len() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let history = proxied.app.history("s").await;
    let calls = &history[1]["tool_calls"];
    assert_eq!(
        *calls,
        json!([{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"a\": 1}"}}])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_of_upstreams_are_relayed_byte_for_byte() {
    let proxied = Proxied::on_sqlite(&[]).await;
    let raw = |status, headers: &[(&'static str, &str)], body: &str| {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Behaviour::Raw(status, headers, body.to_owned())
    };
    let events = "event: x\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"Hi \\u00e9\"},\"finish_reason\":null}]}\r\n\r\n: ping\r\n\r\n\
        data:{\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\ndata: {\"choices\":[],\"usage\":{\"x\":1.50}}\r\n\r\ndata: [DONE]\r\n\r\n";
    let object = "{ \"choices\" : [ {\"message\": {\"role\":\"assistant\",\"content\":\"Hi \\u00e9\",\"refusal\":null}} ] }\n\n";
    let json = ("content-type", "application/json");
    let cases = [
        (
            raw(200, &[("content-type", "text/event-stream; charset=utf-8"), ("x-own", "1")], events),
            Some("Hi é"),
        ),
        (raw(200, &[json, ("x-own", "2")], object), Some("Hi é")),
        (raw(429, &[json, ("retry-after", "7")], "{\"error\": {\"message\": \"slow down\"}}"), None),
        (raw(401, &[json], "{\"error\": {\"message\": \"bad key\"}}"), None),
        (raw(200, &[("content-type", "text/html")], "<html>login</html>"), None),
        (raw(200, &[json, ("content-encoding", "gzip")], "\u{1f}binary"), None),
    ];
    for (number, (behaviour, stored)) in cases.into_iter().enumerate() {
        let Behaviour::Raw(status, headers, body) = behaviour.clone() else { panic!("raw") };
        proxied.upstream.push(behaviour);
        let url = format!("/proxy/s{number}{OPENAI}");
        let request =
            proxied.app.post(&url, json!({"model": "m", "stream": true, "messages": [user("Hello")]}));
        let response = request.unchecked().await.expect("a response");
        assert_eq!(response.status().as_u16(), status);
        for (name, value) in headers {
            assert_eq!(response.headers()[name], value);
        }
        assert_eq!(response.bytes().await.expect("a body"), body.as_bytes());
        let expected: Vec<&str> = stored.map(|stored| vec!["Hello", stored]).unwrap_or_default();
        assert_eq!(texts(&proxied.history_of(&format!("s{number}")).await), expected, "{number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_upstreams_store_nothing() {
    let proxied = Proxied::on_sqlite(&[]).await;
    for path in PROTOCOLS {
        for behaviour in [
            Behaviour::ErrorAfter("Half of".to_owned(), "overloaded"),
            Behaviour::EndEarly("Half of".to_owned()),
            Behaviour::BreakOff("Half of".to_owned()),
        ] {
            proxied.upstream.push(behaviour);
            let response =
                proxied.request(path, &[user("Hello")], true).unchecked().await.expect("a response");
            let body = response.bytes().await;
            assert!(
                body.is_err() || answer(&String::from_utf8_lossy(&body.expect("a body"))).starts_with("Half")
            );
            assert!(proxied.history().await.is_empty());
        }
    }
    let redirect = vec![("location", "http://127.0.0.1:9/v1/chat/completions".to_owned())];
    proxied.upstream.push(Behaviour::Raw(307, redirect, String::new()));
    let response = proxied.request(OPENAI, &[user("Hello")], false).await;
    assert!(response.problem(502, "upstream-unavailable").contains("redirects"));
    for path in ["/v1/../admin", "/v1/%2e%2e/admin"] {
        let response = proxied.app.raw(&format!("GET {path} HTTP/1.1"), b"").await;
        response.problem(400, "bad-request");
    }
    assert!(proxied.upstream.calls().iter().all(|call| call.path.starts_with("/v1/")));
    let unreachable = refused_base_url();
    let app = TestApp::on_sqlite(&[("proxy.openai.base_url", &unreachable)]).await;
    let response = app.post(OPENAI, json!({"messages": [user("a")]})).await;
    response.problem(502, "upstream-unavailable");
    let response = app.post(ANTHROPIC, json!({"messages": [user("a")]})).await;
    assert!(response.problem(404, "upstream-not-configured").contains("proxy.anthropic.base_url"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_requests_store_each_turn_once() {
    let proxied = Proxied::on_sqlite(&[]).await;
    proxied.ask(&[user("one")]).await;
    let begun = [user("one"), assistant(&answer_to("one"))];
    // Three attempts of the same request at the same time.
    let hold = Arc::new(Semaphore::new(0));
    for number in 0..3 {
        proxied.upstream.push(Behaviour::Held(Arc::clone(&hold), format!("Answer {number}")));
    }
    let list = [&begun[..], &[user("two")]].concat();
    let requests = join_all((0..3).map(|_| async { proxied.ask(&list).await }));
    let release = async {
        proxied.upstream.until_calls(4).await;
        hold.add_permits(3);
    };
    tokio::join!(requests, release);
    let history = proxied.history().await;
    assert_eq!((history.len(), history[2].as_str(), proxied.branches().await), (4, "two", 2));
    // Two tabs.
    let base = [&list[..], &[assistant(&history[3])]].concat();
    let tabs = ["left", "right"].map(|text| [&base[..], &[user(text)]].concat());
    join_all(tabs.iter().map(|list| async { proxied.ask(list).await })).await;
    assert_eq!((proxied.history().await.len(), proxied.branches().await), (6, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_reach_only_their_server_and_tenants_stay_apart() {
    const PROVIDER_KEY: &str = "sk-provider-0123456789";
    let backend = Backend::sqlite().await;
    let proxied = Proxied::start(&backend, &[]).await;
    let acme = backend.key("acme", Scope::Write).await.expose().to_owned();
    let other = backend.key("other", Scope::Write).await.expose().to_owned();
    let body = json!({"model": "m", "messages": [user("The code is 4711.")]});
    let url = "/proxy/s/v1/chat/completions";
    let bearer = format!("Bearer {PROVIDER_KEY}");
    proxied.app.post(url, &body).header("authorization", &bearer).await.problem(401, "unauthorized");
    let precis_key = format!("Bearer {acme}");
    let response = proxied.app.post(url, &body).header("authorization", &precis_key).await;
    assert!(response.problem(401, "unauthorized").contains("x-precis-key"));
    assert!(proxied.upstream.calls().is_empty());
    let ask = |key: &str, text: &str| {
        let body = json!({"model": "m", "messages": [user(text)]});
        proxied.app.post(url, body).header("authorization", &bearer).header("x-precis-key", key)
    };
    ask(&acme, "The code is 4711.").await.ok(200);
    assert_eq!(proxied.last_call().header("authorization"), bearer);
    assert!(!format!("{:?}", proxied.last_call()).contains(&acme));
    ask(&other, "Which code?").await.ok(200);
    assert!(!proxied.last_call().body.to_string().contains("4711"));
    ask(&acme, "Which code?").await.ok(200);
    assert!(proxied.last_call().body.to_string().contains("4711"));
    // With a key in the settings, the client's key is that of precis.
    let set = &[("proxy.openai.api_key", PROVIDER_KEY), ("proxy.anthropic.api_key", PROVIDER_KEY)];
    let proxied = Proxied::start(&backend, set).await;
    proxied.app.post(url, &body).header("authorization", &precis_key).await.ok(200);
    assert_eq!(proxied.last_call().header("authorization"), bearer);
    let request = proxied.app.post("/proxy/s/v1/messages", &body).header("x-api-key", &acme);
    request.header("anthropic-version", "2023-06-01").await.ok(200);
    let call = proxied.last_call();
    assert_eq!((call.header("x-api-key"), call.header("authorization")), (PROVIDER_KEY, ""));
    assert!(proxied.upstream.calls().iter().all(|call| !format!("{call:?}").contains(&acme)));
    for (method, path) in [(Method::GET, "/v1/models"), (Method::POST, "/v1/responses")] {
        let request = proxied.app.request(method, path).header("authorization", &precis_key);
        let response = request.unchecked().await.expect("a response");
        assert_eq!(response.headers()["x-precis-memory"], "off; reason=path");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_answers_are_cut_and_not_stored() {
    let proxied = Proxied::on_sqlite(&[]).await;
    let event = json!({"choices": [{"index": 0, "delta": {"content": "and so on ".repeat(1000)}, "finish_reason": null}]});
    let part = format!("data: {event}\n\n").repeat(100);
    proxied.upstream.push(Behaviour::Slow(Duration::ZERO, vec![part; 40]));
    let request = proxied.request(OPENAI, &[user("Tell me everything.")], true);
    let mut response = request.unchecked().await.expect("a response");
    let mut received = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        received += chunk.len();
    }
    assert!(received > 30 << 20 && received <= 32 << 20, "{received}");
    assert!(proxied.history().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_exceeds_its_window_is_forwarded_unchanged() {
    let proxied = Proxied::on_sqlite(&[("proxy.context_window", "100")]).await;
    let list = [user(&"a long story ".repeat(200))];
    let response = proxied.request(ANTHROPIC, &list, false).await;
    response.ok(200);
    assert_eq!(response.header("x-precis-memory"), Some("off; reason=window-too-small"));
    assert_eq!(proxied.sent(), list);
}
