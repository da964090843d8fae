//! Prompts that are too long: for one model, and for all of them.

use crate::harness::{DEADLINE, GOOD, PROTOCOLS, entry, model, names, pool_of};
use crate::model_server::{Behaviour, ModelServer};
use precis::domain::transcript::TranscriptEntry;
use precis::llm::model::ModelSpec;
use precis::llm::pool::PoolStrategy;
use precis::llm::{Llm as _, Task};

fn long() -> Vec<TranscriptEntry> {
    (0..200).map(|seq| entry(&format!("Message {seq}: Ada moves the meeting to {seq} o'clock."))).collect()
}

#[tokio::test]
async fn a_prompt_goes_to_a_model_with_a_larger_limit() {
    for protocol in PROTOCOLS {
        let (small, twin, large) =
            (ModelServer::start().await, ModelServer::start().await, ModelServer::start().await);
        small.default(Behaviour::AtMost(5000, GOOD.to_owned()));
        large.default(Behaviour::answer(GOOD));
        let limited = |name, server: &ModelServer, input_limit| ModelSpec {
            input_limit,
            ..model(name, protocol, &server.base_url())
        };
        let models = vec![
            limited("small", &small, 50_000),
            limited("twin", &twin, 40_000),
            limited("large", &large, 60_000),
        ];
        let pools = pool_of(models, PoolStrategy::Fallback, DEADLINE);
        let before = pools.capacity("p");
        let (entries, few) = (long(), [entry("I fly on 3 May.")]);
        let task = Task::Consolidate { entries: &entries, sentences: 5 };
        let answer = pools.complete("p", task).await.expect("the large one");
        assert_eq!((answer.model.as_str(), answer.cost.calls), ("large", 2));
        assert!(twin.calls().is_empty(), "it takes less than the first");
        // What it has learned: whoever asks next asks for less at once.
        assert!(pools.capacity("p") < before / 4, "{} of {before}", pools.capacity("p"));
        let task = Task::Consolidate { entries: &few, sentences: 5 };
        assert_eq!(pools.complete("p", task).await.expect("short enough").model, "small");
    }
}

#[tokio::test]
async fn too_long_for_all_of_them_is_told() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        server.default(Behaviour::fail(413, "request too large"));
        let smaller = ModelSpec { input_limit: 90_000, ..model("m1", protocol, &server.base_url()) };
        let models = vec![model("m0", protocol, &server.base_url()), smaller];
        let pools = pool_of(models, PoolStrategy::Fallback, DEADLINE);
        let entries = long();
        let task = Task::Consolidate { entries: &entries, sentences: 5 };
        let error = pools.complete("p", task).await.expect_err("too long");
        assert_eq!(names(&error), [("m0", "too_long"), ("m1", "too_small")]);
        assert!(error.is_too_long());
        // It never ends in asking for nothing.
        let mut capacities = vec![pools.capacity("p")];
        for _ in 0..20 {
            pools.complete("p", task).await.expect_err("too long");
            capacities.push(pools.capacity("p"));
        }
        assert!(
            capacities.is_sorted_by(|a, b| a >= b) && capacities.ends_with(&[capacities[20]; 15]),
            "{capacities:?}"
        );
        assert!(capacities[20] > 200, "{capacities:?}");
    }
}
