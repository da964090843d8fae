//! The tasks for models.

use crate::domain::consolidation::SummaryLimit;
use crate::domain::transcript::TranscriptLine;
use std::time::Duration;

/// A task for a model.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Summarise a part of the conversation.
    Consolidate {
        /// The messages, oldest first.
        lines: &'a [TranscriptLine],
        /// The summary of the messages before; empty if there is none. A model sees its end, to continue from.
        previous: &'a str,
        /// Requested length of the summary.
        sentences: usize,
        /// Largest length of a summary by the built-in summariser, because length costs it nothing.
        limit: SummaryLimit,
    },
    /// Compress a summary that has grown too long.
    MetaConsolidate {
        summary: &'a str,
        /// Requested length of the compressed summary.
        sentences: usize,
        /// Largest length of a compression by the built-in summariser.
        limit: SummaryLimit,
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
