//! Domain types and rules: plain functions over plain data, without I/O, clock or randomness.
//!
//! | rule | module |
//! | --- | --- |
//! | when consolidation is due, and when it is retried | [`consolidation`] |
//! | where a conversation can be split | [`split_points`] |
//! | how a transcript is divided among model calls | [`batching`] |
//! | what a summariser reads | [`transcript`] |
//! | the parts of the system message | [`context`] |
//! | reserved headings and their escaping | [`headings`] |
//! | skills in the system message | [`skill`] |
//! | which messages a context contains | [`coverage`] |
//! | what fits into a token budget | [`budget`] |
//! | how messages are rendered for a provider | [`format`](mod@format) |
//! | how search finds and ranks messages | [`search`] |
//! | the tools of the agent | [`tool`] |
//! | the export format of a session | [`export_format`] |
//! | size limits of stored values | [`limits`] |

pub mod api_key;
pub mod batching;
pub mod budget;
pub mod consolidation;
pub mod context;
pub mod coverage;
pub mod error_chain;
pub mod exchange;
pub mod export_format;
pub mod format;
pub mod headings;
pub mod id;
pub(crate) mod json;
pub(crate) mod json_validation;
pub mod limits;
pub mod memory;
pub mod message;
pub mod message_metadata;
pub mod revision;
pub mod search;
pub mod session;
pub mod skill;
pub mod split_points;
pub mod summary;
pub mod tokens;
pub mod tool;
pub mod transcript;
pub mod validation;
