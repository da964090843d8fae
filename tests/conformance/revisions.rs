//! Revisions and restoring them.

use crate::conversation::{Conversation, summary};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use precis::domain::session::{ConsolidationState, Session, Summary};
use precis::storage::NewRevision;
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

async fn get(demo: &Conversation, revision: i64) -> Option<Revision> {
    let page = demo.store.revisions(&demo.tenant, &demo.session, revision + 1, 1, i64::MAX).await.unwrap();
    page?.items.pop().filter(|found| found.revision == revision)
}

fn provenance(model: &str, tokens: Option<i64>) -> Provenance {
    Provenance {
        model: model.to_owned(),
        pool: "default é\"".to_owned(),
        prompt_version: "consolidate-1".to_owned(),
        usage: ModelUsage {
            input_tokens: tokens,
            output_tokens: tokens.map(|tokens| tokens * 3),
            calls: tokens.map(|_| 3),
            failures: tokens.map(|_| 2),
            queued_ms: tokens.map(|_| i64::MAX),
        },
        duration_ms: i64::MAX,
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_is_returned_with_all_fields(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 9]).await;
    let texts = ["## Not a heading\n\n\"quotes\" \\ 茶 🍵\r\n\t", "", "  "];
    let meta = |text: &str| MetaConsolidation {
        text_before: format!("long {text}"),
        provenance: provenance("meta", None),
    };
    let variants = [
        (Some(provenance("small", Some(1234))), Some(meta(texts[0]))),
        (Some(provenance("", None)), None),
        (None, Some(meta(texts[1]))),
        (None, None),
    ];
    let token = demo.lease().await;
    let mut expected = Vec::new();
    for (at, (provenance, meta)) in variants.into_iter().enumerate() {
        let at = i64::try_from(at).unwrap();
        let text = texts[usize::try_from(at).unwrap() % 3];
        let summary = Summary { text: text.to_owned(), words: 1 << 40, tokens: at };
        let step = NewRevision {
            summary,
            added: text.to_owned(),
            provenance,
            meta,
            ..demo.step(at * 2 + 2, "").await
        };
        let revision = demo.commit(token, &step).await.unwrap();
        assert!((OffsetDateTime::now_utc() - revision.created_at).abs() < time::Duration::minutes(1));
        let NewRevision { cursor, summary, added, provenance, meta, .. } = step;
        let created_at = revision.created_at;
        let kind = RevisionKind::Consolidation;
        let (from_seq, to_seq) = (Some(at * 2 + 1), Some(at * 2 + 2));
        let whole = Revision {
            revision: at + 1,
            kind,
            from_seq,
            to_seq,
            cursor,
            summary,
            added,
            meta,
            provenance,
            redacted_seq: None,
            created_at,
        };
        assert_eq!(revision, whole);
        assert_eq!(get(&demo, at + 1).await, Some(whole.clone()));
        expected.insert(0, whole);
    }
    assert_eq!(demo.revisions().await, Some(expected));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edit_replaces_the_summary_of_its_base_revision_only(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!(demo.edit(0, "no session").await, None);
    demo.say(&["x"; 8]).await;
    assert_eq!(demo.edit(0, "no summary").await, None);
    demo.consolidate(4, "four").await;
    let (before, other) = (demo.state().await, demo.session("other"));
    other.say(&["x"; 8]).await;
    other.consolidate(4, "four").await;
    let untouched = other.state().await;
    // A run that has read the session cannot commit.
    let token = demo.lease().await;
    let late = demo.step(6, "late").await;
    assert_eq!((demo.edit(0, "x").await, demo.edit(2, "x").await), (None, None));
    let edited = demo.edit(1, "edited é\n\"").await.expect("edited");
    let expected = Revision {
        revision: 2,
        kind: RevisionKind::Edit,
        from_seq: None,
        to_seq: None,
        cursor: 4,
        summary: summary("edited é\n\""),
        added: String::new(),
        meta: None,
        provenance: None,
        redacted_seq: None,
        created_at: edited.created_at,
    };
    assert!((OffsetDateTime::now_utc() - edited.created_at).abs() < time::Duration::minutes(1));
    assert_eq!((&edited, get(&demo, 2).await.as_ref()), (&expected, Some(&expected)));
    assert_eq!(demo.edit(1, "stale").await, None);
    assert_eq!(demo.commit(token, &late).await, None);
    demo.release(token).await;
    let state = demo.state().await;
    assert_eq!((state.revision, &state.summary), (2, &edited.summary));
    let counts = |state: &Session| (state.cursor, state.cursor_tokens, state.tokens, state.updated_at);
    assert_eq!(counts(&state), counts(&before));
    assert_eq!(other.state().await, untouched);
    demo.assert_counts().await;
    // A failure is forgotten, and the next consolidation appends to the edited summary.
    let token = demo.lease().await;
    demo.fail(token, Duration::from_mins(1), "why").await.expect("recorded");
    assert_eq!(demo.edit(2, "again").await.map(|edited| edited.revision), Some(3));
    assert_eq!(demo.state().await.consolidation, ConsolidationState::default());
    assert_eq!(demo.consolidate(6, "six").await.revision, 4);
    // Without messages in the summary there is none to edit.
    demo.restore(0).await.expect("restored");
    assert_eq!(demo.edit(5, "nothing").await, None);
    assert_eq!(demo.restore(2).await.expect("restored").summary, edited.summary);
}

/// Of edits with the same base, one is stored.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_edits_of_one_revision_store_one(backend: Backend) {
    const EDITORS: usize = 10;
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 8]).await;
    demo.consolidate(4, "four").await;
    let replicas = [demo.clone(), Conversation::on(&backend).await];
    let barrier = Arc::new(Barrier::new(EDITORS));
    let mut editors = JoinSet::new();
    for at in 0..EDITORS {
        let (demo, barrier) = (replicas[at % 2].clone(), Arc::clone(&barrier));
        editors.spawn(async move {
            barrier.wait().await;
            demo.edit(1, &format!("edit {at}")).await
        });
    }
    let stored: Vec<_> = editors.join_all().await.into_iter().flatten().collect();
    let [edited] = &stored[..] else { panic!("{} edits", stored.len()) };
    assert_eq!(demo.state().await.summary, edited.summary);
    assert_eq!(demo.revisions().await.map(|revisions| revisions.len()), Some(2));
}

/// Revisions are never rewritten, so those of earlier versions lack newer fields.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_without_newer_provenance_fields_is_readable(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 2]).await;
    let older = r#"{"model":"small","pool":"p","prompt_version":"1","usage":{"input_tokens":5,"output_tokens":null},"duration_ms":7}"#;
    Sql::on(&backend)
        .await
        .run(&format!(
            "INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
                summary_words, summary_tokens, added, meta, source, created_at)
            SELECT tenant_id, session_id, 1, 'consolidation', 1, 2, 2, 'text', 1, 1, 'text',
                '{{\"text_before\":\"long\",\"provenance\":{older}}}', '{older}', created_at FROM sessions"
        ))
        .await;
    let provenance = Provenance {
        model: "small".to_owned(),
        pool: "p".to_owned(),
        prompt_version: "1".to_owned(),
        usage: ModelUsage { input_tokens: Some(5), ..ModelUsage::default() },
        duration_ms: 7,
    };
    let revision = get(&demo, 1).await.unwrap();
    assert_eq!(revision.provenance.as_ref(), Some(&provenance));
    assert_eq!(revision.meta, Some(MetaConsolidation { text_before: "long".to_owned(), provenance }));
}
