//! A plain service that keeps conversations in Postgres, as one would write it with axum and sqlx alone: `scripts/bench`
//! compares precis with it in the same run. It validates nothing, counts no tokens, and has no search, no tenants with
//! row-level security, no cache and no batches.
//!
//! ```text
//! cargo run --release --example axum_sqlx -- 127.0.0.1:8081 postgres://user:password@localhost/name
//! ```

#![expect(clippy::expect_used, clippy::panic, reason = "a benchmark may panic")]

use axum::extract::{Json, Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::net::TcpListener;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS sessions (
        session_id text COLLATE \"C\" PRIMARY KEY, last_seq bigint NOT NULL, summary text NOT NULL DEFAULT ''
    ) WITH (fillfactor = 70);
    CREATE TABLE IF NOT EXISTS messages (
        session_id text COLLATE \"C\" NOT NULL REFERENCES sessions, seq bigint NOT NULL, role text NOT NULL,
        content text NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (session_id, seq)
    );";
const ADVANCE: &str = "
    INSERT INTO sessions AS s (session_id, last_seq) VALUES ($1, 2)
    ON CONFLICT (session_id) DO UPDATE SET last_seq = s.last_seq + 2 RETURNING last_seq";
const INSERT: &str = "INSERT INTO messages (session_id, seq, role, content) VALUES ($1, $2, $3, $4)";
const READ_SESSION: &str = "SELECT last_seq, summary FROM sessions WHERE session_id = $1";
const READ_TAIL: &str = "SELECT role, content FROM messages WHERE session_id = $1 ORDER BY seq DESC LIMIT $2";

/// The largest tail of a context. The sessions of the benchmark have 20 or 100 messages.
const MAX_TAIL: i64 = 100;
/// The default of `database.max_connections` of precis.
const MAX_CONNECTIONS: u32 = 10;
const FAILED: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;

#[derive(Deserialize)]
struct ExchangeRequest {
    user_message: String,
    assistant_reply: String,
}

#[derive(Serialize)]
struct ExchangeResponse {
    last_seq: i64,
}

#[derive(Deserialize)]
struct ContextRequest {
    system_prompt: String,
    user_message: String,
}

#[derive(Serialize)]
struct Message {
    role: String,
    content: String,
}

#[derive(Serialize)]
struct ContextResponse {
    last_seq: i64,
    messages: Vec<Message>,
}

/// Appends two messages in one transaction.
async fn append_exchange(
    State(pool): State<PgPool>,
    Path(session): Path<String>,
    Json(request): Json<ExchangeRequest>,
) -> Result<(StatusCode, Json<ExchangeResponse>), StatusCode> {
    let append = async {
        let mut transaction = pool.begin().await?;
        let last_seq: i64 = sqlx::query_scalar(ADVANCE).bind(&session).fetch_one(&mut *transaction).await?;
        let messages = [
            (last_seq - 1, "user", &request.user_message),
            (last_seq, "assistant", &request.assistant_reply),
        ];
        for (seq, role, content) in messages {
            let insert = sqlx::query(INSERT).bind(&session).bind(seq).bind(role).bind(content);
            insert.execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok::<_, sqlx::Error>(last_seq)
    };
    let last_seq = append.await.map_err(|_| FAILED)?;
    Ok((StatusCode::CREATED, Json(ExchangeResponse { last_seq })))
}

/// Returns system prompt, tail and new message.
async fn build_context(
    State(pool): State<PgPool>,
    Path(session): Path<String>,
    Json(request): Json<ContextRequest>,
) -> Result<Json<ContextResponse>, StatusCode> {
    let read_session = sqlx::query_as(READ_SESSION).bind(&session).fetch_one(&pool);
    let (last_seq, summary): (i64, String) = read_session.await.map_err(|_| FAILED)?;
    let read_tail = sqlx::query_as(READ_TAIL).bind(&session).bind(MAX_TAIL).fetch_all(&pool);
    let tail: Vec<(String, String)> = read_tail.await.map_err(|_| FAILED)?;
    let system = Message { role: "system".to_owned(), content: request.system_prompt + &summary };
    let tail = tail.into_iter().rev().map(|(role, content)| Message { role, content });
    let new = Message { role: "user".to_owned(), content: request.user_message };
    let messages = [system].into_iter().chain(tail).chain([new]).collect();
    Ok(Json(ContextResponse { last_seq, messages }))
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, url] = arguments.as_slice() else { panic!("usage: axum_sqlx ADDRESS DATABASE_URL") };
    let pool = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).connect(url).await.expect("a database");
    sqlx::raw_sql(TABLES).execute(&pool).await.expect("tables");
    let routes = axum::Router::new()
        .route("/sessions/{session}/exchanges", post(append_exchange))
        .route("/sessions/{session}/context", post(build_context))
        .with_state(pool);
    let listener = TcpListener::bind(address).await.expect("a free address");
    axum::serve(listener, routes).await.expect("axum serves until it is stopped");
}
