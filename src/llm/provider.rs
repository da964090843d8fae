//! One call of one model: the interface behind which the providers differ.
//!
//! A provider knows how to ask and how to read an answer. It knows nothing of other models, of retries or of what
//! makes an answer good: [`super::model`], [`super::pool`] and [`super::response_check`] do. A new provider is a file with one
//! of these in it; one that speaks HTTP is a [`super::http::WireFormat`].

use super::prompt::Prompts;
use super::{ModelError, Task, Usage, extractive};
use async_trait::async_trait;
use std::fmt;
use std::time::Duration;

/// What one call needs.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The provider's name for the model.
    pub model: &'a str,
    /// What is to be done.
    pub task: Task<'a>,
    /// How to put it into words, for a provider that needs words.
    pub prompts: &'a Prompts,
    /// The most tokens that the answer may have.
    pub output_limit: u32,
    /// How long the first piece of the answer may take. `None`: as long as the caller waits.
    pub first_token_timeout: Option<Duration>,
    /// How long each further piece may take.
    pub idle_timeout: Duration,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model was done; also where the provider says nothing or something we don't know.
    Complete,
    /// At the output limit.
    Length,
    /// By the provider's filter, or by a refusal of the model.
    Filtered,
}

/// A whole answer, not yet judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The text, chunks joined.
    pub text: String,
    /// How it ended.
    pub finish: Finish,
    /// What it cost, as the provider says.
    pub usage: Usage,
    /// What it cost, prompt and answer together: by our own count where the provider doesn't say.
    pub tokens: u64,
    /// From the request to the first piece of the answer; `None` where it did not come in pieces.
    pub first_token: Option<Duration>,
}

/// A way to reach models. Dropping the future ends the call.
#[async_trait]
pub trait Provider: Send + Sync + fmt::Debug {
    /// Asks once, and returns only an answer that came to its end.
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError>;

    /// Whether a key goes with each call.
    fn has_key(&self) -> bool {
        false
    }

    /// What a revision says about the wording behind a summary of this provider.
    fn prompt_version<'a>(&self, prompts: &'a Prompts) -> &'a str {
        prompts.version()
    }
}

/// The built-in summariser as a provider: no key, no network, no prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extractive;

#[async_trait]
impl Provider for Extractive {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError> {
        // The work takes milliseconds and more, too long for a worker of the runtime. The copy that a thread of its
        // own needs is cheap beside it; `block_in_place` would do without, but then no timeout could end the wait.
        let work = match request.task {
            Task::Consolidate { entries, sentences } => {
                let entries = entries.to_vec();
                tokio::task::spawn_blocking(move || extractive::consolidate(&entries, sentences))
            }
            Task::MetaConsolidate { summary, sentences } => {
                let summary = summary.to_owned();
                tokio::task::spawn_blocking(move || extractive::compress(&summary, sentences))
            }
        };
        // The error's text may quote a panic, and that the conversation.
        let text =
            work.await.map_err(|_| ModelError::Protocol("the built-in summariser failed".to_owned()))?;
        let usage = Usage::default();
        Ok(Completion { text, finish: Finish::Complete, usage, tokens: 0, first_token: None })
    }

    /// It has no prompt; what may change is its choice.
    fn prompt_version<'a>(&self, _: &'a Prompts) -> &'a str {
        extractive::VERSION
    }
}
