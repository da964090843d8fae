//! The search index: it contains exactly the messages of the sessions, whatever happens in which order.

use crate::conversation::{Conversation, LONG, exchange_of, session_id, user_id};
use crate::search::{probe, seqs};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::domain::search::MessageRef;
use precis::domain::search::analyzer::{Analyzer, Language};
use precis::domain::search::index_terms::{self, TermQuery};
use precis::domain::search::text::OwnResults;
use precis::storage::search::SearchFilter;
use precis::storage::search_index::IndexedBatch;
use precis::storage::{self, ForkOutcome, RowBatch, Store, StoreOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use test_case::test_case;
use tokio::runtime::Handle;

/// Opens a store with an analyzer.
async fn store_with(backend: &Backend, search: Option<Analyzer>) -> Arc<Store> {
    let options = StoreOptions {
        max_connections: 2,
        acquire_timeout: LONG,
        statement_timeout: LONG,
        search,
        key_share: 0.5,
    };
    storage::connect(&backend.url(), &options).await.unwrap()
}

/// Indexes all messages again if the index has another analyzer. Returns the number of messages that were indexed.
async fn reindex(demo: &Conversation, analyzer: Analyzer) -> usize {
    demo.store.record_analyzer(analyzer, true).await.unwrap();
    demo.index_all().await
}

#[derive(Clone, Debug)]
enum Operation {
    /// Stores messages, by one of the replicas.
    Exchange {
        by: usize,
        session: usize,
        messages: usize,
        user: bool,
    },
    Import {
        session: usize,
        messages: usize,
    },
    Fork {
        session: usize,
        through: usize,
    },
    Rewind {
        session: usize,
        after: usize,
    },
    Redact {
        session: usize,
        seq: usize,
    },
    Bind {
        session: usize,
    },
    Erase {
        session: usize,
    },
    /// Indexes a batch, by one of the replicas.
    Index {
        by: usize,
    },
    /// Looks for missing messages in all tenants.
    Check {
        by: usize,
    },
    /// Changes the analyzer to that of the replica.
    Reindex {
        by: usize,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        6 => (0..3_usize, 0..4_usize, 1..4_usize, any::<bool>())
            .prop_map(|(by, session, messages, user)| Operation::Exchange { by, session, messages, user }),
        1 => (0..4_usize, 1..5_usize).prop_map(|(session, messages)| Operation::Import { session, messages }),
        2 => (0..4_usize, 1..6_usize).prop_map(|(session, through)| Operation::Fork { session, through }),
        2 => (0..4_usize, 0..6_usize).prop_map(|(session, after)| Operation::Rewind { session, after }),
        2 => (0..4_usize, 1..6_usize).prop_map(|(session, seq)| Operation::Redact { session, seq }),
        1 => (0..4_usize).prop_map(|session| Operation::Bind { session }),
        1 => (0..4_usize).prop_map(|session| Operation::Erase { session }),
        5 => (0..3_usize).prop_map(|by| Operation::Index { by }),
        1 => (0..3_usize).prop_map(|by| Operation::Check { by }),
        1 => (0..2_usize).prop_map(|by| Operation::Reindex { by }),
    ];
    vec(operation, 1..40)
}

/// Three replicas with different settings, and the sessions of a case.
struct Scene {
    replicas: [Arc<Store>; 3],
    analyzers: [Option<Analyzer>; 3],
    tenants: [TenantId; 2],
    /// Sessions that have ever existed, except branches.
    sessions: BTreeSet<(usize, SessionId)>,
    /// Number of names that were used.
    used: usize,
}

/// A visible message: its position, content and user.
type Visible = (TenantId, SessionId, i64, Message, Option<precis::domain::id::UserId>);

impl Scene {
    /// Returns a word that no other message contains. Both analyzers return it unchanged.
    fn word(&mut self) -> String {
        self.used += 1;
        format!("plums Hauses w{}x", self.used)
    }

    fn session(&mut self, number: usize) -> Conversation {
        let (tenant, id) = (number % 2, session_id(&format!("s{number}")));
        self.sessions.insert((tenant, id.clone()));
        Conversation {
            store: Arc::clone(&self.replicas[0]),
            tenant: self.tenants[tenant].clone(),
            session: id,
        }
    }

    async fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Exchange { by, session, messages, user } => {
                let texts: Vec<String> = (0..messages).map(|_| self.word()).collect();
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                let demo = Conversation { store: Arc::clone(&self.replicas[by]), ..self.session(session) };
                let owner = demo.store.session_owner(&demo.tenant, &demo.session).await.unwrap();
                if user || owner.user.is_some() {
                    demo.record(&exchange_of("ada", &texts)).await;
                } else {
                    demo.say(&texts).await;
                }
            }
            Operation::Import { session, messages } => {
                let demo = self.session(session);
                let messages: Vec<ImportedMessage> = (1..)
                    .zip((0..messages).map(|_| self.word()).collect::<Vec<_>>())
                    .map(|(seq, text)| ImportedMessage {
                        seq,
                        created_at: None,
                        redacted_at: None,
                        message: Message::text(Role::User, &text),
                        tokens: 1,
                    })
                    .collect();
                let last_seq = i64::try_from(messages.len()).unwrap();
                let imported = ImportedSession { last_seq, tokens: last_seq, ..ImportedSession::default() };
                let (sender, batches) = tokio::sync::mpsc::channel(1);
                sender.send(RowBatch { messages, revisions: Vec::new() }).await.unwrap();
                drop(sender);
                let users = (None, None);
                demo.store
                    .import_session(&demo.tenant, &demo.session, users, &imported, batches)
                    .await
                    .unwrap();
            }
            Operation::Fork { session, through } => {
                let demo = self.session(session);
                self.used += 1;
                let target = session_id(&format!("f{}", self.used));
                let through = i64::try_from(through).unwrap();
                let forked = demo.store.fork_session(&demo.tenant, &demo.session, &target, through);
                if let ForkOutcome::Forked(_) = forked.await.unwrap() {
                    self.sessions.insert((session % 2, target));
                }
            }
            Operation::Rewind { session, after } => {
                let demo = self.session(session);
                self.used += 1;
                let branch = session_id(&format!("b{}", self.used));
                let after = i64::try_from(after).unwrap();
                demo.store.rewind_session(&demo.tenant, &demo.session, &branch, after, 1000).await.unwrap();
            }
            Operation::Redact { session, seq } => {
                let demo = self.session(session);
                let seq = i64::try_from(seq).unwrap();
                demo.store.redact_message(&demo.tenant, &demo.session, seq, None).await.unwrap();
            }
            Operation::Bind { session } => {
                let demo = self.session(session);
                demo.store.bind_session(&demo.tenant, &demo.session, &user_id("ada")).await.unwrap();
            }
            Operation::Erase { session } => _ = self.session(session).erase().await,
            Operation::Index { by } => _ = self.replicas[by].index_batch().await.unwrap(),
            Operation::Check { by } => _ = self.replicas[by].index_state().await.unwrap(),
            Operation::Reindex { by } => {
                let analyzer = self.analyzers[by].unwrap();
                self.replicas[by].record_analyzer(analyzer, true).await.unwrap();
            }
        }
    }

    async fn visible(&self) -> Vec<Visible> {
        let mut visible = Vec::new();
        for (tenant, session) in &self.sessions {
            let store = Arc::clone(&self.replicas[0]);
            let demo =
                Conversation { store, tenant: self.tenants[*tenant].clone(), session: session.clone() };
            let Some(state) = demo.find().await else { continue };
            for message in demo.history().await.into_iter().filter(|message| message.redacted_at.is_none()) {
                let parsed = precis::domain::format::read(&message.json).unwrap();
                visible.push((
                    demo.tenant.clone(),
                    session.clone(),
                    message.seq,
                    parsed,
                    state.user_id.clone(),
                ));
            }
        }
        visible
    }

    /// Checks that each visible message is found by the index, or by reading the missing messages.
    async fn check_found(&self) {
        let (store, all) = (&self.replicas[0], SearchFilter::default());
        let visible = self.visible().await;
        for tenant in &self.tenants {
            let missing = store.missing_messages(tenant, &all, 1000, i64::MAX).await.unwrap();
            assert_eq!(missing.others, 0);
            let missing = missing.newest.into_iter().filter(|(_, message)| message.redacted_at.is_none());
            let missing: Vec<_> =
                missing.map(|(session, message)| (session, message.seq, message.json)).collect();
            for (_, session, seq, message, user) in visible.iter().filter(|(of, ..)| of == tenant) {
                if missing.iter().any(|(of, at, json)| (of, at, &**json) == (session, seq, message.json())) {
                    continue;
                }
                let word = message.content().split(' ').next_back().unwrap();
                let query = [probe(&[&[word]])];
                let demo = Conversation {
                    store: Arc::clone(store),
                    tenant: tenant.clone(),
                    session: session.clone(),
                };
                for filter in [all.clone(), SearchFilter { user: user.clone(), ..all.clone() }] {
                    let found = demo.lookup(&filter, &query, 99).await.remove(0);
                    let is_found = found.iter().any(|found| (&found.session, found.seq) == (session, *seq));
                    assert!(is_found, "{session} {seq} {word}");
                }
            }
        }
    }

    /// Checks that the index contains each visible message once, with its terms by the recorded analyzer, and no others.
    async fn check_complete(&self, sql: &mut Sql) {
        let version = sql.texts("SELECT version FROM search_analyzer").await.remove(0);
        let analyzer = Analyzer::parse_version(&version).unwrap();
        let visible = self.visible().await;
        for tenant in &self.tenants {
            let (store, session) = (Arc::clone(&self.replicas[0]), session_id("any"));
            let demo = Conversation { store, tenant: tenant.clone(), session };
            let of_tenant = || visible.iter().filter(|(of, ..)| of == tenant);
            let place = |(_, session, seq, ..): &Visible| MessageRef { session: session.clone(), seq: *seq };
            let mut expected: Vec<MessageRef> = of_tenant().map(place).collect();
            expected.sort();
            let mut indexed = demo.indexed().await;
            // Branches of rewinds.
            indexed.retain(|message| !message.session.as_str().starts_with('b'));
            assert_eq!(indexed, expected);
            for visible in of_tenant() {
                let (_, session, _, message, user) = visible;
                let words: Vec<TermQuery> =
                    index_terms::message_terms(analyzer, message, &mut OwnResults::default())
                        .split(' ')
                        .map(|term| probe(&[&[term]]))
                        .collect();
                let filter = SearchFilter {
                    session: Some(session.clone()),
                    user: user.clone(),
                    role: Some(message.role()),
                    ..SearchFilter::default()
                };
                for found in demo.lookup(&filter, &words, usize::MAX).await {
                    assert!(found.contains(&place(visible)), "{message:?}");
                }
            }
        }
        assert_eq!(sql.unindexed().await, [""; 0]);
        let sources = "SELECT (SELECT count(*) FROM search_removals)
            + (SELECT count(*) FROM search_pages WHERE segment_id NOT IN (SELECT id FROM search_segments))";
        assert_eq!(sql.number(sources).await, 0, "nothing is left to be removed");
    }
}

