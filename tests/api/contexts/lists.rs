//! Budgets, formats and what stays the same for the provider's cache, over made-up sessions: each list is checked as a
//! provider would, and counted by the rule of `docs/tokens.md`, by another tokenizer.

use crate::answer::{Answer, post};
use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::lists::made_up::{sessions, text};
use crate::support::lists::{anthropic_takes, openai_takes, tokens_of_anthropic, tokens_of_openai};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::HashMap;
use test_case::test_case;
use tokio::runtime::Handle;

/// Of each store; the environment variable `PRECIS_TEST_CASES` is for a longer search.
const CASES: u32 = 24;
const FORMATS: [&str; 2] = ["openai", "anthropic"];

/// Runs a story of each made-up value in a session of its own.
fn told<T: std::fmt::Debug>(stories: &impl Strategy<Value = T>, tell: impl AsyncFn(String, T)) {
    let cases = std::env::var("PRECIS_TEST_CASES").map_or(CASES, |cases| cases.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, sessions) = (Handle::current(), Cell::new(0));
    tokio::task::block_in_place(|| {
        let told = TestRunner::new(config).run(stories, |story| {
            sessions.set(sessions.get() + 1);
            handle.block_on(tell(format!("case-{}", sessions.get()), story));
            Ok(())
        });
        told.unwrap_or_else(|failure| panic!("{failure}"));
    });
}

async fn ask(app: &TestApp, session: &str, body: &Value) -> Answer {
    post(app, &format!("/sessions/{session}/context"), body.to_string()).await
}

/// What it weighs, after it was found to be a list that its provider takes.
fn weigh(format: &str, answer: &Answer) -> usize {
    let context = answer.ok(200);
    if format == "anthropic" {
        anthropic_takes(&context);
        tokens_of_anthropic(&answer.text)
    } else {
        let messages = context["messages"].as_array().expect("a list");
        openai_takes(messages);
        tokens_of_openai(messages)
    }
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))).expect("small")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_context_is_valid_for_its_provider(backend: Backend) {
    // Short tails, so that summaries and the bound part calls and results.
    let set: Set<'_> = &[
        ("consolidation.threshold", "12"),
        ("consolidation.keep_recent", "3"),
        ("consolidation.max_history_messages", "15"),
    ];
    let app = TestApp::start(&backend, set).await;
    told(&(sessions(14), text()), async |session, (messages, question)| {
        for part in messages.chunks(5) {
            app.record(&session, part).await;
            for format in FORMATS {
                for asked in [
                    json!({"format": format}),
                    json!({"format": format, "user_message": question, "system_prompt": "Be kind."}),
                ] {
                    let answer = ask(&app, &session, &asked).await;
                    let context = answer.ok(200);
                    let (counted, said) = (weigh(format, &answer), number(&context["tokens"]["total"]) + 3);
                    assert_eq!(said, counted, "{context:#}");
                }
            }
        }
    });
}

/// The first message of what comes before `from` and is not parted: one message, or a call and all that lies between it
/// and its result.
fn unit_before(messages: &[Value], from: usize) -> usize {
    let mut open: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut pairs = Vec::new();
    for (at, message) in messages.iter().enumerate() {
        if let Some(call) = message["tool_call_id"].as_str().and_then(|id| open.get_mut(id)?.pop()) {
            pairs.push((call, at));
        }
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            open.entry(call["id"].as_str().expect("an id")).or_default().push(at);
        }
    }
    let parts = |cut: usize| pairs.iter().any(|(call, result)| *call < cut && cut <= *result);
    (0..from).rev().find(|cut| !parts(*cut)).expect("nothing is parted at the beginning")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_fits_the_budget_and_uses_it(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let stories = (sessions(8), 0.0..1.1_f64, text(), any::<bool>());
    told(&stories, async |session, (messages, share, question, anthropic)| {
        app.record(&session, &messages).await;
        let format = FORMATS[usize::from(anthropic)];
        let with = |most: Option<usize>| json!({"format": format, "system_prompt": "Be kind!", "user_message": question, "max_tokens": most});
        let whole = ask(&app, &session, &with(None)).await;
        let all = weigh(format, &whole);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of it"
        )]
        let most = (all as f64 * share) as usize + 1;
        let answer = ask(&app, &session, &with(Some(most))).await;
        if answer.status == 422 {
            let detail = answer.problem(422, "budget-too-small");
            let needed = detail.split_once("allow at least ").expect("how many").1;
            let needed: usize = needed.split_once(',').expect("a number").0.parse().expect("a number");
            assert!(needed > most, "{detail}");
            ask(&app, &session, &with(Some(needed - 1))).await.problem(422, "budget-too-small");
            let least = ask(&app, &session, &with(Some(needed))).await;
            assert!(weigh(format, &least) <= needed);
            return;
        }
        let context = answer.ok(200);
        let counted = weigh(format, &answer);
        assert!(counted <= most, "{counted} of {most}: {context:#}");
        let from = number(&context["coverage"]["verbatim_from"]);
        if from == 1 {
            assert_eq!(context["coverage"]["omitted"], json!([]));
            assert_eq!(context["messages"], whole.json()["messages"]);
            return;
        }
        let omitted = json!([{"from_seq": 1, "to_seq": from - 1, "reason": "max_tokens"}]);
        assert_eq!(context["coverage"]["omitted"], omitted);
        // The least budget with which more is sent: that is one part more, and it would not have fitted.
        let (mut less, mut more) = (most, all + 3);
        let mut larger = ask(&app, &session, &with(Some(more))).await;
        while more - less > 1 {
            let between = less.midpoint(more);
            let answer = ask(&app, &session, &with(Some(between))).await;
            if number(&answer.ok(200)["coverage"]["verbatim_from"]) < from {
                (more, larger) = (between, answer);
            } else {
                less = between;
            }
        }
        let next = unit_before(&messages, from - 1) + 1;
        let found = number(&larger.ok(200)["coverage"]["verbatim_from"]);
        // A list that begins with an assistant has an opening, which may weigh more than the message before.
        assert!(found == next || (anthropic && found < next), "{found} {next}");
        let needed = weigh(format, &larger);
        assert!(
            needed > most && needed <= more,
            "{needed} tokens, not {most}, and {more} were asked for: {larger:?}"
        );
    });
}

