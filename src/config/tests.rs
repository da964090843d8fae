//! Tests of the settings through [`Settings::load`].

use super::error::SettingPath;
use super::schema::{self, Kind, entries};
use super::{
    DatabaseUrl, Flag, Loaded, OutputLimitField, Provider, ProviderKind, SecretSource, Settings, Sources,
    Strategy,
};
use crate::domain::consolidation::Mode;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use tempfile::TempDir;

/// The sources of settings, with a directory that contains `precis.toml`.
struct TestSources {
    directory: TempDir,
    sources: Sources,
}

fn file(toml: &str) -> TestSources {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precis.toml");
    std::fs::write(&path, toml).unwrap();
    let sources = Sources { default_file: Some(path), ..Sources::default() };
    TestSources { directory, sources }
}

fn environment(variables: &[(&str, &str)]) -> TestSources {
    file("").environment(variables)
}

/// A provider in use with these settings.
fn with_provider(settings: &str) -> TestSources {
    file(&format!(
        "[llm.providers.openai]\n{settings}\n[llm.models.small]\nprovider = 'openai'\nmodel = 'm'\n\
     [llm.pools.default]\nmodels = ['small']"
    ))
}

impl TestSources {
    fn environment(mut self, variables: &[(&str, &str)]) -> Self {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        self.sources.environment.extend(variables);
        self
    }

    fn flag(mut self, path: &'static str, value: &str, name: &'static str) -> Self {
        let value = value.to_owned();
        self.sources.flags.push(Flag { path, value, name });
        self
    }

    fn load(&self) -> Loaded {
        Settings::load(&self.sources).unwrap_or_else(|errors| panic!("{errors}"))
    }

    /// Returns the errors, one line each, with the file's path shortened to its name.
    fn errors(&self) -> Vec<String> {
        let errors = Settings::load(&self.sources).map(|loaded| loaded.to_string()).unwrap_err();
        let directory = format!("{}/", self.directory.path().display());
        let errors = errors.errors.iter();
        errors.map(|error| error.to_string().replace(&directory, "")).collect()
    }
}

#[track_caller]
fn assert_one_error(errors: &[String], expected: &str) {
    let found = errors.iter().filter(|problem| problem.starts_with(expected));
    assert_eq!(found.count(), 1, "{expected:?} once in {errors:#?}");
}

/// Checks that each of the expected errors is reported, and no other, and that no error contains the secret `hunter2`.
#[track_caller]
fn assert_errors(sources: &TestSources, expected: &[&str]) {
    let errors = sources.errors();
    for expected in expected {
        assert_one_error(&errors, expected);
    }
    assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    assert!(!format!("{errors:?}").contains("hunter2"), "{errors:#?}");
}

/// Returns the cells of a table whose columns are separated by ` | `.
fn rows<const N: usize>(table: &'static str) -> impl Iterator<Item = [&'static str; N]> {
    let cells = |row: &'static str| row.split(" | ").map(|cell| cell.trim_matches(' ')).collect::<Vec<_>>();
    let rows = table.lines().filter(|row| !row.is_empty());
    rows.map(move |row| cells(row).try_into().unwrap_or_else(|_| panic!("{row:?} has not {N} cells")))
}

