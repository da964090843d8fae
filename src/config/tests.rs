//! Settings from all sources, through [`Settings::load`] alone.

use super::keys::{Kind, KnownKeys, entries};
use super::{Flag, Loaded, Mode, ProviderKind, Settings, Sources};
use secrecy::ExposeSecret as _;
use std::collections::BTreeMap;
use std::time::Duration;
use tempfile::TempDir;

const EXAMPLE: &str = include_str!("../../precis.example.toml");

/// A directory with a `precis.toml`, and what else the process would have.
struct World {
    directory: TempDir,
    sources: Sources,
}

fn file(toml: &str) -> World {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precis.toml");
    std::fs::write(&path, toml).unwrap();
    let sources = Sources {
        default_file: Some(path),
        ..Sources::default()
    };
    World { directory, sources }
}

fn environment(variables: &[(&str, &str)]) -> World {
    file("").environment(variables)
}

impl World {
    fn environment(mut self, variables: &[(&str, &str)]) -> Self {
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
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

    /// The problems, a line each, with the file's path shortened to its name.
    fn problems(&self) -> Vec<String> {
        let errors = Settings::load(&self.sources)
            .map(|loaded| loaded.to_string())
            .unwrap_err();
        let directory = format!("{}/", self.directory.path().display());
        let problems = errors.problems.iter();
        problems
            .map(|problem| problem.to_string().replace(&directory, ""))
            .collect()
    }
}

#[track_caller]
fn assert_one(problems: &[String], beginning: &str) {
    let found = problems.iter().filter(|problem| problem.starts_with(beginning));
    assert_eq!(found.count(), 1, "{beginning:?} once in {problems:#?}");
}

fn printed(settings: &Settings) -> BTreeMap<String, String> {
    let entries = entries(settings).into_iter();
    entries
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

#[test]
fn nothing_at_all_gives_the_defaults() {
    let loaded = Settings::load(&Sources::default()).unwrap();
    assert_eq!(printed(&loaded.settings), printed(&Settings::default()));
    assert_eq!(loaded.origins, BTreeMap::new());
    assert_eq!(loaded.settings.consolidation_pool(), Some("default"));
    assert_eq!(loaded.settings.meta_pool(), Some("default"));
    assert!(loaded.settings.uses_only_extractive());
}

#[test]
fn flags_win_over_environment_over_file() {
    let toml = "[server]\nbind = '127.0.0.1:1'\nmax_body_bytes = 1\n[database]\nurl = 'sqlite:file'\nmax_connections = 1";
    let world = file(toml)
        .environment(&[
            ("PRECIS__SERVER__BIND", "127.0.0.1:2"),
            ("PRECIS__DATABASE__URL", "sqlite:precis"),
            ("DATABASE_URL", "sqlite:plain"),
            ("PRECIS__SERVER__MAX_BODY_BYTES", "2"),
            ("UNRELATED__KEY", "x"),
        ])
        .flag("server.bind", "127.0.0.1:3", "--bind");
    let loaded = world.load();
    assert_eq!(loaded.settings.server.bind.port(), 3);
    assert_eq!(loaded.settings.server.max_body_bytes, 2);
    assert_eq!(loaded.settings.database.url.expose(), "sqlite:precis");
    assert_eq!(loaded.settings.database.max_connections, 1);
    assert_eq!(loaded.origins["server.bind"], "flag --bind");
    assert_eq!(
        loaded.origins["server.max_body_bytes"],
        "environment PRECIS__SERVER__MAX_BODY_BYTES"
    );
    assert_eq!(
        loaded.origins["database.url"],
        "environment PRECIS__DATABASE__URL"
    );
    assert!(loaded.origins["database.max_connections"].ends_with("precis.toml"));
    assert!(!loaded.origins.contains_key("database.acquire_timeout"));
}

#[test]
fn database_url_is_that_of_the_database() {
    let loaded = environment(&[("DATABASE_URL", "postgresql://db/precis")]).load();
    assert!(loaded.settings.database.url.is_postgres());
    assert_eq!(loaded.origins["database.url"], "environment DATABASE_URL");
    let loaded = environment(&[("DATABASE_URL", "")]).load();
    assert!(loaded.settings.database.url.is_sqlite(), "empty is not set");
}

#[test]
fn text_from_the_environment_becomes_what_the_setting_is() {
    let settings = environment(&[
        ("PRECIS__CONSOLIDATION__THRESHOLD", "150"),
        ("PRECIS__CONSOLIDATION__MAX_TAIL_TOKENS", "9000"),
        ("PRECIS__CONSOLIDATION__MODE", "off"),
        ("PRECIS__CONSOLIDATION__RETRY_INITIAL", "1500ms"),
        ("PRECIS__SERVER__ALLOW_WITHOUT_KEYS", "true"),
        ("PRECIS__LLM__PROVIDERS__LOCAL__BASE_URL", "http://localhost:1/v1"),
        ("PRECIS__LLM__MODELS__QWEN__PROVIDER", "local"),
        ("PRECIS__LLM__MODELS__QWEN__MODEL", "0123"),
        ("PRECIS__LLM__POOLS__DEFAULT__MODELS", "qwen, extractive"),
    ])
    .load()
    .settings;
    assert_eq!(settings.consolidation.threshold, 150);
    assert_eq!(settings.consolidation.max_tail_tokens, Some(9000));
    assert_eq!(settings.consolidation.mode, Mode::Off);
    assert_eq!(settings.consolidation.retry_initial, Duration::from_millis(1500));
    assert!(settings.server.allow_without_keys);
    assert_eq!(settings.llm.models["qwen"].model, "0123");
    assert_eq!(settings.llm.pools["default"].models, ["qwen", "extractive"]);
    assert!(!settings.uses_only_extractive());
}

#[test]
fn all_that_is_wrong_comes_at_once() {
    let world = file(
        "[server]\nbind = 'localhost'\n[consolidation]\ntreshold = 1\nmode = 'inlin'\nretry_max = 30\n\
         keep_recent = 2.5\nthreshold = true\n[memry]\nmax_bytes = 1\n[llm]\nproviders = 1\n[llm.pools.x]\nmodels = 5",
    )
    .environment(&[("PRECIS__SERVER__MAX_BODY_BYTES", "on"), ("PRECIS__LOG", "debug")])
    .flag("database.url", "mysql://u:hunter2@h/d", "--database-url");
    let problems = world.problems();
    for beginning in [
        "server.bind (precis.toml): \"localhost\" is no address",
        "consolidation.treshold (precis.toml): unknown key: did you mean consolidation.threshold?",
        "consolidation.mode (precis.toml): unknown value `inlin`, expected one of `inline`, `background`, `off`",
        "consolidation.retry_max (precis.toml): \"30\" is no duration: write a number with its unit",
        "consolidation.keep_recent (precis.toml): must be a whole number",
        "consolidation.threshold (precis.toml): must be a whole number",
        "memry.max_bytes (precis.toml): unknown key: did you mean memory.max_bytes?",
        "llm.providers (precis.toml): is a section: set its keys, such as llm.providers.name.",
        "llm.pools.x.models (precis.toml): must be",
        "server.max_body_bytes (environment PRECIS__SERVER__MAX_BODY_BYTES): must be a whole number",
        "log (environment PRECIS__LOG): is a section",
        "database.url (flag --database-url): must be a URL that begins with sqlite:",
        "llm.default_pool: there is no pool \"default\": there is x",
    ] {
        assert_one(&problems, beginning);
    }
    assert_eq!(problems.len(), 13, "{problems:#?}");
}

#[test]
fn an_unknown_key_is_answered_with_what_there_is() {
    let world = file(
        "keep_recent = 1\nport = 1\n[log]\ncolour = true\n[server.bind]\nport = 1\n[llm.models.\"gpt-4.1\"]\nmodle = 'x'",
    );
    let problems = world.problems();
    assert_one(
        &problems,
        "keep_recent (precis.toml): unknown key: did you mean consolidation.keep_recent?",
    );
    assert_one(
        &problems,
        "port (precis.toml): unknown key: the sections are consolidation, database, llm",
    );
    assert_one(
        &problems,
        "log.colour (precis.toml): unknown key: log has filter, format",
    );
    assert_one(
        &problems,
        "server.bind.port (precis.toml): unknown key: server.bind is a value, not a section",
    );
    assert_one(
        &problems,
        "llm.models.\"gpt-4.1\".modle (precis.toml): unknown key: did you mean llm.models.\"gpt-4.1\".model?",
    );
}

#[test]
fn wrong_references_come_together() {
    let world = file(
        "[consolidation]\npool = 'fast'\nmeta_pool = 'defualt'\n[llm.providers.openai]\n[llm.models.small]\n\
         provider = 'opnai'\n[llm.models.big]\nmodel = 'x'\n[llm.pools.default]\nmodels = ['smal', 'big', 'none']\n\
         [llm.pools.empty]\nmodels = []\n",
    );
    let problems = world.problems();
    for beginning in [
        "consolidation.pool (precis.toml): there is no pool \"fast\": there is default, empty",
        "consolidation.meta_pool (precis.toml): there is no pool \"defualt\": did you mean \"default\"?",
        "llm.models.small.provider (precis.toml): there is no provider \"opnai\": there is extractive",
        "llm.models.small.model: missing",
        "llm.models.big.provider: missing: set it to one of extractive",
        "llm.pools.default.models (precis.toml): there is no model \"smal\": did you mean \"small\"?",
        "llm.pools.default.models (precis.toml): there is no model \"none\"",
        "llm.pools.empty.models (precis.toml): has no model",
    ] {
        assert_one(&problems, beginning);
    }
    assert_eq!(problems.len(), 8, "{problems:#?}");
}

#[test]
fn what_does_not_fit_together_is_named() {
    let problem = |variables: &[(&str, &str)]| {
        let problems = environment(variables).problems();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems[0].clone()
    };
    for (variables, beginning) in [
        (
            &[("PRECIS__CONSOLIDATION__THRESHOLD", "20")][..],
            "consolidation.threshold (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__KEEP_RECENT", "100")],
            "consolidation.keep_recent (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__KEEP_RECENT", "0")],
            "consolidation.keep_recent (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__THRESHOLD", "200")],
            "consolidation.threshold (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__MAX_TAIL_TOKENS", "0")],
            "consolidation.max_tail_tokens (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__RETRY_MAX", "1s")],
            "consolidation.retry_max (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__INLINE_WAIT", "0s")],
            "consolidation.inline_wait (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__INLINE_WAIT", "2years")],
            "consolidation.inline_wait (environment",
        ),
        (
            &[("PRECIS__CONSOLIDATION__PROMPTS__META_USER", " ")],
            "consolidation.prompts.meta_user (environment",
        ),
        (
            &[("PRECIS__DATABASE__MAX_CONNECTIONS", "5000000000")],
            "database.max_connections (environment",
        ),
        (
            &[("PRECIS__LOG__FILTER", "precis=loud")],
            "log.filter (environment",
        ),
        (
            &[("PRECIS__SERVER__BIND", "0.0.0.0:80")],
            "server.bind (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__X__KIND", "anthropic")],
            "llm.providers.x.kind (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__EXTRACTIVE__API_KEY", "x")],
            "llm.providers.extractive.api_key (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "x")],
            "llm.providers.x.base_url (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "ftp://x")],
            "llm.providers.x.base_url (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "http://k@x")],
            "llm.providers.x.base_url (environment",
        ),
        (
            &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "http://x?k=1")],
            "llm.providers.x.base_url (environment",
        ),
        (
            &[("PRECIS__LLM__MODELS__EXTRACTIVE__TIMEOUT", "0s")],
            "llm.models.extractive.timeout (environment",
        ),
        (
            &[("PRECIS__LLM__POOLS__DEFAULT__MODELS", "")],
            "llm.pools.default.models (environment",
        ),
    ] {
        assert!(
            problem(variables).starts_with(beginning),
            "{}",
            problem(variables)
        );
    }
    let open = [
        ("PRECIS__SERVER__BIND", "0.0.0.0:80"),
        ("PRECIS__SERVER__ALLOW_WITHOUT_KEYS", "true"),
    ];
    environment(&open).load();
    environment(&[("PRECIS__SERVER__BIND", "[::1]:80")]).load();
}

