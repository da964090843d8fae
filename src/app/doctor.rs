//! `precis doctor`: examines machine, database and models, and says what prevents the service from working and what to do.
//!
//! It creates no database and leaves the schema as it is.

use super::{check_models, store_options};
use crate::config::Settings;
use crate::domain::error_chain::ErrorChain;
use crate::llm::http::build_http_client;
use crate::proxy::Proxy;
use crate::storage::{self, IndexState, Store, StoreError};
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use time::OffsetDateTime;
use time::macros::datetime;
use tokio::net::TcpListener;

/// The clock of the machine is wrong if it is before this time.
const BUILT_AFTER: OffsetDateTime = datetime!(2026-01-01 0:00 UTC);
/// Largest harmless difference between the clocks of this machine and of the database.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_mins(1);
/// Free space below which a disk is reported.
const MIN_FREE_BYTES: u64 = 256 * 1024 * 1024;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Good,
    /// The service works, but perhaps not as intended.
    Warning,
    /// The service does not work, or not completely.
    Problem,
}

/// A result of the examination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    /// The part that was examined, in one word.
    pub part: &'static str,
    /// The state; for warnings and problems with the fix.
    pub text: String,
}

/// All results. Displayed as one line each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Examination(pub Vec<Finding>);

impl Examination {
    pub fn add(&mut self, severity: Severity, part: &'static str, text: impl Into<String>) {
        self.0.push(Finding { severity, part, text: text.into() });
    }

    #[must_use]
    pub fn has_problem(&self) -> bool {
        self.0.iter().any(|finding| finding.severity == Severity::Problem)
    }
}

impl fmt::Display for Examination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { severity, part, text } in &self.0 {
            let severity = match severity {
                Severity::Good => "ok",
                Severity::Warning => "warning",
                Severity::Problem => "PROBLEM",
            };
            writeln!(f, "{severity:<8} {part:<9} {text}")?;
        }
        Ok(())
    }
}

/// Examines everything that valid settings refer to.
pub async fn examine(settings: &Settings, examination: &mut Examination) {
    examine_clock(examination);
    examine_folder(examination, &std::env::temp_dir(), "set TMPDIR to a folder with room for imports");
    let any_key = examine_database(settings, examination).await;
    examine_address(settings, any_key, examination).await;
    examine_models(settings, examination).await;
    examine_upstreams(settings, examination).await;
}

fn examine_clock(examination: &mut Examination) {
    let now = OffsetDateTime::now_utc();
    if now < BUILT_AFTER {
        examination.add(Severity::Problem, "clock", format!("the clock of this machine says {now}: set it"));
    } else {
        examination.add(Severity::Good, "clock", format!("{now}"));
    }
}

/// Examines if files can be written to a folder, and its free space.
fn examine_folder(examination: &mut Examination, folder: &Path, fix: &str) {
    let name = folder.display();
    if let Err(error) = tempfile::tempfile_in(folder) {
        examination.add(Severity::Problem, "disk", format!("can't write to {name} ({error}): {fix}"));
        return;
    }
    let Ok(disk) = rustix::fs::statvfs(folder) else { return };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let mebibytes = free / (1024 * 1024);
    if free < MIN_FREE_BYTES {
        let text = format!("{name} has only {mebibytes} MiB of free space: free more on its disk");
        examination.add(Severity::Problem, "disk", text);
    } else {
        examination.add(Severity::Good, "disk", format!("{name} has {mebibytes} MiB of free space"));
    }
}

