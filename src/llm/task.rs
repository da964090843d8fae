//! The tasks for models.

use crate::domain::transcript::TranscriptLine;
use std::time::Duration;

/// A task for a model.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Summarise a part of the conversation.
    Consolidate {
        /// The messages, oldest first.
        lines: &'a [TranscriptLine],
        /// Requested length of the summary.
        sentences: usize,
    },
    /// Compress a summary that has grown too long.
    MetaConsolidate {
        summary: &'a str,
        /// Requested length of the compressed summary.
        sentences: usize,
        /// The number of words that the built-in summariser uses, because a longer summary costs it nothing.
        max_words: usize,
    },
    /// Order search results by their relevance for a query. The response consists of their numbers, see [`order`](super::order).
    Rerank {
        query: &'a str,
        /// The results, numbered from 1.
        texts: &'a [String],
        /// Limits all attempts together, as the pool's deadline does.
        timeout: Duration,
    },
}
