//! Retention: the periods of tenants, users and sessions, the search for expired sessions, and their erasure.
//!
//! The search reads candidates from an index: sessions whose last hour of activity is before a bound. A candidate has expired if
//! the most specific period that applies to it has ended. The statement that erases a session checks this again, so a
//! session that got an exchange or another period meanwhile stays.

use super::erasures::{commit_hidden, hide_with_branches};
use super::rows;
use super::statement::{AnyRow, DbRow as _, Sql};
use super::store::{decode, micros};
use super::values::DbTime;
use super::{Store, StoreError};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::retention::{RetentionPeriod, RetentionPeriods};
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// The retention of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRetention {
    pub periods: RetentionPeriods,
    /// The beginning of the period: the last exchange, or the import or rewind that created the session if that was later.
    pub start: OffsetDateTime,
    /// The time of the rewind, if the session is the branch of one.
    pub branch_start: Option<OffsetDateTime>,
}

/// The retention that the settings define.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DefaultRetention {
    pub after_last_exchange: Option<RetentionPeriod>,
    /// For branches of rewinds, from the rewind on.
    pub branches_after: Option<RetentionPeriod>,
}

impl DefaultRetention {
    fn branch_seconds(self) -> Option<i64> {
        self.branches_after.map(RetentionPeriod::seconds).filter(|seconds| *seconds > 0)
    }
}

/// Sessions that may have expired.
#[derive(Clone, Copy, Debug)]
pub enum CandidateScope<'a> {
    /// All sessions of the tenant whose last activity was in this hour since 1970, or before.
    Tenant { last_hour: i64 },
    /// All such sessions of a user.
    User { user: &'a UserId, last_hour: i64 },
    /// Sessions with a period of their own that ends in this hour, or before.
    OwnPeriod { last_hour: i64 },
    /// Branches of rewinds, up to this time of the rewind.
    Branches { until: OffsetDateTime },
}

/// The place of a candidate in the order of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidatePosition {
    /// The hour by which its scope is sorted; for branches the microseconds since 1970 of the rewind.
    pub sort_key: i64,
    pub session: SessionId,
}

/// A session that may have expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub position: CandidatePosition,
    pub is_expired: bool,
}

