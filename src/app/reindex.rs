//! `precis reindex`, and a warning at startup if it should be run.

use super::{AppError, store};
use crate::config::Settings;
use crate::domain::error_chain::ErrorChain;
use crate::domain::search::analyzer::Analyzer;
use crate::service::Error;
use crate::service::indexer::index_pending;
use crate::service::reindex;
use crate::storage::Store;
use indicatif::ProgressBar;
use std::sync::Arc;

/// The reason why `precis reindex` failed.
#[derive(Debug, thiserror::Error)]
pub enum ReindexError {
    #[error(transparent)]
    App(#[from] AppError),
    #[error("search.enabled is false: there is nothing to index for")]
    Disabled,
    /// Messages that were indexed before the failure stay indexed.
    #[error("the database failed; run `precis reindex` again to continue")]
    Failed(#[source] Error),
}

/// Indexes all messages that are missing from the index, with or without a running service. Returns the text of the result.
///
/// # Errors
/// Search is disabled, or the database failed.
pub async fn reindex(settings: &Settings) -> Result<String, ReindexError> {
    let analyzer = settings.analyzer().ok_or(ReindexError::Disabled)?;
    let store = store(settings, true).await?;
    let bar = ProgressBar::new_spinner();
    let result = reindex::reindex(&store, analyzer, |indexed| bar.set_position(indexed)).await;
    let indexed = result.map_err(ReindexError::Failed)?;
    bar.finish_and_clear();
    index_pending(&store, true).await;
    store.close().await;
    Ok(match indexed {
        0 => "nothing to do: all messages are indexed".to_owned(),
        1 => "indexed 1 message".to_owned(),
        indexed => format!("indexed {indexed} messages"),
    })
}

/// Logs a warning if the index does not cover all messages. Without an analyzer, marks the index as disabled.
pub(super) async fn warn_if_stale(store: &Arc<dyn Store>, analyzer: Option<Analyzer>) {
    let Some(analyzer) = analyzer else {
        if let Err(error) = store.disable_index().await {
            tracing::warn!(error = %ErrorChain(&error), "failed to mark the search index as disabled");
        }
        return;
    };
    match reindex::state(store, analyzer).await {
        Ok(state) if state.analyzer_version != analyzer.version() => tracing::warn!(
            index_version = state.analyzer_version,
            expected_version = analyzer.version(),
            "the search index was built with other settings, and search misses messages: run `precis reindex`"
        ),
        Ok(state) if state.sessions_to_reindex > 0 => tracing::warn!(
            sessions = state.sessions_to_reindex,
            "the search index does not cover all messages: run `precis reindex`"
        ),
        Ok(_) => {}
        // Not a warning: failing requests report the state of the database.
        Err(error) => tracing::debug!(error = %ErrorChain(&error), "failed to read the search index state"),
    }
}
