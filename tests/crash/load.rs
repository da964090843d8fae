//! The clients: writers that persist exchanges, readers that ask for contexts, and the way to a replica that answers.

use crate::chance::Chance;
use crate::ledger::{Book, Known, Ledger};
use crate::names::{Covered, Name, are_whole};
use crate::replica::Replica;
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

/// For what must happen once nothing is in its way.
const PATIENCE: Duration = Duration::from_secs(30);
/// Messages after which a writer begins another session, so that looking at a whole one stays cheap.
const SESSION: usize = 200;

/// The replicas, as a client sees them.
pub(crate) struct Service {
    pub(crate) replicas: Vec<Replica>,
    client: Client,
    unknown: AtomicUsize,
    contexts: AtomicUsize,
}

impl Service {
    pub(crate) fn new(replicas: Vec<Replica>) -> Self {
        let client = precis::llm::http::build_http_client(Duration::from_secs(2)).expect("a client");
        Self { replicas, client, unknown: AtomicUsize::new(0), contexts: AtomicUsize::new(0) }
    }

    /// How many exchanges were of unknown outcome at first.
    pub(crate) fn unknown(&self) -> usize {
        self.unknown.load(Ordering::Relaxed)
    }

    /// How many contexts readers have checked.
    pub(crate) fn contexts(&self) -> usize {
        self.contexts.load(Ordering::Relaxed)
    }

    /// Sends a request once, to one replica. `None`: what became of it is unknown, or it was refused for now. Any other
    /// answer than a success or a 503 is a bug.
    pub(crate) async fn once(&self, replica: usize, request: &Request) -> Option<Value> {
        let url = self.replicas[replica].url()?;
        let mut sent = self.client.request(request.method.clone(), format!("{url}{}", request.path));
        if let Some(body) = &request.body {
            sent = sent.json(body);
        }
        if let Some(key) = &request.key {
            sent = sent.header("Idempotency-Key", key);
        }
        let response: Response = sent.timeout(PATIENCE).send().await.ok()?;
        let status = response.status();
        let text = response.text().await.ok()?;
        if status == StatusCode::SERVICE_UNAVAILABLE {
            return None;
        }
        assert!(status.is_success(), "{} {}: {status} {text}", request.method, request.path);
        Some(serde_json::from_str(&text).expect("JSON"))
    }

