//! The value of every setting that nobody sets. `precis.example.toml` shows the same values; a test compares them.

use super::{
    Consolidation, Database, DatabaseUrl, EXTRACTIVE, Limits, Llm, Log, LogFormat, Memory, Mode, Model,
    OnFailure, OutputLimitField, Pool, Prompts, Provider, ProviderKind, Search, Server, Strategy,
};
use crate::domain::search::analyzer::Language;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

impl Default for Server {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            allow_unauthenticated: false,
            shutdown_grace: Duration::from_secs(20),
            read_timeout: Duration::from_mins(1),
            write_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_mins(3),
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 * 1024 * 1024,
            max_import_bytes: 4 * 1024 * 1024 * 1024,
            max_body_bytes_in_flight: 256 * 1024 * 1024,
            max_json_depth: 100,
            max_message_bytes: 8 * 1024 * 1024,
            max_messages_per_exchange: 10_000,
            max_metadata_bytes: 64 * 1024,
            max_system_prompt_bytes: 1024 * 1024,
            requests_per_second: 1000,
            request_burst: 2000,
            max_requests_in_flight: 512,
            max_concurrent_requests: 4,
            queue_timeout: Duration::from_secs(1),
        }
    }
}

impl Default for Database {
    fn default() -> Self {
        Self {
            url: DatabaseUrl::from("sqlite://precis.db"),
            max_connections: 10,
            acquire_timeout: Duration::from_secs(5),
            // Far more than any of ours takes.
            statement_timeout: Duration::from_secs(30),
        }
    }
}

impl Default for Consolidation {
    fn default() -> Self {
        Self {
            threshold: 100,
            keep_recent: 20,
            max_tail_tokens: None,
            daily_token_limit: None,
            pool: String::new(),
            meta_pool: String::new(),
            mode: Mode::Inline,
            on_failure: OnFailure::Verbatim,
            summary_word_limit: 600,
            summary_sentences: 8,
            max_history_messages: 200,
            retry_initial: Duration::from_secs(5),
            retry_max: Duration::from_mins(10),
            inline_wait: Duration::from_mins(2),
            prompts: Prompts::default(),
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self { max_bytes: 64 * 1024 }
    }
}

impl Default for Search {
    fn default() -> Self {
        Self { enabled: true, language: Language::English }
    }
}

impl Default for Llm {
    fn default() -> Self {
        let provider = Provider { kind: ProviderKind::Extractive, ..Provider::default() };
        let model =
            Model { provider: EXTRACTIVE.to_owned(), model: EXTRACTIVE.to_owned(), ..Model::default() };
        let pool = Pool { models: vec![EXTRACTIVE.to_owned()], ..Pool::default() };
        Self {
            default_pool: "default".to_owned(),
            providers: BTreeMap::from([(EXTRACTIVE.to_owned(), provider)]),
            models: BTreeMap::from([(EXTRACTIVE.to_owned(), model)]),
            pools: BTreeMap::from([("default".to_owned(), pool)]),
        }
    }
}

impl Provider {
    /// Puts in what its kind has where nothing is written: another kind may have something else there, or nothing.
    pub(super) fn put_in_defaults(&mut self) {
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

impl Default for Provider {
    fn default() -> Self {
        Self {
            kind: ProviderKind::OpenAi,
            base_url: None,
            api_key: None,
            api_key_header: None,
            headers: BTreeMap::new(),
            body: BTreeMap::new(),
            output_limit_field: None,
            stream_options: None,
        }
    }
}

impl Default for Model {
    fn default() -> Self {
        Self {
            provider: String::new(),
            model: String::new(),
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            first_token_timeout: None,
            idle_timeout: Duration::from_secs(20),
            output_limit: 4096,
            input_limit: 100_000,
            retries: 2,
            retry_initial: Duration::from_millis(500),
            retry_max: Duration::from_secs(10),
            max_concurrent_calls: 8,
            max_queued_calls: 100,
            queue_timeout: Duration::from_secs(30),
            breaker_failure_percent: 50,
            breaker_min_calls: 5,
            breaker_window: Duration::from_mins(10),
            breaker_open_for: Duration::from_secs(30),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self { models: Vec::new(), strategy: Strategy::Fallback, deadline: Duration::from_mins(1) }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Auto, filter: "info".to_owned() }
    }
}
