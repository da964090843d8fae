//! The service as its clients meet it: real requests over real sockets, through the router that `src/http.rs` draws.
//!
//! Each module has the name of its file in `src/http/routes/` or `src/http/middleware/`. What touches the store runs on both; what is the protocol's
//! alone runs on SQLite. Every answer comes in through [`answer`], which refuses an error that is no problem document.
#![cfg(test)]

mod admission;
mod answer;
mod archives;
mod bodies;
mod consolidations;
mod contexts;
mod errors;
mod exchanges;
mod ids;
mod isolation;
mod keys;
mod limits;
mod mcp;
mod memory;
mod messages;
mod meters;
mod openapi;
mod operation;
mod responses;
mod revisions;
mod search;
mod security;
mod server;
mod sessions;
mod skills;
mod tools;
mod users;

#[path = "../support"]
mod support {
    pub(crate) mod app;
    pub(crate) mod backend;
    pub(crate) mod keys;
    pub(crate) mod lists;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}
