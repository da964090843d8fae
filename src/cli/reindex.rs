//! `precis reindex`: indexes messages for search, while the service runs or without it.

use super::{count, error, error_with_cause, print};
use crate::app::open_store;
use crate::config::Settings;
use crate::service::indexer::index_pending;
use crate::service::reindex;
use indicatif::{ProgressBar, ProgressFinish};
use std::error::Error;

pub(super) async fn reindex(settings: &Settings, migrate: bool) -> Result<(), Box<dyn Error>> {
    let analyzer =
        settings.analyzer().ok_or_else(|| error("search.enabled is false: there is nothing to index for"))?;
    let store = open_store(settings, migrate).await?;
    let progress = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
    let indexed = reindex::reindex(&store, analyzer, |indexed| progress.set_position(indexed)).await;
    let indexed = indexed.map_err(|cause| {
        error_with_cause("the database failed; run `precis reindex` again to continue", cause)
    })?;
    progress.finish_and_clear();
    index_pending(&store, true).await;
    store.close().await;
    print(&match i64::try_from(indexed).unwrap_or(i64::MAX) {
        0 => "nothing to do: all messages are indexed\n".to_owned(),
        indexed => format!("indexed {}\n", count(indexed, "message")),
    })
}
