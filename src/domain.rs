//! Types and rules: plain functions over plain data, without I/O, clock or randomness.

pub mod message;
pub mod transcript;
