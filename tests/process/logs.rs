//! The content of the log, which must not include conversations, memory documents, keys or passwords.

use crate::service::{Precis, Process};
use crate::support::backend::Backend;
use crate::support::client::Request;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// A part of every text that the log must not contain: messages, prompts, summaries, memory documents.
const SAID: &str = "xylophon";
/// The API key of the provider.
const KEY: &str = "sk-hunter2-key-0123456789";
const PASSWORD: &str = "hunter2-password";

/// Returns a sentence that is used only in this place.
fn secret_text(place: &str) -> String {
    format!("The {SAID} of {place} is blue, and its owner plays it at noon.")
}

async fn start(backend: &Backend, model: &ModelServer, filter: &str) -> Process {
    let url = backend.url();
    let password = format!("{}password={PASSWORD}", if url.contains('?') { '&' } else { '?' });
    let mut precis = Precis::new().model(&model.base_url()).set("log.filter", filter);
    precis = precis
        .set("llm.providers.scripted.api_key__env", "MODEL_KEY")
        .env("MODEL_KEY", KEY)
        .set("llm.models.small.timeout", "1s")
        .set("consolidation.threshold", "4")
        .set("consolidation.keep_recent", "1")
        .set("consolidation.summary_word_limit", "10")
        .set("consolidation.retry_initial", "1ms")
        .set("consolidation.retry_max", "1ms")
        .set("limits.max_body_bytes", "20000");
    match backend {
        Backend::Postgres(_) => precis.env("DATABASE_URL", &format!("{url}{password}")).start().await,
        Backend::Sqlite(_) => precis.env("DATABASE_URL", &url).start().await,
    }
}

async fn status(request: Request) -> u16 {
    request.await.status
}

/// Sends requests for one session, including all kinds of failures. Each request has its own ID.
async fn send_requests(service: &Process, model: &ModelServer) {
    let request =
        |method: Method, path: &str, id: &str| service.request(method, path).header("x-request-id", id);
    let turn = |place: &str| {
        json!({"messages": [
            {"role": "user", "name": SAID, "content": secret_text(place)},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": secret_text("arguments")}}]},
            {"role": "tool", "tool_call_id": "c", "content": secret_text("result")},
            {"role": "assistant", "content": [{"type": "text", "text": secret_text("reply")}]},
            {"role": "user", "content": secret_text("question")},
            {"role": "assistant", "content": secret_text("answer")},
        ]})
    };
    let context = json!({"system_prompt": secret_text("system"), "user_message": secret_text("new")});
    for (index, behaviour) in failure_behaviours().into_iter().enumerate() {
        model.push(behaviour);
        let exchange = request(Method::POST, "/sessions/s/exchanges", &format!("exchange-{index}"));
        assert_eq!(status(exchange.json(turn("user"))).await, 201);
        let asked = request(Method::POST, "/sessions/s/context", &format!("failed-{index}")).json(&context);
        let response: Value = asked.await.ok(200);
        assert_eq!(response["consolidation"]["outcome"], "failed", "{index}");
        let reason = response["consolidation"]["reason"].clone();
        assert!(reason.is_string(), "{index}");
        assert_absent(&[reason], &[SAID, KEY]);
    }
    // The second response is the meta-consolidation or its failure.
    model.push(Behaviour::answer(secret_text("summary") + " It has more than ten words."));
    model.push(Behaviour::reply(|call| format!("{} {}", call.user(), secret_text("echo"))));
    let asked = request(Method::POST, "/sessions/s/context", "consolidated").json(&context);
    let response: Value = asked.await.ok(200);
    assert_eq!(response["consolidation"]["outcome"], "consolidated", "{response}");

    model.push(Behaviour::answer(secret_text("summary")));
    model.push(Behaviour::answer(SAID));
    request(Method::POST, "/sessions/s/exchanges", "more").json(turn("more")).await.ok(201);
    let background = json!({"mode": "background"});
    let asked = request(Method::POST, "/sessions/s/context", "background").json(&background);
    assert_eq!(status(asked).await, 200);
    model.until_idle().await;
    service.wait_for_log("consolidated").await;

    let memory = |id| request(Method::PUT, "/users/default/memory", id);
    assert!(status(memory("memory").json(json!({"content": secret_text("memory")}))).await < 300);
    let stale = memory("stale").header("if-match", "\"99\"").json(json!({"content": secret_text("stale")}));
    assert_eq!(status(stale).await, 412);

    // Rejected requests, with a secret text in each part of them.
    let word = secret_text("rejected");
    let exchanges = "/sessions/s/exchanges";
    for (index, request) in [
        request(Method::POST, exchanges, "bad-0").body(format!("{{\"user_message\": \"{word}")),
        request(Method::POST, exchanges, "bad-1").json(json!({"user_message": word, SAID: word})),
        request(Method::POST, exchanges, "bad-2")
            .json(json!({"messages": [{"role": SAID, "content": word}]})),
        request(Method::POST, exchanges, "bad-3")
            .json(json!({"messages": [{"content": 3, "x": word, "type": SAID}]})),
        request(Method::POST, exchanges, "bad-4")
            .json(json!({"user_message": word.repeat(400), "assistant_reply": word})),
        request(Method::POST, exchanges, "bad-5").header("idempotency-key", word.as_str()).json(turn("bad")),
        request(Method::POST, exchanges, "bad-6")
            .json(json!({"messages": [], "user_id": word, "metadata": word})),
        request(Method::POST, "/sessions/s/context", "bad-7").json(json!({"mode": word})),
        request(Method::GET, &format!("/sessions/s/messages?limit={SAID}"), "bad-8"),
        request(Method::GET, &format!("/sessions?cursor={SAID}"), "bad-9"),
    ]
    .into_iter()
    .enumerate()
    {
        let rejected = status(request.header("content-type", "application/json")).await;
        assert!((400..500).contains(&rejected), "{index}: {rejected}");
    }
}

