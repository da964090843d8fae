//! The reference model of the contract: plain data that predicts the result of every operation. It is written message
//! by message, in the simplest way, so that it shares no code and no cleverness with the service.

use super::harness::{COMPRESSED, assistant, user};
use super::operations::{
    Exchange, MessageKind, Mode, ModelFault, OnDivergence, Period, RetentionLevel, ServiceSettings, Sync,
    View,
};
use super::support::client::assert_includes;
use precis::domain::consolidation::SummaryLimit;
use precis::domain::summary;
use precis::llm::extractive;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) const USERS: [&str; 3] = ["default", "ada", "bo"];

/// All data of one tenant.
#[derive(Default)]
pub(super) struct Tenant {
    pub(super) sessions: BTreeMap<u8, Session>,
    /// The users of sessions that do not exist yet.
    pub(super) bound: BTreeMap<u8, u8>,
    /// The branches that rewinds have removed from sessions, and the forks whose ids the service has chosen, by their ids.
    pub(super) branches: BTreeMap<String, Session>,
    /// The ids of these forks, by session, request, and attempt.
    pub(super) fork_ids: BTreeMap<(u8, String, usize), String>,
    /// The versions of each user's memory document, beginning with version 1.
    pub(super) memories: BTreeMap<u8, Vec<String>>,
    /// The retention periods of the tenant and of its users.
    pub(super) retention: Option<Period>,
    pub(super) user_retention: BTreeMap<u8, Period>,
}

#[derive(Clone)]
pub(super) struct Session {
    pub(super) user: Option<u8>,
    pub(super) metadata: String,
    pub(super) history: Vec<Message>,
    pub(super) revisions: Vec<Revision>,
    pub(super) keys: BTreeMap<u8, Recorded>,
    /// Consolidations that failed since the last revision.
    pub(super) failures: usize,
    pub(super) updated_at: String,
    /// The field `forked_from` of its state.
    pub(super) forked_from: Value,
    /// The same for all sessions that forks and rewinds have made of one session.
    pub(super) lineage: usize,
    /// The retention period of its own. Forks and branches inherit it.
    pub(super) retention: Option<Period>,
}

static NEXT_LINEAGE: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message {
    /// The message as it is stored.
    pub(super) json: String,
    /// The message as its client wrote it, and still has it.
    given: String,
    /// The record of its redaction, without revisions.
    pub(super) redaction: Option<Value>,
    pub(super) created_at: String,
    is_user: bool,
    is_blank: bool,
    calls: Vec<String>,
    result_of: Option<String>,
    tokens: i64,
}

/// A request that has appended messages with an idempotency key, with its body and its response.
#[derive(Clone)]
pub(super) struct Recorded {
    /// `None` for a sync.
    pub(super) exchange: Option<Exchange>,
    /// A message of the request was redacted: any body with the key is the same request.
    pub(super) takes_any_body: bool,
    pub(super) body: String,
    pub(super) response: Value,
}

#[derive(Clone)]
pub(super) struct Revision {
    /// The range that a consolidation added; `None` for other kinds.
    range: Option<(usize, usize)>,
    /// The message of a redaction.
    redaction_of: Option<usize>,
    is_edit: bool,
    /// The message whose redaction has removed the texts.
    redacted_seq: Option<usize>,
    cursor: usize,
    text: String,
    added: String,
    text_before_compression: Option<String>,
    /// Indices of the tool calls that were summarised without their result.
    abandoned_calls: BTreeSet<usize>,
    /// The revision as the service returned it first. Only a redaction changes it afterwards.
    pub(super) json: Value,
}

/// The predicted result of appending an exchange.
pub(super) enum AppendOutcome {
    Appended,
    Replayed(Recorded),
    KeyReused,
    UserMismatch,
}

/// The complete list of a client: each message as the client wrote it first, and as it sends it now.
pub(super) type ClientList = Vec<(String, String)>;

/// The predicted result of a sync.
pub(super) enum SyncOutcome {
    /// The list continues the session with this id.
    Matched(String, usize),
    /// The list continues the first messages of the session in a new fork.
    Forked {
        /// `None` if the service has not chosen it yet.
        id: Option<String>,
        attempt: usize,
        through: usize,
    },
    /// The response of an earlier request to the session with this id.
    Replayed(String, Recorded),
    /// The first position at which the list differs.
    Diverged(usize),
    KeyReused,
    UserMismatch,
    /// The id of the fork belongs to another session.
    Exists,
    /// The id of the fork is that of the session.
    InvalidId,
}

/// The predicted result of a consolidation run.
pub(super) struct Run {
    pub(super) revisions: Vec<Revision>,
    pub(super) failed: bool,
}

/// A tool call with the positions of its message and its result.
#[derive(Debug)]
pub(super) struct ToolCall {
    pub(super) seq: usize,
    id: String,
    pub(super) result: Option<usize>,
}

/// The open tool calls that a split point must not separate from their results.
#[derive(Clone, Copy)]
enum KeptCalls {
    All,
    /// A call may be left behind if the user continued after it.
    UnlessUserContinued,
    None,
}

impl Tenant {
    pub(super) fn predict_append(&self, exchange: &Exchange) -> AppendOutcome {
        let session = self.sessions.get(&exchange.session);
        match exchange.key.and_then(|key| session?.keys.get(&key)) {
            Some(known) if known.takes_any_body || known.exchange.as_ref() == Some(exchange) => {
                AppendOutcome::Replayed(known.clone())
            }
            Some(_) => AppendOutcome::KeyReused,
            None if self.is_of_another(exchange.session, exchange.user) => AppendOutcome::UserMismatch,
            None => AppendOutcome::Appended,
        }
    }

