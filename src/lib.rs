//! precis: a memory for LLM agents that fits their context window.
//!
//! ```text
//! domain  <-  storage, llm  <-  service  <-  proxy  <-  http  <-  app  <-  cli (main)
//! ```
//!
//! - [`domain`]: types and rules without I/O, clock or randomness: when consolidation is due, where the history can be
//!   split, how a context is assembled.
//! - [`storage`]: the store trait and its implementations for Postgres and SQLite. All SQL is here.
//! - [`llm`]: pools of models, providers, prompts, and the validation of responses.
//! - [`service`]: the memory service, for any store and any models.
//! - [`proxy`]: requests of applications to model providers, which get a memory on the way.
//! - [`http`]: the HTTP API. Its router shows all routes on one screen.
//! - [`app`]: the composition root. [`config`] defines the settings, [`telemetry`] the log and the metrics.
//!   [`trace_context`]: spans, and the context of traces in headers.
//! - [`cli`]: the command line.
//! - [`blocking`]: runs long computations outside the async runtime. `storage`, `service` and `http` use it.
//! - [`capacity`]: the share of a key in everything that can run out.

// Files that unit tests share with integration tests name the crate by its name.
#[cfg(test)]
extern crate self as precis;

pub mod app;
pub mod blocking;
pub mod capacity;
pub mod cli;
pub mod config;
pub mod domain;
pub mod http;
pub mod llm;
pub mod proxy;
pub mod service;
pub mod storage;
pub mod telemetry;
pub mod trace_context;
