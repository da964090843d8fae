//! The first run in an empty folder without settings.

use crate::service::{Precis, messages, outcome};
use crate::support::client::assert_includes;
use serde_json::json;

#[tokio::test]
async fn service_without_settings_stores_and_consolidates() {
    let service = Precis::new().start().await;
    let hint = service.wait_for_log("a real model writes better ones").await;
    assert!(hint["message"].as_str().expect("text").contains("precis.example.toml"));

    let exchange =
        json!({"user_message": "I fly to Zürich on 3 May.", "assistant_reply": "Noted: Zürich, 3 May."});
    let appended = service.post("/sessions/demo/exchanges", &exchange).await;
    assert_includes(&appended, &json!({"first_seq": 1, "last_seq": 2}));
    for exchange in messages(98).chunks(2) {
        service.record("demo", exchange).await;
    }
    let context = service.context("demo", &json!({})).await;
    assert_eq!(outcome(&context, 100), "not_due", "100 messages are not more than 100");

    service.record("demo", &messages(2)).await;
    let body = json!({"system_prompt": "You are a helpful assistant.", "user_message": "When do I fly?"});
    let context = service.context("demo", &body).await;
    let consolidation = json!({"outcome": "consolidated", "model": "extractive"});
    assert_includes(&context, &json!({"consolidation": consolidation, "coverage": {"summary_through": 82}}));
    let sent = context["messages"].as_array().expect("a list");
    assert_eq!(sent.len(), 22, "system message, the last 20, the new one");
    let system = sent[0]["content"].as_str().expect("text");
    assert!(
        system.starts_with("You are a helpful assistant.\n\n## Session Summary\n\nThis is a record "),
        "{system}"
    );
    let asked = sent[21]["content"].as_str().expect("text");
    assert!(
        asked.starts_with("<recalled_messages>\n") && asked.contains("] user: I fly to Zürich on 3 May.\n")
    );
    assert!(asked.ends_with("</recalled_messages>\n\nWhen do I fly?"), "{asked}");

    let revision = service.get("/sessions/demo/revisions/1").await;
    assert_includes(&revision, &json!({"from_seq": 1, "to_seq": 82}));
    assert!(system.ends_with(revision["text"].as_str().expect("text")));

    let files = std::fs::read_dir(service.folder.path()).expect("readable");
    let mut files: Vec<_> = files.map(|file| file.expect("readable").file_name()).collect();
    // Space for erasures is reserved if the disk has enough.
    files.retain(|file| file != "precis.db-reserve");
    files.sort();
    assert_eq!(files, ["precis.db", "precis.db-shm", "precis.db-wal"]);
}
