//! The worker that erases expired sessions: killed, stopped, and in several processes.

use crate::service::{Precis, Process, SOON, messages};
use crate::support::backend::Backend;
use serde_json::Value;
use std::time::{Duration, Instant};
use test_case::test_case;

const SESSIONS: usize = 60;
/// Slow enough to be interrupted.
const SESSIONS_PER_SECOND: u32 = 30;

/// Starts a process that erases sessions a second after their last exchange.
async fn start_worker(backend: &Backend) -> Process {
    let precis = Precis::on(backend).set("retention.interval", "100ms");
    let precis = precis.set("retention.after_last_exchange", "1s");
    precis.set("retention.max_sessions_per_second", &SESSIONS_PER_SECOND.to_string()).start().await
}

async fn record_sessions(process: &Process) {
    for n in 0..SESSIONS {
        process.record(&format!("s{n}"), &messages(2)).await;
    }
}

async fn sessions(process: &Process) -> Vec<Value> {
    process.all_pages("/sessions", 1000).await
}

/// Waits until at most this number of sessions is left.
async fn until_left(process: &Process, count: usize) {
    let begun = Instant::now();
    while sessions(process).await.len() > count {
        assert!(begun.elapsed() < SOON, "sessions are not erased");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the number of rows of all sessions without the row of a session, except those of the search index.
async fn orphans(backend: &Backend) -> u64 {
    let mut rows = 0;
    for table in ["messages", "idempotency_keys"] {
        let update = format!(
            "UPDATE {table} SET seq = seq WHERE NOT EXISTS (SELECT 1 FROM sessions AS s
                WHERE s.tenant_id = {table}.tenant_id AND s.session_id = {table}.session_id)"
        );
        let update = if table == "idempotency_keys" {
            update.replace("seq = seq", "last_seq = last_seq")
        } else {
            update
        };
        rows += backend.execute(&update, &update).await;
    }
    rows
}

/// Changes nothing, but affects a row if the search index contains anything.
const UPDATE_IF_INDEXED: &str = "UPDATE search_analyzer SET version = version
    WHERE EXISTS (SELECT 1 FROM search_terms)";

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_worker_leaves_whole_sessions_and_the_next_one_continues(backend: Backend) {
    let writer = Precis::on(&backend).start().await;
    record_sessions(&writer).await;
    writer.signal("TERM");
    drop(writer);
    let mut killed = start_worker(&backend).await;
    until_left(&killed, SESSIONS * 3 / 4).await;
    killed.signal("KILL");
    assert_eq!(killed.ended().await.0, None);

    let idle = Precis::on(&backend).start().await;
    let left = sessions(&idle).await;
    assert!(!left.is_empty() && left.len() < SESSIONS, "{} sessions are left", left.len());
    for session in &left {
        let id = session["session_id"].as_str().expect("an id");
        assert_eq!(idle.history(id).await.len(), 2);
    }
    assert_eq!(orphans(&backend).await, 0);
    drop(idle);

    let mut heir = start_worker(&backend).await;
    until_left(&heir, 0).await;
    assert_eq!(orphans(&backend).await, 0);
    let begun = Instant::now();
    while backend.execute(UPDATE_IF_INDEXED, UPDATE_IF_INDEXED).await > 0 {
        assert!(begun.elapsed() < SOON, "messages of erased sessions are not removed from the search index");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The worker does not delay the end of the process.
    heir.signal("TERM");
    let (code, elapsed) = heir.ended().await;
    assert_eq!(code, Some(0));
    assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
}

fn erased(metrics: &str) -> usize {
    let value = metrics.lines().find_map(|line| line.strip_prefix("precis_retention_sessions_erased_total "));
    value.and_then(|value| value.parse().ok()).expect("a counter")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_replicas_erase_each_session_once_at_the_rate_of_one() {
    let backend = Backend::postgres().await;
    let writer = Precis::on(&backend).start().await;
    record_sessions(&writer).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    let replicas = [start_worker(&backend).await, start_worker(&backend).await];
    until_left(&writer, 0).await;
    let shortest = Duration::from_secs(1) / SESSIONS_PER_SECOND * u32::try_from(SESSIONS - 1).expect("few");
    assert!(begun.elapsed() >= shortest, "{:?}", begun.elapsed());
    // The last counter follows its erasure.
    let counted = async || {
        let mut sum = 0;
        for replica in &replicas {
            sum += erased(&replica.get("/metrics").await.text);
        }
        sum
    };
    while counted().await < SESSIONS {
        assert!(begun.elapsed() < SOON, "{} erasures were counted", counted().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(counted().await, SESSIONS);
}
