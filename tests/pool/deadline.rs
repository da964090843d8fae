//! One deadline over everything, and errors that say what became of it.

use crate::harness::{CALL, DEADLINE, PROTOCOLS, SLACK, TOKEN, consolidate, model, names, pool, pool_of};
use crate::model_server::{Behaviour, ModelServer, Protocol, refused_base_url};
use precis::llm::error::TimeoutPhase;
use precis::llm::model::ModelSpec;
use precis::llm::pool::PoolStrategy;
use precis::llm::{Llm as _, ModelError};
use tokio::time::Instant;

#[tokio::test]
async fn the_deadline_is_over_everything() {
    for protocol in PROTOCOLS {
        let servers = [ModelServer::start().await, ModelServer::start().await, ModelServer::start().await];
        for server in &servers {
            server.default(Behaviour::Hang);
        }
        let deadline = TOKEN * 3 / 2;
        let named = servers.iter().enumerate();
        let models = named.map(|(index, server)| model(&format!("m{index}"), protocol, &server.base_url()));
        let models = models.map(|model| ModelSpec { timeout: TOKEN, first_token_timeout: None, ..model });
        let pools = pool_of(models.collect(), PoolStrategy::Fallback, deadline);
        assert_eq!(pools.deadline("p"), deadline);
        let started = Instant::now();
        let error = consolidate(&pools).await.expect_err("all hang");
        assert!((deadline..deadline + SLACK).contains(&started.elapsed()));
        // The second got what was left, and for the third there was nothing.
        assert_eq!(error.attempts.len(), 2, "{error}");
        assert_eq!(error.attempts[0].cause, ModelError::Timeout(TimeoutPhase::Total, TOKEN));
        let left = match error.attempts[1].cause {
            ModelError::Timeout(TimeoutPhase::Deadline, left) => left,
            ref cause => panic!("{cause}"),
        };
        assert!(left + TOKEN <= deadline, "{error}");
        assert!(servers[2].calls().is_empty());
    }
}

#[tokio::test]
async fn signs_of_life_are_no_progress() {
    let server = ModelServer::start().await;
    for protocol in PROTOCOLS {
        for alive in [Behaviour::CommentsOnly(TOKEN / 10), Behaviour::PingsOnly(TOKEN / 10)] {
            server.push(alive);
            let error = consolidate(&pool(protocol, &[&server])).await.expect_err("it never answers");
            assert_eq!(
                error.attempts[0].cause,
                ModelError::Timeout(TimeoutPhase::FirstToken, TOKEN),
                "{protocol:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_wait_that_does_not_fit_is_not_begun() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(Behaviour::fail_with(503, "later", &[("retry-after", "20")]));
    let mut patient = model("m0", Protocol::OpenAi, &first.base_url());
    patient.retry.max = DEADLINE;
    let models = vec![patient, model("m1", Protocol::OpenAi, &second.base_url())];
    let started = Instant::now();
    let answer =
        consolidate(&pool_of(models, PoolStrategy::Fallback, DEADLINE / 2)).await.expect("an answer");
    assert_eq!((answer.model.as_str(), answer.cost.calls), ("m1", 2));
    assert!(started.elapsed() < SLACK);
}

#[tokio::test]
async fn the_error_lists_every_attempt() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(Behaviour::fail(503, "busy"));
    second.default(Behaviour::answer("n/a"));
    let of = |name, base_url: &str| model(name, Protocol::OpenAi, base_url);
    let models =
        vec![of("m0", &first.base_url()), of("m1", &refused_base_url()), of("m2", &second.base_url())];
    let error = consolidate(&pool_of(models, PoolStrategy::Fallback, DEADLINE)).await.expect_err("all fail");
    let expected = [
        ("m0", "server_error"),
        ("m0", "server_error"),
        ("m1", "connection"),
        ("m1", "connection"),
        ("m2", "refused"),
    ];
    assert_eq!(names(&error), expected);
    let text = error.to_string();
    for part in
        ["pool \"p\"", "m0: status 503: busy (after", "m1: no connection: ", "m2: answer refused: a bare"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert!(error.attempts.iter().all(|attempt| attempt.duration < CALL));
    assert_eq!((error.cost.calls, error.cost.failures), (5, 5));
}

#[tokio::test]
async fn round_robin_begins_with_the_next_one() {
    let servers = [ModelServer::start().await, ModelServer::start().await, ModelServer::start().await];
    servers[1].default(Behaviour::fail(401, "who?"));
    let named = servers.iter().enumerate();
    let models =
        named.map(|(index, server)| model(&format!("m{index}"), Protocol::OpenAi, &server.base_url()));
    let pools = pool_of(models.collect(), PoolStrategy::RoundRobin, DEADLINE);
    let mut answered = Vec::new();
    for _ in 0..6 {
        answered.push(consolidate(&pools).await.expect("an answer").model);
    }
    assert_eq!(answered, ["m0", "m2", "m2", "m0", "m2", "m2"]);
    assert_eq!(servers.each_ref().map(|server| server.calls().len()), [2, 2, 4]);
}
