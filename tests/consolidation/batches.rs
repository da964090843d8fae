//! Tails that exceed the input limit of a model are summarised in batches, each within the limit and
//! committed before the next.

use crate::harness::{
    assistant, consolidate, covering, lines, named, plain, record, revisions, seen, start, state, turns, user,
};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use precis::domain::tokens;
use reqwest::StatusCode;
use serde_json::{Value, json};
use test_case::test_case;

pub(crate) fn assert_within(calls: &[Call], limit: usize) {
    for call in calls {
        let tokens = tokens::count(call.system()) + tokens::count(call.user());
        assert!(tokens <= limit, "{tokens} tokens, {limit} allowed");
    }
}

/// Checks that the ranges are contiguous and that each summary begins with the previous one.
pub(crate) fn assert_contiguous(revisions: &[Value], through: usize) {
    let (mut next, mut text) = (1, String::new());
    for revision in revisions {
        assert_eq!(revision["from_seq"], next, "{revision}");
        next = usize::try_from(revision["to_seq"].as_u64().unwrap()).unwrap() + 1;
        let now = revision["text"].as_str().unwrap();
        assert!(now.starts_with(&text) && now.ends_with(revision["added"].as_str().unwrap()));
        now.clone_into(&mut text);
    }
    assert_eq!(next, through + 1);
}

/// 2,000 characters in long words, because the test time is dominated by token counting.
pub(crate) fn long(seq: usize) -> String {
    const WORDS: [&str; 6] =
        ["international ", "Zürich ", "budget ", "responsibility ", "recommendation ", "agreement, "];
    let role = if seq % 2 == 1 { "user" } else { "assistant" };
    let words = (seq..).flat_map(|word| WORDS[word * 31 % 6].chars());
    let text: String = format!("m{seq} ").chars().chain(words).take(2000).collect();
    json!({"role": role, "content": text}).to_string()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_long_messages_are_summarised_in_batches_within_limit(backend: Backend) {
    const LIMIT: usize = 100_000; // the default of `input_limit`
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[("consolidation.summary_word_limit", "100000")]).await;
    let given: Vec<String> = (1..=2000).map(long).collect();
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.consolidation.messages), ("consolidated", 1980));
    assert_eq!((answer.verbatim().len(), answer.coverage.omitted.len()), (20, 0));
    let calls = model.calls();
    assert_within(&calls, LIMIT);
    let read: Vec<Vec<usize>> = calls.iter().map(seen).collect();
    assert_eq!(read.concat(), (1..=1980).collect::<Vec<_>>());
    let total = state(&app, "s").await["tokens"]["history"].as_u64().unwrap();
    assert!(calls.len() as u64 <= total / 80_000 + 1, "{} calls for {total} tokens", calls.len());
    let revisions = revisions(&app, "s").await;
    assert_eq!(revisions.len(), calls.len(), "each committed before the next");
    assert_contiguous(&revisions, 1980);
    assert_eq!(named(revisions.last().unwrap()["text"].as_str().unwrap()).len(), 1980);
    for ((call, read), revision) in calls.iter().zip(read).zip(&revisions) {
        let asked = format!("in about {} sentences.\n", (read.len() / 10).clamp(5, 50));
        assert!(call.user().contains(&asked));
        assert_eq!(named(revision["added"].as_str().unwrap()), read);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committed_batches_stay_when_a_later_batch_fails(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let set = [
        ("llm.models.small.input_limit", "4000"),
        ("consolidation.retry_initial", "1h"),
        ("consolidation.retry_max", "1h"),
    ];
    let app = start(&backend, &model, &set).await;
    let given: Vec<String> = (1..=120).map(|seq| if seq > 100 { user(seq) } else { long(seq) }).collect();
    record(&app, "s", &given).await;
    model.push(Behaviour::reply(covering));
    model.push(Behaviour::reply(covering));
    model.push(Behaviour::BreakOff("HALF".to_owned()));
    let answer = plain(&app, "s", &given).await;
    let through = seen(&model.calls()[1]).pop().unwrap();
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("failed", through));
    assert_eq!((answer.consolidation.messages, answer.summary.revision), (through, 2));
    assert!(answer.consolidation.retry_at.is_some());
    assert_eq!(state(&app, "s").await["consolidation"]["failures"], 1);
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let mut calls = model.calls();
    assert_within(&calls, 4000);
    calls.remove(2);
    assert_eq!(calls.iter().flat_map(seen).collect::<Vec<_>>(), (1..=100).collect::<Vec<_>>());
    let revisions = revisions(&app, "s").await;
    assert_contiguous(&revisions, 100);
    assert_eq!(revisions.len(), calls.len());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_larger_than_input_limit_is_split_for_the_model(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(
        &backend,
        &model,
        &[("llm.models.small.input_limit", "3000"), ("consolidation.keep_recent", "1")],
    )
    .await;
    let words: Vec<String> = (0..6000).map(|word| format!("<{word}> \"语\" 😀")).collect();
    let text = words.join("\n");
    let given = [json!({"role": "user", "content": text, "name": "Ada"}).to_string(), assistant(2), user(3)];
    record(&app, "s", &given).await;
    let numbers = |call: &Call| {
        let words = lines(call)[0]["text"].as_str().unwrap_or_default().to_owned();
        words
            .split(|c: char| !c.is_numeric())
            .filter(|word| !word.is_empty())
            .take(4)
            .collect::<Vec<_>>()
            .join(" ")
    };
    model.default(Behaviour::reply(move |call| format!("They counted {}.", numbers(call))));
    for failing in [true, false] {
        let before = model.calls().len();
        model.push(Behaviour::reply(move |call| format!("Part 1: {}.", numbers(call))));
        model.push(if failing {
            Behaviour::answer("none")
        } else {
            Behaviour::reply(move |call| format!("Part 2: {}.", numbers(call)))
        });
        let (status, revision) = consolidate(&app, "s").await;
        if failing {
            // Half of a message cannot be committed.
            assert_eq!((status, &state(&app, "s").await["cursor"]), (StatusCode::BAD_GATEWAY, &json!(0)));
            continue;
        }
        assert_eq!(
            (status, revisions(&app, "s").await.len()),
            (StatusCode::CREATED, revision["revision"].as_u64().map_or(0, |r| usize::try_from(r).unwrap()))
        );
        let calls = model.calls().split_off(before);
        assert_within(&calls, 3000);
        assert!(calls.len() > 10, "{}", calls.len());
        // The parts of a message are not summarised in more sentences than the message, except one for each.
        let of_ada = |call: &&Call| lines(call).iter().any(|line| line["name"] == "Ada");
        assert!(calls.iter().filter(of_ada).all(|call| call.user().contains("in about 1 sentences.\n")));
        let read = calls.iter().flat_map(lines).filter(|line| line["name"] == "Ada");
        let read: String = read.map(|line| line["text"].as_str().unwrap().to_owned()).collect();
        // A part may consist of white space, which is not sent.
        let without_spaces = |text: &str| text.split_whitespace().collect::<String>();
        assert!(without_spaces(&read) == without_spaces(&text), "all of it, once and in order");
        let whole = revision["text"].as_str().unwrap();
        assert!(whole.starts_with("Part 1: ") && whole.contains("\n\nPart 2: "), "{whole}");
    }
    assert_contiguous(&revisions(&app, "s").await, 2);
}

/// A call with three hundred results: split for the model, but not for the cursor.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inseparable_messages_larger_than_input_limit_are_committed_together(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let set = [
        ("llm.models.small.input_limit", "3000"),
        ("consolidation.keep_recent", "2"),
        ("consolidation.summary_word_limit", "10000"),
    ];
    let app = start(&backend, &model, &set).await;
    let ids: Vec<String> = (0..300).map(|call| format!("call-{call}")).collect();
    let call = |id| json!({"id": id, "type": "function", "function": {"name": "read", "arguments": "{\"file\": 1}"}});
    let calls: Vec<Value> = ids.iter().map(call).collect();
    let mut given = turns(1..=4);
    given.push(user(5));
    given.push(json!({"role": "assistant", "content": "m6 reads", "tool_calls": calls}).to_string());
    for (seq, id) in (7..).zip(&ids) {
        given.push(
            json!({"role": "tool", "tool_call_id": id, "content": format!("m{seq} {}", "line ".repeat(100))})
                .to_string(),
        );
    }
    let last = given.len();
    given.extend([assistant(last + 1), user(last + 2), assistant(last + 3)]);
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", last + 1));
    let model_calls = model.calls();
    assert_within(&model_calls, 3000);
    assert_eq!(model_calls.iter().flat_map(seen).collect::<Vec<_>>(), (1..=last + 1).collect::<Vec<_>>());
    let revisions = revisions(&app, "s").await;
    assert_contiguous(&revisions, last + 1);
    let cuts: Vec<u64> = revisions.iter().map(|revision| revision["to_seq"].as_u64().unwrap()).collect();
    assert!(cuts.iter().all(|&cut| cut <= 5 || cut >= last as u64), "{cuts:?}");
    assert!(model_calls.len() > revisions.len());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_without_text_moves_cursor_without_model_call(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::fail(500, "there is no call"));
    let app = start(&backend, &model, &[]).await;
    let given = vec![r#"{"role":"user","content":" \n"}"#.to_owned(); 120];
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 100));
    assert_eq!(
        (answer.consolidation.messages, &answer.consolidation.model, answer.system().len()),
        (100, &None, 0)
    );
    let revision = revisions(&app, "s").await.remove(0);
    assert_eq!(
        (&revision["model"], &revision["text"], &revision["added"]),
        (&Value::Null, &json!(""), &json!(""))
    );
    assert_eq!(model.calls().len(), 0);
}

