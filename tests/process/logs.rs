//! What the log holds, and what it must not: no text of a conversation, no memory, no key, no password.

use crate::service::{Precis, Process};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// What was said, in messages, prompts, summaries and memory. Each place has words of its own, in which this occurs.
const SAID: &str = "xylophon";
/// The key of the model's provider.
const KEY: &str = "sk-hunter2-key-0123456789";
const PASSWORD: &str = "hunter2-password";

/// A sentence that nobody but the place of this name says.
fn said(place: &str) -> String {
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

async fn status(request: RequestBuilder) -> u16 {
    request.send().await.expect("an answer").status().as_u16()
}

/// A session's life with all that can go wrong in it. Each request has an id of its own.
async fn story(service: &Process, model: &ModelServer) {
    let request =
        |method: Method, path: &str, id: &str| service.request(method, path).header("x-request-id", id);
    let turn = |place: &str| {
        json!({"messages": [
            {"role": "user", "name": SAID, "content": said(place)},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": said("arguments")}}]},
            {"role": "tool", "tool_call_id": "c", "content": said("result")},
            {"role": "assistant", "content": [{"type": "text", "text": said("reply")}]},
            {"role": "user", "content": said("question")},
            {"role": "assistant", "content": said("answer")},
        ]})
    };
    let context = json!({"system_prompt": said("system"), "user_message": said("new")});
    for (index, behaviour) in bad_answers().into_iter().enumerate() {
        model.push(behaviour);
        let exchange = request(Method::POST, "/sessions/s/exchanges", &format!("exchange-{index}"));
        assert_eq!(status(exchange.json(&turn("user"))).await, 201);
        let asked = request(Method::POST, "/sessions/s/context", &format!("failed-{index}")).json(&context);
        let answer: Value = asked.send().await.expect("an answer").json().await.expect("JSON");
        assert_eq!(answer["consolidation"]["outcome"], "failed", "{index}");
        let reason = answer["consolidation"]["reason"].clone();
        assert!(reason.is_string(), "{index}");
        assert_absent(&[reason], &[SAID, KEY]);
    }
    // The second answer compresses the summary, or fails to.
    model.push(Behaviour::answer(said("summary") + " It has more than ten words."));
    model.push(Behaviour::reply(|call| format!("{} {}", call.user(), said("echo"))));
    let asked = request(Method::POST, "/sessions/s/context", "consolidated").json(&context);
    let answer: Value = asked.send().await.expect("an answer").json().await.expect("JSON");
    assert_eq!(answer["consolidation"]["outcome"], "consolidated", "{answer}");

    model.push(Behaviour::answer(said("summary")));
    model.push(Behaviour::answer(SAID));
    request(Method::POST, "/sessions/s/exchanges", "more")
        .json(&turn("more"))
        .send()
        .await
        .expect("an answer");
    let background = json!({"mode": "background"});
    let asked = request(Method::POST, "/sessions/s/context", "background").json(&background);
    assert_eq!(status(asked).await, 200);
    model.until_idle().await;
    service.until_logged("consolidated").await;

    let memory = |id| request(Method::PUT, "/users/default/memory", id);
    assert!(status(memory("memory").json(&json!({"content": said("memory")}))).await < 300);
    let stale = memory("stale").header("if-match", "\"99\"").json(&json!({"content": said("stale")}));
    assert_eq!(status(stale).await, 412);

    // Requests that are refused, with the words in each part of them.
    let word = said("refused");
    let exchanges = "/sessions/s/exchanges";
    for (index, request) in [
        request(Method::POST, exchanges, "bad-0").body(format!("{{\"user_message\": \"{word}")),
        request(Method::POST, exchanges, "bad-1").json(&json!({"user_message": word, SAID: word})),
        request(Method::POST, exchanges, "bad-2")
            .json(&json!({"messages": [{"role": SAID, "content": word}]})),
        request(Method::POST, exchanges, "bad-3")
            .json(&json!({"messages": [{"role": "user", "content": 3, "x": word}]})),
        request(Method::POST, exchanges, "bad-4")
            .json(&json!({"user_message": word.repeat(400), "assistant_reply": word})),
        request(Method::POST, exchanges, "bad-5").header("idempotency-key", word.as_str()).json(&turn("bad")),
        request(Method::POST, exchanges, "bad-6")
            .json(&json!({"messages": [], "user_id": word, "metadata": word})),
        request(Method::POST, "/sessions/s/context", "bad-7").json(&json!({"mode": word})),
        request(Method::GET, &format!("/sessions/s/messages?limit={SAID}"), "bad-8"),
        request(Method::GET, &format!("/sessions?cursor={SAID}"), "bad-9"),
    ]
    .into_iter()
    .enumerate()
    {
        let refused = status(request.header("content-type", "application/json")).await;
        assert!((400..500).contains(&refused), "{index}: {refused}");
    }
}

/// One for each way in which a model fails. What servers say of a request may quote it, and the key with it.
fn bad_answers() -> Vec<Behaviour> {
    let quoted = said("user");
    vec![
        Behaviour::fail(500, &format!("could not handle \"{quoted}\" for {KEY}")),
        Behaviour::fail(400, &format!("{{'input': '{}', 'loc': 'messages'}}", quoted.to_uppercase())),
        Behaviour::Raw(401, Vec::new(), format!("bad key {KEY} for {quoted}")),
        Behaviour::garbage(),
        Behaviour::BreakOff(said("broken")),
        Behaviour::EndEarly(said("early")),
        Behaviour::Finish(said("cut"), "length"),
        Behaviour::ErrorAfter(said("partial"), "overloaded"),
        Behaviour::answer("none"),
        Behaviour::HangAfter(said("hanging")),
    ]
}

/// Ends the service, for its last lines, and reads its log.
async fn log_of(mut service: Process) -> Vec<Value> {
    service.signal("TERM");
    assert_eq!(service.ended().await.0, Some(0));
    let read = |line: &String| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    service.log().iter().map(read).collect()
}

/// The request that a line belongs to.
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
async fn the_log_tells_what_happened_and_nothing_that_was_said() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let service = start(&backend, &model, "debug").await;
    story(&service, &model).await;
    let log = log_of(service).await;
    assert_absent(&log, &[SAID, KEY, PASSWORD]);

    let with = |message: &str, id: &str| {
        let of = |line: &&Value| {
            line["message"].as_str().is_some_and(|said| said.starts_with(message))
                && request_of(line) == Some(id)
        };
        assert_eq!(log.iter().filter(of).count(), 1, "{message:?} of {id}: {log:#?}");
    };
    for index in 0..bad_answers().len() {
        with("attempt failed", &format!("failed-{index}"));
        with("consolidation failed", &format!("failed-{index}"));
        with("answered", &format!("failed-{index}"));
    }
    with("consolidated", "consolidated");
    with("meta-consolidation failed", "consolidated");
    with("consolidated", "background");
    with("answered", "memory");
    with("answered", "bad-0");
    // What the service itself says is about a request, or about its own life.
    for line in log.iter().filter(|line| line["target"].as_str().expect("text").starts_with("precis")) {
        let message = line["message"].as_str().expect("text");
        let life = ["listening on ", "stopping", "stopped"].iter().any(|life| message.starts_with(life));
        assert!(life != request_of(line).is_some(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_filter_brings_a_key_into_the_log() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let service = start(&backend, &model, "trace").await;
    story(&service, &model).await;
    let log = log_of(service).await;
    assert!(log.iter().any(|line| line["level"] == "TRACE"), "the filter holds");
    assert_absent(&log, &[KEY, PASSWORD]);
}

#[tokio::test]
async fn a_request_id_is_taken_or_made_and_returned() {
    let service = Precis::new().start().await;
    for (given, taken) in [(Some("mine-1"), true), (Some("two words"), false), (None, false)] {
        let mut request = service.request(Method::GET, "/sessions");
        if let Some(given) = given {
            request = request.header("x-request-id", given);
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), StatusCode::OK);
        let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
        assert_eq!(given == Some(id.as_str()), taken, "{id}");
        service.until_line(&id, |line| request_of(line) == Some(id.as_str())).await;
    }
}

/// Refusals for there being too many are told together, and not one by one.
#[tokio::test]
async fn refusals_under_overload_are_summed_up() {
    const REFUSED: u64 = 20;
    let service = Precis::new().set("limits.max_requests_in_flight", "1").start().await;
    let mut under_way =
        TcpStream::connect(service.url.trim_start_matches("http://")).await.expect("connected");
    let head = "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 99\r\nexpect: 100-continue\r\n\r\n";
    under_way.write_all(head.as_bytes()).await.expect("sent");
    // Its body is asked for once it is under way.
    let mut begun = [0; 12];
    under_way.read_exact(&mut begun).await.expect("an answer");
    assert_eq!(&begun, b"HTTP/1.1 100");
    let ask = || status(service.request(Method::GET, "/sessions").header("x-request-id", "xylophon"));
    for _ in 0..REFUSED {
        assert_eq!(ask().await, 503);
    }
    let mut told = 0;
    while told < REFUSED {
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
    assert_eq!(told, REFUSED);
    let alone = |line: &String| line.contains("\"status\":503");
    assert!(!service.log().iter().any(alone), "{:#?}", service.log());
}
