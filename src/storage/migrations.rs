//! The migrations, as part of the binary.
//!
//! To add a migration, add a file to the folder of one or both databases and a line to its list.

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
];

pub(super) fn postgres() -> Migrator {
    migrator(POSTGRES)
}

pub(super) fn sqlite() -> Migrator {
    migrator(SQLITE)
}

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
