//! Every method of the store, on both stores: one suite, so that they can't drift apart.
//!
//! Each trait of `src/storage` has a file of its name here; [`schema`] is about the store as a whole, [`tenants`] about
//! the border between tenants, [`plans`] about what Postgres does at size. A new trait needs a file here and a line in
//! [`tenants`]; a new table is covered by the erasure tests as it is, for they read the catalogue.
#![cfg(test)]

mod consolidations;
mod conversation;
mod exchanges;
mod idempotency;
mod memory;
mod messages;
mod plans;
mod recall;
mod revisions;
mod schema;
mod sessions;
mod sql;
mod tenants;
mod users;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    pub(crate) mod postgres;
}
