//! A model that accepts less than its settings say gets smaller batches from then on, in all sessions.

use crate::batches::{assert_contiguous, long};
use crate::harness::{PATIENCE, covering, named, plain, record, revisions, seen, start, turns};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use test_case::test_case;

/// Limit of the model in bytes of the user prompt: a twentieth of its `input_limit` of 100,000 tokens.
const MOST: usize = 30_000;

fn is_taken(call: &Call) -> bool {
    call.user().len() <= MOST
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_shrink_after_first_too_long_error(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::AtMost(MOST, "They met.".to_owned()));
    let app = start(&backend, &model, &[]).await;
    let given: Vec<String> = (1..=120).map(long).collect();
    for session in ["first", "next"] {
        let before = model.calls().len();
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!((answer.outcome(), answer.consolidation.messages), ("consolidated", 100), "{session}");
        let (taken, rejected): (Vec<_>, Vec<_>) =
            model.calls().split_off(before).into_iter().partition(is_taken);
        assert_eq!(
            taken.iter().flat_map(seen).collect::<Vec<_>>(),
            (1..=100).collect::<Vec<_>>(),
            "{session}"
        );
        let revisions = revisions(&app, session).await;
        assert_contiguous(&revisions, 100);
        assert_eq!(revisions.len(), taken.len(), "each part was committed before the next");
        // Each rejection halves the next batch. The observed limit applies to all sessions.
        let expected = if session == "first" { 1..=5 } else { 0..=0 };
        assert!(expected.contains(&rejected.len()), "{session}: {} rejections", rejected.len());
        let calls = |revision: &serde_json::Value| revision["usage"]["calls"].as_u64();
        assert!(revisions.iter().all(|revision| calls(revision) == Some(1)), "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_too_long_at_any_size_is_summarised_without_the_model(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::AtMost(0, String::new()));
    let app = start(&backend, &model, &[]).await;
    let given: Vec<String> = (1..=120).map(long).collect();
    record(&app, "s", &given).await;
    let answer = tokio::time::timeout(PATIENCE, plain(&app, "s", &given)).await.expect("it ends");
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("consolidated", 20));
    assert_eq!(answer.coverage.summary_through, 100);
    for revision in revisions(&app, "s").await {
        assert_eq!(revision["model"], "extractive");
    }
    // The model gets less and less until a batch cannot be divided any more.
    let calls = model.calls();
    assert!(calls[..5].is_sorted_by(|a, b| a.user().len() > b.user().len()), "each asks for less");
}

/// The field case D11: a filter that rejects one message does not hold the others up.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_that_a_filter_rejects_is_summarised_without_the_model(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::choose(|call| {
        if seen(call).contains(&7) {
            Behaviour::Finish("HALF".to_owned(), "content_filter")
        } else {
            Behaviour::reply(covering)
        }
    }));
    let app = start(&backend, &model, &[("consolidation.summary_word_limit", "10000")]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 82));
    let revisions = revisions(&app, "s").await;
    assert_contiguous(&revisions, 82);
    let (built_in, by_model): (Vec<_>, Vec<_>) =
        revisions.iter().partition(|revision| revision["model"] == "extractive");
    let range = |revision: &serde_json::Value| (revision["from_seq"].as_u64(), revision["to_seq"].as_u64());
    let rejected: Vec<_> = built_in.into_iter().map(range).collect();
    assert!(
        matches!(rejected[..], [(Some(from), Some(to))] if from <= 7 && to >= 7 && to - from < 2),
        "{rejected:?}"
    );
    let covered: Vec<usize> =
        by_model.iter().flat_map(|revision| named(revision["added"].as_str().unwrap())).collect();
    assert!(covered.len() >= 80 && !covered.contains(&7), "{covered:?}");
}