    pub(super) fn owner(&self, session: u8) -> Option<u8> {
        self.sessions.get(&session).map_or(self.bound.get(&session).copied(), |session| session.user)
    }

    /// Returns `true` if the session belongs to another user than the one that a request names.
    pub(super) fn is_of_another(&self, session: u8, named: Option<u8>) -> bool {
        self.owner(session).zip(named).is_some_and(|(owner, named)| owner != named)
    }

    /// Binds a session without a user to the user that a request names.
    pub(super) fn bind(&mut self, session: u8, named: Option<u8>) {
        let Some(user) = self.owner(session).or(named) else { return };
        match self.sessions.get_mut(&session) {
            Some(session) => session.user = Some(user),
            None => drop(self.bound.insert(session, user)),
        }
    }

    /// Returns the messages of an exchange as JSON text for the next positions of its session.
    pub(super) fn render(&self, exchange: &Exchange, settings: &ServiceSettings) -> Vec<String> {
        render_messages(self.history(exchange.session), &exchange.messages, settings)
    }

    fn history(&self, session: u8) -> Vec<Message> {
        self.sessions.get(&session).map_or(Vec::new(), |session| session.history.clone())
    }

    /// Returns the list of a client.
    pub(super) fn client_list(&self, sync: &Sync, settings: &ServiceSettings) -> ClientList {
        let mut view = self.history(sync.session);
        let mut new = sync.new.clone();
        let mut changed = None;
        match sync.view {
            View::Complete => {}
            View::Beginning(count) => {
                view.truncate(count % (view.len() + 1));
                new.clear();
            }
            View::Changed(index) if !view.is_empty() => {
                let index = index % view.len();
                let is_user = view[index].json == user(index + 1);
                let other = if is_user { assistant(index + 1) } else { user(index + 1) };
                view[index] = Message::new(other, "");
                // The changed message may have made tool calls, so that the ones after it are no history to continue.
                view.truncate(index + 1);
                changed = Some(index);
            }
            View::Changed(_) | View::Empty => view.clear(),
        }
        let sent = |(index, message): (usize, &Message)| {
            let sent = match (&message.given, sync.anthropic, sync.rewritten) {
                (json, ..) if changed == Some(index) => json.clone(),
                (json, true, _) => as_anthropic(json),
                (json, false, true) => rewrite(json),
                (json, false, false) => json.clone(),
            };
            (message.given.clone(), sent)
        };
        let mut list: ClientList = view.iter().enumerate().map(sent).collect();
        if sync.anthropic {
            for kind in &mut new {
                if matches!(kind, MessageKind::ToolCalls(_) | MessageKind::ToolResult(_)) {
                    *kind = MessageKind::Assistant;
                }
            }
        }
        list.extend(render_messages(view, &new, settings).into_iter().map(|json| (json.clone(), json)));
        list
    }

