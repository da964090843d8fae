//! Attacks by a model server.

use crate::service::{Service, flood};
use crate::support::backend::Backend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const CALLS: usize = 16;
/// The memory that all calls may take together, and what the process needs for other purposes meanwhile, in MB.
const MAX_MORE: u64 = 8 + 32;

/// A server that is down. Once `is_endless` is set, its responses are one line without an end. Returns its base URL.
async fn endless_line(is_endless: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let is_endless = is_endless.load(Ordering::Relaxed);
            tokio::spawn(async move {
                let mut head = vec![0; 64 * 1024];
                let _ = stream.read(&mut head).await;
                if !is_endless {
                    let head = "HTTP/1.1 500 Down\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
                    return drop(stream.write_all(head.as_bytes()).await);
                }
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
#[ignore = "measures memory and shares; run by .ci/run"]
async fn endless_responses_of_models_have_a_limit(backend: Backend) {
    let is_endless = Arc::new(AtomicBool::new(false));
    let url = endless_line(Arc::clone(&is_endless)).await;
    let settings = [
        ("llm.providers.endless.base_url", url.as_str()),
        ("llm.models.endless.provider", "endless"),
        ("llm.models.endless.model", "m"),
        ("llm.models.endless.retries", "0"),
        ("llm.models.endless.breaker_min_calls", "1000000"),
        ("llm.models.endless.max_concurrent_calls", "16"),
        ("llm.pools.default.models", "endless"),
        ("consolidation.threshold", "3"),
        ("consolidation.keep_recent", "1"),
        ("limits.max_model_bytes_in_flight", "8388608"),
    ];
    let service = Service::start(backend, &settings).await;
    let tenant = service.tenant("tenant").await;
    for session in 0..CALLS {
        tenant.record_turns(&format!("s{session}"), 0..3).await;
    }
    let consolidate = async || {
        let tenant = tenant.clone();
        let request = async move |client| {
            let path = format!("/sessions/s{client}/consolidations");
            tenant.post(&path, "").unchecked().await.map_or(0, |response| response.status().as_u16())
        };
        flood(CALLS, Duration::from_secs(1), request).await
    };
    consolidate().await;
    let before = service.peak_memory();
    is_endless.store(true, Ordering::Relaxed);
    let statuses = consolidate().await;
    let peak = service.peak_memory();
    println!("{CALLS} endless responses: {statuses:?}, peak {peak} MB, before {before} MB");
    // A busy machine may reject some of them, because they wait too long for their turn.
    assert!(statuses.iter().all(|(status, _)| [502, 503].contains(status)), "{statuses:?}");
    // The limit of each event alone allows three times 16 MB.
    assert!(peak < before + MAX_MORE, "{peak} MB, before {before} MB");
    let metrics = tenant.get("/metrics").await.text;
    let failures = metrics
        .lines()
        .find(|line| line.contains(r#"{model="endless",cause="memory_limit"}"#))
        .expect("the metric");
    assert!(!failures.ends_with(" 0"), "{failures}");
}
