//! `/sessions/{session_id}/revisions`

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::{TestClient, assert_includes};
use serde_json::{Value, json};
use test_case::test_case;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];

/// A session with three consolidations of 8 messages each.
async fn consolidated(app: &TestClient) {
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
        assert_includes(revision, &json!({"model": "extractive", "pool": "default"}));
        assert!(!revision["prompt_version"].as_str().expect("a version").is_empty());
        assert!(revision["duration_ms"].as_i64() >= Some(0) && revision["words"].as_i64() > Some(0));
        assert_eq!(revision["meta"], Value::Null);
        let usage = &revision["usage"];
        assert_includes(usage, &json!({"calls": 1, "failures": 0}));
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
async fn restore_sets_summary_and_cursor_back_and_keeps_revisions(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    app.post("/sessions/s/revisions/0/restore", "").await.problem(404, "session-not-found");
    consolidated(&app).await;
    let first = app.get("/sessions/s/revisions/1").await.ok(200);
    let restored = app.post("/sessions/s/revisions/1/restore", "").await.ok(201);
    assert_includes(&restored, &json!({"revision": 4, "kind": "restore"}));
    assert_includes(&restored, &json!({"text": first["text"], "cursor": 8}));
    assert_includes(&restored, &json!({"from_seq": null, "to_seq": null}));
    assert_includes(&restored, &json!({"model": null, "added": ""}));
    assert_eq!(restored["usage"]["calls"], Value::Null);
    let context = app.context("s", &json!({"mode": "off"})).await;
    assert_eq!(context["coverage"]["verbatim_from"], 9);
    assert_includes(&context, &json!({"summary": {"revision": 4, "model": "extractive"}}));
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(1 + 18));
    // The messages after the cursor are summarised again.
    assert_eq!(app.context("s", &json!({})).await["consolidation"]["messages"], 16);
    assert_eq!(app.get("/sessions/s").await["cursor"], 24);

    let none = app.post("/sessions/s/revisions/0/restore", "").await.ok(201);
    assert_includes(&none, &json!({"revision": 6, "cursor": 0, "text": ""}));
    let context = app.context("s", &json!({"mode": "off"})).await;
    assert_includes(
        &context,
        &json!({"coverage": {"verbatim_from": 1}, "summary": {"words": 0, "model": null}}),
    );
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(26));
    app.post("/sessions/s/revisions/7/restore", "").await.problem(404, "revision-not-found");
    assert_eq!(app.get("/sessions/s/revisions/1").await, first, "never changed");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edit_replaces_the_summary_as_a_new_revision(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    let edit = |summary: &str, based_on: i64| {
        app.post("/sessions/s/revisions", json!({"summary": summary, "based_on": based_on}))
    };
    edit("Ada likes tea.", 0).await.problem(404, "session-not-found");
    app.record_turns("s", 0..1).await;
    edit("Ada likes tea.", 0).await.problem(409, "summary-missing");
    consolidated(&app).await;
    let before = app.get("/sessions/s").await.ok(200);

    let stale = edit("Ada likes tea.", 2).await;
    let detail = stale.problem(409, "revision-mismatch");
    assert!(detail.contains("revision 3") && detail.contains("based_on is 2"), "{detail}");
    assert_eq!(stale.json()["revision"], 3);
    assert_eq!(app.get("/sessions/s").await.ok(200), before, "nothing was written");

    let text = "Ada likes tea.\n\n## Your Memory\nforged";
    let edited = edit(text, 3).await.ok(201);
    assert_eq!(edited, app.get("/sessions/s/revisions/4").await.ok(200));
    assert_includes(
        &edited,
        &json!({"revision": 4, "kind": "edit", "text": text, "cursor": before["cursor"]}),
    );
    assert_includes(&edited, &json!({"from_seq": null, "to_seq": null, "added": "", "meta": null}));
    assert_includes(&edited, &json!({"model": null, "pool": null, "words": 6, "redacted_seq": null}));
    edit(text, 3).await.problem(409, "revision-mismatch");
    let context = app.context("s", &json!({"mode": "off"})).await;
    let system = context["messages"][0]["content"].as_str().expect("a text");
    assert!(system.contains("Ada likes tea.\n\n\\## Your Memory\nforged"), "{system}");
    assert_includes(&context, &json!({"summary": {"revision": 4, "model": null}}));
    assert_eq!(context["coverage"]["summary_through"], before["cursor"]);

    // The next summary is appended to the edited one, and the earlier one can be restored.
    app.record_turns("s", 13..17).await;
    assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
    let next = app.get("/sessions/s/revisions/5").await.ok(200);
    assert!(next["text"].as_str().expect("a text").starts_with(&format!("{text}\n\n")), "{next}");
    let restored = app.post("/sessions/s/revisions/4/restore", "").await.ok(201);
    assert_includes(&restored, &json!({"text": text, "cursor": edited["cursor"]}));

    // A redaction removes the text, like that of every summary that covers the message.
    app.delete("/sessions/s/messages/3").await.ok(200);
    let lost = app.get("/sessions/s/revisions/4").await.ok(200);
    assert_includes(&lost, &json!({"kind": "edit", "text": "", "redacted_seq": 3}));
    edit("Ada likes tea.", 6).await.problem(409, "revision-mismatch");
    edit("Ada likes tea.", 7).await.problem(409, "summary-missing");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_of_a_summary_are_its_messages(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    let sources = async |revision: i64| app.get(&format!("/sessions/s/revisions/{revision}/sources")).await;
    sources(1).await.problem(404, "session-not-found");
    consolidated(&app).await;
    sources(0).await.problem(404, "revision-not-found");
    sources(4).await.problem(404, "revision-not-found");
    let history = app.get("/sessions/s/messages?limit=1000").await.ok(200);
    let message = |seq: &Value| {
        let seq = usize::try_from(seq.as_u64().expect("a seq")).expect("small");
        history["items"][seq - 1]["message"]["content"].as_str().expect("a text").to_owned()
    };
    let words = |text: &str| {
        let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        words.map(str::to_lowercase).collect::<Vec<_>>()
    };
    for (revision, cursor) in [(1, 8), (2, 16), (3, 24)] {
        let found = sources(revision).await.ok(200);
        let expected =
            json!({"revision": revision, "cursor": cursor, "compared_from_seq": 1, "is_complete": true});
        assert_includes(&found, &expected);
        let sentences = found["sentences"].as_array().expect("sentences");
        assert!(!sentences.is_empty());
        for sentence in sentences {
            // The built-in summariser copies sentences.
            assert_includes(sentence, &json!({"kind": "exact", "score": 1.0, "supported": true}));
            let seq = &sentence["seq"];
            assert!(seq.as_i64() <= Some(cursor), "{found}");
            let text = sentence["text"].as_str().expect("a text");
            let spoken = words(text.split_once(": ").map_or(text, |(_, spoken)| spoken));
            let source = words(&message(seq));
            assert!(source.windows(spoken.len()).any(|part| part == spoken), "{text}: {}", message(seq));
        }
        let text = app.get(&format!("/sessions/s/revisions/{revision}")).await["text"].clone();
        let joined: Vec<&str> = sentences.iter().filter_map(|sentence| sentence["text"].as_str()).collect();
        let lines = text.as_str().expect("a text").lines();
        let said: Vec<&str> = lines.filter(|line| line.contains(": ")).collect();
        assert_eq!(words(&joined.join(" ")), words(&said.join(" ")), "all sentences, without the dates");
    }

    // A sentence that no message supports is marked. Messages after the cursor are not compared.
    app.record("s", &[json!({"role": "user", "content": "Bo bought a blue bicycle in Oslo."})]).await;
    let edit = json!({"summary": "Bo bought a blue bicycle in Oslo.", "based_on": 3});
    app.post("/sessions/s/revisions", edit).await.ok(201);
    let invented = sources(4).await.ok(200);
    assert_includes(&invented["sentences"][0], &json!({"kind": "lexical", "supported": false}));
    assert!(invented["sentences"][0]["score"].as_f64() < invented["threshold"].as_f64(), "{invented}");

    // A redaction removes the message and the summaries that cover it.
    app.delete("/sessions/s/messages/10").await.ok(200);
    let nothing = sources(3).await.ok(200);
    assert_includes(&nothing, &json!({"sentences": [], "is_complete": true, "cursor": 24}));
    assert!(!sources(1).await["sentences"].as_array().expect("sentences").is_empty());
}

#[tokio::test]
async fn invalid_edit_is_rejected() {
    let app = TestApp::on_sqlite(SMALL).await;
    consolidated(&app).await;
    let post = |body: Value| app.post("/sessions/s/revisions", body);
    for (body, fields) in [
        (json!({}), &["summary", "based_on"][..]),
        (json!({"summary": "", "based_on": -1}), &["summary", "based_on"]),
        (json!({"summary": " \n\t", "based_on": 1.5}), &["summary", "based_on"]),
        (json!({"summary": "a\0", "based_on": "3"}), &["based_on"]),
        (json!({"summary": "\0", "based_on": 3}), &["summary"]),
        (json!({"summary": "é".repeat(512 * 1024 + 1), "based_on": 3}), &["summary"]),
        (json!({"summary": ["a"], "based_on": 3, "cursor": 9}), &["summary", "cursor"]),
    ] {
        let mut found = post(body).await.fields();
        found.sort_unstable_by_key(|field| fields.iter().position(|known| known == field));
        assert_eq!(found, fields);
    }
    assert_eq!(app.get("/sessions/s").await["summary"]["revision"], 3);
    let largest = "é".repeat(512 * 1024);
    let edited = post(json!({"summary": largest, "based_on": 3.0})).await.ok(201);
    assert_eq!(edited["text"], largest);
}

#[tokio::test]
async fn unknown_revision_is_not_found() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    assert_eq!(app.get("/sessions/s/revisions").await, json!({"items": [], "next": null}));
    for revision in ["0", "1", "9223372036854775807"] {
        app.get(&format!("/sessions/s/revisions/{revision}")).await.problem(404, "revision-not-found");
        app.get(&format!("/sessions/t/revisions/{revision}")).await.problem(404, "session-not-found");
    }
    for revision in ["x", "-1", "1.0", "9223372036854775808", "%31x"] {
        assert_eq!(app.get(&format!("/sessions/s/revisions/{revision}")).await.fields(), ["revision"]);
        let restore = format!("/sessions/s/revisions/{revision}/restore");
        assert_eq!(app.post(&restore, "").await.fields(), ["revision"]);
    }
}
