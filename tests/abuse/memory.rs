//! Attacks on the memory of the process.

use crate::service::{Bystander, Service, flood, status_after_body};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use serde_json::json;
use std::time::Duration;
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The process may have this memory with default settings, in MB.
const MAX_MEMORY: u64 = 512;

/// Stores two exchanges of four images of 7.4 MB.
async fn store_images(client: &TestClient) {
    let image = format!("data:image/png;base64,{}", "iVBORw0K".repeat(925_000));
    let part = json!({"type": "image_url", "image_url": {"url": image}});
    let message = json!({"role": "user", "content": [{"type": "text", "text": "look"}, part]}).to_string();
    let body = format!(r#"{{"messages":[{}]}}"#, [&*message; 4].join(","));
    for _ in 0..2 {
        client.post("/sessions/images/exchanges", &body).await.ok(201);
    }
}

/// Sends a request, reads the head of the response, and nothing more.
async fn send_without_reading(client: &TestClient, key: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = client.connect().await;
    let method = if body.is_empty() { "GET" } else { "POST" };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.expect("a response");
    stream
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run"]
async fn large_responses_have_a_common_limit(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let bystander = Bystander::new(&service, "bystander").await;
    println!("peak at the start: {} MB", service.peak_memory());
    store_images(&attacker).await;
    println!("after the exchanges: {} MB", service.peak_memory());
    for (attack, method, path, body) in [
        ("pages", "GET", "/sessions/images/messages?limit=1000", ""),
        ("contexts", "POST", "/sessions/images/context", "{}"),
        ("Anthropic contexts", "POST", "/sessions/images/context", r#"{"format":"anthropic"}"#),
    ] {
        let attacker = attacker.clone();
        let request = async move |_| {
            let request = attacker.request(method.parse().expect("a method"), path);
            let request = if body.is_empty() { request } else { request.json(body) };
            status_after_body(request).await
        };
        let statuses = flood(8, Duration::from_millis(800), request).await;
        println!("{attack}: {statuses:?}, peak {} MB", service.peak_memory());
        assert!(service.peak_memory() < MAX_MEMORY, "{attack}: {} MB", service.peak_memory());
    }
    // Clients that do not read. Other tenants get contexts meanwhile.
    let key = service.backend.key("attacker", precis::domain::api_key::Scope::Write).await;
    let mut idle = Vec::new();
    let held = async {
        for _ in 0..6 {
            idle.push(send_without_reading(&attacker, key.expose(), "/sessions/images/context", "{}").await);
        }
    };
    let served = bystander.measure(Duration::from_millis(500), held).await;
    println!("six clients that do not read: {}, peak {} MB", served.figures(), service.peak_memory());
    assert!(service.peak_memory() < MAX_MEMORY, "{} MB", service.peak_memory());
    assert!(served.has_its_share(), "{}", served.figures());
    let same_key = attacker.with_key(key.expose());
    let status = same_key.post("/sessions/images/context", "{}").await.status;
    assert_eq!(status, 503, "the memory of the key is in use");
    // The memory is released when the clients disconnect. Each request waits for it up to the queue timeout.
    drop(idle);
    let released = async { while same_key.post("/sessions/images/context", "{}").await.status != 200 {} };
    tokio::time::timeout(Duration::from_secs(30), released).await.expect("the memory is released");
}

/// The text of an exchange is in memory several times while it is stored.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run"]
async fn exchanges_of_many_messages_have_a_common_limit(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let message = json!({"role": "user", "content": "word ".repeat(500)}).to_string();
    let body = format!(r#"{{"messages":[{}]}}"#, vec![&*message; 10_000].join(","));
    let request = async move |client| {
        let path = format!("/sessions/s{client}/exchanges");
        attacker.post(&path, &body).unchecked().await.map_or(0, |response| response.status().as_u16())
    };
    let statuses = flood(4, Duration::from_secs(2), request).await;
    println!("{statuses:?}, peak {} MB", service.peak_memory());
    assert!(statuses.iter().any(|(status, _)| *status == 201), "{statuses:?}");
    assert!(service.peak_memory() < MAX_MEMORY, "{} MB", service.peak_memory());
}

/// Searches that find messages of a megabyte each.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run"]
async fn searches_of_large_messages_have_a_common_limit(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let message = json!({"role": "user", "content": "the night ferry ".repeat(62_500)}).to_string();
    let body = format!(r#"{{"messages":[{}]}}"#, [&*message; 8].join(","));
    for session in 0..4 {
        attacker.post(&format!("/sessions/s{session}/exchanges"), &body).await.ok(201);
    }
    let request =
        async move |_| status_after_body(attacker.get("/search?q=ferry&limit=50&neighbours=10")).await;
    let statuses = flood(24, Duration::from_secs(4), request).await;
    println!("{statuses:?}, peak {} MB", service.peak_memory());
    assert!(statuses.iter().any(|(status, _)| *status == 200), "{statuses:?}");
    // 400 MB if the responses contained all messages.
    assert!(service.peak_memory() < MAX_MEMORY / 2, "{} MB", service.peak_memory());
}

/// A small JSON value takes several hundred bytes of memory while it is parsed, and three bytes of a body.
#[test_case(Backend::sqlite().await; "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run"]
async fn json_values_have_a_common_limit(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let list = |value: &str, count: usize| format!("[{}]", vec![value; count].join(","));
    let ping = |count| {
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"a":{}}}}}"#, list(r#"{"":0}"#, count))
    };
    let message = |field: &str, count| {
        let values = list("{}", count);
        format!(r#"{{"messages":[{{"role":"assistant","content":"a","{field}":{values}}}]}}"#)
    };
    for (attack, path, body) in [
        ("tool calls below the limit", "/sessions/values/exchanges", message("tool_calls", 249_000)),
        ("content parts below the limit", "/sessions/values/exchanges", message("content", 249_000)),
        ("tool calls", "/sessions/values/exchanges", message("tool_calls", 2_500_000)),
        (
            "arguments of a tool",
            "/sessions/values/tools/memory_read",
            format!(r#"{{"a":{}}}"#, list(r#"{"":0}"#, 1_000_000)),
        ),
        ("MCP", "/mcp", ping(1_000_000)),
    ] {
        let attacker = attacker.clone();
        let request = async move |_| {
            attacker.post(path, &body).unchecked().await.map_or(0, |response| response.status().as_u16())
        };
        let statuses = flood(8, Duration::from_millis(800), request).await;
        println!("{attack}: {statuses:?}, peak {} MB", service.peak_memory());
        assert!(service.peak_memory() < MAX_MEMORY, "{attack}: {} MB", service.peak_memory());
    }
}
