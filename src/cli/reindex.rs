//! `precis reindex`: indexes messages for search, while the service runs or without it.

use super::{error, error_with_cause};
use crate::app::open_store;
use crate::config::Settings;
use crate::service::indexer::index_pending;
use crate::service::reindex;
use indicatif::ProgressBar;
use std::error::Error;

pub(super) async fn reindex(settings: &Settings, migrate: bool) -> Result<(), Box<dyn Error>> {
    let analyzer =
        settings.analyzer().ok_or_else(|| error("search.enabled is false: there is nothing to index for"))?;
    let store = open_store(settings, migrate).await?;
    let progress = ProgressBar::new_spinner();
    let indexed = reindex::reindex(&store, analyzer, |indexed| progress.set_position(indexed)).await;
    let indexed = indexed.map_err(|cause| {
        error_with_cause("the database failed; run `precis reindex` again to continue", cause)
    })?;
    progress.finish_and_clear();
    index_pending(&store, true).await;
    store.close().await;
    match indexed {
        0 => println!("nothing to do: all messages are indexed"),
        1 => println!("indexed 1 message"),
        indexed => println!("indexed {indexed} messages"),
    }
    Ok(())
}