/// Replicas with other settings, without search, or next to each other, lead to the same index in any order.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_is_complete_after_any_operations_and_search_never_misses(backend: Backend) {
    let analyzers = [Some(Analyzer::default()), Some(Analyzer::new(Language::German)), None];
    let mut replicas = Vec::new();
    for analyzer in analyzers {
        replicas.push(store_with(&backend, analyzer).await);
    }
    let replicas: [Arc<Store>; 3] = replicas.try_into().unwrap();
    let cases = std::env::var("PRECIS_MODEL_CASES").map_or(20, |cases| cases.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, number) = (Handle::current(), Cell::new(0));
    let result = tokio::task::block_in_place(|| {
        TestRunner::new(config).run(&operations(), |operations| {
            number.set(number.get() + 1);
            handle.block_on(async {
                let tenants =
                    ["one", "two"].map(|name| TenantId::new(format!("{name}{}", number.get())).unwrap());
                let replicas = replicas.clone();
                let mut scene = Scene { replicas, analyzers, tenants, sessions: BTreeSet::new(), used: 0 };
                for operation in operations {
                    scene.apply(operation).await;
                    scene.check_found().await;
                }
                let mut sql = Sql::on(&backend).await;
                for replica in &scene.replicas[..2] {
                    replica.index_state().await.unwrap();
                    while replica.index_batch().await.unwrap().is_some() {}
                }
                scene.check_complete(&mut sql).await;
                scene.check_found().await;
            });
            Ok(())
        })
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_with_another_analyzer_replaces_all_entries(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.tenant("acme").say(&["plums"]).await;
    let (english, none) = (Analyzer::default(), Analyzer::new(Language::None));
    // An index without entries has the analyzer of the settings, whichever process was first.
    let store = store_with(&backend, Some(none)).await;
    assert_eq!(demo.store.record_analyzer(english, false).await.unwrap(), "english-2");
    assert_eq!(store.record_analyzer(none, false).await.unwrap(), "none-1");
    assert_eq!(demo.store.record_analyzer(english, false).await.unwrap(), "english-2");
    assert_eq!(demo.index_all().await, 2);
    assert_eq!(store.record_analyzer(none, false).await.unwrap(), "english-2");
    assert_eq!(reindex(&Conversation { store, ..demo.clone() }, none).await, 2);
    let state = demo.store.index_state().await.unwrap();
    assert_eq!((&*state.analyzer, state.is_rebuilding, state.messages), ("none-1", false, 0));
    let all = SearchFilter::default();
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 1);
    // All replicas use the analyzer recorded in the index.
    demo.say(&["plums"]).await;
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 2);
    // Only the messages stored without an index are missing.
    let store = store_with(&backend, None).await;
    Conversation { store, ..demo.session("other") }.say(&["plums", "pears"]).await;
    assert_eq!(demo.store.index_state().await.unwrap().messages, 2);
    assert_eq!(demo.index_all().await, 2);
    assert_eq!(reindex(&demo, english).await, 5);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await.len(), 3);
    // An unknown analyzer is left to another release.
    let mut sql = Sql::on(&backend).await;
    sql.run("UPDATE search_analyzer SET version = 'english-99'").await;
    demo.say(&["plums"]).await;
    assert_eq!(demo.store.index_batch().await.unwrap(), None);
    assert_eq!(demo.lookup(&all, &[probe(&[&["plum"]])], 9).await[0].len(), 0);
    // The store still knows the earlier analyzer, but the index has another one.
    assert_eq!(sql.unindexed().await, ["default demo 2 3"]);
}

