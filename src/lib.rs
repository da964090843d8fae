//! precis: a memory for LLM agents that fits their context window.
//!
//! ```text
//! domain  <-  storage, llm  <-  service  <-  http  <-  app (main)
//! ```
//!
//! - [`domain`]: types and rules, without I/O, clock or randomness: when consolidation is due, where a cut is safe,
//!   how a context is assembled.
//! - [`storage`]: the store, as small traits; Postgres and SQLite behind them. All SQL is here.
//! - [`llm`]: language models: pools, providers, prompts and the response check.
//! - [`service`]: the memory service, over any store and any models.
//! - [`http`]: the interface. Its route table shows it on one screen.
//! - [`blocking`]: for work that takes the processor for long; whoever needs it may name it.
//! - [`app`]: where the parts are put together. [`config`] has every setting, [`telemetry`] the log.

pub mod app;
pub mod blocking;
pub mod config;
pub mod domain;
pub mod http;
pub mod llm;
pub mod service;
pub mod storage;
pub mod telemetry;
