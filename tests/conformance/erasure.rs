//! Completeness of erasure. A marker word is written to every field of a session and a user. After the erasure it must not
//! occur in any column of any table, nor, on SQLite, in the bytes of the files.
//!
//! Tables and columns are read from the catalogue, so new ones are covered: a column without the marker fails the test until
//! [`fill`] writes to it or [`COLUMNS_WITHOUT_USER_DATA`] lists it as a column that cannot hold user data.

use crate::api_keys::new_key;
use crate::conversation::{
    ALL, Conversation, LONG, counted, exchange_of, key, message, record, recorded, session_id, summary,
    user_id,
};
use crate::search::{probe, seqs};
use crate::sql::{Sql, files};
use crate::support::backend::Backend;
use precis::domain::consolidation_record::RecordOutcome;
use precis::domain::exchange::Exchange;
use precis::domain::retention::RetentionPeriod;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance};
use precis::storage::SearchFilter;
use precis::storage::{NewRevision, RewindOutcome};
use std::collections::BTreeSet;
use test_case::test_case;
use uuid::Uuid;

/// The marker word.
const MARKER: &str = "plugh";

/// Text columns without user data: they hold the name of the tenant, fixed words, or time and API key.
const COLUMNS_WITHOUT_USER_DATA: [&str; 8] =
    ["has_user", "tenant_id", "role", "kind", "fork_kind", "redaction", "author", "language"];

/// Returns the text columns of a table. That of the search index has no content on SQLite.
async fn columns(sql: &mut Sql, table: &str) -> Vec<String> {
    let query = if matches!(sql, Sql::Sqlite(_)) {
        format!("SELECT name FROM pragma_table_info('{table}') WHERE type NOT IN ('', 'INTEGER', 'BLOB')")
    } else {
        format!(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0
             AND NOT attisdropped AND atttypid NOT IN ('bigint'::regtype, 'integer'::regtype, 'bytea'::regtype,
                'uuid'::regtype, 'timestamptz'::regtype)"
        )
    };
    sql.texts(&query).await
}

/// Returns the text columns that contain the marker, as `table.column`.
async fn marked(sql: &mut Sql) -> BTreeSet<String> {
    let mut marked = BTreeSet::new();
    for table in sql.tables().await {
        for column in columns(sql, &table).await {
            let text = format!("CAST({column} AS text)");
            let query = format!("SELECT count(*) FROM {table} WHERE lower({text}) LIKE '%{MARKER}%'");
            if sql.number(&query).await > 0 {
                marked.insert(format!("{table}.{column}"));
            }
        }
    }
    marked
}

/// Returns the text columns that can hold user data.
async fn markable(sql: &mut Sql) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for table in sql.erasable().await {
        let columns = columns(sql, &table).await.into_iter();
        let theirs = columns.filter(|column| !COLUMNS_WITHOUT_USER_DATA.contains(&column.as_str()));
        all.extend(theirs.map(|column| format!("{table}.{column}")));
    }
    all
}

fn provenance() -> Provenance {
    Provenance {
        model: MARKER.to_owned(),
        pool: MARKER.to_owned(),
        prompt_version: MARKER.to_owned(),
        usage: ModelUsage::default(),
        duration_ms: 1,
    }
}

