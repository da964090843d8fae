//! The table of server behaviours: the resulting response or error, the number of calls, and the duration. Each row is
//! run in both wire formats, with and without a second model.

use crate::harness::{
    CALL_TIMEOUT, GOOD, PROTOCOLS, RETRY_MAX, SLACK, TOKEN_TIMEOUT, client, consolidate, labels, model_at,
    pool, pool_of,
};
use crate::model_server::{Behaviour, Form, ModelServer, Protocol, refused_base_url};
use futures_util::future::join_all;
use precis::llm::ModelError;
use precis::llm::error::TimeoutPhase;
use precis::llm::model::ModelSpec;
use precis::llm::pool::ModelPools;
use reqwest::Client;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// The result of one row.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Response,
    /// The label of the error, the number of calls, and the minimum duration.
    Error(&'static str, usize, Duration),
}
use Expected::{Error, Response};

const AT_ONCE: Duration = Duration::ZERO;
const HOUR: Duration = Duration::from_hours(1);
/// A part of a response, which must never be used.
const HALF: &str = "HALF of an answer, which must not";

fn half() -> String {
    HALF.to_owned()
}

fn good() -> Behaviour {
    Behaviour::answer(GOOD)
}

/// Name of the row, behaviour of the server for every call, and the result.
type Row = (&'static str, Behaviour, Expected);

/// Unusual but valid responses.
fn valid_responses() -> Vec<Row> {
    let all = [
        Form::SingleBytes,
        Form::Crlf,
        Form::ByteOrderMark,
        Form::Comments,
        Form::UnknownEvents,
        Form::UnknownFields,
    ];
    let pieces =
        ["Ada flies to Zürich on 3 May; ", "Bo wants the 東京 ", "numbers by Friday."].map(str::to_owned);
    vec![
        ("streamed", good(), Response),
        ("not streamed", Behaviour::Whole(GOOD.to_owned()), Response),
        (
            "separate reasoning",
            Behaviour::Reasoning("SECRET reasoning".to_owned(), GOOD.to_owned()),
            Response,
        ),
        ("reasoning in the text", Behaviour::reasoning_in_text("SECRET reasoning", GOOD), Response),
        ("slow stream", Behaviour::Trickle(TOKEN_TIMEOUT / 4, pieces.to_vec()), Response),
        ("single bytes", good().with(Form::SingleBytes), Response),
        ("CR LF", good().with(Form::Crlf), Response),
        ("CR", good().with(Form::Cr), Response),
        ("byte order mark", good().with(Form::ByteOrderMark), Response),
        ("comments", good().with(Form::Comments), Response),
        ("unknown events", good().with(Form::UnknownEvents), Response),
        ("unknown fields", good().with(Form::UnknownFields), Response),
        ("all of these forms", all.into_iter().fold(good(), Behaviour::with), Response),
        ("large comment", good().with(Form::LargeComment(500_000)), Response),
        ("large event", good().with(Form::LargeEvent(500_000)), Response),
        ("no usage", good().with(Form::NoUsage), Response),
        ("stream labelled as text", good().with(Form::ContentType("text/plain")), Response),
        ("stream labelled as JSON", good().with(Form::ContentType("application/json")), Response),
        (
            "JSON labelled as stream",
            Behaviour::Whole(GOOD.to_owned()).with(Form::ContentType("text/event-stream")),
            Response,
        ),
        ("end mark without finish reason", Behaviour::MarkOnly(GOOD.to_owned()), Response),
        ("finish reason without end mark", Behaviour::ReasonOnly(GOOD.to_owned()), Response),
        ("connection broken after the end", good().with(Form::LengthOver(50)), Response),
    ]
}

fn faults() -> Vec<Row> {
    let fail = Behaviour::fail;
    let retry_after = |value: &str| Behaviour::fail_with(429, "slow down", &[("retry-after", value)]);
    let date = |time: SystemTime| httpdate::fmt_http_date(time);
    let now = SystemTime::now();
    let slow = vec!["word ".to_owned(); 40];
    vec![
        // Connections.
        ("closed on accept", Behaviour::CloseOnAccept, Error("connection", 0, AT_ONCE)),
        ("closed without response", Behaviour::Close, Error("connection", 2, AT_ONCE)),
        ("silence", Behaviour::Hang, Error("timeout", 1, TOKEN_TIMEOUT)),
        ("endless comments", Behaviour::CommentsOnly(TOKEN_TIMEOUT / 10), Error("timeout", 1, TOKEN_TIMEOUT)),
        ("endless pings", Behaviour::PingsOnly(TOKEN_TIMEOUT / 10), Error("timeout", 1, TOKEN_TIMEOUT)),
        ("silence within the stream", Behaviour::HangAfter(half()), Error("timeout", 1, TOKEN_TIMEOUT)),
        (
            "endless slow stream",
            Behaviour::Trickle(TOKEN_TIMEOUT / 4, slow),
            Error("timeout", 1, CALL_TIMEOUT),
        ),
        // The end of the stream.
        (
            "connection broken within the stream",
            Behaviour::BreakOff(half()),
            Error("truncated_stream", 2, AT_ONCE),
        ),
        ("end without end mark", Behaviour::EndEarly(half()), Error("truncated_stream", 2, AT_ONCE)),
        ("empty stream", Behaviour::EndEarly(String::new()), Error("truncated_stream", 2, AT_ONCE)),
        (
            "content length too large",
            Behaviour::Whole(half()).with(Form::LengthOver(9)),
            Error("truncated_stream", 2, AT_ONCE),
        ),
        (
            "content length too small",
            good().with(Form::LengthUnder(900)),
            Error("truncated_stream", 2, AT_ONCE),
        ),
        // Rejected responses.
        ("empty", Behaviour::answer(" \n"), Error("rejected", 1, AT_ONCE)),
        ("none", Behaviour::answer("None."), Error("rejected", 1, AT_ONCE)),
        ("truncated", Behaviour::Finish(half(), "length"), Error("rejected", 1, AT_ONCE)),
        ("filtered", Behaviour::Finish(half(), "content_filter"), Error("rejected", 1, AT_ONCE)),
        ("reasoning without end", Behaviour::answer("<think>HALF"), Error("rejected", 1, AT_ONCE)),
        ("garbage", Behaviour::garbage(), Error("protocol", 1, AT_ONCE)),
        ("web page", Behaviour::web_page(200), Error("protocol", 1, AT_ONCE)),
        (
            "compressed",
            Behaviour::Raw(200, vec![("content-encoding", "gzip".to_owned())], "HALF".to_owned()),
            Error("protocol", 1, AT_ONCE),
        ),
        (
            "response beyond the size limit",
            Behaviour::Whole("word ".repeat(300_000)),
            Error("protocol", 1, AT_ONCE),
        ),
        // Errors inside a 200.
        (
            "error within the stream",
            Behaviour::ErrorAfter(half(), "overloaded"),
            Error("server_error", 2, AT_ONCE),
        ),
        (
            "error object",
            Behaviour::Raw(200, Vec::new(), r#"{"error":"odd"}"#.to_owned()),
            Error("protocol", 1, AT_ONCE),
        ),
        // Statuses.
        ("web page of a proxy", Behaviour::web_page(502), Error("server_error", 2, AT_ONCE)),
        ("400", fail(400, "no such field"), Error("status", 1, AT_ONCE)),
        ("401", fail(401, "who?"), Error("unauthorized", 1, AT_ONCE)),
        ("403", fail(403, "not you"), Error("unauthorized", 1, AT_ONCE)),
        ("404", fail(404, "no such model"), Error("status", 1, AT_ONCE)),
        ("408", fail(408, "too slow"), Error("status", 2, AT_ONCE)),
        ("409", fail(409, "locked"), Error("status", 2, AT_ONCE)),
        ("413", fail(413, "too large"), Error("too_long", 1, AT_ONCE)),
        ("425", fail(425, "too early"), Error("status", 2, AT_ONCE)),
        ("context too long", fail(400, "prompt is too long: 9 > 8"), Error("too_long", 1, AT_ONCE)),
        ("500", fail(500, "oops"), Error("server_error", 2, AT_ONCE)),
        (
            "503 without a body",
            Behaviour::Raw(503, Vec::new(), String::new()),
            Error("server_error", 2, AT_ONCE),
        ),
        ("529", fail(529, "overloaded"), Error("server_error", 2, AT_ONCE)),
        ("redirect", Behaviour::redirect(307, "http://127.0.0.1:9/"), Error("status", 1, AT_ONCE)),
        // Retry-After, up to retry_max.
        ("429", fail(429, "slow down"), Error("rate_limited", 2, AT_ONCE)),
        ("429, 0 s", retry_after("0"), Error("rate_limited", 2, AT_ONCE)),
        ("429, 0.15 s", retry_after("0.15"), Error("rate_limited", 2, Duration::from_millis(150))),
        ("429, 1 h", retry_after("3600"), Error("rate_limited", 2, RETRY_MAX)),
        ("429, future date", retry_after(&date(now + HOUR)), Error("rate_limited", 2, RETRY_MAX)),
        ("429, past date", retry_after(&date(now - HOUR)), Error("rate_limited", 2, AT_ONCE)),
        ("429, invalid value", retry_after("tomorrow"), Error("rate_limited", 2, AT_ONCE)),
        (
            "429, in milliseconds",
            Behaviour::fail_with(429, "slow down", &[("retry-after-ms", "150")]),
            Error("rate_limited", 2, Duration::from_millis(150)),
        ),
    ]
}

/// Timeouts of the models. Only the first model of a row about timeouts has short ones, because a busy machine may delay
/// the others.
fn models(
    client: &Client,
    protocol: Protocol,
    servers: &[&ModelServer],
    expected: Expected,
) -> Vec<ModelSpec> {
    let models = servers.iter().enumerate().map(|(index, server)| {
        let mut model = model_at(client.clone(), &format!("m{index}"), protocol, &server.base_url());
        let settings = &mut model.settings;
        match expected {
            // The total timeout expires, but neither of the two other timeouts.
            Error("timeout", _, CALL_TIMEOUT) if index == 0 => {
                (settings.first_token_timeout, settings.idle_timeout) = (None, SLACK);
            }
            Error("timeout", ..) if index == 0 => {}
            _ => {
                (settings.first_token_timeout, settings.idle_timeout) = (None, SLACK);
                settings.timeout = SLACK;
            }
        }
        model
    });
    models.collect()
}

/// A row with its servers and pools.
struct Scene {
    name: String,
    expected: Expected,
    first: ModelServer,
    second: ModelServer,
    alone: ModelPools,
    both: ModelPools,
}

async fn scene(client: &Client, protocol: Protocol, (name, behaviour, expected): Row) -> Scene {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(behaviour);
    second.default(good());
    let pool = |servers: &[&ModelServer]| pool_of(models(client, protocol, servers, expected));
    let (alone, both) = (pool(&[&first]), pool(&[&first, &second]));
    Scene { name: format!("{protocol:?}, {name}"), expected, first, second, alone, both }
}

async fn run(scene: Scene) {
    let Scene { name, expected, first, second, alone, both } = scene;
    let started_at = Instant::now();
    let result = consolidate(&alone).await;
    let duration = started_at.elapsed();
    match expected {
        Response => {
            let response = result.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((response.text.as_str(), response.cost.calls), (GOOD, 1), "{name}");
            assert!(duration < SLACK, "{name}: {duration:?}");
        }
        Error(label, calls, min_duration) => {
            let error = result.expect_err(&name);
            // The server does not count a connection that it closes at once as a call.
            let attempts = if calls == 0 { 2 } else { calls };
            assert_eq!(labels(&error), vec![("m0", label); attempts], "{name}: {error}");
            assert!((min_duration..min_duration + SLACK).contains(&duration), "{name}: {duration:?}");
            let response = consolidate(&both).await.expect(&name);
            assert_eq!((response.text.as_str(), response.model.as_str()), (GOOD, "m1"), "{name}");
            assert_eq!((first.calls().len(), second.calls().len()), (2 * calls, 1), "{name}");
            let text = error.to_string();
            assert!(!text.contains("HALF") && text.len() < 1000, "{name}: {text}");
        }
    }
}

/// Runs the rows in groups: most of them only wait, but a busy machine must not delay the quick ones.
async fn run_all(rows: Vec<Row>) {
    let client = client();
    for rows in rows.chunks(8) {
        for protocol in PROTOCOLS {
            // Built before the first call, so that the construction of one is not part of the duration of another.
            let scenes = join_all(rows.iter().map(|row| scene(&client, protocol, row.clone()))).await;
            join_all(scenes.into_iter().map(run)).await;
        }
    }
}

#[tokio::test]
async fn unusual_but_valid_responses_are_accepted() {
    run_all(valid_responses()).await;
}

#[tokio::test]
async fn faults_lead_to_a_retry_or_to_the_next_model() {
    run_all(faults()).await;
}

#[tokio::test]
async fn keep_alive_data_does_not_extend_the_first_token_timeout() {
    let server = ModelServer::start().await;
    for protocol in PROTOCOLS {
        for behaviour in
            [Behaviour::CommentsOnly(TOKEN_TIMEOUT / 10), Behaviour::PingsOnly(TOKEN_TIMEOUT / 10)]
        {
            server.push(behaviour);
            let error = consolidate(&pool(protocol, &server)).await.expect_err("no token arrives");
            let timeout = ModelError::Timeout(TimeoutPhase::FirstToken, TOKEN_TIMEOUT);
            assert_eq!(error.attempts[0].error, timeout, "{protocol:?}");
        }
    }
}

#[tokio::test]
async fn refused_connection_is_retried_and_leads_to_the_next_model() {
    let second = ModelServer::start().await;
    second.default(good());
    for protocol in PROTOCOLS {
        let refusing = || model_at(client(), "m0", protocol, &refused_base_url());
        let error = consolidate(&pool_of(vec![refusing()])).await.expect_err("connection refused");
        assert_eq!(labels(&error), [("m0", "connection"), ("m0", "connection")]);
        assert!(error.to_string().contains("refused"), "{error}");
        let both = vec![refusing(), model_at(client(), "m1", protocol, &second.base_url())];
        let response = consolidate(&pool_of(both)).await.expect("the second model");
        assert_eq!((response.text.as_str(), response.cost.calls, response.cost.failures), (GOOD, 3, 2));
    }
}

#[tokio::test]
async fn redirect_is_not_followed() {
    let (server, target) = (ModelServer::start().await, ModelServer::start().await);
    for protocol in PROTOCOLS {
        for status in [301, 302, 303, 307, 308] {
            server.push(Behaviour::redirect(status, format!("{}/chat/completions", target.base_url())));
            let error = consolidate(&pool(protocol, &server)).await.expect_err("a redirect");
            assert_eq!(labels(&error), [("m0", "status")]);
        }
    }
    assert_eq!(target.connections(), 0);
}
