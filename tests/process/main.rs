//! Tests of the binary as a process: command line, start, log, shutdown, and several processes with one database.
//!
//! The module `service` starts, observes and stops processes. Tests wait for a line of the log or a state, never for a
//! fixed time.
#![cfg(test)]

mod backup;
mod check;
mod doctor;
mod documented_commands;
mod first_run;
mod image;
mod keys;
mod large_copies;
mod large_erasures;
mod large_imports;
mod logs;
mod models;
mod replicas;
mod retention;
mod search;
mod service;
mod settings;
mod shutdown;
mod start;
mod traces;
mod transfer;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}
