//! The [`Provider`] trait: one call of one model.
//!
//! A provider sends a request and reads the completion. Retries, fallback and the quality of the completion are the
//! concern of [`super::model`], [`super::pool`] and [`super::response_check`]. A new provider implements [`Provider`];
//! one that uses HTTP only needs a [`super::http::WireFormat`].

use super::prompt::Prompts;
use super::usage::CallTokens;
use super::{CallMemory, ModelError, Rejection, Task, Usage, extractive};
use crate::capacity::{self, Held};
use crate::config;
use async_trait::async_trait;
use std::fmt;
use std::time::Duration;
use tokio::task::spawn_blocking;

/// One request to a model.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The settings of the model. The provider applies the output limit, the first-token timeout and the idle timeout; the
    /// caller applies the rest.
    pub model: &'a config::Model,
    pub task: Task<'a>,
    /// The prompts for the task, if the provider needs any.
    pub prompts: &'a Prompts,
    /// The provider reports what it receives, before it is held.
    pub memory: &'a CallMemory,
}

/// The reason for which the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model has finished. Also used if the provider reports no reason or an unknown one.
    Complete,
    /// The output limit was reached.
    Length,
    /// The provider's content filter or a refusal of the model.
    Filtered,
    /// The model called a tool or paused its turn. precis offers no tools and continues no turn.
    Unfinished,
}

impl FinishReason {
    /// Reads the word of a provider, in the words of any format: gateways pass them on, and servers invent their own. Returns `None` for
    /// no reason, and for an unknown one: then the end of the stream decides if the completion has ended.
    pub fn parse(word: &str) -> Option<Self> {
        let word = word.to_ascii_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| word.contains(part));
        match word.as_str() {
            "stop" | "eos" | "eos_token" | "end_turn" | "stop_sequence" => Some(Self::Complete),
            "incomplete" => Some(Self::Length),
            _ if has(&["length", "max_token", "max_output", "max_completion", "context_window"]) => {
                Some(Self::Length)
            }
            _ if has(&[
                "filter",
                "safety",
                "refus",
                "sensitive",
                "recitation",
                "prohibited",
                "blocklist",
                "spii",
                "moderat",
            ]) =>
            {
                Some(Self::Filtered)
            }
            _ if has(&["tool", "function", "pause_turn"]) => Some(Self::Unfinished),
            _ => None,
        }
    }
}

/// A complete response of a model that the response check has not seen yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    pub text: String,
    pub finish_reason: FinishReason,
    /// Tokens as reported by the provider.
    pub usage: Usage,
    /// Tokens of prompt and completion.
    pub tokens: CallTokens,
    /// Time until the first token; `None` if the response was not streamed.
    pub first_token: Option<Duration>,
}

/// A service that runs models. Dropping the future of a call cancels the call.
#[async_trait]
pub trait Provider: Send + Sync + fmt::Debug {
    /// Sends the request once. Returns only completions that have reached their end.
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError>;

    /// Returns the URL of the calls, without credentials and query; `None` if no server is called.
    fn endpoint(&self) -> Option<String> {
        None
    }

    /// Returns `true` if an API key is sent with each call.
    fn has_key(&self) -> bool {
        false
    }

    /// Returns `true` if the provider reads a prompt.
    fn is_prompted(&self) -> bool {
        true
    }

    /// Returns the prompt version that revisions record for the summaries of this provider.
    fn prompt_version<'a>(&self, prompts: &'a Prompts) -> &'a str {
        prompts.version()
    }
}

/// The built-in summariser as a provider. It needs no key, no network and no prompt. It cannot order search results.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extractive;

#[async_trait]
impl Provider for Extractive {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError> {
        // A summary takes milliseconds of CPU time, which would block a worker thread of the runtime. The copy of the
        // input for the blocking thread is cheap. `block_in_place` would avoid the copy, but no timeout could end it.
        let mut thread = capacity::current().thread().await;
        let permits = thread.as_mut().map(Held::detach);
        let summary = match request.task {
            Task::Consolidate { lines, limit, .. } => {
                let lines = lines.to_vec();
                spawn_blocking(move || {
                    let _permits = permits;
                    extractive::summarize(&lines, limit)
                })
            }
            Task::MetaConsolidate { summary, limit, .. } => {
                let summary = summary.to_owned();
                spawn_blocking(move || {
                    let _permits = permits;
                    extractive::compress(&summary, limit)
                })
            }
            Task::Rerank { .. } => return Err(ModelError::Rejected(Rejection::NotAnOrder)),
        };
        // The JoinError is dropped: the text of a panic may quote the conversation.
        let text = summary.await.map_err(|_| ModelError::Protocol("the built-in summariser failed"))?;
        Ok(Completion {
            text,
            finish_reason: FinishReason::Complete,
            usage: Usage::default(),
            tokens: CallTokens::default(),
            first_token: None,
        })
    }

    fn is_prompted(&self) -> bool {
        false
    }

    /// Returns the version of the algorithm, because there is no prompt.
    fn prompt_version<'a>(&self, _: &'a Prompts) -> &'a str {
        extractive::VERSION
    }
}
