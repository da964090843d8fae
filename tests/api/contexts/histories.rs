//! Lists of random histories, rendered without a server: every prefix is valid for its provider in each format and profile, counted
//! exactly, and says nothing about calls and results that the history contradicts. `PRECIS_TEST_FACTOR=100` searches longer.

use super::lists::{CASES, FORMATS};
use crate::support::factor::test_factor;
use crate::support::lists::generated::sessions;
use crate::support::lists::{
    assert_anthropic_accepts, assert_gemini_accepts, assert_openai_accepts, assert_strict_accepts,
    tokens_of_anthropic, tokens_of_openai,
};
use precis::domain::format::{self, Format, ListOptions, Opening, Profile, RenderInput};
use precis::domain::message::{Message, Role};
use precis::domain::message_metadata::{ContextMessage, MessageMetadata};
use precis::domain::tail::Tail;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::collections::HashMap;

const PROFILES: [Profile; 3] = [Profile::OpenAi, Profile::Gemini, Profile::Strict];

fn check<T: std::fmt::Debug>(strategy: &impl Strategy<Value = T>, test: impl Fn(T)) {
    let cases = 2 * CASES * test_factor();
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let run = TestRunner::new(config).run(strategy, |value| {
        test(value);
        Ok(())
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
}

fn read(messages: &[Value]) -> Vec<Message> {
    let raw = |message: &Value| RawValue::from_string(message.to_string()).expect("JSON");
    messages.iter().flat_map(|message| format::read_given(&raw(message)).expect("accepted")).collect()
}

fn tail(messages: &[Message]) -> Tail {
    let stored = |(seq, message): (i64, &Message)| {
        let metadata = MessageMetadata::new(message, format::count_tokens(message));
        ContextMessage { seq, metadata, json: message.json().to_owned() }
    };
    Tail::new(1, (1..).zip(messages).map(stored).collect())
}

/// Returns the JSON of a context and its tokens.
fn render(tail: &Tail, format: Format, profile: Profile) -> (String, i64) {
    let list = ListOptions { profile, ..ListOptions::default() };
    let history = format.render_messages(list, tail, 0).expect("messages");
    let opening = Opening::default();
    let is_opened = format::needs_opening(&history, false);
    let total = history.iter().map(|message| message.tokens).sum::<i64>();
    let tokens = total + if is_opened { opening.tokens } else { 0 };
    let input = RenderInput { history, opening, profile, ..RenderInput::default() };
    let list = format.render_context(input).messages;
    (format!(r#"{{"messages":{list}}}"#), tokens + 3)
}

#[test]
fn every_prefix_is_valid_in_every_format_and_profile() {
    check(&sessions(10), |messages| {
        for end in 1..=messages.len() {
            let tail = tail(&read(&messages[..end]));
            for format in FORMATS.map(|name| Format::parse(name).expect("a format")) {
                for profile in PROFILES {
                    let (text, tokens) = render(&tail, format, profile);
                    let context: Value = serde_json::from_str(&text).expect("JSON");
                    let list = context["messages"].as_array().expect("a list");
                    let counted = match (format, profile) {
                        (Format::Anthropic, _) => {
                            assert_anthropic_accepts(&context);
                            tokens_of_anthropic(&text)
                        }
                        (_, Profile::OpenAi) => {
                            assert_openai_accepts(list);
                            tokens_of_openai(list)
                        }
                        (_, Profile::Gemini) => {
                            assert_gemini_accepts(list);
                            tokens_of_openai(list)
                        }
                        (_, Profile::Strict) => {
                            assert_strict_accepts(list);
                            tokens_of_openai(list)
                        }
                    };
                    let counted = i64::try_from(counted).expect("small");
                    // Merged messages count as the messages that they were.
                    let is_merged = format == Format::OpenAi && profile != Profile::OpenAi;
                    assert!(
                        counted == tokens || is_merged && counted < tokens,
                        "{counted}, not {tokens}: {text}"
                    );
                }
            }
        }
    });
}

/// A message of a history in which every call and every result can be told apart.
#[derive(Clone, Copy, Debug)]
enum Kind {
    User,
    System,
    Answer,
    Calls(&'static [&'static str]),
    Result(&'static str),
}

/// Returns the call that each result answers, by their numbers: the first one with its id that the model has not gone on without.
fn answers(history: &[Kind]) -> HashMap<usize, usize> {
    let (mut answers, mut waiting, mut number): (HashMap<usize, usize>, Vec<(usize, &str)>, usize) =
        (HashMap::new(), Vec::new(), 0);
    for (position, kind) in history.iter().enumerate() {
        match kind {
            Kind::Answer | Kind::Calls(_) => {
                let is_same_turn =
                    position > 0 && matches!(history[position - 1], Kind::Answer | Kind::Calls(_));
                if !is_same_turn {
                    waiting.clear();
                }
                if let Kind::Calls(ids) = kind {
                    waiting.extend((number..).zip(ids.iter().copied()));
                    number += ids.len();
                }
            }
            Kind::Result(id) => {
                let same = waiting.iter().position(|(_, of)| of == id);
                let by_position = || waiting.iter().position(|(_, of)| id.is_empty() || of.is_empty());
                if let Some(index) = same.or_else(by_position) {
                    answers.insert(position, waiting.remove(index).0);
                }
            }
            Kind::User | Kind::System => {}
        }
    }
    answers
}

#[test]
fn nothing_is_invented_that_the_history_contradicts() {
    let kinds = vec![
        Kind::User,
        Kind::System,
        Kind::Answer,
        Kind::Calls(&["a"]),
        Kind::Calls(&["a", "b"]),
        Kind::Calls(&["a", "a"]),
        Kind::Calls(&["", ""]),
        Kind::Result("a"),
        Kind::Result("a"),
        Kind::Result("b"),
        Kind::Result(""),
    ];
    check(&vec(select(kinds), 1..14), |history| {
        let mut number = 0;
        let message = |(position, kind): (usize, &Kind)| match kind {
            Kind::User => json!({"role": "user", "content": "u"}),
            Kind::System => json!({"role": "system", "content": "s"}),
            Kind::Answer => json!({"role": "assistant", "content": "a"}),
            Kind::Result(id) => {
                json!({"role": "tool", "tool_call_id": id, "content": format!("r{position}")})
            }
            Kind::Calls(ids) => {
                let calls = (number..).zip(*ids).map(|(number, id)| {
                    json!({"id": id, "type": "function", "function": {"name": format!("tool{number}"), "arguments": "{}"}})
                });
                let calls: Vec<Value> = calls.collect();
                number += calls.len();
                json!({"role": "assistant", "content": null, "tool_calls": calls})
            }
        };
        let messages: Vec<Value> = history.iter().enumerate().map(message).collect();
        for end in 1..=history.len() {
            let answers = answers(&history[..end]);
            let tail = tail(&read(&messages[..end]));
            let (text, _) = render(&tail, Format::OpenAi, Profile::OpenAi);
            let list: Value = serde_json::from_str(&text).expect("JSON");
            let list = list["messages"].as_array().expect("a list");
            let mut names: HashMap<String, String> = HashMap::new();
            let mut results = 0;
            for message in list {
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    let name = call["function"]["name"].as_str().expect("a name").to_owned();
                    names.insert(call["id"].as_str().expect("an id").to_owned(), name);
                }
                let content = message["content"].as_str().unwrap_or_default();
                let Some(id) = message["tool_call_id"].as_str() else { continue };
                let name = names[id].as_str();
                let position = content.strip_prefix('r').and_then(|position| position.parse().ok());
                if let Some(position) = position {
                    let expected = answers.get(&position);
                    let expected = expected.map_or("earlier_call".to_owned(), |call| format!("tool{call}"));
                    assert_eq!(name, expected, "the result {position} of {history:?}: {list:#?}");
                    results += 1;
                } else {
                    let call: usize = name.strip_prefix("tool").expect("a call").parse().expect("a number");
                    let is_answered = answers.values().any(|answered| *answered == call);
                    assert!(!is_answered, "call {call} of {history:?} has a result: {list:#?}");
                }
            }
            let recorded = history[..end].iter().filter(|kind| matches!(kind, Kind::Result(_))).count();
            assert_eq!(results, recorded, "each result once");
            let roles =
                |role: Role| read(&messages[..end]).iter().filter(|message| message.role() == role).count();
            let sent = |role: &str| list.iter().filter(|message| message["role"] == role).count();
            assert_eq!(sent("system"), roles(Role::System));
        }
    });
}
