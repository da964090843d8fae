//! The migrations, as part of the binary, and the rule by which a release works with the schema of a newer one.
//!
//! To add a migration, add a file to the folder of one or both databases and a line to its list. The file inserts a row into
//! `schema_compatibility`, so that replicas of the previous release can continue while and after it is applied.

use super::StoreError;
use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use std::borrow::Cow;

/// Number, name and SQL of a migration.
type Source = (i64, &'static str, &'static str);

const POSTGRES: &[Source] = &[
    (1, "initial", include_str!("../../migrations/postgres/0001_initial.sql")),
    (2, "batches", include_str!("../../migrations/postgres/0002_batches.sql")),
    (3, "bounded reads", include_str!("../../migrations/postgres/0003_bounded_reads.sql")),
    (4, "message times", include_str!("../../migrations/postgres/0004_message_times.sql")),
    (5, "session users", include_str!("../../migrations/postgres/0005_session_users.sql")),
    (6, "forks", include_str!("../../migrations/postgres/0006_forks.sql")),
    (7, "retention", include_str!("../../migrations/postgres/0007_retention.sql")),
    (8, "redaction", include_str!("../../migrations/postgres/0008_redaction.sql")),
    (9, "stored bytes", include_str!("../../migrations/postgres/0009_stored_bytes.sql")),
    (10, "search windows", include_str!("../../migrations/postgres/0010_search_windows.sql")),
    (11, "forks of a session", include_str!("../../migrations/postgres/0011_forks_of_a_session.sql")),
    (12, "search wide windows", include_str!("../../migrations/postgres/0012_search_wide_windows.sql")),
    (13, "session index", include_str!("../../migrations/postgres/0013_session_index.sql")),
    (15, "memory authors", include_str!("../../migrations/postgres/0015_memory_authors.sql")),
    (17, "schema compatibility", include_str!("../../migrations/postgres/0017_schema_compatibility.sql")),
    (18, "index messages", include_str!("../../migrations/postgres/0018_index_messages.sql")),
    (19, "consolidation records", include_str!("../../migrations/postgres/0019_consolidation_records.sql")),
    (21, "search pending list", include_str!("../../migrations/postgres/0021_search_pending_list.sql")),
    (
        22,
        "search adaptive windows",
        include_str!("../../migrations/postgres/0022_search_adaptive_windows.sql"),
    ),
    (23, "search segments", include_str!("../../migrations/postgres/0023_search_segments.sql")),
    (24, "search removals", include_str!("../../migrations/postgres/0024_search_removals.sql")),
    (25, "search terms", include_str!("../../migrations/postgres/0025_search_terms.sql")),
    (26, "windows", include_str!("../../migrations/postgres/0026_windows.sql")),
];

const SQLITE: &[Source] = &[
    (1, "initial", include_str!("../../migrations/sqlite/0001_initial.sql")),
    (2, "batches", include_str!("../../migrations/sqlite/0002_batches.sql")),
    (3, "bounded reads", include_str!("../../migrations/sqlite/0003_bounded_reads.sql")),
    (4, "session users", include_str!("../../migrations/sqlite/0004_session_users.sql")),
    (6, "forks", include_str!("../../migrations/sqlite/0006_forks.sql")),
    (7, "retention", include_str!("../../migrations/sqlite/0007_retention.sql")),
    (8, "redaction", include_str!("../../migrations/sqlite/0008_redaction.sql")),
    (9, "stored bytes", include_str!("../../migrations/sqlite/0009_stored_bytes.sql")),
    (10, "search windows", include_str!("../../migrations/sqlite/0010_search_windows.sql")),
    (11, "forks of a session", include_str!("../../migrations/sqlite/0011_forks_of_a_session.sql")),
    (13, "session index", include_str!("../../migrations/sqlite/0013_session_index.sql")),
    (14, "import reservations", include_str!("../../migrations/sqlite/0014_import_reservations.sql")),
    (15, "memory authors", include_str!("../../migrations/sqlite/0015_memory_authors.sql")),
    (16, "message keys", include_str!("../../migrations/sqlite/0016_message_keys.sql")),
    (17, "schema compatibility", include_str!("../../migrations/sqlite/0017_schema_compatibility.sql")),
    (19, "consolidation records", include_str!("../../migrations/sqlite/0019_consolidation_records.sql")),
    (20, "search prefixes", include_str!("../../migrations/sqlite/0020_search_prefixes.sql")),
    (23, "search segments", include_str!("../../migrations/sqlite/0023_search_segments.sql")),
    (25, "search terms", include_str!("../../migrations/sqlite/0025_search_terms.sql")),
    (26, "windows", include_str!("../../migrations/sqlite/0026_windows.sql")),
];

