//! Retention: reads and changes the periods after which sessions are erased, and runs the worker that erases them.
//!
//! Every replica runs a worker, and a lease in the database admits one of them at a time. The worker reads pages of candidates
//! from an index, and erases each expired session in a transaction of its own, which checks again that the session has expired.

use super::leases::keep_lease;
use super::metrics::ServiceMetrics;
use super::{Error, MemoryService};
use crate::domain::consolidation::LEASE_TTL;
use crate::domain::error_chain::ErrorChain;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::retention::{RetentionPeriod, RetentionPeriods, RetentionSource, hour};
use crate::storage::{CandidatePosition, CandidateScope, StoreError};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Number of sessions after which their traces are removed from the file of SQLite.
const MAX_ERASED_TOGETHER: u64 = 20;

/// The name of the lease.
const WORKER: &str = "retention";
/// Longest wait for the statement that ends the lease, when the service stops.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time until the first search after the start of the service.
const MAX_FIRST_DELAY: Duration = Duration::from_mins(1);
/// Number of candidates, or of users with a period, that a statement reads.
const PAGE: i64 = 500;
/// After an erasure, the worker pauses this many times as long as the erasure took. So erasures take at most a fifth of the time
/// of the writer of SQLite, or of a connection to Postgres.
const PAUSE_FACTOR: u32 = 4;

/// The retention of a tenant, a user or a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The period that it has itself.
    pub own: Option<RetentionPeriod>,
    /// The period that applies.
    pub effective: RetentionPeriod,
    pub source: RetentionSource,
    /// The time from which on a session is erased; `None` if it is kept.
    pub expires_at: Option<OffsetDateTime>,
}

impl MemoryService {
    /// Returns the retention of a user, or of the tenant.
    pub async fn retention(&self, tenant: &TenantId, user: Option<&UserId>) -> Result<Retention, Error> {
        let periods = self.store.retention_periods(tenant, user).await?;
        Ok(self.of_periods(periods, if user.is_some() { periods.user } else { periods.tenant }))
    }

    /// Sets the period of a user, or of the tenant. `None` removes it.
    pub async fn set_retention(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        period: Option<RetentionPeriod>,
    ) -> Result<Retention, Error> {
        self.store.set_retention(tenant, user, period).await?;
        self.retention(tenant, user).await
    }

    /// Returns the retention of a session.
    pub async fn session_retention(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Retention, Error> {
        let stored = self.store.session_retention(tenant, session).await?.ok_or(Error::SessionNotFound)?;
        let retention = self.of_periods(stored.periods, stored.periods.session);
        let ends = [
            retention.effective.end(stored.start),
            stored
                .branch_start
                .zip(self.config.retention.default.branches_after)
                .and_then(|(start, period)| period.end(start)),
        ];
        Ok(Retention { expires_at: ends.into_iter().flatten().min(), ..retention })
    }

    /// Sets the period of a session. `None` removes it.
    pub async fn set_session_retention(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        period: Option<RetentionPeriod>,
    ) -> Result<Retention, Error> {
        if !self.store.set_session_retention(tenant, session, period).await? {
            return Err(Error::SessionNotFound);
        }
        self.session_retention(tenant, session).await
    }

    fn of_periods(&self, periods: RetentionPeriods, own: Option<RetentionPeriod>) -> Retention {
        let (effective, source) = periods.effective(self.config.retention.default.after_last_exchange);
        Retention { own, effective, source, expires_at: None }
    }

    /// Returns the worker that erases expired sessions.
    #[must_use]
    pub fn retention_worker(&self) -> RetentionWorker {
        RetentionWorker { service: self.clone(), clock: ClockWatch::default() }
    }
}

/// A worker that erases expired sessions.
#[derive(Debug)]
pub struct RetentionWorker {
    service: MemoryService,
    clock: ClockWatch,
}

/// Figures of all tenants.
#[derive(Default)]
struct Totals {
    /// The size of all messages as JSON.
    stored_bytes: i64,
    /// The sessions with exchanges in this or the previous hour that are due for consolidation.
    due_sessions: i64,
}

impl Totals {
    #[expect(clippy::cast_precision_loss, reason = "a metric may be rounded")]
    fn record(&self, metrics: &ServiceMetrics) {
        metrics.stored_bytes.set(self.stored_bytes as f64);
        metrics.due_sessions.set(self.due_sessions as f64);
    }
}

/// The end of a run before its time.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The clock can't be trusted. It was logged.
    #[error("the clock of the store was set")]
    Clock,
}