/// An interrupted rebuild is continued by any replica, in parts.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_continues_where_it_was_interrupted(backend: Backend) {
    const SESSIONS: usize = 600;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for number in 0..SESSIONS {
        demo.session(&format!("s{number}")).say(&["plums"]).await;
    }
    demo.tenant("acme").say(&["plums"]).await;
    demo.index_all().await;
    demo.store.record_analyzer(Analyzer::new(Language::None), true).await.unwrap();
    assert!(sql.unindexed().await.is_empty(), "the change itself marks nothing");
    for _ in 0..2 {
        assert!(demo.store.index_batch().await.unwrap().is_some());
    }
    let other = store_with(&backend, Some(Analyzer::default())).await;
    assert!(other.index_state().await.unwrap().is_rebuilding);
    // Until all sessions are marked, searches use the entries of the earlier analyzer.
    assert_eq!(demo.indexed().await.len(), 600);
    while let Some(batch) = other.index_batch().await.unwrap() {
        // A search finds neither entries of the earlier analyzer nor sessions that are not marked.
        assert!(batch.messages == 0 || !other.index_state().await.unwrap().is_rebuilding);
    }
    let acme = demo.tenant("acme");
    let plums = probe(&[&["plums"]]);
    let found = async |demo: &Conversation| {
        demo.lookup(&SearchFilter::default(), std::slice::from_ref(&plums), 9999).await[0].len()
    };
    assert_eq!((found(&demo).await, found(&acme).await), (600, 1));
    assert!(!other.index_state().await.unwrap().is_rebuilding);
}

