//! Faults of Postgres: restart, failover, outage, silence, delay, full disk, read-only mode, no free connection.

use super::{
    append_exchange, assert_history, assert_live, assert_store_unavailable, send_exchange, status,
    wait_for_readyz,
};
use crate::postgres_server::PostgresServer;
use crate::proxy::{LOST_BY_POOLER, Proxy, ProxyFault};
use crate::service::{Precis, Process, SOON};
use futures_util::future::{join, join_all};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::time::{Duration, Instant, sleep, timeout};

struct Fixture {
    server: PostgresServer,
    proxy: Proxy,
    service: Process,
}

/// The acquire timeout of tests in which the server recovers. It must exceed delays on a busy machine.
const LONG_TIMEOUT: &str = "20s";
/// The acquire timeout of tests in which requests must be rejected.
const SHORT_TIMEOUT: &str = "1s";

async fn precis(url: &str, acquire_timeout: &str) -> Process {
    Precis::new().env("DATABASE_URL", url).set("database.acquire_timeout", acquire_timeout).start().await
}

/// Starts a server, a proxy and a service, and appends exchange 0.
async fn start(acquire_timeout: &str) -> Fixture {
    let server = PostgresServer::start().await;
    let proxy = Proxy::start(server.socket()).await;
    let service = precis(&proxy.url(), acquire_timeout).await;
    append_exchange(&service, 0).await;
    Fixture { server, proxy, service }
}

impl Fixture {
    async fn sql(&self, sql: &str) {
        let mut connection = PgConnection::connect(self.server.url()).await.expect("connected");
        connection.execute(AssertSqlSafe(sql.to_owned())).await.expect(sql);
    }

    /// Makes the service use all connections of its pool.
    async fn use_all_connections(&self) {
        join_all((0..40).map(|_| async { self.service.context("s", &json!({})).await })).await;
    }
}

#[tokio::test]
async fn requests_after_restart_succeed() {
    let fixture = start(LONG_TIMEOUT).await;
    for (number, immediate) in (1..).zip([false, true]) {
        fixture.use_all_connections().await;
        if immediate {
            fixture.server.stop_immediately().await;
        } else {
            fixture.server.stop_gracefully().await;
        }
        fixture.server.restart().await;
        // Reads and writes meet all broken connections. The exchanges have no key, so a duplicate would show.
        for _ in 0..12 {
            let body = json!({"user_message": "Question?", "assistant_reply": "Answer."});
            let path = "/sessions/other/exchanges";
            fixture.service.post(path, body).await.ok(201);
            fixture.service.context("s", &json!({})).await;
        }
        append_exchange(&fixture.service, number).await;
        assert_eq!(status(&fixture.service, "/readyz").await, 200);
    }
    assert_history(&fixture.service, 0..3).await;
    assert_eq!(fixture.service.history("other").await.len(), 48);
}

/// A pooler or a load balancer switches without an outage, but cuts connections that are in use.
#[tokio::test]
async fn failover_fails_no_context_and_no_exchange_with_key() {
    let fixture = start(LONG_TIMEOUT).await;
    for number in 1..9 {
        fixture.use_all_connections().await;
        fixture.proxy.cut_connections();
        append_exchange(&fixture.service, number).await;
        fixture.use_all_connections().await;
        fixture.proxy.cut_connections();
        fixture.service.context("s", &json!({})).await;
    }
    assert_history(&fixture.service, 0..9).await;
    // After two seconds the service queries again if a key is required, on connections that were just in use.
    sleep(Duration::from_millis(2100)).await;
    join_all((0..40).map(|_| status(&fixture.service, "/readyz"))).await;
    fixture.proxy.cut_connections();
    fixture.service.context("s", &json!({})).await;
}

