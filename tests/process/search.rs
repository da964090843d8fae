//! The search settings and `precis reindex`: log messages about the index, and search results before and after.

use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use reqwest::Method;
use serde_json::json;
use sqlx::postgres::PgListener;
use test_case::test_case;
use tokio::time::timeout;

const OTHER_SETTINGS: &str = "the search index was built with other settings";
const INCOMPLETE: &str = "the search index does not cover all messages";

fn precis(backend: &Backend, set: &[(&str, &str)]) -> Precis {
    let precis = Precis::on(backend);
    set.iter().fold(precis, |precis, (path, value)| precis.set(path, value))
}

async fn reindexed(backend: &Backend, set: &[(&str, &str)]) -> String {
    precis(backend, set).args(["reindex"]).run().await.stdout_of_success()
}

async fn say(service: &Process, session: &str, text: &str) {
    service.record(session, &[json!({"role": "user", "content": text})]).await;
}

/// Returns the sessions with a match, sorted.
async fn found(service: &Process, word: &str) -> Vec<String> {
    let response = service.get(&format!("/search?q={word}")).await;
    let hits = response["items"].as_array().expect("hits").iter();
    let mut sessions: Vec<_> =
        hits.map(|hit| hit["session_id"].as_str().expect("a session").to_owned()).collect();
    sessions.sort();
    sessions
}

/// Starts the service with a current index, and checks that the log contains no warning.
async fn start_without_warning(backend: &Backend, set: &[(&str, &str)]) -> Process {
    let service = precis(backend, set).start().await;
    let log = service.log().join("\n");
    assert!(!log.contains("precis reindex"), "{log}");
    service
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_stored_without_an_index_are_found_after_reindex(backend: Backend) {
    const OFF: &[(&str, &str)] = &[("search.enabled", "false")];
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "before", "the ferries of Oslo").await;
    drop(service);
    let service = start_without_warning(&backend, OFF).await;
    say(&service, "without", "a ferry to Kiel").await;
    let detail = service.get("/search?q=ferry").await.problem(409, "search-disabled");
    assert!(detail.contains("search.enabled"), "{detail}");
    let output = precis(&backend, OFF).args(["reindex"]).run().await.stderr_of_failure();
    assert!(output.contains("search.enabled is false: there is nothing to index for"), "{output}");
    drop(service);

    let service = precis(&backend, &[]).start().await;
    let line = service.wait_for_log(OTHER_SETTINGS).await;
    assert_includes(&line, &json!({"index_version": "off", "expected_version": "english-2"}));
    assert!(line["message"].as_str().expect("text").contains("`precis reindex`"), "{line}");
    say(&service, "after", "no ferry today").await;
    assert_eq!(found(&service, "ferry").await, ["after", "before"]);
    // Next to a running service, which finds all messages immediately.
    assert_eq!(reindexed(&backend, &[]).await, "indexed 3 messages");
    assert_eq!(found(&service, "ferry").await, ["after", "before", "without"]);
    assert_eq!(reindexed(&backend, &[]).await, "nothing to do: all messages are indexed");
    start_without_warning(&backend, &[]).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_language_applies_after_reindex(backend: Backend) {
    const GERMAN: &[(&str, &str)] = &[("search.language", "german")];
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "s", "Die Häuser am Hafen").await;
    // Two words with the same stem in German only.
    assert_eq!(found(&service, "Hauses").await, [""; 0]);
    drop(service);

    let service = precis(&backend, GERMAN).start().await;
    let line = service.wait_for_log(OTHER_SETTINGS).await;
    assert_includes(&line, &json!({"index_version": "english-2", "expected_version": "german-1"}));
    assert_eq!(found(&service, "Hauses").await, [""; 0]);
    assert_eq!(reindexed(&backend, GERMAN).await, "indexed 1 message");
    assert_eq!(found(&service, "Hauses").await, ["s"]);
    drop(service);
    start_without_warning(&backend, GERMAN).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_older_versions_are_found_after_reindex(backend: Backend) {
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "a", "a ferry").await;
    say(&service, "b", "two ferries").await;
    drop(service);
    // The state after an upgrade from a version without search.
    for statement in [
        "DELETE FROM search_pending",
        "DELETE FROM search",
        "INSERT INTO search_reindex (tenant_id, session_id, through_seq)
            SELECT tenant_id, session_id, last_seq FROM sessions",
    ] {
        backend.execute(statement, statement).await;
    }
    let service = precis(&backend, &[]).start().await;
    let line = service.wait_for_log(INCOMPLETE).await;
    assert_eq!(line["sessions"], 2);
    assert!(line["message"].as_str().expect("text").contains("`precis reindex`"), "{line}");
    assert_eq!(found(&service, "ferry").await, [""; 0]);
    assert_eq!(reindexed(&backend, &[]).await, "indexed 2 messages");
    assert_eq!(found(&service, "ferry").await, ["a", "b"]);
    drop(service);
    start_without_warning(&backend, &[]).await;
}

#[tokio::test]
async fn index_worker_on_postgres_indexes_stored_messages_in_the_background() {
    const NOTIFY: &str = "CREATE OR REPLACE FUNCTION flush_search_index() RETURNS bigint LANGUAGE sql \
        AS $$ SELECT pg_notify('flushed', ''); SELECT 1::bigint $$";
    let backend = Backend::postgres().await;
    backend.execute(NOTIFY, "").await;
    let mut listener = PgListener::connect(&backend.url()).await.expect("connected");
    listener.listen("flushed").await.expect("listening");
    let mut flushed = async || timeout(SOON, listener.recv()).await.expect("flushed").expect("connected");
    let service = start_without_warning(&backend, &[]).await;
    // Pending messages of an earlier process.
    flushed().await;
    say(&service, "a", "a ferry").await;
    flushed().await;
    let line = r#"{"role":"user","content":"two ferries"}"#;
    let import = service.request(Method::POST, "/sessions/b/import");
    let import = import.header("content-type", "application/x-ndjson").body(line);
    import.await.ok(201);
    flushed().await;
}
