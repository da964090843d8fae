//! The contract as plain data: what there is, and what has to come of each operation.

use super::story::{Exchange, Form};
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) const USERS: [&str; 3] = ["default", "ada", "bo"];

const THRESHOLD: usize = 4;
const KEEP_RECENT: usize = 2;
pub(super) const MOST: usize = 8;

/// All that a tenant has.
#[derive(Default)]
pub(super) struct Tenant {
    pub(super) sessions: BTreeMap<u8, Session>,
    /// The versions of each user's document, from 1 on.
    pub(super) memories: BTreeMap<u8, Vec<String>>,
}

#[derive(Clone)]
pub(super) struct Session {
    pub(super) user: u8,
    pub(super) metadata: String,
    pub(super) history: Vec<Message>,
    /// As the service gave them when they were made; they never change.
    pub(super) revisions: Vec<Value>,
    pub(super) keys: BTreeMap<u8, Recorded>,
    pub(super) updated_at: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message {
    pub(super) json: String,
    pub(super) created_at: String,
}

/// What was recorded with a key, and the answer to it.
#[derive(Clone)]
pub(super) struct Recorded {
    exchange: Exchange,
    pub(super) answer: Value,
}

/// What an exchange has to be answered with.
pub(super) enum Verdict {
    Appended,
    Replayed(Value),
    KeyReused,
    OtherUser,
}

impl Tenant {
    pub(super) fn judge(&self, exchange: &Exchange) -> Verdict {
        let Some(session) = self.sessions.get(&exchange.session) else { return Verdict::Appended };
        match exchange.key.and_then(|key| session.keys.get(&key)) {
            Some(known) if known.exchange == *exchange => Verdict::Replayed(known.answer.clone()),
            Some(_) => Verdict::KeyReused,
            None if exchange.user.is_some_and(|user| user != session.user) => Verdict::OtherUser,
            None => Verdict::Appended,
        }
    }

    /// Appends it. The time, and what the answer said, are the service's.
    pub(super) fn append(&mut self, exchange: &Exchange, messages: &[String], answer: &Value) {
        let created_at = answer["created_at"].as_str().expect("a time").to_owned();
        let session = self.sessions.entry(exchange.session).or_insert_with(|| Session {
            user: exchange.user.unwrap_or(0),
            metadata: "{}".to_owned(),
            history: Vec::new(),
            revisions: Vec::new(),
            keys: BTreeMap::new(),
            updated_at: String::new(),
        });
        let messages = messages.iter();
        session
            .history
            .extend(messages.map(|json| Message { json: json.clone(), created_at: created_at.clone() }));
        session.updated_at = created_at;
        if let Some(given) = exchange.metadata {
            session.metadata = metadata(given);
        }
        if let Some(key) = exchange.key {
            session.keys.insert(key, Recorded { exchange: exchange.clone(), answer: answer.clone() });
        }
    }

    /// Whether there was anything of the user.
    pub(super) fn erase_user(&mut self, user: u8) -> bool {
        let before = self.sessions.len();
        self.sessions.retain(|_, session| session.user != user);
        self.memories.remove(&user).is_some() || self.sessions.len() < before
    }

    pub(super) fn version(&self, user: u8) -> usize {
        self.memories.get(&user).map_or(0, Vec::len)
    }

    pub(super) fn memory(&self, user: u8) -> &str {
        self.memories.get(&user).and_then(|versions| versions.last()).map_or("", String::as_str)
    }
}

impl Session {
    pub(super) fn cursor(&self) -> usize {
        let cursor = self.revisions.last().map(|revision| revision["cursor"].as_u64().expect("a number"));
        usize::try_from(cursor.unwrap_or(0)).expect("small")
    }

    pub(super) fn summary(&self) -> &str {
        self.revisions.last().map_or("", |revision| revision["text"].as_str().expect("a text"))
    }

    /// Where the revisions of a run have to end: it goes on until nothing is due.
    pub(super) fn run(&self, mut asked: bool) -> Vec<usize> {
        let (mut cursor, mut ends) = (self.cursor(), Vec::new());
        while asked || self.history.len() - cursor > THRESHOLD {
            asked = false;
            let Some(end) = self.cut(cursor) else { break };
            ends.push(end);
            cursor = end;
        }
        ends
    }

    /// The last place before a user message; without one, the last that parts no call from its result.
    fn cut(&self, cursor: usize) -> Option<usize> {
        let last = self.history.len().saturating_sub(KEEP_RECENT);
        let is = |seq: usize, role: &str| self.history[seq].json.contains(&format!(r#""role":"{role}""#));
        let safe: Vec<_> = (cursor + 1..=last).filter(|seq| !is(*seq, "tool")).collect();
        safe.iter().rfind(|seq| is(**seq, "user")).or(safe.last()).copied()
    }

    /// Whether an import of what `other` was has been done here.
    pub(super) fn begins_with(&self, other: &Self) -> bool {
        self.history.starts_with(&other.history) && self.revisions.starts_with(&other.revisions)
    }
}

pub(super) fn metadata(number: u8) -> String {
    [r#"{"z":1.0,"a":[null]}"#, r#"{"b":"\u00e9"}"#, "{}"][usize::from(number)].to_owned()
}

/// The messages of an exchange, as JSON that has to come back to the letter. `mark` tells it from others.
pub(super) fn messages(form: Form, mark: &str) -> Vec<String> {
    let say = |role: &str, what: &str| {
        format!(
            r#"{{"n":1.0,"role":"{role}","content":"{what} \u00e9é {mark} is about plan {mark}.","x":null}}"#
        )
    };
    let call = format!(
        r#"{{"role":"assistant","content":null,"tool_calls":[{{"id":"c-{mark}","type":"function","function":{{"name":"f","arguments":"{{}}"}}}}]}}"#
    );
    let result =
        format!(r#"{{"role":"tool","tool_call_id":"c-{mark}","content":"The result {mark} is good."}}"#);
    match form {
        Form::Turn => vec![say("user", "Question"), say("assistant", "Answer")],
        Form::User => vec![say("user", "Question")],
        Form::Tool => vec![say("user", "Question"), call, result, say("assistant", "Answer")],
    }
}
