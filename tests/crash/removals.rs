//! Messages and sessions that are removed while faults occur: redacted, erased by request, and erased by retention. What was
//! removed never reappears, and nothing else disappears.
//!
//! Each message begins with a word of its own, which the scripted model repeats in summaries.

use crate::clients::{ReplicaSet, Request, Worker, send_until};
use fastrand::Rng;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Longest time from the end of a retention period to the erasure, on a machine that is busy.
const MAX_EXPIRY: Duration = Duration::from_secs(30);
/// Number of sessions without a client that a check reads again.
const RECHECKED: usize = 4;

/// The sessions of the clients that remove messages.
#[derive(Debug, Default)]
pub(crate) struct RemovalLog(Mutex<Vec<Arc<RemovalSession>>>);

#[derive(Debug)]
pub(crate) struct RemovalSession {
    number: usize,
    state: Mutex<Removals>,
}

/// The knowledge of the client.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removals {
    /// The words of acknowledged messages that the client has not tried to remove, by position.
    kept: BTreeMap<usize, String>,
    /// The words of messages whose redaction was acknowledged.
    gone: BTreeSet<String>,
    /// Acknowledged forks, with their last message.
    forks: Vec<(String, usize)>,
    erasure: Erasure,
    /// The retention period of a second was acknowledged.
    expires: bool,
    /// The client has ended.
    is_done: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Erasure {
    #[default]
    None,
    /// It was requested.
    Possible,
    /// It was acknowledged or observed.
    Done,
}

/// Returns `true` if a message begins with this word.
pub(crate) fn is_word(text: &str) -> bool {
    let number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let rest = text.strip_prefix("zq").and_then(|rest| rest.strip_suffix('y'));
    rest.and_then(|rest| rest.split_once('x')).is_some_and(|(session, word)| number(session) && number(word))
}

fn path(id: &str, rest: &str) -> String {
    format!("/sessions/{id}{rest}")
}

