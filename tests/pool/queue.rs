//! So many calls of a model at once, and no more.

use crate::harness::{DEADLINE, GOOD, SLACK, TOKEN, consolidate, model, names, pool_of};
use crate::model_server::{Behaviour, ModelServer, Protocol};
use futures_util::future::join_all;
use precis::llm::model::{ModelSpec, QueuePolicy};
use precis::llm::pool::PoolStrategy;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

fn queued(server: &ModelServer, queue: QueuePolicy) -> ModelSpec {
    let patient = model("m0", Protocol::OpenAi, &server.base_url());
    ModelSpec { queue, timeout: DEADLINE, first_token_timeout: None, ..patient }
}

#[tokio::test]
async fn never_more_than_allowed_and_all_get_their_turn() {
    let server = ModelServer::start().await;
    server.default(Behaviour::Delayed(Duration::from_millis(20), GOOD.to_owned()));
    server.allow_at_once(4);
    let queue = QueuePolicy { max_calls: 4, max_waiting: 100, timeout: DEADLINE };
    let pools = pool_of(vec![queued(&server, queue)], PoolStrategy::Fallback, DEADLINE);
    let answers = join_all((0..60).map(|_| consolidate(&pools))).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!((server.most_in_flight(), server.calls().len()), (4, 60));
    let queued = answers.iter().flatten().map(|answer| answer.cost.queued).max();
    assert!(queued >= Some(Duration::from_millis(20 * 10)), "{queued:?}");
}

#[tokio::test]
async fn what_finds_no_place_goes_to_the_next_model() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    let release = Arc::new(Semaphore::new(0));
    first.default(Behaviour::Held(Arc::clone(&release), GOOD.to_owned()));
    let queue = QueuePolicy { max_calls: 1, max_waiting: 1, timeout: DEADLINE };
    let models = vec![queued(&first, queue), model("m1", Protocol::OpenAi, &second.base_url())];
    let pools = pool_of(models, PoolStrategy::Fallback, DEADLINE);
    let third = async {
        first.until_calls(1).await;
        // The second waits since before the first was called: it was polled with it.
        let third = consolidate(&pools).await.expect("an answer");
        release.add_permits(2);
        third
    };
    let all = futures_util::future::join3(consolidate(&pools), consolidate(&pools), third);
    let (one, two, three) = all.await;
    let model = |answer: &precis::llm::PoolResponse| (answer.model.clone(), answer.cost.calls);
    assert_eq!(model(&one.expect("an answer")), ("m0".to_owned(), 1));
    assert_eq!(model(&two.expect("an answer")), ("m0".to_owned(), 1));
    assert_eq!(model(&three), ("m1".to_owned(), 1));
}

#[tokio::test]
async fn patience_with_a_queue_ends() {
    let server = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    server.default(Behaviour::Held(Arc::clone(&release), GOOD.to_owned()));
    let queue = QueuePolicy { max_calls: 1, max_waiting: 9, timeout: TOKEN };
    let pools = pool_of(vec![queued(&server, queue)], PoolStrategy::Fallback, DEADLINE);
    let late = async {
        server.until_calls(1).await;
        let began = Instant::now();
        let error = consolidate(&pools).await.expect_err("no turn");
        assert_eq!(names(&error), [("m0", "queue_timeout")]);
        assert!((TOKEN..TOKEN + SLACK).contains(&began.elapsed()));
        assert!((TOKEN..TOKEN + SLACK).contains(&error.cost.queued));
        release.add_permits(1);
    };
    let (first, ()) = futures_util::future::join(consolidate(&pools), late).await;
    first.expect("an answer");
    assert_eq!(server.calls().len(), 1);
}
