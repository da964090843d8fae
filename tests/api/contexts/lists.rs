//! Token budgets, formats and stable prefixes of contexts, for generated sessions. Each list is checked by the rules of its
//! provider and counted by the rule of `docs/tokens.md` with another tokenizer.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use crate::support::factor::test_factor;
use crate::support::lists::generated::{sessions, text};
use crate::support::lists::{
    assert_anthropic_accepts, assert_openai_accepts, tokens_of_anthropic, tokens_of_openai,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::cell::Cell;
use test_case::test_case;
use tokio::runtime::Handle;

/// The usual number of cases per store.
pub(super) const CASES: u32 = 12;
pub(super) const FORMATS: [&str; 2] = ["openai", "anthropic"];

/// Runs the test with generated values, each in its own session.
fn check_property<T: std::fmt::Debug>(strategy: &impl Strategy<Value = T>, test: impl AsyncFn(String, T)) {
    let cases = CASES * test_factor();
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, sessions) = (Handle::current(), Cell::new(0));
    tokio::task::block_in_place(|| {
        let result = TestRunner::new(config).run(strategy, |value| {
            sessions.set(sessions.get() + 1);
            handle.block_on(test(format!("case-{}", sessions.get()), value));
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{failure}"));
    });
}

async fn ask(app: &TestClient, session: &str, body: &Value) -> Response {
    app.post(&format!("/sessions/{session}/context"), body.to_string()).await
}

/// Checks that the provider accepts the list, and returns its tokens.
fn checked_tokens(format: &str, response: &Response) -> usize {
    let context = response.ok(200);
    if format == "anthropic" {
        assert_anthropic_accepts(&context);
        tokens_of_anthropic(&response.text)
    } else {
        let messages = context["messages"].as_array().expect("a list");
        assert_openai_accepts(messages);
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
    // Short tails, so that summaries and the limit separate calls from their results.
    let set: Set<'_> = &[
        ("consolidation.threshold", "12"),
        ("consolidation.keep_recent", "3"),
        ("consolidation.max_history_messages", "15"),
    ];
    let app = TestApp::start(&backend, set).await;
    check_property(&(sessions(14), text()), async |session, (messages, question)| {
        for part in messages.chunks(5) {
            app.record(&session, part).await;
            for format in FORMATS {
                for options in [
                    json!({"format": format}),
                    json!({"format": format, "user_message": question, "system_prompt": "Be kind."}),
                ] {
                    let response = ask(&app, &session, &options).await;
                    let context = response.ok(200);
                    let reported = number(&context["tokens"]["total"]) + 3;
                    assert_eq!(reported, checked_tokens(format, &response), "{context:#}");
                }
            }
        }
    });
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_fits_the_budget_and_uses_it(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let cases = (sessions(8), 0.0..1.1_f64, text(), any::<bool>());
    check_property(&cases, async |session, (messages, share, question, anthropic)| {
        app.record(&session, &messages).await;
        // A message with several results is stored as several messages.
        let page = app.get(&format!("/sessions/{session}/messages?limit=1000")).await.ok(200);
        let messages: Vec<Value> =
            page["items"].as_array().expect("items").iter().map(|item| item["message"].clone()).collect();
        let format = FORMATS[usize::from(anthropic)];
        let with = |most: Option<usize>| json!({"format": format, "system_prompt": "Be kind!", "user_message": question, "max_tokens": most, "mode": "off"});
        let whole = ask(&app, &session, &with(None)).await;
        let all = checked_tokens(format, &whole);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of it"
        )]
        let most = (all as f64 * share) as usize + 1;
        let response = ask(&app, &session, &with(Some(most))).await;
        if response.status == 422 {
            let detail = response.problem(422, "budget-too-small");
            let needed = detail.split_once("allow at least ").expect("how many").1;
            let needed: usize = needed.split_once(',').expect("a number").0.parse().expect("a number");
            assert!(needed > most, "{detail}");
            ask(&app, &session, &with(Some(needed - 1))).await.problem(422, "budget-too-small");
            let least = ask(&app, &session, &with(Some(needed))).await;
            assert!(checked_tokens(format, &least) <= needed);
            return;
        }
        let context = response.ok(200);
        let counted = checked_tokens(format, &response);
        assert!(counted <= most, "{counted} of {most}: {context:#}");
        let from = number(&context["coverage"]["verbatim_from"]);
        let is_shortened = context["coverage"]["shortened"] != json!([]);
        if from == 1 {
            assert_eq!(context["coverage"]["omitted"], json!([]));
            // Only the notice of a list that is almost full can differ, in the system message.
            let history = |context: &Value| {
                let messages = context["messages"].as_array().expect("messages").clone();
                messages.into_iter().filter(|message| message["role"] != "system").collect::<Vec<_>>()
            };
            assert!(is_shortened || history(&context) == history(&whole.json()), "{context:#}");
            return;
        }
        let omitted = json!([{"from_seq": 1, "to_seq": from - 1, "reason": "max_tokens"}]);
        assert_eq!(context["coverage"]["omitted"], omitted);
        // Search the smallest budget with which a context contains more: it has one turn more.
        let (mut less, mut more) = (most, all + 200);
        let mut larger = ask(&app, &session, &with(Some(more))).await;
        while more - less > 1 {
            let between = less.midpoint(more);
            let response = ask(&app, &session, &with(Some(between))).await;
            if number(&response.ok(200)["coverage"]["verbatim_from"]) < from {
                (more, larger) = (between, response);
            } else {
                less = between;
            }
        }
        let is_turn =
            |message: &Value| message["role"] == "user" && message["content"][0]["type"] != "tool_result";
        let next = messages[..from - 1].iter().rposition(is_turn).unwrap_or(0) + 1;
        let found = number(&larger.ok(200)["coverage"]["verbatim_from"]);
        // The beginning of the history can be shorter than the opening of a list that begins with the assistant. A result
        // with a large id can take more than the tokens to which results are shortened, so that its turn is skipped.
        let has_results = messages.iter().any(|message| !is_turn(message) && message["role"] != "assistant");
        assert!(found == next || found == 1 || (has_results && found < next), "{found} {next}");
        assert!(checked_tokens(format, &larger) <= more, "{more} were asked for: {larger:?}");
    });
}

/// Returns the bytes of the system prompt and of each message; in Anthropic's format, of each block with its role.
fn parts(format: &str, response: &Response) -> Vec<String> {
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
    let body: Body = serde_json::from_str(&response.text).expect("a context");
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

/// Returns the stable prefix.
fn stable_prefix(format: &str, response: &Response) -> Vec<String> {
    let context = response.json();
    let (cache, mut parts) = (&context["cache"], parts(format, response));
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
    check_property(&(sessions(12), text()), async |session, (messages, question)| {
        for format in FORMATS {
            let session = format!("{session}-{format}");
            let body = json!({"format": format, "system_prompt": "Be kind.", "user_message": question});
            let mut before: Option<(Value, Vec<String>, Vec<String>)> = None;
            for message in &messages {
                app.record(&session, std::slice::from_ref(message)).await;
                let response = ask(&app, &session, &body).await;
                let context = response.ok(200);
                let (now, revision) = (parts(format, &response), context["summary"]["revision"].clone());
                let same = stable_prefix(format, &response);
                // The rest is the new message, and what follows an open call, because results can still come before it.
                let new = parts(format, &ask(&app, "empty", &body).await).len() - 1;
                let open = if format == "openai" { r#""tool","tool_call_id""# } else { r#""tool_result""# };
                let rest = &now[same.len()..now.len() - new];
                let is_open = |part: &String| {
                    part.contains(open) && part.contains("No result of this call")
                        || part.contains("server_tool_use")
                };
                assert!(rest.first().is_none_or(is_open), "{rest:#?}");
                if let Some((_, before, _)) = before.as_ref().filter(|(was, ..)| *was == revision) {
                    assert!(now.starts_with(before), "{before:#?}\nis not a prefix of\n{now:#?}");
                    compared.set(compared.get() + 1);
                }
                before = Some((revision, same, now));
            }
            let mut one = ask(&app, &session, &body).await;
            while one.json()["consolidation"]["outcome"] == "consolidated" {
                one = ask(&app, &session, &body).await;
            }
            let two = ask(&app, &session, &body).await;
            assert_eq!(one.text, two.text, "equal states produce equal bytes");
        }
    });
    assert!(compared.get() > 100, "{compared:?}");
}