    pub(super) fn predict_sync(&self, sync: &Sync, list: &ClientList, body: &str) -> SyncOutcome {
        let own = format!("s{}", sync.session);
        // The body of a retry can be one that was sent to another session, and names this one as its fork.
        if body.contains(&format!(r#""new_id":"{own}""#)) {
            return SyncOutcome::InvalidId;
        }
        let session = self.sessions.get(&sync.session);
        let known = session.and_then(|session| session.keys.get(&sync.key?));
        // The body of a retry is the recorded one, with other choices than these.
        if let Some(known) = known.filter(|known| known.is_sync(body)) {
            return SyncOutcome::Replayed(own, known.clone());
        }
        if let Some((id, fork)) = self.fork(sync, body, 0)
            && let Some(known) = sync.key.and_then(|key| fork.keys.get(&key))
        {
            let is_chosen = sync.on_divergence == OnDivergence::Fork;
            if known.is_same(body) && (is_chosen || fork.is_fork_of(&own)) {
                return SyncOutcome::Replayed(id, known.clone());
            } else if is_chosen && !known.is_same(body) {
                return SyncOutcome::KeyReused;
            }
        }
        let owner = self.owner(sync.session);
        let outcome = predict_sync_into(&own, owner, session, sync, list, body);
        let SyncOutcome::Diverged(seq) = outcome else { return outcome };
        if sync.on_divergence == OnDivergence::Error {
            return outcome;
        }
        for attempt in 0.. {
            match self.fork(sync, body, attempt) {
                Some((id, fork)) if fork.is_fork_of(&own) => {
                    let outcome = predict_sync_into(&id, fork.user, Some(fork), sync, list, body);
                    if !matches!(outcome, SyncOutcome::Diverged(_)) {
                        return outcome;
                    }
                }
                Some(_) => {}
                None => {
                    let id = self.fork_id(sync, body, attempt);
                    if !matches!(sync.on_divergence, OnDivergence::ForkTo(id) if self.bound.contains_key(&id))
                    {
                        return SyncOutcome::Forked { id, attempt, through: seq - 1 };
                    }
                }
            }
            if sync.on_divergence != OnDivergence::Fork {
                break;
            }
        }
        SyncOutcome::Exists
    }

    fn fork_id(&self, sync: &Sync, body: &str, attempt: usize) -> Option<String> {
        match sync.on_divergence {
            OnDivergence::Error => None,
            OnDivergence::Fork => self.fork_ids.get(&fork_request(sync, body, attempt)).cloned(),
            OnDivergence::ForkTo(id) => Some(format!("s{id}")),
        }
    }

    /// Returns the session that has the id of the fork.
    fn fork(&self, sync: &Sync, body: &str, attempt: usize) -> Option<(String, &Session)> {
        let id = self.fork_id(sync, body, attempt)?;
        let fork = self.find(&id)?;
        Some((id, fork))
    }

    /// Adds a fork with the messages of the list after the common ones.
    pub(super) fn add_fork(
        &mut self,
        sync: &Sync,
        (through, attempt): (usize, usize),
        new: &[(String, String)],
        (body, response): (&str, &Value),
        created_at: &str,
    ) {
        let mut fork = self.sessions[&sync.session].fork(through);
        fork.forked_from = response["forked_from"].clone();
        fork.append_list(sync, new, (body, response), created_at);
        if let OnDivergence::ForkTo(id) = sync.on_divergence {
            self.sessions.insert(id, fork);
        } else {
            let id = response["session_id"].as_str().expect("an id").to_owned();
            self.fork_ids.insert(fork_request(sync, body, attempt), id.clone());
            self.branches.insert(id, fork);
        }
    }

    /// Appends the messages after the matched ones.
    pub(super) fn append_list(
        &mut self,
        (id, sync): (&str, &Sync),
        new: &[(String, String)],
        (body, response): (&str, &Value),
        created_at: &str,
    ) {
        if self.find(id).is_none() {
            let bound = self.bound.remove(&sync.session);
            self.sessions.insert(sync.session, Session::new(bound));
        }
        self.find_mut(id).append_list(sync, new, (body, response), created_at);
    }

    pub(super) fn find_mut(&mut self, id: &str) -> &mut Session {
        let number = id.strip_prefix('s').and_then(|number| number.parse::<u8>().ok());
        let session =
            number.map_or_else(|| self.branches.get_mut(id), |number| self.sessions.get_mut(&number));
        session.expect("a known session")
    }

    /// Stores user and metadata of a list without new messages.
    pub(super) fn update(&mut self, id: &str, sync: &Sync) {
        if self.find(id).is_none() {
            return self.bind(sync.session, sync.user);
        }
        let session = self.find_mut(id);
        session.user = session.user.or(sync.user);
        if let Some(number) = sync.metadata {
            session.metadata = metadata(number);
        }
    }
}

impl Recorded {
    /// Returns `true` if a sync with this body was recorded.
    fn is_sync(&self, body: &str) -> bool {
        self.exchange.is_none() && self.body == body
    }

    /// Returns `true` if a sync with this body gets the recorded result.
    fn is_same(&self, body: &str) -> bool {
        self.takes_any_body || self.is_sync(body)
    }
}

/// Identifies the requests that have the same fork.
fn fork_request(sync: &Sync, body: &str, attempt: usize) -> (u8, String, usize) {
    let request = sync.key.map_or_else(|| body.to_owned(), |key| format!("key {key}"));
    (sync.session, request, attempt)
}

/// Predicts the result of a sync to a single session.
fn predict_sync_into(
    id: &str,
    owner: Option<u8>,
    session: Option<&Session>,
    sync: &Sync,
    list: &ClientList,
    body: &str,
) -> SyncOutcome {
    let known = session.and_then(|session| session.keys.get(&sync.key?));
    if let Some(known) = known.filter(|known| known.is_sync(body)) {
        return SyncOutcome::Replayed(id.to_owned(), known.clone());
    }
    if owner.zip(sync.user).is_some_and(|(owner, named)| owner != named) {
        return SyncOutcome::UserMismatch;
    }
    if let Some(known) = known {
        let replayed = SyncOutcome::Replayed(id.to_owned(), known.clone());
        return if known.takes_any_body { replayed } else { SyncOutcome::KeyReused };
    }
    let history = session.map_or(&[][..], |session| &session.history);
    for (index, (message, (given, _))) in history.iter().zip(list).enumerate() {
        let is_same = match message.redaction {
            Some(_) => redact(given) == message.json,
            None => message.json == *given,
        };
        if !is_same {
            return SyncOutcome::Diverged(index + 1);
        }
    }
    SyncOutcome::Matched(id.to_owned(), history.len().min(list.len()))
}

impl Session {
    fn is_fork_of(&self, id: &str) -> bool {
        self.forked_from["session_id"] == id && self.forked_from["kind"] == "fork"
    }

    fn append_list(
        &mut self,
        sync: &Sync,
        new: &[(String, String)],
        (body, response): (&str, &Value),
        created_at: &str,
    ) {
        let session = self;
        session.user = session.user.or(sync.user);
        session.history.extend(new.iter().map(|(_, sent)| Message::new(sent.clone(), created_at)));
        created_at.clone_into(&mut session.updated_at);
        if let Some(number) = sync.metadata {
            session.metadata = metadata(number);
        }
        if let Some(key) = sync.key {
            let (body, response) = (body.to_owned(), response.clone());
            session.keys.insert(key, Recorded { exchange: None, takes_any_body: false, body, response });
        }
    }
}

impl Tenant {
    /// Appends an exchange. The time is taken from the response.
    pub(super) fn append(&mut self, exchange: &Exchange, messages: &[String], body: &str, response: &Value) {
        let created_at = response["created_at"].as_str().expect("a time");
        self.bind(exchange.session, exchange.user);
        let bound = self.bound.remove(&exchange.session);
        let session = self.sessions.entry(exchange.session).or_insert_with(|| Session::new(bound));
        session.history.extend(messages.iter().map(|json| Message::new(json.clone(), created_at)));
        created_at.clone_into(&mut session.updated_at);
        if let Some(number) = exchange.metadata {
            session.metadata = metadata(number);
        }
        if let Some(key) = exchange.key {
            let (exchange, body, response) = (Some(exchange.clone()), body.to_owned(), response.clone());
            session.keys.insert(key, Recorded { exchange, takes_any_body: false, body, response });
        }
    }