impl RemovalLog {
    fn create_session(&self) -> Arc<RemovalSession> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = Arc::new(RemovalSession { number: sessions.len(), state: Mutex::default() });
        sessions.push(Arc::clone(&session));
        session
    }

    fn sessions(&self) -> Vec<Arc<RemovalSession>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn states(&self) -> Vec<Removals> {
        self.sessions().iter().map(|session| session.state().clone()).collect()
    }

    /// Makes everything unknown that was acknowledged after `earlier`, because a loss of power may have undone it.
    pub(crate) fn forget_since(&self, earlier: &[Removals]) {
        for session in self.sessions() {
            let earlier = earlier.get(session.number).cloned().unwrap_or_default();
            let mut state = session.state();
            state.kept.retain(|seq, word| earlier.kept.get(seq) == Some(word));
            state.gone.retain(|word| earlier.gone.contains(word));
            state.forks.truncate(earlier.forks.len());
            state.expires &= earlier.expires;
            if state.erasure != earlier.erasure {
                state.erasure = Erasure::Possible;
            }
        }
    }

    /// Returns `true` if a message was redacted, and a session was erased or will be erased by retention.
    pub(crate) fn has_each_kind(&self) -> bool {
        let states = self.states();
        states.iter().any(|state| !state.gone.is_empty())
            && states.iter().any(|state| state.expires || state.erasure == Erasure::Done)
    }

    /// Checks the sessions that have clients, and some others.
    pub(crate) async fn check_some(&self, service: &ReplicaSet, rng: &mut Rng) {
        let (done, running): (Vec<_>, Vec<_>) =
            self.sessions().into_iter().partition(|session| session.state().is_done);
        let rechecked = rng.choose_multiple(done, RECHECKED);
        for session in running.into_iter().chain(rechecked) {
            session.check(service).await;
        }
    }

    /// Waits for the erasures by retention, and checks all sessions. Returns a summary.
    pub(crate) async fn check_all(&self, service: &ReplicaSet) -> String {
        let began = Instant::now();
        for session in self.sessions().iter().filter(|session| session.state().expires) {
            while !session.is_erased(service).await {
                assert!(began.elapsed() < MAX_EXPIRY, "{} has not expired", session.id());
                sleep(Duration::from_millis(50)).await;
            }
        }
        for session in self.sessions() {
            session.check(service).await;
        }
        let states = self.states();
        let redacted: usize = states.iter().map(|state| state.gone.len()).sum();
        let erased = states.iter().filter(|state| state.erasure == Erasure::Done && !state.expires).count();
        let expired = states.iter().filter(|state| state.expires).count();
        assert!(
            redacted > 0 && erased + expired > 0,
            "{redacted}, {erased} and {expired}: nothing was removed"
        );
        format!("{redacted} messages redacted; {erased} sessions erased, {expired} expired")
    }

    /// Checks that no file of a folder contains a removed text. Redacts a message before, because a process may have been killed
    /// between an earlier redaction and the end of its clean-up.
    pub(crate) async fn check_files(&self, service: &ReplicaSet, folder: &Path) {
        let session = self.create_session();
        let id = session.id();
        for number in 0..2 {
            session.append(number, &service.send(&session.exchange(number)).await);
        }
        let redaction = Request::new(Method::DELETE, path(&id, "/messages/1"));
        assert_eq!(service.send(&redaction).await["seq"], 1);
        let word = session.state().kept.remove(&1);
        session.state().gone.extend(word);
        for replica in &service.replicas {
            replica.kill();
        }
        let mut removed = BTreeSet::new();
        for state in self.states() {
            if state.erasure == Erasure::Done && state.forks.is_empty() {
                removed.extend(state.kept.into_values());
            }
            removed.extend(state.gone);
        }
        for file in std::fs::read_dir(folder).expect("a folder") {
            let file = file.expect("a file").path();
            let bytes = std::fs::read(&file).expect("readable");
            let words = bytes.split(|byte| !byte.is_ascii_alphanumeric());
            let words = words.filter_map(|word| std::str::from_utf8(word).ok());
            let found: BTreeSet<&str> = words.filter(|word| removed.contains(*word)).collect();
            assert!(found.is_empty(), "{}: {found:?}", file.display());
        }
    }
}

impl RemovalSession {
    fn id(&self) -> String {
        format!("removals-{}", self.number)
    }

    fn word(&self, number: usize) -> String {
        format!("zq{}x{number}y", self.number)
    }

    fn state(&self) -> MutexGuard<'_, Removals> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an exchange of two messages, which has a key.
    fn exchange(&self, number: usize) -> Request {
        let [user, assistant] = [2 * number, 2 * number + 1].map(|number| self.word(number));
        let body = json!({
            "user_message": format!("{user} is a word."), "assistant_reply": format!("{assistant} is another one."),
        });
        let request = Request::post(path(&self.id(), "/exchanges"), body);
        request.with_key(format!("removals-{}-{number}", self.number))
    }

    fn append(&self, number: usize, response: &Value) {
        let first =
            response["first_seq"].as_u64().and_then(|seq| usize::try_from(seq).ok()).expect("a number");
        let words = [(first, self.word(2 * number)), (first + 1, self.word(2 * number + 1))];
        self.state().kept.extend(words);
    }

    async fn is_erased(&self, service: &ReplicaSet) -> bool {
        let request = Request::get(path(&self.id(), "")).accepting(StatusCode::NOT_FOUND);
        service.send(&request).await.is_null()
    }

    /// Checks the session and its forks, while clients may continue.
    async fn check(&self, service: &ReplicaSet) {
        let before = self.state().clone();
        let id = self.id();
        if self.is_erased(service).await {
            let mut state = self.state();
            assert!(state.erasure != Erasure::None || before.kept.is_empty(), "{id} is lost: {before:?}");
            if !before.kept.is_empty() {
                state.erasure = Erasure::Done;
            }
        } else {
            assert_ne!(before.erasure, Erasure::Done, "{id} is back: {before:?}");
            self.check_texts(service, &before, &id, usize::MAX).await;
        }
        for (fork, through) in &before.forks {
            self.check_texts(service, &before, fork, *through).await;
        }
    }

