//! Pairs tool calls with their results. Providers reject a list in which a result does not follow its call directly, and an id that
//! is repeated or has other characters. A history can contain such lists: a call was abandoned, a result came late or twice, or the
//! other half is only in the summary. Missing halves are inserted. Messages between a call and its results follow the results. If the
//! model has answered before a result came, the result stays where it was recorded.

use crate::domain::json_validation::{MAX_JSON_DEPTH, check_json, replace_lone_surrogates};
use crate::domain::message::Role;
use crate::domain::message_metadata::MessageMetadata;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// Content of an inserted result. It is true whether the result comes later or never.
pub(super) const NO_RESULT: &str = "No result of this call had been recorded at this point.";
/// Tool name of an inserted call.
pub(super) const EARLIER_CALL: &str = "earlier_call";
/// Arguments of an inserted call.
pub(super) const NO_ARGUMENTS: &str = "{}";
/// Name of a tool that a call does not name.
const UNNAMED_TOOL: &str = "unnamed_tool";
/// Longest name that OpenAI, Gemini and Mistral accept (`docs/formats.md` has the sources).
const MAX_NAME_CHARS: usize = 64;
/// Longest id of a call that OpenAI accepts.
pub(super) const MAX_ID_CHARS: usize = 40;

/// The form of the ids in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdRule {
    AsRecorded,
    /// Letters, digits, `_` and `-`, at most this many, and each id once.
    UpTo(usize),
    /// Nine letters and digits, which Mistral requires.
    Nine,
}

/// A step of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The message at this position.
    Message(usize),
    /// The inserted result of the call `call` of the message at this position.
    MissingResult { position: usize, call: usize },
}

/// The order of a list, and the ids in it.
#[derive(Debug, Default)]
pub(super) struct Pairing {
    pub(super) steps: Vec<Step>,
    /// The number of steps that no further message can change.
    pub(super) stable_steps: usize,
    calls: HashMap<usize, Vec<String>>,
    /// The message and the position of the call for each result that has one.
    answered: HashMap<usize, (usize, usize)>,
    /// The ids of the inserted calls for the other results.
    orphans: HashMap<usize, String>,
}

/// A call without a result until now.
struct OpenCall<'m> {
    group: usize,
    position: usize,
    call: usize,
    id: &'m str,
}

impl Pairing {
    /// Pairs the calls of consecutive messages, the first of which has the `seq` `first_seq`.
    pub(super) fn of(messages: &[MessageMetadata], first_seq: i64, rule: IdRule) -> Self {
        let (mut pairing, mut ids) = (Self::default(), CallIds { rule, used: HashSet::new() });
        // Each group is a message and the results that follow it.
        let mut groups: Vec<Vec<Step>> = Vec::new();
        let mut open: Vec<OpenCall<'_>> = Vec::new();
        let mut previous = None;
        for ((position, message), seq) in messages.iter().enumerate().zip(first_seq..) {
            if message.role == Role::Tool {
                let id = message.result_of().unwrap_or_default();
                if let Some(OpenCall { group, position: of, call, .. }) = take_call(&mut open, id) {
                    pairing.answered.insert(position, (of, call));
                    push(&mut groups, group, Step::Message(position));
                    previous = Some(Role::Tool);
                    continue;
                }
                pairing.orphans.insert(position, ids.assign(id, seq));
            }
            // The model has gone on without the results.
            if message.role == Role::Assistant && previous != Some(Role::Assistant) {
                close(&mut groups, &mut open);
            }
            if !message.calls().is_empty() {
                let assigned = message.calls().iter().map(|id| ids.assign(id, seq)).collect();
                pairing.calls.insert(position, assigned);
            }
            let calls = message.calls().iter().enumerate();
            open.extend(calls.map(|(call, id)| OpenCall { group: groups.len(), position, call, id }));
            groups.push(vec![Step::Message(position)]);
            previous = Some(message.role);
        }
        let first_open = open.first().map(|call| call.group);
        let steps = |groups: &[Vec<Step>]| groups.iter().map(Vec::len).sum::<usize>();
        pairing.stable_steps = match first_open {
            Some(group) => steps(groups.get(..=group).unwrap_or_default()),
            None => steps(&groups),
        };
        close(&mut groups, &mut open);
        pairing.steps = groups.concat();
        pairing
    }

