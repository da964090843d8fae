//! Whatever models do, in whatever order, over real sockets: no text of a failed attempt becomes a summary, and the
//! deadline holds. That no call begins past it, to the millisecond, is shown over a clock that tests set, in
//! `src/llm/pool/tests.rs`.

use crate::harness::{PROTOCOLS, SLACK, client, consolidate, model_by, pool_of};
use crate::model_server::{Behaviour, Form, ModelServer, Protocol};
use futures_util::future::join_all;
use precis::llm::model::ModelSpec;
use precis::llm::pool::PoolStrategy as Order;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// What a server does with one call, made of a text by which it would be known.
type Fault = fn(String) -> Behaviour;

const FAULTS: [(&str, Fault); 14] = [
    ("answer", Behaviour::Whole),
    ("stream", |text| Behaviour::answer(text).with(Form::EveryByte)),
    ("break", Behaviour::BreakOff),
    ("early end", Behaviour::EndEarly),
    ("error", |text| Behaviour::ErrorAfter(text, "overloaded")),
    ("cut off", |text| Behaviour::Finish(text, "length")),
    ("filtered", |text| Behaviour::Finish(text, "content_filter")),
    ("silence", Behaviour::HangAfter),
    ("close", |_| Behaviour::Close),
    ("503", |text| Behaviour::fail(503, &text)),
    ("401", |text| Behaviour::fail(401, &text)),
    ("429", |text| Behaviour::fail_with(429, &text, &[("retry-after", "0.03")])),
    ("short", |text| Behaviour::Whole(text).with(Form::LengthOver(9))),
    ("compressed", |text| Behaviour::answer(text).with(Form::Gzip)),
];

/// How long anyone waits for the next token: whatever comes too late on a busy machine, no check is about that.
const QUICK: Duration = Duration::from_millis(100);

/// Which of them are answers.
const GOOD: usize = 2;

#[derive(Clone, Debug)]
struct Story {
    protocol: Protocol,
    /// For each model, by number in [`FAULTS`], what its server does with one call after another.
    models: Vec<Vec<usize>>,
    round_robin: bool,
    deadline: Duration,
}

fn stories() -> impl Strategy<Value = Story> {
    let models = vec(vec(0..FAULTS.len(), 3), 1..4);
    (0..PROTOCOLS.len(), models, any::<bool>(), 50_u64..900).prop_map(
        |(protocol, models, round_robin, millis)| Story {
            protocol: PROTOCOLS[protocol],
            models,
            round_robin,
            deadline: Duration::from_millis(millis),
        },
    )
}

/// Three questions, one after another: what it is about is also what one leaves behind for the next.
async fn play(story: Story, answered: &AtomicUsize) -> Result<(), TestCaseError> {
    let servers = join_all(story.models.iter().map(|_| ModelServer::start())).await;
    let (http, mut specs) = (client(), Vec::new());
    for (index, (server, script)) in servers.iter().zip(&story.models).enumerate() {
        for (call, fault) in script.iter().enumerate() {
            let kind = if *fault < GOOD { "good" } else { "BAD" };
            server.push(FAULTS[*fault].1(format!("{kind} text of model {index}, call {call}")));
        }
        server.default(Behaviour::fail(404, "BAD, and over"));
        let spec = model_by(http.clone(), &format!("m{index}"), story.protocol, &server.base_url());
        specs.push(ModelSpec { first_token_timeout: Some(QUICK), idle_timeout: QUICK, ..spec });
    }
    let order = if story.round_robin { Order::RoundRobin } else { Order::Fallback };
    let pools = pool_of(specs, order, story.deadline);
    for _ in 0..3 {
        let began = Instant::now();
        let asked = consolidate(&pools).await;
        prop_assert!(began.elapsed() < story.deadline + SLACK, "{:?}", began.elapsed());
        match asked {
            Ok(answer) => {
                answered.fetch_add(1, Ordering::Relaxed);
                let parts = answer
                    .text
                    .strip_prefix("good text of model ")
                    .and_then(|text| text.split_once(", call "));
                let (index, call) =
                    parts.unwrap_or_else(|| panic!("not an answer of any model: {}", answer.text));
                prop_assert_eq!(format!("m{index}"), answer.model);
                prop_assert!(call.parse::<usize>().is_ok(), "more than one answer: {}", answer.text);
            }
            Err(error) => prop_assert_eq!(
                error.attempts.iter().filter(|attempt| attempt.cause.was_sent()).count(),
                usize::try_from(error.cost.calls).unwrap_or(0)
            ),
        }
    }
    let calls: usize = servers.iter().map(|server| server.calls().len()).sum();
    prop_assert!(calls <= 3 * 2 * servers.len(), "{calls} calls");
    Ok(())
}

#[test]
fn no_text_of_a_failed_attempt_is_used() {
    let config = Config { cases: 48, failure_persistence: None, ..Config::default() };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let answered = AtomicUsize::new(0);
    TestRunner::new(config)
        .run(&stories(), |story| runtime.block_on(play(story, &answered)))
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(answered.into_inner() > 0, "nobody had an answer in time");
}