/// A search looks up the entries that were indexed last as the newest ones.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_are_indexed_from_the_oldest_session_on(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let without_search = store_with(&backend, None).await;
    // The names are in another order than the times, and all sessions need several batches.
    for session in ["b", "c", "a"] {
        let session = Conversation { store: Arc::clone(&without_search), ..demo.session(session) };
        session.say(&["plums"; 700]).await;
    }
    demo.index_all().await;
    let found = demo.lookup(&SearchFilter::default(), &[probe(&[&["plum"]])], 9999).await.remove(0);
    let mut sessions: Vec<&str> = found.iter().map(|found| found.session.as_str()).collect();
    sessions.dedup();
    assert_eq!(sessions, ["a", "c", "b"]);
}

/// Rows must not get the ids of deleted ones, or the removal of a session could remove later messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_stored_after_an_erasure_are_found(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (all, plum) = (SearchFilter::default(), probe(&[&["plum"]]));
    let other = demo.session("other");
    for (kept, erased) in [(200, 300), (1, 500), (3, 2), (0, 52), (300, 1)] {
        let before = demo.lookup_terms(&all, &plum, 9999).await.len();
        other.say(&vec!["plum"; erased]).await;
        assert_eq!(demo.lookup_terms(&all, &plum, 9999).await.len(), before + erased);
        assert!(other.erase().await);
        if kept > 0 {
            demo.say(&vec!["plum"; kept]).await;
        }
        let found = demo.lookup_terms(&all, &plum, 9999).await;
        let expected: Vec<i64> = (1..=(before + kept) as i64).rev().collect();
        assert_eq!(seqs(&found), expected);
    }
}

