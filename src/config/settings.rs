//! All settings with their names, types and defaults.
//!
//! `precis.example.toml` explains each setting to its user. A test compares the defaults there with the ones here.

use super::secret::{DatabaseUrl, Secret};
use crate::domain::consolidation::Mode;
use crate::domain::id::UserId;
use crate::domain::recall::{RecallOptions, RecallScope};
use crate::domain::retention::RetentionPeriod;
use crate::domain::search::analyzer::{Analyzer, Language};
use crate::domain::tokens::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// The name of the built-in provider and of the built-in model; both always exist.
pub const EXTRACTIVE: &str = "extractive";

/// Defines a section of the settings: a struct whose fields have defaults.
macro_rules! section {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty = $default:expr,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Deserialize, Serialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }
    };
}

/// All settings. [`Settings::load`] returns valid ones: all references exist, limits and durations are positive.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub server: Server,
    pub limits: Limits,
    pub database: Database,
    pub consolidation: Consolidation,
    pub recall: Recall,
    pub sessions: Sessions,
    pub retention: Retention,
    pub memory: Memory,
    pub tokens: Tokens,
    pub search: Search,
    pub llm: Llm,
    pub proxy: Proxy,
    pub log: Log,
}

section! {
    Server {
        #[serde(deserialize_with = "address")]
        bind: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
        /// Allows `bind` to be reachable from other machines although there is no API key. The service checks this
        /// at start, because the keys are in the database.
        allow_unauthenticated: bool = false,
        #[serde(with = "duration")]
        shutdown_grace: Duration = Duration::from_secs(20),
        /// Applies to the head of a request, then to its body, and to idle connections.
        #[serde(with = "duration")]
        read_timeout: Duration = Duration::from_mins(1),
        /// Closes the connection of a client that reads nothing of its response for this long.
        #[serde(with = "duration")]
        write_timeout: Duration = Duration::from_secs(30),
        /// Open connections. A new one beyond the limit replaces the oldest one.
        max_connections: usize = 4096,
        /// Longer than `read_timeout` and [`Consolidation::inline_wait`].
        #[serde(with = "duration")]
        request_timeout: Duration = Duration::from_mins(3),
        cors_origins: Vec<String> = Vec::new(),
        /// Host names that are accepted in addition to addresses and `localhost` if there is no API key.
        allowed_hosts: Vec<String> = Vec::new(),
    }
}

section! {
    /// Limits for clients. The error response names the limit and its value.
    Limits {
        max_body_bytes: usize = 32 * 1024 * 1024,
        /// Does not apply to `precis import`.
        max_import_bytes: u64 = 4 * 1024 * 1024 * 1024,
        /// Total of all requests and responses in flight, except small ones; at least four times `max_body_bytes`. Half of it
        /// is for bodies of requests, the other half for their work and their responses.
        max_bytes_in_flight: usize = 160 * 1024 * 1024,
        /// Total of the transcripts and responses of all running model calls.
        max_model_bytes_in_flight: usize = 64 * 1024 * 1024,
        max_json_depth: usize = 100,
        max_message_bytes: usize = 8 * 1024 * 1024,
        max_messages_per_exchange: usize = 10_000,
        max_metadata_bytes: usize = 64 * 1024,
        /// A rewind copies the whole session.
        max_fork_messages: usize = 100_000,
        /// Applies to the system prompt and to the skills, separately.
        max_system_prompt_bytes: usize = 1024 * 1024,
        /// Per API key, or for all requests together if there are no keys; 0 means no limit.
        requests_per_second: u32 = 0,
        request_burst: u32 = 0,
        max_requests_in_flight: usize = 2048,
        /// Does not count requests whose body is incomplete or that wait for a model. 0 means 64 per core.
        max_concurrent_requests: usize = 0,
        #[serde(with = "duration")]
        queue_timeout: Duration = Duration::from_secs(1),
        /// Part of anything that can run out that one key can hold.
        max_key_share: f64 = 0.5,
        /// Messages that one context contains verbatim; at least `max_message_bytes`.
        max_context_bytes: usize = 32 * 1024 * 1024,
        /// 0 disables the cache.
        max_context_cache_bytes: usize = 36 * 1024 * 1024,
    }
}

