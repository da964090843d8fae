//! `precis reindex`: indexes messages for search, while the service runs or without it.

use super::output::{count, error, error_with_cause, print};
use crate::app::open_store;
use crate::config::Settings;
use indicatif::{ProgressBar, ProgressFinish};
use std::error::Error;

pub(super) async fn reindex(settings: &Settings, migrate: bool) -> Result<(), Box<dyn Error>> {
    let analyzer =
        settings.analyzer().ok_or_else(|| error("search.enabled is false: there is nothing to index for"))?;
    let store = open_store(settings, migrate).await?;
    let progress = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
    let indexed = store.reindex(analyzer, |indexed| progress.set_position(indexed)).await;
    let failed = |cause| error_with_cause("the database failed: run `precis reindex` again", cause);
    let indexed = count(i64::try_from(indexed.map_err(failed)?).unwrap_or(i64::MAX), "message");
    progress.finish_and_clear();
    store.close().await;
    print(&format!("indexed {indexed} with the analyzer {}; restart the service\n", analyzer.version()))
}