/// Returns one behaviour per kind of failure. Error responses of providers may quote the request and the key.
fn failure_behaviours() -> Vec<Behaviour> {
    let quoted = secret_text("user");
    vec![
        // A second failure that can depend on the size of the prompt divides the batch.
        Behaviour::ErrorAfter(secret_text("partial"), "overloaded"),
        Behaviour::fail(404, &format!("{{'input': '{}', 'loc': 'messages'}}", quoted.to_uppercase())),
        Behaviour::fail(502, &format!("could not handle \"{quoted}\" for {KEY}")),
        Behaviour::Raw(401, Vec::new(), format!("bad key {KEY} for {quoted}")),
        Behaviour::garbage(),
        Behaviour::BreakOff(secret_text("broken")),
        Behaviour::EndEarly(secret_text("early")),
        Behaviour::Finish(secret_text("cut"), "length"),
        Behaviour::answer("none"),
        Behaviour::HangAfter(secret_text("hanging")),
    ]
}

/// Stops the service and returns its complete log.
async fn log_of(mut service: Process) -> Vec<Value> {
    service.signal("TERM");
    assert_eq!(service.ended().await.0, Some(0));
    let read = |line: &String| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    service.log().iter().map(read).collect()
}

/// Returns the request ID of a line.
fn request_of(line: &Value) -> Option<&str> {
    line["spans"].as_array()?.iter().find_map(|span| span["request_id"].as_str())
}

