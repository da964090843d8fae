//! Serves one prepared response with axum and does nothing else: the upper limit of what an HTTP service can do on this
//! machine. `scripts/bench` measures it in the same run as precis:
//!
//! ```text
//! cargo run --release --example axum_reference -- 127.0.0.1:8081
//! ```

#![expect(clippy::expect_used, reason = "a benchmark may panic")]

use axum::Router;
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::routing::post;
use tokio::net::TcpListener;

/// About as long as a context with a tail of 20 messages of 300 characters.
const RESPONSE_BYTES: usize = 6 * 1024;

#[tokio::main]
async fn main() {
    let address = std::env::args().nth(1).expect("usage: axum_reference ADDRESS");
    let response = Bytes::from(vec![b'x'; RESPONSE_BYTES]);
    let respond = post(move || async move { ([(CONTENT_TYPE, "application/json")], response) });
    let listener = TcpListener::bind(address).await.expect("a free address");
    axum::serve(listener, Router::new().route("/", respond)).await.expect("axum serves until it is stopped");
}
