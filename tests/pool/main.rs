//! HTTP providers against a scripted model server: how each behaviour of a server in each wire format becomes a response
//! or an error. The policies of pools have their tests in `src/llm/pool/tests`.
#![cfg(test)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "../support/model_server.rs"]
mod model_server;

mod faults;
mod harness;
mod responses;
mod secrets;
