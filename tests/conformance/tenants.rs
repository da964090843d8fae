//! Isolation of tenants with the same ids. Every method of the store is called for a tenant without data; a new method needs
//! a line here.

use crate::api_keys::new_key;
use crate::conversation::{ALL, Conversation, LONG, exchange_of, key, record, recorded, session_id, user_id};
use crate::search::probe;
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::consolidation_record::RecordOutcome;
use precis::domain::id::UserId;
use precis::domain::retention::{RetentionPeriod, RetentionPeriods};
use precis::domain::search::MessageRef;
use precis::domain::search::index_terms::{TermPattern, TermQuery};
use precis::domain::tail::TailLimit;
use precis::storage::SearchFilter;
use precis::storage::{
    CandidateScope, DefaultRetention, ForkOutcome, MessageRange, RewindOutcome, SessionFilter,
};
use precis::storage::{LeaseCondition, NewRevision};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use test_case::test_case;
use time::OffsetDateTime;
use uuid::Uuid;

/// A statement without a condition on the tenant, or with another tenant than its transaction, must neither read nor change
/// rows. All tables with a tenant are read from the catalogue, so new ones are covered.
#[tokio::test]
async fn row_level_security_isolates_tenants_on_postgres() {
    const TABLES: &str = "\
        SELECT c.table_name::text FROM information_schema.columns AS c
        WHERE c.table_schema = 'public' AND c.column_name = 'tenant_id' ORDER BY 1";
    let backend = Backend::postgres().await;
    let (acme, ada) = (Conversation::on(&backend).await.tenant("acme"), user_id("ada"));
    fill(&acme, &ada).await;
    let forked = acme.store.fork_session(&acme.tenant, &acme.session, &session_id("fork"), 1).await.unwrap();
    assert!(matches!(forked, ForkOutcome::Forked(_)), "{forked:?}");
    acme.store.add_token_usage(&acme.tenant, 7).await.unwrap();
    let mut owner = PgConnection::connect(&backend.url()).await.unwrap();
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let tables = sql.texts(TABLES).await;
    assert!(tables.len() >= 7, "{tables:?}");
    for table in tables.iter().filter(|table| !WITHOUT_ROW_LEVEL_SECURITY.contains(&table.as_str())) {
        assert!(sql.number(&format!("SELECT count(*) FROM {table}")).await > 0, "{table}");
        for (setting, visible) in
            [("", false), ("SET precis.tenant = 'other';", false), ("SET precis.tenant = 'acme';", true)]
        {
            owner.execute(AssertSqlSafe(format!("RESET precis.tenant; {setting}"))).await.unwrap();
            let count = AssertSqlSafe(format!("SELECT count(*) FROM {table} WHERE tenant_id = 'acme'"));
            let seen: i64 = sqlx::query_scalar(count).fetch_one(&mut owner).await.unwrap();
            assert_eq!(seen > 0, visible, "{table} {setting}");
            if !visible {
                let delete = AssertSqlSafe(format!("DELETE FROM {table}"));
                assert_eq!(owner.execute(delete).await.unwrap().rows_affected(), 0, "{table} {setting}");
            }
        }
        // A row cannot be moved to another tenant either.
        let given = AssertSqlSafe(format!("UPDATE {table} SET tenant_id = 'other'"));
        let error = owner.execute(given).await.expect_err(table);
        let said = error.to_string();
        assert!(said.contains("row-level security") || said.contains("append-only"), "{table}: {said}");
    }
    assert_eq!(sql.rows().await, rows);
}

/// Tables without row-level security: they are read before the tenant is known or for all tenants. The search index would not be used
/// with it; `tests/architecture.rs` checks its statements.
const WITHOUT_ROW_LEVEL_SECURITY: [&str; 3] = ["api_keys", "search_terms", "tenants"];

/// A period that every session exceeds in these tests.
const SHORT: RetentionPeriod = RetentionPeriod::Seconds(1);