    /// Returns the id of a call of the message at `position`.
    pub(super) fn call_id(&self, position: usize, call: usize) -> &str {
        self.calls.get(&position).and_then(|ids| ids.get(call)).map_or("", String::as_str)
    }

    /// Returns the message and the position of the call whose result the message at `position` is.
    pub(super) fn call_of(&self, position: usize) -> Option<(usize, usize)> {
        self.answered.get(&position).copied()
    }

    /// Returns `true` if the message at `position` is a result without a recorded call.
    pub(super) fn is_orphan(&self, position: usize) -> bool {
        self.orphans.contains_key(&position)
    }

    /// Returns the id of the call whose result the message at `position` is.
    pub(super) fn result_id(&self, position: usize) -> &str {
        match self.call_of(position) {
            Some((of, call)) => self.call_id(of, call),
            None => self.orphans.get(&position).map_or("", String::as_str),
        }
    }
}

/// Takes the call that a result answers: the first one with its id. A result without an id, or of a call without one, is matched by
/// position.
fn take_call<'m>(open: &mut Vec<OpenCall<'m>>, id: &str) -> Option<OpenCall<'m>> {
    let same = open.iter().position(|call| call.id == id);
    let by_position = || open.iter().position(|call| id.is_empty() || call.id.is_empty());
    same.or_else(by_position).map(|index| open.remove(index))
}

/// Inserts results of the open calls.
fn close(groups: &mut [Vec<Step>], open: &mut Vec<OpenCall<'_>>) {
    for OpenCall { group, position, call, .. } in open.drain(..) {
        push(groups, group, Step::MissingResult { position, call });
    }
}

fn push(groups: &mut [Vec<Step>], group: usize, step: Step) {
    if let Some(group) = groups.get_mut(group) {
        group.push(step);
    }
}

/// The ids of a list.
struct CallIds {
    rule: IdRule,
    used: HashSet<String>,
}

impl CallIds {
    /// Returns the id of a new call: the recorded one if possible. A repeated id gets the `seq` of the message as a suffix. An id that is
    /// too long or taken nevertheless is hashed.
    fn assign(&mut self, recorded: &str, seq: i64) -> String {
        let valid = |id: &str| match self.rule {
            IdRule::AsRecorded => id.to_owned(),
            IdRule::UpTo(max) => valid_id(id, max),
            IdRule::Nine if id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()) => id.to_owned(),
            IdRule::Nine => hash_id(id).chars().rev().take(9).collect(),
        };
        let mut id = valid(recorded);
        if self.rule == IdRule::AsRecorded {
            return id;
        }
        if self.used.contains(&id) {
            id = valid(&format!("{id}_{seq}"));
        }
        while self.used.contains(&id) {
            id = valid(&hash_id(&id));
        }
        self.used.insert(id.clone());
        id
    }
}

fn is_id_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// Returns a valid id of a call: the recorded one if possible.
pub(super) fn valid_id(id: &str, max: usize) -> String {
    if (1..=max).contains(&id.len()) && id.chars().all(is_id_char) { id.to_owned() } else { hash_id(id) }
}

fn hash_id(id: &str) -> String {
    let hash = Sha256::digest(id);
    format!("call_{}", hex::encode(hash.get(..12).unwrap_or_default()))
}

/// Returns a valid name of a tool: invalid characters become `_`. It begins with a letter or `_`, which Gemini requires.
pub(in super::super) fn tool_name(name: &str) -> Cow<'_, str> {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_';
    if name.starts_with(is_first) && name.len() <= MAX_NAME_CHARS && name.chars().all(is_id_char) {
        return name.into();
    }
    if name.trim().is_empty() {
        return UNNAMED_TOOL.into();
    }
    let prefix = if name.starts_with(|c: char| c.is_ascii_digit() || c == '-') { "_" } else { "" };
    let valid = name.chars().map(|c| if is_id_char(c) { c } else { '_' });
    prefix.chars().chain(valid).take(MAX_NAME_CHARS).collect::<String>().into()
}

