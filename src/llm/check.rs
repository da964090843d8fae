//! `precis llm check`: calls every model once, so that wrong settings are found before a session needs a summary.

use super::error::TimeoutPhase;
use super::model::ModelSpec;
use super::prompt::Prompts;
use super::provider::{Completion, Request};
use super::{CallMemory, ModelError, Task, reasoning, response_check};
use crate::config;
use crate::domain::consolidation::SummaryLimit;
use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;
use futures_util::future::join_all;
use std::fmt;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The results of all models, and the members of all pools. Displayed as a table.
#[derive(Debug)]
pub struct CheckReport {
    models: Vec<CheckedModel>,
    /// Names of pools with the names of their models.
    pools: Vec<(String, Vec<String>)>,
}

#[derive(Debug)]
struct CheckedModel {
    name: String,
    has_key: bool,
    endpoint: Option<String>,
    result: Result<Completion, ModelError>,
    duration: Duration,
}

/// Calls all models at the same time, without queue, circuit breaker and retries. `pools` contains the names of pools
/// with the names of their models.
pub async fn check_models(models: &[ModelSpec], pools: Vec<(String, Vec<String>)>) -> CheckReport {
    // Rendered before any call is timed, because the first use loads the tokenizer.
    let prompts = check_prompts();
    let checks = models.iter().map(|spec| async {
        let started_at = Instant::now();
        let result = match &prompts {
            Ok(prompts) => call(spec, prompts).await,
            Err(error) => Err(error.clone()),
        };
        let (has_key, endpoint) = (spec.provider.has_key(), spec.provider.endpoint());
        CheckedModel { name: spec.name.clone(), has_key, endpoint, result, duration: started_at.elapsed() }
    });
    CheckReport { models: join_all(checks).await, pools }
}

fn check_prompts() -> Result<Prompts, ModelError> {
    let prompts = config::Prompts {
        consolidate_system: Some("Answer with one short sentence and nothing else.".to_owned()),
        consolidate_user: Some("What is this conversation about? {conversation}".to_owned()),
        ..config::Prompts::default()
    };
    Prompts::new(&prompts).map_err(|_| ModelError::Protocol("the prompts of the check are invalid"))
}

async fn call(spec: &ModelSpec, prompts: &Prompts) -> Result<Completion, ModelError> {
    let settings = &spec.settings;
    let text = "I fly to Rome on 3 May, with two bags.".to_owned();
    let entries = [TranscriptEntry { role: Role::User, name: None, text, calls: Vec::new() }.into()];
    let task =
        Task::Consolidate { lines: &entries, previous: "", sentences: 1, limit: SummaryLimit::Words(100) };
    let request = Request { model: settings, task, prompts, memory: &CallMemory::default() };
    let result = timeout(settings.timeout, spec.provider.complete(&request)).await;
    let completion = result.unwrap_or(Err(ModelError::Timeout(TimeoutPhase::Total, settings.timeout)))?;
    let text = reasoning::strip_reasoning(&completion.text);
    // The answer to a single short message may be longer than the message.
    let any_length =
        Task::Consolidate { lines: &[], previous: "", sentences: 1, limit: SummaryLimit::Words(100) };
    response_check::check_response(text, completion.finish_reason, &any_length)
        .map_err(ModelError::Rejected)?;
    Ok(completion)
}

impl CheckReport {
    /// Returns `true` if each pool has models and all of them work. A model that fails would otherwise be noticed only when
    /// the others of its pool fail, too.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.pools
            .iter()
            .all(|(_, models)| !models.is_empty() && models.iter().all(|model| self.works(model)))
    }

    /// Returns each model of the pools once, with its problem if it does not work.
    pub fn results(&self) -> impl Iterator<Item = (&str, Result<(), String>)> {
        let is_used =
            |name: &str| self.pools.iter().any(|(_, models)| models.iter().any(|model| model == name));
        let used = self.models.iter().filter(move |checked| is_used(&checked.name));
        used.map(|checked| (checked.name.as_str(), checked.problem().map_or(Ok(()), Err)))
    }

    fn works(&self, model: &str) -> bool {
        self.models.iter().any(|checked| checked.name == model && checked.result.is_ok())
    }
}

const COLUMNS: [&str; 8] =
    ["MODEL", "REACHABLE", "KEY", "STREAMING", "USAGE", "FIRST TOKEN", "TOTAL", "RESULT"];

impl fmt::Display for CheckReport {
    /// Writes a table of the models, and a line for each pool.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<[String; COLUMNS.len()]> = [COLUMNS.map(str::to_owned)]
            .into_iter()
            .chain(self.models.iter().map(CheckedModel::row))
            .collect();
        let width = |column: usize| {
            rows.iter().filter_map(move |row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..COLUMNS.len()).map(|column| width(column).unwrap_or_default()).collect();
        for row in &rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        writeln!(f)?;
        for (name, models) in &self.pools {
            let (working, failing): (Vec<&str>, Vec<&str>) =
                models.iter().map(String::as_str).partition(|model| self.works(model));
            match (working.as_slice(), failing.as_slice()) {
                ([], _) => writeln!(f, "pool {name}: no working model")?,
                (_, []) => writeln!(f, "pool {name}: {} can answer", working.join(", "))?,
                _ => {
                    let (working, failing) = (working.join(", "), failing.join(", "));
                    writeln!(f, "pool {name}: {working} can answer, {failing} can't")?;
                }
            }
        }
        Ok(())
    }
}

impl CheckedModel {
    /// Returns the error with the URL of the call.
    fn problem(&self) -> Option<String> {
        let error = self.result.as_ref().err()?;
        let endpoint = self.endpoint.as_ref().filter(|_| error.was_sent());
        let endpoint = endpoint.map(|endpoint| format!(" (POST {endpoint})")).unwrap_or_default();
        Some(format!("{error}{endpoint}"))
    }

    fn row(&self) -> [String; COLUMNS.len()] {
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        let yes_or_no = |yes: bool| if yes { "yes" } else { "no" };
        let unknown = "-";
        let (reachable, key, streaming, usage, result) = match &self.result {
            Ok(completion) => (
                "yes",
                if self.has_key { "accepted" } else { "none" },
                yes_or_no(completion.first_token.is_some()),
                yes_or_no(completion.usage.total().is_some()),
                "works".to_owned(),
            ),
            Err(error) => {
                let (reachable, key) = match error {
                    ModelError::Connection(_) => ("no", unknown),
                    ModelError::SecretUnavailable(_) => (unknown, "missing"),
                    ModelError::Timeout(..) => ("silent", unknown),
                    ModelError::Status { status: 401 | 403, .. } => ("yes", "refused"),
                    _ => ("yes", unknown),
                };
                (reachable, key, unknown, unknown, self.problem().unwrap_or_default())
            }
        };
        let first_token = self.result.as_ref().ok().and_then(|completion| completion.first_token);
        [
            self.name.clone(),
            reachable.to_owned(),
            key.to_owned(),
            streaming.to_owned(),
            usage.to_owned(),
            first_token.map_or(unknown.to_owned(), seconds),
            seconds(self.duration),
            result,
        ]
    }
}