#[test]
fn pools_in_force() {
    let toml =
        "[consolidation]\nmeta_pool = 'b'\n[llm]\ndefault_pool = ''\n[llm.pools.b]\nmodels = ['extractive']";
    let settings = file(toml).load().settings;
    assert_eq!(settings.consolidation_pool(), None);
    assert_eq!(settings.meta_pool(), Some("b"));
    assert!(!settings.uses_only_extractive());
    let settings = file("[llm.pools]\n[llm.models.extractive]\ninput_limit = 9")
        .load()
        .settings;
    assert_eq!(
        settings.llm.pools["default"].models,
        ["extractive"],
        "no pool written"
    );
    let model = &settings.llm.models["extractive"];
    assert_eq!(
        (model.provider.as_str(), model.input_limit),
        ("extractive", 9),
        "redefined in part"
    );
}

/// A provider in use; its key is what `api_key` says.
fn with_key(api_key: &str) -> World {
    file(&format!(
        "[llm.providers.openai]\n{api_key}\n[llm.models.small]\nprovider = 'openai'\nmodel = 'm'\n\
         [llm.pools.default]\nmodels = ['small']"
    ))
}

fn key_of(loaded: &Loaded) -> &str {
    let provider = &loaded.settings.llm.providers["openai"];
    assert_eq!(provider.base_url.as_deref(), Some("https://api.openai.com/v1"));
    provider
        .api_key
        .as_ref()
        .unwrap()
        .value()
        .unwrap()
        .expose_secret()
}