impl RetentionWorker {
    /// Runs until `stop` is cancelled. An erasure that is running then is rolled back, or continued by the next start on SQLite.
    pub async fn run(mut self, stop: CancellationToken) {
        let interval = self.service.config.retention.interval;
        let mut delay = interval.min(MAX_FIRST_DELAY);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(delay) => {}
            }
            self.run_once(&stop).await;
            delay = interval;
        }
    }

    /// Searches all tenants, if this replica gets the lease.
    async fn run_once(&mut self, stop: &CancellationToken) {
        let service = self.service.clone();
        let token = Uuid::new_v4();
        // The replicas' intervals do not begin at the same time. Half of one is enough for one search per interval.
        let pause = service.config.retention.interval / 2;
        match service.store.take_worker_lease(WORKER, token, LEASE_TTL, pause).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return report(&service, &error),
        }
        // Dropping the search closes its connection, and so rolls its statement back.
        let is_finished = tokio::select! {
            result = self.search() => match result {
                Ok(totals) => {
                    totals.record(&service.metrics);
                    true
                }
                Err(RunError::Clock) => false,
                Err(RunError::Store(error)) => {
                    report(&service, &error);
                    false
                }
            },
            () = keep_lease("the retention worker", || service.store.renew_worker_lease(WORKER, token, LEASE_TTL)) => {
                tracing::warn!("another replica has taken the lease of the retention worker");
                false
            }
            () = stop.cancelled() => false,
        };
        if is_finished {
            let now = OffsetDateTime::now_utc().unix_timestamp();
            #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 are small")]
            service.metrics.retention_last_run.set(now as f64);
        }
        let release = service.store.release_worker_lease(WORKER, token, is_finished);
        if let Ok(Err(error)) = tokio::time::timeout(RELEASE_TIMEOUT, release).await {
            tracing::debug!(error = %ErrorChain(&error), "failed to end the lease of the retention worker");
        }
    }

    /// Searches all tenants.
    async fn search(&mut self) -> Result<Totals, RunError> {
        let service = self.service.clone();
        let mut totals = Totals::default();
        let default = service.config.retention.default;
        // An erasure that has failed, for example on a full disk. The following erasures can make room for it.
        if let Err(error) = service.store.remove_stale_imports().await {
            tracing::warn!(error = %ErrorChain(&error), "failed to remove incomplete sessions");
            service.metrics.retention_errors.increment(1);
        }
        for tenant in service.store.tenants().await? {
            let now = self.trusted_time().await?;
            let periods = service.store.retention_periods(&tenant, None).await?;
            let (period, _) = periods.effective(default.after_last_exchange);
            if let Some(last_hour) = period.last_expired_hour(now) {
                self.erase_expired(&tenant, CandidateScope::Tenant { last_hour }).await?;
            }
            self.search_users(&tenant).await?;
            self.erase_expired(&tenant, CandidateScope::OwnPeriod { last_hour: hour(now) }).await?;
            if let Some(RetentionPeriod::Seconds(seconds)) = default.branches_after {
                let until = now.checked_sub(time::Duration::seconds(seconds));
                let until = until.unwrap_or(OffsetDateTime::UNIX_EPOCH).max(OffsetDateTime::UNIX_EPOCH);
                self.erase_expired(&tenant, CandidateScope::Branches { until }).await?;
            }
            totals.stored_bytes =
                totals.stored_bytes.saturating_add(service.store.stored_bytes(&tenant).await?);
            // The erasures may have taken hours.
            let from = hour(self.trusted_time().await?) - 1;
            let due = service.store.due_sessions(&tenant, from, &service.config.policy).await?;
            totals.due_sessions += due;
        }
        Ok(totals)
    }

    /// Searches the sessions of users with a period of their own.
    async fn search_users(&mut self, tenant: &TenantId) -> Result<(), RunError> {
        let mut after = None;
        loop {
            let now = self.trusted_time().await?;
            let store = &self.service.store;
            let users = store.users_with_retention(tenant, after.as_ref(), PAGE).await?;
            for (user, period) in &users {
                if let Some(last_hour) = period.last_expired_hour(now) {
                    self.erase_expired(tenant, CandidateScope::User { user, last_hour }).await?;
                }
            }
            match users.into_iter().next_back() {
                Some((last, _)) => after = Some(last),
                None => return Ok(()),
            }
        }
    }

    /// Erases the expired sessions of a scope.
    async fn erase_expired(&mut self, tenant: &TenantId, scope: CandidateScope<'_>) -> Result<(), RunError> {
        let default = self.service.config.retention.default;
        let mut after: Option<CandidatePosition> = None;
        loop {
            let now = self.trusted_time().await?;
            let store = &self.service.store;
            let page = store.retention_candidates(tenant, scope, after.as_ref(), default, now, PAGE).await?;
            let (mut erased, mut failed) = (0_u64, 0_u64);
            let begun = Instant::now();
            for candidate in page.iter().filter(|candidate| candidate.is_expired) {
                match self.erase(tenant, &candidate.position.session, now).await {
                    Ok(true) => {
                        erased += 1;
                        if erased % MAX_ERASED_TOGETHER == 0 {
                            self.service.store.remove_erased_traces().await;
                        }
                    }
                    Ok(false) => {}
                    Err(error @ StoreError::Unavailable(_)) => return Err(error.into()),
                    // The next search finds the session again.
                    Err(error) => {
                        report(&self.service, &error);
                        failed += 1;
                    }
                }
            }
            if erased > 0 {
                self.service.store.remove_erased_traces().await;
            }
            if erased + failed > 0 {
                tracing::info!(%tenant, erased, failed, elapsed = ?begun.elapsed(), "erased expired sessions");
            }
            match page.into_iter().next_back() {
                Some(last) => after = Some(last.position),
                None => return Ok(()),
            }
        }
    }

    /// Erases a session if it has still expired, and pauses.
    async fn erase(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        now: OffsetDateTime,
    ) -> Result<bool, StoreError> {
        let service = &self.service;
        let config = &service.config.retention;
        let begun = Instant::now();
        let erased = service.store.erase_expired_session(tenant, session, config.default, now).await;
        if let Ok(true) = erased {
            service.context_cache.forget_session(tenant, session);
            service.context_cache.forget_branches(tenant, session);
            service.metrics.sessions_expired.increment(1);
        }
        let pause = begun.elapsed() * PAUSE_FACTOR;
        tokio::time::sleep(pause.max(Duration::from_secs(1) / config.max_sessions_per_second)).await;
        erased
    }

    /// Returns the time of the store, if its clock can be trusted.
    async fn trusted_time(&mut self) -> Result<OffsetDateTime, RunError> {
        let now = self.service.store.time().await?;
        let reading =
            ClockReading { store: now, process: OffsetDateTime::now_utc(), monotonic: Instant::now() };
        match self.clock.check(reading) {
            Ok(()) => Ok(now),
            Err(problem) => {
                self.service.metrics.retention_errors.increment(1);
                tracing::warn!(%now, "no session is erased: {problem}");
                Err(RunError::Clock)
            }
        }
    }
}

