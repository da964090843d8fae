//! Crash tests: the real binary under load while faults occur. No exchange may be lost or duplicated.
//!
//! Half of the sessions are written by exchanges, the others by complete lists (sync).
//!
//! `random_faults` runs writers and readers against three processes on Postgres, and against one process on SQLite.
//! Processes are killed by SIGKILL, Postgres is stopped and started, and a proxy between them cuts, delays and drops
//! connections. After each fault and at the end, these invariants are checked:
//!
//! - Every acknowledged exchange is stored once, complete, and in order.
//! - Every other exchange is stored completely or not at all. After a retry, with its key or as part of a list, it is stored once.
//! - Revisions cover consecutive ranges, and a summary names exactly the messages up to its cursor.
//! - No context has a gap.
//! - A redacted message, and a session that was erased by a request or by retention, never reappears; nothing else disappears.
//!
//! `single_faults` causes one fault at a time and checks the responses of the service. `proxied_turns` does the same to the proxy of
//! model providers.
//!
//! The suite runs a short form. The long form:
//!
//! ```sh
//! PRECIS_TEST_FACTOR=25 scripts/test --test crash random_faults -- --nocapture
//! ```
//!
//! It prints its seed. `PRECIS_CRASH_SEED` repeats the choices of a run, but not its timing. `PRECIS_CRASH_BINARY` names
//! another binary to run, for example a release build.
#![cfg(test)]

mod ack_log;
mod clients;
mod invariants;
mod message_ids;
mod postgres_server;
mod power_loss;
mod proxied_turns;
mod proxy;
mod random_faults;
mod redactions;
mod removals;
mod replica;
mod single_faults;

#[expect(dead_code, reason = "the process tests use the rest of it")]
#[path = "../process/service.rs"]
mod service;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_on_postgres_lose_and_duplicate_nothing() {
    random_faults::run_on_postgres().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_on_sqlite_lose_and_duplicate_nothing() {
    random_faults::run_on_sqlite().await;
}
