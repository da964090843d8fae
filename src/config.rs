//! Every setting of precis: its name, type and unit.
//!
//! The structs below are the whole truth: [`Settings::load`] fills them from file, environment and flags (`load`),
//! knows from them which keys there are (`keys`), and refuses what does not fit together (`validate`). A new setting
//! is a field here, a value in `defaults`, a line in `precis.example.toml`, and a rule in `validate` where not every
//! value will do.

use crate::domain::search::analyzer::{Analyzer, Language};
use crate::domain::tokens::Tokenizer;
use parse::{duration, optional_duration, optional_word, tokenizer, word};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::time::Duration;

mod database_url;
mod defaults;
mod keys;
mod load;
mod parse;
mod provider;
mod secret;
mod server;
mod sources;
#[cfg(test)]
mod tests;
mod validate;

pub use database_url::DatabaseUrl;
pub use load::{ConfigErrors, Loaded, Problem};
pub use secret::{Secret, SecretSource};
pub use server::{Limits, Server};
pub use sources::{Flag, Sources};

/// The name of the provider, and of the model, that are always there.
pub const EXTRACTIVE: &str = "extractive";

/// All settings. What [`Settings::load`] returns is valid: references lead somewhere, limits and durations are
/// greater than 0.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The HTTP server.
    pub server: Server,
    /// What a client may send, and how often.
    pub limits: Limits,
    /// The store.
    pub database: Database,
    /// When and how the older part of a session is summarised.
    pub consolidation: Consolidation,
    /// The memory documents.
    pub memory: Memory,
    /// What counts tokens.
    pub tokens: Tokens,
    /// Finding messages.
    pub search: Search,
    /// The models that write summaries.
    pub llm: Llm,
    /// What precis says about itself.
    pub log: Log,
}

/// `[database]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Database {
    /// `sqlite:` or `postgres:`; the scheme selects the store.
    pub url: DatabaseUrl,
    /// Most connections open at a time.
    pub max_connections: u32,
    /// How long a request waits for a connection.
    #[serde(with = "duration")]
    pub acquire_timeout: Duration,
    /// What a statement may take on Postgres, locks and network included.
    #[serde(with = "duration")]
    pub statement_timeout: Duration,
}

/// `[consolidation]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Consolidation {
    /// Messages in the tail above which the older part is summarised.
    pub threshold: usize,
    /// Messages that stay verbatim; fewer than `threshold`.
    pub keep_recent: usize,
    /// Tokens in the tail above which the older part is summarised, whatever the number of messages.
    pub max_tail_tokens: Option<u64>,
    /// Tokens of prompts and answers that a tenant may use up in a UTC day; `None`: no limit.
    pub daily_token_limit: Option<u64>,
    /// As written; [`Settings::consolidation_pool`] is what is in force.
    pub pool: String,
    /// As written; [`Settings::meta_pool`] is what is in force.
    pub meta_pool: String,
    /// When to consolidate, unless the request says.
    #[serde(deserialize_with = "word")]
    pub mode: Mode,
    /// What a context holds while models fail.
    #[serde(deserialize_with = "word")]
    pub on_failure: OnFailure,
    /// Words above which a summary is compressed.
    pub summary_word_limit: usize,
    /// Sentences that a compression asks for.
    pub summary_sentences: usize,
    /// Most messages sent verbatim, whatever happens; more than `threshold`.
    pub max_history_messages: usize,
    /// How long a session waits after its first failure; doubled with each further one.
    #[serde(with = "duration")]
    pub retry_initial: Duration,
    /// The longest such wait.
    #[serde(with = "duration")]
    pub retry_max: Duration,
    /// How long a context request waits for its own consolidation before it answers `in_progress`.
    #[serde(with = "duration")]
    pub inline_wait: Duration,
    /// Prompts in place of the built-in ones.
    pub prompts: Prompts,
}

/// When a consolidation that is due is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Inside the request.
    Inline,
    /// After the answer.
    Background,
    /// Only when asked for.
    Off,
}

/// What a context holds when a due consolidation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The whole tail.
    Verbatim,
    /// Its last `keep_recent` messages.
    Recent,
}

/// `[consolidation.prompts]`: `None` is the built-in prompt.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Prompts {
    /// System prompt of a consolidation.
    pub consolidate_system: Option<String>,
    /// User prompt of a consolidation.
    pub consolidate_user: Option<String>,
    /// System prompt of a meta-consolidation.
    pub meta_system: Option<String>,
    /// User prompt of a meta-consolidation.
    pub meta_user: Option<String>,
}

/// `[memory]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    /// Largest memory document, in bytes.
    pub max_bytes: usize,
}

/// `[tokens]`
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tokens {
    /// The name of an encoding, perhaps with a factor.
    #[serde(with = "tokenizer")]
    pub tokenizer: Tokenizer,
}

/// `[search]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Search {
    /// Whether messages are indexed as they are stored.
    pub enabled: bool,
    /// Whose rules give the stem of a word.
    #[serde(deserialize_with = "word")]
    pub language: Language,
}

/// `[llm]`: providers have models, pools list models.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Llm {
    /// The pool where nothing else is said; empty: none.
    pub default_pool: String,
    /// By name; [`EXTRACTIVE`] is always there.
    pub providers: BTreeMap<String, Provider>,
    /// By name; [`EXTRACTIVE`] is always there.
    pub models: BTreeMap<String, Model>,
    /// By name; where none is written, one named `default` with the model [`EXTRACTIVE`].
    pub pools: BTreeMap<String, Pool>,
}

