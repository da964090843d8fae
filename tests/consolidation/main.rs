//! Contexts and consolidation over HTTP, on both stores, with a scripted model.
//!
//! Each file tests one guarantee. Fixtures and the checks of every response are in `harness`.
#![cfg(test)]

#[path = "../support"]
mod support {
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod lists;
    #[cfg(target_os = "linux")]
    pub(crate) mod memory;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}

#[cfg(target_os = "linux")]
#[expect(dead_code, reason = "the process tests use the rest of it")]
#[path = "../process/service.rs"]
mod process;

mod batches;
mod commit_failures;
mod compression;
mod extracts;
mod failures;
mod harness;
mod hostile;
mod input_limit;
mod leases;
mod memory_usage;
mod metrics;
mod modes;
mod preview;
mod queue;
mod records;
mod shutdown;
mod tail_growth;
mod thresholds;
mod times;
mod token_budget;
mod windows;
