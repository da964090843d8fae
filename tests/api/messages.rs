//! `GET /sessions/{session_id}/messages`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::column;
use serde_json::{Value, json};
use test_case::test_case;

fn seqs(page: &Value) -> Value {
    column(&page["items"], "seq")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_in_the_requested_range_are_returned(backend: Backend) {
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
        assert_eq!(seqs(&page), json!(expected), "{query}");
    }
    let first = app.get("/sessions/s/messages?limit=1").await;
    assert!(first["items"][0]["created_at"].as_str().expect("a time").ends_with('Z'));
    assert_eq!(first["items"][0]["message"]["role"], "user");
    // The range also applies to the following pages.
    for (order, first, second) in [("asc", [3, 4], [5, 6]), ("desc", [6, 5], [4, 3])] {
        let query = format!("/sessions/s/messages?after_seq=2&before_seq=7&limit=2&order={order}");
        let page = app.get(&query).await;
        assert_eq!(seqs(&page), json!(first));
        let page = app.get(&format!("{query}&cursor={}", page["next"].as_str().expect("a next page"))).await;
        assert_eq!((seqs(&page), &page["next"]), (json!(second), &Value::Null));
    }
    app.record_turns("s", 5..40).await;
    let page = app.get("/sessions/s/messages").await;
    assert_eq!(page["items"].as_array().map(Vec::len), Some(50), "the default limit");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_with_large_messages_ends_early(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let large = "word ".repeat(300_000);
    for turn in 0..4 {
        let message = |role: &str| json!({ "role": role, "content": format!("{turn} {large}") });
        app.record("s", &["user", "assistant"].map(message)).await;
    }
    // 1.5 MB each: the third one exceeds 4 MiB.
    for (order, expected) in [
        ("asc", [vec![1, 2, 3], vec![4, 5, 6], vec![7, 8]]),
        ("desc", [vec![8, 7, 6], vec![5, 4, 3], vec![2, 1]]),
    ] {
        let (mut pages, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = app.get(&format!("/sessions/s/messages?limit=1000&order={order}{cursor}")).await;
            pages.push(seqs(&page));
            let Some(next) = page["next"].as_str() else { break };
            cursor = format!("&cursor={next}");
        }
        assert_eq!(pages, expected.map(|page| json!(page)), "{order}");
    }
}
