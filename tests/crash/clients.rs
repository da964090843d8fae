//! The clients of a crash test: writers that append exchanges, readers that build contexts, and one that removes messages.

use crate::ack_log::{Ack, AckLog, FIRST_OF_FORK, SessionLog};
use crate::invariants::check_context;
use crate::message_ids::MessageId;
use crate::removals::remove;
use crate::replica::Replica;
use fastrand::Rng;
use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Writers begin a new session after this number of messages, so that checking a complete session stays cheap.
const MAX_SESSION_MESSAGES: usize = 200;

/// The replicas of the service, with one HTTP client for all of them.
pub(crate) struct ReplicaSet {
    pub(crate) replicas: Vec<Replica>,
    client: Client,
    pub(crate) unknown_outcomes: AtomicUsize,
    pub(crate) checked_contexts: AtomicUsize,
    pub(crate) rewinds: AtomicUsize,
}

impl ReplicaSet {
    pub(crate) fn new(replicas: Vec<Replica>) -> Self {
        let client = precis::llm::http::build_http_client(Duration::from_secs(2)).expect("a client");
        let (unknown_outcomes, checked_contexts) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { replicas, client, unknown_outcomes, checked_contexts, rewinds: AtomicUsize::new(0) }
    }

    /// Sends a request once to one replica. Returns `None` if the outcome is unknown or the response is a 503. Any
    /// other error response fails the test.
    pub(crate) async fn try_send(&self, replica: usize, request: &Request) -> Option<Value> {
        let url = self.replicas[replica].url()?;
        let mut builder = self.client.request(request.method.clone(), format!("{url}{}", request.path));
        if let Some(body) = &request.body {
            builder = builder.json(body);
        }
        if let Some(key) = &request.key {
            builder = builder.header("Idempotency-Key", key);
        }
        let response: Response = builder.timeout(REQUEST_TIMEOUT).send().await.ok()?;
        let status = response.status();
        let text = response.text().await.ok()?;
        if status == StatusCode::SERVICE_UNAVAILABLE {
            return None;
        }
        if request.accepted == Some(status) || status == StatusCode::NO_CONTENT {
            return Some(Value::Null);
        }
        let log = || self.last_log_lines(replica);
        assert!(status.is_success(), "{} {}: {status} {text}\n{}", request.method, request.path, log());
        Some(serde_json::from_str(&text).expect("JSON"))
    }

    fn last_log_lines(&self, replica: usize) -> String {
        let log = self.replicas[replica].log();
        log[log.len().saturating_sub(20)..].join("\n")
    }

