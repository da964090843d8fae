//! Revisions and restoring them.

use crate::conversation::{Conversation, summary};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use precis::domain::session::Summary;
use precis::storage::NewRevision;
use test_case::test_case;
use time::OffsetDateTime;

async fn get(demo: &Conversation, revision: i64) -> Option<Revision> {
    let page = demo.store.revisions(&demo.tenant, &demo.session, revision + 1, 1).await.unwrap();
    page?.pop().filter(|found| found.revision == revision)
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_without_revisions_differs_from_missing_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!((demo.revisions().await, get(&demo, 1).await), (None, None));
    demo.say(&["x"; 4]).await;
    assert_eq!(demo.revisions().await, Some(Vec::new()));
    demo.consolidate(2, "two").await;
    for (before, limit) in [(1, 9), (0, 9), (9, 0)] {
        let page = demo.store.revisions(&demo.tenant, &demo.session, before, limit).await.unwrap();
        assert_eq!(page, Some(Vec::new()));
    }
    for missing in [0, 2, -1] {
        assert_eq!(get(&demo, missing).await, None);
    }
    assert_eq!(demo.session("other").revisions().await, None);
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

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successive_pages_have_no_gaps_or_duplicates(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 17]).await;
    for cursor in 1..=17 {
        demo.consolidate(cursor, &cursor.to_string()).await;
    }
    let (mut read, mut before) = (Vec::new(), i64::MAX);
    loop {
        let page = demo.store.revisions(&demo.tenant, &demo.session, before, 4).await.unwrap().unwrap();
        let Some(last) = page.last() else { break };
        before = last.revision;
        assert!(page.len() <= 4);
        read.extend(page);
    }
    assert!(read.iter().map(|revision| revision.revision).eq((1..=17).rev()));
    assert_eq!(Some(read), demo.revisions().await);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_sets_summary_and_cursor_back(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]).await;
    demo.session("other").say(&["x"; 6]).await;
    demo.consolidate(2, "one").await;
    demo.consolidate(5, "two").await;
    let sizes: Vec<_> = demo.history().await.iter().map(|stored| stored.json.len() as i64).collect();
    // An earlier revision, no summary, a later revision, a restore, and the current revision.
    for (target, cursor, text) in
        [(1, 2, "one"), (0, 0, ""), (2, 5, "two"), (3, 2, "one"), (6, 2, "one"), (4, 0, "")]
    {
        let before = demo.state().await;
        let restored = demo.restore(target).await.unwrap();
        let expected = Revision {
            revision: before.revision + 1,
            kind: RevisionKind::Restore,
            from_seq: None,
            to_seq: None,
            cursor,
            summary: summary(text),
            added: String::new(),
            meta: None,
            provenance: None,
            created_at: restored.created_at,
        };
        assert_eq!(restored, expected);
        assert_eq!(get(&demo, restored.revision).await, Some(restored.clone()));
        let state = demo.state().await;
        assert_eq!(
            (state.cursor, &state.summary, state.revision),
            (cursor, &summary(text), restored.revision)
        );
        let (covered, tail) = sizes.split_at(usize::try_from(cursor).unwrap());
        assert_eq!((state.cursor_tokens, state.tail_tokens()), (covered.iter().sum(), tail.iter().sum()));
        assert_eq!((state.last_seq, state.tokens, state.updated_at), (6, before.tokens, before.updated_at));
    }
    assert_eq!(demo.revisions().await.unwrap().len(), 8);
    assert_eq!(demo.session("other").state().await.revision, 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_of_missing_revision_or_session_writes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    assert_eq!((demo.restore(0).await, demo.restore(1).await), (None, None));
    assert_eq!(sql.rows().await, []);
    demo.say(&["x"; 4]).await;
    demo.consolidate(2, "two").await;
    demo.session("other").say(&["x"]).await;
    let rows = sql.rows().await;
    for missing in [2, 99, -1, i64::MAX] {
        assert_eq!(demo.restore(missing).await, None);
    }
    assert_eq!(demo.session("other").restore(1).await, None);
    assert_eq!(sql.rows().await, rows);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_can_be_summarised_again_after_restore(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 8]).await;
    demo.consolidate(3, "one").await;
    demo.consolidate(6, "two").await;
    demo.restore(1).await.unwrap();
    let anew = demo.consolidate(8, "anew").await;
    assert_eq!((anew.revision, anew.range(), anew.cursor), (4, Some((4, 8)), 8));
    demo.restore(0).await.unwrap();
    assert_eq!(demo.consolidate(1, "from the first").await.range(), Some((1, 1)));
    let state = demo.state().await;
    assert_eq!((state.cursor, state.revision), (1, 6));
    assert_eq!(state.cursor_tokens, demo.history().await[0].json.len() as i64);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_rejects_changes_of_revisions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 4]).await;
    demo.consolidate(2, "one").await;
    demo.consolidate(3, "two").await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let columns = "tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens, added, \
                   created_at";
    let copy = "SELECT tenant_id, session_id, revision, kind, 0, 'forged', 0, 0, '', created_at FROM revisions \
                WHERE revision = 1";
    let mut statements = vec![
        "UPDATE revisions SET summary = 'forged'".to_owned(),
        "DELETE FROM revisions".to_owned(),
        "DELETE FROM revisions WHERE revision = 2".to_owned(),
    ];
    match backend {
        Backend::Sqlite(_) => {
            statements.push(format!("INSERT OR REPLACE INTO revisions ({columns}) {copy}"));
            statements.push("UPDATE OR REPLACE revisions SET revision = 2 WHERE revision = 1".to_owned());
        }
        Backend::Postgres(_) => {
            statements.push("TRUNCATE revisions".to_owned());
            statements.push(format!(
                "INSERT INTO revisions ({columns}) {copy}
                 ON CONFLICT (tenant_id, session_id, revision) DO UPDATE SET summary = excluded.summary"
            ));
        }
    }
    for statement in statements {
        let refusal = sql.refusal(&statement).await;
        assert!(refusal.contains("revisions is append-only"), "{statement}: {refusal}");
    }
    assert_eq!(sql.rows().await, rows);
}
