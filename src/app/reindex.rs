//! `precis reindex`, and a word at start where it is needed.

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

/// Why messages were not indexed.
#[derive(Debug, thiserror::Error)]
pub enum ReindexError {
    /// The database can't be used.
    #[error(transparent)]
    App(#[from] AppError),
    /// The settings want no index.
    #[error("search.enabled is false: there is nothing to index for")]
    Disabled,
    /// The service failed. What is done stays done.
    #[error("the database failed; the next `precis reindex` goes on where this one was")]
    Failed(#[source] Error),
}

/// Indexes what is to be indexed, beside a service or without one; the words of what was done.
///
/// # Errors
/// The database can't be used.
pub async fn reindex(settings: &Settings) -> Result<String, ReindexError> {
    let analyzer = settings.analyzer().ok_or(ReindexError::Disabled)?;
    let store = store(settings, true).await?;
    let bar = ProgressBar::new_spinner();
    let indexed = reindex::reindex(&store, analyzer, |indexed| bar.set_position(indexed));
    let indexed = indexed.await.map_err(ReindexError::Failed)?;
    bar.finish_and_clear();
    index_pending(&store, true).await;
    store.close().await;
    Ok(match indexed {
        0 => "nothing to do: all messages are indexed".to_owned(),
        1 => "indexed 1 message".to_owned(),
        indexed => format!("indexed {indexed} messages"),
    })
}

/// Says in the log what search does not find.
pub(super) async fn warn_if_stale(store: &Arc<dyn Store>, analyzer: Option<Analyzer>) {
    let Some(analyzer) = analyzer else {
        if let Err(error) = store.disable_index().await {
            tracing::warn!(error = %ErrorChain(&error), "that messages are not indexed any more can't be noted");
        }
        return;
    };
    match reindex::state(store, analyzer).await {
        Ok(state) if state.label != analyzer.version() => tracing::warn!(
            indexed_by = state.label,
            settings = analyzer.version(),
            "messages are indexed by other rules than the settings say, and search misses some: run `precis reindex`"
        ),
        Ok(state) if state.backlog > 0 => tracing::warn!(
            sessions = state.backlog,
            "not all messages are indexed, and search misses them: run `precis reindex`"
        ),
        Ok(_) => {}
        // It has been told already, or will be: requests say what is wrong with the database.
        Err(error) => tracing::debug!(error = %ErrorChain(&error), "how far the index is can't be told"),
    }
}
