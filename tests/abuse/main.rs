//! Attacks of one tenant on the memory of the process and on the share of other tenants, with the real binary.
//!
//! Each test prints its figures: `cargo test --test abuse -- --nocapture`. Assertions have margins, because machines that run
//! tests are busy. `scripts/abuse` runs random requests of 64 clients for minutes.
#![cfg(test)]

mod imports;
mod memory;
mod models;
mod random;
mod service;
mod sharing;

#[expect(dead_code, reason = "the process tests use the rest of it")]
#[path = "../process/service.rs"]
mod process;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod keys;
    pub(crate) mod memory;
    pub(crate) mod postgres;
}