/// `[llm.providers.<name>]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Provider {
    /// Its dialect.
    #[serde(deserialize_with = "word")]
    pub kind: ProviderKind,
    /// An http(s) URL, perhaps with a query; `None` only where the kind is [`ProviderKind::Extractive`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_url: Option<String>,
    /// Sent with every request, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key: Option<Secret>,
    /// The header that takes the key as it is, in place of the one that the kind has for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_header: Option<String>,
    /// Further headers of every request, by names that are valid, each there once whatever its case.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Secret>,
    /// Further fields of every request's body; none that precis sets itself.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub body: BTreeMap<String, Json>,
    /// What the server calls the limit of an answer; there where the kind is [`ProviderKind::OpenAi`] alone.
    #[serde(deserialize_with = "optional_word", skip_serializing_if = "Option::is_none")]
    pub output_limit_field: Option<OutputLimitField>,
    /// Whether usage is asked for in the stream; there where the kind is [`ProviderKind::OpenAi`] alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<bool>,
}

/// The dialect of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProviderKind {
    /// Any server that speaks chat completions.
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
    /// Built in: no key, no network.
    Extractive,
}

/// What a server of kind openai calls the limit of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputLimitField {
    /// What OpenAI's newer models ask for.
    MaxCompletionTokens,
    /// What older servers know.
    MaxTokens,
}

/// `[llm.models.<name>]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// A name in [`Llm::providers`].
    pub provider: String,
    /// The provider's name for it.
    pub model: String,
    /// Of one attempt, from its beginning to the last piece of the answer; wins over the three below.
    #[serde(with = "duration")]
    pub timeout: Duration,
    /// Of the connection of one attempt.
    #[serde(with = "duration")]
    pub connect_timeout: Duration,
    /// From the request to the first piece of the answer; `None`: only `timeout` counts.
    #[serde(with = "optional_duration")]
    pub first_token_timeout: Option<Duration>,
    /// Between two pieces of an answer.
    #[serde(with = "duration")]
    pub idle_timeout: Duration,
    /// Most tokens of an answer.
    pub output_limit: usize,
    /// Most tokens of a prompt.
    pub input_limit: usize,
    /// Further attempts after a failure that may pass; may be 0.
    pub retries: usize,
    /// The wait before the first of them.
    #[serde(with = "duration")]
    pub retry_initial: Duration,
    /// The longest such wait, the server's `Retry-After` included; not shorter than `retry_initial`.
    #[serde(with = "duration")]
    pub retry_max: Duration,
    /// Calls at a time.
    pub max_concurrent_calls: usize,
    /// Calls that wait for their turn; may be 0.
    pub max_queued_calls: usize,
    /// How long a call waits for its turn.
    #[serde(with = "duration")]
    pub queue_timeout: Duration,
    /// Failures, in percent of the calls, from which on the model is skipped: 1 to 100.
    pub breaker_failure_percent: u32,
    /// Calls below which no percentage is drawn.
    pub breaker_min_calls: usize,
    /// Calls that are longer ago don't count.
    #[serde(with = "duration")]
    pub breaker_window: Duration,
    /// How long the model is skipped before one call probes it.
    #[serde(with = "duration")]
    pub breaker_open_for: Duration,
}

/// `[llm.pools.<name>]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pool {
    /// Names in [`Llm::models`], in the order in which they are tried; at least one, none twice.
    pub models: Vec<String>,
    /// Which of them is tried first.
    #[serde(deserialize_with = "word")]
    pub strategy: Strategy,
    /// Of all attempts together.
    #[serde(with = "duration")]
    pub deadline: Duration,
}

/// Which model of a pool is tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Always the first.
    Fallback,
    /// Each in its turn; after it those that follow, and then those before it.
    RoundRobin,
}

/// `[log]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// How a line looks.
    #[serde(deserialize_with = "word")]
    pub format: LogFormat,
    /// Directives of `tracing_subscriber::EnvFilter`.
    pub filter: String,
}

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, else JSON.
    Auto,
    /// For people.
    Text,
    /// For machines.
    Json,
}

impl Settings {
    /// The pool that consolidates; `None` where consolidation is disabled.
    #[must_use]
    pub fn consolidation_pool(&self) -> Option<&str> {
        [&self.consolidation.pool, &self.llm.default_pool]
            .into_iter()
            .find(|name| !name.is_empty())
            .map(String::as_str)
    }

    /// The pool that compresses summaries.
    #[must_use]
    pub fn meta_pool(&self) -> Option<&str> {
        match self.consolidation.meta_pool.as_str() {
            "" => self.consolidation_pool(),
            name => Some(name),
        }
    }

    /// The rules of search; `None` where it is disabled.
    #[must_use]
    pub fn analyzer(&self) -> Option<Analyzer> {
        self.search.enabled.then(|| Analyzer::new(self.search.language))
    }

    /// Whether no real model writes the summaries; the log says so at start.
    #[must_use]
    pub fn uses_only_extractive(&self) -> bool {
        self.consolidation_pool().is_some_and(|pool| {
            self.providers_of(pool).all(|(_, provider)| provider.kind == ProviderKind::Extractive)
        })
    }

    /// The providers that a pool leads to, with their names; a provider of two models comes twice.
    fn providers_of(&self, pool: &str) -> impl Iterator<Item = (&str, &Provider)> {
        let models = self.llm.pools.get(pool).into_iter().flat_map(|pool| &pool.models);
        models
            .filter_map(|name| self.llm.models.get(name))
            .filter_map(|model| self.llm.providers.get_key_value(&model.provider))
            .map(|(name, provider)| (name.as_str(), provider))
    }
}
