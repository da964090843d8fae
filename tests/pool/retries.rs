//! Calls that are repeated, and servers that ask for time.

use crate::harness::{DEADLINE, GOOD, PROTOCOLS, SLACK, consolidate, model, pool, pool_of};
use crate::model_server::{Behaviour, ModelServer, Protocol};
use futures_util::future::join;
use precis::llm::pool::PoolStrategy;
use std::time::Duration;

#[tokio::test]
async fn a_failure_that_passes_costs_one_call_more() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        for fault in [Behaviour::fail(503, "busy"), Behaviour::BreakOff("HALF".to_owned()), Behaviour::Close]
        {
            server.push(fault);
            server.push(Behaviour::answer(GOOD));
            let answer = consolidate(&pool(protocol, &[&server])).await.expect("an answer");
            assert_eq!((answer.text.as_str(), answer.cost.calls, answer.cost.failures), (GOOD, 2, 1));
        }
    }
}

#[tokio::test]
async fn waits_grow() {
    let server = ModelServer::start().await;
    server.default(Behaviour::fail(500, "oops"));
    let mut spec = model("m0", Protocol::OpenAi, &server.base_url());
    spec.retry.retries = 4;
    spec.retry.initial = Duration::from_millis(50);
    spec.retry.max = Duration::from_millis(200);
    consolidate(&pool_of(vec![spec], PoolStrategy::Fallback, DEADLINE)).await.expect_err("it never answers");
    let calls = server.calls();
    let waits: Vec<Duration> = calls.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    // Doubled each time, with up to as much again by chance, and never above the most.
    for (wait, least) in waits.iter().zip([50, 100, 200, 200]) {
        let least = Duration::from_millis(least);
        assert!((least..least + SLACK).contains(wait), "{waits:?}");
    }
    assert_eq!(waits.len(), 4);
}

#[tokio::test]
async fn what_a_server_asks_of_one_holds_for_all() {
    let server = ModelServer::start().await;
    let wait = Duration::from_millis(700);
    server.push(Behaviour::fail_with(429, "slow down", &[("retry-after", "0.7")]));
    let mut spec = model("m0", Protocol::OpenAi, &server.base_url());
    spec.retry.retries = 0;
    spec.retry.max = wait * 2;
    let pools = pool_of(vec![spec], PoolStrategy::Fallback, DEADLINE);
    consolidate(&pools).await.expect_err("not repeated");
    // Whoever comes now waits as the first one would have.
    let (one, two) = join(consolidate(&pools), consolidate(&pools)).await;
    assert_eq!((one.expect("an answer").cost.calls, two.expect("an answer").cost.calls), (1, 1));
    let calls = server.calls();
    assert_eq!(calls.len(), 3);
    for call in &calls[1..] {
        assert!(call.at - calls[0].at >= wait, "{:?}", call.at - calls[0].at);
    }
}

#[tokio::test]
async fn with_another_model_nobody_waits() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.push(Behaviour::fail_with(429, "slow down", &[("retry-after", "20")]));
    let mut spec = model("m0", Protocol::OpenAi, &first.base_url());
    spec.retry.retries = 0;
    spec.retry.max = DEADLINE;
    let models = vec![spec, model("m1", Protocol::OpenAi, &second.base_url())];
    let pools = pool_of(models, PoolStrategy::Fallback, DEADLINE);
    for _ in 0..3 {
        let answer = consolidate(&pools).await.expect("an answer");
        assert_eq!(answer.model, "m1");
    }
    assert_eq!((first.calls().len(), second.calls().len()), (1, 3));
}
