//! A model that is down for good, and one that comes back.

use crate::harness::{DEADLINE, GOOD, PROTOCOLS, consolidate, model, names, pool_of};
use crate::model_server::{Behaviour, ModelServer, Protocol};
use futures_util::future::join_all;
use precis::llm::circuit_breaker::CircuitBreakerPolicy;
use precis::llm::model::ModelSpec;
use precis::llm::pool::{ModelPools, PoolStrategy};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const OPEN_FOR: Duration = Duration::from_millis(600);

fn breaking(protocol: Protocol, first: &ModelServer, second: &ModelServer) -> ModelPools {
    let breaker =
        CircuitBreakerPolicy { failure_percent: 50, min_calls: 4, window: DEADLINE, open_for: OPEN_FOR };
    let first = ModelSpec { breaker, ..model("m0", protocol, &first.base_url()) };
    pool_of(vec![first, model("m1", protocol, &second.base_url())], PoolStrategy::Fallback, DEADLINE)
}

#[tokio::test]
async fn down_for_good_costs_one_call_and_back_again_is_used() {
    for protocol in PROTOCOLS {
        let (first, second) = (ModelServer::start().await, ModelServer::start().await);
        first.default(Behaviour::fail(500, "down"));
        second.default(Behaviour::answer(GOOD));
        let pools = breaking(protocol, &first, &second);
        let mut calls = Vec::new();
        for _ in 0..4 {
            calls.push(consolidate(&pools).await.expect("the second").cost.calls);
        }
        assert_eq!(calls, [3, 3, 1, 1], "two calls of the first each, until there were four");
        assert_eq!(first.calls().len(), 4);

        // A probe that fails keeps it open.
        tokio::time::sleep(OPEN_FOR).await;
        assert_eq!(consolidate(&pools).await.expect("the second").cost.calls, 2);
        assert_eq!(consolidate(&pools).await.expect("the second").cost.calls, 1);
        assert_eq!(first.calls().len(), 5);

        first.default(Behaviour::answer(GOOD));
        assert_eq!(consolidate(&pools).await.expect("the second").model, "m1", "not yet");
        tokio::time::sleep(OPEN_FOR).await;
        for _ in 0..3 {
            let answer = consolidate(&pools).await.expect("the first");
            assert_eq!((answer.model.as_str(), answer.cost.calls), ("m0", 1));
        }
    }
}

#[tokio::test]
async fn one_call_probes_whoever_asks() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(Behaviour::fail(500, "down"));
    let pools = breaking(Protocol::OpenAi, &first, &second);
    for _ in 0..2 {
        consolidate(&pools).await.expect("the second");
    }
    let back = Arc::new(Semaphore::new(0));
    first.default(Behaviour::Held(Arc::clone(&back), GOOD.to_owned()));
    tokio::time::sleep(OPEN_FOR).await;
    let before = second.calls().len();
    let release = async {
        second.until_calls(before + 19).await;
        back.add_permits(1);
    };
    let (answers, ()) =
        futures_util::future::join(join_all((0..20).map(|_| consolidate(&pools))), release).await;
    let models: Vec<String> = answers.into_iter().map(|answer| answer.expect("an answer").model).collect();
    assert_eq!(models.iter().filter(|model| *model == "m0").count(), 1);
    assert_eq!(first.calls().len(), 5);
}

#[tokio::test]
async fn what_comes_with_a_conversation_does_not_open_it() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    let pools = breaking(Protocol::OpenAi, &first, &second);
    for _ in 0..3 {
        for fault in [
            Behaviour::answer("none"),
            Behaviour::Finish("HALF".to_owned(), "length"),
            Behaviour::fail(400, "no"),
            Behaviour::fail(413, "too large"),
        ] {
            first.push(fault);
            assert_eq!(consolidate(&pools).await.expect("the second").model, "m1");
        }
    }
    assert_eq!(consolidate(&pools).await.expect("the first").model, "m0");
}

#[tokio::test]
async fn with_all_of_them_open_no_call_is_made() {
    let server = ModelServer::start().await;
    server.default(Behaviour::fail(401, "who?"));
    let breaker =
        CircuitBreakerPolicy { failure_percent: 50, min_calls: 1, window: DEADLINE, open_for: DEADLINE };
    let spec = ModelSpec { breaker, ..model("m0", Protocol::OpenAi, &server.base_url()) };
    let pools = pool_of(vec![spec], PoolStrategy::Fallback, DEADLINE);
    consolidate(&pools).await.expect_err("refused");
    let error = consolidate(&pools).await.expect_err("open");
    assert_eq!(names(&error), [("m0", "breaker_open")]);
    assert_eq!((error.cost.calls, server.calls().len()), (0, 1));
    assert!(
        error.to_string().contains("m0: not called: it keeps failing, and is tried again in "),
        "{error}"
    );
}