#[test]
fn keys_are_found_where_the_settings_say() {
    assert_eq!(key_of(&with_key("api_key = 'sk-1'").load()), "sk-1");
    let digits = [
        ("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY", "00123"),
        ("UNUSED", "x"),
    ];
    let loaded = with_key("api_key = { env = 'UNUSED' }")
        .environment(&digits)
        .load();
    assert_eq!(
        key_of(&loaded),
        "00123",
        "text as it is, over the table of the file"
    );
    let loaded = with_key("api_key = { env = 'OPENAI_API_KEY' }")
        .environment(&[("OPENAI_API_KEY", "007")])
        .load();
    assert_eq!(key_of(&loaded), "007");
    assert!(
        loaded
            .to_string()
            .contains("llm.providers.openai.api_key = \"[redacted]\"  # /")
    );

    let world = with_key("");
    let path = world.directory.path().join("key");
    std::fs::write(&path, " sk-2 \n").unwrap();
    let path = path.display().to_string();
    let world = world.environment(&[("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY__FILE", &path)]);
    assert_eq!(key_of(&world.load()), "sk-2");
    std::fs::write(&path, " \n").unwrap();
    assert_one(
        &world.problems(),
        "llm.providers.openai.api_key.file (environment PRECIS__",
    );
}