/// System prompt and messages as they stand in the answer, one after the other; with `anthropic` their blocks, each with
/// who speaks.
fn parts(format: &str, answer: &Answer) -> Vec<String> {
    #[derive(serde::Deserialize)]
    struct Body {
        system: Option<Box<RawValue>>,
        messages: Vec<Box<RawValue>>,
    }
    #[derive(serde::Deserialize)]
    struct Message {
        role: String,
        content: Vec<Box<RawValue>>,
    }
    let body: Body = serde_json::from_str(&answer.text).expect("a context");
    let mut parts: Vec<String> = body.system.iter().map(|system| system.get().to_owned()).collect();
    for message in body.messages {
        if format == "anthropic" {
            let message: Message = serde_json::from_str(message.get()).expect("a message");
            parts.extend(message.content.iter().map(|block| format!("{} {}", message.role, block.get())));
        } else {
            parts.push(message.get().to_owned());
        }
    }
    parts
}

/// The part of it that is to be the same in the next one.
fn stable(format: &str, answer: &Answer) -> Vec<String> {
    let context = answer.json();
    let (cache, mut parts) = (&context["cache"], parts(format, answer));
    let messages = number(&cache["stable_messages"]);
    let count = if format == "anthropic" {
        let list = context["messages"].as_array().expect("a list").iter();
        let before = list.take(messages.saturating_sub(1));
        let blocks: usize = before.map(|message| message["content"].as_array().map_or(0, Vec::len)).sum();
        usize::from(!context["system"].is_null()) + blocks + number(&cache["stable_blocks"])
    } else {
        messages
    };
    parts.truncate(count);
    parts
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_begins_with_the_stable_prefix_of_the_previous_one(backend: Backend) {
    let set: Set<'_> = &[("consolidation.threshold", "16"), ("consolidation.keep_recent", "4")];
    let app = TestApp::start(&backend, set).await;
    let compared = Cell::new(0);
    told(&(sessions(12), text()), async |session, (messages, question)| {
        for format in FORMATS {
            let session = format!("{session}-{format}");
            let body = json!({"format": format, "system_prompt": "Be kind.", "user_message": question});
            let mut before: Option<(Value, Vec<String>, Vec<String>)> = None;
            for message in &messages {
                app.record(&session, std::slice::from_ref(message)).await;
                let answer = ask(&app, &session, &body).await;
                let context = answer.ok(200);
                let (now, revision) = (parts(format, &answer), context["summary"]["revision"].clone());
                let same = stable(format, &answer);
                // All but the new message, and results that may still come.
                let new = parts(format, &ask(&app, "empty", &body).await).len() - 1;
                let open = if format == "openai" { r#""tool","tool_call_id""# } else { r#""tool_result""# };
                let rest = &now[same.len()..now.len() - new];
                assert!(
                    rest.iter().all(|part| part.contains(open) && part.contains("No result of this call")),
                    "{rest:#?}"
                );
                if let Some((_, before, _)) = before.as_ref().filter(|(was, ..)| *was == revision) {
                    assert!(now.starts_with(before), "{before:#?}\nis no beginning of\n{now:#?}");
                    compared.set(compared.get() + 1);
                }
                before = Some((revision, same, now));
            }
            let [one, two] = [ask(&app, &session, &body).await, ask(&app, &session, &body).await];
            assert_eq!(one.text, two.text, "the same state, the same bytes");
        }
    });
    assert!(compared.get() > 100, "{compared:?}");
}
