//! Attacks of one tenant on the memory of the process and on the share of other tenants, with the real binary.
//!
//! Each test prints its figures: `scripts/test --test abuse -- --ignored --nocapture`. Without `PRECIS_TEST_FACTOR`, the assertions are
//! about memory and served requests and not about time, because machines that run tests are busy. The attacks measure, so they are a
//! step of `.ci/run` and not part of `scripts/test`. `scripts/abuse` runs the random requests of 64 clients for minutes.
#![cfg(test)]

mod imports;
mod memory;
mod models;
mod random;
mod service;
mod shares;
mod sharing;
mod tokens;

#[expect(dead_code, reason = "the process tests use the rest of it")]
#[path = "../process/service.rs"]
mod process;

#[path = "../support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod keys;
    pub(crate) mod memory;
    pub(crate) mod postgres;
}
