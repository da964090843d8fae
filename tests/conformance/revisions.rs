//! Revisions and restoring them.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use precis::domain::session::Summary;
use precis::storage::NewRevision;
use test_case::test_case;
use time::OffsetDateTime;

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