fn assert_absent(log: &[Value], secrets: &[&str]) {
    for line in log {
        let line = line.to_string().to_lowercase();
        for secret in secrets {
            assert!(!line.contains(&secret.to_lowercase()), "{secret} in: {line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_contains_events_and_no_conversation() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let service = start(&backend, &model, "debug").await;
    send_requests(&service, &model).await;
    let log = log_of(service).await;
    assert_absent(&log, &[SAID, KEY, PASSWORD]);

    let with = |message: &str, id: &str| {
        let of = |line: &&Value| {
            line["message"].as_str().is_some_and(|output| output.starts_with(message))
                && request_of(line) == Some(id)
        };
        assert_eq!(log.iter().filter(of).count(), 1, "{message:?} of {id}: {log:#?}");
    };
    for index in 0..failure_behaviours().len() {
        with("attempt failed", &format!("failed-{index}"));
        with("consolidation failed", &format!("failed-{index}"));
        with("answered", &format!("failed-{index}"));
    }
    with("consolidated", "consolidated");
    with("meta-consolidation failed", "consolidated");
    with("consolidated", "background");
    with("answered", "memory");
    with("answered", "bad-0");
    // Every line of precis has a request ID, except those about start, stop and background work.
    for line in log.iter().filter(|line| line["target"].as_str().expect("text").starts_with("precis")) {
        let message = line["message"].as_str().expect("text");
        let life = ["listening on ", "stopping", "stopped"].iter().any(|life| message.starts_with(life));
        assert!(life != request_of(line).is_some(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_not_logged_with_any_filter() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let service = start(&backend, &model, "trace").await;
    send_requests(&service, &model).await;
    let log = log_of(service).await;
    assert!(log.iter().any(|line| line["level"] == "TRACE"), "the filter holds");
    assert_absent(&log, &[KEY, PASSWORD]);
}

/// People paste keys in place of ids, also encoded or cut. So the log has the route of a request, and not its path.
#[test_case("info"; "failed requests")]
#[test_case("debug"; "all requests")]
#[tokio::test]
async fn keys_in_paths_are_not_logged(filter: &str) {
    let service = Precis::new().set("log.filter", filter).start().await;
    let secret = "000g40o40k30e209185go38e1s8124gj2gahc5oo34d1m70t19vue2a";
    let routes = [
        (format!("/sessions/precis_{secret}"), "/sessions/{session_id}"),
        (format!("/sessions/precis%5F{secret}"), "/sessions/{session_id}"),
        (format!("/sessions/precis%255f{secret}"), "/sessions/{session_id}"),
        (format!("/sessions/precis%25255F{secret}/messages"), "/sessions/{session_id}/messages"),
        (format!("/sessions/{secret}"), "/sessions/{session_id}"),
        (format!("/sessions/{}/revisions/1", &secret[..40]), "/sessions/{session_id}/revisions/{revision}"),
        (format!("/nothing/precis%255f{secret}"), "(no route)"),
    ];
    for (index, (path, route)) in routes.iter().enumerate() {
        let id = format!("path-{index}");
        let response = service.get(path).header("x-request-id", &id).unchecked().await.expect("a response");
        assert_eq!(response.status(), 404, "{path}");
        let line = service.wait_for_line(&id, |line| request_of(line) == Some(id.as_str())).await;
        assert_eq!(line["route"], *route, "{line}");
    }
    let log = service.log().join("\n");
    assert!(!log.contains(&secret[..24]), "{log}");
}

/// The module `health` of the API tests checks which ids are accepted.
#[tokio::test]
async fn request_id_of_client_is_in_the_log() {
    let service = Precis::new().start().await;
    let request = service.get("/sessions/unknown").header("x-request-id", "mine-1");
    request.await.problem(404, "session-not-found");
    service.wait_for_line("mine-1", |line| request_of(line) == Some("mine-1")).await;
}

/// Rejections under overload are summarised in one line.
#[tokio::test]
async fn rejections_under_overload_are_logged_in_one_line() {
    const REJECTED: u64 = 20;
    let service = Precis::new().set("limits.max_requests_in_flight", "1").start().await;
    let mut under_way = service.connect().await;
    let head = "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 99\r\nexpect: 100-continue\r\n\r\n";
    under_way.write_all(head.as_bytes()).await.expect("sent");
    // The server asks for the body when the request is in flight.
    let mut begun = [0; 12];
    under_way.read_exact(&mut begun).await.expect("an answer");
    assert_eq!(&begun, b"HTTP/1.1 100");
    let ask = || status(service.get("/sessions").header("x-request-id", "xylophon"));
    for _ in 0..REJECTED {
        assert_eq!(ask().await, 503);
    }
    let mut told = 0;
    while told < REJECTED {
        let lines = service.log();
        let lines = lines.iter().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let of = lines.filter(|line| line["message"] == "overloaded: requests were rejected");
        told = of
            .map(|line| {
                assert_eq!(line["limit"], "limits.max_requests_in_flight");
                line["requests"].as_u64().expect("a number")
            })
            .sum();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(told, REJECTED);
    let alone = |line: &String| line.contains("\"status\":503");
    assert!(!service.log().iter().any(alone), "{:#?}", service.log());
}