/// One connection was used just before the failure, and all others were idle for so long that they are pinged.
#[tokio::test]
async fn reads_after_a_failed_ping_use_no_broken_connection() {
    let fixture = start(LONG_TIMEOUT).await;
    for _ in 0..4 {
        join_all((0..40).map(|_| fixture.service.history("s"))).await;
        // Longer than the time after which an idle connection is pinged. On a machine on which the reads below take longer, too,
        // they ping each connection, and the test can't fail.
        sleep(Duration::from_millis(110)).await;
        fixture.service.history("s").await;
        fixture.proxy.cut_connections();
        for _ in 0..20 {
            assert_history(&fixture.service, 0..1).await;
        }
    }
}

#[tokio::test]
async fn stopped_server_is_reported_until_it_returns() {
    let fixture = start(SHORT_TIMEOUT).await;
    fixture.server.stop_immediately().await;
    wait_for_readyz(&fixture.service, 503).await;
    assert_store_unavailable(&send_exchange(&fixture.service, 1).await);
    assert_store_unavailable(&fixture.service.post("/sessions/s/context", json!({})).await);
    assert_live(&fixture.service).await;
    fixture.server.restart().await;
    append_exchange(&fixture.service, 1).await;
    wait_for_readyz(&fixture.service, 200).await;
    assert_history(&fixture.service, 0..2).await;
}

#[tokio::test]
async fn retried_exchange_with_lost_response_is_stored_once() {
    let fixture = start(SHORT_TIMEOUT).await;
    fixture.proxy.set_fault(ProxyFault::DropResponses);
    assert_store_unavailable(&send_exchange(&fixture.service, 1).await);
    fixture.proxy.set_fault(ProxyFault::None);
    // The exchange was committed, but the service did not receive the confirmation.
    let repeated = send_exchange(&fixture.service, 1).await.ok(201);
    let again = send_exchange(&fixture.service, 1).await;
    assert!(again.is_replay());
    assert_eq!(again.ok(201), repeated);
    assert_history(&fixture.service, 0..2).await;
}

/// A pooler reports a lost server as an error of the database, although the transaction may have committed.
#[tokio::test]
async fn exchange_without_key_is_stored_once_if_a_pooler_loses_the_server() {
    let fixture = start(LONG_TIMEOUT).await;
    fixture.proxy.set_fault(ProxyFault::PoolerError);
    let body = json!({"user_message": LOST_BY_POOLER, "assistant_reply": "Answer."});
    assert_store_unavailable(&fixture.service.post("/sessions/other/exchanges", body).await);
    assert_eq!(fixture.service.history("other").await.len(), 2);
    append_exchange(&fixture.service, 1).await;
    assert_history(&fixture.service, 0..2).await;
}

#[tokio::test]
async fn silent_server_is_reported_and_waiting_requests_complete() {
    let fixture = start(LONG_TIMEOUT).await;
    let impatient = precis(&fixture.proxy.url(), SHORT_TIMEOUT).await;
    fixture.proxy.set_fault(ProxyFault::Silence);
    let started_at = Instant::now();
    assert_eq!(status(&impatient, "/readyz").await, 503);
    assert!(started_at.elapsed() < Duration::from_secs(5), "{:?}", started_at.elapsed());
    assert_live(&impatient).await;
    fixture.proxy.set_fault(ProxyFault::None);
    append_exchange(&impatient, 1).await;

    fixture.use_all_connections().await;
    fixture.proxy.set_fault(ProxyFault::Silence);
    let end = async {
        assert_live(&fixture.service).await;
        fixture.proxy.set_fault(ProxyFault::None);
    };
    timeout(SOON, join(append_exchange(&fixture.service, 2), end))
        .await
        .expect("the waiting request completes");
    assert_history(&fixture.service, 0..3).await;
}