/// Returns the arguments of a call as a JSON object: verbatim, or as the only field of an object if they are none.
pub(in super::super) fn valid_arguments(arguments: &str) -> Cow<'_, str> {
    let text = arguments.trim_ascii();
    if text.is_empty() {
        return NO_ARGUMENTS.into();
    }
    // Some formats nest the arguments deeper than the stored message, where they are a string.
    let is_object =
        |text: &str| text.starts_with('{') && check_json(text, MAX_JSON_DEPTH - 8, usize::MAX).is_ok();
    let repaired = replace_lone_surrogates(text);
    if is_object(&repaired) { repaired } else { json!({"arguments": arguments}).to_string().into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    #[test_case("u a u a" => "u a u a|"; "no calls")]
    #[test_case("u Axy ty tx a" => "u Axy ty tx a|"; "answered in another order")]
    #[test_case("Ax tx Ax tx u" => "Ax tx Ax tx u|"; "reused id")]
    #[test_case("u Ax u a" => "u Ax (tx) u a|"; "call without result")]
    #[test_case("u Axy ty u a" => "u Axy ty (tx) u a|"; "one of two results")]
    #[test_case("u Ax u" => "u Ax|(tx) u"; "the result may still come")]
    #[test_case("u Axy tx" => "u Axy tx|(ty)"; "at the end")]
    #[test_case("u Ax Ay ty" => "u Ax|(tx) Ay ty"; "messages of one turn")]
    #[test_case("u Ax Ay ty tx a" => "u Ax tx Ay ty a|"; "messages of one turn with results in another order")]
    #[test_case("tx u a" => "(Ax) tx u a|"; "result without call")]
    #[test_case("Ax u a tx u" => "Ax (tx) u a (Ax) tx u|"; "late result")]
    #[test_case("Ax u s tx a" => "Ax tx u s a|"; "notes before the result")]
    #[test_case("Ax tx tx u" => "Ax tx (Ax) tx u|"; "repeated result")]
    #[test_case("Axy tx tx ty" => "Axy tx ty (Ax) tx|"; "repeated result of one of two calls")]
    #[test_case("Ax tz tx" => "Ax tx (Az) tz|"; "result of another call")]
    #[test_case("Add td td td" => "Add td td (Ad) td|"; "the same id twice")]
    fn results_follow_their_calls(script: &str) -> String {
        let messages = conversation(script);
        let words: Vec<&str> = script.split(' ').collect();
        let pairing = Pairing::of(&messages, 1, IdRule::AsRecorded);
        let mut out: Vec<String> = Vec::new();
        for (index, step) in pairing.steps.iter().enumerate() {
            let word = match *step {
                Step::Message(position) if pairing.is_orphan(position) => {
                    format!("(A{}) {}", pairing.result_id(position), words[position])
                }
                Step::Message(position) => words[position].to_owned(),
                Step::MissingResult { position, call } => format!("(t{})", pairing.call_id(position, call)),
            };
            out.push(word + if index + 1 == pairing.stable_steps { "|" } else { " " });
        }
        out.concat().trim_end().to_owned()
    }

    #[test]
    fn every_call_gets_a_unique_valid_id() {
        let longest = "x".repeat(MAX_ID_CHARS);
        let mut ids = CallIds { rule: IdRule::UpTo(MAX_ID_CHARS), used: HashSet::new() };
        let recorded = ["a", "a_2", "a", "a", &longest, &longest, &"x".repeat(99), "", "", "f:0"];
        let assigned: Vec<String> = (0..).zip(recorded).map(|(seq, id)| ids.assign(id, seq)).collect();
        assert!(assigned.iter().all(|id| valid_id(id, MAX_ID_CHARS) == *id), "{assigned:?}");
        assert_eq!(assigned.iter().collect::<HashSet<_>>().len(), recorded.len(), "{assigned:?}");
        assert_eq!([&assigned[0], &assigned[1], &assigned[3], &assigned[4]], ["a", "a_2", "a_3", &longest]);
    }

    #[test_case("db.query", "" => ("db_query".to_owned(), "{}".to_owned()))]
    #[test_case("", "[1]" => ("unnamed_tool".to_owned(), r#"{"arguments":"[1]"}"#.to_owned()))]
    #[test_case("2nd-té", r#"{"a" : 1.0}"# => ("_2nd-t_".to_owned(), r#"{"a" : 1.0}"#.to_owned()))]
    #[test_case("f", r#"{"a":"\ud83d"}"# => ("f".to_owned(), r#"{"a":"\ufffd"}"#.to_owned()))]
    #[test_case("f", r#"{"command": "ls -"# => ("f".to_owned(), r#"{"arguments":"{\"command\": \"ls -"}"#.to_owned()))]
    fn names_and_arguments_are_repaired(name: &str, arguments: &str) -> (String, String) {
        (tool_name(name).into_owned(), valid_arguments(arguments).into_owned())
    }
}