    /// Returns the names of the sessions and branches that have the same message.
    pub(super) fn copies(&self, id: u8, seq: usize) -> Vec<String> {
        let Some(source) = self.sessions.get(&id) else { return Vec::new() };
        let named = self.sessions.iter().map(|(id, session)| (format!("s{id}"), session));
        let all = named.chain(self.branches.iter().map(|(name, session)| (name.clone(), session)));
        let has_message = |session: &Session| {
            let (message, same) = (session.history.get(seq - 1), &source.history[seq - 1]);
            session.lineage == source.lineage
                && message.is_some_and(|message| {
                    (&message.json, &message.created_at) == (&same.json, &same.created_at)
                })
        };
        all.filter(|(_, session)| has_message(session)).map(|(name, _)| name).collect()
    }

    /// Returns a session or a branch by its id.
    pub(super) fn find(&self, name: &str) -> Option<&Session> {
        let number = name.strip_prefix('s').and_then(|number| number.parse::<u8>().ok());
        number.map_or_else(|| self.branches.get(name), |number| self.sessions.get(&number))
    }

    /// Erases a session with its branches. Its forks remain, and forget its id.
    pub(super) fn erase_session(&mut self, id: u8) {
        self.sessions.remove(&id);
        let is_of = |session: &Session, kind: &str| {
            session.forked_from["session_id"] == format!("s{id}") && session.forked_from["kind"] == kind
        };
        self.branches.retain(|_, branch| !is_of(branch, "rewind"));
        let sessions = self.sessions.values_mut().chain(self.branches.values_mut());
        for session in sessions.filter(|session| is_of(session, "fork")) {
            session.forked_from = Value::Null;
        }
    }

    /// Returns the period that applies at a level, and the level that it comes from.
    pub(super) fn effective_retention(&self, level: RetentionLevel) -> (Option<Period>, &'static str) {
        let (session, user) = match level {
            RetentionLevel::Tenant => (None, None),
            RetentionLevel::User(user) => (None, Some(user)),
            RetentionLevel::Session(id) => {
                let session = self.sessions.get(&id);
                (session.and_then(|session| session.retention), session.and_then(|session| session.user))
            }
        };
        let user = user.and_then(|user| self.user_retention.get(&user).copied());
        [(session, "session"), (user, "user"), (self.retention, "tenant")]
            .into_iter()
            .find(|(period, _)| period.is_some())
            .unwrap_or((None, "setting"))
    }

    pub(super) fn set_retention(&mut self, level: RetentionLevel, period: Option<Period>) {
        match level {
            RetentionLevel::Tenant => self.retention = period,
            RetentionLevel::User(user) => {
                self.user_retention.remove(&user);
                self.user_retention.extend(period.map(|period| (user, period)));
            }
            RetentionLevel::Session(id) => {
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.retention = period;
                }
            }
        }
    }

    /// Erases everything to which the period of this level applies: it has expired. Returns the ids of the sessions.
    pub(super) fn expire(&mut self, level: RetentionLevel) -> Vec<String> {
        let has_user_period = |user: &u8| self.user_retention.contains_key(user);
        let expires = |name: &str, user: Option<u8>, own: Option<Period>| match level {
            RetentionLevel::Session(id) => name == format!("s{id}"),
            RetentionLevel::User(owner) => own.is_none() && user == Some(owner),
            RetentionLevel::Tenant => own.is_none() && !user.as_ref().is_some_and(has_user_period),
        };
        let sessions = self.sessions.iter().map(|(id, session)| (format!("s{id}"), session));
        let all = sessions.chain(self.branches.iter().map(|(name, session)| (name.clone(), session)));
        let sessions = all.filter(|(name, session)| expires(name, session.user, session.retention));
        let names: Vec<String> = sessions.map(|(name, _)| name).collect();
        let bound = self.bound.iter().filter(|(id, user)| expires(&format!("s{id}"), Some(**user), None));
        let bound: Vec<u8> = bound.map(|(id, _)| *id).collect();
        // A session that does not exist yet has no period of its own.
        if !matches!(level, RetentionLevel::Session(_)) {
            self.bound.retain(|id, _| !bound.contains(id));
        }
        for name in &names {
            match name.strip_prefix('s').and_then(|number| number.parse().ok()) {
                Some(id) => self.erase_session(id),
                None => drop(self.branches.remove(name)),
            }
        }
        names
    }