#[tokio::test]
async fn statement_timeout_rejects_write_and_closes_connection() {
    let fixture = start(LONG_TIMEOUT).await;
    let impatient =
        Precis::new().env("DATABASE_URL", &fixture.proxy.url()).set("database.statement_timeout", "500ms");
    let impatient = impatient.start().await;
    append_exchange(&impatient, 1).await;
    let mut other = PgConnection::connect(fixture.server.url()).await.expect("connected");
    other.execute("BEGIN; SELECT FROM sessions FOR UPDATE").await.expect("locked");
    assert_store_unavailable(&send_exchange(&impatient, 2).await);
    other.execute("ROLLBACK").await.expect("released");
    append_exchange(&impatient, 2).await;
    assert_history(&impatient, 0..3).await;
}

#[tokio::test]
async fn slow_server_fails_no_request() {
    let fixture = start(LONG_TIMEOUT).await;
    fixture.proxy.set_fault(ProxyFault::Delay(Duration::from_millis(30)));
    append_exchange(&fixture.service, 1).await;
    fixture.service.context("s", &json!({})).await;
    assert_eq!(status(&fixture.service, "/readyz").await, 200);
    assert_history(&fixture.service, 0..2).await;
}

#[tokio::test]
async fn full_disk_on_postgres_rejects_writes_without_partial_data() {
    const RAISE_DISK_FULL: &str = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full';
        END $$;
        CREATE TRIGGER full_disk AFTER INSERT ON messages FOR EACH STATEMENT EXECUTE FUNCTION full_disk()";
    let fixture = start(LONG_TIMEOUT).await;
    fixture.sql(RAISE_DISK_FULL).await;
    assert_store_unavailable(&send_exchange(&fixture.service, 1).await);
    assert_live(&fixture.service).await;
    fixture.service.context("s", &json!({})).await;
    assert_history(&fixture.service, 0..1).await;
    fixture.sql("DROP TRIGGER full_disk ON messages").await;
    append_exchange(&fixture.service, 1).await;
    assert_history(&fixture.service, 0..2).await;
}

#[tokio::test]
async fn read_only_server_serves_reads_and_rejects_writes() {
    let fixture = start(SHORT_TIMEOUT).await;
    fixture.use_all_connections().await;
    fixture.sql("ALTER SYSTEM SET default_transaction_read_only = on").await;
    fixture.sql("SELECT pg_reload_conf()").await;
    wait_for_readyz(&fixture.service, 503).await;
    assert_store_unavailable(&send_exchange(&fixture.service, 1).await);
    fixture.service.context("s", &json!({})).await;
    let writable =
        "SET default_transaction_read_only = off; ALTER SYSTEM RESET default_transaction_read_only";
    let mut connection = PgConnection::connect(fixture.server.url()).await.expect("connected");
    for sql in writable.split(';') {
        connection.execute(AssertSqlSafe(sql.to_owned())).await.expect("set");
    }
    fixture.sql("SELECT pg_reload_conf()").await;
    wait_for_readyz(&fixture.service, 200).await;
    append_exchange(&fixture.service, 1).await;
    assert_history(&fixture.service, 0..2).await;
}

#[tokio::test]
async fn exhausted_connections_reject_requests_until_one_is_free() {
    let fixture = start(LONG_TIMEOUT).await;
    fixture.sql("CREATE ROLE small LOGIN").await;
    fixture.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO small").await;
    let url = fixture.proxy.url_for_role("small");
    let small = Precis::new().env("DATABASE_URL", &url).set("database.acquire_timeout", "1s");
    let small = small.args(["--no-migrate"]).start().await;
    append_exchange(&small, 1).await;
    // This has the effect of other clients that use all connections.
    fixture.sql("ALTER ROLE small CONNECTION LIMIT 0").await;
    fixture.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'small'").await;
    assert_store_unavailable(&send_exchange(&small, 2).await);
    wait_for_readyz(&small, 503).await;
    fixture.sql("ALTER ROLE small CONNECTION LIMIT -1").await;
    wait_for_readyz(&small, 200).await;
    append_exchange(&small, 2).await;
    assert_history(&small, 0..3).await;
}
