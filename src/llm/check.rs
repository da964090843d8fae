//! `precis llm check`: every model asked once, so that wrong settings are found before a session needs a summary.

use super::error::TimeoutPhase;
use super::model::ModelSpec;
use super::prompt::{PromptTemplates, Prompts};
use super::provider::{Completion, Request};
use super::{ModelError, Task, reasoning, response_check};
use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;
use futures_util::future::join_all;
use std::fmt;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// What became of the models, and of the pools that they make.
#[derive(Debug)]
pub struct Report {
    models: Vec<Checked>,
    pools: Vec<(String, Vec<String>)>,
}

/// One model.
#[derive(Debug)]
struct Checked {
    name: String,
    has_key: bool,
    answer: Result<Completion, ModelError>,
    duration: Duration,
}

/// Asks all of them at once, each without regard to queue, breaker and retries. `pools` are names with the names of
/// their models.
pub async fn check(models: &[ModelSpec], pools: Vec<(String, Vec<String>)>) -> Report {
    // Before the first of them is timed: the first prompts of a process load the tokenizer.
    let prompts = prompts();
    let checked = models.iter().map(|spec| async {
        let began = Instant::now();
        let answer = match &prompts {
            Ok(prompts) => ask(spec, prompts).await,
            Err(cause) => Err(cause.clone()),
        };
        let has_key = spec.provider.has_key();
        Checked { name: spec.name.clone(), has_key, answer, duration: began.elapsed() }
    });
    Report { models: join_all(checked).await, pools }
}

fn prompts() -> Result<Prompts, ModelError> {
    let templates = PromptTemplates {
        consolidate_system: "Answer with one short sentence and nothing else.".to_owned(),
        consolidate_user: "What is this conversation about? {conversation}".to_owned(),
        ..PromptTemplates::default()
    };
    Prompts::new(&templates).map_err(|_| ModelError::Protocol("no prompt".to_owned()))
}

async fn ask(spec: &ModelSpec, prompts: &Prompts) -> Result<Completion, ModelError> {
    let text = "I fly to Rome on 3 May, with two bags.".to_owned();
    let entries = [TranscriptEntry { role: Role::User, name: None, text, calls: Vec::new() }];
    let task = Task::Consolidate { entries: &entries, sentences: 1 };
    let request = Request {
        model: &spec.model,
        task,
        prompts,
        output_limit: spec.output_limit,
        first_token_timeout: spec.first_token_timeout,
        idle_timeout: spec.idle_timeout,
    };
    let answer = timeout(spec.timeout, spec.provider.complete(&request)).await;
    let answer = answer.unwrap_or(Err(ModelError::Timeout(TimeoutPhase::Total, spec.timeout)))?;
    response_check::check_response(reasoning::strip_reasoning(&answer.text), answer.finish, &task)
        .map_err(ModelError::Rejected)?;
    Ok(answer)
}

impl Report {
    /// Whether each pool has a model that works.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.pools.iter().all(|(_, models)| models.iter().any(|model| self.works(model)))
    }

    fn works(&self, model: &str) -> bool {
        self.models.iter().any(|checked| checked.name == model && checked.answer.is_ok())
    }
}

const COLUMNS: [&str; 8] =
    ["MODEL", "REACHABLE", "KEY", "STREAMING", "USAGE", "FIRST TOKEN", "TOTAL", "RESULT"];

impl fmt::Display for Report {
    /// A table of the models, and a line for each pool.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<[String; COLUMNS.len()]> =
            [COLUMNS.map(str::to_owned)].into_iter().chain(self.models.iter().map(Checked::row)).collect();
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
            let working: Vec<&str> =
                models.iter().map(String::as_str).filter(|model| self.works(model)).collect();
            match working.as_slice() {
                [] => writeln!(f, "pool {name}: no working model")?,
                models => writeln!(f, "pool {name}: {} can answer", models.join(", "))?,
            }
        }
        Ok(())
    }
}

impl Checked {
    fn row(&self) -> [String; COLUMNS.len()] {
        let time = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        let unknown = "-";
        let (reachable, key, streaming, usage, result) = match &self.answer {
            Ok(answer) => {
                let (streaming, usage) = (answer.first_token.is_some(), answer.usage.total().is_some());
                (
                    "yes",
                    if self.has_key { "accepted" } else { "none" },
                    yes(streaming),
                    yes(usage),
                    "works".to_owned(),
                )
            }
            Err(cause) => {
                let (reachable, key) = match cause {
                    ModelError::Connection(_) => ("no", unknown),
                    ModelError::SecretUnavailable(_) => (unknown, "missing"),
                    ModelError::Timeout(..) => ("silent", unknown),
                    ModelError::Status { status: 401 | 403, .. } => ("yes", "refused"),
                    _ => ("yes", unknown),
                };
                let hint = hint(cause).map(|hint| format!(" ({hint})")).unwrap_or_default();
                (reachable, key, unknown, unknown, format!("{cause}{hint}"))
            }
        };
        let first_token = self.answer.as_ref().ok().and_then(|answer| answer.first_token);
        let cells = [reachable, key, streaming, usage];
        let [reachable, key, streaming, usage] = cells.map(str::to_owned);
        let first_token = first_token.map_or(unknown.to_owned(), time);
        [self.name.clone(), reachable, key, streaming, usage, first_token, time(self.duration), result]
    }
}

/// The setting that helps against a server that is not quite compatible.
fn hint(cause: &ModelError) -> Option<&'static str> {
    let ModelError::Status { status: 400 | 404 | 422, message, .. } = cause else {
        return None;
    };
    let says = |word: &str| message.contains(word);
    if says("stream_options") {
        Some("try stream_options = false for its provider")
    } else if says("max_completion_tokens") && !says("max_tokens") {
        Some("try output_limit_field = \"max_tokens\" for its provider")
    } else if says("max_completion_tokens") {
        Some("try the other output_limit_field for its provider")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_differs_gets_a_hint() {
        for (message, setting) in [
            ("Unrecognized request argument supplied: stream_options", Some("stream_options = false")),
            ("extra_forbidden: max_completion_tokens", Some("\"max_tokens\"")),
            (
                "'max_tokens' is not supported; use 'max_completion_tokens'",
                Some("the other output_limit_field"),
            ),
            ("no such model", None),
        ] {
            let cause = ModelError::Status { status: 400, message: message.to_owned(), retry_after: None };
            let hint = hint(&cause).unwrap_or_default();
            assert!(
                hint.contains(setting.unwrap_or_default()) && setting.is_none() == hint.is_empty(),
                "{hint}"
            );
        }
    }
}
