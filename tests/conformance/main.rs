//! Tests every method of the store on both databases, so that the databases behave the same.
//!
//! There is a file for each group of methods of `Store`, and one for idempotency keys. [`schema`] tests migrations and
//! connections, [`tenants`] the isolation of tenants, [`postgres_waits`] concurrent writers and [`postgres_plans`] large tables
//! on Postgres. A new method needs tests here and a line in [`tenants`]. A new table is covered by the erasure tests, which
//! read the catalogue, unless it is listed in [`sql::TABLES_OF_TENANTS`].
#![cfg(test)]
#![expect(clippy::cast_possible_wrap, reason = "lengths, compared with `seq`: none is near the border")]

mod api_keys;
mod connections;
mod consolidation_records;
mod consolidations;
mod conversation;
mod erasure;
mod exchanges;
mod exports;
mod forks;
mod idempotency;
mod memory;
mod messages;
mod plans_at_scale;
mod postgres_plans;
mod postgres_waits;
mod redactions;
mod retention;
mod revisions;
mod schema;
mod search;
mod search_index;
mod session_users;
mod sessions;
mod snapshots;
mod sql;
mod tenants;
mod token_usage;
mod usage;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    pub(crate) mod factor;
    pub(crate) mod postgres;
    pub(crate) mod store_calls;
}
