//! `precis reindex`: indexes messages for search, while the service runs or without it.

use super::{count, error, error_with_cause, print};
use crate::app::open_store;
use crate::config::Settings;
use crate::service::indexer;
use indicatif::{ProgressBar, ProgressFinish};
use std::error::Error;

pub(super) async fn reindex(settings: &Settings, migrate: bool) -> Result<(), Box<dyn Error>> {
    let analyzer =
        settings.analyzer().ok_or_else(|| error("search.enabled is false: there is nothing to index for"))?;
    let store = open_store(settings, migrate).await?;
    let progress = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
    let indexed = indexer::reindex(&store, analyzer, |indexed| progress.set_position(indexed)).await;
    let failed =
        |cause| error_with_cause("the database failed; run `precis reindex` again to continue", cause);
    let (before, indexed) = indexed.map_err(failed)?;
    progress.finish_and_clear();
    store.close().await;
    let version = analyzer.version();
    let indexed = count(i64::try_from(indexed).unwrap_or(i64::MAX), "message");
    print(&if !before.analyzer.is_empty() && before.analyzer != version {
        format!("the analyzer of the index was {} and is {version} now: indexed {indexed}\n", before.analyzer)
    } else if before.messages > 0 || before.is_rebuilding {
        format!("indexed {indexed}\n")
    } else {
        format!("nothing to do: all messages are indexed with the analyzer {version}\n")
    })
}
