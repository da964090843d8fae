//! The memory usage of a long consolidation depends on the size of a batch and not on the number of batches.
//!
//! Measured on the real binary in its own process, because the test process holds the conversation itself.
#![cfg(target_os = "linux")]

use crate::batches::long;
use crate::harness::{covering, record, start};
use crate::process::{Precis, Process};
use crate::support::backend::Backend;
use crate::support::memory::peak_kib;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::json;
use test_case::test_case;

/// Number of messages of a session that takes several batches, so that all buffers reach their full size.
const FEW: usize = 1500;
const MANY: usize = 10_000;

/// Allowance for pages that the allocator keeps, which took 0 to 14 MB in twelve runs. A run that loads all messages at
/// once takes 42 to 84 MB more.
const SLACK_KB: u64 = 28 * 1024;

async fn consolidate(process: &Process, session: &str, messages: usize) {
    let answer = process.context(session, &json!({})).await;
    assert_eq!(answer["consolidation"]["outcome"], json!("consolidated"), "{answer}");
    assert_eq!(answer["coverage"]["summary_through"], messages - 20);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_usage_is_independent_of_number_of_messages(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    // Indexing the messages would take most of the time.
    let set = [("consolidation.mode", "off"), ("search.enabled", "false")];
    let app = start(&backend, &model, &set).await;
    for (session, messages) in [("first", FEW), ("second", FEW), ("third", FEW), ("many", MANY)] {
        let given: Vec<String> = (1..=messages).map(long).collect();
        record(&app, session, &given).await;
    }
    let process =
        Precis::on(&backend).model(&model.base_url()).set("consolidation.inline_wait", "2min").start().await;
    for session in ["first", "second", "third"] {
        consolidate(&process, session, FEW).await;
    }
    // The peak of the first run still depends on the state of the allocator, so three runs precede the comparison.
    let few = peak_kib(process.id());
    consolidate(&process, "many", MANY).await;
    let many = peak_kib(process.id());
    assert!(model.calls().len() > 10);
    assert!(many < few + SLACK_KB, "{few} kB for {FEW} messages, {many} kB for {MANY}");
}