/// Examines the database. Returns `true` if it has an API key, or `None` if that is unknown.
async fn examine_database(settings: &Settings, examination: &mut Examination) -> Option<bool> {
    const PART: &str = "database";
    let url = &settings.database.url;
    if let Some(file) = storage::missing_file(url.expose()) {
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        if !folder.is_dir() {
            let text = format!("{url}: the folder {} does not exist: create it", folder.display());
            examination.add(Severity::Problem, PART, text);
            return None;
        }
        let text = format!("{} does not exist; the service creates it, empty", file.display());
        examination.add(Severity::Warning, PART, text);
        examine_folder(examination, &folder, "give this user write access");
        return Some(false);
    }
    let explain = |error: &StoreError| match storage::explain(url.expose(), error) {
        Some(explanation) => format!("{url}: {explanation}"),
        None => format!("{url}: {}", ErrorChain(error)),
    };
    let store = match storage::connect(url.expose(), &store_options(settings)).await {
        Ok(store) => store,
        Err(error) => {
            examination.add(Severity::Problem, PART, explain(&error));
            return None;
        }
    };
    let usable = store.examine().await.map_err(|error| explain(&error)).and_then(|facts| {
        if let Some(table) = &facts.foreign_table {
            return Err(format!(
                "{url} has tables of another program, such as {table}: name a database of its own for precis"
            ));
        }
        if let Some(table) = &facts.inaccessible_table {
            return Err(format!(
                "{url}: the role can't read or write the table {table}: grant it SELECT, INSERT, UPDATE, DELETE on all tables, as \
                 docs/operations.md describes"
            ));
        }
        Ok(facts)
    });
    let facts = match usable {
        Ok(facts) => facts,
        Err(problem) => {
            examination.add(Severity::Problem, PART, problem);
            store.close().await;
            return None;
        }
    };
    examination.add(Severity::Good, PART, format!("{url} can be used"));
    examine_facts(&facts, examination);
    let any_key = match store.check_ready().await {
        Ok(()) => {
            if examine_schema(&facts, examination) {
                let searched = examine_search(settings, &store, examination).await;
                let any_key = searched.and(store.any_api_key().await);
                any_key.inspect_err(|error| examination.add(Severity::Problem, PART, explain(error))).ok()
            } else {
                None
            }
        }
        Err(StoreError::SchemaVersion { found, expected }) if found < expected && !facts.can_migrate => {
            let text = format!(
                "at migration {found} of {expected}, and the role can't migrate it: run `precis migrate` as the owner of the \
                 tables, or grant this role CREATE on the schema of a new database"
            );
            examination.add(Severity::Problem, "schema", text);
            None
        }
        Err(StoreError::SchemaVersion { found, expected }) if found < expected => {
            let text = format!(
                "at migration {found} of {expected}: the service migrates it at its start, except with --no-migrate; \
                 or run `precis migrate`"
            );
            examination.add(Severity::Warning, "schema", text);
            None
        }
        Err(error) => {
            let part = if matches!(error, StoreError::SchemaVersion { .. }) { "schema" } else { PART };
            examination.add(Severity::Problem, part, explain(&error));
            None
        }
    };
    store.close().await;
    any_key
}

/// Examines the schema. Returns `false` if a table is missing, so that most other examinations would fail for the same reason.
fn examine_schema(facts: &storage::DatabaseFacts, examination: &mut Examination) -> bool {
    let (severity, text) = match &facts.missing_object {
        Some(index) if index.starts_with("index ") => (
            Severity::Warning,
            format!(
                "the {index} is missing, so statements are slow: repeat the last statement in the folder migrations of the \
                 source that creates it"
            ),
        ),
        Some(object) => (
            Severity::Problem,
            format!(
                "the {object} is missing: restore a backup, or repeat all statements in the folder migrations of the source \
                 that concern it, in the order of their numbers"
            ),
        ),
        None => (Severity::Good, "up to date".to_owned()),
    };
    examination.add(severity, "schema", text);
    !facts.missing_object.as_ref().is_some_and(|object| object.starts_with("table "))
}

/// Examines the search index.
async fn examine_search(
    settings: &Settings,
    store: &Store,
    examination: &mut Examination,
) -> Result<(), StoreError> {
    const PART: &str = "search";
    let Some(own) = settings.analyzer() else {
        examination.add(Severity::Good, PART, "search.enabled is false");
        return Ok(());
    };
    let version = own.version();
    match store.index_state(own).await? {
        IndexState::Complete => examination.add(Severity::Good, PART, format!("analyzer {version}")),
        IndexState::OtherAnalyzer(found) => {
            let text = format!(
                "the index has the analyzer {found}, and the settings say {version}: run `precis reindex`, or change \
                 search.language"
            );
            examination.add(Severity::Warning, PART, text);
        }
        IndexState::Incomplete => {
            let text = "the index may lack messages, because the service has run without search: run `precis reindex`";
            examination.add(Severity::Warning, PART, text);
        }
    }
    Ok(())
}

