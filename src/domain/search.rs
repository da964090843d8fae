//! Full-text search: analysis of texts and queries, ranking, and snippets.
//!
//! | file | contents |
//! | --- | --- |
//! | [`analyzer`] | splits a text into terms |
//! | [`text`] | extracts the searchable text of a message |
//! | [`query`] | parses the query language |
//! | [`index_terms`] | lists the terms of a message in the index |
//! | [`recent`] | encodes the terms of messages that are in no segment yet |
//! | [`segment`] | encodes the index, as pages that a store keeps |
//! | [`index_query`] | combines the messages with each term of a query |
//! | [`matcher`] | finds the words of a query in texts |
//! | [`rank`] | scores and sorts candidates |
//! | [`snippet`] | cuts the excerpt of a hit and marks its matches |
//!
//! The stores only return candidates from a [`segment`]. Candidates are parsed and scored here, so that both
//! stores return the same hits in the same order. A change of the terms that a text produces requires a new
//! [`analyzer::Analyzer::version`].

use super::id::SessionId;

pub mod analyzer;
pub mod index_query;
pub mod index_terms;
pub mod matcher;
pub mod query;
pub mod rank;
pub mod recent;
pub mod segment;
pub mod snippet;
pub mod text;

/// The position of a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageRef {
    pub session: SessionId,
    pub seq: i64,
}
