//! Contexts and consolidation through the interface, on both stores, with a model that does what the test says.
//!
//! One file for each promise of point 3 of the contract. What the tests give and what they check in every answer is
//! in `harness`.
#![cfg(test)]

#[path = "../support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}

mod borders;
mod chunks;
mod failures;
mod fallback;
mod harness;
mod hostile;
mod leases;
mod memory;
mod metrics;
mod modes;
mod queue;
mod saving;
mod sawtooth;
mod shutdown;
mod spending;
mod too_long;
