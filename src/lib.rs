//! precis: a memory for LLM agents that fits their context window.
//!
//! ```text
//! domain  <-  storage, llm  <-  engine  <-  http  <-  app (main)
//! ```
//!
//! - [`domain`]: types and rules, without I/O, clock or randomness: when consolidation is due, where a cut is safe,
//!   how a context is assembled.
//! - [`llm`]: the talk with models: pools, providers, prompts, the gate.

pub mod config;
pub mod domain;
pub mod engine;
pub mod http;
pub mod llm;
pub mod storage;