    /// Checks that no response contains a removed word, and that the history contains all others.
    async fn check_texts(&self, service: &ReplicaSet, before: &Removals, id: &str, through: usize) {
        let read = async |rest: &str| {
            let request = Request::get(path(id, rest)).accepting(StatusCode::NOT_FOUND);
            service.send(&request).await.to_string()
        };
        let revisions = read("/revisions?limit=1000").await;
        let redactions = read("/redactions?limit=1000").await;
        let context = Request::post(path(id, "/context"), json!({"mode": "off"}));
        let context = service.send(&context).await.to_string();
        let messages = read("/messages?limit=1000").await;
        for word in &before.gone {
            for text in [&messages, &revisions, &redactions, &context] {
                assert!(!text.contains(word), "{id}: {word} was redacted: {text}");
            }
        }
        if let Some(word) = before.gone.last() {
            let found = Request::get(format!("/search?session_id={id}&q=%22{word}%22"));
            assert_eq!(service.send(&found).await["items"], json!([]), "{id}: {word}");
        }
        let after = self.state().clone();
        // Retention may have erased it meanwhile.
        if id == self.id() && after.erasure != Erasure::None {
            return;
        }
        for (seq, word) in before.kept.iter().filter(|(seq, word)| after.kept.get(seq) == Some(word)) {
            assert!(*seq > through || messages.contains(word), "{id}: {word} is lost: {messages}");
        }
    }
}

/// Runs a client that appends, forks and redacts messages, and erases sessions.
pub(crate) async fn remove(mut worker: Worker) {
    let log = Arc::clone(&worker.log);
    loop {
        let session = log.removals.create_session();
        let ended = use_session(&mut worker, &session).await;
        session.state().is_done = true;
        if ended.is_none() {
            return;
        }
    }
}

/// Returns `None` if the load was stopped.
async fn use_session(worker: &mut Worker, session: &RemovalSession) -> Option<()> {
    let id = session.id();
    for number in 0..worker.rng.usize(3..9) {
        worker.wait(5..30).await.then_some(())?;
        let response = send_until(worker, &session.exchange(number), || false).await?;
        session.append(number, &response);
        match worker.rng.usize(..8) {
            0..=2 => {
                let context = Request::post(path(&id, "/context"), json!({}));
                send_until(worker, &context, || false).await?;
            }
            3 if number > 2 => {
                let (fork, through) = (format!("{id}-fork-{number}"), worker.rng.usize(1..=number));
                let body = json!({"new_id": fork, "through_seq": through});
                let request = Request::post(path(&id, "/fork"), body).accepting(StatusCode::CONFLICT);
                send_until(worker, &request, || false).await?;
                session.state().forks.push((fork, through));
            }
            4..=6 => {
                let known: Vec<usize> = session.state().kept.keys().copied().collect();
                let Some(seq) = worker.rng.choice(known) else { continue };
                let word = session.state().kept.remove(&seq);
                let request = Request::new(Method::DELETE, path(&id, &format!("/messages/{seq}")));
                let response = send_until(worker, &request, || false).await?;
                assert_eq!(response["seq"], seq);
                session.state().gone.extend(word);
            }
            _ => {}
        }
    }
    worker.wait(5..30).await.then_some(())?;
    match worker.rng.usize(..5) {
        0 | 1 => {
            session.state().erasure = Erasure::Possible;
            let request = Request::new(Method::DELETE, path(&id, "")).accepting(StatusCode::NOT_FOUND);
            send_until(worker, &request, || false).await?;
            session.state().erasure = Erasure::Done;
        }
        2 | 3 => {
            session.state().erasure = Erasure::Possible;
            let request = Request::new(Method::PUT, path(&id, "/retention"));
            let request =
                request.with_body(json!({"after_last_exchange": "1s"})).accepting(StatusCode::NOT_FOUND);
            send_until(worker, &request, || false).await?;
            session.state().expires = true;
        }
        _ => {}
    }
    Some(())
}
