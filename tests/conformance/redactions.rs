//! Redaction of a message in every table and file, and its effect on summaries, copies, keys and the index.

use crate::api_keys::new_key;
use crate::conversation::{
    Conversation, counted, exchange, key, message, recorded, session_id, summary, user_id,
};
use crate::sql::{Sql, files};
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::redaction::Redaction;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use precis::domain::search::analyzer::Analyzer;
use precis::domain::session::ConsolidationState;
use precis::storage::{
    AppendOutcome, ForkOutcome, NewRevision, RedactionOutcome, RewindOutcome, StoredMessage,
};
use std::time::Duration;
use test_case::test_case;

/// The marker word of everything that a redaction must remove.
const MARKER: &str = "plugh";
/// The word of everything that must stay.
const KEPT: &str = "xyzzy";
/// The message that is redacted.
const SEQ: i64 = 4;

impl Conversation {
    async fn redact(&self, seq: i64) -> RedactionOutcome {
        self.store.redact_message(&self.tenant, &self.session, seq, None).await.unwrap()
    }

    async fn redacted(&self, seq: i64) -> Vec<String> {
        match self.redact(seq).await {
            RedactionOutcome::Redacted(sessions) => {
                sessions.iter().map(|session| session.as_str().to_owned()).collect()
            }
            other => panic!("not redacted: {other:?}"),
        }
    }

    async fn redactions(&self) -> Vec<Redaction> {
        self.store.redactions(&self.tenant, &self.session, 0, 100).await.unwrap()
    }

    async fn forked(&self, target: &str, through_seq: i64) -> Self {
        let target = self.session(target);
        let forked = self.store.fork_session(&self.tenant, &self.session, &target.session, through_seq).await;
        assert!(matches!(forked.unwrap(), ForkOutcome::Forked(_)));
        target
    }

    async fn rewound_to(&self, branch: &str, after_seq: i64) -> Self {
        let branch = self.session(branch);
        let (store, tenant) = (&self.store, &self.tenant);
        let rewound = store.rewind_session(tenant, &self.session, &branch.session, after_seq, 100_000).await;
        assert!(matches!(rewound.unwrap(), RewindOutcome::Rewound(_)));
        branch
    }

    /// Commits a consolidation that was compressed, with the text in each field.
    async fn compress(&self, cursor: i64, text: &str) {
        let provenance = Provenance {
            model: KEPT.to_owned(),
            pool: KEPT.to_owned(),
            prompt_version: KEPT.to_owned(),
            usage: ModelUsage::default(),
            duration_ms: 1,
        };
        let meta = MetaConsolidation { text_before: format!("{text} \0 \""), provenance: provenance.clone() };
        let token = self.lease().await;
        let step = NewRevision {
            provenance: Some(provenance),
            meta: Some(meta),
            added: text.to_owned(),
            ..self.step(cursor, text).await
        };
        self.commit(token, &step).await.expect("committed");
        self.release(token).await;
    }

    /// Checks that the counters of the session are those of its messages.
    pub(crate) async fn assert_counts(&self) {
        let (state, history) = (self.state().await, self.history().await);
        let all = self.store.message_metadata(&self.tenant, &self.session, 0, i64::MAX).await.unwrap();
        let sum = |count: i64| -> i64 {
            all.iter().take(usize::try_from(count).unwrap()).map(|message| message.tokens).sum()
        };
        assert_eq!((state.tokens, state.cursor_tokens), (sum(state.last_seq), sum(state.cursor)));
        let seqs: Vec<i64> = history.iter().map(|message| message.seq).collect();
        assert_eq!(seqs, (1..=state.last_seq).collect::<Vec<_>>());
        for (message, metadata) in history.iter().zip(&all) {
            assert_eq!(message.redacted_at.is_some(), metadata.is_redacted);
        }
    }
}