    /// Returns `true` if the user had any data.
    pub(super) fn erase_user(&mut self, user: u8) -> bool {
        let of_user = self.sessions.iter().filter(|(_, session)| session.user == Some(user));
        let ids: Vec<u8> = of_user.map(|(id, _)| *id).collect();
        for id in &ids {
            self.erase_session(*id);
        }
        let others = self.bound.len() + self.branches.len();
        self.bound.retain(|_, owner| *owner != user);
        self.branches.retain(|_, branch| branch.user != Some(user));
        let has_others = self.bound.len() + self.branches.len() < others;
        let had_period = self.user_retention.remove(&user).is_some();
        self.memories.remove(&user).is_some() || !ids.is_empty() || has_others || had_period
    }

    pub(super) fn memory_version(&self, user: u8) -> usize {
        self.memories.get(&user).map_or(0, Vec::len)
    }

    pub(super) fn memory(&self, user: u8) -> &str {
        self.memories.get(&user).and_then(|versions| versions.last()).map_or("", String::as_str)
    }
}

/// Metadata as JSON text that must be returned byte for byte.
pub(super) fn metadata(number: u8) -> String {
    [r#"{"z":1.0,"a":[null]}"#, r#"{"b":"\u00e9"}"#, "{}"][usize::from(number)].to_owned()
}

/// Returns messages as JSON text for the positions after a history.
fn render_messages(
    mut history: Vec<Message>,
    kinds: &[MessageKind],
    settings: &ServiceSettings,
) -> Vec<String> {
    let begin = history.len();
    for kind in kinds {
        let json = render_message(&history, *kind, settings.repeated_call_ids);
        history.push(Message::new(json, ""));
    }
    history.drain(begin..).map(|message| message.json).collect()
}

/// Returns a message as a framework sends it in the next turn: with another id, without unknown fields, with nulls, marks and
/// reasoning, the content in the other form, and the arguments of calls written anew.
fn rewrite(json: &str) -> String {
    let mut message: Value = serde_json::from_str(json).expect("JSON");
    let content = match message["content"].take() {
        Value::String(text) => {
            json!([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}])
        }
        Value::Array(parts) => parts[0]["text"].clone(),
        other => other,
    };
    let mut calls = message["tool_calls"].take();
    for call in calls.as_array_mut().into_iter().flatten() {
        call["function"]["arguments"] = json!(" { } ");
        call["index"] = json!(0);
    }
    let (role, result_of) = (&message["role"], &message["tool_call_id"]);
    let mut written = json!({"id": "msg_1", "role": role, "content": content, "name": null, "refusal": null,
        "reasoning_content": "Hm.", "tool_calls": calls, "audio": null});
    if !result_of.is_null() {
        written["tool_call_id"] = result_of.clone();
    }
    written.to_string()
}