#[test]
fn a_key_that_cannot_be_had_is_an_error_where_it_is_needed() {
    for (api_key, beginning) in [
        (
            "api_key = { env = 'ABSENT' }",
            "llm.providers.openai.api_key.env (precis.toml): the environment variable ABSENT",
        ),
        (
            "api_key = { env = 'sk-secret' }",
            "llm.providers.openai.api_key.env (precis.toml): write the name",
        ),
        (
            "api_key = { file = '/sk-secret' }",
            "llm.providers.openai.api_key.file (precis.toml): cannot read the file",
        ),
        (
            "api_key = ''",
            "llm.providers.openai.api_key (precis.toml): the key is empty",
        ),
        (
            "api_key = \"sk-secret\\nX\"",
            "llm.providers.openai.api_key (precis.toml): the key must be one line",
        ),
        (
            "api_key = ['sk-secret']",
            "llm.providers.openai.api_key (precis.toml): expected one of: a string",
        ),
        (
            "api_key = {}",
            "llm.providers.openai.api_key (precis.toml): expected one of: a string",
        ),
        (
            "api_key = { env = 'A', file = 'sk-secret' }",
            "llm.providers.openai.api_key: expected one of: a string",
        ),
        (
            "api_key = { sk = 'sk-secret' }",
            "llm.providers.openai.api_key.sk (precis.toml): unknown key",
        ),
        (
            "apikey = 'sk-secret'",
            "llm.providers.openai.apikey (precis.toml): unknown key: did you mean",
        ),
        (
            "api_key = sk-secret",
            "precis.toml: TOML parse error at line 2, column 11",
        ),
        (
            "base_url = 'http://u:sk-secret@h'",
            "llm.providers.openai.base_url (precis.toml): must not hold",
        ),
    ] {
        let problems = with_key(api_key).problems();
        assert_one(&problems, beginning);
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert!(!problems[0].contains("sk-secret"), "{problems:#?}");
    }
    let unused = "[llm.providers.openai]\napi_key = { env = 'ABSENT' }";
    assert!(
        file(unused).load().settings.llm.providers["openai"]
            .api_key
            .as_ref()
            .unwrap()
            .value()
            .is_none()
    );
}

#[test]
fn secrets_show_nowhere() {
    for url in [
        "postgres://user:hunter2@host:5432/db?sslmode=require",
        "postgres://user@host/db?password=hunter2&application_name=a",
        "postgresql:///db?host=/run&sslpassword=hunter2",
    ] {
        let world = with_key("api_key = 'hunter2'").flag("database.url", url, "--database-url");
        let loaded = world.load();
        assert_eq!(loaded.settings.database.url.expose(), url);
        let shown = format!("{loaded:?}{loaded}{}", loaded.settings.database.url);
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("[redacted]"));
    }
    let url = super::DatabaseUrl::from("postgres://user:hunter2@host:5432/db?sslmode=require");
    assert_eq!(
        url.to_string(),
        "postgres://user:[redacted]@host:5432/db?sslmode=require"
    );
    for torn in [
        "postgres://u:1/hunter2@h/d",
        "postgres://u:1?hunter2@h/d",
        "postgres://u:1#hunter2@h/d",
        "hunter2",
    ] {
        let problems = file("").flag("database.url", torn, "--database-url").problems();
        assert_one(&problems, "database.url (flag --database-url): must be a URL");
        assert!(!problems[0].contains("hunter2"));
        assert_eq!(super::DatabaseUrl::from(torn).to_string(), "[redacted]");
    }
}

