//! Sessions: appending exchanges to them, reading and listing them, binding them to a user.

use super::append;
use super::rows::{self, session_columns};
use super::search_terms::{Replaces, index_messages};
use super::statement::{DbRow as _, Sql, Statement};
use super::store::{bounded_page_on_postgres, bounded_page_on_sqlite, decode, decode_page};
use super::values::{DbTime, user_from_column};
use super::{
    AppendOutcome, AppendRequest, Page, SessionFilter, SessionHead, SessionOwner, SessionPosition, Store,
    StoreError,
};
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::session::Session;
use futures_util::FutureExt as _;

impl Store {
    /// Appends the messages of an exchange, and creates the session if it does not exist. `seq` is allocated in the
    /// same transaction, without gaps or duplicates under concurrent writes. Idempotency keys are kept for at least 24
    /// hours.
    ///
    /// Exchanges that are stored at the same time share a transaction. The exchange is stored even if the caller stops
    /// waiting.
    pub async fn append_exchange(&self, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
        /// Other requests can erase the session again and again.
        const MAX_ATTEMPTS: usize = 100;
        let request = append::analyzed(self.analyzer(), request).await;
        for _ in 1..MAX_ATTEMPTS {
            match self.appends.append(request.clone()).await {
                // The process that imported the session has died, or the session is being erased.
                Err(StoreError::SessionImporting)
                    if self.remove_stale_import(&request.tenant, &request.session).boxed().await? => {}
                outcome => return outcome,
            }
        }
        self.appends.append(request).await
    }

