//! The service over a backend, listening on a port of its own, and a client for it.
#![cfg(test)]

use super::backend::Backend;
use precis::app::App;
use precis::config::{Settings, Sources};
use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A running service. It ends with the value.
pub(crate) struct TestApp {
    pub(crate) url: String,
    pub(crate) client: Client,
    key: Option<String>,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<()>>,
}

/// Settings by their paths, as the environment would give them: `("consolidation.threshold", "10")`.
pub(crate) type Set<'a> = &'a [(&'a str, &'a str)];

pub(crate) fn settings(backend: &Backend, set: Set<'_>) -> Settings {
    let variable = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
    let mut environment = vec![
        (variable("database.url"), backend.url()),
        (variable("server.bind"), "127.0.0.1:0".to_owned()),
        (variable("log.filter"), "off".to_owned()),
    ];
    // A busy machine is no overload.
    if !set.iter().any(|(path, _)| *path == "limits.queue_timeout") {
        environment.push((variable("limits.queue_timeout"), "30s".to_owned()));
    }
    environment.extend(set.iter().map(|(path, value)| (variable(path), (*value).to_owned())));
    let sources = Sources { environment, ..Sources::default() };
    Settings::load(&sources).unwrap_or_else(|errors| panic!("{errors}")).settings
}

/// The settings of one model behind `base_url` as the only one of the default pool. It is called once for each
/// question, however often that fails: what a model does wrong is the subject of most tests, not what helps.
pub(crate) fn one_model(base_url: &str) -> Vec<(&'static str, String)> {
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
        let client =
            precis::llm::http::build_http_client(std::time::Duration::from_secs(5)).expect("a client");
        Self { url, client, key: None, stop: Some(stop), served: Some(served) }
    }

    /// The same service for the holder of this key. It runs for as long as the one that was started.
    pub(crate) fn with_key(&self, key: &str) -> Self {
        let (url, client) = (self.url.clone(), self.client.clone());
        Self { url, client, key: Some(key.to_owned()), stop: None, served: None }
    }

    /// Stops the service as a signal does, and waits until it has ended.
    pub(crate) async fn stop(mut self) {
        drop(self.stop.take());
        if let Some(served) = self.served.take() {
            served.await.expect("ended in good order");
        }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.url));
        if let Some(key) = &self.key { request.bearer_auth(key) } else { request }
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        ok(self.request(Method::GET, path).send().await.expect("an answer")).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Value {
        ok(self.request(Method::POST, path).json(body).send().await.expect("an answer")).await
    }

    /// Persists messages as one exchange.
    pub(crate) async fn record(&self, session: &str, messages: &[Value]) -> Value {
        self.post(&format!("/sessions/{session}/exchanges"), &json!({ "messages": messages })).await
    }

    /// Persists `turns` turns of a question and an answer.
    pub(crate) async fn record_turns(&self, session: &str, turns: std::ops::Range<usize>) {
        for turn in turns {
            let body = json!({
                "user_message": format!("Question {turn}: what did we decide about subject {turn}?"),
                "assistant_reply": format!("Answer {turn}: subject {turn} was decided in favour of plan {turn}."),
            });
            self.post(&format!("/sessions/{session}/exchanges"), &body).await;
        }
    }

    pub(crate) async fn context(&self, session: &str, body: &Value) -> Value {
        self.post(&format!("/sessions/{session}/context"), body).await
    }
}

async fn ok(response: Response) -> Value {
    let (status, url) = (response.status(), response.url().clone());
    let text = response.text().await.expect("a body");
    assert!(status.is_success(), "{url}: {status} {text}");
    if text.is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON") }
}
