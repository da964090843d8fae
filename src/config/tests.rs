//! Settings from all sources, through [`Settings::load`] alone.

use super::keys::entries;
use super::{Flag, Loaded, Mode, Settings, Sources};
use std::collections::BTreeMap;
use std::time::Duration;
use tempfile::TempDir;

/// A directory with a `precis.toml`, and what else the process would have.
pub(super) struct World {
    pub(super) directory: TempDir,
    pub(super) sources: Sources,
}

pub(super) fn file(toml: &str) -> World {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precis.toml");
    std::fs::write(&path, toml).unwrap();
    let sources = Sources { default_file: Some(path), ..Sources::default() };
    World { directory, sources }
}

pub(super) fn environment(variables: &[(&str, &str)]) -> World {
    file("").environment(variables)
}

/// A provider in use; its key is what `api_key` says.
pub(super) fn with_key(api_key: &str) -> World {
    file(&format!(
        "[llm.providers.openai]\n{api_key}\n[llm.models.small]\nprovider = 'openai'\nmodel = 'm'\n\
     [llm.pools.default]\nmodels = ['small']"
    ))
}

impl World {
    pub(super) fn environment(mut self, variables: &[(&str, &str)]) -> Self {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        self.sources.environment.extend(variables);
        self
    }

    pub(super) fn flag(mut self, path: &'static str, value: &str, name: &'static str) -> Self {
        let value = value.to_owned();
        self.sources.flags.push(Flag { path, value, name });
        self
    }

    pub(super) fn load(&self) -> Loaded {
        Settings::load(&self.sources).unwrap_or_else(|errors| panic!("{errors}"))
    }

    /// The problems, a line each, with the file's path shortened to its name.
    pub(super) fn problems(&self) -> Vec<String> {
        let errors = Settings::load(&self.sources).map(|loaded| loaded.to_string()).unwrap_err();
        let directory = format!("{}/", self.directory.path().display());
        let problems = errors.problems.iter();
        problems.map(|problem| problem.to_string().replace(&directory, "")).collect()
    }
}

#[track_caller]
pub(super) fn assert_one(problems: &[String], beginning: &str) {
    let found = problems.iter().filter(|problem| problem.starts_with(beginning));
    assert_eq!(found.count(), 1, "{beginning:?} once in {problems:#?}");
}

pub(super) fn printed(settings: &Settings) -> BTreeMap<String, String> {
    let entries = entries(settings).into_iter();
    entries.map(|(key, value)| (key.to_string(), value.to_string())).collect()
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
    let toml = "[server]\nbind = '127.0.0.1:1'\n[limits]\nmax_body_bytes = 1\n[database]\nurl = 'sqlite:file'\nmax_connections = 1";
    let world = file(toml)
        .environment(&[
            ("PRECIS__SERVER__BIND", "127.0.0.1:2"),
            ("PRECIS__DATABASE__URL", "sqlite:precis"),
            ("DATABASE_URL", "sqlite:plain"),
            ("PRECIS__LIMITS__MAX_BODY_BYTES", "2"),
            ("UNRELATED__KEY", "x"),
        ])
        .flag("server.bind", "127.0.0.1:3", "--bind");
    let loaded = world.load();
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
        ("PRECIS__SERVER__ALLOW_UNAUTHENTICATED", "true"),
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
    assert!(settings.server.allow_unauthenticated);
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
    .environment(&[("PRECIS__LIMITS__MAX_BODY_BYTES", "on"), ("PRECIS__LOG", "debug")])
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
        "llm.providers (precis.toml): is a section: set its keys, such as llm.providers.name.kind",
        "llm.pools.x.models (precis.toml): must be a list",
        "limits.max_body_bytes (environment PRECIS__LIMITS__MAX_BODY_BYTES): must be a whole number",
        "log (environment PRECIS__LOG): is a section",
        "database.url (flag --database-url): must be a URL that begins with sqlite:",
        "llm.default_pool: there is no pool \"default\": there is x",
    ] {
        assert_one(&problems, beginning);
    }
    assert_eq!(problems.len(), 13, "{problems:#?}");
}

#[test]
fn pools_in_force() {
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
fn what_is_printed_is_toml_that_gives_the_same_settings() {
    let world = with_key("api_key = 'x'").environment(&[
        ("PRECIS__CONSOLIDATION__PROMPTS__META_USER", "a \"b\" # c\n\u{7f}é"),
        ("PRECIS__LLM__MODELS__A B__PROVIDER", "extractive"),
        ("PRECIS__LLM__MODELS__A B__MODEL", "x"),
    ]);
    let loaded = world.load();
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
fn a_file_that_is_named_must_exist() {
    let mut world = file("[server]\nbind = 'x'");
    world.sources.file = Some(world.directory.path().join("other.toml"));
    let world =
        world.environment(&[("PRECIS__CONSOLIDATION__MODE", "on"), ("PRECIS__LLM__DEFAULT_POOL", "a")]);
    let problems = world.problems();
    assert_one(&problems, "other.toml: cannot read this file");
    assert_one(&problems, "consolidation.mode (environment PRECIS__CONSOLIDATION__MODE): unknown value");
    assert_eq!(problems.len(), 2, "the pool may be in that file: {problems:#?}");
    std::fs::write(world.sources.file.as_ref().unwrap(), "[server]\nbind = '127.0.0.1:1'").unwrap();
    std::fs::write(world.sources.default_file.as_ref().unwrap(), "broken").unwrap();
    assert_eq!(world.problems().len(), 2, "read instead of precis.toml");
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
        "llm.models.small.provider (precis.toml): there is no provider \"opnai\": did you mean \"openai\"?",
        "llm.models.small.model: missing",
        "llm.models.big.provider: missing: set it to one of extractive, openai",
        "llm.pools.default.models (precis.toml): there is no model \"smal\": did you mean \"small\"?",
        "llm.pools.default.models (precis.toml): there is no model \"none\"",
        "llm.pools.empty.models (precis.toml): has no model",
    ] {
        assert_one(&problems, beginning);
    }
    assert_eq!(problems.len(), 8, "{problems:#?}");
}
