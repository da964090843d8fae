//! Attacks by a model server.

use crate::service::{Service, flood};
use crate::support::backend::Backend;
use std::time::Duration;
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// A server whose responses are one line without an end. Returns its base URL.
async fn endless_line() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = vec![0; 64 * 1024];
                let _ = stream.read(&mut head).await;
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"";
                let _ = stream.write_all(head.as_bytes()).await;
                let text = vec![b'x'; 64 * 1024];
                while stream.write_all(&text).await.is_ok() {}
            });
        }
    });
    format!("http://{address}/v1")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_responses_of_models_have_a_limit(backend: Backend) {
    let url = endless_line().await;
    let settings = [
        ("llm.providers.endless.base_url", url.as_str()),
        ("llm.models.endless.provider", "endless"),
        ("llm.models.endless.model", "m"),
        ("llm.models.endless.retries", "0"),
        ("llm.models.endless.breaker_min_calls", "1000"),
        ("llm.models.endless.max_concurrent_calls", "16"),
        ("llm.pools.default.models", "endless"),
        ("consolidation.threshold", "3"),
        ("consolidation.keep_recent", "1"),
    ];
    let service = Service::start(backend, &settings).await;
    let tenant = service.tenant("tenant").await;
    for session in 0..16 {
        tenant.record_turns(&format!("s{session}"), 0..3).await;
    }
    let before = service.peak_memory();
    let request = async move |client| {
        let path = format!("/sessions/s{client}/consolidations");
        tenant.post(&path, "").unchecked().await.map_or(0, |response| response.status().as_u16())
    };
    let statuses = flood(16, Duration::from_secs(1), request).await;
    let peak = service.peak_memory();
    println!("16 endless responses: {statuses:?}, peak {peak} MB, before {before} MB");
    assert!(statuses.iter().all(|(status, _)| *status == 502), "{statuses:?}");
    assert!(peak < before + 120, "{peak} MB, before {before} MB");
}
