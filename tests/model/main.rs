//! Compares the service with a reference model of its contract: every response and all visible state must equal the
//! prediction of the model, for random operations of several clients, random settings and random model faults.
//!
//! - [`operations`] generates scenarios, and proptest shrinks a failing one to the shortest list of operations.
//! - [`reference_model`] predicts results; it works message by message, while the service works with ranges.
//! - [`executor`] sends the operations and compares.
//! - [`concurrent_clients`] runs clients at the same time, so that only the final state can be predicted.
//!
//! `PRECIS_TEST_FACTOR=50` runs 50 times as many cases, for a longer search.
#![cfg(test)]

mod concurrent_clients;
mod executor;
mod operations;
mod panic_hook;
mod reference_model;
mod state_checks;

#[expect(dead_code, reason = "the consolidation tests use the rest of it")]
#[path = "../consolidation/harness.rs"]
mod harness;

#[path = "../support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

use executor::Executor;
use precis::domain::api_key::Scope;
use precis::domain::id::TenantId;
use precis::service::keys::create_key;
use precis::storage::Store;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;
use support::app::TestApp;
use support::backend::Backend;
use support::client::TestClient;
use support::factor::test_factor;
use support::model_server::ModelServer;
use test_case::test_case;
use tokio::runtime::Handle;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_and_state_match_reference_model(backend: Backend) {
    let store = backend.store().await;
    check_property(20, &operations::scenarios(), async |case, scenario| {
        let model = ModelServer::start().await;
        let settings = scenario.settings();
        let settings: Vec<_> = settings.iter().map(|(path, value)| (*path, value.as_str())).collect();
        let app = harness::start(&backend, &model, &settings).await;
        let clients = clients(&app, &store, case).await;
        Executor::new(clients, model, scenario.settings).run(scenario.steps).await;
        app.stop().await;
    });
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_clients_lose_and_duplicate_no_exchange(backend: Backend) {
    let store = backend.store().await;
    // Small limits, so that a short list of actions leads to consolidation and compression.
    let app = TestApp::start(
        &backend,
        &[
            ("consolidation.threshold", "4"),
            ("consolidation.keep_recent", "2"),
            ("consolidation.max_history_messages", "8"),
            ("consolidation.summary_word_limit", "40"),
        ],
    )
    .await;
    check_property(16, &concurrent_clients::clients(), async |case, actions| {
        concurrent_clients::run(&clients(&app, &store, case).await, actions).await;
    });
    app.stop().await;
}

fn check_property<S: Strategy<Value: Debug>>(cases: u32, strategy: &S, test: impl AsyncFn(u32, S::Value)) {
    let cases = cases * test_factor();
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, case) = (Handle::current(), Cell::new(0));
    tokio::task::block_in_place(|| {
        let search = || {
            TestRunner::new(config).run(strategy, |value| {
                case.set(case.get() + 1);
                handle.block_on(test(case.get(), value));
                Ok(())
            })
        };
        let (result, location) = panic_hook::without_panic_messages(search);
        result.unwrap_or_else(|failure| panic!("{location}: {failure}"));
    });
}

/// Returns two clients of one tenant and one client of another. Each case has its own tenants.
async fn clients(app: &TestClient, store: &Arc<Store>, case: u32) -> [TestClient; 3] {
    let client = async |tenant: &str| {
        let tenant = TenantId::new(tenant).expect("a tenant");
        let key = create_key(store, &tenant, None, Scope::Admin).await.expect("a key");
        app.with_key(key.expose())
    };
    let (one, two) = (format!("one-{case}"), format!("two-{case}"));
    [client(&one).await, client(&one).await, client(&two).await]
}
