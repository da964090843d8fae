//! Identifiers, numbers and languages in searches.

use super::found;
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use reqwest::Method;
use serde_json::json;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identifiers_and_numbers_are_found_whole_and_in_parts(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let texts = [
        "The column order_id must not be null.",
        "Use selectInLoad for the children, not joinedload.",
        "It raises MissingGreenlet: greenlet_spawn has not been called",
        "The card is an RTX4090 with 24GB.",
        "The factor is 3.14, the invoice has the number 2026-0417.",
        "The order of the items is the id of the page.",
    ];
    for (session, text) in ["a", "b", "c", "d", "e", "f"].iter().zip(texts) {
        let body = json!({"user_message": text, "assistant_reply": "Fine."});
        app.post(&format!("/sessions/{session}/exchanges"), &body).await.ok(201);
    }
    for (query, best) in [
        ("order_id", "a:1"),
        ("orderId", "a:1"),
        ("order-id", "a:1"),
        ("selectInLoad", "b:1"),
        ("selectinload", "b:1"),
        ("missinggreenlet", "c:1"),
        ("greenlet", "c:1"),
        ("spawn", "c:1"),
        ("RTX 4090", "d:1"),
        ("4090", "d:1"),
        ("24", "d:1"),
        ("3.14", "e:1"),
        ("3,14", "e:1"),
        ("0417", "e:1"),
        ("2026-0417", "e:1"),
        ("\"MissingGreenlet: greenlet_spawn\"", "c:1"),
    ] {
        let hits = found(&app, &[("q", query), ("role", "user")]).await;
        assert_eq!(hits.first().map(String::as_str), Some(best), "{query}: {hits:?}");
    }
    let both = found(&app, &[("q", "order id"), ("role", "user")]).await;
    assert_eq!(both.len(), 2, "{both:?}");
}

/// The messages before the first long one are analysed again when that shows the language.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn language_of_a_session_applies_to_all_its_messages(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let exchange = |text: &str, reply: &str| json!({"user_message": text, "assistant_reply": reply});
    let path = "/sessions/s/exchanges";
    app.post(path, exchange("Wärmepumpen?", "Gern.")).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["language"], json!(null));
    assert!(found(&app, &[("q", "Wärmepumpe")]).await.is_empty());
    let reply = "Die Kosten hängen vor allem von der Größe des Hauses und der Dämmung ab.";
    app.post(path, exchange("Was kosten sie im Jahr?", reply)).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["language"], "german");
    app.post(path, exchange("Und Solaranlagen?", "Ähnlich.")).await.ok(201);
    let english = exchange("The windows of the office were cleaned by the new company on Friday.", "Good.");
    app.post("/sessions/t/exchanges", english).await.ok(201);
    assert_eq!(app.get("/sessions/t").await["language"], "english");
    let cases =
        [("Wärmepumpe", "s:1"), ("Solaranlage", "s:5"), ("Größen", "s:4"), ("cleaning window", "t:1")];
    for (query, hit) in cases {
        assert_eq!(found(&app, &[("q", query), ("limit", "1")]).await, [hit], "{query}");
    }
    assert_eq!(found(&app, &[("q", "Wärmepumpe"), ("session_id", "s"), ("limit", "1")]).await, ["s:1"]);
    // Forks and imports keep or recognise the language.
    app.post("/sessions/s/fork", json!({"new_id": "fork", "through_seq": 4})).await.ok(201);
    let export = app.get("/sessions/s/export").await.text;
    let import = app.request(Method::POST, "/sessions/import/import");
    import.header("content-type", "application/x-ndjson").body(export).await.ok(201);
    for copy in ["fork", "import"] {
        assert_eq!(app.get(&format!("/sessions/{copy}")).await["language"], "german");
        let hits = found(&app, &[("q", "Wärmepumpe"), ("session_id", copy), ("limit", "1")]).await;
        assert_eq!(hits, [format!("{copy}:1")]);
    }
}
