//! Forks and rewinds.

use crate::conversation::{Conversation, LONG, exchange, exchange_of, key, recorded, session_id, user_id};
use crate::sql::{Sql, files};
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::export_format::ImportedSession;
use precis::domain::revision::Revision;
use precis::domain::session::{ConsolidationState, ForkKind, ForkOrigin, Session};
use precis::storage::{
    AppendOutcome, ForkOutcome, ImportOutcome, LeaseCondition, RedactionOutcome, RewindOutcome,
    SessionFilter, StoredMessage,
};
use std::collections::BTreeSet;
use test_case::test_case;
use uuid::Uuid;

impl Conversation {
    async fn fork(&self, target: &str, through_seq: i64) -> ForkOutcome {
        self.store.fork_session(&self.tenant, &self.session, &session_id(target), through_seq).await.unwrap()
    }

    async fn rewind(&self, branch: &str, after_seq: i64) -> RewindOutcome {
        let (store, branch) = (&self.store, session_id(branch));
        store.rewind_session(&self.tenant, &self.session, &branch, after_seq, 100_000).await.unwrap()
    }

    async fn rewound(&self, branch: &str, after_seq: i64) -> Session {
        match self.rewind(branch, after_seq).await {
            RewindOutcome::Rewound(session) => *session,
            other => panic!("not rewound: {other:?}"),
        }
    }

    /// Returns the `seq`s of the messages of the session in the search index.
    async fn indexed_seqs(&self) -> Vec<i64> {
        let indexed = self.indexed().await.into_iter().filter(|found| found.session == self.session);
        indexed.map(|found| found.seq).collect()
    }
}