/// Counts and logs an error. An unreachable database is no warning, because failing requests report it.
fn report(service: &MemoryService, error: &StoreError) {
    service.metrics.retention_errors.increment(1);
    if matches!(error, StoreError::Unavailable(_)) {
        tracing::debug!(error = %ErrorChain(error), "failed to erase expired sessions");
    } else {
        tracing::warn!(error = %ErrorChain(error), "failed to erase expired sessions");
    }
}

/// The clocks at one moment.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    store: OffsetDateTime,
    process: OffsetDateTime,
    monotonic: Instant,
}

/// Compares the clock of the store with the clocks of this process. A clock that was set forward by mistake makes all sessions
/// look old. Its time is trusted after it has run evenly for a while.
#[derive(Debug, Default)]
struct ClockWatch {
    last: Option<ClockReading>,
    distrusted_since: Option<Instant>,
}

impl ClockWatch {
    /// Difference that is no jump: clocks are adjusted slowly, and a process can be suspended for a moment.
    const TOLERANCE: Duration = Duration::from_mins(5);
    /// Time for which the clocks must agree after a jump.
    const PROBATION: Duration = Duration::from_hours(1);

    fn check(&mut self, now: ClockReading) -> Result<(), &'static str> {
        let last = self.last.replace(now);
        let expected = last.map_or(now.store, |last| last.store + (now.monotonic - last.monotonic));
        if (now.store - expected).abs() > Self::TOLERANCE {
            self.distrusted_since = Some(now.monotonic);
        }
        if (now.store - now.process).abs() > Self::TOLERANCE {
            return Err(
                "the clock of the database differs from the clock of this machine; set the wrong one",
            );
        }
        match self.distrusted_since {
            Some(since) if now.monotonic - since < Self::PROBATION => {
                Err("the clock has jumped; the erasure of expired sessions continues after an hour")
            }
            _ => {
                self.distrusted_since = None;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const MINUTE: Duration = Duration::from_mins(1);

    /// A clock of the store, of the process, and the time since the start.
    struct Clocks {
        start: Instant,
        reading: ClockReading,
    }

    impl Clocks {
        fn new() -> Self {
            let (store, start) = (datetime!(2026-05-01 12:00 UTC), Instant::now());
            Self { start, reading: ClockReading { store, process: store, monotonic: start } }
        }

        fn advance(&mut self, time: Duration) -> ClockReading {
            self.reading.store += time;
            self.reading.process += time;
            self.reading.monotonic += time;
            self.reading
        }

        fn set_forward(&mut self, time: Duration) {
            self.reading.store += time;
            self.reading.process += time;
        }
    }

    #[test]
    fn even_clock_is_trusted_from_the_start() {
        let (mut watch, mut clocks) = (ClockWatch::default(), Clocks::new());
        for step in [Duration::ZERO, MINUTE, 600 * MINUTE, MINUTE] {
            assert_eq!(watch.check(clocks.advance(step)), Ok(()));
        }
    }

    #[test]
    fn clock_that_was_set_is_trusted_after_an_hour() {
        let (mut watch, mut clocks) = (ClockWatch::default(), Clocks::new());
        assert_eq!(watch.check(clocks.advance(MINUTE)), Ok(()));
        clocks.set_forward(60 * 24 * 365 * MINUTE);
        for _ in 0..60 {
            watch.check(clocks.advance(MINUTE)).expect_err("distrusted");
        }
        assert_eq!(watch.check(clocks.advance(MINUTE)), Ok(()));
        assert!(clocks.reading.monotonic > clocks.start);
    }

    #[test]
    fn clock_that_was_set_back_again_is_on_probation_too() {
        let (mut watch, mut clocks) = (ClockWatch::default(), Clocks::new());
        assert_eq!(watch.check(clocks.advance(MINUTE)), Ok(()));
        clocks.set_forward(60 * MINUTE);
        watch.check(clocks.advance(MINUTE)).expect_err("distrusted");
        clocks.reading.store -= 60 * MINUTE;
        clocks.reading.process -= 60 * MINUTE;
        watch.check(clocks.advance(MINUTE)).expect_err("distrusted");
        assert_eq!(watch.check(clocks.advance(61 * MINUTE)), Ok(()));
    }

    #[test]
    fn clock_of_the_store_must_agree_with_that_of_the_process() {
        let (mut watch, mut clocks) = (ClockWatch::default(), Clocks::new());
        clocks.reading.store += 6 * MINUTE;
        watch.check(clocks.advance(MINUTE)).expect_err("distrusted");
        clocks.reading.process += 2 * MINUTE;
        assert_eq!(watch.check(clocks.advance(MINUTE)), Ok(()));
    }
}