    /// Returns the exchange that was appended with an idempotency key, and the fingerprint of its request.
    pub async fn keyed_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        key: &str,
    ) -> Result<Option<(PersistedExchange, Vec<u8>)>, StoreError> {
        const SELECT_KEYED_EXCHANGE: &str = "\
            SELECT k.fingerprint, k.first_seq, k.last_seq, k.created_at,
                CASE WHEN k.has_user THEN s.user_id ELSE '' END AS user_id
            FROM idempotency_keys AS k
                JOIN sessions AS s ON s.tenant_id = k.tenant_id AND s.session_id = k.session_id
            WHERE k.tenant_id = $1 AND k.session_id = $2 AND k.key = $3 AND s.last_seq > 0";
        let statement = self.statement(tenant, SELECT_KEYED_EXCHANGE).bind(session.as_str()).bind(key);
        decode(statement.read().await?, |row| {
            let user_id = user_from_column(row.field("user_id")?)?;
            Ok((PersistedExchange { user_id, ..rows::keyed_exchange(row)? }, row.field("fingerprint")?))
        })
    }

    /// Returns the state of a session, or `None` before its first exchange.
    pub async fn session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Session>, StoreError> {
        const SELECT_SESSION: &str = concat!(
            "SELECT ",
            session_columns!(),
            " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0"
        );
        let statement = self.statement(tenant, SELECT_SESSION).bind(session.as_str());
        decode(statement.read().await?, rows::session)
    }

    /// Returns the owner of a session, also before its first exchange.
    pub async fn session_owner(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<SessionOwner, StoreError> {
        const SELECT_SESSION_OWNER: &str =
            "SELECT user_id, last_seq FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        let statement = self.statement(tenant, SELECT_SESSION_OWNER).bind(session.as_str());
        let Some(row) = statement.read().await? else {
            return Ok(SessionOwner::default());
        };
        let user = user_from_column(row.field("user_id")?)?;
        Ok(SessionOwner { user, exists: row.field::<i64>("last_seq")? > 0 })
    }

    /// Binds a session to a user, unless it is bound already, and returns its user. A session without exchanges does not exist
    /// afterwards either: it only has a user. Of concurrent calls, one binds the session.
    pub async fn bind_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
    ) -> Result<UserId, StoreError> {
        match self.within_limit(self.bind(tenant, session, user)).await {
            // The process that imported the session has died.
            Err(StoreError::SessionImporting) if self.remove_stale_import(tenant, session).await? => {
                self.within_limit(self.bind(tenant, session, user)).await
            }
            owner => owner,
        }
    }

    /// Binds a session, unless its import was interrupted.
    pub(super) async fn bind(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
    ) -> Result<UserId, StoreError> {
        /// A session that gets its user also gets another incarnation, so that copies without the user become invalid.
        macro_rules! bind_session {
            ($columns:literal, $now:literal, $hour:literal, $value:literal, $random:literal) => {
                concat!(
                    "INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at,
                        updated_at, activity_hour", $columns, ")
                    VALUES ($1, $2, $3, '{}', 0, 0, ", $now, ", ", $now, ", ", $hour, $value, ")
                    ON CONFLICT (tenant_id, session_id) DO UPDATE SET user_id = excluded.user_id, incarnation = ", $random,
                    " WHERE s.user_id = ''
                    RETURNING last_seq, language"
                )
            };
        }
        const BIND_SESSION: Sql = Sql {
            postgres: bind_session!(
                "",
                "now()",
                "floor(extract(epoch FROM now()) / 3600)",
                "",
                "gen_random_uuid()"
            ),
            sqlite: bind_session!(
                ", incarnation",
                "$4",
                "$4 / 3600000000",
                ", randomblob(16)",
                "randomblob(16)"
            ),
        };
        let mut transaction = self.begin(tenant).await?;
        let statement = transaction.statement(BIND_SESSION).bind(tenant.as_str()).bind(session.as_str());
        let Some(row) = statement.bind(user.as_str()).bind_now().read().await? else {
            transaction.rollback().await?;
            return Ok(self.session_owner(tenant, session).await?.user.unwrap_or_else(|| user.clone()));
        };
        // The messages are found by the user from now on.
        let last_seq: i64 = row.field("last_seq")?;
        if let Some(analyzer) = self.analyzer().filter(|_| last_seq > 0) {
            let (analyzer, owner) = (analyzer.of_session(rows::language(&row)?), (session, Some(user)));
            index_messages(&mut transaction, analyzer, tenant, owner, 1..=last_seq, Replaces::Existing)
                .await?;
        }
        transaction.commit().await?;
        Ok(user.clone())
    }

    /// Returns at most `limit` sessions that match the filter, most recent activity first; fewer if their texts exceed
    /// `max_bytes`.
    pub async fn sessions(
        &self,
        tenant: &TenantId,
        filter: SessionFilter<'_>,
        after: Option<&SessionPosition>,
        limit: i64,
        max_bytes: i64,
    ) -> Result<Page<Session>, StoreError> {
        /// The hour comes first because the index contains the hour, not the time; see the migration. It is compared
        /// even on the first page, so that every plan of the statement starts in the index. It is a parameter because
        /// row-level security keeps Postgres from using the index for anything that is still to be computed.
        macro_rules! from_sessions {
            ($condition:literal) => {
                concat!(
                    " FROM sessions WHERE tenant_id = $1 AND activity_hour <= $2
                        AND ($3 IS NULL OR (updated_at, session_id) < ($3, $4)) AND last_seq > 0 ",
                    $condition,
                    " ORDER BY activity_hour DESC, updated_at DESC, session_id DESC LIMIT $5"
                )
            };
        }
        macro_rules! select_sessions {
            ($condition:literal) => {
                Sql {
                    postgres: bounded_page_on_postgres!(
                        concat!("SELECT activity_hour, ", session_columns!(), from_sessions!($condition)),
                        "octet_length(summary) + octet_length(metadata)",
                        "activity_hour DESC, updated_at DESC, session_id DESC",
                        "$6"
                    ),
                    sqlite: bounded_page_on_sqlite!(
                        concat!(
                            "SELECT activity_hour AS hour, updated_at AS time, session_id AS id,
                                octet_length(summary) + octet_length(metadata) AS bytes",
                            from_sessions!($condition)
                        ),
                        session_columns!(),
                        "sessions ON tenant_id = $1 AND session_id = id",
                        "hour DESC, time DESC, id DESC",
                        "$6"
                    ),
                }
            };
        }
        const SELECT_SESSIONS: Sql = select_sessions!("");
        const SELECT_SESSIONS_OF_USER: Sql = select_sessions!("AND user_id = $7");
        const SELECT_FORKS: Sql = select_sessions!("AND forked_from = $7");
        const SELECT_FORKS_OF_USER: Sql = select_sessions!("AND forked_from = $7 AND user_id = $8");
        let SessionFilter { user, forked_from } = filter;
        let sql = match (forked_from, user) {
            (None, None) => SELECT_SESSIONS,
            (None, Some(_)) => SELECT_SESSIONS_OF_USER,
            (Some(_), None) => SELECT_FORKS,
            (Some(_), Some(_)) => SELECT_FORKS_OF_USER,
        };
        let hour = after.map_or(i64::MAX, |after| after.updated_at.unix_timestamp().div_euclid(3600));
        let statement = self
            .statement(tenant, sql)
            .bind(hour)
            .bind(after.map(|after| DbTime(after.updated_at)))
            .bind(after.map(|after| after.session_id.as_str()))
            // One more session shows if there is another page.
            .bind(limit.saturating_add(1))
            .bind(max_bytes);
        let conditions = [forked_from.map(SessionId::as_str), user.map(UserId::as_str)];
        let statement = conditions.into_iter().flatten().fold(statement, Statement::bind);
        decode_page(&statement.read_all_in_index_order().await?, limit, rows::session)
    }

    /// Replaces the metadata of a session, a JSON object.
    pub async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError> {
        const UPDATE_METADATA: &str = concat!(
            "UPDATE sessions SET metadata = $3 WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0 RETURNING ",
            session_columns!()
        );
        let statement = self.statement(tenant, UPDATE_METADATA).bind(session.as_str()).bind(metadata);
        decode(statement.write_returning().await?, rows::session)
    }

    /// Returns the state of a session that decides if a copy of its context is current, or `None` if the session does
    /// not exist. Sessions that are read at the same time share a statement.
    pub async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        self.heads.run((tenant.clone(), session.clone())).await
    }
}