/// The condition that a session `s` has expired. `$1` is the tenant. The first argument is its idle time in seconds, the second
/// one the age of a branch, and the others are the parameters of the settings in seconds, or NULL. A period of 0 never ends.
macro_rules! is_expired {
    ($idle:literal, $branch_age:literal, $default:literal, $branches:literal) => {
        concat!(
            "coalesce(",
            $idle,
            " >= nullif(coalesce(s.retention_seconds,
                (SELECT r.seconds FROM retention_rules AS r
                    WHERE r.tenant_id = $1 AND r.user_id = s.user_id AND s.user_id <> ''),
                (SELECT r.seconds FROM retention_rules AS r WHERE r.tenant_id = $1 AND r.user_id = ''),
                CAST(",
            $default,
            " AS bigint)), 0), false) OR coalesce(",
            $branch_age,
            " >= CAST(",
            $branches,
            " AS bigint), false)"
        )
    };
}

/// [`is_expired`] at the time `$3` with the settings `$4` and `$5`.
macro_rules! is_expired_on_postgres {
    () => {
        is_expired!(
            "extract(epoch FROM $3 - greatest(s.updated_at, s.retained_from))",
            "extract(epoch FROM $3 - s.branched_at)",
            "$4",
            "$5"
        )
    };
}

macro_rules! is_expired_on_sqlite {
    () => {
        is_expired!(
            "($3 - max(s.updated_at, coalesce(s.retained_from, s.updated_at))) / 1000000",
            "($3 - s.branched_at) / 1000000",
            "$4",
            "$5"
        )
    };
}

impl Store {
    /// Returns the time of the clock of the store.
    pub async fn time(&self) -> Result<OffsetDateTime, StoreError> {
        const SELECT_TIME: Sql = Sql { postgres: "SELECT now() AS now", sqlite: "SELECT $1 AS now" };
        let row = self.global_statement(SELECT_TIME).bind_now().read().await?;
        Ok(row.ok_or(sqlx::Error::RowNotFound)?.time("now")?)
    }

    /// Returns the tenants that have, or had, a session.
    pub async fn tenants(&self) -> Result<Vec<TenantId>, StoreError> {
        const SELECT_TENANTS: &str = "SELECT tenant_id FROM tenants ORDER BY tenant_id";
        self.global_statement(SELECT_TENANTS).read_all().await?.iter().map(rows::tenant_id).collect()
    }

    /// Returns the periods of a user, if one is given, and of the tenant.
    pub async fn retention_periods(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
    ) -> Result<RetentionPeriods, StoreError> {
        const SELECT_RETENTION_RULES: &str =
            "SELECT user_id, seconds FROM retention_rules WHERE tenant_id = $1 AND user_id IN ('', $2)";
        let statement = self.statement(tenant, SELECT_RETENTION_RULES).bind(user.map_or("", UserId::as_str));
        let mut periods = RetentionPeriods::default();
        for row in &statement.read_all().await? {
            let period = RetentionPeriod::from_seconds(row.field("seconds")?);
            if row.field::<&str>("user_id")?.is_empty() {
                periods.tenant = Some(period);
            } else {
                periods.user = Some(period);
            }
        }
        Ok(periods)
    }

    /// Replaces or removes the period of a user, or of the tenant.
    pub async fn set_retention(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        period: Option<RetentionPeriod>,
    ) -> Result<(), StoreError> {
        const UPSERT_RETENTION_RULE: &str = "\
            INSERT INTO retention_rules (tenant_id, user_id, seconds) VALUES ($1, $2, $3)
            ON CONFLICT (tenant_id, user_id) DO UPDATE SET seconds = excluded.seconds";
        const DELETE_RETENTION_RULE: &str =
            "DELETE FROM retention_rules WHERE tenant_id = $1 AND user_id = $2";
        let user = user.map_or("", UserId::as_str);
        let statement = match period {
            Some(period) => self.statement(tenant, UPSERT_RETENTION_RULE).bind(user).bind(period.seconds()),
            None => self.statement(tenant, DELETE_RETENTION_RULE).bind(user),
        };
        statement.execute().await?;
        Ok(())
    }

    /// Returns the retention of a session, or `None` before its first exchange.
    pub async fn session_retention(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionRetention>, StoreError> {
        const SELECT_SESSION_RETENTION: &str = "\
            SELECT s.retention_seconds, s.updated_at, s.retained_from, s.branched_at,
                (SELECT r.seconds FROM retention_rules AS r
                    WHERE r.tenant_id = $1 AND r.user_id = s.user_id AND s.user_id <> '') AS user_seconds,
                (SELECT r.seconds FROM retention_rules AS r WHERE r.tenant_id = $1 AND r.user_id = '') AS tenant_seconds
            FROM sessions AS s WHERE s.tenant_id = $1 AND s.session_id = $2 AND s.last_seq > 0";
        let statement = self.statement(tenant, SELECT_SESSION_RETENTION).bind(session.as_str());
        decode(statement.read().await?, |row| {
            let period = |column| {
                let seconds = row.field::<Option<i64>>(column);
                seconds.map(|seconds| seconds.map(RetentionPeriod::from_seconds))
            };
            let retained_from = row.optional_time("retained_from")?;
            Ok(SessionRetention {
                periods: RetentionPeriods {
                    session: period("retention_seconds")?,
                    user: period("user_seconds")?,
                    tenant: period("tenant_seconds")?,
                },
                start: retained_from.into_iter().fold(row.time("updated_at")?, OffsetDateTime::max),
                branch_start: row.optional_time("branched_at")?,
            })
        })
    }

    /// Replaces or removes the period of a session. Returns `false` if there is no such session.
    pub async fn set_session_retention(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        period: Option<RetentionPeriod>,
    ) -> Result<bool, StoreError> {
        const UPDATE_SESSION_RETENTION: &str = "\
            UPDATE sessions SET retention_seconds = $3 WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0";
        let statement = self.statement(tenant, UPDATE_SESSION_RETENTION).bind(session.as_str());
        Ok(statement.bind(period.map(RetentionPeriod::seconds)).execute().await? > 0)
    }

    /// Returns at most `limit` users after `after` that have a period, in order.
    pub async fn users_with_retention(
        &self,
        tenant: &TenantId,
        after: Option<&UserId>,
        limit: i64,
    ) -> Result<Vec<(UserId, RetentionPeriod)>, StoreError> {
        const SELECT_USERS_WITH_RETENTION: &str = "\
            SELECT user_id, seconds FROM retention_rules
            WHERE tenant_id = $1 AND user_id > $2 ORDER BY user_id LIMIT $3";
        let statement = self.statement(tenant, SELECT_USERS_WITH_RETENTION);
        let statement = statement.bind(after.map_or("", UserId::as_str)).bind(limit);
        let user = |row: &AnyRow| -> Result<_, StoreError> {
            let user = UserId::new(row.field::<String>("user_id")?);
            let period = RetentionPeriod::from_seconds(row.field("seconds")?);
            Ok((user.map_err(StoreError::corrupt("a user id"))?, period))
        };
        statement.read_all_in_index_order().await?.iter().map(user).collect()
    }

    /// Returns at most `limit` sessions of the scope after `after`, with their state at the time `now`.
    pub async fn retention_candidates(
        &self,
        tenant: &TenantId,
        scope: CandidateScope<'_>,
        after: Option<&CandidatePosition>,
        default: DefaultRetention,
        now: OffsetDateTime,
        limit: i64,
    ) -> Result<Vec<Candidate>, StoreError> {
        /// `$2` is the last sort key, `$6` and `$7` are the position. The bound `$6` is compared twice: alone, because it
        /// limits the index scan, and together with the session.
        macro_rules! select_candidates {
            ($key:literal, $sort_key:literal, $after:literal, $is_expired:expr, $condition:literal) => {
                concat!(
                    "SELECT s.session_id, ",
                    $sort_key,
                    " AS sort_key, ",
                    $is_expired,
                    " AS is_expired FROM sessions AS s
                    WHERE s.tenant_id = $1 AND ",
                    $key,
                    " <= $2 AND ",
                    $key,
                    " >= ",
                    $after,
                    "
                        AND (",
                    $key,
                    " > ",
                    $after,
                    " OR s.session_id > $7) ",
                    $condition,
                    " ORDER BY ",
                    $key,
                    ", s.session_id LIMIT $8"
                )
            };
        }
        macro_rules! select_candidates_by_hour {
            ($key:literal, $condition:literal) => {
                Sql {
                    postgres: select_candidates!($key, $key, "$6", is_expired_on_postgres!(), $condition),
                    sqlite: select_candidates!($key, $key, "$6", is_expired_on_sqlite!(), $condition),
                }
            };
        }
        const SELECT_CANDIDATES: Sql = select_candidates_by_hour!("s.activity_hour", "");
        const SELECT_CANDIDATES_OF_USER: Sql =
            select_candidates_by_hour!("s.activity_hour", "AND s.user_id = $9");
        const SELECT_CANDIDATES_WITH_PERIOD: Sql = select_candidates_by_hour!("s.own_expiry_hour", "");
        const SELECT_BRANCH_CANDIDATES: Sql = Sql {
            postgres: select_candidates!(
                "s.branched_at",
                "(extract(epoch FROM s.branched_at) * 1000000)::bigint",
                "$6",
                is_expired_on_postgres!(),
                ""
            ),
            sqlite: select_candidates!("s.branched_at", "s.branched_at", "$6", is_expired_on_sqlite!(), ""),
        };
        let sql = match scope {
            CandidateScope::Tenant { .. } => SELECT_CANDIDATES,
            CandidateScope::User { .. } => SELECT_CANDIDATES_OF_USER,
            CandidateScope::OwnPeriod { .. } => SELECT_CANDIDATES_WITH_PERIOD,
            CandidateScope::Branches { .. } => SELECT_BRANCH_CANDIDATES,
        };
        let statement = self.statement(tenant, sql);
        let statement = match scope {
            CandidateScope::Tenant { last_hour }
            | CandidateScope::User { last_hour, .. }
            | CandidateScope::OwnPeriod { last_hour } => statement.bind(last_hour),
            CandidateScope::Branches { until } => statement.bind(DbTime(until)),
        };
        let statement = statement
            .bind(DbTime(now))
            .bind(default.after_last_exchange.map(RetentionPeriod::seconds))
            .bind(default.branch_seconds());
        let after_key = after.map(|after| after.sort_key);
        let statement = if let CandidateScope::Branches { .. } = scope {
            statement.bind(DbTime::from_micros(after_key.unwrap_or(0))?)
        } else {
            statement.bind(after_key.unwrap_or(i64::MIN))
        };
        let statement = statement.bind(after.map_or("", |after| after.session.as_str())).bind(limit);
        let statement = match scope {
            CandidateScope::User { user, .. } => statement.bind(user.as_str()),
            _ => statement,
        };
        let candidate = |row: &AnyRow| -> Result<_, StoreError> {
            let position =
                CandidatePosition { sort_key: row.field("sort_key")?, session: rows::session_id(row)? };
            Ok(Candidate { position, is_expired: row.field("is_expired")? })
        };
        statement.read_all_in_index_order().await?.iter().map(candidate).collect()
    }

    /// Erases a session as [`Store::erase_session`] does, if it has expired at the time `now`. Returns `false` if not, for example
    /// because of an exchange or another period meanwhile. Call [`Store::remove_erased_traces`] after some of them: it can take longer
    /// than the erasure.
    pub async fn erase_expired_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        default: DefaultRetention,
        now: OffsetDateTime,
    ) -> Result<bool, StoreError> {
        /// A trigger deletes the branches.
        const DELETE_EXPIRED_SESSION: &str = concat!(
            "DELETE FROM sessions AS s WHERE s.tenant_id = $1 AND s.session_id = $2 AND (",
            is_expired_on_postgres!(),
            ")"
        );
        const HIDE_EXPIRED_SESSION: &str = hide_with_branches!(concat!(
            "SELECT s.session_id FROM sessions AS s WHERE s.tenant_id = $1 AND s.session_id = $2 AND (",
            is_expired_on_sqlite!(),
            ")"
        ));
        let period = default.after_last_exchange.map(RetentionPeriod::seconds);
        if self.sqlite().is_none() {
            let statement = self.statement(tenant, DELETE_EXPIRED_SESSION).bind(session.as_str());
            let statement = statement.bind(DbTime(now)).bind(period).bind(default.branch_seconds());
            return Ok(statement.execute().await? > 0);
        }
        let hide = async || {
            let _turn = self.copy_turn().await?;
            let mut transaction = self.begin(tenant).await?;
            let statement = transaction.statement(HIDE_EXPIRED_SESSION).bind(tenant.as_str());
            let statement = statement.bind(session.as_str()).bind(DbTime(now)).bind(period);
            let hidden = statement.bind(default.branch_seconds()).read_all().await?;
            commit_hidden(transaction, tenant, &hidden).await
        };
        let hidden = self.using_reserve(hide).await?;
        self.using_reserve(|| self.remove_abandoned(tenant, &hidden)).await?;
        Ok(!hidden.is_empty())
    }

    /// Takes the lease of a background worker for `ttl`, unless another holder has it or has finished less than `pause` ago. A
    /// lease or an end that is in the future by more than that counts as over: the clock was set back.
    pub async fn take_worker_lease(
        &self,
        worker: &str,
        token: Uuid,
        ttl: Duration,
        pause: Duration,
    ) -> Result<bool, StoreError> {
        macro_rules! take_worker_lease {
            ($now:literal, $ttl:literal, $pause:literal) => {
                concat!(
                    "INSERT INTO worker_leases AS w (worker, token, lease_until) VALUES ($1, $2, ", $now, " + ", $ttl, ")
                    ON CONFLICT (worker) DO UPDATE SET token = excluded.token, lease_until = excluded.lease_until
                    WHERE (w.lease_until IS NULL OR w.lease_until <= ", $now, "
                            OR w.lease_until > ", $now, " + 2 * ", $ttl, ")
                        AND (w.finished_at IS NULL OR w.finished_at <= ", $now, " - ", $pause, "
                            OR w.finished_at > ", $now, " + 2 * ", $ttl, ")"
                )
            };
        }
        const TAKE_WORKER_LEASE: Sql = Sql {
            postgres: take_worker_lease!(
                "now()",
                "$3 * interval '1 microsecond'",
                "$4 * interval '1 microsecond'"
            ),
            sqlite: take_worker_lease!("$5", "$3", "$4"),
        };
        let statement = self.global_statement(TAKE_WORKER_LEASE).bind(worker).bind(token);
        let statement = statement.bind(micros(ttl)).bind(micros(pause)).bind_now();
        Ok(statement.execute().await? > 0)
    }

    /// Extends the lease of a worker to `ttl` from now. Returns `false` if `token` does not hold it.
    pub async fn renew_worker_lease(
        &self,
        worker: &str,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        const RENEW_WORKER_LEASE: Sql = Sql {
            postgres: "UPDATE worker_leases SET lease_until = now() + $3 * interval '1 microsecond'
                WHERE worker = $1 AND token = $2",
            sqlite: "UPDATE worker_leases SET lease_until = $4 + $3 WHERE worker = $1 AND token = $2",
        };
        let statement = self.global_statement(RENEW_WORKER_LEASE).bind(worker).bind(token);
        Ok(statement.bind(micros(ttl)).bind_now().execute().await? > 0)
    }

    /// Ends the lease of a worker if `token` holds it, and records if the work is finished.
    pub async fn release_worker_lease(
        &self,
        worker: &str,
        token: Uuid,
        is_finished: bool,
    ) -> Result<(), StoreError> {
        const RELEASE_WORKER_LEASE: Sql = Sql {
            postgres: "UPDATE worker_leases SET token = NULL, lease_until = NULL,
                    finished_at = CASE WHEN $3 THEN now() ELSE finished_at END
                WHERE worker = $1 AND token = $2",
            sqlite: "UPDATE worker_leases SET token = NULL, lease_until = NULL,
                    finished_at = CASE WHEN $3 THEN $4 ELSE finished_at END
                WHERE worker = $1 AND token = $2",
        };
        let statement = self.global_statement(RELEASE_WORKER_LEASE).bind(worker).bind(token);
        statement.bind(is_finished).bind_now().execute().await?;
        Ok(())
    }
}
