//! **Nothing lost, nothing doubled**: the real binary under load, killed, cut off and restarted at random.
//!
//! Writers and readers work against three processes over one Postgres, or one over SQLite, while processes are killed by
//! SIGKILL, Postgres is stopped at once and started again, and a proxy in between cuts, delays, holds and loses what goes
//! through it. After each fault, and at the end of all: every acknowledged exchange is there, once, in order, whole; one
//! that was not acknowledged is there whole or not at all, and repeated with its key it is there once; revisions cover
//! disjoint ranges without a hole; a summary names exactly the messages up to its cursor; no context has a hole.
//!
//! The suite has the short form. The long one:
//!
//! ```sh
//! PRECIS_CRASH_KILLS=200 cargo test --test crash nothing_is_lost -- --nocapture
//! ```
//!
//! It prints its seed, and `PRECIS_CRASH_SEED` repeats the choices of a run; `PRECIS_CRASH_BINARY` names another binary to
//! run, such as a release. To add a fault: a line in `chaos`, or a new
//! kind of `Weather` in `proxy`. One fault at a time, and what is to be seen of it from outside, is in `faults`.
#![cfg(test)]

mod chance;
mod chaos;
mod check;
mod cluster;
mod faults;
mod ledger;
mod load;
mod names;
mod power;
mod proxy;
mod replica;

#[expect(dead_code, reason = "the tests of processes use the rest of it")]
#[path = "../process/service.rs"]
mod service;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_on_postgres() {
    chaos::postgres().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_on_sqlite() {
    chaos::sqlite().await;
}