/// Creates a session of eight messages in four exchanges. Its revisions have the cursors 2, 5, 2 (a restore) and 4. It is so large that
/// SQLite copies it in several transactions.
async fn fill(demo: &Conversation) {
    let padding = " ".repeat(700_000);
    for turn in ["a", "b", "c", "d"] {
        let metadata = Some(format!(r#"{{"turn":"{turn}"}}"#));
        let texts = [&*format!("{turn}{padding}"), "an answer"];
        let exchange = Exchange { metadata, user_id: Some(user_id("ada")), ..exchange(&texts) };
        recorded(demo.append(&exchange, Some(&key(turn, &exchange))).await);
    }
    demo.consolidate(2, "two").await;
    demo.consolidate(5, &format!("five{padding}")).await;
    demo.restore(1).await.expect("restored");
    demo.consolidate(4, &format!("two four{padding}")).await;
}

/// Returns the revisions of a session, oldest first.
async fn revisions(demo: &Conversation) -> Vec<Revision> {
    let mut revisions = demo.revisions().await.expect("the session exists");
    revisions.reverse();
    revisions
}

/// The content of a session.
struct Content {
    state: Session,
    history: Vec<StoredMessage>,
    revisions: Vec<Revision>,
}

async fn content(demo: &Conversation) -> Content {
    Content { state: demo.state().await, history: demo.history().await, revisions: revisions(demo).await }
}

/// Checks that a session has the part of `whole` up to a message, and nothing else.
async fn assert_is_part(part: &Conversation, whole: &Content, through_seq: i64) {
    let Content { state, history, revisions } = content(part).await;
    let kept = usize::try_from(through_seq).unwrap();
    assert_eq!(history, whole.history[..kept]);
    let expected = whole.revisions.iter().filter(|revision| revision.cursor <= through_seq);
    let expected = (1..).zip(expected).map(|(revision, kept)| Revision { revision, ..kept.clone() });
    assert_eq!(revisions, expected.collect::<Vec<_>>());
    let last = revisions.last();
    assert_eq!(state.summary, last.map(|revision| revision.summary.clone()).unwrap_or_default());
    let cursor = last.map_or(0, |revision| revision.cursor);
    assert_eq!((state.last_seq, state.cursor, state.revision), (through_seq, cursor, revisions.len() as i64));
    let tokens = |count: i64| {
        let counted = history.iter().take(usize::try_from(count).unwrap());
        counted.map(|message| message.json.len() as i64).sum::<i64>()
    };
    assert_eq!((state.tokens, state.cursor_tokens), (tokens(through_seq), tokens(cursor)));
    assert_eq!(state.consolidation, ConsolidationState::default());
    let of = |state: &Session| (state.user_id.clone(), state.metadata.clone(), state.created_at);
    assert_eq!(of(&state), of(&whole.state));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_has_the_messages_and_revisions_up_to_its_point(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    demo.lease().await;
    // The first fork gives the session its lineage.
    demo.fork("fork 0", 8).await;
    let mut sql = Sql::on(&backend).await;
    let (whole, rows) = (content(&demo).await, sql.rows().await);
    for through_seq in 1..=8 {
        let fork = demo.session(&format!("fork {through_seq}"));
        let ForkOutcome::Forked(state) = demo.fork(fork.session.as_str(), through_seq).await else {
            panic!("not forked");
        };
        assert_eq!(*state, fork.state().await);
        let origin = ForkOrigin { session_id: session_id("demo"), through_seq, kind: ForkKind::Fork };
        assert_eq!(state.forked_from, Some(origin));
        assert!(state.updated_at > whole.state.updated_at && state.incarnation != whole.state.incarnation);
        assert_is_part(&fork, &whole, through_seq).await;
    }
    let cursors: Vec<i64> = whole.revisions.iter().map(|revision| revision.cursor).collect();
    assert_eq!(cursors, [2, 5, 2, 4]);
    // The source is unchanged.
    let after: BTreeSet<_> = sql.rows().await.into_iter().collect();
    assert!(rows.into_iter().all(|row| after.contains(&row)));
    // A fork is a session like others.
    let fork = demo.session("fork 3");
    assert_eq!(fork.say(&["x"]).await.first_seq, 4);
    fork.consolidate(4, "anew").await;
    assert_eq!(demo.history().await, whole.history);
}

/// Compares all columns of the schema, so that the test also covers columns of later migrations.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_and_branch_have_every_column_of_messages_and_revisions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    let mut sql = Sql::on(&backend).await;
    let rows = async |sql: &mut Sql, id: &str| -> Vec<String> {
        let rows = sql.rows().await.into_iter();
        let rows = rows.filter(|row| ["messages", "revisions"].contains(&row.table.as_str()));
        let rows = rows.filter(|row| row.contains(id)).map(|row| row.text().replace(id, "demo"));
        // SQLite has a column of ids.
        let without_id =
            |row: String| row.trim_start_matches(|c: char| c.is_ascii_digit() || c == ',').to_owned();
        let mut rows: Vec<String> = rows.map(without_id).collect();
        rows.sort();
        rows
    };
    let original = rows(&mut sql, "demo").await;
    assert_eq!(original.len(), 12);
    assert!(matches!(demo.fork("fork", 8).await, ForkOutcome::Forked(_)));
    assert_eq!(rows(&mut sql, "fork").await, original);
    demo.rewound("branch", 0).await;
    assert_eq!(rows(&mut sql, "branch").await, original);
    assert_eq!(rows(&mut sql, "demo").await, [""; 0]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_forks_and_rewinds_change_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    demo.session("other").say(&["x"]).await;
    // The first fork gives the session its lineage.
    demo.fork("fork 0", 8).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let state = Box::new(demo.state().await);
    assert_eq!(demo.fork("new", 9).await, ForkOutcome::AfterEnd { last_seq: 8 });
    assert_eq!(demo.fork("other", 3).await, ForkOutcome::Exists);
    assert_eq!(demo.fork("demo", 3).await, ForkOutcome::Exists);
    assert_eq!(demo.session("unknown").fork("new", 0).await, ForkOutcome::NotFound);
    assert_eq!(demo.tenant("acme").fork("new", 0).await, ForkOutcome::NotFound);
    assert_eq!(demo.rewind("new", 9).await, RewindOutcome::AfterEnd { last_seq: 8 });
    assert_eq!(demo.rewind("new", 8).await, RewindOutcome::Unchanged(state));
    assert_eq!(demo.session("unknown").rewind("new", 0).await, RewindOutcome::NotFound);
    assert_eq!(demo.tenant("acme").rewind("new", 0).await, RewindOutcome::NotFound);
    let limited = demo.store.rewind_session(&demo.tenant, &demo.session, &session_id("new"), 7, 7).await;
    assert_eq!(limited.unwrap(), RewindOutcome::TooLarge { last_seq: 8 });
    demo.store
        .rewind_session(&demo.tenant, &demo.session, &session_id("other"), 7, 8)
        .await
        .expect_err("the branch exists");
    assert_eq!(sql.rows().await, rows);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasing_source_or_fork_leaves_the_other(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    let mut sql = Sql::on(&backend).await;
    let before = sql.rows().await;
    for id in ["fork one", "fork two"] {
        assert!(matches!(demo.fork(id, 5).await, ForkOutcome::Forked(_)));
    }
    let (one, two) = (demo.session("fork one"), demo.session("fork two"));
    assert!(two.erase().await);
    let kept = content(&one).await;
    assert!(demo.erase().await);
    assert_eq!((one.history().await, revisions(&one).await), (kept.history, kept.revisions));
    assert_eq!(one.state().await, Session { forked_from: None, ..kept.state });
    assert!(sql.rows().await.iter().all(|row| !row.contains("demo") && !row.contains("fork two")));
    assert!(one.erase().await);
    assert!(before.len() > 15 && sql.rows().await.is_empty());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_keeps_the_old_branch(backend: Backend) {
    for after_seq in 1..=7 {
        let demo = Conversation::on(&backend).await.session(&format!("demo {after_seq}"));
        fill(&demo).await;
        let whole = content(&demo).await;
        let branch = demo.session(&format!("branch {after_seq}"));
        let state = demo.rewound(branch.session.as_str(), after_seq).await;
        assert_eq!(state, demo.state().await);
        assert_is_part(&demo, &whole, after_seq).await;
        assert!(state.updated_at > whole.state.updated_at && state.forked_from.is_none());
        assert_ne!(state.incarnation, whole.state.incarnation);
        let kept = content(&branch).await;
        assert_eq!((&kept.history, &kept.revisions), (&whole.history, &whole.revisions));
        let kind = ForkKind::Rewind;
        let origin = ForkOrigin { session_id: demo.session.clone(), through_seq: after_seq, kind };
        let incarnation = kept.state.incarnation;
        assert_ne!(incarnation, whole.state.incarnation);
        let expected = Session { forked_from: Some(origin), incarnation, ..whole.state };
        assert_eq!(kept.state, Session { session_id: branch.session.clone(), ..expected });
        // The session goes on from there.
        let next = demo.say(&["again", "another answer"]).await;
        assert_eq!((next.first_seq, next.incarnation), (after_seq + 1, Some(state.incarnation)));
        assert!(next.created_at >= state.updated_at);
        let revision = demo.consolidate(after_seq + 2, "anew").await;
        assert_eq!(revision.revision, state.revision + 1);
        assert_eq!(branch.history().await, kept.history);
    }
}

/// The session is as before its first exchange, except for its user. Its branches are erased with it only.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewound_to_its_beginning_keeps_user_and_branches(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    let whole = content(&demo).await;
    let state = demo.rewound("branch", 0).await;
    assert_eq!((state.last_seq, state.tokens, state.cursor, state.revision), (0, 0, 0, 0));
    assert_eq!((state.user_id, state.summary.text), (Some(user_id("ada")), String::new()));
    assert_eq!(demo.find().await, None);
    assert_eq!(demo.fork("fork", 0).await, ForkOutcome::NotFound);
    assert!(matches!(demo.rewind("branch 2", 0).await, RewindOutcome::Unchanged(_)));
    // An import would replace the row of the session, and the branch belongs to it.
    let imported = ImportedSession { last_seq: 0, ..ImportedSession::default() };
    let (_, batches) = tokio::sync::mpsc::channel(1);
    let users = (None, None);
    let outcome = demo.store.import_session(&demo.tenant, &demo.session, users, &imported, batches).await;
    assert_eq!(outcome.unwrap(), ImportOutcome::Exists);
    let branch = demo.session("branch");
    assert_eq!(branch.history().await, whole.history);
    let of_other_user = exchange_of("bo", &["x"]);
    assert!(matches!(demo.append(&of_other_user, None).await, AppendOutcome::UserMismatch));
    assert_eq!(demo.say(&["again"]).await.first_seq, 1);
    assert_eq!(demo.state().await.user_id, Some(user_id("ada")));
    demo.rewound("branch 3", 0).await;
    assert!(demo.erase().await);
    assert_eq!(Sql::on(&backend).await.rows().await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_forgets_keys_of_removed_messages_only(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let exchanges = [exchange(&["a", "b"]), exchange(&["c", "d"]), exchange(&["e", "f"])];
    let keys: Vec<_> = ["k1", "k2", "k3"].iter().zip(&exchanges).map(|(id, one)| key(id, one)).collect();
    for (exchange, key) in exchanges.iter().zip(&keys) {
        recorded(demo.append(exchange, Some(key)).await);
    }
    // The second exchange is cut in half.
    demo.rewound("branch", 3).await;
    assert!(recorded(demo.append(&exchanges[0], Some(&keys[0])).await).replayed);
    let again = recorded(demo.append(&exchanges[1], Some(&keys[1])).await);
    assert_eq!((again.first_seq, again.replayed), (4, false));
    let other = exchange(&["another body"]);
    assert!(matches!(demo.append(&other, Some(&key("k3", &other))).await, AppendOutcome::Appended(_)));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_discards_a_running_consolidation(backend: Backend) {
    for after_seq in [3, 7] {
        let demo = Conversation::on(&backend).await.session(&format!("demo {after_seq}"));
        fill(&demo).await;
        let token = demo.lease().await;
        let step = demo.step(6, "six").await;
        demo.rewound(&format!("branch {after_seq}"), after_seq).await;
        demo.say(&["x", "y", "z", "w", "v"]).await;
        let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
        assert_eq!(demo.commit(token, &step).await, None);
        assert!(!store.renew_lease(tenant, session, token, LONG).await.unwrap());
        assert_eq!(demo.fail(token, LONG, "why").await, None);
        // Another run begins at once.
        let state = demo.state().await;
        let due = LeaseCondition::IfUnchanged { revision: state.revision };
        assert!(demo.take(Uuid::new_v4(), due, LONG).await.is_some());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_is_searchable_and_rewound_messages_are_not(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b", "c"]).await;
    demo.say(&["d", "e", "f"]).await;
    assert!(matches!(demo.fork("fork", 5).await, ForkOutcome::Forked(_)));
    demo.rewound("branch", 4).await;
    assert_eq!(demo.session("fork").indexed_seqs().await, [1, 2, 3, 4, 5]);
    assert_eq!(demo.indexed_seqs().await, [1, 2, 3, 4]);
    demo.rewound("branch 2", 2).await;
    assert_eq!(demo.indexed_seqs().await, [1, 2]);
    demo.say(&["g", "h", "i"]).await;
    assert_eq!(demo.indexed_seqs().await, [1, 2, 3, 4, 5]);
    let branch = demo.session("branch");
    assert_eq!(branch.indexed_seqs().await, [0; 0]);
    // Whatever indexes a whole session leaves those messages out that the branch had from the beginning.
    branch.say(&["j", "k"]).await;
    branch.store.bind_session(&branch.tenant, &branch.session, &user_id("ada")).await.unwrap();
    demo.session("branch 2").record(&exchange_of("ada", &["l"])).await;
    demo.store.reindex(demo.store.analyzer().unwrap(), |_| ()).await.unwrap();
    assert_eq!(branch.indexed_seqs().await, [7, 8]);
    assert_eq!(demo.session("branch 2").indexed_seqs().await, [5]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn branches_are_erased_with_their_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for by_user in [false, true] {
        fill(&demo).await;
        demo.rewound("branch 1", 6).await;
        demo.rewound("branch 2", 3).await;
        // A branch of a branch, and a fork of a branch.
        demo.session("branch 1").rewound("branch 3", 2).await;
        assert!(matches!(demo.session("branch 3").fork("fork", 2).await, ForkOutcome::Forked(_)));
        if by_user {
            assert!(demo.store.erase_user(&demo.tenant, &user_id("ada")).await.unwrap());
        } else {
            assert!(demo.erase().await);
            let fork = demo.session("fork");
            assert_eq!((fork.history().await.len(), fork.state().await.forked_from), (2, None));
            assert_eq!(sql.number("SELECT count(*) FROM sessions").await, 1);
            assert!(fork.erase().await);
        }
        assert_eq!(sql.rows().await, []);
    }
}

/// The rows of a session can be removed only if they are behind its end.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_can_be_deleted_only_after_its_end(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    let mut sql = Sql::on(&backend).await;
    sql.run("UPDATE sessions SET last_seq = 6, revision = 3").await;
    for (table, number, last) in [("messages", "seq", 6), ("revisions", "revision", 3)] {
        let error = sql.error(&format!("DELETE FROM {table} WHERE {number} >= {last}")).await;
        assert!(error.contains("is append-only"), "{error}");
        sql.run(&format!("DELETE FROM {table} WHERE {number} > {last}")).await;
        assert_eq!(sql.number(&format!("SELECT count(*) FROM {table}")).await, last);
        let error = sql.error(&format!("UPDATE {table} SET {number} = {number} + 1")).await;
        assert!(error.contains("is append-only"), "{error}");
    }
}

/// Rewinds, forks, exchanges and consolidations of one session at the same time.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_rewinds_lose_no_message(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["first", "second"]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..4 {
        let demo = demo.clone();
        tasks.spawn(async move {
            for turn in 0..12 {
                demo.say(&[&format!("q{client}-{turn}."), &format!("a{client}-{turn}.")]).await;
            }
        });
    }
    for client in 0..2 {
        let demo = demo.clone();
        tasks.spawn(async move {
            for turn in 0..6 {
                let last_seq = demo.state().await.last_seq;
                let outcome = demo.rewind(&format!("branch {client}-{turn}"), (last_seq / 2).max(1)).await;
                let is_expected = matches!(
                    outcome,
                    RewindOutcome::Rewound(_) | RewindOutcome::Unchanged(_) | RewindOutcome::AfterEnd { .. }
                );
                assert!(is_expected, "{outcome:?}");
                let outcome = demo.fork(&format!("fork {client}-{turn}"), 1 + turn % 3).await;
                assert!(
                    matches!(outcome, ForkOutcome::Forked(_) | ForkOutcome::AfterEnd { .. }),
                    "{outcome:?}"
                );
            }
        });
    }
    let consolidating = demo.clone();
    tasks.spawn(async move {
        for _ in 0..12 {
            let token = consolidating.lease().await;
            let step = consolidating.step(1, "one").await;
            // A rewind takes the lease away; then nothing is committed.
            let committed = consolidating.commit(token, &step).await;
            assert!(committed.is_none_or(|revision| revision.cursor == 1));
            consolidating.release(token).await;
            consolidating.restore(0).await;
        }
    });
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    let sessions = demo
        .store
        .sessions(&demo.tenant, SessionFilter::default(), None, 1000, i64::MAX)
        .await
        .unwrap()
        .items;
    let mut seen = BTreeSet::new();
    for session in &sessions {
        let one = demo.session(session.session_id.as_str());
        let history = one.history().await;
        assert!(history.iter().map(|message| message.seq).eq(1..=session.last_seq));
        let sizes = |count| history.iter().take(count).map(|message| message.json.len() as i64).sum::<i64>();
        assert_eq!(session.tokens, sizes(history.len()));
        assert_eq!(session.cursor_tokens, sizes(usize::try_from(session.cursor).unwrap()));
        assert!(history.windows(2).all(|pair| pair[0].created_at <= pair[1].created_at));
        let revisions = revisions(&one).await;
        assert_eq!(session.revision, revisions.len() as i64);
        assert!(revisions.iter().all(|revision| revision.cursor <= session.last_seq));
        seen.extend(history.into_iter().map(|message| message.json));
    }
    for client in 0..4 {
        for turn in 0..12 {
            for role in ["q", "a"] {
                let mark = format!("{role}{client}-{turn}.");
                assert!(seen.iter().any(|json| json.contains(&mark)), "{mark} is lost");
            }
        }
    }
}

/// Stores messages of 1 MB, each of which is a part of a copy.
async fn fill_large(demo: &Conversation, messages: usize, round: u64) {
    for number in 0..messages {
        demo.say(&[&format!("{number} secret {round} {}", "x".repeat(1_100_000))]).await;
    }
}

/// On Postgres, others need not wait for the transaction of a copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_write_while_a_large_session_is_copied_on_sqlite() {
    let backend = Backend::sqlite().await;
    let messages = Conversation::on(&backend).await;
    fill_large(&messages, 12, 0).await;
    let summaries = messages.session("summaries");
    summaries.say(&["x"; 12]).await;
    let mut revision = summaries.consolidate(2, "x").await.revision;
    for _ in 0..12 {
        revision = summaries.edit(revision, &"x".repeat(1_100_000)).await.expect("edited").revision;
    }
    let other = messages.session("other");
    for (demo, is_rewind) in [(&messages, false), (&messages, true), (&summaries, false), (&summaries, true)]
    {
        let copy = async {
            let [fork, branch] = ["fork", "branch"].map(|kind| format!("{kind} of {}", demo.session));
            if is_rewind {
                demo.rewound(&branch, 11).await;
            } else {
                assert!(matches!(demo.fork(&fork, 12).await, ForkOutcome::Forked(_)));
            }
        };
        let mut copy = std::pin::pin!(copy);
        let mut written = 0;
        loop {
            tokio::select! {
                biased;
                () = &mut copy => break,
                _ = other.say(&["x"]) => written += 1,
            }
        }
        assert!(written >= 5, "{written} exchanges during the copy");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_contain_no_message_that_is_redacted_meanwhile(backend: Backend) {
    for round in 0..8_u64 {
        let demo = Conversation::on(&backend).await.session(&format!("demo {round}"));
        fill_large(&demo, 5, round).await;
        let (fork, branch) = (format!("fork {round}"), format!("branch {round}"));
        let copy = async {
            if round % 2 == 0 {
                assert!(matches!(demo.fork(&fork, 5).await, ForkOutcome::Forked(_)));
                &fork
            } else {
                demo.rewound(&branch, 4).await;
                &branch
            }
        };
        let redact = async {
            // At another part of the copy in each round.
            for _ in 0..round {
                demo.session(&format!("other {round}")).say(&["x"]).await;
            }
            let redacted = demo.store.redact_message(&demo.tenant, &demo.session, 2, None).await;
            assert!(matches!(redacted.expect("redacted"), RedactionOutcome::Redacted(_)));
            demo.store.remove_redacted_traces().await;
            assert_eq!(files(&backend, &format!("1 secret {round}")), [""; 0], "round {round}");
        };
        let (copy, ()) = tokio::join!(copy, redact);
        for session in [&demo, &demo.session(copy)] {
            let history = session.history().await;
            let with_text = history.iter().filter(|message| message.json.contains("secret")).count();
            assert_eq!(with_text + 1, history.len(), "round {round}");
            assert!(!history[1].json.contains("secret"));
        }
        assert_eq!(demo.session(copy).history().await.len(), 5);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_during_a_rewind_are_in_its_branch_or_after_it(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill_large(&demo, 6, 0).await;
    let mut rewind = std::pin::pin!(demo.rewound("branch", 3));
    let mut written = Vec::new();
    let shortened = loop {
        let text = written.len().to_string();
        let texts = [&*text];
        tokio::select! {
            biased;
            state = &mut rewind => break state,
            said = demo.say(&texts) => written.push((said, text.clone())),
        }
    };
    assert_eq!(shortened.last_seq, 3);
    let (branch, after) = (demo.session("branch").history().await, demo.history().await);
    for (said, text) in written {
        let history = if said.incarnation == Some(shortened.incarnation) { &after } else { &branch };
        let place = usize::try_from(said.first_seq).expect("a position") - 1;
        assert!(history[place].json.contains(&format!("\"{text}\"")), "{}", history[place].json);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_during_a_copy_leaves_neither_branch_nor_text(backend: Backend) {
    for round in 0..6_u64 {
        let demo = Conversation::on(&backend).await.session(&format!("demo {round}"));
        fill_large(&demo, 5, round).await;
        let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
        let branch = session_id(&format!("branch {round}"));
        let rewind = store.rewind_session(tenant, session, &branch, 2, 100_000);
        let erase = async {
            for _ in 0..round {
                demo.session(&format!("other {round}")).say(&["x"]).await;
            }
            assert!(demo.erase().await);
            assert_eq!(files(&backend, &format!("secret {round}")), [""; 0], "round {round}");
        };
        let (rewound, ()) = tokio::join!(rewind, erase);
        assert!(matches!(rewound.unwrap(), RewindOutcome::Rewound(_) | RewindOutcome::NotFound));
        assert_eq!(demo.find().await, None);
        assert_eq!(demo.session(branch.as_str()).find().await, None);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_past_the_end_is_complete_or_rejected(backend: Backend) {
    for round in 0..6_u64 {
        let demo = Conversation::on(&backend).await.session(&format!("demo {round}"));
        let other = demo.session(&format!("other {round}"));
        fill_large(&demo, 3, round).await;
        fill_large(&other, 3, round).await;
        let append = async {
            for _ in 0..round {
                demo.session("small").say(&["x"]).await;
            }
            demo.say(&["appended"]).await;
        };
        let (fork, copy) = (format!("fork {round}"), format!("copy {round}"));
        let (_, forked, ()) = tokio::join!(other.fork(&copy, 3), demo.fork(&fork, 4), append);
        match forked {
            ForkOutcome::Forked(_) => {
                assert_eq!(demo.session(&fork).history().await, demo.history().await, "round {round}");
            }
            outcome => assert_eq!(outcome, ForkOutcome::AfterEnd { last_seq: 3 }),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redaction_and_erasure_remove_what_a_dead_copy_has_left_on_sqlite() {
    let backend = Backend::sqlite().await;
    for is_erasure in [false, true] {
        let round = u64::from(is_erasure);
        let demo = Conversation::on(&backend).await.session(&format!("demo {round}"));
        fill_large(&demo, 10, round).await;
        let count = "SELECT CAST(count(*) AS text) FROM messages WHERE session_id = 'dead'";
        let mut sql = Sql::on(&backend).await;
        let begun = async {
            while sql.texts(count).await == ["0"] {
                demo.session("other").say(&["x"]).await;
            }
        };
        tokio::select! {
            () = begun => {}
            outcome = demo.fork("dead", 10) => panic!("not a copy in parts: {outcome:?}"),
        }
        if is_erasure {
            assert!(demo.erase().await);
        } else {
            let redacted = demo.store.redact_message(&demo.tenant, &demo.session, 1, None).await;
            assert!(matches!(redacted.expect("redacted"), RedactionOutcome::Redacted(_)));
            demo.store.remove_redacted_traces().await;
        }
        assert_eq!(sql.texts(count).await, ["0"]);
        drop(sql);
        assert_eq!(files(&backend, &format!("0 secret {round}")), [""; 0]);
    }
}
