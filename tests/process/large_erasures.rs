//! Removal of many messages on SQLite, which has a single writer: others write meanwhile, and a crash leaves nothing that is
//! visible. An erasure deletes the messages in several transactions, a rewind first copies them, and both then remove them from the
//! search index.

use crate::large_imports::{count, exchange};
use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const MESSAGES: u32 = 12_000;

/// Messages of the session `large` and of its branches.
const COUNT_MESSAGES: &str = "SELECT count(*) FROM messages WHERE session_id <> 'small'";
/// Messages in the index.
const COUNT_ENTRIES: &str = "SELECT count(*) FROM search_terms_docsize";
/// Messages in the index that no session has any more. Branches are not indexed.
const COUNT_STALE_ENTRIES: &str = "SELECT count(*) FROM search_terms_docsize WHERE id NOT IN (
    SELECT m.id FROM messages AS m JOIN sessions AS s USING (tenant_id, session_id)
    WHERE m.seq <= s.last_seq AND coalesce(s.fork_kind, '') <> 'rewind'
)";
const COUNT_RESERVATIONS: &str = "SELECT count(*) FROM sessions WHERE import_until IS NOT NULL";
/// Waits until a query returns 0.
async fn until_none(backend: &Backend, sql: &'static str, otherwise: &str) {
    let since = Instant::now();
    while count(backend, sql).await > 0 {
        assert!(since.elapsed() < SOON, "{otherwise}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Imports the session `large` of the user `ada`, whose messages are in the index afterwards, and writes to the session `small`.
async fn fill(service: &Process, backend: &Backend) {
    let mut lines = String::new();
    for index in 0..MESSAGES {
        let role = if index % 2 == 0 { "user" } else { "assistant" };
        let words: Vec<String> =
            (0..20).map(|word| format!("w{}", (index * 7 + word * 131) % 5000)).collect();
        let words = words.join(" ");
        let _ = writeln!(lines, r#"{{"role":"{role}","content":"Plums for the ferry at nine. {words}"}}"#);
    }
    let request = service.request(Method::POST, "/sessions/large/import?user_id=ada");
    let imported = request.header("content-type", "application/x-ndjson").body(lines).await.ok(201);
    assert_eq!(imported["messages"], MESSAGES);
    exchange(service, "small").await.ok(201);
    assert_eq!(count(backend, COUNT_STALE_ENTRIES).await, 0);
    assert!(count(backend, COUNT_ENTRIES).await >= i64::from(MESSAGES));
}

/// A request that removes the messages of the session `large`.
#[derive(Clone, Copy)]
enum Removal {
    Erasure,
    ErasureOfUser,
    Rewind,
}

impl Removal {
    async fn send(self, client: TestClient) -> Response {
        match self {
            Self::Erasure => client.delete("/sessions/large").await,
            Self::ErasureOfUser => client.delete("/users/ada").await,
            Self::Rewind => client.delete("/sessions/large/messages?after=2").await,
        }
    }

    /// Kills the service when a part of the messages is deleted or copied.
    async fn kill_meanwhile(self, mut service: Process, backend: &Backend) {
        let removal = self.begin(&service, backend).await;
        removal.abort();
        service.signal("KILL");
        let _ = service.ended().await;
    }

    /// Sends the request, and waits until a part of the messages is deleted or copied.
    async fn begin(self, service: &Process, backend: &Backend) -> JoinHandle<Response> {
        let client: &TestClient = service;
        let before = count(backend, COUNT_MESSAGES).await;
        let removal = tokio::spawn(self.send(client.clone()));
        while count(backend, COUNT_MESSAGES).await == before {
            assert!(!removal.is_finished(), "the removal is one transaction");
            sleep(Duration::from_millis(2)).await;
        }
        removal
    }
}

async fn is_found(service: &Process) -> bool {
    let found = service.get("/search?q=ferry&limit=1&session_id=large").await.ok(200);
    found["items"].as_array().is_some_and(|items| !items.is_empty())
}

/// Checks that nothing of the session can be read.
async fn check_hidden(service: &Process) {
    for path in ["", "/messages", "/revisions", "/redactions", "/export", "/retention"] {
        service.get(&format!("/sessions/large{path}")).await.problem(404, "session-not-found");
    }
    let listed = service.get("/sessions").await.ok(200);
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
    let listed = service.get("/sessions?user_id=ada").await.ok(200);
    assert_eq!(listed["items"], json!([]), "{listed}");
    let context = service.post("/sessions/large/context", "").await.ok(200);
    assert_eq!((&context["exists"], &context["messages"]), (&json!(false), &json!([])), "{context}");
    assert!(!is_found(service).await, "a search finds an erased message");
    let usage = service.get("/usage").await.ok(200);
    assert!(usage["stored_bytes"].as_u64() < Some(100_000), "{usage}");
}

/// Writes to another session until the removal ends, with `check` after each exchange that was made during it.
async fn write_meanwhile(
    service: &Process,
    removal: JoinHandle<Response>,
    check: impl AsyncFn(),
) -> Response {
    let (mut written, mut longest) = (0, Duration::ZERO);
    loop {
        let begun = Instant::now();
        exchange(service, "small").await.ok(201);
        let wait = begun.elapsed();
        if removal.is_finished() {
            break;
        }
        (written, longest) = (written + 1, longest.max(wait));
        check().await;
    }
    println!("{written} exchanges meanwhile, which took {longest:?} at most");
    assert!(written > 0, "no exchange during the removal");
    removal.await.expect("no panic")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_write_during_a_large_erasure_and_see_no_part_of_it() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    for removal in [Removal::Erasure, Removal::ErasureOfUser] {
        fill(&service, &backend).await;
        assert!(is_found(&service).await);
        let erasure = removal.begin(&service, &backend).await;
        let erased = write_meanwhile(&service, erasure, async || check_hidden(&service).await).await;
        erased.ok(204);
        for table in ["sessions", "messages", "revisions"] {
            let rows: &'static str =
                format!("SELECT count(*) FROM {table} WHERE session_id <> 'small'").leak();
            assert_eq!(count(&backend, rows).await, 0, "{table}");
        }
        assert_eq!(count(&backend, COUNT_STALE_ENTRIES).await, 0);
        removal.send((*service).clone()).await.ok(404);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_that_is_created_during_its_erasure_is_new() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    fill(&service, &backend).await;
    let with_key = async || {
        let body = json!({"user_message": "a", "assistant_reply": "b"});
        service.post("/sessions/large/exchanges", body).header("idempotency-key", "k").await
    };
    assert_eq!(with_key().await.ok(201)["first_seq"], MESSAGES + 1);
    let erasure = Removal::Erasure.begin(&service, &backend).await;
    let (first, second) = tokio::join!(exchange(&service, "large"), with_key());
    let seqs = [first.ok(201)["first_seq"].as_u64(), second.ok(201)["first_seq"].as_u64()];
    assert!(seqs == [Some(1), Some(3)] || seqs == [Some(3), Some(1)], "{seqs:?}");
    erasure.await.expect("no panic").ok(204);
    let messages = service.get("/sessions/large/messages").await.ok(200);
    assert_eq!(messages["items"].as_array().map(Vec::len), Some(4), "{messages}");
    assert_eq!(service.get("/sessions/large").await.ok(200)["user_id"], "default");
    assert_eq!(count(&backend, COUNT_RESERVATIONS).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_that_was_killed_stays_invisible_and_is_continued() {
    let backend = Backend::sqlite().await;
    let mut service = Precis::on(&backend).start().await;
    for is_repeated in [false, true] {
        fill(&service, &backend).await;
        Removal::Erasure.kill_meanwhile(service, &backend).await;
        assert!(count(&backend, COUNT_RESERVATIONS).await > 0, "the erasure has ended before the signal");
        assert!(count(&backend, COUNT_STALE_ENTRIES).await > 0);
        service = Precis::on(&backend).start().await;
        check_hidden(&service).await;
        if is_repeated {
            // Nothing is left after the response.
            service.delete("/sessions/large").await.problem(404, "session-not-found");
        } else {
            until_none(&backend, COUNT_RESERVATIONS, "the start does not continue the erasure").await;
        }
        for table in ["sessions", "messages"] {
            let rows: &'static str =
                format!("SELECT count(*) FROM {table} WHERE session_id = 'large'").leak();
            assert_eq!(count(&backend, rows).await, 0, "{table}");
        }
        assert_eq!(count(&backend, COUNT_STALE_ENTRIES).await, 0);
    }
}

/// Returns `true` if the file of the database or its log contains a text of the session `large`.
fn is_in_file(backend: &Backend) -> bool {
    let url = backend.url();
    let path = url.strip_prefix("sqlite://").and_then(|path| path.split('?').next()).expect("a file");
    [path.to_owned(), format!("{path}-wal")].iter().any(|path| {
        let bytes = fs::read(path).unwrap_or_default();
        bytes.windows(16).any(|window| window == b"Plums for the fe")
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_that_was_killed_leaves_nothing_in_the_file_after_the_start() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    fill(&service, &backend).await;
    Removal::Erasure.kill_meanwhile(service, &backend).await;
    assert!(is_in_file(&backend), "the erasure has ended before the signal");
    let _service = Precis::on(&backend).start().await;
    let since = Instant::now();
    while is_in_file(&backend) {
        assert!(since.elapsed() < SOON, "the start leaves erased text in the file");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_write_while_an_erasure_waits_for_a_reader() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    for session in ["large", "small"] {
        exchange(&service, session).await.ok(201);
    }
    // A backup is such a reader.
    let mut reader = SqliteConnection::connect(&backend.url()).await.expect("connected");
    reader.execute("BEGIN; SELECT count(*) FROM messages").await.expect("a snapshot");
    let client: &TestClient = &service;
    let erasure = tokio::spawn(Removal::Erasure.send(client.clone()));
    let (mut written, mut longest) = (0, Duration::ZERO);
    while !erasure.is_finished() {
        let begun = Instant::now();
        exchange(&service, "small").await.ok(201);
        (written, longest) = (written + 1, longest.max(begun.elapsed()));
    }
    erasure.await.expect("no panic").ok(204);
    println!("{written} exchanges meanwhile, which took {longest:?} at most");
    assert!(longest < Duration::from_secs(2), "an exchange waited {longest:?} for the reader");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_disconnects_does_not_end_an_erasure() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    fill(&service, &backend).await;
    let erasure = Removal::Erasure.begin(&service, &backend).await;
    erasure.abort();
    until_none(&backend, COUNT_RESERVATIONS, "the erasure does not end").await;
    assert_eq!(count(&backend, COUNT_STALE_ENTRIES).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_write_during_a_large_rewind() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    fill(&service, &backend).await;
    let rewind = Removal::Rewind.begin(&service, &backend).await;
    let check = async || assert!(is_found(&service).await, "no search finds the session");
    let rewound: Value = write_meanwhile(&service, rewind, check).await.ok(200);
    assert_eq!(rewound["last_seq"], 2, "{rewound}");
    assert_eq!(count(&backend, COUNT_STALE_ENTRIES).await, 0);
    let found = service.get("/search?q=ferry&limit=50&session_id=large").await.ok(200);
    assert_eq!(found["items"].as_array().map(Vec::len), Some(2), "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_that_was_killed_leaves_the_session_and_its_index() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    fill(&service, &backend).await;
    Removal::Rewind.kill_meanwhile(service, &backend).await;
    let service = Precis::on(&backend).start().await;
    assert_eq!(service.get("/sessions/large").await.ok(200)["last_seq"], MESSAGES);
    until_none(&backend, COUNT_RESERVATIONS, "the start does not remove the branch").await;
    assert_eq!(count(&backend, COUNT_STALE_ENTRIES).await, 0);
    assert!(count(&backend, COUNT_ENTRIES).await >= i64::from(MESSAGES));
    assert!(is_found(&service).await);
}
