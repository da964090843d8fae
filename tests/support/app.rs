//! The service in this process, on a port of its own.
#![cfg(test)]

use super::backend::Backend;
use super::client::TestClient;
use precis::app::App;
use precis::config::{Settings, Sources};
use std::ops::Deref;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A running service with a client for it. The service ends with this value.
pub(crate) struct TestApp {
    client: TestClient,
    stop: oneshot::Sender<()>,
    served: JoinHandle<()>,
    _backend: Option<Backend>,
}

impl Deref for TestApp {
    type Target = TestClient;

    fn deref(&self) -> &TestClient {
        &self.client
    }
}

/// Settings by their paths, as in the environment: `("consolidation.threshold", "10")`.
pub(crate) type Set<'a> = &'a [(&'a str, &'a str)];

pub(crate) fn settings(backend: &Backend, set: Set<'_>) -> Settings {
    let variable = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
    let mut environment = vec![
        (variable("database.url"), backend.url()),
        (variable("server.bind"), "127.0.0.1:0".to_owned()),
        (variable("log.filter"), "off".to_owned()),
    ];
    // Otherwise a busy machine looks like overload.
    if !set.iter().any(|(path, _)| *path == "limits.queue_timeout") {
        environment.push((variable("limits.queue_timeout"), "30s".to_owned()));
    }
    environment.extend(set.iter().map(|(path, value)| (variable(path), (*value).to_owned())));
    let sources = Sources { environment, ..Sources::default() };
    Settings::load(&sources).unwrap_or_else(|errors| panic!("{errors}")).settings
}

/// Returns the settings of a default pool with one model at `base_url`. The model is called once per task, even if calls
/// fail: retries and the circuit breaker are off.
fn one_model(base_url: &str) -> Vec<(&'static str, String)> {
    vec![
        ("llm.providers.scripted.base_url", base_url.to_owned()),
        ("llm.models.small.provider", "scripted".to_owned()),
        ("llm.models.small.model", "scripted-1".to_owned()),
        ("llm.models.small.retries", "0".to_owned()),
        ("llm.models.small.breaker_min_calls", "1000".to_owned()),
        ("llm.pools.default.models", "small".to_owned()),
    ]
}

impl TestApp {
    pub(crate) async fn start(backend: &Backend, set: Set<'_>) -> Self {
        Self::serve(App::new(&settings(backend, set), true).await.expect("an app")).await
    }

    /// Starts a service whose only model is at `base_url`.
    pub(crate) async fn start_with_model(backend: &Backend, base_url: &str, set: Set<'_>) -> Self {
        let model = one_model(base_url);
        let model = model.iter().map(|(path, value)| (*path, value.as_str()));
        Self::start(backend, &model.chain(set.iter().copied()).collect::<Vec<_>>()).await
    }

    /// Starts a service with its own store, for tests that do not depend on the store.
    pub(crate) async fn on_sqlite(set: Set<'_>) -> Self {
        let backend = Backend::sqlite().await;
        let app = Self::start(&backend, set).await;
        Self { _backend: Some(backend), ..app }
    }

    pub(crate) async fn serve(app: App) -> Self {
        let listener = app.listen().await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            let stop = async move {
                let _ = stopped.await;
            };
            app.serve(listener, stop).await.expect("served");
        });
        Self { client: TestClient::new(url), stop, served, _backend: None }
    }

    /// Stops the service as a signal does, and waits until it has ended.
    pub(crate) async fn stop(self) {
        drop(self.stop);
        self.served.await.expect("no panic");
    }
}