    /// Sends a request until a replica answers.
    pub(crate) async fn surely(&self, request: &Request) -> Value {
        let began = Instant::now();
        loop {
            for replica in 0..self.replicas.len() {
                if let Some(answer) = self.once(replica, request).await {
                    return answer;
                }
            }
            let log = || self.replicas[0].log().into_iter().rev().take(20).collect::<Vec<_>>().join("\n");
            assert!(began.elapsed() < PATIENCE, "{} is not answered:\n{}", request.path, log());
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
}

impl Request {
    pub(crate) fn get(path: String) -> Self {
        Self { method: Method::GET, path, body: None, key: None }
    }

    pub(crate) fn post(path: String, body: Value) -> Self {
        Self { method: Method::POST, path, body: Some(body), key: None }
    }

    pub(crate) fn exchange(book: &Book, exchange: usize, of: usize) -> Self {
        let messages: Vec<Value> = book.names(exchange, of).into_iter().map(Name::message).collect();
        let path = format!("/sessions/{}/exchanges", book.id());
        let key = Some(format!("key-{}-{exchange}", book.number));
        Self { key, ..Self::post(path, json!({ "messages": messages })) }
    }
}

/// Notes an acknowledgement.
pub(crate) fn acknowledge(book: &Book, exchange: usize, of: usize, answer: &Value) {
    let number = |field: &str| usize::try_from(answer[field].as_u64().expect("a number")).expect("small");
    assert_eq!(number("last_seq") - number("first_seq") + 1, of, "{answer}");
    book.acknowledge(exchange, number("first_seq"));
}

/// Writers and readers at work, until they are told to stop.
pub(crate) struct Load {
    stop: CancellationToken,
    /// True while they rest.
    resting: watch::Sender<bool>,
    workers: JoinSet<()>,
}

/// What a worker goes by.
struct Worker {
    service: Arc<Service>,
    ledger: Arc<Ledger>,
    chance: Chance,
    stop: CancellationToken,
    resting: watch::Receiver<bool>,
}

impl Worker {
    /// Before each request: a moment, and as long as there is rest. False: it is over.
    async fn goes_on(&mut self, moment: Range<u64>) -> bool {
        sleep(self.chance.millis(moment)).await;
        tokio::select! {
            () = self.stop.cancelled() => false,
            rested = self.resting.wait_for(|resting| !resting) => rested.is_ok(),
        }
    }
}

impl Load {
    pub(crate) fn start(
        service: &Arc<Service>,
        ledger: &Arc<Ledger>,
        chance: &mut Chance,
        workers: usize,
    ) -> Self {
        let (stop, resting) = (CancellationToken::new(), watch::Sender::new(false));
        let mut load = Self { stop, resting, workers: JoinSet::new() };
        for index in 0..workers + workers.div_ceil(2) {
            let worker = Worker {
                service: Arc::clone(service),
                ledger: Arc::clone(ledger),
                chance: chance.fork(),
                stop: load.stop.clone(),
                resting: load.resting.subscribe(),
            };
            if index < workers {
                load.workers.spawn(write(worker));
            } else {
                load.workers.spawn(read(worker, workers));
            }
        }
        load
    }

    /// Begins no request while it rests: what is under way goes on.
    pub(crate) fn rest(&self, resting: bool) {
        self.resting.send_replace(resting);
    }

    /// A worker that has found something wrong ends the test here.
    pub(crate) fn look(&mut self) {
        if let Some(ended) = self.workers.try_join_next() {
            ended.expect("no worker found anything wrong");
            panic!("no worker ends by itself");
        }
    }

    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while let Some(ended) = self.workers.join_next().await {
            ended.expect("no worker found anything wrong");
        }
    }
}

async fn write(mut worker: Worker) {
    let mut book = worker.ledger.open();
    let mut exchange = 0;
    while worker.goes_on(3..20).await {
        if book.known().messages >= SESSION {
            (book, exchange) = (worker.ledger.open(), 0);
        }
        let of = [1, 2, 2, 2, 4, 4, 6][worker.chance.below(7)];
        let request = Request::exchange(&book, exchange, of);
        let mut is_repeated = false;
        loop {
            let replica = worker.chance.below(worker.service.replicas.len());
            // Nothing is sent to one that is down.
            if worker.service.replicas[replica].url().is_some() {
                book.sends(exchange, of);
                if let Some(answer) = worker.service.once(replica, &request).await {
                    acknowledge(&book, exchange, of, &answer);
                    break;
                }
                worker.service.unknown.fetch_add(usize::from(!is_repeated), Ordering::Relaxed);
                is_repeated = true;
                // Half of those whose outcome is unknown are left at that: whoever checks repeats them later.
                if worker.chance.percent(50) {
                    break;
                }
            }
            if !worker.goes_on(5..50).await {
                return;
            }
        }
        exchange += 1;
    }
}

async fn read(mut worker: Worker, recent: usize) {
    while worker.goes_on(3..30).await {
        let all = worker.ledger.from(0);
        let Some(book) = all.get(all.len().saturating_sub(recent) + worker.chance.below(recent)) else {
            continue;
        };
        let mode = ["inline", "inline", "background", "off"][worker.chance.below(4)];
        let path = format!("/sessions/{}/context", book.id());
        let known = book.known().clone();
        let replica = worker.chance.below(worker.service.replicas.len());
        if let Some(context) = worker.service.once(replica, &Request::post(path, json!({"mode": mode}))).await
        {
            check_context(&context, book, &known);
            worker.service.contexts.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Everything that was acknowledged before the context was asked for is in it, once, in order and whole: named by the
/// summary, or verbatim.
pub(crate) fn check_context(context: &Value, book: &Book, known: &Known) {
    let coverage = &context["coverage"];
    let number = |field: &str| usize::try_from(coverage[field].as_u64().expect("a number")).expect("small");
    let (last_seq, through) = (number("last_seq"), number("summary_through"));
    assert_eq!(coverage["omitted"], json!([]), "{context}");
    assert_eq!(number("verbatim_from"), through + 1, "a hole: {context}");

    let messages = context["messages"].as_array().expect("a list");
    let (system, verbatim): (Vec<&Value>, Vec<&Value>) =
        messages.iter().partition(|message| message["role"] == "system");
    let summary = system.first().and_then(|message| message["content"].as_str()).unwrap_or_default();
    let covered = Covered::read(summary);
    assert_eq!(covered.len(), through, "the summary and its cursor don't belong together: {context}");
    assert_eq!(through + verbatim.len(), last_seq, "{context}");

    let (from, in_summary) = covered.named();
    let mut names = in_summary.to_vec();
    for message in verbatim {
        let name = Name::of_message(message);
        assert_eq!(*message, name.message(), "not as it was given");
        names.push(name);
    }
    assert!(names.iter().all(|name| name.session == book.number), "another session's: {context}");
    // What was compressed may end in the middle of an exchange: at the safe cut point within it.
    let begin = names.iter().position(|name| name.place == 1).unwrap_or(names.len());
    assert!(are_whole(&names[begin..]), "half an exchange: {context}");
    let mut exchanges: Vec<usize> = names[begin..].iter().map(|name| name.exchange).collect();
    exchanges.dedup();
    exchanges.sort_unstable();
    assert!(exchanges.windows(2).all(|pair| pair[0] != pair[1]), "one of them twice: {context}");
    for (exchange, (of, first_seq)) in &known.acknowledged {
        assert!(first_seq + of - 1 <= last_seq, "exchange {exchange} was acknowledged: {context}");
        if *first_seq > from {
            let there = &names[first_seq - 1 - from..][..*of];
            assert_eq!(there, book.names(*exchange, *of), "not where it was acknowledged");
        }
    }
}
