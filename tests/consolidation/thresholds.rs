//! Limits of consolidation, each tested at the limit and one above it.

use crate::harness::{consolidate, is_meta, plain, record, revisions, start, state, turns, user};
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
            record(&app, session, &turns(1..=4)).await;
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

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requested_sentences_are_a_tenth_of_messages_within_5_and_50(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[("consolidation.keep_recent", "2")]).await;
    for (messages, sentences) in [(1, 5), (23, 5), (59, 5), (60, 6), (98, 9), (500, 50), (1000, 50)] {
        let session = format!("of-{messages}");
        let all: Vec<String> = (1..=messages + 2).map(user).collect();
        record(&app, &session, &all).await;
        let (_, revision) = consolidate(&app, &session).await;
        assert_eq!(revision["to_seq"], messages);
        let call = model.calls().pop().unwrap();
        let asked = format!("in about {sentences} sentences.\n");
        assert!(call.user().contains(&asked), "{messages}: {}", &call.user()[..80]);
    }
    assert_eq!(model.calls().len(), 7);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recent_messages_stay_and_split_point_is_before_user_message(backend: Backend) {
    let model = ModelServer::start().await;
    // `u` and `a` are messages, `C` makes a call, `r` is its result.
    let cases = [
        (4, "uauauau", Some(2)), // before the third user message, not within the second turn
        (3, "uauauau", Some(4)), // exactly three messages stay
        (1, "uaaaa", Some(4)),   // without a user message in the range: before any message
        (2, "uCrCru", Some(3)),  // a call and its result stay together, so not at 4
        (1, "uCrCru", Some(5)),  // before the user message, between complete calls
        (3, "aCrCrCr", Some(3)), // without a user message: between two calls
        (2, "uaCua", Some(2)),   // a call without a result stays, with the messages after it
        (6, "uauauau", Some(1)), // only the first message lies before the split point
        (7, "uauauau", None),    // nothing to summarise
    ];
    for (keep, script, cursor) in cases {
        let app = start(&backend, &model, &[("consolidation.keep_recent", &keep.to_string())]).await;
        let mut calls = 0;
        let message = |(index, kind)| match kind {
            'u' => user(index + 1),
            'a' => crate::harness::assistant(index + 1),
            'C' => {
                calls += 1;
                json!({"role": "assistant", "content": null, "tool_calls": [
                    {"id": format!("c{calls}"), "type": "function", "function": {"name": "f", "arguments": "{}"}}]})
                .to_string()
            }
            _ => json!({"role": "tool", "tool_call_id": format!("c{calls}"), "content": "r"}).to_string(),
        };
        let given: Vec<String> = script.chars().enumerate().map(message).collect();
        let session = format!("{keep}-{script}");
        record(&app, &session, &given).await;
        let (status, revision) = consolidate(&app, &session).await;
        let expected = if cursor.is_some() { StatusCode::CREATED } else { StatusCode::OK };
        assert_eq!((status, revision["to_seq"].as_u64()), (expected, cursor), "{session}");
        assert_eq!(state(&app, &session).await["tail_messages"], given.len() as u64 - cursor.unwrap_or(0));
        plain(&app, &session, &given).await;
        app.stop().await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_is_due_above_max_tail_tokens(backend: Backend) {
    let model = ModelServer::start().await;
    let plenty = start(&backend, &model, &[]).await;
    let given = turns(1..=30);
    record(&plenty, "s", &given).await;
    let tokens = state(&plenty, "s").await["tokens"]["tail"].as_u64().unwrap();
    let most = tokens.to_string();
    let exact = start(&backend, &model, &[("consolidation.max_tail_tokens", &most)]).await;
    assert_eq!(plain(&exact, "s", &given).await.outcome(), "not_due");
    let less = (tokens - 1).to_string();
    let less = start(&backend, &model, &[("consolidation.max_tail_tokens", &less)]).await;
    let answer = plain(&less, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 10));
}