/// A batch has about a thousand messages and half a megabyte, even within one session.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_are_indexed_in_batches(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&vec!["plums"; 1500]).await;
    for number in 0..3 {
        demo.session(&format!("s{number}")).say(&["plums"; 300]).await;
    }
    sql.delay_indexing("1 = 1").await;
    demo.store.index_state().await.unwrap();
    let mut batches = Vec::new();
    while let Some(batch) = demo.store.index_batch().await.unwrap() {
        batches.push(batch.messages);
    }
    batches.retain(|batch| *batch > 0);
    assert_eq!(batches, [1000, 1000, 400]);
    let large = "plums ".repeat(60_000);
    demo.session("large").say(&[&large, &large, &large, "plums"]).await;
    demo.store.index_state().await.unwrap();
    for unindexed in [&["default large 2 4"][..], &[]] {
        let batch = demo.store.index_batch().await.unwrap();
        assert_eq!(batch, Some(IndexedBatch { messages: 2 }));
        assert_eq!(sql.unindexed().await, unindexed);
    }
}

/// The newest messages are searched without the index, up to a number and a size; the others are counted.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newest_missing_messages_are_returned_and_the_others_counted(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let other = demo.session("other");
    demo.say(&["a", "b", "c"]).await;
    other.record(&exchange_of("ada", &["d", "e", "f"])).await;
    demo.tenant("acme").say(&["g"]).await;
    demo.index_all().await;
    sql.delay_indexing("1 = 1").await;
    let (store, tenant) = (&demo.store, &demo.tenant);
    let read = async |filter: SearchFilter, most, bytes| {
        let missing = store.missing_messages(tenant, &filter, most, bytes).await.unwrap();
        let found = missing.newest.iter().map(|(session, message)| format!("{session} {}", message.seq));
        let mut found: Vec<String> = found.collect();
        found.sort();
        (found.join(", "), missing.others)
    };
    let all = SearchFilter::default;
    let six = "demo 1, demo 2, demo 3, other 1, other 2, other 3";
    assert_eq!(read(all(), 99, 9999).await, (six.to_owned(), 0));
    assert_eq!(read(all(), 4, 9999).await, ("demo 3, other 1, other 2, other 3".to_owned(), 2));
    assert_eq!(read(all(), 2, 9999).await, ("other 2, other 3".to_owned(), 4));
    assert_eq!(read(all(), 99, 40).await, ("other 2, other 3".to_owned(), 4));
    let of_session = SearchFilter { session: Some(demo.session.clone()), ..all() };
    assert_eq!(read(of_session, 2, 9999).await, ("demo 2, demo 3".to_owned(), 1));
    let of_user = SearchFilter { user: Some(user_id("ada")), ..all() };
    assert_eq!(read(of_user, 99, 9999).await, ("other 1, other 2, other 3".to_owned(), 0));
    demo.index_all().await;
    assert_eq!(read(all(), 99, 9999).await, (String::new(), 0));
}