/// Creates a session and a memory document of the user `plugh` with the marker in every field. Returns the token of the
/// lease, which is held.
async fn fill(demo: &Conversation) -> Uuid {
    let texts = [
        r#"{"role":"user","name":"plugh","content":"plugh plugh"}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"plugh","function":{"name":"plugh","arguments":"plugh"}}]}"#,
        r#"{"role":"tool","tool_call_id":"plugh","content":"plugh"}"#,
    ];
    // Enough data to fill pages of the database.
    let messages = texts.iter().cycle().take(300).map(|text| counted(message(text))).collect();
    let metadata = Some(r#"{"plugh":"plugh"}"#.to_owned());
    let exchange = Exchange { messages, user_id: Some(user_id(MARKER)), metadata, ..Exchange::default() };
    let first = recorded(demo.append(&exchange, Some(&key("key-plugh", &exchange))).await);
    let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
    demo.record(&exchange).await;
    let branch = session_id(&format!("branch of {session}"));
    let rewound = store.rewind_session(tenant, session, &branch, first.last_seq, 1000).await.unwrap();
    assert!(matches!(rewound, RewindOutcome::Rewound(_)), "{rewound:?}");
    let token = demo.lease().await;
    let meta = MetaConsolidation { text_before: MARKER.to_owned(), provenance: provenance() };
    let step = NewRevision { provenance: Some(provenance()), meta: Some(meta), ..demo.step(2, MARKER).await };
    demo.commit(token, &step).await.expect("committed");
    demo.fail(token, LONG, MARKER).await.expect("noted");
    store.set_retention(tenant, Some(&user_id(MARKER)), Some(RetentionPeriod::Seconds(1))).await.unwrap();
    store.set_session_retention(tenant, session, Some(RetentionPeriod::Never)).await.unwrap();
    demo.remember(&user_id(MARKER), "plugh one").await;
    demo.remember(&user_id(MARKER), "plugh two").await;
    demo.record(&exchange).await;
    demo.lease().await
}

/// Creates data that must stay: of users and sessions with similar ids, and of the tenant.
async fn fill_neighbours(demo: &Conversation) {
    for id in ["Plugh", "plug", "default"] {
        demo.session(id).record(&exchange_of(id, &["xyzzy", "b"])).await;
        demo.remember(&user_id(id), "xyzzy").await;
        let period = Some(RetentionPeriod::Seconds(1));
        demo.store.set_retention(&demo.tenant, Some(&user_id(id)), period).await.unwrap();
    }
    demo.store.create_api_key(&new_key("default", 1)).await.unwrap().expect("a new id");
    demo.store.add_token_usage(&demo.tenant, 7).await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_user_leaves_no_trace_in_tables_and_files(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    fill_neighbours(&demo).await;
    let (kept, kept_marked) = (sql.rows().await, marked(&mut sql).await);
    for id in ["plugh 1", "plugh 2"] {
        fill(&demo.session(id)).await;
    }
    assert_eq!(marked(&mut sql).await, markable(&mut sql).await, "a new column? Fill it in `fill`.");
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, MARKER).is_empty());
    for is_known in [true, false] {
        assert_eq!(demo.store.erase_user(&demo.tenant, &user_id(MARKER)).await.unwrap(), is_known);
        assert_eq!(sql.rows().await, kept);
    }
    assert_eq!(marked(&mut sql).await, kept_marked);
    demo.store.merge_index().await.unwrap();
    assert_eq!(files(&backend, MARKER), [""; 0]);
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, "xyzzy").is_empty());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_leaves_no_trace_in_tables_and_files(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    fill_neighbours(&demo).await;
    let kept = sql.rows().await;
    let marked_session = demo.session(MARKER);
    fill(&marked_session).await;
    assert!(marked_session.erase().await);
    assert!(!marked_session.erase().await);
    // The memory document belongs to the user and stays.
    let rows: BTreeSet<_> = sql.rows().await.into_iter().filter(|row| !row.contains(MARKER)).collect();
    assert_eq!(rows, kept.into_iter().collect());
    assert_eq!(files(&backend, "key-plugh"), [""; 0]);
}

/// A consolidation may still be running after the erasure; all its later writes must have no effect.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_holder_cannot_write_to_erased_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for by_user in [false, true] {
        let marked_session = demo.session(MARKER);
        let token = fill(&marked_session).await;
        let step = marked_session.step(3, MARKER).await;
        let (store, tenant, session) = (&marked_session.store, &marked_session.tenant, session_id(MARKER));
        if !by_user {
            assert!(marked_session.erase().await);
        }
        assert!(store.erase_user(tenant, &user_id(MARKER)).await.unwrap());
        for anew in [false, true] {
            if anew {
                marked_session.say(&["new"]).await;
            }
            let rows = sql.rows().await;
            assert!(!store.renew_lease(tenant, &session, token, LONG).await.unwrap());
            assert_eq!(marked_session.commit(token, &step).await, None);
            assert_eq!(
                marked_session.commit(token, &NewRevision { summary: summary(""), ..step.clone() }).await,
                None
            );
            assert_eq!(marked_session.fail(token, LONG, MARKER).await, None);
            let abandoned = record(RecordOutcome::Abandoned, Some(MARKER));
            store.record_abandoned_run(tenant, &session, token, &abandoned).await.unwrap();
            marked_session.release(token).await;
            assert_eq!(marked_session.restore(1).await, None);
            assert_eq!(sql.rows().await, rows);
            let expected = ["sessions", "messages", "search_terms"];
            assert!(rows.iter().all(|row| expected.contains(&row.table.as_str())));
        }
        assert!(marked_session.erase().await);
        assert_eq!(sql.rows().await, []);
    }
}

/// Of an erasure and exchanges of the same session at the same time, each takes effect once and completely.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_can_be_created_again_while_it_is_erased(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for round in 0..20 {
        let words: String = (0..200).map(|word| format!("w{}", word * round)).collect::<Vec<_>>().join(" ");
        demo.say(&[words.as_str(); 20]).await;
        let (first, second) = (demo.clone(), demo.clone());
        let erasures = [
            tokio::spawn(async move { first.erase().await }),
            tokio::spawn(async move { second.erase().await }),
        ];
        let new = demo.clone();
        let exchanges = tokio::spawn(async move {
            let mut appended = Vec::new();
            for _ in 0..5 {
                appended.push(new.say(&["a", "b"]).await.first_seq);
            }
            appended
        });
        let mut erased = 0;
        for erasure in erasures {
            erased += i32::from(erasure.await.unwrap());
        }
        assert!(erased >= 1, "the session existed");
        let appended = exchanges.await.unwrap();
        let history = demo.page(ALL).await.unwrap_or_default();
        let stored: Vec<i64> = history.iter().map(|message| message.seq).collect();
        assert_eq!(stored, (1..=i64::try_from(stored.len()).unwrap()).collect::<Vec<_>>(), "{appended:?}");
        assert!(
            stored.len() <= 10 && history.iter().all(|message| !message.json.contains("w0 ")),
            "{appended:?}"
        );
        let state = demo.find().await;
        assert_eq!(state.map_or(0, |state| state.last_seq), stored.last().copied().unwrap_or(0));
        assert_eq!(sql.number("SELECT count(*) FROM messages").await, i64::try_from(stored.len()).unwrap());
        assert_eq!(seqs(&demo.indexed().await), stored);
        demo.erase().await;
        assert_eq!(sql.rows().await, []);
    }
}