/// Returns an exchange of six messages, of which the fourth contains the marker in every field.
fn marked_exchange() -> Exchange {
    let texts = [
        r#"{"role":"user","content":"xyzzy one"}"#,
        r#"{"role":"assistant","content":"xyzzy two"}"#,
        r#"{"role":"user","content":"xyzzy three"}"#,
        r#"{"role":"assistant","name":"plugh","content":[{"type":"text","text":"plugh \u0070lugh"}],"extra":{"plugh":1},
            "tool_calls":[{"id":"call","type":"function","function":{"name":"xyzzy","arguments":"{\"a\": \"plugh\"}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"call","content":"xyzzy five"}"#,
        r#"{"role":"assistant","content":"xyzzy six"}"#,
    ];
    let messages = texts.iter().map(|text| counted(message(text))).collect();
    Exchange { messages, user_id: Some(user_id("ada")), ..Exchange::default() }
}

/// The fourth message after its redaction.
const REST: &str = r#"{"role":"assistant","content":"[redacted]","tool_calls":[{"id":"call","type":"function","function":{"name":"xyzzy","arguments":"{}"}}]}"#;

/// Records the exchange with revisions with the cursors 3, 5, 3 (a restore), 4 and 6, counted from its first message. Returns the
/// marked message.
async fn fill(demo: &Conversation) -> i64 {
    let exchange = marked_exchange();
    let before = recorded(demo.append(&exchange, Some(&key("xyzzy", &exchange))).await).first_seq - 1;
    demo.consolidate(before + 3, KEPT).await;
    demo.compress(before + 5, MARKER).await;
    demo.restore(1).await.expect("restored");
    demo.consolidate(before + 4, MARKER).await;
    demo.compress(before + 6, MARKER).await;
    before + SEQ
}

async fn marked_rows(sql: &mut Sql, word: &str) -> Vec<String> {
    let rows = sql.rows().await.into_iter().filter(|row| row.contains(word));
    rows.map(|row| format!("{}: {}", row.table, row.text())).collect()
}

/// The message is in tables, in the index, in copies of the session, and in pages of SQLite that were split by many other messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redacted_message_leaves_no_trace_in_tables_and_files(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (long, mut seq) = (KEPT.repeat(300), 0);
    for turn in 0..40 {
        for other in ["a", "e"] {
            demo.session(other).say(&[&long[..turn * 30 + 5], KEPT]).await;
        }
        if turn == 20 {
            seq = fill(&demo).await;
        }
        demo.say(&[&long[..turn * 30 + 5], KEPT]).await;
    }
    // Forks are indexed, and branches are not.
    let copy = demo.forked("b", 60).await;
    demo.rewound_to("c", 60).await;
    copy.forked("d", 50).await;
    assert!(marked_rows(&mut sql, MARKER).await.len() > 10);
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, MARKER).is_empty());
    let fingerprint = hex::encode(marked_exchange().fingerprint());
    assert!(sql.rows().await.iter().any(|row| row.text().to_lowercase().contains(&fingerprint)));

    assert_eq!(demo.redacted(seq).await, ["b", "c", "d", "demo"]);
    demo.store.remove_redacted_traces().await;
    demo.store.merge_index().await.unwrap();
    assert_eq!(marked_rows(&mut sql, MARKER).await, [""; 0]);
    assert_eq!(files(&backend, MARKER), [""; 0]);
    assert!(!sql.rows().await.iter().any(|row| row.text().to_lowercase().contains(&fingerprint)));
    let is_copy = |session: &str| ["b", "c", "d", "demo"].contains(&session);
    let mut indexed = demo.indexed().await;
    assert!(indexed.iter().any(|found| found.seq == seq - 1 && is_copy(found.session.as_str())));
    indexed.retain(|found| found.seq == seq && is_copy(found.session.as_str()));
    assert_eq!(indexed, [], "a placeholder is not indexed");
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, KEPT).is_empty());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redaction_returns_to_the_last_summary_before_the_message(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    fill(&demo).await;
    let (before, history, revisions) =
        (demo.state().await, demo.history().await, demo.revisions().await.unwrap());
    let id = new_key("default", 1).id;
    let outcome = demo.store.redact_message(&demo.tenant, &demo.session, SEQ, Some(&id)).await.unwrap();
    assert_eq!(outcome, RedactionOutcome::Redacted(vec![session_id("demo")]));

    let state = demo.state().await;
    assert_eq!((state.cursor, state.revision, &state.summary), (3, 6, &summary(KEPT)));
    assert_eq!(state.consolidation, ConsolidationState::default());
    assert_ne!(state.incarnation, before.incarnation);
    assert_eq!((state.updated_at, state.last_seq), (before.updated_at, 6));
    demo.assert_counts().await;
    let mut redacted = demo.history().await;
    let StoredMessage { redacted_at, json, .. } = &mut redacted[3];
    assert_eq!(json, REST);
    let redacted_at = redacted_at.take().expect("redacted");
    json.clone_from(&history[3].json);
    assert_eq!(redacted, history, "the other messages are unchanged");

    let mut after = demo.revisions().await.unwrap();
    let made = after.remove(0);
    let expected = Revision {
        revision: 6,
        kind: RevisionKind::Redaction,
        from_seq: Some(SEQ),
        to_seq: Some(SEQ),
        cursor: 3,
        summary: summary(KEPT),
        added: String::new(),
        meta: None,
        provenance: None,
        redacted_seq: None,
        created_at: redacted_at,
    };
    assert_eq!(made, expected);
    for (after, before) in after.iter().zip(&revisions) {
        let is_lost = before.cursor >= SEQ;
        let mut expected = before.clone();
        if is_lost {
            (expected.summary, expected.added, expected.redacted_seq) =
                (summary(""), String::new(), Some(SEQ));
            if let Some(meta) = &mut expected.meta {
                meta.text_before.clear();
            }
        }
        assert_eq!(*after, expected);
    }
    let records = demo.redactions().await;
    let [record] = &records[..] else { panic!("{records:?}") };
    assert_eq!((record.seq, record.revision, record.cursor), (SEQ, 6, 3));
    assert_eq!((record.mark.redacted_at, record.mark.copies), (redacted_at, 0));
    assert_eq!(record.mark.key_id.as_deref(), Some(id.as_str()));
    assert_eq!(record.redacted_revisions, [2, 4, 5]);

    let rows = Sql::on(&backend).await.rows().await;
    assert_eq!(demo.redact(SEQ).await, RedactionOutcome::Unchanged);
    assert_eq!(demo.redact(7).await, RedactionOutcome::MessageNotFound { last_seq: 6 });
    assert_eq!(demo.session("other").redact(1).await, RedactionOutcome::SessionNotFound);
    assert_eq!(demo.tenant("acme").redact(SEQ).await, RedactionOutcome::SessionNotFound);
    for lost in [2, 4, 5] {
        assert_eq!(demo.restore(lost).await, None, "revision {lost} has no summary");
    }
    assert_eq!((Sql::on(&backend).await.rows().await, demo.redactions().await), (rows, records));

    // The session continues, and an earlier message can be redacted, too.
    demo.consolidate(5, "xyzzy anew").await;
    assert_eq!(demo.redacted(1).await, ["demo"]);
    let state = demo.state().await;
    assert_eq!((state.cursor, state.cursor_tokens, state.revision, state.summary), (0, 0, 8, summary("")));
    demo.assert_counts().await;
    let lost: Vec<_> = demo.redactions().await.into_iter().map(|record| record.redacted_revisions).collect();
    assert_eq!(lost, [vec![1, 3, 6, 7], vec![2, 4, 5]]);
    assert_eq!(demo.restore(0).await.expect("restored").revision, 9);
    assert!(demo.erase().await);
    assert_eq!(demo.redactions().await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redaction_reaches_every_copy_of_the_message_and_no_other(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    fill(&demo).await;
    demo.tenant("acme").record(&marked_exchange()).await;
    let root = demo.forked("root", 6).await;
    let (one, short) = (root.forked("one", 5).await, root.forked("short", 3).await);
    short.say(&["another message", "four"]).await;
    let nested = one.forked("nested", SEQ).await;
    // After both rewinds, the session has another message 4, and the branches have the original.
    let branch = root.rewound_to("branch", 3).await;
    root.say(&["said anew"]).await;
    let later = root.rewound_to("later", 2).await;
    root.say(&["xyzzy three", "again"]).await;
    // Without its origins, a copy is still one of the lineage.
    let orphan = nested.forked("orphan", SEQ).await;
    assert!(nested.erase().await && one.erase().await);
    let records = async |of: &Conversation| {
        of.redactions().await.into_iter().map(|record| record.seq).collect::<Vec<_>>()
    };

    assert_eq!(orphan.redacted(SEQ).await, ["branch", "demo", "orphan"]);
    for (copy, revision) in [(&orphan, 4), (&demo, 6), (&branch, 6)] {
        assert_eq!(records(copy).await, [SEQ]);
        let record = copy.redactions().await.remove(0);
        assert_eq!((record.mark.copies, record.revision, record.cursor), (2, revision, 3));
        copy.assert_counts().await;
        assert_eq!(copy.history().await[3].json, REST);
        // The numbers of a copy are its own.
        let fork = copy.forked(&format!("fork of {}", copy.session), SEQ).await;
        assert_eq!(records(&fork).await, [SEQ]);
        let copied = fork.redactions().await.remove(0);
        let whole = fork.revisions().await.unwrap();
        assert_eq!(copied.mark, record.mark);
        assert_eq!(whole[0].revision, copied.revision);
        assert_eq!((whole[0].cursor, &whole[0].summary), (3, &summary(KEPT)));
        assert_eq!(fork.state().await.summary, summary(KEPT));
        fork.assert_counts().await;
    }
    for other in [&root, &short, &later] {
        assert_eq!(records(other).await, [0; 0]);
        other.assert_counts().await;
    }
    let acme = marked_rows(&mut sql, MARKER).await;
    assert!(acme.iter().all(|row| row.contains("acme")), "{acme:?}");
    assert_eq!(demo.tenant("acme").history().await[3].redacted_at, None);
    // A rewind keeps the record of a message that it keeps.
    demo.rewound_to("last", 5).await;
    assert_eq!(records(&demo).await, [SEQ]);
    assert_eq!(demo.redactions().await[0].redacted_revisions, [2, 4]);
    demo.rewound_to("very last", 3).await;
    assert_eq!(records(&demo).await, [0; 0]);
    // Another message with its number can be redacted, too.
    demo.say(&["anew"]).await;
    assert_eq!(demo.redacted(SEQ).await, ["demo"]);
    assert_eq!(records(&demo).await, [SEQ]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_that_has_read_the_message_cannot_commit(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&marked_exchange()).await;
    for seq in [SEQ, 6] {
        let token = demo.lease().await;
        let step = demo.step(5, MARKER).await;
        assert_eq!(demo.redacted(seq).await, ["demo"]);
        let (store, tenant) = (&demo.store, &demo.tenant);
        assert!(!store.renew_lease(tenant, &demo.session, token, Duration::from_secs(1)).await.unwrap());
        assert_eq!(demo.commit(token, &step).await, None);
        let current = NewRevision { base_revision: demo.state().await.revision, ..step };
        assert_eq!(demo.commit(token, &current).await, None, "without the lease");
    }
    let mut sql = Sql::on(&backend).await;
    assert_eq!(marked_rows(&mut sql, MARKER).await, [""; 0]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_exchange_is_not_stored_again(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (exchange, other) = (marked_exchange(), exchange(&["other"]));
    let (first, second) = (key("first", &exchange), key("second", &other));
    recorded(demo.append(&exchange, Some(&first)).await);
    recorded(demo.append(&other, Some(&second)).await);
    demo.redacted(SEQ).await;
    let again = recorded(demo.append(&exchange, Some(&first)).await);
    assert_eq!((again.first_seq, again.last_seq, again.replayed), (1, 6, true));
    // The fingerprint of the body was removed, so any body counts as the same.
    assert!(recorded(demo.append(&other, Some(&key("first", &other))).await).replayed);
    assert_eq!(demo.append(&exchange, Some(&key("second", &exchange))).await, AppendOutcome::KeyReused);
    assert_eq!(demo.state().await.last_seq, 7);
}

/// A rebuild of the index may have read the message before.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_that_is_being_indexed_is_not_added_to_the_index(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for turn in 0..20 {
        let session = demo.session(&format!("s{turn}"));
        session.record(&marked_exchange()).await;
        let other = demo.clone();
        let indexing = tokio::spawn(async move { other.store.reindex(Analyzer::default(), |_| ()).await });
        assert_eq!(session.redacted(SEQ).await.len(), 1);
        indexing.await.unwrap().unwrap();
        assert_eq!(demo.indexed().await.len(), 5 * (turn + 1));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redactions_run_next_to_exchanges_forks_and_consolidations(backend: Backend) {
    const MESSAGES: i64 = 12;
    let demo = Conversation::on(&backend).await;
    for _ in 0..MESSAGES {
        demo.say(&[MARKER]).await;
    }
    let last = demo.forked("copy", MESSAGES).await;
    let mut tasks = tokio::task::JoinSet::new();
    for seq in 1..=MESSAGES {
        let (original, copy) = (demo.clone(), last.clone());
        tasks.spawn(async move {
            // Of two redactions at the same time, one finds the message redacted.
            let (one, two) = tokio::join!(original.redact(seq), copy.redact(seq));
            let changed = [&one, &two]
                .iter()
                .filter(|outcome| matches!(outcome, RedactionOutcome::Redacted(_)))
                .count();
            assert_eq!(changed, 1, "{one:?}, {two:?}");
        });
        let original = demo.clone();
        tasks.spawn(async move {
            original.say(&[KEPT]).await;
            original.forked(&format!("fork {seq}"), MESSAGES).await;
        });
        let (copied, token) = (last.clone(), uuid::Uuid::new_v4());
        tasks.spawn(async move {
            let lease =
                copied.take(token, precis::storage::LeaseCondition::Force, Duration::from_mins(1)).await;
            if lease.is_some() {
                let step = copied.step((seq + 1).min(MESSAGES), MARKER).await;
                drop(copied.commit(token, &step).await);
                copied.release(token).await;
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    // A summary that was committed before the last redaction of a message that it covers has lost its text.
    let mut sql = Sql::on(&backend).await;
    let messages = "SELECT count(*) FROM messages WHERE message LIKE '%plugh%'";
    assert_eq!(sql.number(messages).await, 0);
    for id in ["demo", "copy", "fork 1", "fork 12"] {
        let session = demo.session(id);
        session.assert_counts().await;
        assert_eq!(session.redactions().await.len(), 12, "{id}");
    }
}
