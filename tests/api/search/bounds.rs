//! Limits of a search, and results within these limits.

use super::{found, path, user};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use serde_json::{Value, json};
use test_case::test_case;

/// With more messages than a search looks up for a word, so that word frequencies are estimated.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn word_without_matches_does_not_hide_other_matches(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record("old", &[user("a unicorn by the ferry")]).await;
    app.record("s", &vec![user("the night ferry"); 1500]).await;
    for query in ["ferry", "ferry xylophone", "did the ferry sink", "ferry OR xylophone"] {
        assert_eq!(found(&app, &[("q", query)]).await.len(), 10, "{query}");
    }
    // The match of the rare word comes first, followed by matches of the common one with four neighbours on each side.
    let hits = found(&app, &[("q", "ferry unicorn"), ("limit", "3")]).await;
    assert_eq!(hits, ["old:1", "s:1496", "s:1495"]);
    // Every hit must contain the phrase.
    assert_eq!(found(&app, &[("q", "\"ferry xylophone\"")]).await, Vec::<String>::new());
}

fn place_of(message: &Value) -> usize {
    message["seq"].as_u64().and_then(|seq| usize::try_from(seq).ok()).expect("a number")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbours_are_limited_in_size_and_have_no_gaps(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let hit = user("a narwhal");
    let around = |seq: usize| if seq.is_multiple_of(2) { user(&"x".repeat(50_000)) } else { hit.clone() };
    let mut messages: Vec<Value> = (1..=60).map(around).collect();
    // Larger than the limit for all neighbours.
    messages.insert(30, json!({"role": "assistant", "content": "y".repeat(3_000_000)}));
    for part in messages.chunks(10) {
        app.record("s", part).await;
    }
    let response = app.get(&path(&[("q", "narwhal"), ("limit", "50"), ("neighbours", "10")])).await;
    let items = response.ok(200)["items"].clone();
    let items = items.as_array().expect("hits");
    assert_eq!(items.len(), 30);
    let mut shown = 0;
    for (place, item) in items.iter().enumerate() {
        let seq = place_of(item);
        let seqs = |side: &str| {
            let list = item[side].as_array().expect("messages").iter();
            list.map(place_of).collect::<Vec<_>>()
        };
        let (before, after) = (seqs("before"), seqs("after"));
        assert!(before.iter().copied().eq((1..seq).skip(seq - 1 - before.len())), "{seq}: {before:?}");
        assert!(after.iter().copied().eq((seq + 1..).take(after.len())), "{seq}: {after:?}");
        shown += before.len() + after.len();
        // The best hit has all its neighbours.
        assert!(place > 0 || before.len() == 10, "{before:?}");
        assert!(!before.contains(&31) && !after.contains(&31));
    }
    assert!(shown > 30, "{shown}");
    assert!(response.text.len() < 2_500_000, "{}", response.text.len());
}

/// Messages so large that a search reads only a few of them at a time.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_messages_are_all_searched_up_to_a_limit(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let large = |words: &str| user(&format!("{words} {}", ". ".repeat(50_000)));
    let mut messages = vec![large("ferry and night"); 60];
    messages[0] = large("the night ferry");
    messages[20] = messages[0].clone();
    for part in messages.chunks(20) {
        app.record("s", part).await;
    }
    assert_eq!(found(&app, &[("q", "\"night ferry\"")]).await, ["s:21", "s:1"]);
    assert_eq!(found(&app, &[("q", "night -\"ferry and\"")]).await, ["s:21", "s:1"]);
    assert_eq!(found(&app, &[("q", "ferr*"), ("limit", "50")]).await.len(), 50);
    for _ in 0..17 {
        app.record("s", &vec![large("ferry and night"); 20]).await;
    }
    let response = app.get(&path(&[("q", "\"night ferry\"")])).await.ok(200);
    assert_eq!(response["items"], json!([]));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_has_all_hits_and_a_limited_size_of_messages(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let large = |words: &str| user(&format!("{words} {}", ". ".repeat(500_000)));
    app.record("s", &vec![large("a ferry"); 8]).await;
    app.record("s", &[user("a small ferry"), large("ferry, ferry")]).await;
    let response = app.get(&path(&[("q", "ferry"), ("neighbours", "0")])).await;
    let items = response.ok(200)["items"].clone();
    let hits = items.as_array().expect("hits");
    assert_eq!(hits.len(), 10);
    assert!(hits.iter().all(|hit| hit["snippet"].as_str().is_some_and(|text| text.contains("<mark>ferry"))));
    let (complete, others): (Vec<_>, Vec<_>) = hits.iter().partition(|hit| hit["message"].is_object());
    // Small messages come first, then the best ones until there are more than 4 MiB.
    assert_eq!((complete.len(), others.len()), (6, 4));
    assert!(complete.iter().any(|hit| hit["message"]["content"] == "a small ferry"));
    assert!(hits[0]["message"].is_object() && others.iter().all(|hit| hit["message"].is_null()));
    assert!(response.text.len() < 6_000_000, "{}", response.text.len());
    let seq = others[0]["seq"].as_i64().expect("a number") - 1;
    let page = app.get(&format!("/sessions/s/messages?after_seq={seq}&limit=1")).await.ok(200);
    assert_eq!(page["items"][0]["seq"], seq + 1);
}
