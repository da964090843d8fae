//! The pool against model servers that misbehave, in both protocols: which model's answer counts, what becomes of the
//! others, and how long it all takes at most.
#![cfg(test)]

#[path = "../support/model_server.rs"]
mod model_server;

mod answers;
mod breaker;
mod deadline;
mod faults;
mod harness;
mod limits;
mod queue;
mod random;
mod retries;
mod secrets;
