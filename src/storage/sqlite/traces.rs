//! Removal of what SQLite keeps of erased data outside of its rows.

use super::{BUSY_TIMEOUT, Rebuild, Sqlite};
use crate::storage::StoreError;
use sqlx::{AssertSqlSafe, Row as _};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// A larger file is not rebuilt, because all writes wait for that.
const MAX_REBUILT_BYTES: i64 = 256 * 1024 * 1024;
/// Longest time for the attempts to truncate the write-ahead log.
const TRUNCATION_TIME: Duration = Duration::from_secs(5);
const TRUNCATION_INTERVAL: Duration = Duration::from_millis(50);
/// The pause after a rebuild is so many times as long as the rebuild.
const PAUSE_FACTOR: u32 = 2;
const MAX_PAUSE: Duration = Duration::from_secs(5);

impl Sqlite {
    /// Rebuilds a file of moderate size, so that it contains nothing but its rows. SQLite overwrites deleted rows, but not the
    /// copies that are left in the unused space of a page after rows were moved to another page.
    ///
    /// All writes wait for a rebuild. So callers that wait at the same time share one, and other writers get most of the time.
    pub(in crate::storage) async fn rebuild_file(&self) -> Result<(), StoreError> {
        let begun_before = self.rebuilds.begun.load(Ordering::Relaxed);
        let mut last = self.rebuilds.last.lock().await;
        if last.number > begun_before {
            return Ok(());
        }
        sleep_until(last.next_at).await;
        let number = self.rebuilds.begun.fetch_add(1, Ordering::Relaxed) + 1;
        let begun = Instant::now();
        self.try_to_rebuild_file().await?;
        let pause = (PAUSE_FACTOR * begun.elapsed()).min(MAX_PAUSE);
        *last = Rebuild { number, next_at: Instant::now() + pause };
        Ok(())
    }

    async fn try_to_rebuild_file(&self) -> Result<(), StoreError> {
        const SELECT_FILE_SIZE: &str = "\
            SELECT page_count * page_size AS bytes FROM pragma_page_count() CROSS JOIN pragma_page_size()";
        let mut connection = self.writer.acquire().await?;
        let bytes: i64 = sqlx::query(SELECT_FILE_SIZE).fetch_one(&mut *connection).await?.try_get("bytes")?;
        if bytes > MAX_REBUILT_BYTES {
            tracing::warn!(
                bytes,
                max_bytes = MAX_REBUILT_BYTES,
                "the database is too large to be rebuilt after a redaction; run VACUUM to remove what may be left in \
                 unused parts of its pages"
            );
            return Ok(());
        }
        // The new file is built as a temporary one, which need not fit into memory.
        sqlx::query("PRAGMA temp_store = file").execute(&mut *connection).await?;
        let rebuilt = sqlx::query("VACUUM").execute(&mut *connection).await;
        sqlx::query("PRAGMA temp_store = memory").execute(&mut *connection).await?;
        Ok(rebuilt.map(drop)?)
    }

    /// Removes erased data from the write-ahead log, too: old frames would stay in that file until they are overwritten.
    /// This is best effort: if a reader prevents it for long, the next erasure or run of the retention does it. Others write between
    /// the attempts.
    pub(in crate::storage) async fn truncate_wal(&self) {
        let begun = Instant::now();
        loop {
            match self.try_to_truncate_wal().await {
                Ok(true) => return,
                Ok(false) if begun.elapsed() < TRUNCATION_TIME => sleep(TRUNCATION_INTERVAL).await,
                Ok(false) => {
                    tracing::warn!(
                        "a reader of the database, perhaps a backup, keeps erased data in the write-ahead log; the next \
                         erasure or run of the retention removes it"
                    );
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to truncate the write-ahead log; it may still contain erased data");
                    return;
                }
            }
        }
    }

    /// Truncates the write-ahead log. Returns `false` if readers still need it.
    async fn try_to_truncate_wal(&self) -> Result<bool, sqlx::Error> {
        // Other writers wait as long as the checkpoint waits for readers.
        const SET_SHORT_TIMEOUT: &str = "PRAGMA busy_timeout = 40";
        const TRUNCATE_WAL: &str = "PRAGMA wal_checkpoint(TRUNCATE)";
        let mut connection = self.writer.acquire().await?;
        sqlx::query(SET_SHORT_TIMEOUT).execute(&mut *connection).await?;
        let truncated = sqlx::query(TRUNCATE_WAL).fetch_one(&mut *connection).await;
        let restore_timeout = format!("PRAGMA busy_timeout = {}", BUSY_TIMEOUT.as_millis());
        sqlx::query(AssertSqlSafe(restore_timeout)).execute(&mut *connection).await?;
        Ok(truncated?.try_get::<i64, _>("busy")? == 0)
    }

    /// Makes room on the disk for one erasure. Returns `false` if there is no reserve.
    pub(in crate::storage) fn release_disk_reserve(&self) -> bool {
        self.disk_reserve.release()
    }

    /// Reserves space again if the disk has enough.
    pub(in crate::storage) fn fill_disk_reserve(&self) {
        self.disk_reserve.fill();
    }
}