#[test]
fn what_is_printed_is_toml_that_gives_the_same_settings() {
    let world = with_key("api_key = 'x'").environment(&[
        (
            "PRECIS__CONSOLIDATION__PROMPTS__META_USER",
            "a \"b\" # c\n\u{7f}é",
        ),
        ("PRECIS__LLM__MODELS__A B__PROVIDER", "extractive"),
        ("PRECIS__LLM__MODELS__A B__MODEL", "x"),
    ]);
    let loaded = world.load();
    let text = loaded.to_string();
    assert!(
        text.contains("server.bind = \"127.0.0.1:8080\"  # default\n"),
        "{text}"
    );
    assert!(
        text.contains("llm.models.\"a b\".model = \"x\"  # environment PRECIS__LLM__MODELS__A B__MODEL\n")
    );
    assert!(text.contains("# consolidation.max_tail_tokens is not set\n"));
    let again = file(&text).load();
    assert_eq!(printed(&again.settings), printed(&loaded.settings));
}

#[test]
fn a_file_that_is_named_must_exist() {
    let mut world = file("[server]\nbind = 'x'");
    world.sources.file = Some(world.directory.path().join("other.toml"));
    let world = world.environment(&[
        ("PRECIS__CONSOLIDATION__MODE", "on"),
        ("PRECIS__LLM__DEFAULT_POOL", "a"),
    ]);
    let problems = world.problems();
    assert_one(&problems, "other.toml: cannot read this file");
    assert_one(
        &problems,
        "consolidation.mode (environment PRECIS__CONSOLIDATION__MODE): unknown value",
    );
    assert_eq!(problems.len(), 2, "the pool may be in that file: {problems:#?}");
    std::fs::write(
        world.sources.file.as_ref().unwrap(),
        "[server]\nbind = '127.0.0.1:1'",
    )
    .unwrap();
    std::fs::write(world.sources.default_file.as_ref().unwrap(), "broken").unwrap();
    assert_eq!(world.problems().len(), 2, "read instead of precis.toml");
}

#[test]
fn the_example_shows_every_setting_with_its_default() {
    let loaded = file(EXAMPLE).load();
    assert_eq!(printed(&loaded.settings), printed(&Settings::default()));
    for (key, value) in entries(&loaded.settings) {
        let key = key.to_string();
        let built_in =
            key.starts_with("llm.providers.extractive") || key.starts_with("llm.models.extractive");
        assert!(
            loaded.origins.contains_key(&key) || value.is_null() || built_in,
            "{key} is missing"
        );
    }

    let lines = EXAMPLE.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if !setting.is_empty() && !setting.starts_with(' ') => setting,
        _ => line,
    });
    let loaded = file(&lines.collect::<Vec<_>>().join("\n")).load();
    for (key, _) in KnownKeys::new().0 {
        let name = key.to_string().replace("\"*\".", "\0");
        let (section, setting) = name.split_once('\0').unwrap_or((&name, ""));
        let mut shown = loaded
            .origins
            .keys()
            .filter(|key| key.starts_with(section) && key.ends_with(setting));
        let other_form = name.ends_with("api_key") || name.ends_with("api_key.file");
        assert!(shown.next().is_some() || other_form, "{name} is missing");
    }
    assert_eq!(loaded.settings.llm.providers["local"].kind, ProviderKind::OpenAi);
}

#[test]
fn known_keys_know_their_kinds() {
    let known = KnownKeys::new().0;
    let kind = |name: &str| known.iter().find(|(key, _)| key.to_string() == name).unwrap().1;
    assert_eq!(kind("consolidation.max_tail_tokens"), Kind::Number);
    assert_eq!(kind("consolidation.retry_max"), Kind::Text);
    assert_eq!(kind("llm.pools.\"*\".models"), Kind::List);
    assert_eq!(kind("server.allow_without_keys"), Kind::Bool);
    assert_eq!(kind("llm.providers.\"*\".api_key.env"), Kind::Text);
}
