//! `/sessions/{session_id}/revisions`

use crate::answer::{get, on_sqlite, post};
use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use serde_json::{Value, json};
use test_case::test_case;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];

/// A session with three consolidations of 8 messages each.
async fn consolidated(app: &TestApp) {
    for turns in [0..5, 5..9, 9..13] {
        app.record_turns("s", turns).await;
        assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_reports_its_provenance(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    consolidated(&app).await;
    let list = app.get("/sessions/s/revisions").await;
    let list = list["items"].as_array().expect("items");
    assert_eq!(
        list.iter().map(|item| item["revision"].as_i64()).collect::<Vec<_>>(),
        [Some(3), Some(2), Some(1)]
    );
    for revision in list {
        assert_eq!(*revision, app.get(&format!("/sessions/s/revisions/{}", revision["revision"])).await);
        assert_eq!(revision["kind"], "consolidation");
        assert_eq!(revision["cursor"], revision["to_seq"]);
        assert_eq!((&revision["model"], &revision["pool"]), (&json!("extractive"), &json!("default")));
        assert!(!revision["prompt_version"].as_str().expect("a version").is_empty());
        assert!(revision["duration_ms"].as_i64() >= Some(0) && revision["words"].as_i64() > Some(0));
        assert_eq!(revision["meta"], Value::Null);
        let usage = &revision["usage"];
        assert_eq!((&usage["calls"], &usage["failures"]), (&json!(1), &json!(0)));
        for unit in ["input_tokens", "output_tokens", "queued_ms"] {
            assert!(usage.get(unit).is_some(), "{usage}");
        }
    }
    let ranges: Vec<_> =
        list.iter().map(|item| (item["from_seq"].as_i64(), item["to_seq"].as_i64())).collect();
    assert_eq!(ranges, [(Some(17), Some(24)), (Some(9), Some(16)), (Some(1), Some(8))]);
    let text = |index: usize, field: &str| list[index][field].as_str().expect("text").to_owned();
    assert_eq!(text(2, "text"), text(2, "added"));
    assert_eq!(text(1, "text"), format!("{}\n\n{}", text(2, "text"), text(1, "added")));
    assert_eq!(text(0, "text"), app.get("/sessions/s").await["summary"]["text"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revisions_are_listed_in_pages(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    get(&app, "/sessions/s/revisions").await.problem(404, "session-not-found");
    consolidated(&app).await;
    let page = app.get("/sessions/s/revisions?limit=2").await;
    assert_eq!(page["items"].as_array().map(Vec::len), Some(2));
    let next = page["next"].as_str().expect("a next page");
    let last = app.get(&format!("/sessions/s/revisions?limit=2&cursor={next}")).await;
    assert_eq!((&last["items"][0]["revision"], &last["items"][1]), (&json!(1), &Value::Null));
    assert_eq!(last["next"], Value::Null);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_sets_summary_and_cursor_back_and_keeps_revisions(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    post(&app, "/sessions/s/revisions/0/restore", "").await.problem(404, "session-not-found");
    consolidated(&app).await;
    let first = app.get("/sessions/s/revisions/1").await;
    let restored = post(&app, "/sessions/s/revisions/1/restore", "").await.ok(201);
    assert_eq!((&restored["revision"], &restored["kind"]), (&json!(4), &json!("restore")));
    assert_eq!((&restored["text"], &restored["cursor"]), (&first["text"], &json!(8)));
    assert_eq!((&restored["from_seq"], &restored["to_seq"]), (&Value::Null, &Value::Null));
    assert_eq!((&restored["model"], &restored["added"]), (&Value::Null, &json!("")));
    assert_eq!(restored["usage"]["calls"], Value::Null);
    let context = app.context("s", &json!({"mode": "off"})).await;
    assert_eq!(context["coverage"]["verbatim_from"], 9);
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(1 + 18));
    // The messages after the cursor are summarised again.
    assert_eq!(app.context("s", &json!({})).await["consolidation"]["messages"], 16);
    assert_eq!(app.get("/sessions/s").await["cursor"], 24);

    let none = post(&app, "/sessions/s/revisions/0/restore", "").await.ok(201);
    assert_eq!((&none["revision"], &none["cursor"], &none["text"]), (&json!(6), &json!(0), &json!("")));
    let context = app.context("s", &json!({"mode": "off"})).await;
    assert_eq!((&context["coverage"]["verbatim_from"], &context["summary"]["words"]), (&json!(1), &json!(0)));
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(26));
    post(&app, "/sessions/s/revisions/7/restore", "").await.problem(404, "revision-not-found");
    assert_eq!(app.get("/sessions/s/revisions/1").await, first, "never changed");
}

#[tokio::test]
async fn unknown_revision_is_not_found() {
    let app = on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    assert_eq!(app.get("/sessions/s/revisions").await, json!({"items": [], "next": null}));
    for revision in ["0", "1", "9223372036854775807"] {
        get(&app, &format!("/sessions/s/revisions/{revision}")).await.problem(404, "revision-not-found");
        get(&app, &format!("/sessions/t/revisions/{revision}")).await.problem(404, "session-not-found");
    }
    for revision in ["x", "-1", "1.0", "9223372036854775808", "%31x"] {
        assert_eq!(get(&app, &format!("/sessions/s/revisions/{revision}")).await.fields(), ["revision"]);
        let restore = format!("/sessions/s/revisions/{revision}/restore");
        assert_eq!(post(&app, &restore, "").await.fields(), ["revision"]);
    }
    for query in ["limit=0", "limit=x", "cursor=zzz", "after_seq=1"] {
        let field = query.split('=').next().expect("a name");
        assert_eq!(get(&app, &format!("/sessions/s/revisions?{query}")).await.fields(), [field]);
    }
}