    /// Sends a request repeatedly until a replica responds.
    pub(crate) async fn send(&self, request: &Request) -> Value {
        let started_at = Instant::now();
        loop {
            for replica in 0..self.replicas.len() {
                if let Some(response) = self.try_send(replica, request).await {
                    return response;
                }
            }
            let log = || self.last_log_lines(0);
            assert!(started_at.elapsed() < REQUEST_TIMEOUT, "no response to {}:\n{}", request.path, log());
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A request that may be sent more than once.
pub(crate) struct Request {
    method: Method,
    path: String,
    body: Option<Value>,
    key: Option<String>,
    /// The status if an earlier attempt has done what the request does.
    accepted: Option<StatusCode>,
}

impl Request {
    pub(crate) fn get(path: String) -> Self {
        Self::new(Method::GET, path)
    }

    pub(crate) fn new(method: Method, path: String) -> Self {
        Self { method, path, body: None, key: None, accepted: None }
    }

    pub(crate) fn with_body(self, body: Value) -> Self {
        Self { body: Some(body), ..self }
    }

    pub(crate) fn with_key(self, key: String) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Accepts an error status, too, for which the response is null.
    pub(crate) fn accepting(self, status: StatusCode) -> Self {
        Self { accepted: Some(status), ..self }
    }

    pub(crate) fn post(path: String, body: Value) -> Self {
        Self::new(Method::POST, path).with_body(body)
    }

    pub(crate) fn rewind(session: &SessionLog, after: usize) -> Self {
        let path = format!("/sessions/{}/messages?after={after}", session.id());
        Self::new(Method::DELETE, path)
    }

    fn fork(session: &SessionLog, id: &str, through_seq: usize) -> Self {
        let path = format!("/sessions/{}/fork", session.id());
        let request = Self::post(path, json!({"through_seq": through_seq, "new_id": id}));
        request.accepting(StatusCode::CONFLICT)
    }

    /// Returns the sync of a list that diverges after a message. It has a key or not, and names the fork or not: each time, a
    /// repetition stores nothing again.
    fn sync_fork(session: &SessionLog, through_seq: usize, exchange: usize, messages: usize) -> Self {
        let mut common: Vec<_> = session.acks().through(through_seq).into_iter().collect();
        // A repeated exchange may be stored after later ones.
        common.sort_unstable_by_key(|(_, ack)| ack.first_seq);
        let common = common.into_iter().flat_map(|(number, ack)| session.message_ids(number, ack.messages));
        let list = common.chain(session.message_ids(exchange, messages)).map(MessageId::message);
        let mut body = json!({"messages": list.collect::<Vec<_>>(), "on_divergence": "fork"});
        if exchange.is_multiple_of(2) {
            body["new_id"] = json!(format!("{}-synced-{exchange}", session.id()));
        }
        let key = exchange.is_multiple_of(3).then(|| format!("fork-{exchange}"));
        Self { key, ..Self::post(format!("/sessions/{}/sync", session.id()), body) }
    }

    /// Returns the request that stores an exchange: an exchange with a key, or all messages of the session up to its last one
    /// without a key, because a repeated sync stores nothing again.
    pub(crate) fn write(session: &SessionLog, exchange: usize, messages: usize) -> Self {
        let ids = session.message_ids(exchange, messages);
        if session.is_synced() {
            let before = session.ids_before(exchange).into_iter();
            let list: Vec<Value> = before.chain(ids).map(MessageId::message).collect();
            return Self::post(format!("/sessions/{}/sync", session.id()), json!({ "messages": list }));
        }
        let messages: Vec<Value> = ids.into_iter().map(MessageId::message).collect();
        let path = format!("/sessions/{}/exchanges", session.id());
        let key = Some(format!("key-{}-{exchange}", session.number));
        Self { key, ..Self::post(path, json!({ "messages": messages })) }
    }
}

/// Returns `true` if a fork with this id has no messages of its own.
pub(crate) fn is_plain_fork(id: &str) -> bool {
    id.contains("-fork-")
}

/// Records the response to [`Request::write`], and returns the position of the exchange.
pub(crate) fn record_ack(session: &SessionLog, exchange: usize, messages: usize, response: &Value) -> usize {
    let number = |field: &str| usize::try_from(response[field].as_u64().expect("a number")).expect("small");
    if session.is_synced() {
        // Earlier requests may have stored the exchange, and even later ones.
        let (matched, appended, last_seq) = (number("matched"), number("appended"), number("last_seq"));
        let before = session.ids_before(exchange).len();
        assert_eq!(
            (matched + appended, &response["diverged_at"]),
            (before + messages, &Value::Null),
            "{response}"
        );
        assert!(
            last_seq >= before + messages && (appended == 0 || last_seq == before + messages),
            "{response}"
        );
        session.record_ack(exchange, before + 1);
        return before + 1;
    }
    assert_eq!(number("last_seq") - number("first_seq") + 1, messages, "{response}");
    session.record_ack(exchange, number("first_seq"));
    number("first_seq")
}

/// Running writers and readers.
pub(crate) struct ClientLoad {
    stop: CancellationToken,
    paused: watch::Sender<bool>,
    workers: JoinSet<()>,
}

pub(crate) struct Worker {
    pub(crate) service: Arc<ReplicaSet>,
    pub(crate) log: Arc<AckLog>,
    pub(crate) rng: Rng,
    stop: CancellationToken,
    paused: watch::Receiver<bool>,
}

impl Worker {
    /// Waits for a random time, and while the load is paused. Returns `false` if the load was stopped.
    pub(crate) async fn wait(&mut self, millis: Range<u64>) -> bool {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
        tokio::select! {
            () = self.stop.cancelled() => false,
            resumed = self.paused.wait_for(|paused| !paused) => resumed.is_ok(),
        }
    }
}

impl ClientLoad {
    pub(crate) fn start(service: &Arc<ReplicaSet>, log: &Arc<AckLog>, rng: &mut Rng, writers: usize) -> Self {
        let (stop, paused) = (CancellationToken::new(), watch::Sender::new(false));
        let mut load = Self { stop, paused, workers: JoinSet::new() };
        for index in 0..=writers + writers.div_ceil(2) {
            let worker = Worker {
                service: Arc::clone(service),
                log: Arc::clone(log),
                rng: rng.fork(),
                stop: load.stop.clone(),
                paused: load.paused.subscribe(),
            };
            if index == 0 {
                load.workers.spawn(remove(worker));
            } else if index <= writers {
                load.workers.spawn(write(worker));
            } else {
                load.workers.spawn(read(worker, writers));
            }
        }
        load
    }

    /// Keeps the workers from starting requests. Running requests continue.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// Fails the test if a worker has failed.
    pub(crate) fn assert_running(&mut self) {
        if let Some(result) = self.workers.try_join_next() {
            result.expect("a worker found a violation");
            panic!("a worker ended before the load was stopped");
        }
    }

    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while let Some(result) = self.workers.join_next().await {
            result.expect("a worker found a violation");
        }
    }
}

/// Sends a request until a replica responds. Returns `None` if the load was stopped before, or `is_done` returns `true`.
pub(crate) async fn send_until(
    worker: &mut Worker,
    request: &Request,
    is_done: impl Fn() -> bool,
) -> Option<Value> {
    while !is_done() {
        let replica = worker.rng.usize(..worker.service.replicas.len());
        if let Some(response) = worker.service.try_send(replica, request).await {
            return Some(response);
        }
        if !worker.wait(5..50).await {
            return None;
        }
    }
    None
}

/// Sometimes rewinds or forks the session, or syncs a list that diverges from it, at the end of a random exchange. Does so only if the client knows the whole history.
async fn rewind_or_fork(worker: &mut Worker, session: &SessionLog) {
    let acks = session.acks().clone();
    // A loss of power can undo a rewind, and the list of a synced session would then diverge from its history.
    let choice = worker.rng.usize(usize::from(session.is_synced())..24);
    if choice > 2
        || choice == 0 && acks.has_late_list
        || acks.acknowledged.len() < 2
        || !acks.unknown.is_empty()
        || acks.rewind.is_some()
    {
        return;
    }
    // A repeated exchange may be stored after later ones.
    let mut ends: Vec<usize> = acks.acknowledged.values().map(|ack| ack.last_seq()).collect();
    ends.sort_unstable();
    let at = ends[worker.rng.usize(..ends.len() - 1)];
    if choice == 0 {
        // The invariant check repeats a rewind whose outcome is unknown.
        if session.record_rewind_sent(at, || *worker.paused.borrow())
            && let rewind = Request::rewind(session, at)
            && send_until(worker, &rewind, || session.acks().rewind.is_none()).await.is_some()
        {
            session.record_rewound();
            worker.service.rewinds.fetch_add(1, Ordering::Relaxed);
        }
    } else if choice == 1 {
        let id = format!("{}-fork-{}", session.id(), worker.rng.u64(..));
        if send_until(worker, &Request::fork(session, &id, at), || false).await.is_some() {
            session.record_fork(id, at, None);
        }
    } else {
        let (exchange, messages) =
            (FIRST_OF_FORK + worker.rng.usize(..FIRST_OF_FORK), [1, 2, 4][worker.rng.usize(..3)]);
        let request = Request::sync_fork(session, at, exchange, messages);
        let replica = worker.rng.usize(..worker.service.replicas.len());
        let mut response = worker.service.try_send(replica, &request).await;
        if response.is_none() {
            session.acks().has_late_list = true;
            response = send_until(worker, &request, || false).await;
        }
        if let Some(response) = response {
            let (id, last_seq) = (response["session_id"].as_str(), response["last_seq"].as_u64());
            assert_eq!(last_seq, u64::try_from(at + messages).ok(), "{response}");
            let appended = (exchange, Ack { messages, first_seq: at + 1 });
            session.record_fork(id.expect("an id").to_owned(), at, Some(appended));
        }
    }
}

async fn write(mut worker: Worker) {
    let mut session = worker.log.create_session();
    let mut exchange = 0;
    while worker.wait(3..20).await {
        let rewinds = worker.service.rewinds.load(Ordering::Relaxed);
        rewind_or_fork(&mut worker, &session).await;
        // The invariant check may be repeating the rewind, and would remove an exchange that is sent meanwhile.
        if session.acks().rewind.is_some() || worker.service.rewinds.load(Ordering::Relaxed) > rewinds {
            continue;
        }
        if session.acks().acknowledged_messages() >= MAX_SESSION_MESSAGES {
            (session, exchange) = (worker.log.create_session(), 0);
        }
        let messages = [1, 2, 2, 2, 4, 4, 6][worker.rng.usize(..7)];
        let request = Request::write(&session, exchange, messages);
        let mut is_retry = false;
        loop {
            let replica = worker.rng.usize(..worker.service.replicas.len());
            if worker.service.replicas[replica].url().is_some() {
                session.record_sent(exchange, messages);
                if let Some(response) = worker.service.try_send(replica, &request).await {
                    record_ack(&session, exchange, messages, &response);
                    break;
                }
                worker.service.unknown_outcomes.fetch_add(usize::from(!is_retry), Ordering::Relaxed);
                is_retry = true;
                // Half of the exchanges with an unknown outcome are left to the invariant check, which repeats them.
                if worker.rng.bool() {
                    break;
                }
            }
            if !worker.wait(5..50).await {
                return;
            }
        }
        exchange += 1;
    }
}

async fn read(mut worker: Worker, recent: usize) {
    while worker.wait(3..30).await {
        let sessions = worker.log.sessions();
        let index = sessions.len().saturating_sub(recent) + worker.rng.usize(..recent);
        let Some(session) = sessions.get(index) else { continue };
        let mode = ["inline", "inline", "background", "off"][worker.rng.usize(..4)];
        let request = Request::post(format!("/sessions/{}/context", session.id()), json!({"mode": mode}));
        let mut acks = session.acks().clone();
        let replica = worker.rng.usize(..worker.service.replicas.len());
        if let Some(context) = worker.service.try_send(replica, &request).await {
            acks.retain_common(&session.acks());
            check_context(&context, session, &acks);
            worker.service.checked_contexts.fetch_add(1, Ordering::Relaxed);
        }
    }
}
