//! The service against a plain model of its contract: whatever clients do, in whatever order, answers and state are
//! what the model says.
//!
//! [`story`] makes up what several clients of two tenants do, [`contract`] is the model, [`teller`] does it over HTTP
//! and compares. [`crowd`] lets clients loose at the same time, where only the end can be predicted. A counterexample
//! is cut short by proptest and printed as one line for each operation.
#![cfg(test)]

mod answer;
mod contract;
mod crowd;
mod quiet;
mod story;
mod teller;
mod visible;

#[path = "../support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

use precis::domain::api_key::Scope;
use precis::domain::id::TenantId;
use precis::service::keys::Keys;
use precis::storage::Store;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use support::app::{Set, TestApp};
use support::backend::Backend;
use test_case::test_case;
use tokio::runtime::Handle;

/// Small, so that a short story goes through everything. The model has the same numbers.
const SET: Set<'static> = &[
    ("consolidation.threshold", "4"),
    ("consolidation.keep_recent", "2"),
    ("consolidation.max_history_messages", "8"),
    ("consolidation.summary_word_limit", "40"),
];

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_clients_do_the_contract_holds(backend: Backend) {
    let service = Service::start(&backend).await;
    service.search(20, &story::stories(), async |app: [TestApp; 3], story| {
        teller::Teller::new(app).tell(story).await;
    });
    service.app.stop().await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_at_the_same_time_lose_nothing(backend: Backend) {
    let service = Service::start(&backend).await;
    service.search(16, &crowd::crowds(), async |app: [TestApp; 3], crowd| crowd::run(&app, crowd).await);
    service.app.stop().await;
}

struct Service {
    app: TestApp,
    store: Arc<dyn Store>,
}

impl Service {
    async fn start(backend: &Backend) -> Self {
        Self { app: TestApp::start(backend, SET).await, store: backend.store().await }
    }

    /// Tries cases of it, each with tenants of its own; the environment variable `PRECIS_MODEL_CASES` is for a longer
    /// search.
    fn search<S: Strategy<Value: Debug>, F: Future<Output = ()>>(
        &self,
        cases: u32,
        strategy: &S,
        test: impl Fn([TestApp; 3], S::Value) -> F,
    ) {
        let cases =
            std::env::var("PRECIS_MODEL_CASES").map_or(cases, |cases| cases.parse().expect("a number"));
        let config =
            Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
        let (handle, tried) = (Handle::current(), Cell::new(0));
        tokio::task::block_in_place(|| {
            let mut runner = TestRunner::new(config);
            let search = || {
                runner.run(strategy, |case| {
                    tried.set(tried.get() + 1);
                    handle.block_on(async { test(self.clients(tried.get()).await, case).await });
                    Ok(())
                })
            };
            let (searched, at) = quiet::quietly(search);
            searched.unwrap_or_else(|failure| panic!("{at}: {failure}"));
        });
    }

    /// Two clients of one tenant and one of another.
    async fn clients(&self, case: u32) -> [TestApp; 3] {
        let one = format!("one-{case}");
        let two = format!("two-{case}");
        [self.client(&one).await, self.client(&one).await, self.client(&two).await]
    }

    async fn client(&self, tenant: &str) -> TestApp {
        let tenant = TenantId::new(tenant).expect("a tenant");
        let key = Keys::new(self.store.clone()).create(&tenant, None, Scope::Admin).await.expect("a key");
        self.app.with_key(key.expose())
    }
}