/// Creates a session with a held lease and a memory document. Returns the token and a revision that could be committed.
async fn fill(demo: &Conversation, user: &UserId) -> (Uuid, NewRevision) {
    let exchange = exchange_of(user.as_str(), &["a", "b", "c", "d"]);
    recorded(demo.append(&exchange, Some(&key("k", &exchange))).await);
    demo.consolidate(1, "one").await;
    demo.remember(user, "memory").await;
    demo.store.set_retention(&demo.tenant, Some(user), Some(SHORT)).await.unwrap();
    let token = demo.lease().await;
    (token, demo.step(3, "three").await)
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_tenant_can_neither_read_nor_write(backend: Backend) {
    let (acme, ada) = (Conversation::on(&backend).await.tenant("acme"), user_id("ada"));
    let (token, step) = fill(&acme, &ada).await;
    acme.store.add_token_usage(&acme.tenant, 7).await.unwrap();
    acme.store.create_api_key(&new_key("acme", 1)).await.unwrap().unwrap();
    assert_eq!(acme.indexed().await.len(), 4);
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    for name in ["Acme", "acme ", "default", "ACME"] {
        let other = acme.tenant(name);
        let (store, tenant, session) = (&other.store, &other.tenant, &other.session);
        // Reading.
        assert_eq!(other.find().await, None);
        assert_eq!(other.page(ALL).await, None);
        assert_eq!(store.message_metadata(tenant, session, 0, 9).await.unwrap(), []);
        let part = MessageRange { after_seq: 0, last_seq: 9, limit: 9, max_bytes: 999 };
        assert_eq!(store.message_range(tenant, session, part).await.unwrap(), []);
        let snapshot = other.context(Some(&ada), TailLimit { messages: 9, bytes: 999 }).await;
        assert!(snapshot.session.is_none() && snapshot.memory.is_none() && snapshot.tail.is_empty());
        for filter in [
            SessionFilter::default(),
            SessionFilter { user: Some(&ada), ..SessionFilter::default() },
            SessionFilter { forked_from: Some(session), ..SessionFilter::default() },
        ] {
            assert_eq!(store.sessions(tenant, filter, None, 9, 999).await.unwrap().items, []);
        }
        assert_eq!(other.revisions().await, None);
        let queries = [TermQuery(vec![vec![TermPattern::exact("a")]]), TermQuery::default()];
        for session in [None, Some(session.clone())] {
            for user in [None, Some(ada.clone())] {
                let filter = SearchFilter { session: session.clone(), user, ..SearchFilter::default() };
                assert_eq!(store.find_matches(tenant, &filter, &queries).await.unwrap(), [[], []]);
            }
        }
        let place = MessageRef { session: session.clone(), seq: 1 };
        assert_eq!(store.fetch_messages(tenant, None, &[place], &[0..=1], i64::MAX).await.unwrap(), []);
        assert_eq!(store.tokens_used_today(tenant).await.unwrap(), 0);
        assert_eq!(store.api_keys(Some(tenant)).await.unwrap(), []);
        assert_eq!(store.memory_document(tenant, &ada).await.unwrap(), None);
        assert_eq!(store.memory_revisions(tenant, &ada, i64::MAX, 9, 999).await.unwrap().items, []);
        let later = OffsetDateTime::now_utc() + LONG;
        let periods = store.retention_periods(tenant, Some(&ada)).await.unwrap();
        assert_eq!(periods, RetentionPeriods::default());
        assert_eq!(store.session_retention(tenant, session).await.unwrap(), None);
        assert_eq!(store.stored_bytes(tenant).await.unwrap(), 0);
        assert_eq!(store.users_with_retention(tenant, None, 9).await.unwrap(), []);
        let short = DefaultRetention { after_last_exchange: Some(SHORT), branches_after: Some(SHORT) };
        for scope in [
            CandidateScope::Tenant { last_hour: i64::MAX },
            CandidateScope::User { user: &ada, last_hour: i64::MAX },
            CandidateScope::OwnPeriod { last_hour: i64::MAX },
            CandidateScope::Branches { until: later },
        ] {
            let found = store.retention_candidates(tenant, scope, None, short, later, 9).await.unwrap();
            assert_eq!(found, []);
        }
        // Writing.
        assert!(!store.set_session_retention(tenant, session, Some(SHORT)).await.unwrap());
        assert!(!store.erase_expired_session(tenant, session, short, later).await.unwrap());
        store.set_retention(tenant, Some(&ada), None).await.unwrap();
        assert_eq!(store.set_metadata(tenant, session, r#"{"x":1}"#).await.unwrap(), None);
        assert_eq!(other.take(Uuid::new_v4(), LeaseCondition::Force, LONG).await, None);
        assert!(!store.renew_lease(tenant, session, token, LONG).await.unwrap());
        other.release(token).await;
        assert_eq!(other.commit(token, &step).await, None);
        assert_eq!(other.fail(token, LONG, "why").await, None);
        let abandoned = record(RecordOutcome::Abandoned, Some("why"));
        store.record_abandoned_run(tenant, session, token, &abandoned).await.unwrap();
        let records = store.consolidation_records(tenant, session, i64::MAX, 10, i64::MAX).await.unwrap();
        assert_eq!(records.map_or(0, |records| records.items.len()), 0);
        assert_eq!((other.restore(0).await, other.restore(1).await), (None, None));
        for base_revision in 0..3 {
            assert_eq!(other.edit(base_revision, "mine").await, None);
        }
        let new = session_id("new");
        let forked = store.fork_session(tenant, session, &new, 0).await.unwrap();
        assert_eq!(forked, ForkOutcome::NotFound);
        let rewound = store.rewind_session(tenant, session, &new, 0, 9).await.unwrap();
        assert_eq!(rewound, RewindOutcome::NotFound);
        assert!(!other.erase().await);
        assert!(!store.erase_user(tenant, &ada).await.unwrap());
        assert_eq!(sql.rows().await, rows, "{name}");
    }
    assert!(acme.commit(token, &step).await.is_some());
}

/// All ids and words of the tenants are the same. Only the messages with the word are others.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_returns_messages_of_the_tenant_only(backend: Backend) {
    const TENANTS: [&str; 3] = ["acme", "Acme", "acme "];
    let demo = Conversation::on(&backend).await;
    for (number, tenant) in TENANTS.iter().enumerate() {
        let mut texts = ["pear"; 9];
        texts[number] = "plum";
        texts[number + 3] = "plum pear";
        for session in ["demo", "other"] {
            demo.tenant(tenant).session(session).record(&exchange_of("ada", &texts)).await;
        }
    }
    let sessions = [None, Some(session_id("demo"))];
    let users = [None, Some(user_id("ada"))];
    for (number, tenant) in (0..).zip(&TENANTS) {
        for (session, user) in
            sessions.iter().flat_map(|session| users.iter().map(move |user| (session, user)))
        {
            let filter =
                SearchFilter { session: session.clone(), user: user.clone(), ..SearchFilter::default() };
            for excluded in ["cherry", "pear"] {
                let excluded_terms = vec![excluded.to_owned()];
                let filter = SearchFilter { excluded_terms, ..filter.clone() };
                let found = demo.tenant(tenant).lookup(&filter, &probe(&[&["plum", "pl*"]])).await;
                let found: Vec<_> = found.iter().map(|found| (found.session.as_str(), found.seq)).collect();
                let mut expected = Vec::new();
                for session in if session.is_some() { &["demo"][..] } else { &["other", "demo"] } {
                    expected.extend((excluded == "cherry").then_some((*session, number + 4)));
                    expected.push((*session, number + 1));
                }
                assert_eq!(found, expected, "{tenant} {filter:?}");
            }
        }
    }
}
