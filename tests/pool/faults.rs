//! The table of everything that a server can do to a pool: what the pool makes of it, with how many calls, and within
//! which time. Each line is run in both protocols, with a second model that answers and without.

use crate::harness::{
    CALL, DEADLINE, GOOD, PROTOCOLS, SLACK, TOKEN, WAIT, client, consolidate, model, model_by, names, pool,
    pool_of,
};
use crate::model_server::{Behaviour, Form, ModelServer, Protocol, refused_base_url};
use futures_util::future::join_all;
use precis::llm::model::ModelSpec;
use precis::llm::pool::{ModelPools, PoolStrategy};
use reqwest::Client;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// What becomes of it.
#[derive(Clone, Copy, Debug)]
enum Becomes {
    /// The answer.
    Answer,
    /// A failure of this name, after so many calls, which take at least this long together.
    Failure(&'static str, usize, Duration),
}
use Becomes::{Answer, Failure};

const SOON: Duration = Duration::ZERO;
const HOUR: Duration = Duration::from_hours(1);
/// Half of an answer, which must never be seen.
const HALF: &str = "HALF of an answer, which must not";

fn half() -> String {
    HALF.to_owned()
}

fn good() -> Behaviour {
    Behaviour::answer(GOOD)
}

/// Its name, what the server does with every call, and what becomes of that.
type Fault = (&'static str, Behaviour, Becomes);

/// Odd, but right.
fn oddities() -> Vec<Fault> {
    let all =
        [Form::EveryByte, Form::Crlf, Form::Bom, Form::Comments, Form::UnknownEvents, Form::UnknownFields];
    let pieces =
        ["Ada flies to Zürich on 3 May; ", "Bo wants the 東京 ", "numbers by Friday."].map(str::to_owned);
    vec![
        ("streamed", good(), Answer),
        ("not streamed", Behaviour::Whole(GOOD.to_owned()), Answer),
        ("thoughts apart", Behaviour::Thinking("SECRET thoughts".to_owned(), GOOD.to_owned()), Answer),
        ("thoughts in the text", Behaviour::thinking_aloud("SECRET thoughts", GOOD), Answer),
        ("a trickle", Behaviour::Trickle(TOKEN / 4, pieces.to_vec()), Answer),
        ("every byte for itself", good().with(Form::EveryByte), Answer),
        ("CR LF", good().with(Form::Crlf), Answer),
        ("CR", good().with(Form::Cr), Answer),
        ("a byte order mark", good().with(Form::Bom), Answer),
        ("comments", good().with(Form::Comments), Answer),
        ("unknown events", good().with(Form::UnknownEvents), Answer),
        ("unknown fields", good().with(Form::UnknownFields), Answer),
        ("all of that", all.into_iter().fold(good(), Behaviour::with), Answer),
        ("a huge comment", good().with(Form::HugeComment(500_000)), Answer),
        ("a huge event", good().with(Form::HugeEvent(500_000)), Answer),
        ("no usage", good().with(Form::NoUsage), Answer),
        ("a stream called text", good().with(Form::Labelled("text/plain")), Answer),
        ("a stream called JSON", good().with(Form::Labelled("application/json")), Answer),
        (
            "JSON called a stream",
            Behaviour::Whole(GOOD.to_owned()).with(Form::Labelled("text/event-stream")),
            Answer,
        ),
        ("an end mark alone", Behaviour::MarkOnly(GOOD.to_owned()), Answer),
        ("a finish reason alone", Behaviour::ReasonOnly(GOOD.to_owned()), Answer),
        ("a break after the end", good().with(Form::LengthOver(50)), Answer),
    ]
}

/// Wrong, and the next call may go better, or not.
fn faults() -> Vec<Fault> {
    let fail = Behaviour::fail;
    let retry_after = |value: &str| Behaviour::fail_with(429, "slow down", &[("retry-after", value)]);
    let date = |time: SystemTime| httpdate::fmt_http_date(time);
    let now = SystemTime::now();
    let slow = vec!["word ".to_owned(); 40];
    vec![
        // Connections.
        ("closed on accept", Behaviour::CloseOnAccept, Failure("connection", 0, SOON)),
        ("closed without an answer", Behaviour::Close, Failure("connection", 2, SOON)),
        ("silence", Behaviour::Hang, Failure("timeout", 1, TOKEN)),
        ("comments for ever", Behaviour::CommentsOnly(TOKEN / 10), Failure("timeout", 1, TOKEN)),
        ("pings for ever", Behaviour::PingsOnly(TOKEN / 10), Failure("timeout", 1, TOKEN)),
        ("silence in mid-stream", Behaviour::HangAfter(half()), Failure("timeout", 1, TOKEN)),
        ("a trickle for ever", Behaviour::Trickle(TOKEN / 4, slow), Failure("timeout", 1, CALL)),
        // Ends.
        ("a break in mid-stream", Behaviour::BreakOff(half()), Failure("broken_off", 2, SOON)),
        ("an end without a mark", Behaviour::EndEarly(half()), Failure("broken_off", 2, SOON)),
        ("nothing at all", Behaviour::EndEarly(String::new()), Failure("broken_off", 2, SOON)),
        (
            "a length that promises more",
            Behaviour::Whole(half()).with(Form::LengthOver(9)),
            Failure("broken_off", 2, SOON),
        ),
        ("a length that hides the end", good().with(Form::LengthUnder(900)), Failure("broken_off", 2, SOON)),
        // Answers that are none.
        ("empty", Behaviour::answer(" \n"), Failure("refused", 1, SOON)),
        ("none", Behaviour::answer("None."), Failure("refused", 1, SOON)),
        ("cut off", Behaviour::Finish(half(), "length"), Failure("refused", 1, SOON)),
        ("filtered", Behaviour::Finish(half(), "content_filter"), Failure("refused", 1, SOON)),
        ("thoughts without end", Behaviour::answer("<think>HALF"), Failure("refused", 1, SOON)),
        ("garbage", Behaviour::garbage(), Failure("protocol", 1, SOON)),
        ("a web page", Behaviour::web_page(200), Failure("protocol", 1, SOON)),
        ("compressed", good().with(Form::Gzip), Failure("protocol", 1, SOON)),
        ("a flood", Behaviour::Whole("word ".repeat(300_000)), Failure("protocol", 1, SOON)),
        // Errors inside a 200.
        (
            "overloaded in mid-stream",
            Behaviour::ErrorAfter(half(), "overloaded"),
            Failure("server_error", 2, SOON),
        ),
        (
            "an error object",
            Behaviour::Raw(200, Vec::new(), r#"{"error":"odd"}"#.to_owned()),
            Failure("protocol", 1, SOON),
        ),
        // Statuses.
        ("a web page of a proxy", Behaviour::web_page(502), Failure("server_error", 2, SOON)),
        ("400", fail(400, "no such field"), Failure("rejected", 1, SOON)),
        ("401", fail(401, "who?"), Failure("unauthorized", 1, SOON)),
        ("403", fail(403, "not you"), Failure("unauthorized", 1, SOON)),
        ("404", fail(404, "no such model"), Failure("rejected", 1, SOON)),
        ("408", fail(408, "too slow"), Failure("rejected", 2, SOON)),
        ("409", fail(409, "locked"), Failure("rejected", 2, SOON)),
        ("413", fail(413, "too large"), Failure("too_long", 1, SOON)),
        ("425", fail(425, "too early"), Failure("rejected", 2, SOON)),
        ("the context is too long", fail(400, "prompt is too long: 9 > 8"), Failure("too_long", 1, SOON)),
        ("500", fail(500, "oops"), Failure("server_error", 2, SOON)),
        (
            "503 without a body",
            Behaviour::Raw(503, Vec::new(), String::new()),
            Failure("server_error", 2, SOON),
        ),
        ("529", fail(529, "overloaded"), Failure("server_error", 2, SOON)),
        ("a redirect", Behaviour::redirect(307, "http://127.0.0.1:9/"), Failure("rejected", 1, SOON)),
        // Retry-After, up to the longest wait of ours.
        ("429", fail(429, "slow down"), Failure("rate_limited", 2, SOON)),
        ("429, 0 s", retry_after("0"), Failure("rate_limited", 2, SOON)),
        ("429, 0.15 s", retry_after("0.15"), Failure("rate_limited", 2, Duration::from_millis(150))),
        ("429, 1 h", retry_after("3600"), Failure("rate_limited", 2, WAIT)),
        ("429, a date to come", retry_after(&date(now + HOUR)), Failure("rate_limited", 2, WAIT)),
        ("429, a date gone by", retry_after(&date(now - HOUR)), Failure("rate_limited", 2, SOON)),
        ("429, no such form", retry_after("tomorrow"), Failure("rate_limited", 2, SOON)),
        (
            "429, in milliseconds",
            Behaviour::fail_with(429, "slow down", &[("retry-after-ms", "150")]),
            Failure("rate_limited", 2, Duration::from_millis(150)),
        ),
    ]
}

/// A model that nobody waits for any longer than its fault is about: a busy machine takes its time for the others.
fn specs(http: &Client, protocol: Protocol, servers: &[&ModelServer], becomes: Becomes) -> Vec<ModelSpec> {
    let named = servers.iter().enumerate();
    let specs = named
        .map(|(index, server)| model_by(http.clone(), &format!("m{index}"), protocol, &server.base_url()));
    let impatient = |index: usize| index == 0 && matches!(becomes, Failure("timeout", ..));
    let specs = specs.enumerate().map(|(index, spec)| {
        if impatient(index) && matches!(becomes, Failure(_, _, CALL)) {
            // The whole takes too long, none of its pieces does.
            ModelSpec { first_token_timeout: None, idle_timeout: SLACK, ..spec }
        } else if impatient(index) {
            spec
        } else {
            ModelSpec { first_token_timeout: None, idle_timeout: SLACK, timeout: SLACK, ..spec }
        }
    });
    specs.collect()
}

/// A fault with all that it takes to meet it.
struct Scene {
    what: String,
    becomes: Becomes,
    first: ModelServer,
    second: ModelServer,
    alone: ModelPools,
    both: ModelPools,
}

async fn scene(http: &Client, protocol: Protocol, (name, behaviour, becomes): Fault) -> Scene {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(behaviour);
    second.default(good());
    let pool = |servers: &[&ModelServer]| {
        pool_of(specs(http, protocol, servers, becomes), PoolStrategy::Fallback, DEADLINE)
    };
    let (alone, both) = (pool(&[&first]), pool(&[&first, &second]));
    Scene { what: format!("{protocol:?}, {name}"), becomes, first, second, alone, both }
}

async fn run(scene: Scene) {
    let Scene { what, becomes, first, second, alone, both } = scene;
    let began = Instant::now();
    let alone = consolidate(&alone).await;
    let took = began.elapsed();
    match becomes {
        Answer => {
            let alone = alone.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((alone.text.as_str(), alone.cost.calls), (GOOD, 1), "{what}");
            assert!(took < SLACK, "{what}: {took:?}");
        }
        Failure(cause, calls, at_least) => {
            let error = alone.expect_err(&what);
            // A connection that is closed at once is no call that the server would know of.
            let attempts = if calls == 0 { 2 } else { calls };
            assert_eq!(names(&error), vec![("m0", cause); attempts], "{what}: {error}");
            assert!((at_least..at_least + SLACK).contains(&took), "{what}: {took:?}");
            let answer = consolidate(&both).await.expect(&what);
            assert_eq!((answer.text.as_str(), answer.model.as_str()), (GOOD, "m1"), "{what}");
            assert_eq!((first.calls().len(), second.calls().len()), (2 * calls, 1), "{what}");
            let text = error.to_string();
            assert!(!text.contains("HALF") && text.len() < 1000, "{what}: {text}");
        }
    }
}

/// All at once, since most of them wait: but not so many that a busy machine is late with the quick ones.
async fn run_all(faults: Vec<Fault>) {
    let http = client();
    for faults in faults.chunks(8) {
        for protocol in PROTOCOLS {
            // All of them before the first call: what one takes to be made is no time of another's.
            let scenes = join_all(faults.iter().map(|fault| scene(&http, protocol, fault.clone()))).await;
            join_all(scenes.into_iter().map(run)).await;
        }
    }
}

#[tokio::test]
async fn what_is_odd_but_right_is_an_answer() {
    run_all(oddities()).await;
}

#[tokio::test]
async fn what_is_wrong_leads_to_the_next_call_or_the_next_model() {
    run_all(faults()).await;
}

#[tokio::test]
async fn nobody_there() {
    let second = ModelServer::start().await;
    second.default(good());
    for protocol in PROTOCOLS {
        let gone = || model("m0", protocol, &refused_base_url());
        let error =
            consolidate(&pool_of(vec![gone()], PoolStrategy::Fallback, DEADLINE)).await.expect_err("alone");
        assert_eq!(names(&error), [("m0", "connection"), ("m0", "connection")]);
        assert!(error.to_string().contains("refused"), "{error}");
        let both = vec![gone(), model("m1", protocol, &second.base_url())];
        let answer = consolidate(&pool_of(both, PoolStrategy::Fallback, DEADLINE)).await.expect("the second");
        assert_eq!((answer.text.as_str(), answer.cost.calls, answer.cost.failures), (GOOD, 3, 2));
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed_and_the_key_stays() {
    let (server, elsewhere) = (ModelServer::start().await, ModelServer::start().await);
    for protocol in PROTOCOLS {
        for status in [301, 302, 303, 307, 308] {
            server.push(Behaviour::redirect(status, format!("{}/chat/completions", elsewhere.base_url())));
            let error = consolidate(&pool(protocol, &[&server])).await.expect_err("not an answer");
            assert_eq!(names(&error), [("m0", "rejected")]);
        }
    }
    assert_eq!(elsewhere.connections(), 0);
}
