//! Every method of the store, on both stores: one suite, so that they can't drift apart.
//!
//! Each trait of `src/storage` has a file of its name here, and idempotency keys have one of their own; [`schema`] is
//! about the store as a whole, [`tenants`] about the border between tenants, [`waits`] and [`plans`] about what only
//! Postgres does: let writers wait for each other, and be large. A new trait needs a file here and lines in
//! [`tenants`]; a new table is covered by the erasure tests as it is, for they read the catalogue, unless it is named in
//! [`sql::OF_TENANTS`].
#![cfg(test)]
#![expect(clippy::cast_possible_wrap, reason = "lengths, compared with `seq`: none is near the border")]

mod api_keys;
mod archives;
mod consolidations;
mod conversation;
mod erasure;
mod exchanges;
mod idempotency;
mod memory;
mod messages;
mod plans;
mod recall;
mod revisions;
mod schema;
mod search;
mod search_index;
mod sessions;
mod sql;
mod tenants;
mod token_usage;
mod users;
mod waits;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    pub(crate) mod postgres;
}
