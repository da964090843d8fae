//! Search: what a query asks for, what of a message is searched, which of the messages found comes first.
//!
//! | question | file |
//! | --- | --- |
//! | which terms has a text | [`analyzer`] |
//! | what of a message is searched | [`text`] |
//! | what does a query mean | [`query`] |
//! | how are terms kept in the index | [`lexemes`] |
//! | which message is the better hit | [`rank`] |
//! | what of it is shown | [`snippet`] |
//!
//! The stores only draw candidates, by the terms of [`lexemes`]; what they draw is read and scored here, so that both give
//! the same hits in the same order. A change to what terms a text has needs another [`analyzer::Analyzer::version`].

pub mod analyzer;
pub mod lexemes;
pub mod query;
pub mod rank;
pub mod snippet;
pub mod text;
