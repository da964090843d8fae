//! Replays a conversation against a running service, turn by turn as an agent would have had it, and shows how tail,
//! summary and tokens moved:
//!
//! ```text
//! cargo run --release                                        # in one terminal
//! cargo run --release --example replay -- conversation.json  # in another
//! ```
//!
//! Where the service asks for an API key, put one of scope write into `PRECIS_API_KEY`: an argument would be seen in the
//! list of processes.
//!
//! The two calls that an agent needs are [`Client::record`] and [`Client::context`]; the rest reads files, checks what
//! the service promises (no hole, no double, every message as it was given), and prints.
//!
//! A conversation is a file of `LoCoMo` (JSON: `speaker_a`, `speaker_b`, `session_1`, `session_2` …) or lines of JSON,
//! each a message of the chat format: `{"role": "user", "content": "…"}`.

#![expect(clippy::print_stdout, reason = "what it prints is its result")]

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::error::Error;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const NOT_PRECIS: &str = "what answers there is not precis";
const GONE: &str = "the session was erased while it was replayed";

#[path = "replay/conversation.rs"]
mod conversation;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Replays a conversation against a running precis
///
/// Where the service asks for an API key, put one of scope write into `PRECIS_API_KEY`.
#[derive(Parser)]
struct Args {
    /// The conversation: JSON of `LoCoMo`, or JSON lines of {"role", "content"}
    file: PathBuf,
    /// Where the service listens
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: Url,
    /// The session to write, which must be new; made from the file's name where this is left out
    #[arg(long)]
    session: Option<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match replay(&Args::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `false`: the service answered, but not as it promises.
async fn replay(args: &Args) -> Result<bool> {
    let exchanges = conversation::read(&args.file)?;
    let session = args.session.clone().unwrap_or_else(|| new_session(&args.file));
    let client = Client::new(&args.url, &session);
    if client.state().await?.is_some() {
        return Err(format!("the session {session:?} exists already: name a new one with --session").into());
    }

    let total = exchanges.iter().map(Vec::len).sum::<usize>();
    println!(
        "{}: {total} messages in {} exchanges, session {session}\n",
        args.file.display(),
        exchanges.len()
    );
    let bar = progress_bar(total)?;
    bar.suspend(|| println!("{HEADING}"));
    let (mut history, mut report) = (Vec::new(), Report::default());
    for exchange in exchanges {
        let began = Instant::now();
        let recorded = client.record(&exchange).await?;
        report.record_times.push(began.elapsed());
        bar.inc(exchange.len() as u64);
        history.extend(exchange);

        let began = Instant::now();
        let context = client.context().await?;
        let elapsed = began.elapsed();
        let flaw = context.flaw(recorded.last_seq, &history);
        let mut metas = 0;
        for revision in report.new_revisions(&context) {
            metas += usize::from(client.revision(revision).await?.meta.is_some());
        }
        if let Some(row) = report.add(&context, metas, flaw.as_deref(), elapsed) {
            bar.suspend(|| println!("{row}"));
        }
    }
    bar.finish_and_clear();
    let state = client.state().await?.ok_or(GONE)?;
    report.print_totals(total, state.tokens.history);
    Ok(report.broken == 0)
}

/// The part of the interface that an agent uses, for one session.
struct Client {
    http: reqwest::Client,
    base: Url,
    key: Option<String>,
    session: String,
}

impl Client {
    fn new(base: &Url, session: &str) -> Self {
        // precis builds reqwest without a choice of TLS provider, so that a program makes its own.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = std::env::var("PRECIS_API_KEY").ok().filter(|key| !key.is_empty());
        Self { http: reqwest::Client::new(), base: base.clone(), key, session: session.to_owned() }
    }

    /// Persists a turn: when this returns, it is durable.
    async fn record(&self, messages: &[Value]) -> Result<PersistedExchange> {
        let body = json!({ "messages": messages });
        Ok(self.call(Method::POST, &["exchanges"], Some(body)).await?.ok_or(NOT_PRECIS)?)
    }

    /// What to send to the model now. An agent puts its `system_prompt` and the new `user_message` into the body.
    async fn context(&self) -> Result<Context> {
        Ok(self.call(Method::POST, &["context"], Some(json!({}))).await?.ok_or(NOT_PRECIS)?)
    }

    /// How the summary came to be what it was then.
    async fn revision(&self, revision: u64) -> Result<Revision> {
        Ok(self.call(Method::GET, &["revisions", &revision.to_string()], None).await?.ok_or(GONE)?)
    }

    /// The state of the session; `None`: there is none of that id.
    async fn state(&self) -> Result<Option<State>> {
        self.call(Method::GET, &[], None).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: Option<Value>,
    ) -> Result<Option<T>> {
        let mut url = self.base.clone();
        // As a segment of its own, an id may hold any character.
        let mut segments =
            url.path_segments_mut().map_err(|()| "--url must be like http://127.0.0.1:8080")?;
        segments.pop_if_empty().extend(["sessions", &self.session]).extend(path);
        drop(segments);
        let mut request = self.http.request(method, url);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await.map_err(|error| match error {
            error if error.is_connect() => {
                format!("no service at {}: start it with `cargo run --release`", self.base)
            }
            error => format!("the service did not answer: {error}"),
        })?;
        let status = response.status();
        let text = response.text().await?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !status.is_success() {
            // Every error of precis says in its detail what to do.
            let problem: Problem = serde_json::from_str(&text).unwrap_or(Problem { detail: text });
            return Err(format!("{status}: {}", problem.detail).into());
        }
        Ok(Some(serde_json::from_str(&text)?))
    }
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}

#[derive(Deserialize)]
struct PersistedExchange {
    last_seq: usize,
}

#[derive(Deserialize)]
struct Context {
    messages: Vec<Value>,
    coverage: Coverage,
    summary: Summary,
    consolidation: Consolidation,
    tokens: Tokens,
}

#[derive(Deserialize)]
struct Coverage {
    last_seq: usize,
    summary_through: usize,
    verbatim_from: usize,
    omitted: Vec<Omitted>,
}

#[derive(Deserialize)]
struct Omitted {
    from_seq: usize,
    to_seq: usize,
}

#[derive(Deserialize)]
struct Summary {
    revision: u64,
    words: u64,
}

#[derive(Deserialize)]
struct Consolidation {
    outcome: String,
}

#[derive(Deserialize)]
struct Revision {
    meta: Option<Value>,
}

#[derive(Deserialize)]
struct Tokens {
    total: u64,
}

#[derive(Deserialize)]
struct State {
    tokens: HistoryTokens,
}

#[derive(Deserialize)]
struct HistoryTokens {
    history: u64,
}

impl Context {
    /// What is wrong with the answer: summary, omitted ranges and verbatim part must cover 1 … `last_seq` exactly
    /// once, and the verbatim part must be the messages as they were given.
    fn flaw(&self, last_seq: usize, history: &[Value]) -> Option<String> {
        let Coverage { summary_through, verbatim_from, omitted, .. } = &self.coverage;
        if self.coverage.last_seq != last_seq {
            return Some(format!("last_seq is {}, {last_seq} was persisted", self.coverage.last_seq));
        }
        let mut next = summary_through + 1;
        for range in omitted {
            if range.from_seq != next || range.to_seq < next {
                return Some(format!(
                    "{next} … is not what {}-{} goes on from",
                    range.from_seq, range.to_seq
                ));
            }
            next = range.to_seq + 1;
        }
        if next != *verbatim_from || next > last_seq + 1 {
            return Some(format!("covered up to {}, verbatim from {verbatim_from} on", next - 1));
        }
        let system = self
            .messages
            .first()
            .is_some_and(|message| message.get("role").is_some_and(|role| role == "system"));
        let verbatim = self.messages.iter().skip(usize::from(system));
        (!verbatim.eq(history.iter().skip(verbatim_from - 1)))
            .then(|| "the verbatim part is not what was persisted".to_owned())
    }
}

/// What the answers have shown so far.
#[derive(Default)]
struct Report {
    record_times: Vec<Duration>,
    context_times: Vec<Duration>,
    tails: Vec<usize>,
    consolidations: usize,
    metas: usize,
    broken: usize,
    summary_through: usize,
    revision: u64,
    outcome: String,
    tokens: u64,
}

const HEADING: &str =
    "  after  outcome       summarised         tail  summary words  tokens  meta         time";

impl Report {
    /// The revisions that the answer shows for the first time.
    fn new_revisions(&self, context: &Context) -> RangeInclusive<u64> {
        self.revision + 1..=context.summary.revision
    }

    /// Takes an answer in; a row of the table where it tells something new.
    fn add(
        &mut self,
        context: &Context,
        metas: usize,
        flaw: Option<&str>,
        elapsed: Duration,
    ) -> Option<String> {
        let Coverage { last_seq, summary_through, .. } = context.coverage;
        let outcome = &context.consolidation.outcome;
        let new = self.new_revisions(context).count();
        // A failure, or work left to another, is worth a row when it begins.
        let turned = outcome != "not_due" && *outcome != self.outcome;
        let row = (new > 0 || turned || flaw.is_some()).then(|| {
            let summarised = summary_through.saturating_sub(self.summary_through);
            let (before, after) = (last_seq - self.summary_through, last_seq.saturating_sub(summary_through));
            let (words, tokens) = (context.summary.words, context.tokens.total);
            let (tail, meta) = (format!("{before} → {after}"), if metas > 0 { "yes" } else { "" });
            let flaw = flaw.map(|flaw| format!("\n         BROKEN: {flaw}")).unwrap_or_default();
            let time = millis(elapsed);
            format!("{last_seq:>7}  {outcome:<12}  {summarised:>10}  {tail:>11}  {words:>13}  {tokens:>6}  {meta:>4}  {time:>11}{flaw}")
        });
        self.context_times.push(elapsed);
        self.tails.push(last_seq.saturating_sub(summary_through));
        self.consolidations += new;
        self.metas += metas;
        self.broken += usize::from(flaw.is_some());
        self.summary_through = summary_through;
        self.revision = context.summary.revision;
        self.outcome.clone_from(outcome);
        self.tokens = context.tokens.total;
        row
    }

    fn print_totals(&self, messages: usize, history_tokens: u64) {
        let (answers, sum) = (self.tails.len(), self.tails.iter().sum::<usize>());
        let (longest, mean) = (self.tails.iter().max().copied().unwrap_or(0), sum / answers.max(1));
        let times = |times: &[Duration]| {
            format!("p50 {}, p99 {}", millis(percentile(times, 50)), millis(percentile(times, 99)))
        };
        println!();
        println!("messages              {messages}");
        println!(
            "consolidations        {}, {} of them with a meta-consolidation",
            self.consolidations, self.metas
        );
        println!("tail                  {mean} messages on average, {longest} at most");
        println!("tokens at the end     {} in the context, {history_tokens} in the history", self.tokens);
        println!("time of an exchange   {}", times(&self.record_times));
        println!("time of a context     {}", times(&self.context_times));
        match self.broken {
            0 => println!("coverage              without a hole or a double in all {answers} answers"),
            broken => println!("coverage              BROKEN in {broken} of {answers} answers"),
        }
    }
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    let rank = (times.len() * percent).div_ceil(100).saturating_sub(1);
    times.get(rank).copied().unwrap_or_default()
}

/// Visible where standard error is a terminal, silent otherwise.
fn progress_bar(messages: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} messages, {per_sec}, {eta} left")?;
    Ok(ProgressBar::new(messages as u64).with_style(style))
}

/// The file's name, and a part that makes a second replay another session.
fn new_session(file: &Path) -> String {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    format!("replay-{name}-{}", uuid::Uuid::now_v7())
}
