//! The search settings and `precis reindex`: log messages about the index, and search results before and after.

use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use reqwest::Method;
use serde_json::json;
use sqlx::postgres::PgListener;
use test_case::test_case;
use tokio::time::timeout;

const OTHER_ANALYZER: &str = "the search index has another analyzer than the settings";
const COMPLETE: &str = "the search index is complete";
const UP_TO_DATE: &str = "nothing to do: all messages are indexed with the analyzer english-2";

fn precis(backend: &Backend, set: &[(&str, &str)]) -> Precis {
    let precis = Precis::on(backend);
    set.iter().fold(precis, |precis, (path, value)| precis.set(path, value))
}

async fn reindexed(backend: &Backend, set: &[(&str, &str)]) -> String {
    precis(backend, set).args(["reindex"]).run().await.stdout_of_success()
}

/// The number of messages depends on what the service has indexed meanwhile.
fn assert_includes_text(output: &str, part: &str) {
    assert!(output.contains(part), "{output}");
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
async fn messages_stored_without_an_index_are_found_later(backend: Backend) {
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

    // The service finds them by itself, in the background.
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "after", "no ferry today").await;
    service.wait_for_log(COMPLETE).await;
    assert_eq!(found(&service, "ferry").await, ["after", "before", "without"]);
    drop(service);
    // So does `precis reindex`, next to a running service, which finds all messages immediately.
    let service = start_without_warning(&backend, OFF).await;
    say(&service, "more", "two ferries").await;
    drop(service);
    let output = reindexed(&backend, &[]).await;
    assert_includes_text(&output, "indexed ");
    assert_eq!(reindexed(&backend, &[]).await, UP_TO_DATE);
    let service = start_without_warning(&backend, &[]).await;
    assert_eq!(found(&service, "ferry").await, ["after", "before", "more", "without"]);
}

/// The settings of the first process that indexes count, if it is not the service.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_imported_with_other_settings_are_found(backend: Backend) {
    const GERMAN: &[(&str, &str)] = &[("search.language", "german")];
    const LINE: &str = r#"{"role":"user","content":"the ferries of Oslo"}"#;
    let import = async |set, session| {
        let mut command =
            precis(&backend, set).file("chat.jsonl", LINE).args(["import", session, "chat.jsonl"]);
        command.run().await.stdout_of_success();
    };
    import(&[][..], "english").await;
    let service = precis(&backend, GERMAN).start().await;
    let line = service.wait_for_log(OTHER_ANALYZER).await;
    assert_includes(&line, &json!({"index_version": "english-2", "expected_version": "german-1"}));
    say(&service, "exchange", "no ferries today").await;
    // The index keeps its analyzer: the English stems of the words are equal, the German ones are not.
    assert_eq!(found(&service, "ferry").await, ["english", "exchange"]);
    drop(service);
    import(&[("search.enabled", "false")][..], "without").await;
    let service = precis(&backend, &[]).start().await;
    service.wait_for_log(COMPLETE).await;
    assert_eq!(found(&service, "ferry").await, ["english", "exchange", "without"]);
}

/// A release searches the index of a newer one only after a reindex.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_of_a_newer_release_is_not_searched(backend: Backend) {
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "s", "a ferry").await;
    assert_eq!(found(&service, "ferry").await, ["s"]);
    let newer = "UPDATE search_analyzer SET version = 'english-99'";
    backend.execute(newer, newer).await;
    let detail = service.get("/search?q=ferry").await.problem(503, "search-analyzer-unknown");
    assert!(detail.contains("english-99") && detail.contains("`precis reindex`"), "{detail}");
    let output = reindexed(&backend, &[]).await;
    assert_includes_text(&output, "the analyzer of the index was english-99 and is english-2 now: indexed ");
    assert_eq!(found(&service, "ferry").await, ["s"]);
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
    // An index without entries would get the other language at once.
    reindexed(&backend, &[]).await;

    let service = precis(&backend, GERMAN).start().await;
    let line = service.wait_for_log(OTHER_ANALYZER).await;
    assert_includes(&line, &json!({"index_version": "english-2", "expected_version": "german-1"}));
    assert_eq!(found(&service, "Hauses").await, [""; 0]);
    assert_eq!(found(&service, "Häuser").await, ["s"]);
    let output = reindexed(&backend, GERMAN).await;
    assert_includes_text(&output, "the analyzer of the index was english-2 and is german-1 now: indexed ");
    assert_eq!(found(&service, "Hauses").await, ["s"]);
    drop(service);
    start_without_warning(&backend, GERMAN).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_older_versions_are_found_after_the_start(backend: Backend) {
    let service = start_without_warning(&backend, &[]).await;
    say(&service, "a", "a ferry").await;
    say(&service, "b", "two ferries").await;
    drop(service);
    // The state after an upgrade from a version without search.
    for statement in [
        "DELETE FROM search_recent",
        "DELETE FROM search_segments",
        "DELETE FROM search_pages",
        "DELETE FROM search_analyzer",
        "UPDATE sessions SET indexed_seq = 0",
    ] {
        backend.execute(statement, statement).await;
    }
    let service = start_without_warning(&backend, &[]).await;
    service.wait_for_log(COMPLETE).await;
    assert_eq!(found(&service, "ferry").await, ["a", "b"]);
    drop(service);
    assert_eq!(reindexed(&backend, &[]).await, UP_TO_DATE);
}

#[tokio::test]
async fn index_worker_on_postgres_indexes_stored_messages_in_the_background() {
    /// Sends the name of the table, and the first session of a row of recent messages.
    const NOTIFY: &str = "CREATE FUNCTION notify_indexed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_notify('indexed', concat_ws(' ', TG_TABLE_NAME, to_jsonb(NEW) #>> '{sessions,0}'));
            RETURN NULL;
        END $$";
    const TRIGGERS: [&str; 2] = [
        "CREATE TRIGGER notify_indexed AFTER INSERT ON search_recent FOR EACH ROW EXECUTE FUNCTION notify_indexed()",
        "CREATE TRIGGER notify_indexed AFTER INSERT ON search_segments FOR EACH ROW EXECUTE FUNCTION notify_indexed()",
    ];
    let backend = Backend::postgres().await;
    let service = start_without_warning(&backend, &[("search.enabled", "false")]).await;
    say(&service, "a", "a ferry").await;
    drop(service);
    for statement in [NOTIFY, TRIGGERS[0], TRIGGERS[1]] {
        backend.execute(statement, "").await;
    }
    let mut listener = PgListener::connect(&backend.url()).await.expect("connected");
    listener.listen("indexed").await.expect("listening");
    let mut indexed = async || {
        let notification = timeout(SOON, listener.recv()).await.expect("indexed").expect("connected");
        notification.payload().to_owned()
    };
    let service = start_without_warning(&backend, &[]).await;
    // Pending messages of an earlier process.
    assert_eq!(indexed().await, "search_recent a");
    say(&service, "b", "two ferries").await;
    assert_eq!(indexed().await, "search_recent b");
    let line = r#"{"role":"user","content":"three ferries"}"#;
    let import = service.request(Method::POST, "/sessions/c/import");
    let import = import.header("content-type", "application/x-ndjson").body(line);
    import.await.ok(201);
    assert_eq!(indexed().await, "search_recent c");
    // Many exchanges become a segment.
    for _ in 0..40 {
        say(&service, "d", "four ferries").await;
    }
    while indexed().await != "search_segments" {}
}