/// SQLite erases them in several transactions.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_many_sessions_and_versions_is_erased(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    fill_neighbours(&demo).await;
    let kept = sql.rows().await;
    for number in 0..600 {
        demo.session(&format!("{number}")).record(&exchange_of(MARKER, &["a", "b"])).await;
    }
    for number in 0..150 {
        demo.remember(&user_id(MARKER), &format!("{number}")).await;
    }
    assert!(demo.store.erase_user(&demo.tenant, &user_id(MARKER)).await.unwrap());
    assert_eq!(sql.rows().await, kept);
    assert!(!demo.store.erase_user(&demo.tenant, &user_id(MARKER)).await.unwrap());
}

/// A request that waits for another erasure of the same user must not take its first transaction for the end.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_erasures_of_a_user_end_when_nothing_is_left(backend: Backend) {
    const COUNT_SESSIONS: &str = "SELECT count(*) FROM sessions";
    let demo = Conversation::on(&backend).await;
    for number in 0..1100 {
        demo.session(&format!("{number}")).record(&exchange_of(MARKER, &["a"])).await;
    }
    let erase = async |mut sql: Sql| {
        let was_known = demo.store.erase_user(&demo.tenant, &user_id(MARKER)).await.unwrap();
        assert_eq!(sql.number(COUNT_SESSIONS).await, 0);
        was_known
    };
    let (first, second) = (Sql::on(&backend).await, Sql::on(&backend).await);
    let (first, second) = tokio::join!(erase(first), erase(second));
    assert!(first || second);
}

/// On SQLite, an erasure hides the session before it deletes the messages and the keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_of_a_session_that_is_being_erased_is_unknown() {
    const HIDE: &str =
        "UPDATE sessions SET import_token = randomblob(16), import_until = 0, user_id = '', last_seq = 0";
    let backend = Backend::sqlite().await;
    let demo = Conversation::on(&backend).await;
    let exchange = exchange_of("ada", &["a", "b"]);
    let key = key("k", &exchange);
    assert_eq!(demo.say(&["a"]).await.first_seq, 1);
    assert_eq!(recorded(demo.append(&exchange, Some(&key)).await).first_seq, 2);
    Sql::on(&backend).await.run(HIDE).await;
    let again = recorded(demo.append(&exchange, Some(&key)).await);
    assert_eq!((again.first_seq, again.replayed), (1, false));
}

/// The index has several segments, and is larger than what a step of the merge writes.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_term_of_a_removed_message_stays_in_the_index(backend: Backend) {
    let (demo, mut sql) = (Conversation::on(&backend).await, Sql::on(&backend).await);
    let large = |word: &str, from: usize| {
        (from..from + 8_000).map(|number| format!("ß{number}{word}")).collect::<Vec<_>>().join(" ")
    };
    let (other, marked_session) = (demo.session("other"), demo.session(MARKER));
    for part in 0..20 {
        other.say(&["plums", &large("xyzzy", part * 8_000)]).await;
    }
    for is_rewind in [false, true] {
        for part in 0..3 {
            marked_session.say(&["a", &large(MARKER, part * 8_000), "c"]).await;
        }
        if is_rewind {
            let (store, tenant, branch) = (&demo.store, &demo.tenant, session_id("branch"));
            let rewound =
                store.rewind_session(tenant, &marked_session.session, &branch, 0, 99).await.unwrap();
            assert!(matches!(rewound, RewindOutcome::Rewound(_)), "{rewound:?}");
            assert_eq!(demo.indexed().await.len(), other.history().await.len());
        }
        assert!(marked_session.erase().await);
        let indexed = demo.indexed().await;
        assert_eq!(seqs(&indexed), (1..=40).collect::<Vec<_>>());
        assert!(indexed.iter().all(|entry| entry.session == other.session));
        assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, MARKER).is_empty());
        demo.store.merge_index().await.unwrap();
        assert_eq!(files(&backend, MARKER), [""; 0]);
        assert_eq!(demo.lookup(&SearchFilter::default(), &probe(&[&["plum"]])).await.len(), 20);
    }
    assert!(other.erase().await);
    assert_eq!(sql.number("SELECT count(*) FROM search_terms").await, 0);
}
