//! The search index: it contains exactly the messages of the sessions, whatever happens in which order.

use crate::conversation::{Conversation, LONG, exchange, session_id, user_id};
use crate::search::{probe, seqs};
use crate::sql::{Sql, files};
use crate::support::backend::Backend;
use crate::support::factor::test_factor;
use futures_util::future::join_all;
use precis::domain::exchange::{Exchange, MessageFacts};
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::format;
use precis::domain::id::{SessionId, TenantId, UserId};
use precis::domain::message::{Message, Role};
use precis::domain::search::MessageRef;
use precis::domain::search::analyzer::{Analyzer, Language};
use precis::domain::search::index_terms::TermQuery;
use precis::storage::SearchFilter;
use precis::storage::{self, ForkOutcome, IndexState, RewindOutcome, RowBatch, Store, StoreOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use test_case::test_case;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

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

/// Words that all analyzers return unchanged.
const WORDS: [&str; 3] = ["w0x", "w1x", "w2x"];

/// An exchange: the number of its session, the words of its messages, and `true` if it names a user.
type NewExchange = (usize, Vec<usize>, bool);

#[derive(Clone, Debug)]
enum Operation {
    /// Stores exchanges at the same time.
    Exchanges(Vec<NewExchange>),
    Import(usize, Vec<usize>),
    /// The others choose one of the sessions that have existed, including forks and branches.
    Fork(Index, i64),
    Rewind(Index, i64),
    Append(Index, Vec<usize>),
    Redact(Index, i64),
    Bind(Index),
    Erase(Index),
    Reindex(Language),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let words = || vec(0..WORDS.len(), 1..4);
    let operation = prop_oneof![
        5 => vec((0..6_usize, words(), any::<bool>()), 1..5).prop_map(Operation::Exchanges),
        1 => (0..6_usize, words()).prop_map(|(session, words)| Operation::Import(session, words)),
        2 => (any::<Index>(), 1..6_i64).prop_map(|(session, through)| Operation::Fork(session, through)),
        2 => (any::<Index>(), 0..6_i64).prop_map(|(session, after)| Operation::Rewind(session, after)),
        3 => (any::<Index>(), words()).prop_map(|(session, words)| Operation::Append(session, words)),
        2 => (any::<Index>(), 1..6_i64).prop_map(|(session, seq)| Operation::Redact(session, seq)),
        1 => any::<Index>().prop_map(Operation::Bind),
        1 => any::<Index>().prop_map(Operation::Erase),
        1 => prop_oneof![Just(Language::English), Just(Language::German)].prop_map(Operation::Reindex),
    ];
    vec(operation, 1..30)
}

/// The sessions of a case, in two tenants that use the same ids.
struct Scene {
    store: Arc<Store>,
    tenants: [TenantId; 2],
    /// Sessions that have ever existed. Messages of branches up to this one are not searched.
    sessions: BTreeMap<(usize, SessionId), i64>,
    /// Number of names that were used.
    used: u64,
    /// A word of each message that was ever stored.
    unique: Vec<String>,
}

/// A searchable message.
struct Visible {
    tenant: usize,
    place: MessageRef,
    user: Option<UserId>,
    role: Role,
    words: Vec<String>,
}

impl Scene {
    /// Returns a text with a word that no other message has. The index may store only the end of a word, so all ends differ.
    fn text(&mut self, word: usize) -> String {
        self.used += 1;
        let digits = format!("{:016x}", self.used.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let letters: Vec<char> = "bcdfghjklmnpqrtv".chars().collect();
        let digits = digits.chars().filter_map(|digit| digit.to_digit(16));
        let unique: String = digits.map(|digit| letters[digit as usize]).chain(['x']).collect();
        self.unique.push(unique.clone());
        format!("Hauses {} {unique}", WORDS[word])
    }

    fn texts(&mut self, words: &[usize]) -> Vec<String> {
        words.iter().map(|word| self.text(*word)).collect()
    }

    fn at(&self, (tenant, session): &(usize, SessionId)) -> Conversation {
        let (store, tenant) = (Arc::clone(&self.store), self.tenants[*tenant].clone());
        Conversation { store, tenant, session: session.clone() }
    }

    /// Returns a session with a number. Each tenant has three of them.
    fn numbered(&mut self, number: usize) -> (usize, SessionId) {
        let place = (number % 2, session_id(&format!("s{}", number / 2)));
        self.sessions.entry(place.clone()).or_default();
        place
    }

    async fn apply(&mut self, operation: Operation) {
        let known: Vec<_> = self.sessions.keys().cloned().collect();
        let chosen = |index: Index| index.get(&known).clone();
        self.used += 1;
        let new = session_id(&format!("n{}", self.used));
        match operation {
            Operation::Exchanges(exchanges) => {
                let mut appends = Vec::new();
                for (number, words, names_user) in exchanges {
                    let (place, texts) = (self.numbered(number), self.texts(&words));
                    let exchange = exchange(&texts.iter().map(String::as_str).collect::<Vec<_>>());
                    let user_id = names_user.then(|| user_id("ada"));
                    let demo = self.at(&place);
                    appends.push(async move { demo.record(&Exchange { user_id, ..exchange }).await });
                }
                join_all(appends).await;
            }
            Operation::Import(number, words) => {
                let place = self.numbered(number);
                let message = |(seq, text): (i64, String)| ImportedMessage {
                    seq,
                    facts: MessageFacts::default(),
                    message: Message::text(Role::User, &text),
                    tokens: 1,
                };
                let messages: Vec<_> = (1..).zip(self.texts(&words)).map(message).collect();
                let last_seq = i64::try_from(messages.len()).unwrap();
                let imported = ImportedSession { last_seq, tokens: last_seq, ..ImportedSession::default() };
                let (sender, batches) = mpsc::channel(1);
                sender.send(RowBatch { messages, revisions: Vec::new() }).await.unwrap();
                drop(sender);
                let (demo, users) = (self.at(&place), (None, None));
                let import =
                    demo.store.import_session(&demo.tenant, &demo.session, users, &imported, batches);
                import.await.unwrap();
            }
            _ if known.is_empty() => {}
            Operation::Append(index, words) => {
                let (place, texts) = (chosen(index), self.texts(&words));
                self.at(&place).say(&texts.iter().map(String::as_str).collect::<Vec<_>>()).await;
            }
            Operation::Fork(index, through) => {
                let place = chosen(index);
                let demo = self.at(&place);
                let forked = demo.store.fork_session(&demo.tenant, &demo.session, &new, through);
                if let ForkOutcome::Forked(_) = forked.await.unwrap() {
                    self.sessions.insert((place.0, new), 0);
                }
            }
            Operation::Rewind(index, after) => {
                let place = chosen(index);
                let demo = self.at(&place);
                let last_seq = demo.find().await.map_or(0, |state| state.last_seq);
                let rewound = demo.store.rewind_session(&demo.tenant, &demo.session, &new, after, 1000);
                if let RewindOutcome::Rewound(_) = rewound.await.unwrap() {
                    let unsearched = self.sessions.get_mut(&place).unwrap();
                    *unsearched = after.min(*unsearched);
                    self.sessions.insert((place.0, new), last_seq);
                }
            }
            Operation::Redact(index, seq) => {
                let demo = self.at(&chosen(index));
                demo.store.redact_message(&demo.tenant, &demo.session, seq, None).await.unwrap();
            }
            Operation::Bind(index) => {
                let demo = self.at(&chosen(index));
                demo.store.bind_session(&demo.tenant, &demo.session, &user_id("ada")).await.unwrap();
            }
            Operation::Erase(index) => _ = self.at(&chosen(index)).erase().await,
            Operation::Reindex(language) => {
                self.store.reindex(Analyzer::new(language), |_| ()).await.unwrap();
            }
        }
        // A session with the id of an erased branch is not a branch.
        let places: Vec<_> = self.sessions.keys().cloned().collect();
        for place in places {
            if self.at(&place).find().await.is_none() {
                self.sessions.insert(place, 0);
            }
        }
    }

    async fn visible(&self) -> Vec<Visible> {
        let mut visible = Vec::new();
        for (place, unsearched) in &self.sessions {
            let demo = self.at(place);
            let Some(state) = demo.find().await else { continue };
            for message in demo.history().await {
                if message.seq > *unsearched && message.redacted_at.is_none() {
                    let parsed = format::read(&message.json).unwrap();
                    visible.push(Visible {
                        tenant: place.0,
                        place: MessageRef { session: demo.session.clone(), seq: message.seq },
                        user: state.user_id.clone(),
                        role: parsed.role(),
                        words: parsed.content().split(' ').map(str::to_owned).collect(),
                    });
                }
            }
        }
        visible
    }

    /// Checks that searches with these filters find exactly the visible messages.
    async fn check(&self, visible: &[Visible], filters: &[SearchFilter]) {
        let mut queries: Vec<TermQuery> = WORDS.iter().map(|word| probe(&[&[word]])).collect();
        queries.push(TermQuery::default());
        for (number, tenant) in self.tenants.iter().enumerate() {
            for filter in filters {
                let found = self.store.find_matches(tenant, filter, &queries).await.unwrap();
                for (found, word) in found.into_iter().zip(WORDS.iter().map(Some).chain([None])) {
                    let mut found: Vec<_> = found.into_iter().map(|found| found.message).collect();
                    found.sort();
                    let is_expected = |message: &&Visible| {
                        message.tenant == number
                            && filter.session.as_ref().is_none_or(|session| *session == message.place.session)
                            && (filter.user.is_none() || filter.user == message.user)
                            && filter.role.is_none_or(|role| role == message.role)
                            && word.is_none_or(|word| message.words.iter().any(|found| found == word))
                    };
                    let expected = visible.iter().filter(is_expected).map(|message| message.place.clone());
                    let mut expected: Vec<_> = expected.collect();
                    expected.sort();
                    assert_eq!(found, expected, "{tenant} {filter:?} {word:?}");
                }
            }
        }
    }

    /// Checks that the files of SQLite contain the words of stored messages only.
    async fn check_files(&self, backend: &Backend) {
        self.store.merge_index().await.unwrap();
        self.store.remove_redacted_traces().await;
        let mut stored = String::new();
        for place in self.sessions.keys() {
            let demo = self.at(place);
            if demo.find().await.is_none() {
                continue;
            }
            let messages = demo.history().await;
            stored.extend(messages.iter().map(|message| message.json.as_str()));
        }
        for word in self.unique.iter().filter(|word| !stored.contains(word.as_str())) {
            assert_eq!(files(backend, &word[8..]), [""; 0], "{word}");
        }
    }

    /// Returns the filters for each session, user and role, and combinations of them.
    fn filters(&self) -> Vec<SearchFilter> {
        let sessions: BTreeSet<_> = self.sessions.keys().map(|(_, session)| session.clone()).collect();
        let sessions = [None].into_iter().chain(sessions.into_iter().map(Some));
        let filters = sessions.flat_map(|session| {
            [None, Some(user_id("ada")), Some(user_id("bob"))].into_iter().flat_map(move |user| {
                let filter = SearchFilter { session: session.clone(), user, ..SearchFilter::default() };
                [None, Some(Role::User), Some(Role::Assistant)]
                    .map(|role| SearchFilter { role, ..filter.clone() })
            })
        });
        filters.collect()
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searches_find_exactly_the_visible_messages_after_any_operations(backend: Backend) {
    let store = backend.store().await;
    let cases = 10 * test_factor();
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, number) = (Handle::current(), Cell::new(0));
    let result = tokio::task::block_in_place(|| {
        TestRunner::new(config).run(&operations(), |operations| {
            number.set(number.get() + 1);
            handle.block_on(async {
                let tenants =
                    ["one", "two"].map(|name| TenantId::new(format!("{name}{}", number.get())).unwrap());
                let (store, used) = (Arc::clone(&store), number.get() * 1_000_000);
                let (sessions, unique) = (BTreeMap::new(), Vec::new());
                let mut scene = Scene { store, tenants, sessions, used, unique };
                for operation in operations {
                    scene.apply(operation).await;
                    scene.check(&scene.visible().await, &[SearchFilter::default()]).await;
                }
                scene.check(&scene.visible().await, &scene.filters()).await;
                scene.check_files(&backend).await;
                scene.check(&scene.visible().await, &[SearchFilter::default()]).await;
            });
            Ok(())
        })
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_with_another_analyzer_replaces_all_terms(backend: Backend) {
    const COUNT_INDEXED: &str = "SELECT count(*) FROM search_terms";
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (english, none) = (Analyzer::default(), Analyzer::new(Language::None));
    let (all, plum, plums) = (SearchFilter::default(), probe(&[&["plum"]]), probe(&[&["plums"]]));
    // Without stems, only the word itself is found.
    let found = async |demo: &Conversation| {
        [demo.lookup(&all, &plum).await.len(), demo.lookup(&all, &plums).await.len()]
    };
    assert_eq!(demo.store.prepare_index().await.unwrap(), IndexState::Complete);
    demo.say(&["plums"]).await;
    demo.tenant("acme").say(&["plums"]).await;
    // More messages and larger ones than are analysed at once.
    demo.session("long").say(&vec!["grapes"; 1200]).await;
    demo.session("large").say(&["plums", &"x ".repeat(1 << 19), "plums"]).await;
    assert_eq!(found(&demo).await, [3, 3]);
    // A service with another analyzer uses that of the index, for its own messages, too.
    let other = Conversation { store: store_with(&backend, Some(none)).await, ..demo.clone() };
    let state = other.store.prepare_index().await.unwrap();
    assert_eq!(state, IndexState::OtherAnalyzer("auto-3".to_owned()));
    other.say(&["plums"]).await;
    assert_eq!((other.store.analyzer(), found(&other).await), (Some(english), [4, 4]));
    let steps = Cell::new(0);
    assert_eq!(other.store.reindex(none, |indexed| steps.set(indexed)).await.unwrap(), 1206);
    assert_eq!((steps.get(), sql.number(COUNT_INDEXED).await), (1206, 1206));
    assert_eq!((found(&other).await, found(&demo.tenant("acme")).await), ([0, 4], [0, 1]));
    assert_eq!(other.store.index_state(none).await.unwrap(), IndexState::Complete);
    other.say(&["plums"]).await;
    assert_eq!(found(&other).await, [0, 5]);
    // Messages that were stored without search are missing, and those of another analyzer are not.
    let without = Conversation { store: store_with(&backend, None).await, ..demo.session("without") };
    assert_eq!(without.store.prepare_index().await.unwrap(), IndexState::Incomplete);
    without.say(&["plums", "pears"]).await;
    assert_eq!(demo.store.prepare_index().await.unwrap(), IndexState::Incomplete);
    assert_eq!(found(&demo).await, [0, 5]);
    assert_eq!(demo.store.reindex(english, |_| ()).await.unwrap(), 1209);
    assert_eq!(demo.store.prepare_index().await.unwrap(), IndexState::Complete);
    assert_eq!((found(&demo).await, sql.number(COUNT_INDEXED).await), ([6, 6], 1209));
    // An analyzer of a newer release is unknown.
    sql.run("UPDATE search_analyzer SET version = 'english-99'").await;
    let state = demo.store.prepare_index().await.unwrap();
    assert_eq!(state, IndexState::OtherAnalyzer("english-99".to_owned()));
    assert_eq!(demo.store.analyzer(), Some(english));
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
        let before = demo.lookup(&all, &plum).await.len();
        other.say(&vec!["plum"; erased]).await;
        assert_eq!(demo.lookup(&all, &plum).await.len(), (before + erased).min(1000));
        assert!(other.erase().await);
        if kept > 0 {
            demo.say(&vec!["plum"; kept]).await;
        }
        let expected: Vec<i64> = (1..=(before + kept) as i64).rev().collect();
        assert_eq!(seqs(&demo.lookup(&all, &plum).await), expected);
    }
}

/// Postgres stores at most a megabyte of terms of a message. A rejected row would fail the exchange.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_with_too_many_terms_is_indexed_partially(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let characters = ('\u{4e00}'..).take(3000).map(|base| format!("{base}{}", "\u{f77}".repeat(13)));
    let text = format!("plums {}", characters.collect::<String>());
    demo.say(&[&text, "plums"]).await;
    demo.session("other").say(&[&text[..text.floor_char_boundary(40_000)], "plums"]).await;
    assert_eq!(demo.lookup(&SearchFilter::default(), &probe(&[&["plum"]])).await.len(), 4);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_message_does_not_block_indexing_of_others(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.session("other").say(&["plums"]).await;
    let unreadable = "\
        INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
            SELECT tenant_id, session_id, 2, role, tokens, 'no message', created_at FROM messages WHERE session_id = 'demo';
        UPDATE sessions SET last_seq = 2 WHERE session_id = 'demo'";
    Sql::on(&backend).await.run(unreadable).await;
    assert_eq!(demo.store.reindex(Analyzer::default(), |_| ()).await.unwrap(), 2);
    assert_eq!(demo.lookup(&SearchFilter::default(), &probe(&[&["plum"]])).await.len(), 2);
}

/// Exchanges, forks, bindings and erasures run while the index is rebuilt and merged.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_changes_leave_each_message_in_the_index_once(backend: Backend) {
    const TURNS: usize = 30;
    let demo = Conversation::on(&backend).await;
    let writing = (0..4).map(|writer| {
        let demo = demo.session(&format!("s{writer}"));
        tokio::spawn(async move {
            for turn in 0..TURNS {
                let scope = SearchFilter { session: Some(demo.session.clone()), ..SearchFilter::default() };
                let stored = demo.say(&["plums", "plums"]).await;
                let found = demo.lookup(&scope, &probe(&[&["plum"]])).await;
                assert_eq!(seqs(&found), (1..=stored.last_seq).rev().collect::<Vec<_>>());
                match turn % 10 {
                    3 => {
                        let ada = user_id("ada");
                        demo.store.bind_session(&demo.tenant, &demo.session, &ada).await.unwrap();
                    }
                    6 => {
                        let fork = session_id(&format!("fork of {} {turn}", demo.session));
                        demo.store.fork_session(&demo.tenant, &demo.session, &fork, 3).await.unwrap();
                    }
                    9 => assert!(demo.erase().await),
                    _ => {}
                }
            }
        })
    });
    let writing: Vec<_> = writing.collect();
    while !writing.iter().all(tokio::task::JoinHandle::is_finished) {
        demo.store.reindex(Analyzer::default(), |_| ()).await.unwrap();
        demo.store.merge_index().await.unwrap();
    }
    for task in writing {
        task.await.unwrap();
    }
    let mut sql = Sql::on(&backend).await;
    let stored = sql.texts("SELECT session_id || ' ' || seq FROM messages").await;
    let indexed = demo.indexed().await.into_iter().map(|found| format!("{} {}", found.session, found.seq));
    let indexed: Vec<_> = indexed.collect();
    assert_eq!(indexed.len(), stored.len());
    assert_eq!(indexed.into_iter().collect::<BTreeSet<_>>(), stored.into_iter().collect());
}
