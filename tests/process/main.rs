//! The binary itself, as processes: what its command line says and prints, how it starts, what it logs, how it ends,
//! and what several of them do over one database.
//!
//! How a process is started, watched and ended is in `service`. A test waits for what it is about, a line of the log
//! or a state, and never just for time to pass.
#![cfg(test)]

mod check;
mod first_run;
mod keys;
mod logs;
mod models;
mod replicas;
mod search;
mod service;
mod settings;
mod shutdown;
mod start;
mod transfer;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}
