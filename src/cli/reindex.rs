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
    let failed =
        |cause| error_with_cause("the database failed; run `precis reindex` again to continue", cause);
    let found = reindex::state(&store, analyzer).await.map_err(|cause| failed(cause.into()))?;
    let progress = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
    let indexed = reindex::reindex(&store, analyzer, |indexed| progress.set_position(indexed)).await;
    let indexed = indexed.map_err(failed)?;
    progress.finish_and_clear();
    index_pending(&store, true).await;
    store.close().await;
    let (before, version) = (found.analyzer_version.as_str(), analyzer.version());
    let change = if before == version {
        String::new()
    } else if found.lacks_messages(analyzer) {
        "messages were missing that were stored while search was disabled: ".to_owned()
    } else {
        format!("the analyzer of the index was {before} and is {version} now: ")
    };
    print(&match i64::try_from(indexed).unwrap_or(i64::MAX) {
        0 => format!("nothing to do: all messages are indexed with the analyzer {version}\n"),
        indexed => format!("{change}indexed {}\n", count(indexed, "message")),
    })
}