fn examine_facts(facts: &storage::DatabaseFacts, examination: &mut Examination) {
    if facts.bypasses_row_security {
        let text = "the role is a superuser or has BYPASSRLS, so row-level security does not separate tenants: create a \
                    role for precis";
        examination.add(Severity::Problem, "role", text);
    }
    if let Some(table) = &facts.unprotected_table {
        let text = format!(
            "row-level security of the table {table} is disabled or does not apply to its owner, so it does not separate \
             tenants: run `ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY`"
        );
        examination.add(Severity::Problem, "database", text);
    }
    if facts.is_public_file {
        let text = "other users of this machine can read the file: run `chmod 600` on it";
        examination.add(Severity::Warning, "database", text);
    }
    let difference = (facts.time - OffsetDateTime::now_utc()).unsigned_abs();
    if difference > MAX_CLOCK_DIFFERENCE {
        let text =
            format!("the clocks of this machine and of the database differ by {difference:.0?}: set them");
        examination.add(Severity::Warning, "clock", text);
    }
}

/// Examines if the service can listen, or already does, and if other machines need a key.
async fn examine_address(settings: &Settings, any_key: Option<bool>, examination: &mut Examination) {
    const PART: &str = "address";
    let server = &settings.server;
    let bind = server.bind;
    match TcpListener::bind(bind).await {
        Ok(_) => examination.add(Severity::Good, PART, format!("{bind} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match ask_service(settings).await {
            Some(status) if status.is_success() => {
                examination.add(Severity::Good, PART, format!("a service on {bind} is ready"));
            }
            Some(status) => {
                let text = format!("a program on {bind} answers {status} to GET /readyz: look at its log");
                examination.add(Severity::Problem, PART, text);
            }
            None => {
                let text = format!(
                    "another program uses {bind} (server.bind): stop it, or choose another address with --bind"
                );
                examination.add(Severity::Problem, PART, text);
            }
        },
        Err(error) => {
            let text =
                format!("can't listen on {bind} (server.bind): {error}; choose another address with --bind");
            examination.add(Severity::Problem, PART, text);
        }
    }
    let is_open = server.allow_unauthenticated || bind.ip().to_canonical().is_loopback();
    if !is_open && any_key == Some(false) {
        let text = "other machines can reach the service, and there is no API key: create one with `precis keys create \
                    --tenant NAME`";
        examination.add(Severity::Problem, "keys", text);
    }
}

/// Returns the status of the program that listens on `server.bind`, if it speaks HTTP.
async fn ask_service(settings: &Settings) -> Option<reqwest::StatusCode> {
    let mut address = settings.server.bind;
    if address.ip().is_unspecified() {
        address.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    let client = build_http_client(Duration::from_secs(1)).ok()?;
    let request = client.get(format!("http://{address}/readyz")).timeout(Duration::from_secs(3));
    Some(request.send().await.ok()?.status())
}

/// Calls every model once.
async fn examine_models(settings: &Settings, examination: &mut Examination) {
    const PART: &str = "models";
    if settings.uses_only_extractive() {
        let text = "summaries are made by the built-in summariser; a real model writes better ones: set one in [llm]";
        examination.add(Severity::Good, PART, text);
    }
    match check_models(settings).await {
        Ok(report) => {
            for (model, result) in report.results() {
                match result {
                    Ok(()) => examination.add(Severity::Good, PART, format!("{model} works")),
                    Err(problem) => examination.add(Severity::Problem, PART, format!("{model}: {problem}")),
                }
            }
        }
        Err(error) => examination.add(Severity::Problem, PART, error.to_string()),
    }
}

/// Calls every upstream of the proxy once.
async fn examine_upstreams(settings: &Settings, examination: &mut Examination) {
    const PART: &str = "proxy";
    match Proxy::new(settings) {
        Ok(proxy) => {
            for (upstream, result) in proxy.check().await {
                match result {
                    Ok(text) => examination.add(Severity::Good, PART, format!("{upstream} {text}")),
                    Err(problem) => {
                        examination.add(Severity::Problem, PART, format!("{upstream}: {problem}"));
                    }
                }
            }
        }
        Err(error) => examination.add(Severity::Problem, PART, error),
    }
}
