//! The built-in summariser.

use crate::domain::transcript::Entry;

/// Stand-in.
#[must_use]
pub fn consolidate(entries: &[Entry], sentences: usize) -> String {
    let texts: Vec<&str> = entries.iter().map(|entry| entry.text.as_str()).take(sentences).collect();
    texts.join(" ")
}

/// Stand-in.
#[must_use]
pub fn compress(summary: &str, sentences: usize) -> String {
    summary.split_inclusive(". ").take(sentences).collect()
}
