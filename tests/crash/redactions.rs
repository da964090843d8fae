//! A process that is killed while it redacts messages: each redaction is complete, with its copies and the summaries, or not done
//! at all.

use crate::replica::Replica;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use test_case::test_case;
use tokio::time::sleep;

const MESSAGES: usize = 40;
/// A session and its fork.
const SESSIONS: [&str; 2] = ["s", "fork"];

/// Returns a word that only one message and its summary contain.
fn word(seq: usize) -> String {
    format!("plugh{seq}q")
}

fn content(seq: usize) -> String {
    format!("The word number {seq} is {}. Remember the word.", word(seq))
}

fn client(replica: &Replica) -> TestClient {
    TestClient::new(replica.url().expect("it runs"))
}

/// Creates a session with several summaries, and a fork of it.
async fn fill(app: &TestClient) {
    for seq in 1..=MESSAGES {
        app.record(
            "s",
            &[json!({"role": if seq % 2 == 1 { "user" } else { "assistant" }, "content": content(seq)})],
        )
        .await;
        if seq % 13 == 0 {
            assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
        }
    }
    app.post("/sessions/s/fork", json!({"through_seq": MESSAGES, "new_id": "fork"})).await.ok(201);
}

/// Checks that both sessions have lost the same messages, completely. Returns these messages.
async fn redacted(app: &TestClient) -> BTreeSet<usize> {
    let mut redacted = Vec::new();
    for session in SESSIONS {
        let page = app.get(&format!("/sessions/{session}/messages?limit=1000")).await.json();
        let items = page["items"].as_array().expect("a list");
        assert_eq!(items.len(), MESSAGES);
        let is_redacted = |item: &Value| item["redacted_at"].is_string();
        for (seq, item) in (1..).zip(items) {
            let expected = if is_redacted(item) { "[redacted]".to_owned() } else { content(seq) };
            assert_eq!(
                (&item["seq"], &item["message"]["content"]),
                (&json!(seq), &json!(expected)),
                "{session}"
            );
        }
        let of_session: BTreeSet<usize> =
            (1..).zip(items).filter(|(_, item)| is_redacted(item)).map(|(seq, _)| seq).collect();
        let export = app.get(&format!("/sessions/{session}/export")).await.text;
        let state = app.get(&format!("/sessions/{session}")).await.json();
        for seq in &of_session {
            assert!(!export.contains(&word(*seq)), "{session}: message {seq} was redacted\n{export}");
        }
        let records = app.all_pages::<Value>(&format!("/sessions/{session}/redactions"), 1000).await;
        assert!(
            records.iter().map(|record| &record["seq"]).eq(of_session
                .iter()
                .map(|seq| json!(seq))
                .collect::<Vec<_>>()
                .iter())
        );
        let revisions = app.get(&format!("/sessions/{session}/revisions?limit=1000")).await.json();
        let newest = &revisions["items"][0];
        let current = (&newest["revision"], &newest["cursor"], &newest["text"]);
        assert_eq!(current, (&state["summary"]["revision"], &state["cursor"], &state["summary"]["text"]));
        let context = app.context(session, &json!({"mode": "off"})).await;
        assert_eq!(context["coverage"]["summary_through"], state["cursor"]);
        redacted.push(of_session);
    }
    assert_eq!(redacted[0], redacted[1], "a redaction reached only one of the sessions");
    redacted.remove(0)
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_process_redacts_messages_completely_or_not_at_all(backend: Backend) {
    let settings = [
        ("database.url", &*backend.url()),
        ("consolidation.threshold", "10"),
        ("consolidation.keep_recent", "4"),
        ("consolidation.max_history_messages", "1000"),
    ];
    let replica = Replica::new(&settings);
    replica.start().await;
    fill(&client(&replica)).await;
    let (seed, mut acknowledged) = (fastrand::u64(..), BTreeSet::new());
    let mut rng = fastrand::Rng::with_seed(seed);
    println!("seed {seed}");
    let mut order: Vec<usize> = (1..=MESSAGES).collect();
    rng.shuffle(&mut order);
    for (turn, seq) in (0..).zip(order) {
        let app = client(&replica);
        let request = app.delete(&format!("/sessions/{}/messages/{seq}", SESSIONS[turn % 2])).unchecked();
        let request = tokio::spawn(request);
        let is_killed = turn % 3 > 0;
        if is_killed {
            sleep(Duration::from_micros(rng.u64(..15_000))).await;
            replica.kill();
        }
        let response = request.await.expect("no panic");
        if response.is_ok_and(|response| response.status() == 200) {
            acknowledged.insert(seq);
        }
        if is_killed {
            replica.start().await;
        }
        let app = client(&replica);
        let done = redacted(&app).await;
        assert!(acknowledged.is_subset(&done), "{acknowledged:?} were acknowledged, {done:?} are redacted");
        if turn % 7 == 0 {
            let response = app.post("/sessions/s/consolidations", "").await;
            assert!(matches!(response.status, 200 | 201), "{response}");
        }
    }
    let app = client(&replica);
    for seq in 1..=MESSAGES {
        app.delete(&format!("/sessions/s/messages/{seq}")).await.ok(200);
    }
    assert_eq!(redacted(&app).await.len(), MESSAGES);
    if let Backend::Sqlite(folder) = &backend {
        for file in std::fs::read_dir(folder.path()).expect("a folder") {
            let path = file.expect("a file").path();
            let bytes = std::fs::read(&path).expect("readable");
            assert!(!bytes.windows(5).any(|window| window == b"plugh"), "{}", path.display());
        }
    }
}
