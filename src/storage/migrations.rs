//! The schema, as part of the binary.
//!
//! Until the first release, each database has one migration, which is changed in place. After it, a change of the schema is a
//! file in the folder of one or both databases and a line in its list.

use super::StoreError;
use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use std::borrow::Cow;

/// Number, name and SQL of a migration.
type Source = (i64, &'static str, &'static str);

const POSTGRES: &[Source] = &[(1, "initial", include_str!("../../migrations/postgres/0001_initial.sql"))];
const SQLITE: &[Source] = &[(1, "initial", include_str!("../../migrations/sqlite/0001_initial.sql"))];

/// The objects of the schema, a line each. A test compares them with a migrated database.
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
        "('sessions', 'messages', 'revisions', 'consolidation_records', 'idempotency_keys', 'memories', 'memory_revisions',
          'token_usage', 'retention_rules', 'api_keys', 'tenants', 'worker_leases', 'search_terms', 'search_analyzer')"
    };
}
pub(super) use first_tables;

pub(super) fn postgres() -> Migrator {
    migrator(POSTGRES)
}

pub(super) fn sqlite() -> Migrator {
    migrator(SQLITE)
}

/// Returns an error if the schema, at the migration `found`, is not the one of this release.
pub(super) fn check_version(found: i64, migrator: &Migrator) -> Result<(), StoreError> {
    let expected = latest_version(migrator);
    if found == expected { Ok(()) } else { Err(StoreError::SchemaVersion { found, expected }) }
}

/// Returns an error if a newer release has migrated the database.
pub(super) fn check_not_newer(found: i64, migrator: &Migrator) -> Result<(), StoreError> {
    let expected = latest_version(migrator);
    if found <= expected { Ok(()) } else { Err(StoreError::SchemaVersion { found, expected }) }
}

/// Selects the last migration.
pub(super) const SELECT_SCHEMA_VERSION: &str =
    "SELECT coalesce(max(version), 0) AS version FROM _sqlx_migrations WHERE success";

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
