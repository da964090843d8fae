//! The search settings and `precis reindex`: log messages about the index, and search results before and after.

use crate::service::{Precis, Process};
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use serde_json::json;
use test_case::test_case;

const OTHER_ANALYZER: &str = "the search index has another analyzer than the settings";
const INCOMPLETE: &str = "the search index may lack messages";

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

    // Until then, searches find the other messages.
    let service = precis(&backend, &[]).start().await;
    service.wait_for_log(INCOMPLETE).await;
    say(&service, "after", "no ferry today").await;
    assert_eq!(found(&service, "ferry").await, ["after", "before"]);
    assert_eq!(
        reindexed(&backend, &[]).await,
        "indexed 3 messages with the analyzer auto-3; restart the service"
    );
    assert_eq!(found(&service, "ferry").await, ["after", "before", "without"]);
    drop(service);
    start_without_warning(&backend, &[]).await;
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
    assert_includes(&line, &json!({"index_version": "auto-3", "expected_version": "german-3"}));
    say(&service, "exchange", "no ferries today").await;
    // The index keeps its analyzer: the English stems of the words are equal, the German ones are not.
    assert_eq!(found(&service, "ferry").await, ["english", "exchange"]);
    drop(service);
    import(&[("search.enabled", "false")][..], "without").await;
    let service = precis(&backend, &[]).start().await;
    service.wait_for_log(INCOMPLETE).await;
    reindexed(&backend, &[]).await;
    assert_eq!(found(&service, "ferry").await, ["english", "exchange", "without"]);
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
    let line = service.wait_for_log(OTHER_ANALYZER).await;
    assert_includes(&line, &json!({"index_version": "auto-3", "expected_version": "german-3"}));
    assert_eq!(found(&service, "Hauses").await, [""; 0]);
    assert_eq!(found(&service, "Häuser").await, ["s"]);
    drop(service);
    assert_eq!(
        reindexed(&backend, GERMAN).await,
        "indexed 1 message with the analyzer german-3; restart the service"
    );
    let service = start_without_warning(&backend, GERMAN).await;
    assert_eq!(found(&service, "Hauses").await, ["s"]);
}