section! {
    Database {
        /// The scheme selects the store: `sqlite:` or `postgres:`.
        url: DatabaseUrl = DatabaseUrl::from("sqlite://precis.db"),
        max_connections: u32 = 10,
        #[serde(with = "duration")]
        acquire_timeout: Duration = Duration::from_secs(5),
        /// On Postgres only, including waits for locks and the network. Every statement of precis takes far less.
        #[serde(with = "duration")]
        statement_timeout: Duration = Duration::from_secs(30),
    }
}

section! {
    Consolidation {
        /// Use [`Settings::threshold`], which resolves the default. If it is set, it applies to contexts with a window, too.
        threshold: Option<usize> = None,
        keep_recent: usize = 20,
        max_tail_tokens: Option<u64> = None,
        /// Per tenant and UTC day.
        daily_token_limit: Option<u64> = None,
        /// Use [`Settings::consolidation_pool`], which resolves the default.
        pool: String = String::new(),
        /// Use [`Settings::meta_pool`], which resolves the default.
        meta_pool: String = String::new(),
        mode: Mode = Mode::Inline,
        on_failure: OnFailure = OnFailure::Verbatim,
        summary_word_limit: usize = 600,
        summary_sentences: usize = 8,
        max_history_messages: usize = 200,
        /// Tokens of a list; 0 = none.
        context_window: u64 = 0,
        trigger_share: f64 = 0.92,
        keep_share: f64 = 0.12,
        summary_share: f64 = 0.6,
        summary_max_tokens: u64 = 4000,
        /// Doubles with each further failure of the session, up to `retry_max`.
        #[serde(with = "duration")]
        retry_initial: Duration = Duration::from_secs(5),
        #[serde(with = "duration")]
        retry_max: Duration = Duration::from_mins(10),
        #[serde(with = "duration")]
        inline_wait: Duration = Duration::from_secs(5),
        prompts: Prompts = Prompts::default(),
    }
}

/// The content of a context after a consolidation that was due has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The whole tail.
    Verbatim,
    /// The last `keep_recent` messages.
    Recent,
}

section! {
    /// Replacements for the built-in prompts.
    Prompts {
        consolidate_system: Option<String> = None,
        consolidate_user: Option<String> = None,
        meta_system: Option<String> = None,
        meta_user: Option<String> = None,
    }
}

section! {
    /// Earlier messages that match the new message of a context request.
    Recall {
        enabled: bool = true,
        limit: usize = 8,
        /// 0 = a tenth of the window, or 800 without one.
        max_tokens: u64 = 0,
        scope: RecallScope = RecallScope::Session,
    }
}

section! {
    Sessions {
        /// Clients may remove the last messages of a session, which remain in a branch.
        allow_rewind: bool = true,
    }
}

section! {
    /// The erasure of sessions some time after their last exchange. Tenants, users and sessions can have periods of their own.
    Retention {
        #[serde(with = "optional_period")]
        after_last_exchange: Option<RetentionPeriod> = None,
        /// From the rewind on.
        #[serde(with = "optional_period")]
        branches_after: Option<RetentionPeriod> = None,
        #[serde(with = "duration")]
        interval: Duration = Duration::from_mins(10),
        max_sessions_per_second: u32 = 50,
    }
}

section! {
    Memory {
        max_bytes: usize = 64 * 1024,
        default_user: String = "default".to_owned(),
    }
}

impl Memory {
    /// Returns the user of requests that name none, while no API key exists.
    #[must_use]
    pub fn default_user(&self) -> Option<UserId> {
        UserId::new(&*self.default_user).ok()
    }
}

section! {
    #[derive(Copy)]
    Tokens {
        #[serde(with = "from_text")]
        tokenizer: Tokenizer = Tokenizer::default(),
    }
}