/// A row of the Postgres index holds at most a megabyte. A rejected row would block all missing messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_with_too_many_terms_is_indexed_partially(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.index_all().await;
    let characters = ('\u{4e00}'..).take(3000).map(|base| format!("{base}{}", "\u{f77}".repeat(13)));
    let text = format!("plums {}", characters.collect::<String>());
    demo.say(&[&text, "plums"]).await;
    demo.session("other").say(&[&text[..text.floor_char_boundary(40_000)], "plums"]).await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 4);
}

/// Every replica finds its messages, whichever replica indexes them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_indexing_creates_each_entry_once(backend: Backend) {
    const EXCHANGES: usize = 40;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let plum = [probe(&[&["plum"]])];
    let storing = (0..4).map(|who| {
        let (demo, plum) = (demo.session(&format!("s{who}")), plum.clone());
        tokio::spawn(async move {
            let scope = SearchFilter { session: Some(demo.session.clone()), ..SearchFilter::default() };
            for stored in 1..=EXCHANGES {
                demo.say(&["plums"]).await;
                // A message is indexed before it stops to be missing.
                let missing = demo.store.missing_messages(&demo.tenant, &scope, 999, 9999).await.unwrap();
                let found = demo.lookup(&scope, &plum, 9999).await.remove(0);
                let missing = missing.newest.into_iter().map(|(_, message)| message.seq);
                let found = found.iter().map(|message| message.seq);
                let found: BTreeSet<i64> = missing.chain(found).collect();
                assert_eq!(found.len(), stored);
            }
        })
    });
    let indexing = (0..2).map(|_| {
        let demo = demo.clone();
        tokio::spawn(async move {
            loop {
                demo.index_all().await;
                tokio::task::yield_now().await;
            }
        })
    });
    let (storing, indexing): (Vec<_>, Vec<_>) = (storing.collect(), indexing.collect());
    for task in storing {
        task.await.unwrap();
    }
    for task in indexing {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    demo.index_all().await;
    assert_eq!(sql.unindexed().await, [""; 0]);
    assert_eq!(demo.indexed().await.len(), 4 * EXCHANGES);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_of_erased_session_are_not_indexed(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for _ in 0..20 {
        for text in ["plums", "pears", "apples"] {
            demo.say(&[text, text]).await;
        }
        sql.delay_indexing("1 = 1").await;
        demo.store.index_state().await.unwrap();
        let (indexed, erased) = tokio::join!(demo.store.index_batch(), demo.erase());
        indexed.unwrap();
        assert!(erased);
        assert_eq!(demo.indexed().await, []);
        // Nor those of a session with the same id.
        demo.say(&["pears"]).await;
        demo.index_all().await;
        assert_eq!(demo.indexed().await.len(), 1);
        assert!(demo.erase().await);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_message_does_not_block_indexing_of_others(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["plums"]).await;
    let other = demo.session("other");
    other.say(&["plums"]).await;
    sql.run(
        "INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
            SELECT tenant_id, session_id, 2, role, tokens, 'no message', created_at FROM messages WHERE session_id = 'demo';
        UPDATE sessions SET last_seq = 2 WHERE session_id = 'demo'",
    )
    .await;
    sql.delay_indexing("1 = 1").await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 2);
    assert_eq!(sql.unindexed().await, [""; 0]);
}

/// Many rows become a segment, and many segments a larger one. The index contains each message once all the time.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_become_segments_and_segments_are_merged(backend: Backend) {
    const EXCHANGES: usize = 32 * 8 * 2;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.index_all().await;
    let (mut most_rows, mut most_segments) = (0, 0);
    for number in 0..EXCHANGES {
        demo.session(&format!("s{}", number % 7)).say(&["plums", "pears"]).await;
        while demo.store.index_batch().await.unwrap().is_some() {}
        most_rows = most_rows.max(sql.number("SELECT count(*) FROM search_recent").await);
        most_segments = most_segments.max(sql.number("SELECT count(*) FROM search_segments").await);
        if number % 50 == 0 {
            assert_eq!(demo.indexed().await.len(), 2 * (number + 1));
        }
    }
    assert!(most_rows < 32 && most_segments < 2 * 8, "{most_rows} {most_segments}");
    assert!(sql.number("SELECT max(messages) FROM search_segments").await >= 8 * 64);
    let sessions = (0..7).map(|session| session_id(&format!("s{session}")));
    let seqs_of = |session: usize| 2 * EXCHANGES.div_ceil(7).min((EXCHANGES - session).div_ceil(7));
    let expected: Vec<MessageRef> = sessions
        .enumerate()
        .flat_map(|(number, session)| {
            (1..=seqs_of(number) as i64).map(move |seq| MessageRef { session: session.clone(), seq })
        })
        .collect();
    assert_eq!(demo.indexed().await, expected);
    let of_one = SearchFilter { session: Some(session_id("s3")), ..SearchFilter::default() };
    let found = demo.lookup(&of_one, &[probe(&[&["plum"]])], 9999).await.remove(0);
    assert!(seqs(&found).into_iter().eq((1..=seqs_of(3) as i64).rev().step_by(2).map(|seq| seq - 1)));
    // An erasure removes the messages from all of them.
    assert!(demo.session("s3").erase().await);
    let rest: Vec<MessageRef> = expected.into_iter().filter(|found| found.session.as_str() != "s3").collect();
    assert_eq!(demo.indexed().await, rest);
}

/// Few messages become a segment, too, if their terms are large: searches read the others.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_rows_become_a_segment(backend: Backend) {
    const MESSAGES: usize = 60;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let text =
        |message: usize| (0..10_000).map(|word| format!("w{message}x{word}")).collect::<Vec<_>>().join(" ");
    let texts: Vec<String> = (0..MESSAGES).map(text).collect();
    demo.say(&texts.iter().map(String::as_str).collect::<Vec<_>>()).await;
    demo.index_all().await;
    assert!(sql.number("SELECT count(*) FROM search_segments").await > 0);
    let unmerged = sql.number("SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM search_recent").await;
    assert!(unmerged < 1024 * 1024, "{unmerged} bytes");
    assert_eq!(demo.indexed().await.len(), MESSAGES);
    // A removal reads them in parts.
    assert!(demo.erase().await);
    assert_eq!(demo.indexed().await, []);
}
