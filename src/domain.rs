//! Types and rules: plain functions over plain data, without I/O, clock or randomness.
//!
//! | question | file |
//! | --- | --- |
//! | when is consolidation due, what is asked for, how long to wait after a failure | [`consolidation`] |
//! | where may a conversation be cut | [`split_points`] |
//! | what does the model get to see | [`context`] |
//! | what is said of skills in it | [`skill`] |
//! | what covers which messages | [`coverage`] |
//! | what fits a budget of tokens | [`budget`] |
//! | what is sent in which format | [`format`] |
//! | which messages does a search find, in which order | [`search`] |
//! | what are the agent's tools, and what may a model ask of them | [`tool`] |
//! | the export format of a session | [`export_format`] |
//! | how large may a message be | [`limits`] |

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