section! {
    Search {
        enabled: bool = true,
        language: Language = Language::Auto,
        /// The pool that orders the best hits; empty: they are ordered by their words.
        rerank_pool: String = String::new(),
        /// Limits all attempts of the pool for one search, as its deadline does.
        #[serde(with = "duration")]
        rerank_timeout: Duration = Duration::from_secs(3),
    }
}

section! {
    /// Providers have models; pools list models.
    Llm {
        /// Empty if consolidation is disabled by default.
        default_pool: String = "default".to_owned(),
        providers: BTreeMap<String, Provider> = {
            let provider = Provider { kind: ProviderKind::Extractive, ..Provider::default() };
            BTreeMap::from([(EXTRACTIVE.to_owned(), provider)])
        },
        models: BTreeMap<String, Model> = {
            let (provider, model) = (EXTRACTIVE.to_owned(), EXTRACTIVE.to_owned());
            BTreeMap::from([(EXTRACTIVE.to_owned(), Model { provider, model, ..Model::default() })])
        },
        pools: BTreeMap<String, Pool> = {
            let pool = Pool { models: vec![EXTRACTIVE.to_owned()], ..Pool::default() };
            BTreeMap::from([("default".to_owned(), pool)])
        },
    }
}

section! {
    /// The options that are `None` depend on the kind; [`Provider::apply_kind_defaults`] sets them.
    Provider {
        kind: ProviderKind = ProviderKind::OpenAi,
        /// An http(s) URL, optionally with a query; `None` only for [`ProviderKind::Extractive`].
        #[serde(skip_serializing_if = "Option::is_none")]
        base_url: Option<String> = None,
        #[serde(skip_serializing_if = "Option::is_none")]
        api_key: Option<Secret> = None,
        /// The header that contains the bare key, instead of the usual header of the kind.
        #[serde(skip_serializing_if = "Option::is_none")]
        api_key_header: Option<String> = None,
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        headers: BTreeMap<String, Secret> = BTreeMap::new(),
        /// Additional fields of each request body.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        body: BTreeMap<String, Json> = BTreeMap::new(),
        /// Only for [`ProviderKind::OpenAi`].
        #[serde(skip_serializing_if = "Option::is_none")]
        output_limit_field: Option<OutputLimitField> = None,
        /// Only for [`ProviderKind::OpenAi`]: requests usage in the stream.
        #[serde(skip_serializing_if = "Option::is_none")]
        stream_options: Option<bool> = None,
    }
}

/// The kind of a provider: the wire format of its server, or the built-in summariser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProviderKind {
    /// Any server for OpenAI's chat completions.
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
    /// The built-in summariser; needs no key and no network.
    Extractive,
}

/// The field of a chat completions request that limits the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputLimitField {
    /// Required by OpenAI's newer models.
    MaxCompletionTokens,
    /// Known to older servers.
    MaxTokens,
}

section! {
    Model {
        /// A name in [`Llm::providers`].
        provider: String = String::new(),
        /// The provider's name for the model.
        model: String = String::new(),
        /// Limits a whole attempt, and so the three timeouts below.
        #[serde(with = "duration")]
        timeout: Duration = Duration::from_secs(30),
        #[serde(with = "duration")]
        connect_timeout: Duration = Duration::from_secs(5),
        #[serde(with = "duration")]
        first_token_timeout: Option<Duration> = None,
        #[serde(with = "duration")]
        idle_timeout: Duration = Duration::from_secs(20),
        /// In tokens.
        output_limit: usize = 4096,
        /// In tokens.
        input_limit: usize = 100_000,
        /// Of a million tokens of prompts, in any currency.
        #[serde(skip_serializing_if = "Option::is_none")]
        input_price: Option<f64> = None,
        /// Of a million tokens of responses.
        #[serde(skip_serializing_if = "Option::is_none")]
        output_price: Option<f64> = None,
        retries: usize = 2,
        #[serde(with = "duration")]
        retry_initial: Duration = Duration::from_millis(500),
        /// Limits the server's `Retry-After`, too.
        #[serde(with = "duration")]
        retry_max: Duration = Duration::from_secs(10),
        max_concurrent_calls: usize = 8,
        max_queued_calls: usize = 100,
        #[serde(with = "duration")]
        queue_timeout: Duration = Duration::from_secs(30),
        /// The circuit breaker opens at this percentage of failed calls within `breaker_window`.
        breaker_failure_percent: u32 = 50,
        /// The circuit breaker stays closed after fewer calls than this within `breaker_window`.
        breaker_min_calls: usize = 5,
        #[serde(with = "duration")]
        breaker_window: Duration = Duration::from_mins(10),
        #[serde(with = "duration")]
        breaker_open_for: Duration = Duration::from_secs(30),
    }
}