fn printed(settings: &Settings) -> BTreeMap<String, String> {
    let entries = entries(settings).into_iter();
    entries.map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

#[test]
fn empty_sources_give_defaults() {
    let loaded = Settings::load(&Sources::default()).unwrap();
    assert_eq!(printed(&loaded.settings), printed(&Settings::default()));
    assert_eq!(loaded.origins, BTreeMap::new());
    assert_eq!(loaded.settings.consolidation_pool(), Some("default"));
    assert_eq!(loaded.settings.meta_pool(), Some("default"));
    assert!(loaded.settings.uses_only_extractive());
}

#[test]
fn flags_override_environment_and_environment_overrides_file() {
    let toml = "[server]\nbind = '127.0.0.1:1'\n[limits]\nmax_body_bytes = 1\n[database]\nurl = 'sqlite:file'\nmax_connections = 1";
    let sources = file(toml)
        .environment(&[
            ("PRECIS__SERVER__BIND", "127.0.0.1:2"),
            ("PRECIS__DATABASE__URL", "sqlite:precis"),
            ("DATABASE_URL", "sqlite:plain"),
            ("PRECIS__LIMITS__MAX_BODY_BYTES", "2"),
            ("UNRELATED__KEY", "x"),
        ])
        .flag("server.bind", "127.0.0.1:3", "--bind");
    let loaded = sources.load();
    assert_eq!(loaded.settings.server.bind.port(), 3);
    assert_eq!(loaded.settings.limits.max_body_bytes, 2);
    assert_eq!(loaded.settings.database.url.expose(), "sqlite:precis");
    assert_eq!(loaded.settings.database.max_connections, 1);
    assert_eq!(loaded.origins["server.bind"], "flag --bind");
    assert_eq!(loaded.origins["limits.max_body_bytes"], "environment PRECIS__LIMITS__MAX_BODY_BYTES");
    assert_eq!(loaded.origins["database.url"], "environment PRECIS__DATABASE__URL");
    assert!(loaded.origins["database.max_connections"].ends_with("precis.toml"));
    assert!(!loaded.origins.contains_key("database.acquire_timeout"));
}

#[test]
fn database_url_variable_sets_database_url() {
    let loaded = environment(&[("DATABASE_URL", "postgresql://db/precis")]).load();
    assert!(loaded.settings.database.url.is_postgres());
    assert_eq!(loaded.origins["database.url"], "environment DATABASE_URL");
    let loaded = environment(&[("DATABASE_URL", "")]).load();
    assert!(loaded.settings.database.url.is_sqlite(), "empty is not set");
}

#[test]
fn environment_text_is_converted_to_kind_of_setting() {
    let settings = environment(&[
        ("PRECIS__CONSOLIDATION__THRESHOLD", "150"),
        ("PRECIS__CONSOLIDATION__MAX_TAIL_TOKENS", "9000"),
        ("PRECIS__CONSOLIDATION__MODE", "off"),
        ("PRECIS__CONSOLIDATION__RETRY_INITIAL", "1500ms"),
        ("PRECIS__SERVER__ALLOW_UNAUTHENTICATED", "true"),
        ("PRECIS__LLM__PROVIDERS__LOCAL__BASE_URL", "http://localhost:1/v1"),
        ("PRECIS__LLM__MODELS__QWEN__PROVIDER", "local"),
        ("PRECIS__LLM__MODELS__QWEN__MODEL", "0123"),
        ("PRECIS__LLM__POOLS__DEFAULT__MODELS", "qwen, extractive"),
    ])
    .load()
    .settings;
    assert_eq!(settings.threshold(), 150);
    assert_eq!(settings.consolidation.max_tail_tokens, Some(9000));
    assert_eq!(settings.consolidation.mode, Mode::Off);
    assert_eq!(settings.consolidation.retry_initial, Duration::from_millis(1500));
    assert!(settings.server.allow_unauthenticated);
    assert_eq!(settings.llm.models["qwen"].model, "0123");
    assert_eq!(settings.llm.pools["default"].models, ["qwen", "extractive"]);
    assert!(!settings.uses_only_extractive());
}

#[test]
fn all_errors_are_reported_at_once() {
    let sources = file(
        "[server]\nbind = 'localhost'\n[consolidation]\ntreshold = 1\nmode = 'inlin'\nretry_max = 30\n\
         keep_recent = 2.5\nthreshold = true\n[memry]\nmax_bytes = 1\n[llm]\nproviders = 1\n[llm.pools.x]\nmodels = 5",
    )
    .environment(&[("PRECIS__LIMITS__MAX_BODY_BYTES", "on"), ("PRECIS__LOG", "debug")])
    .flag("database.url", "mysql://u:hunter2@h/d", "--database-url");
    assert_errors(
        &sources,
        &[
            "server.bind (precis.toml): \"localhost\" is not an address",
            "consolidation.treshold (precis.toml): unknown key: did you mean consolidation.threshold?",
            "consolidation.mode (precis.toml): unknown value `inlin`, expected one of inline, background, off",
            "consolidation.retry_max (precis.toml): \"30\" is not a duration: write a number with its unit",
            "consolidation.keep_recent (precis.toml): must be a whole number",
            "consolidation.threshold (precis.toml): must be a whole number",
            "memry.max_bytes (precis.toml): unknown key: did you mean memory.max_bytes?",
            "llm.providers (precis.toml): is a section: set its keys, such as llm.providers.name.kind",
            "llm.pools.x.models (precis.toml): must be a list",
            "limits.max_body_bytes (environment PRECIS__LIMITS__MAX_BODY_BYTES): must be a whole number",
            "log (environment PRECIS__LOG): is a section",
            "database.url (flag --database-url): must be a URL that begins with sqlite:",
            "llm.default_pool: there is no pool \"default\": write one of x",
        ],
    );
}

#[test]
fn pool_defaults_are_resolved() {
    let toml =
        "[consolidation]\nmeta_pool = 'b'\n[llm]\ndefault_pool = ''\n[llm.pools.b]\nmodels = ['extractive']";
    let settings = file(toml).load().settings;
    assert_eq!(settings.consolidation_pool(), None);
    assert_eq!(settings.meta_pool(), Some("b"));
    assert!(!settings.uses_only_extractive());
    let settings = file("[llm.pools]\n[llm.models.extractive]\ninput_limit = 9").load().settings;
    assert_eq!(settings.llm.pools["default"].models, ["extractive"], "no pool written");
    let model = &settings.llm.models["extractive"];
    assert_eq!((model.provider.as_str(), model.input_limit), ("extractive", 9), "redefined in part");
}

#[test]
fn printed_settings_load_as_same_settings() {
    let sources = with_provider("api_key = 'x'").environment(&[
        ("PRECIS__CONSOLIDATION__PROMPTS__META_USER", "a \"b\" # c\n\u{7f}é"),
        ("PRECIS__LLM__MODELS__A B__PROVIDER", "extractive"),
        ("PRECIS__LLM__MODELS__A B__MODEL", "x"),
    ]);
    let loaded = sources.load();
    let text = loaded.to_string();
    assert!(text.contains("server.bind = \"127.0.0.1:8080\"  # default\n"), "{text}");
    assert!(
        text.contains("llm.models.\"a b\".model = \"x\"  # environment PRECIS__LLM__MODELS__A B__MODEL\n")
    );
    assert!(text.contains("# consolidation.max_tail_tokens is not set\n"));
    let again = file(&text).load();
    assert_eq!(printed(&again.settings), printed(&loaded.settings));
}

#[test]
fn named_file_must_exist() {
    let mut sources = file("[server]\nbind = 'x'");
    sources.sources.file = Some(sources.directory.path().join("other.toml"));
    let sources =
        sources.environment(&[("PRECIS__CONSOLIDATION__MODE", "on"), ("PRECIS__LLM__DEFAULT_POOL", "a")]);
    let errors = sources.errors();
    assert_one_error(&errors, "other.toml: cannot read this file");
    assert_one_error(&errors, "consolidation.mode (environment PRECIS__CONSOLIDATION__MODE): unknown value");
    assert_eq!(errors.len(), 2, "the pool may be in that file: {errors:#?}");
    std::fs::write(sources.sources.file.as_ref().unwrap(), "[server]\nbind = '127.0.0.1:1'").unwrap();
    std::fs::write(sources.sources.default_file.as_ref().unwrap(), "broken").unwrap();
    assert_eq!(sources.errors().len(), 2, "read instead of precis.toml");
}

#[test]
fn pool_for_reranking_has_a_model_that_can_order() {
    let sources = file("[search]\nrerank_pool = 'default'\nrerank_timeout = '5min'\n");
    assert_errors(
        &sources,
        &[
            "search.rerank_timeout (precis.toml): server.request_timeout (3m) must be longer than",
            "search.rerank_pool (precis.toml): the pool \"default\" has only the built-in model",
        ],
    );
    let sources = file(
        "[search]\nrerank_pool = 'default'\n[llm.providers.local]\nbase_url = 'http://127.0.0.1:1/v1'\n[llm.models.small]\n\
         provider = 'local'\nmodel = 'x'\n[llm.pools.default]\nmodels = ['small', 'extractive']\n",
    );
    assert_eq!(sources.load().settings.search.rerank_pool, "default");
}

#[test]
fn invalid_references_are_reported_together() {
    let sources = file(
        "[search]\nrerank_pool = 'rerank'\n[consolidation]\npool = 'fast'\nmeta_pool = 'defualt'\n[llm.providers.openai]\n[llm.models.small]\n\
     provider = 'opnai'\n[llm.models.big]\nmodel = 'x'\n[llm.pools.default]\nmodels = ['smal', 'big', 'none']\n\
     [llm.pools.empty]\nmodels = []\n",
    );
    assert_errors(
        &sources,
        &[
            "consolidation.pool (precis.toml): there is no pool \"fast\": write one of default, empty",
            "consolidation.meta_pool (precis.toml): there is no pool \"defualt\": did you mean \"default\"?",
            "search.rerank_pool (precis.toml): there is no pool \"rerank\": write one of default, empty",
            "llm.models.small.provider (precis.toml): there is no provider \"opnai\": did you mean \"openai\"?",
            "llm.models.small.model: missing",
            "llm.models.big.provider: missing: set it to one of extractive, openai",
            "llm.pools.default.models (precis.toml): there is no model \"smal\": did you mean \"small\"?",
            "llm.pools.default.models (precis.toml): there is no model \"none\"",
            "llm.pools.empty.models (precis.toml): has no model",
        ],
    );
}

#[test]
fn unknown_key_error_suggests_known_keys() {
    let sources = file(
        "keep_recent = 1\nport = 1\n[log]\ncolour = true\n[server.bind]\nport = 1\n[llm.models.\"gpt-4.1\"]\nmodle = 'x'",
    );
    let errors = sources.errors();
    for expected in [
        "keep_recent (precis.toml): unknown key: did you mean consolidation.keep_recent?",
        "port (precis.toml): unknown key: the sections are consolidation, database, limits, llm",
        "log.colour (precis.toml): unknown key: log has filter, format",
        "server.bind.port (precis.toml): unknown key: server.bind is a value, not a section",
        "llm.models.\"gpt-4.1\".modle (precis.toml): unknown key: did you mean llm.models.\"gpt-4.1\".model?",
    ] {
        assert_one_error(&errors, expected);
    }
}

#[test]
fn example_contains_every_setting_with_its_default() {
    let example = include_str!("../../precis.example.toml");
    let loaded = file(example).load();
    assert_eq!(printed(&loaded.settings), printed(&Settings::default()));

    let example = schema::example_with_optional_settings();
    let loaded = file(&example).environment(&[("OPENAI_API_KEY", "a"), ("ANTHROPIC_API_KEY", "b")]).load();
    for (path, _) in entries(&loaded.settings) {
        assert!(schema::kind(&path).is_some(), "{path} is missing in precis.example.toml");
    }
    // Options that are not set are not among the entries of a provider. A new one must be added here, too.
    let Provider {
        kind: _,
        base_url: Some(_),
        api_key: Some(_),
        api_key_header: Some(_),
        headers,
        body,
        output_limit_field: Some(_),
        stream_options: Some(_),
    } = &loaded.settings.llm.providers["openai"]
    else {
        panic!("an option is missing in precis.example.toml");
    };
    assert!(!headers.is_empty() && !body.is_empty());
    assert_eq!(loaded.settings.llm.providers["local"].kind, ProviderKind::OpenAi);
}

#[test]
fn schema_has_kind_of_each_setting() {
    for (path, kind) in [
        ("consolidation.max_tail_tokens", Kind::Number),
        ("consolidation.retry_max", Kind::Text),
        ("llm.pools.a.models", Kind::List),
        ("server.allow_unauthenticated", Kind::Bool),
        ("llm.providers.a.api_key", Kind::Secret),
        ("llm.providers.a.api_key.env", Kind::Text),
        ("llm.providers.a.headers.x-b", Kind::Secret),
        ("llm.providers.a.headers.x-b.file", Kind::Text),
        ("llm.providers.a.body.b", Kind::Any),
        ("llm.providers.a.body.b.c", Kind::Any),
        ("llm.providers.a.stream_options", Kind::Bool),
        ("llm.models.a.first_token_timeout", Kind::Text),
    ] {
        assert_eq!(schema::kind(&SettingPath::from(path)), Some(kind), "{path}");
    }
}

#[test]
fn lists_are_read_from_environment_and_each_item_is_checked() {
    let settings = environment(&[
        ("PRECIS__SERVER__CORS_ORIGINS", "https://a.example, http://localhost:81,http://[::1]:8000"),
        ("PRECIS__SERVER__ALLOWED_HOSTS", "precis, Memory.example,*"),
    ]);
    let server = settings.load().settings.server;
    assert_eq!(server.cors_origins, ["https://a.example", "http://localhost:81", "http://[::1]:8000"]);
    assert_eq!(server.allowed_hosts, ["precis", "Memory.example", "*"]);
    for wrong in [
        "",
        "*",
        "null",
        "app.example.com",
        "https://app.example.com/",
        "https://App.example.com",
        "https://a.example:443",
        "https://u@a.example",
        "ftp://a.example",
    ] {
        let sources = file(&format!("[server]\ncors_origins = ['https://a.example', '{wrong}']"));
        assert_errors(&sources, &[&format!("server.cors_origins (precis.toml): {wrong:?} is not an origin")]);
    }
    for wrong in ["", "http://precis", "precis:8080", "precis/", "u@precis", "a b"] {
        let sources = file(&format!("[server]\nallowed_hosts = ['precis', '{wrong}']"));
        assert_errors(&sources, &[&format!("server.allowed_hosts (precis.toml): {wrong:?} is not a host")]);
    }
}

/// Setting, value, and the beginning of the error.
const INVALID_VALUES: &str = "
limits.max_json_depth | 121 | must be at most 120
limits.max_json_depth | 0 | must be greater than 0
limits.max_requests_in_flight | 1000001 | must be at most 1000000
server.max_connections | 0 | must be greater than 0
limits.max_concurrent_requests | 1000001 | must be at most 1000000
limits.max_bytes_in_flight | 134217727 | half of limits.max_bytes_in_flight (134217727) must be at least limits.max
limits.max_context_bytes | 8388607 | limits.max_context_bytes (8388607) must not be less than limits.max_message_bytes
limits.queue_timeout | 0s | must be longer than 0
server.read_timeout | 0s | must be longer than 0
server.write_timeout | 0s | must be longer than 0
server.read_timeout | 3min | server.request_timeout (3m) must be longer than server.read_timeout (3m)
consolidation.context_window | -1 | must be a whole number, not negative
consolidation.trigger_share | 0.7 | consolidation.trigger_share (0.7) must exceed consolidation.keep_share and consolidation.summary_share together
consolidation.keep_share | 0.001 | consolidation.keep_share (0.001) must be a share of the window: from 0.01 to 1.0
consolidation.summary_max_tokens | 0 | must be greater than 0
recall.limit | 0 | must be greater than 0
recall.scope | all | unknown value
consolidation.inline_wait | 1h | server.request_timeout (3m) must be longer than consolidation.inline_wait (1h)
consolidation.inline_wait | 0s | must be longer than 0
consolidation.inline_wait | 2years | must be at most 365days
consolidation.threshold | 20 | consolidation.threshold (20) must be greater than consolidation.keep_recent (20)
consolidation.threshold | 200 | consolidation.max_history_messages (200) must be greater than consolidation.threshold (200)
consolidation.keep_recent | 100 | consolidation.threshold (100) must be greater than consolidation.keep_recent (100)
consolidation.keep_recent | 0 | must be greater than 0
consolidation.max_tail_tokens | 0 | must be greater than 0: leave it out for no limit
consolidation.daily_token_limit | 0 | must be greater than 0: leave it out for no limit
consolidation.retry_max | 1s | consolidation.retry_initial must not be longer than consolidation.retry_max
consolidation.prompts.meta_user | \t | must not be empty: leave it out for the built-in prompt
database.max_connections | 5000000000 | invalid value
log.filter | precis=loud | error parsing level filter
llm.providers.extractive.api_key | x | extractive is built in and takes no api_key
llm.providers.x.base_url | http://x?key=1 | must contain no secret
llm.providers.x.body | {} | is a section
llm.pools.default.models |  | has no model
llm.models.extractive.timeout | 0s | must be longer than 0
llm.models.extractive.first_token_timeout | 0s | must be longer than 0
llm.models.extractive.first_token_timeout |  | \"\" is not a duration
llm.models.extractive.idle_timeout | 0s | must be longer than 0
llm.models.extractive.idle_timeout | 2years | must be at most 365days
llm.models.extractive.retries | -1 | must be a whole number, not negative
llm.models.extractive.input_price | -0.1 | must be a number, not negative
llm.models.extractive.output_price | NaN | must be a number, not negative
llm.models.extractive.output_price | 2 EUR | must be a number, not negative
llm.models.extractive.output_price | 2.5 | one price is missing, so that costs stay unknown: set both
llm.models.extractive.retry_initial | 0s | must be longer than 0
llm.models.extractive.retry_initial | 11s | llm.models.extractive.retry_initial must not be longer than llm.models.extr
llm.models.extractive.retry_max | 400ms | llm.models.extractive.retry_initial must not be longer than llm.models.extr
llm.models.extractive.max_concurrent_calls | 0 | must be greater than 0
llm.models.extractive.max_concurrent_calls | 1000001 | must be at most 1000000
llm.models.extractive.queue_timeout | 0s | must be longer than 0
llm.models.extractive.breaker_failure_percent | 0 | must be greater than 0
llm.models.extractive.breaker_failure_percent | 101 | must be at most 100
llm.models.extractive.breaker_min_calls | 0 | must be greater than 0
llm.models.extractive.breaker_window | 0s | must be longer than 0
llm.models.extractive.breaker_open_for | 0s | must be longer than 0";

#[test]
fn invalid_value_is_rejected() {
    for [path, value, message] in rows(INVALID_VALUES) {
        let variable = format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        let expected = format!("{path} (environment {variable}): {message}");
        assert_errors(&environment(&[(&variable, value)]), &[&expected]);
    }
}

#[test]
fn largest_and_smallest_values_are_accepted() {
    let settings = environment(&[
        ("PRECIS__LIMITS__REQUESTS_PER_SECOND", "0"),
        ("PRECIS__LLM__MODELS__EXTRACTIVE__RETRIES", "0"),
        ("PRECIS__LLM__MODELS__EXTRACTIVE__MAX_QUEUED_CALLS", "0"),
        ("PRECIS__LLM__MODELS__EXTRACTIVE__FIRST_TOKEN_TIMEOUT", "9min"),
        ("PRECIS__CONSOLIDATION__DAILY_TOKEN_LIMIT", "5000000000"),
        // The service checks at start if this address needs a key, because the keys are in the database.
        ("PRECIS__SERVER__BIND", "0.0.0.0:80"),
        ("PRECIS__LLM__MODELS__EXTRACTIVE__INPUT_PRICE", "0"),
        ("PRECIS__LLM__MODELS__EXTRACTIVE__OUTPUT_PRICE", "0.25"),
    ]);
    let settings = settings.load().settings;
    let model = &settings.llm.models["extractive"];
    assert_eq!((settings.limits.requests_per_second, model.retries, model.max_queued_calls), (0, 0, 0));
    assert_eq!(model.first_token_timeout, Some(Duration::from_mins(9)));
    assert_eq!((model.input_price, model.output_price), (Some(0.0), Some(0.25)));
    assert_eq!(settings.consolidation.daily_token_limit, Some(5_000_000_000));
}

#[test]
fn duplicate_model_in_pool_is_rejected() {
    let pool =
        |models: &str| file(&format!("[llm.pools.default]\nmodels = [{models}]\nstrategy = 'round_robin'"));
    assert_eq!(pool("'extractive'").load().settings.llm.pools["default"].strategy, Strategy::RoundRobin);
    let repeated = pool("'extractive', 'extractive', 'extractive'");
    assert_errors(&repeated, &["llm.pools.default.models (precis.toml): lists \"extractive\" twice"]);
    let expected = "llm.pools.default.strategy (precis.toml): unknown value `robin`, expected `fallback` or `round_robin`";
    assert_errors(&file("[llm.pools.default]\nmodels = ['extractive']\nstrategy = 'robin'"), &[expected]);
}

#[test]
fn provider_options_default_by_kind() {
    let settings = file("[llm.providers.a]\nkind = 'anthropic'\n[llm.providers.o]").load().settings;
    let (a, o) = (&settings.llm.providers["a"], &settings.llm.providers["o"]);
    assert_eq!(a.kind, ProviderKind::Anthropic);
    assert_eq!(a.base_url.as_deref(), Some("https://api.anthropic.com/v1"));
    assert_eq!((a.output_limit_field, a.stream_options), (None, None));
    assert_eq!(o.base_url.as_deref(), Some("https://api.openai.com/v1"));
    assert_eq!(o.output_limit_field, Some(OutputLimitField::MaxCompletionTokens));
    assert_eq!(o.stream_options, Some(true));
    let written = with_provider("output_limit_field = 'max_tokens'\nstream_options = false").load().settings;
    let o = &written.llm.providers["openai"];
    assert_eq!(o.output_limit_field, Some(OutputLimitField::MaxTokens));
    assert_eq!(o.stream_options, Some(false));
}

#[test]
fn options_without_effect_for_kind_are_rejected() {
    let toml = "[llm.providers.extractive]\nbase_url = 'http://h'\napi_key = { env = 'A' }\napi_key_header = 'k'\n\
        headers = { x-a = '1' }\nbody = { a.b = 1 }\noutput_limit_field = 'max_tokens'\nstream_options = true\n\
        [llm.providers.a]\nkind = 'anthropic'\noutput_limit_field = 'max_tokens'\nstream_options = true\n\
        [llm.providers.x]\nkind = 'anthropik'\nstream_options = 1";
    let options =
        ["base_url", "api_key", "api_key_header", "headers", "body", "output_limit_field", "stream_options"];
    let built_in = options.map(|option| {
        let path = format!("llm.providers.extractive.{option} (precis.toml)");
        format!("{path}: extractive is built in and takes no {option}: write kind")
    });
    let mut expected: Vec<&str> = built_in.iter().map(String::as_str).collect();
    expected.extend([
        "llm.providers.a.output_limit_field (precis.toml): a provider of kind anthropic takes no output_limit",
        "llm.providers.a.stream_options (precis.toml): a provider of kind anthropic takes no stream_options",
        "llm.providers.x.kind (precis.toml): unknown value `anthropik`, expected one of `openai`, `anthropic`",
        "llm.providers.x.stream_options (precis.toml): must be true or false",
    ]);
    assert_errors(&file(toml).environment(&[("A", "k")]), &expected);
}

/// Settings of a provider in use, separated by ` ; `, and the beginning of the error.
const INVALID_PROVIDERS: &str = r#"
base_url = 'h/v1' | base_url: must be a URL, such as
base_url = 'ftp://h' | base_url: must begin with http:// or https://
base_url = 'http://hunter2@h' | base_url: must not contain user or password: set api_key or headers instead
base_url = 'http://u:hunter2@h' | base_url: must not contain user or password
base_url = 'http://h/v1#hunter2' | base_url: must have no fragment
base_url = 'http://h/v1?api-key=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?a=1&Access_TOKEN=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?a=1;Secret=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?sig=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?PassWord=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?authorization=hunter2' | base_url: must contain no secret
base_url = 'http://h/v1?k%65y=hunter2' | base_url: must contain no secret
api_key_header = '' | api_key_header: must be the name of an HTTP header
api_key_header = 'hunter2:' | api_key_header: must be the name of an HTTP header
api_key_header = 'Host' | api_key_header: is set by the HTTP client itself
headers = { 'x y' = 'hunter2' } | headers."x y": must be the name of an HTTP
headers = { Content-Length = '1' } | headers.Content-Length: is set by the HTTP client
headers = { host = { env = 'A' } } | headers.host: is set by the HTTP client
api_key = 'k' ; headers = { Authorization = 'hunter2' } | headers.Authorization: takes the api_key: leave out one of the two
kind = 'anthropic' ; api_key = 'k' ; headers = { x-api-key = 'hunter2' } | headers.x-api-key: takes the api_key
api_key = 'k' ; api_key_header = 'api-key' ; headers = { API-Key = 'hunter2' } | headers.API-Key: takes the api_key
headers = { X-A = 'hunter2', x-a = 'hunter2' } | headers.x-a: is the same header as X-A
headers = { x-a = 5 } | headers.x-a: expected one of: a string, { env
headers = { x-a = {} } | headers.x-a: expected one of: a string, { env
headers = { x-a.env = 'A', x-a.file = 'hunter2' } | headers.x-a: expected one of
headers = { x-a.sk = 'hunter2' } | headers.x-a.sk: unknown key: llm
headers = 'hunter2' | headers: is a section: set its keys, such as llm
header.x-a = 'hunter2' | header.x-a: unknown key: did you mean llm.providers.openai.headers.x-a?
headers = { x-a = ' ' } | headers.x-a: the secret is empty
headers = { x-a = "hunter2\n2" } | headers.x-a: the secret must be one line
headers = { x-a.env = 'ABSENT' } | headers.x-a.env: the environment variable ABSENT
body = { model = 'm' } | body.model: is set by precis itself: leave it out
body = { messages = [] } | body.messages: is set by precis itself
body = { Stream = false } | body.Stream: is set by precis itself
body = { system = 's' } | body.system: is set by precis itself
body = { stream_options.a = 1 } | body.stream_options: is set by precis itself
body = { max_tokens = 0 } | body.max_tokens: is set by precis: write the model's output_limit, and the provider's
body = { max_completion_tokens = 1 } | body.max_completion_tokens: is set by precis: write
body = { a = nan } | body.a: contains nan or inf
body = { a.b = [{ c = -inf }] } | body.a: contains nan or inf
bdy.chat.kwargs = 1 | bdy.chat.kwargs: unknown key: did you mean llm.providers.openai.body.chat.kwargs?
api_key = { env = 'ABSENT' } | api_key.env: the environment variable ABSENT
api_key = { env = 'sk-hunter2' } | api_key.env: write the name
api_key = { file = '/hunter2' } | api_key.file: cannot read the file
api_key = '' | api_key: the secret is empty
api_key = "hunter2\nX" | api_key: the secret must be one line
api_key = ['hunter2'] | api_key: expected one of: a string
api_key = {} | api_key: expected one of: a string
api_key = { env = 'A', file = 'hunter2' } | api_key: expected one of: a string
api_key = { sk = 'hunter2' } | api_key.sk: unknown key
apikey = 'hunter2' | apikey: unknown key: did you mean"#;

#[test]
fn invalid_provider_is_rejected() {
    for [settings, expected] in rows(INVALID_PROVIDERS) {
        let (setting, message) = expected.split_once(": ").unwrap();
        let sources = with_provider(&settings.replace(" ; ", "\n")).environment(&[("A", "hunter2")]);
        assert_errors(&sources, &[&format!("llm.providers.openai.{setting} (precis.toml): {message}")]);
    }
}

#[test]
fn error_of_invalid_toml_does_not_quote_it() {
    for (settings, line) in [
        ("api_key = hunter2", 2),
        ("api_key = 'hunter2", 2),
        ("api_key = 'a' hunter2", 2),
        ("api_key = 'a'\napi_key = 'hunter2'", 3),
        ("api_key = \"hunter2\\q\"", 2),
        ("hunter2", 2),
    ] {
        let expected = format!("precis.toml: invalid TOML in line {line}");
        assert_errors(&with_provider(settings), &[&expected]);
    }
}

#[test]
fn valid_provider_is_accepted() {
    for settings in [
        "base_url = 'https://h/openai/deployments/d?api-version=2024-10-21'",
        "base_url = 'http://h/v1?a&b=c%20d'",
        "api_key = 'k'\napi_key_header = 'api-key'\nheaders = { authorization = 'Basic x' }",
        "headers = { Authorization = 'Basic x' }",
        "headers = {}\nbody = {}",
    ] {
        with_provider(settings).load();
    }
}

#[test]
fn headers_are_merged_from_file_and_environment() {
    let toml = "[llm.providers.P.headers]\nX-Title = { file = 'absent' }\nX-B = 'b'\nX-C = { env = 'C' }";
    let loaded = file(toml)
        .environment(&[
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-TITLE", "hunter2"),
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-B__ENV", "B"),
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-D", "00"),
            ("B", "hunter3"),
            ("C", "hunter4"),
        ])
        .load();
    let headers = &loaded.settings.llm.providers["P"].headers;
    let read = headers.iter().map(|(name, value)| {
        (name.as_str(), value.source().unwrap().read().unwrap().expose_secret().to_owned())
    });
    let expected = [("X-B", "hunter3"), ("X-C", "hunter4"), ("X-Title", "hunter2"), ("x-d", "00")];
    assert_eq!(read.collect::<Vec<_>>(), expected.map(|(name, value)| (name, value.to_owned())));
    let shown = loaded.to_string();
    let line =
        "llm.providers.P.headers.X-Title = \"[redacted]\"  # environment PRECIS__LLM__PROVIDERS__P__HEADERS";
    assert!(shown.contains(line), "{shown}");
    assert!(shown.contains("llm.providers.P.headers.X-C = \"[redacted]\"  # /"), "{shown}");
    assert!(!format!("{shown}{loaded:?}").contains("hunter"));
}

#[test]
fn body_fields_keep_their_toml_types() {
    let toml = "[llm.providers.openai.body]\nTemperature = 0.0\nseed = 0\nservice_tier = 'flex'\nstore = false\nbig = 1e300\n\
        empty = {}\nneg = -1\ntools = [1, 'a', { \"b c\" = [{}, 2.0] }]\n[llm.providers.openai.body.chat.kwargs]\n\
        Enable_Thinking = true\n\"a.b\" = 'x'";
    let loaded = file(toml)
        .environment(&[
            ("PRECIS__LLM__PROVIDERS__OPENAI__BODY__SERVICE_TIER", "auto"),
            ("PRECIS__LLM__PROVIDERS__OPENAI__BODY__CHAT__KWARGS__ENABLE_THINKING", "5"),
        ])
        .load();
    let expected = json!({
        "Temperature": 0.0, "seed": 0, "service_tier": "auto", "store": false, "big": 1e300, "empty": {}, "neg": -1,
        "tools": [1, "a", { "b c": [{}, 2.0] }], "chat": { "kwargs": { "Enable_Thinking": "5", "a.b": "x" } },
    });
    let body = |loaded: &Loaded| json!(loaded.settings.llm.providers["openai"].body);
    assert_eq!(body(&loaded), expected);
    let shown = loaded.to_string();
    for line in [
        "llm.providers.openai.body.Temperature = 0.0  # /",
        "llm.providers.openai.body.chat.kwargs.\"a.b\" = \"x\"  # /",
        "llm.providers.openai.body.chat.kwargs.Enable_Thinking = \"5\"  # environment PRECIS__LLM__PROV",
        "llm.providers.openai.body.empty = {}  # /",
        "llm.providers.openai.body.tools = [1, \"a\", {\"b c\" = [{}, 2.0]}]  # /",
    ] {
        assert!(shown.contains(&format!("\n{line}")), "{line} in {shown}");
    }
    assert_eq!(body(&file(&shown).load()), expected);
}

fn key_of(loaded: &Loaded) -> String {
    let provider = &loaded.settings.llm.providers["openai"];
    assert_eq!(provider.base_url.as_deref(), Some("https://api.openai.com/v1"));
    provider.api_key.as_ref().unwrap().source().unwrap().read().unwrap().expose_secret().to_owned()
}

#[test]
fn api_key_is_read_from_text_environment_or_file() {
    assert_eq!(key_of(&with_provider("api_key = 'sk-1'").load()), "sk-1");
    let digits = [("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY", "00123"), ("UNUSED", "x")];
    let loaded = with_provider("api_key = { env = 'UNUSED' }").environment(&digits).load();
    assert_eq!(key_of(&loaded), "00123", "text as it is, over the table of the file");
    let loaded = with_provider("api_key = { env = 'OPENAI_API_KEY' }")
        .environment(&[("OPENAI_API_KEY", "007")])
        .load();
    assert_eq!(key_of(&loaded), "007");
    assert!(loaded.to_string().contains("llm.providers.openai.api_key = \"[redacted]\"  # /"));

    let sources = with_provider("api_key = { env = 'ABSENT' }");
    let path = sources.directory.path().join("key");
    std::fs::write(&path, " sk-2 \n").unwrap();
    let path = path.display().to_string();
    let sources = sources.environment(&[("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY__FILE", &path)]);
    assert_eq!(key_of(&sources.load()), "sk-2");
    std::fs::write(&path, " \n").unwrap();
    assert_one_error(&sources.errors(), "llm.providers.openai.api_key.file (environment PRECIS__");
}

#[test]
fn unusable_api_key_of_unused_provider_is_accepted() {
    for (api_key, reason) in [
        ("{ env = 'ABSENT' }", "the environment variable ABSENT is not set"),
        ("{ env = 'sk-secret' }", "write the name of an environment variable"),
        ("{ file = '/sk-secret' }", "cannot read the file"),
        ("\"sk-secret\\n2\"", "the secret must be one line"),
    ] {
        let loaded = file(&format!("[llm.providers.a]\napi_key = {api_key}\nheaders.x = {api_key}")).load();
        let provider = &loaded.settings.llm.providers["a"];
        for secret in [provider.api_key.as_ref().unwrap(), &provider.headers["x"]] {
            assert!(secret.source().unwrap_err().starts_with(reason), "{secret:?}");
        }
        let shown = format!("{loaded}{loaded:?}{:?}", provider.api_key.as_ref().unwrap().source());
        assert!(!shown.contains("sk-secret"), "{shown}");
    }
    let there = file("[llm.providers.openai]\napi_key = { env = 'A' }").environment(&[("A", "sk-3")]);
    assert_eq!(key_of(&there.load()), "sk-3");
}

#[test]
fn api_key_file_is_read_again_at_each_use() {
    let sources = with_provider("");
    let path = sources.directory.path().join("key");
    let named = path.display().to_string();
    std::fs::write(&path, "sk-1\n").unwrap();
    let sources = sources.environment(&[("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY__FILE", &named)]);
    let loaded = sources.load();
    assert_eq!(key_of(&loaded), "sk-1");
    let source = loaded.settings.llm.providers["openai"].api_key.as_ref().unwrap().source().unwrap();
    assert!(matches!(source, SecretSource::File(file) if *file == path), "{source:?}");
    std::fs::write(&path, "sk-2\n").unwrap();
    assert_eq!(key_of(&loaded), "sk-2");
    std::fs::write(&path, "sk-2\nsk-3").unwrap();
    assert!(source.read().unwrap_err().starts_with("the secret must be one line"));
    std::fs::remove_file(&path).unwrap();
    assert!(source.read().unwrap_err().starts_with("cannot read the file"));
}

#[test]
fn secrets_are_redacted_in_all_output() {
    for url in [
        "postgres://user:hunter2@host:5432/db?sslmode=require",
        "postgres://user@host/db?password=hunter2&application_name=a",
        "postgresql:///db?host=/run&sslpassword=hunter2",
        "postgresql:///db?p%61ssword=hunter2",
    ] {
        let sources = with_provider("api_key = 'hunter2'").flag("database.url", url, "--database-url");
        let loaded = sources.load();
        assert_eq!(loaded.settings.database.url.expose(), url);
        let shown = format!("{loaded:?}{loaded}{}", loaded.settings.database.url);
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("[redacted]"));
    }
}

#[test]
fn password_of_invalid_database_url_is_redacted() {
    let url = DatabaseUrl::from("postgres://user:hunter2@host:5432/db?sslmode=require");
    assert_eq!(url.to_string(), "postgres://user:[redacted]@host:5432/db?sslmode=require");
    for split in
        ["postgres://u:1/hunter2@h/d", "postgres://u:1?hunter2@h/d", "postgres://u:1#hunter2@h/d", "hunter2"]
    {
        let errors = file("").flag("database.url", split, "--database-url").errors();
        assert_one_error(&errors, "database.url (flag --database-url): must be a URL");
        assert!(!errors[0].contains("hunter2"));
        assert_eq!(DatabaseUrl::from(split).to_string(), "[redacted]");
    }
}

#[test]
fn ignored_variables_that_resemble_settings_are_reported() {
    let warnings = |names: &[&str]| super::environment::ignored_variables(names.iter().copied());
    for (name, setting) in [
        ("PRECIS_CONSOLIDATION__THRESHOLD", "PRECIS__CONSOLIDATION__THRESHOLD"),
        ("PRECIS_CONSOLIDATION_THRESHOLD", "PRECIS__CONSOLIDATION__THRESHOLD"),
        ("PRECIS_CONSOLIDATION_TRESHOLD", "PRECIS__CONSOLIDATION__THRESHOLD"),
        ("PRECIS_DATABASE_URL", "PRECIS__DATABASE__URL"),
        ("PRECIS_memory_default_user", "PRECIS__MEMORY__DEFAULT_USER"),
    ] {
        let expected = format!(
            "the environment variable {name} is not a setting and is ignored: did you mean {setting}?"
        );
        assert_eq!(warnings(&[name]), [expected]);
    }
    let of_section = warnings(&["PRECIS_LLM_PROVIDERS_OPENAI_API_KEY"]);
    assert!(
        of_section.len() == 1 && of_section[0].contains("settings begin with PRECIS__"),
        "{of_section:?}"
    );
    let others = [
        "PRECIS__SERVER__BIND",
        "PRECIS_API_KEY",
        "PRECIS_TEST_POSTGRES",
        "PRECIS_PORT",
        "PATH",
        "DATABASE_URL",
    ];
    assert_eq!(warnings(&others), [""; 0]);
}
