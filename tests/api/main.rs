//! Tests of the HTTP API: real requests over real sockets to the router in `src/http.rs`.
//!
//! Most modules have the name of their file in `src/http/routes/` or `src/http/middleware/`. Tests that use the store run
//! on both databases, tests of the protocol only on SQLite. The client in `tests/support/client.rs` checks every response.
#![cfg(test)]

mod admission;
mod bodies;
mod consolidations;
mod contexts;
mod errors;
mod exchanges;
mod exports;
mod field_cases;
mod forks;
mod health;
mod ids;
mod isolation;
mod keys;
mod limits;
mod mcp;
mod memory;
mod messages;
mod metrics;
mod openapi;
mod origin_guard;
mod proxy;
mod redactions;
mod responses;
mod retention;
mod revisions;
mod search;
mod server;
mod sessions;
mod skills;
mod sync;
mod terminal;
mod tools;
mod ui;
mod users;

#[path = "../support"]
mod support {
    pub(crate) mod app;
    pub(crate) mod backend;
    pub(crate) mod client;
    pub(crate) mod factor;
    pub(crate) mod keys;
    pub(crate) mod lists;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}