section! {
    Pool {
        /// Names in [`Llm::models`], in the order in which they are tried; at least one, no duplicates.
        models: Vec<String> = Vec::new(),
        strategy: Strategy = Strategy::Fallback,
        /// Limits all attempts together.
        #[serde(with = "duration")]
        deadline: Duration = Duration::from_mins(1),
    }
}

/// The model of a pool that is tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Always the first one.
    Fallback,
    /// Each model in rotation. The others follow in the order of the list.
    RoundRobin,
}

section! {
    /// Requests of applications to model providers, which get a memory on the way.
    Proxy {
        /// Tokens of a request with its answer; 0 = none.
        context_window: u64 = 0,
        on_unavailable: OnUnavailable = OnUnavailable::Forward,
        /// By name or prefix of the model in a request; the longest one applies.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        models: BTreeMap<String, ProxyModel> = BTreeMap::new(),
        /// The server for chat completions.
        openai: Upstream = Upstream::default(),
        /// The server for Anthropic's messages.
        anthropic: Upstream = Upstream::default(),
    }
}

section! {
    ProxyModel {
        context_window: u64 = 0,
    }
}

section! {
    Upstream {
        /// An http(s) URL; `None` switches the route off.
        base_url: Option<String> = None,
        /// `None`: the key of the client is forwarded.
        api_key: Option<Secret> = None,
    }
}

/// The reaction of the proxy if the memory cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnUnavailable {
    /// The request is forwarded unchanged.
    Forward,
    /// The request fails.
    Reject,
}

