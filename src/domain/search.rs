//! Full-text search: analysis of texts and queries, ranking, and snippets.
//!
//! | file | contents |
//! | --- | --- |
//! | [`analyzer`] | splits a text into terms |
//! | [`language`] | detects the language of a text |
//! | [`text`] | extracts the searchable text of a message |
//! | [`query`] | parses the query language |
//! | [`index_terms`] | lists the terms of a message in the index, and writes queries for them |
//! | [`matcher`] | finds the words of a query in texts |
//! | [`rank`] | scores and sorts candidates |
//! | [`snippet`] | cuts the excerpt of a hit and marks its matches |
//!
//! The stores only return candidates from their index. Candidates are parsed and scored here, so that both
//! stores return the same hits in the same order. A change of the terms that a text produces requires a new
//! [`analyzer::Analyzer::version`].

use super::id::SessionId;

pub mod analyzer;
pub mod index_terms;
pub mod language;
pub mod matcher;
pub mod query;
pub mod rank;
pub mod snippet;
pub mod text;

/// The position of a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageRef {
    pub session: SessionId,
    pub seq: i64,
}
