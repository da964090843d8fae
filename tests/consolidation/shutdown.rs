//! Shutdown during a consolidation: the run finishes within the grace period, or releases its lease.

use crate::harness::{PATIENCE, plain, record, revisions, start, state, turns};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_finishes_within_shutdown_grace(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    let app = start(&backend, &model, &[("consolidation.mode", "background")]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    model.until_calls(1).await;
    let (url, client) = (app.url.clone(), app.http.clone());
    let stop = tokio::spawn(app.stop());
    // The shutdown has begun when the service rejects requests.
    while client.get(format!("{url}/livez")).header("connection", "close").send().await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!model.calls()[0].answered && !stop.is_finished());
    release.add_permits(1);
    tokio::time::timeout(PATIENCE, stop).await.expect("it ends").unwrap();
    let next = start(&backend, &model, &[]).await;
    assert_eq!(plain(&next, "s", &given).await.coverage.summary_through, 82);
    assert_eq!(state(&next, "s").await["consolidation"]["state"], "idle");
    assert_eq!(model.calls().len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_stopped_after_grace_releases_lease(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::Hang);
    let set = [("consolidation.mode", "background"), ("server.shutdown_grace", "200ms")];
    let app = start(&backend, &model, &set).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    model.until_calls(1).await;
    let next = start(&backend, &model, &[]).await;
    assert_eq!(plain(&next, "s", &given).await.outcome(), "in_progress");
    tokio::time::timeout(PATIENCE / 2, app.stop()).await.expect("it ends");
    model.until_idle().await;
    let after = state(&next, "s").await;
    assert_eq!(
        after["consolidation"],
        json!({"state": "idle", "failures": 0, "last_failure": null, "retry_at": null})
    );
    assert_eq!(plain(&next, "s", &given).await.outcome(), "consolidated");
    assert_eq!((model.calls().len(), revisions(&next, "s").await.len()), (2, 1));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_waiting_for_consolidation_does_not_delay_shutdown(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::Hang);
    let app = start(&backend, &model, &[("server.shutdown_grace", "200ms")]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    let request = app.request(reqwest::Method::POST, "/sessions/s/context");
    let client = tokio::spawn(request.send());
    model.until_calls(1).await;
    tokio::time::timeout(PATIENCE / 2, app.stop()).await.expect("it ends");
    let next = start(&backend, &model, &[]).await;
    assert_eq!(plain(&next, "s", &given).await.outcome(), "consolidated", "the lease was given back");
    client.abort();
}
