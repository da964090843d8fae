//! Replays a conversation against a running service, turn by turn like an agent, and shows how tail, summary and tokens
//! change:
//!
//! ```text
//! cargo run --release                                        # in one terminal
//! cargo run --release --example replay -- conversation.json  # in another
//! ```
//!
//! If the service requires an API key, set `PRECIS_API_KEY` to a key with the scope `write`. There is no argument for it,
//! because arguments are visible in the process list.
//!
//! An agent needs only [`Client::append_exchange`] and [`Client::build_context`]. The remaining code reads files, checks
//! the guarantees of the service (no gap, no duplicate, unchanged messages) and prints a report.
//!
//! A conversation is a JSON file of `LoCoMo` (`speaker_a`, `speaker_b`, `session_1`, `session_2` …) or JSON lines with one
//! message of the chat format each: `{"role": "user", "content": "…"}`.

#![expect(clippy::print_stdout, reason = "prints its result")]

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

const NOT_PRECIS: &str = "the server at this URL is not precis";
const ERASED: &str = "the session was erased during the replay";

#[path = "replay/conversation.rs"]
mod conversation;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Replays a conversation against a running precis
///
/// If the service requires an API key, set `PRECIS_API_KEY` to a key with the scope `write`.
#[derive(Parser)]
struct Args {
    /// The conversation: a JSON file of `LoCoMo`, or JSON lines of {"role", "content"}
    file: PathBuf,
    /// The base URL of the service
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: Url,
    /// The id of the new session. Default: derived from the file name
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

/// Returns `false` if a response violated a guarantee.
async fn replay(args: &Args) -> Result<bool> {
    let exchanges = conversation::read(&args.file)?;
    let session = args.session.clone().unwrap_or_else(|| new_session(&args.file));
    let client = Client::new(&args.url, &session);
    if client.state().await?.is_some() {
        return Err(format!("the session {session:?} exists already: choose a new one with --session").into());
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
        let started_at = Instant::now();
        let appended = client.append_exchange(&exchange).await?;
        report.append_times.push(started_at.elapsed());
        bar.inc(exchange.len() as u64);
        history.extend(exchange);

        let started_at = Instant::now();
        let context = client.build_context().await?;
        let elapsed = started_at.elapsed();
        let violation = context.find_violation(appended.last_seq, &history);
        let mut meta_consolidations = 0;
        for revision in report.new_revisions(&context) {
            meta_consolidations += usize::from(client.revision(revision).await?.meta.is_some());
        }
        if let Some(row) = report.add(&context, meta_consolidations, violation.as_deref(), elapsed) {
            bar.suspend(|| println!("{row}"));
        }
    }
    bar.finish_and_clear();
    let state = client.state().await?.ok_or(ERASED)?;
    report.print_totals(total, state.tokens.history);
    Ok(report.violations == 0)
}

/// A client for one session.
struct Client {
    http: reqwest::Client,
    base: Url,
    key: Option<String>,
    session: String,
}

impl Client {
    fn new(base: &Url, session: &str) -> Self {
        // precis uses reqwest without a TLS provider, so each program has to choose one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = std::env::var("PRECIS_API_KEY").ok().filter(|key| !key.is_empty());
        Self { http: reqwest::Client::new(), base: base.clone(), key, session: session.to_owned() }
    }

    /// Appends an exchange. It is durable when this function returns.
    async fn append_exchange(&self, messages: &[Value]) -> Result<PersistedExchange> {
        let body = json!({ "messages": messages });
        Ok(self.call(Method::POST, &["exchanges"], Some(body)).await?.ok_or(NOT_PRECIS)?)
    }

    /// Returns the messages for the model. An agent adds its `system_prompt` and the new `user_message` to the body.
    async fn build_context(&self) -> Result<Context> {
        Ok(self.call(Method::POST, &["context"], Some(json!({}))).await?.ok_or(NOT_PRECIS)?)
    }

    /// Returns the provenance of a summary.
    async fn revision(&self, revision: u64) -> Result<Revision> {
        Ok(self.call(Method::GET, &["revisions", &revision.to_string()], None).await?.ok_or(ERASED)?)
    }

