//! `GET /sessions/{session_id}/messages`

use crate::answer::{get, on_sqlite};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use serde_json::Value;
use test_case::test_case;

fn seqs(page: &Value) -> Vec<i64> {
    page["items"].as_array().expect("items").iter().filter_map(|item| item["seq"].as_i64()).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_is_returned_in_pages(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    get(&app, "/sessions/s/messages").await.problem(404, "session-not-found");
    app.record_turns("s", 0..5).await;
    let up: Vec<i64> = (1..=10).collect();
    let down: Vec<i64> = (1..=10).rev().collect();
    assert_eq!(seqs(&app.get("/sessions/s/messages").await), up);
    for (order, expected) in [("asc", up), ("desc", down)] {
        for limit in [1, 3, 5, 10, 1000] {
            let (mut seen, mut cursor) = (Vec::new(), String::new());
            loop {
                let page =
                    app.get(&format!("/sessions/s/messages?order={order}&limit={limit}{cursor}")).await;
                assert!(seqs(&page).len() <= limit && !seqs(&page).is_empty());
                seen.extend(seqs(&page));
                match page["next"].as_str() {
                    Some(next) => cursor = format!("&cursor={next}"),
                    None => break,
                }
            }
            assert_eq!(seen, expected, "{order} {limit}");
        }
    }
    let first = app.get("/sessions/s/messages?limit=1").await;
    assert!(first["items"][0]["created_at"].as_str().expect("a time").ends_with('Z'));
    assert_eq!(first["items"][0]["message"]["role"], "user");
    app.record_turns("s", 5..40).await;
    assert_eq!(seqs(&app.get("/sessions/s/messages").await).len(), 50, "the default");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_of_the_history_is_returned(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_turns("s", 0..5).await;
    for (query, expected) in [
        ("after_seq=8", vec![9, 10]),
        ("before_seq=3", vec![1, 2]),
        ("after_seq=2&before_seq=5", vec![3, 4]),
        ("after_seq=2&before_seq=8&limit=2", vec![3, 4]),
        ("after_seq=2&before_seq=8&limit=2&order=desc", vec![7, 6]),
        ("after_seq=10", vec![]),
        ("after_seq=5&before_seq=5", vec![]),
        ("after_seq=-1&limit=1", vec![1]),
        ("before_seq=0", vec![]),
        ("after_seq=9223372036854775807", vec![]),
        ("before_seq=-9223372036854775808", vec![]),
    ] {
        let page = app.get(&format!("/sessions/s/messages?{query}")).await;
        assert_eq!(seqs(&page), expected, "{query}");
    }
    // The range holds on the next pages too.
    for (order, first, second) in [("asc", [3, 4], [5, 6]), ("desc", [6, 5], [4, 3])] {
        let query = format!("/sessions/s/messages?after_seq=2&before_seq=7&limit=2&order={order}");
        let page = app.get(&query).await;
        assert_eq!(seqs(&page), first);
        let page = app.get(&format!("{query}&cursor={}", page["next"].as_str().expect("a next page"))).await;
        assert_eq!((seqs(&page), &page["next"]), (second.to_vec(), &Value::Null));
    }
}

#[tokio::test]
async fn invalid_search_parameters_are_all_reported() {
    let app = on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    let cases: &[(&str, &[&str])] = &[
        ("limit=0", &["limit"]),
        ("limit=1001", &["limit"]),
        ("limit=many", &["limit"]),
        ("after_seq=1.5", &["after_seq"]),
        ("before_seq=99999999999999999999", &["before_seq"]),
        ("order=up", &["order"]),
        ("order=ASC", &["order"]),
        ("cursor=zzz", &["cursor"]),
        ("=5", &["query"]),
        ("x", &["x"]),
        ("order=up&limit=x&foo=7&after_seq=", &["order", "limit", "foo", "after_seq"]),
    ];
    for (query, expected) in cases {
        assert_eq!(get(&app, &format!("/sessions/s/messages?{query}")).await.fields(), *expected, "{query}");
    }
}
