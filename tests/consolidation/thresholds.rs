//! Limits of consolidation, each tested at the limit and one above it.

use crate::harness::{consolidate, is_meta, plain, record, revisions, start, turns, user};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::StatusCode;
use serde_json::json;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_is_due_above_100_messages(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[]).await;
    let mut given = turns(1..=100);
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len(), model.calls().len()), ("not_due", 100, 0));
    given.push(user(101));
    record(&app, "s", &given[100..]).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), model.calls().len()), ("consolidated", 1));
    assert_eq!(answer.coverage.summary_through, 80, "20 stay, and message 81 is the user's");
    assert_eq!(answer.consolidation.model.as_deref(), Some("small"));
}

/// Summaries of exactly this many words, in one consolidation or in two, in Latin script and in Han
/// characters.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn summary_is_compressed_above_600_words(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[("consolidation.keep_recent", "2")]).await;
    let latin = |words: usize| vec!["can't"; words].join(" ");
    let han = |words: usize| "茶".repeat(words);
    let cases = [
        ("latin-600", vec![latin(600)], false),
        ("latin-601", vec![latin(601)], true),
        ("han-600", vec![han(600)], false),
        ("han-601", vec![han(601)], true),
        ("grown-600", vec![latin(300), han(300)], false),
        ("grown-601", vec![latin(300), han(301)], true),
    ];
    for (session, answers, compressed) in cases {
        let before = model.calls().len();
        for answer in &answers {
            model.push(Behaviour::answer(answer));
            if compressed && Some(answer) == answers.last() {
                model.push(Behaviour::answer("Tea, all of it."));
            }
            // A summary is not longer than its material.
            let long = json!({"role": "user", "content": format!("{answer} {answer}")}).to_string();
            record(&app, session, &[vec![long], turns(2..=4)].concat()).await;
            assert_eq!(consolidate(&app, session).await.0, StatusCode::CREATED, "{session}");
        }
        let calls = model.calls().split_off(before);
        assert_eq!(calls.iter().filter(|call| is_meta(call)).count(), usize::from(compressed), "{session}");
        assert_eq!(calls.len(), answers.len() + usize::from(compressed), "{session}");
        let last = revisions(&app, session).await.pop().unwrap();
        let whole = answers.join("\n\n");
        if compressed {
            assert!(calls.last().unwrap().user().starts_with("Compress this summary to about 8 sentences."));
            assert_eq!(last["text"], "Tea, all of it.");
            assert_eq!((&last["meta"]["text_before"], &last["words"]), (&json!(whole), &json!(4)));
        } else {
            assert_eq!((&last["text"], &last["words"]), (&json!(whole), &json!(600)), "{session}");
        }
        assert_eq!(last["added"], json!(answers.last()));
    }
}