    /// Returns the state of the session; `None` if it does not exist.
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
        // A session id may contain any character, so it is encoded as one path segment.
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
            error => format!("no response from the service: {error}"),
        })?;
        let status = response.status();
        let text = response.text().await?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !status.is_success() {
            // The detail of every problem document of precis states the fix.
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
    /// Checks that summary, omitted ranges and verbatim part cover 1 … `last_seq` exactly once, and that the verbatim
    /// messages are unchanged. Returns a description of the first violation.
    fn find_violation(&self, last_seq: usize, history: &[Value]) -> Option<String> {
        let Coverage { summary_through, verbatim_from, omitted, .. } = &self.coverage;
        if self.coverage.last_seq != last_seq {
            return Some(format!("last_seq is {} instead of {last_seq}", self.coverage.last_seq));
        }
        let mut next = summary_through + 1;
        for range in omitted {
            if range.from_seq != next || range.to_seq < next {
                return Some(format!(
                    "message {next} is missing before the omitted range {}-{}",
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
            .then(|| "the verbatim messages differ from the appended ones".to_owned())
    }
}

#[derive(Default)]
struct Report {
    append_times: Vec<Duration>,
    context_times: Vec<Duration>,
    tails: Vec<usize>,
    consolidations: usize,
    meta_consolidations: usize,
    violations: usize,
    summary_through: usize,
    revision: u64,
    outcome: String,
    tokens: u64,
}

const HEADING: &str =
    "  after  outcome       summarised         tail  summary words  tokens  meta         time";

impl Report {
    /// Returns the revisions that were created since the last context.
    fn new_revisions(&self, context: &Context) -> RangeInclusive<u64> {
        self.revision + 1..=context.summary.revision
    }

    /// Adds a context to the report. Returns a table row if there is a new revision, another outcome or a violation.
    fn add(
        &mut self,
        context: &Context,
        meta_consolidations: usize,
        violation: Option<&str>,
        elapsed: Duration,
    ) -> Option<String> {
        let Coverage { last_seq, summary_through, .. } = context.coverage;
        let outcome = &context.consolidation.outcome;
        let new = self.new_revisions(context).count();
        // Only the first of several equal outcomes gets a row.
        let is_other_outcome = outcome != "not_due" && *outcome != self.outcome;
        let row = (new > 0 || is_other_outcome || violation.is_some()).then(|| {
            let summarised = summary_through.saturating_sub(self.summary_through);
            let (before, after) = (last_seq - self.summary_through, last_seq.saturating_sub(summary_through));
            let (words, tokens) = (context.summary.words, context.tokens.total);
            let (tail, meta) = (format!("{before} → {after}"), if meta_consolidations > 0 { "yes" } else { "" });
            let violation = violation.map(|violation| format!("\n         BROKEN: {violation}")).unwrap_or_default();
            let time = millis(elapsed);
            format!("{last_seq:>7}  {outcome:<12}  {summarised:>10}  {tail:>11}  {words:>13}  {tokens:>6}  {meta:>4}  {time:>11}{violation}")
        });
        self.context_times.push(elapsed);
        self.tails.push(last_seq.saturating_sub(summary_through));
        self.consolidations += new;
        self.meta_consolidations += meta_consolidations;
        self.violations += usize::from(violation.is_some());
        self.summary_through = summary_through;
        self.revision = context.summary.revision;
        self.outcome.clone_from(outcome);
        self.tokens = context.tokens.total;
        row
    }

    fn print_totals(&self, messages: usize, history_tokens: u64) {
        let (contexts, sum) = (self.tails.len(), self.tails.iter().sum::<usize>());
        let (longest, mean) = (self.tails.iter().max().copied().unwrap_or(0), sum / contexts.max(1));
        let times = |times: &[Duration]| {
            format!("p50 {}, p99 {}", millis(percentile(times, 50)), millis(percentile(times, 99)))
        };
        println!();
        println!("messages              {messages}");
        println!(
            "consolidations        {}, {} of them with a meta-consolidation",
            self.consolidations, self.meta_consolidations
        );
        println!("tail                  {mean} messages on average, {longest} at most");
        println!("tokens at the end     {} in the context, {history_tokens} in the history", self.tokens);
        println!("time of an exchange   {}", times(&self.append_times));
        println!("time of a context     {}", times(&self.context_times));
        match self.violations {
            0 => println!("coverage              no gap and no duplicate in {contexts} contexts"),
            violations => println!("coverage              BROKEN in {violations} of {contexts} contexts"),
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

/// The bar is visible only if standard error is a terminal.
fn progress_bar(messages: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} messages, {per_sec}, {eta} left")?;
    Ok(ProgressBar::new(messages as u64).with_style(style))
}

/// Returns a session id from the file name and a unique suffix, so that a replay can be repeated.
fn new_session(file: &Path) -> String {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    format!("replay-{name}-{}", uuid::Uuid::now_v7())
}