/// The objects of the newest schema, a line each. A test compares them with a migrated database.
pub(super) const POSTGRES_OBJECTS: &str = include_str!("../../migrations/postgres/objects.txt");
pub(super) const SQLITE_OBJECTS: &str = include_str!("../../migrations/sqlite/objects.txt");

/// Returns a line of `expected` that is not in `found`: a table if one is missing, and an index only if nothing else is.
pub(super) fn missing_object(expected: &str, found: &[String]) -> Option<String> {
    let missing = expected.lines().filter(|object| !found.iter().any(|found| found == object));
    missing
        .min_by_key(|object| (object.starts_with("index "), !object.starts_with("table ")))
        .map(str::to_owned)
}

/// Lists the tables of the first migration, as SQL.
macro_rules! first_tables {
    () => {
        "('sessions', 'messages', 'revisions', 'idempotency_keys', 'memories', 'memory_revisions', 'token_usage', 'api_keys',
          'search', 'search_pending', 'search_reindex', 'search_analyzer')"
    };
}
pub(super) use first_tables;

pub(super) fn postgres() -> Migrator {
    migrator(POSTGRES)
}

pub(super) fn sqlite() -> Migrator {
    migrator(SQLITE)
}

/// The last migration of a database and the last one of this release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchemaVersions {
    /// 0 if there is no schema.
    pub found: i64,
    pub expected: i64,
}

impl SchemaVersions {
    /// Returns `true` if a newer release has migrated the database.
    #[must_use]
    pub fn is_newer(self) -> bool {
        self.found > self.expected
    }

    /// Returns an error if this release does not work with the schema. `oldest` is the last migration of the oldest release that
    /// works with it.
    pub(super) fn check(self, oldest: i64) -> Result<Self, StoreError> {
        let Self { found, expected } = self;
        let works = found == expected || (self.is_newer() && oldest <= expected);
        if works { Ok(self) } else { Err(StoreError::SchemaVersion { found, expected }) }
    }
}

/// Selects the last migration, and the last migration of the oldest release that works with those after `$1`. A migration that
/// declares no such release works with none.
pub(super) const SELECT_SCHEMA_VERSION: &str = "\
    SELECT coalesce(max(m.version), 0) AS version,
        coalesce(max(CASE WHEN m.version > $1 THEN coalesce(c.oldest_version, m.version) END), 0) AS oldest_version
    FROM _sqlx_migrations AS m LEFT JOIN schema_compatibility AS c ON c.version = m.version WHERE m.success";

/// [`SELECT_SCHEMA_VERSION`] for a schema without the table `schema_compatibility`, which works with its own release only.
pub(super) const SELECT_EARLY_SCHEMA_VERSION: &str = "\
    SELECT coalesce(max(version), 0) AS version, coalesce(max(version), 0) AS oldest_version
    FROM _sqlx_migrations WHERE success";

/// Returns the number of the last migration.
pub(super) fn latest_version(migrator: &Migrator) -> i64 {
    migrator.iter().map(|migration| migration.version).max().unwrap_or(0)
}

fn migrator(sources: &[Source]) -> Migrator {
    let migrations = sources.iter().map(|&(version, name, sql)| {
        Migration::new(version, Cow::Borrowed(name), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator { migrations: migrations.collect(), ..Migrator::DEFAULT }
}
