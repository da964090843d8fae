//! The migrations, as part of the binary. A new one is a file of the same name in both folders and a line here.

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use std::borrow::Cow;

macro_rules! migrations {
    ($store:literal) => {
        [
            (1, "initial", include_str!(concat!("../../migrations/", $store, "/0001_initial.sql"))),
            (2, "token_usage", include_str!(concat!("../../migrations/", $store, "/0002_token_usage.sql"))),
            (3, "api_keys", include_str!(concat!("../../migrations/", $store, "/0003_api_keys.sql"))),
            (
                5,
                "row_level_security",
                include_str!(concat!("../../migrations/", $store, "/0005_row_level_security.sql")),
            ),
            (6, "search", include_str!(concat!("../../migrations/", $store, "/0006_search.sql"))),
            (
                7,
                "settle_search",
                include_str!(concat!("../../migrations/", $store, "/0007_settle_search.sql")),
            ),
            (
                8,
                "search_waiting",
                include_str!(concat!("../../migrations/", $store, "/0008_search_waiting.sql")),
            ),
        ]
    };
}

/// Those of Postgres.
pub(super) fn postgres() -> Migrator {
    migrator(migrations!("postgres"))
}

/// Those of SQLite.
pub(super) fn sqlite() -> Migrator {
    migrator(migrations!("sqlite"))
}

/// The newest migration of this version.
pub(super) fn newest(migrator: &Migrator) -> i64 {
    migrator.iter().map(|migration| migration.version).max().unwrap_or(0)
}

fn migrator<const N: usize>(files: [(i64, &'static str, &'static str); N]) -> Migrator {
    let migrations = files.map(|(version, name, sql)| {
        Migration::new(version, Cow::Borrowed(name), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator { migrations: Cow::Owned(migrations.to_vec()), ..Migrator::DEFAULT }
}