impl Proxy {
    /// Returns the upstreams with the names of their sections.
    #[must_use]
    pub fn upstreams(&self) -> [(&'static str, &Upstream); 2] {
        [("openai", &self.openai), ("anthropic", &self.anthropic)]
    }

    /// Returns the window of a model in tokens, if it has one.
    #[must_use]
    pub fn window(&self, model: &str) -> Option<i64> {
        let of_model = self.models.iter().filter(|(name, _)| model.starts_with(name.as_str()));
        let of_model = of_model.max_by_key(|(name, _)| name.len()).map(|(_, model)| model.context_window);
        let window = of_model.unwrap_or(self.context_window);
        i64::try_from(window).ok().filter(|window| *window > 0)
    }
}

section! {
    Log {
        format: LogFormat = LogFormat::Auto,
        /// Directives of `tracing_subscriber::EnvFilter`.
        filter: String = "info".to_owned(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, otherwise JSON.
    Auto,
    Text,
    Json,
}

/// The number of messages in a tail above which a consolidation is due, if it is not configured.
const DEFAULT_THRESHOLD: usize = 100;

impl Settings {
    #[must_use]
    pub fn threshold(&self) -> usize {
        self.consolidation.threshold.unwrap_or(DEFAULT_THRESHOLD)
    }

    /// Returns the recall of contexts; `None` if it is disabled.
    #[must_use]
    pub fn recall(&self) -> Option<RecallOptions> {
        let Recall { enabled, limit, max_tokens, scope } = self.recall;
        let max_tokens = i64::try_from(max_tokens).ok().filter(|max| *max > 0);
        enabled.then_some(RecallOptions { limit, max_tokens, scope })
    }

    /// Returns the pool for consolidation; `None` if consolidation is disabled.
    #[must_use]
    pub fn consolidation_pool(&self) -> Option<&str> {
        let pools = [&self.consolidation.pool, &self.llm.default_pool];
        pools.into_iter().find(|name| !name.is_empty()).map(String::as_str)
    }

    /// Returns the pool for meta-consolidation.
    #[must_use]
    pub fn meta_pool(&self) -> Option<&str> {
        match self.consolidation.meta_pool.as_str() {
            "" => self.consolidation_pool(),
            name => Some(name),
        }
    }

    /// Returns the text analyzer of the search index; `None` if search is disabled.
    #[must_use]
    pub fn analyzer(&self) -> Option<Analyzer> {
        self.search.enabled.then(|| Analyzer::new(self.search.language))
    }

    /// Returns `true` if no model of a provider writes summaries, only the built-in summariser.
    #[must_use]
    pub fn uses_only_extractive(&self) -> bool {
        self.consolidation_pool().is_some_and(|pool| {
            self.providers_of(pool).all(|(_, provider)| provider.kind == ProviderKind::Extractive)
        })
    }

    /// Returns the providers of the models of a pool, possibly with duplicates.
    pub(super) fn providers_of(&self, pool: &str) -> impl Iterator<Item = (&str, &Provider)> {
        let models = self.llm.pools.get(pool).into_iter().flat_map(|pool| &pool.models);
        models
            .filter_map(|name| self.llm.models.get(name))
            .filter_map(|model| self.llm.providers.get_key_value(&model.provider))
            .map(|(name, provider)| (name.as_str(), provider))
    }
}

impl Provider {
    /// Sets the options that are not set and whose default depends on the kind.
    pub(super) fn apply_kind_defaults(&mut self) {
        let base_url = match self.kind {
            ProviderKind::OpenAi => {
                self.output_limit_field.get_or_insert(OutputLimitField::MaxCompletionTokens);
                self.stream_options.get_or_insert(true);
                "https://api.openai.com/v1"
            }
            ProviderKind::Anthropic => "https://api.anthropic.com/v1",
            ProviderKind::Extractive => return,
        };
        self.base_url.get_or_insert_with(|| base_url.to_owned());
    }
}

fn address<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        serde::de::Error::custom(format!(
            "{text:?} is not an address: write IP address and port, such as \"127.0.0.1:8080\""
        ))
    })
}

/// Converts types that have a text form with `FromStr` and `Display`.
mod from_text {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error};
    use std::{fmt::Display, str::FromStr};

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }

    pub(super) fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }
}

/// Converts a retention period; an empty text stands for none.
mod optional_period {
    use crate::domain::retention::RetentionPeriod;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error};

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<RetentionPeriod>, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse()
            .map(Some)
            .map_err(|error| D::Error::custom(format!("{text:?} {error}, or \"\" for none")))
    }

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(super) fn serialize<S: Serializer>(
        period: &Option<RetentionPeriod>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match period {
            Some(period) => serializer.collect_str(period),
            None => serializer.serialize_str(""),
        }
    }
}

/// Converts durations with a unit, such as `"30s"` or `"10min"`, within a range that is valid for every setting. The setting
/// may be optional.
mod duration {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error};
    use std::time::Duration;

    /// Long enough for "no limit", and short enough to be added to any point in time.
    const MAX: Duration = Duration::from_hours(365 * 24);

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<Duration>,
    {
        let text = String::deserialize(deserializer)?;
        match humantime::parse_duration(&text) {
            Err(_) => Err(D::Error::custom(format!(
                "{text:?} is not a duration: write a number with its unit, such as \"30s\" or \"10min\""
            ))),
            Ok(duration) if duration.is_zero() => Err(D::Error::custom("must be longer than 0")),
            Ok(duration) if duration > MAX => Err(D::Error::custom("must be at most 365days")),
            Ok(duration) => Ok(duration.into()),
        }
    }

    pub(super) fn serialize<T, S>(duration: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Copy + Into<Option<Duration>>,
        S: Serializer,
    {
        match (*duration).into() {
            Some(duration) => serializer.collect_str(&humantime::format_duration(duration)),
            None => serializer.serialize_none(),
        }
    }
}