/// Returns a message as a client of the Anthropic format writes it. Results are messages of their own.
fn as_anthropic(json: &str) -> String {
    let message: Value = serde_json::from_str(json).expect("JSON");
    let content = match &message["content"] {
        Value::Array(parts) => parts[0]["text"].clone(),
        text => text.clone(),
    };
    if message["role"] == "tool" {
        let result = json!({"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": [{"type": "text", "text": content}]});
        return json!({"role": "user", "content": [result]}).to_string();
    }
    let mut blocks = vec![
        json!({"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}),
        json!({"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}),
    ];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    blocks.extend(calls.map(
        |call| json!({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}),
    ));
    if message["role"] == "user" {
        blocks.remove(0);
    }
    json!({"role": message["role"], "content": blocks}).to_string()
}

/// Returns the redacted form of a message.
pub(super) fn redact(json: &str) -> String {
    let message: Value = serde_json::from_str(json).expect("JSON");
    let result =
        message["tool_call_id"].as_str().map_or(String::new(), |id| format!(r#","tool_call_id":"{id}""#));
    let call = |call: &Value| {
        let (id, name) = (&call["id"], &call["function"]["name"]);
        format!(r#"{{"id":{id},"type":"function","function":{{"name":{name},"arguments":"{{}}"}}}}"#)
    };
    let calls: Vec<String> = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
    let calls =
        if calls.is_empty() { String::new() } else { format!(r#","tool_calls":[{}]"#, calls.join(",")) };
    format!(r#"{{"role":{}{result},"content":"[redacted]"{calls}}}"#, message["role"])
}

/// Every message except a blank one contains its position, so that summaries can name it.
fn render_message(history: &[Message], kind: MessageKind, repeated_call_ids: bool) -> String {
    let seq = history.len() + 1;
    let open: Vec<ToolCall> = tool_calls(history).into_iter().filter(|call| call.result.is_none()).collect();
    match kind {
        MessageKind::User => user(seq),
        MessageKind::Blank => r#"{"role":"user","content":" "}"#.to_owned(),
        MessageKind::ToolCalls(count) => {
            let id = |call| if repeated_call_ids { format!("call_{call}") } else { format!("c{seq}_{call}") };
            let call = |call| json!({"id": id(call), "type": "function", "function": {"name": "f", "arguments": "{}"}});
            let calls: Vec<Value> = (0..count).map(call).collect();
            json!({"role": "assistant", "content": format!("m{seq} calls"), "tool_calls": calls}).to_string()
        }
        MessageKind::ToolResult(which) if !open.is_empty() => {
            let id = &open[which % open.len()].id;
            json!({"role": "tool", "tool_call_id": id, "content": format!("m{seq} a result")}).to_string()
        }
        MessageKind::Assistant | MessageKind::ToolResult(_) => assistant(seq),
    }
}

/// Returns all tool calls of a history. If an id is used again, a result belongs to the latest open call with it.
fn tool_calls(history: &[Message]) -> Vec<ToolCall> {
    let mut calls: Vec<ToolCall> = Vec::new();
    for (seq, message) in (1..).zip(history) {
        if let Some(id) = &message.result_of {
            let call = calls.iter_mut().rfind(|call| call.id == *id && call.result.is_none());
            call.expect("only open calls get results").result = Some(seq);
        }
        calls.extend(message.calls.iter().map(|id| ToolCall { seq, id: id.clone(), result: None }));
    }
    calls
}

impl Message {
    pub(super) fn new(json: String, created_at: &str) -> Self {
        let value: Value = serde_json::from_str(&json).expect("JSON");
        let parsed = precis::domain::format::read(&json);
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let calls = value["tool_calls"].as_array().into_iter().flatten();
        Self {
            created_at: created_at.to_owned(),
            is_user: value["role"] == "user",
            is_blank: value["content"] == " ",
            calls: calls.filter_map(|call| text(&call["id"])).collect(),
            result_of: text(&value["tool_call_id"]),
            tokens: precis::domain::format::count_tokens(&parsed.expect("a valid message")),
            given: json.clone(),
            redaction: None,
            json,
        }
    }
}

impl Message {
    /// Removes the content. A placeholder is nothing to summarise.
    fn redact(&mut self, record: &Value) {
        let json = redact(&self.json);
        let given = std::mem::take(&mut self.given);
        let redaction = Some(record.clone());
        *self = Self { given, redaction, is_blank: true, ..Self::new(json, &self.created_at) };
    }
}

impl Revision {
    pub(super) fn assert_matches(&self, number: usize, revision: &Value) {
        let kind = match (self.range, self.redaction_of) {
            (Some(_), _) => "consolidation",
            (None, Some(_)) => "redaction",
            (None, None) if self.is_edit => "edit",
            (None, None) => "restore",
        };
        let (from, to) = self.range.or(self.redaction_of.map(|seq| (seq, seq))).unzip();
        let expected = json!({
            "revision": number, "kind": kind, "from_seq": from, "to_seq": to, "cursor": self.cursor,
            "text": self.text, "added": self.added, "words": summary::words(&self.text),
            "redacted_seq": self.redacted_seq,
        });
        assert_includes(revision, &expected);
        assert_eq!(revision["meta"]["text_before"], json!(self.text_before_compression), "{revision}");
    }
}

impl Session {
    pub(super) fn new(user: Option<u8>) -> Self {
        Self {
            user,
            metadata: "{}".to_owned(),
            history: Vec::new(),
            revisions: Vec::new(),
            keys: BTreeMap::new(),
            failures: 0,
            updated_at: String::new(),
            forked_from: Value::Null,
            lineage: NEXT_LINEAGE.fetch_add(1, Ordering::Relaxed),
            retention: None,
        }
    }

    /// Returns the session as an import creates it: a session of its own, without the keys of redactions.
    pub(super) fn imported(&self, user: Option<u8>) -> Self {
        let lineage = NEXT_LINEAGE.fetch_add(1, Ordering::Relaxed);
        let mut session = Self { user, lineage, ..self.clone() };
        for record in session.history.iter_mut().filter_map(|message| message.redaction.as_mut()) {
            (record["key_id"], record["copies"]) = (Value::Null, json!(0));
        }
        session
    }

    /// Removes a message and the summaries that cover it. Returns the revision that the redaction appends.
    pub(super) fn redact(&mut self, seq: usize, record: &Value) -> Revision {
        let mut last = None;
        for revision in &mut self.revisions {
            if revision.cursor < seq {
                if revision.redacted_seq.is_none() {
                    last = Some((revision.cursor, revision.text.clone(), revision.abandoned_calls.clone()));
                }
            } else if revision.redacted_seq.is_none() {
                revision.redacted_seq = Some(seq);
                (revision.text, revision.added) = (String::new(), String::new());
                let json = &mut revision.json;
                (json["text"], json["added"]) = (json!(""), json!(""));
                (json["words"], json["tokens"], json["redacted_seq"]) = (json!(0), json!(0), json!(seq));
                if let Some(text) = &mut revision.text_before_compression {
                    text.clear();
                    json["meta"]["text_before"] = json!("");
                }
            }
        }
        self.history[seq - 1].redact(record);
        self.failures = 0;
        for recorded in self.keys.values_mut() {
            let bound = |field| recorded.response[field].as_u64().and_then(|seq| usize::try_from(seq).ok());
            let (first, last) = (bound("first_seq"), bound("last_seq"));
            recorded.takes_any_body |=
                first.zip(last).is_some_and(|(first, last)| (first..=last).contains(&seq));
        }
        let (cursor, text, abandoned_calls) = last.unwrap_or_default();
        Revision {
            range: None,
            redaction_of: Some(seq),
            is_edit: false,
            redacted_seq: None,
            cursor,
            text,
            added: String::new(),
            text_before_compression: None,
            abandoned_calls,
            json: Value::Null,
        }
    }

    /// Returns the records of the redacted messages.
    pub(super) fn redactions(&self) -> Vec<Value> {
        let redacted =
            (1..).zip(&self.history).filter_map(|(seq, message)| Some((seq, message.redaction.clone()?)));
        let record = |(seq, mut record): (usize, Value)| {
            let made = self.revisions.iter().rposition(|revision| revision.redaction_of == Some(seq));
            let made = made.expect("each redaction has a revision");
            let lost = (1..).zip(&self.revisions).filter(|(_, revision)| revision.redacted_seq == Some(seq));
            record["seq"] = json!(seq);
            record["redacted_revisions"] = lost.map(|(number, _): (usize, _)| json!(number)).collect();
            (record["revision"], record["cursor"]) = (json!(made + 1), json!(self.revisions[made].cursor));
            record
        };
        redacted.map(record).collect()
    }

    /// Returns the session with its first messages only. The revisions that cover others are left out, and the rest is
    /// numbered anew.
    pub(super) fn fork(&self, through: usize) -> Self {
        let mut session = Self { failures: 0, keys: BTreeMap::new(), ..self.clone() };
        session.history.truncate(through);
        session.revisions.retain(|revision| revision.cursor <= through);
        for (number, revision) in (1..).zip(&mut session.revisions) {
            revision.json["revision"] = json!(number);
        }
        session
    }

    /// Returns the session after a rewind. The keys of exchanges that are stored completely remain.
    pub(super) fn rewind(&self, after: usize) -> Self {
        let mut keys = self.keys.clone();
        keys.retain(|_, recorded| recorded.response["last_seq"].as_u64() <= u64::try_from(after).ok());
        Self { keys, forked_from: self.forked_from.clone(), ..self.fork(after) }
    }

    pub(super) fn cursor(&self) -> usize {
        self.revisions.last().map_or(0, |revision| revision.cursor)
    }

    pub(super) fn summary(&self) -> &str {
        self.revisions.last().map_or("", |revision| &revision.text)
    }

    pub(super) fn json(&self) -> Vec<String> {
        self.history.iter().map(|message| message.json.clone()).collect()
    }

    pub(super) fn tail_tokens(&self) -> i64 {
        self.tokens_after(self.cursor())
    }

    fn tokens_after(&self, cursor: usize) -> i64 {
        self.history[cursor..].iter().map(|message| message.tokens).sum()
    }

    /// Returns the tool calls whose results a context may lack, because they were summarised while they were open.
    pub(super) fn tool_calls(&self) -> Vec<(ToolCall, bool)> {
        let abandoned = self.abandoned_calls();
        let calls = tool_calls(&self.history).into_iter().enumerate();
        calls.map(|(index, call)| (call, abandoned.contains(&index))).collect()
    }

    fn abandoned_calls(&self) -> BTreeSet<usize> {
        self.revisions.last().map_or(BTreeSet::new(), |revision| revision.abandoned_calls.clone())
    }

    /// Returns `true` if importing `exported` into this session would change nothing.
    pub(super) fn begins_with(&self, exported: &Self) -> bool {
        let json = |session: &Self| -> Vec<Value> {
            session.revisions.iter().map(|revision| revision.json.clone()).collect()
        };
        let messages = |session: &Self| -> Vec<(String, String)> {
            session.history.iter().map(|message| (message.json.clone(), message.created_at.clone())).collect()
        };
        messages(self).starts_with(&messages(exported)) && json(self).starts_with(&json(exported))
    }

    fn is_due(&self, settings: &ServiceSettings, cursor: usize) -> bool {
        self.history.len() - cursor > settings.threshold
    }

    /// Returns `true` if a split after `seq` separates a call that was made after `cursor` from its result, or from a
    /// result that may still come.
    fn splits_call(&self, cursor: usize, seq: usize, open_calls: KeptCalls) -> bool {
        let is_user = |seq: usize| self.history.get(seq - 1).is_some_and(|message| message.is_user);
        let mut calls =
            tool_calls(&self.history).into_iter().filter(|call| call.seq > cursor && call.seq <= seq);
        calls.any(|call| match (call.result, open_calls) {
            (Some(result), _) => result > seq,
            (None, KeptCalls::All) => true,
            (None, KeptCalls::UnlessUserContinued) => !(call.seq + 1..=seq + 1).any(is_user),
            (None, KeptCalls::None) => false,
        })
    }

    /// Returns the last message of the next summary.
    ///
    /// An open call holds the split back until contexts would have to omit messages. From then on, a call after which
    /// the user continued is abandoned; if that does not help, any open call is.
    fn split_point(&self, settings: &ServiceSettings, cursor: usize) -> Option<usize> {
        let last = self.history.len();
        let too_long = last - cursor > settings.max_history_messages;
        let suffices = |split: &usize| last - *split <= settings.max_history_messages;
        let rules = [KeptCalls::All, KeptCalls::UnlessUserContinued, KeptCalls::None];
        let splits = rules.into_iter().take(if too_long { 3 } else { 1 }).filter_map(|rule| {
            let candidates = cursor + 1..=last.saturating_sub(settings.keep_recent);
            let safe: Vec<usize> = candidates.filter(|seq| !self.splits_call(cursor, *seq, rule)).collect();
            let before_user = |seq: &&usize| self.history[**seq].is_user;
            let fitting = || safe.iter().filter(|seq| suffices(seq));
            let any = safe.iter().rfind(before_user).or(safe.last());
            fitting().rfind(before_user).or(fitting().next_back()).or(any).copied()
        });
        let splits: Vec<usize> = splits.collect();
        // The last resort: the split that separates the fewest calls from their results.
        let separated = |seq: usize| {
            let calls = tool_calls(&self.history);
            let open = |call: &&ToolCall| call.seq > cursor && call.seq <= seq && call.result > Some(seq);
            (calls.iter().filter(open).count(), !self.history[seq].is_user)
        };
        let separating = || {
            let candidates = cursor + 1..=last.saturating_sub(settings.keep_recent);
            candidates.rev().filter(|seq| too_long && suffices(seq)).min_by_key(|seq| separated(*seq))
        };
        splits.iter().copied().find(|split| suffices(split)).or_else(separating).or(splits.first().copied())
    }

    /// Predicts a run that consolidates once if that is due or `force` is set.
    pub(super) fn predict_run(&self, settings: &ServiceSettings, force: bool, fault: ModelFault) -> Run {
        let (cursor, before) = (self.cursor(), self.summary());
        let mut abandoned_calls = self.abandoned_calls();
        let mut run = Run { revisions: Vec::new(), failed: false };
        if !force && !self.is_due(settings, cursor) {
            return run;
        }
        let Some(end) = self.split_point(settings, cursor) else { return run };
        let range = (cursor + 1..).zip(&self.history[cursor..end]);
        let names: Vec<String> =
            range.filter(|(_, message)| !message.is_blank).map(|(seq, _)| format!("m{seq}")).collect();
        let summary_succeeds =
            matches!(fault, ModelFault::None | ModelFault::EmptyCompression | ModelFault::LongerCompression);
        if !names.is_empty() && !summary_succeeds {
            run.failed = true;
            return run;
        }
        let added = if names.is_empty() { String::new() } else { format!("It covers {} .", names.join(" ")) };
        let parts: Vec<&str> = [before, &added].into_iter().filter(|part| !part.is_empty()).collect();
        let joined = parts.join("\n\n");
        let too_long = !added.is_empty() && summary::words(&joined) > settings.summary_word_limit;
        let is_compressed = too_long && fault == ModelFault::None;
        // The built-in summariser compresses what models leave far too long. Its text is tested elsewhere.
        let limit = settings.summary_word_limit;
        let is_far_too_long = too_long && !is_compressed && summary::words(&joined) > 2 * limit;
        let text_before_compression = (is_compressed || is_far_too_long).then(|| joined.clone());
        let text = match (is_compressed, is_far_too_long) {
            (true, _) => COMPRESSED.to_owned(),
            (false, true) => extractive::compress(&joined, SummaryLimit::Words(limit)),
            (false, false) => joined,
        };
        let calls = tool_calls(&self.history).into_iter().enumerate();
        let open = calls.filter(|(_, call)| call.seq <= end && call.result.is_none_or(|result| result > end));
        abandoned_calls.extend(open.map(|(index, _)| index));
        run.revisions.push(Revision {
            range: Some((cursor + 1, end)),
            redaction_of: None,
            is_edit: false,
            redacted_seq: None,
            cursor: end,
            text,
            added,
            text_before_compression,
            abandoned_calls,
            json: Value::Null,
        });
        run
    }

    /// Predicts the consolidation outcome of a context, and the run that the context starts.
    pub(super) fn predict_context(
        &self,
        settings: &ServiceSettings,
        mode: Mode,
        fault: ModelFault,
    ) -> (&'static str, Run) {
        let nothing = Run { revisions: Vec::new(), failed: false };
        match mode {
            Mode::Off => ("disabled", nothing),
            _ if !self.is_due(settings, self.cursor()) => ("not_due", nothing),
            _ if settings.long_backoff && self.failures > 0 => ("failed", nothing),
            // A context that would omit messages waits for its consolidation.
            Mode::Background if self.history.len() - self.cursor() <= settings.max_history_messages => {
                ("scheduled", self.predict_run(settings, false, fault))
            }
            Mode::Background | Mode::Inline => {
                let run = self.predict_run(settings, false, fault);
                let outcome = match (run.failed, run.revisions.is_empty()) {
                    (true, _) => "failed",
                    (false, false) => "consolidated",
                    (false, true) => "not_due",
                };
                (outcome, run)
            }
        }
    }

    /// Returns `true` if the texts of a revision were removed.
    pub(super) fn is_redacted(&self, revision: usize) -> bool {
        let revision = revision.checked_sub(1).and_then(|index| self.revisions.get(index));
        revision.is_some_and(|revision| revision.redacted_seq.is_some())
    }

    /// Predicts the revision that a restore creates; `None` if the target does not exist.
    pub(super) fn predict_restore(&self, target: usize) -> Option<Revision> {
        let empty = (0, String::new(), BTreeSet::new());
        let (cursor, text, abandoned_calls) = match target.checked_sub(1) {
            None => empty,
            Some(index) => {
                let target = self.revisions.get(index)?;
                (target.cursor, target.text.clone(), target.abandoned_calls.clone())
            }
        };
        let (added, json) = (String::new(), Value::Null);
        Some(Revision {
            range: None,
            redaction_of: None,
            is_edit: false,
            redacted_seq: None,
            cursor,
            text,
            added,
            text_before_compression: None,
            abandoned_calls,
            json,
        })
    }

    /// Predicts the revision that an edit creates.
    pub(super) fn predict_edit(&self, text: String) -> Revision {
        Revision {
            range: None,
            redaction_of: None,
            is_edit: true,
            redacted_seq: None,
            cursor: self.cursor(),
            text,
            added: String::new(),
            text_before_compression: None,
            abandoned_calls: self.abandoned_calls(),
            json: Value::Null,
        }
    }
}
