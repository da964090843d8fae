//! The handlers, one file per resource.

pub(super) mod consolidations;
pub(super) mod contexts;
pub(super) mod exchanges;
pub(super) mod exports;
pub(super) mod forks;
pub(super) mod health;
pub(super) mod mcp;
pub(super) mod memory;
pub(super) mod messages;
pub(super) mod models;
pub(super) mod proxy;
pub(super) mod redactions;
pub(super) mod retention;
pub(super) mod revisions;
pub(super) mod search;
pub(super) mod sessions;
pub(super) mod skills;
pub(super) mod sources;
pub(super) mod sync;
pub(super) mod tools;
pub(super) mod usage;
pub(super) mod users;