/// Long tool results, of which a model sees a few lines: the batch is filled by the lines, not by the
/// results.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tool_results_count_as_their_shortened_form(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[("llm.models.small.input_limit", "20000")]).await;
    let mut given = Vec::new();
    for seq in (1..=120).step_by(4) {
        let call = json!({"id": "c", "type": "function", "function": {"name": "read", "arguments": "{\"file\": 1}"}});
        given.push(user(seq));
        given.push(
            json!({"role": "assistant", "content": format!("m{} reads", seq + 1), "tool_calls": [call]})
                .to_string(),
        );
        let output = format!("m{} {}", seq + 2, "line of output ".repeat(4000));
        given.push(json!({"role": "tool", "tool_call_id": "c", "content": output}).to_string());
        given.push(assistant(seq + 3));
    }
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 100));
    let calls = model.calls();
    assert_within(&calls, 20_000);
    assert_eq!(calls.iter().map(seen).collect::<Vec<_>>(), [(1..=100).collect::<Vec<_>>()]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn name_larger_than_input_limit_is_shortened(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let set = [("llm.models.small.input_limit", "3000"), ("consolidation.keep_recent", "1")];
    let app = start(&backend, &model, &set).await;
    let long = "word ".repeat(20_000);
    let given = [json!({"role": "user", "name": long, "content": long}).to_string(), user(2)];
    record(&app, "s", &given).await;
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let calls = model.calls();
    assert_within(&calls, 3000);
    assert!(calls.len() < 30, "{}", calls.len());
}
