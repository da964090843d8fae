//! Postgres: gone, restarted, failed over, silent, slow, full, read-only, without a connection to give.

use super::{exchange, history_is, lives, recorded, refused, status, until_ready_is};
use crate::cluster::Cluster;
use crate::proxy::{Proxy, Weather};
use crate::service::{Precis, Process, SOON};
use futures_util::future::{join, join_all};
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::time::{Duration, Instant, sleep, timeout};

struct Scene {
    cluster: Cluster,
    proxy: Proxy,
    service: Process,
}

/// How long a service waits for a connection whose server will give it one: a busy machine is no fault.
const PATIENT: &str = "20s";
/// And one whose server won't: what is refused is to be refused soon.
const HASTY: &str = "1s";

async fn precis(url: &str, patience: &str) -> Process {
    Precis::new().env("DATABASE_URL", url).set("database.acquire_timeout", patience).start().await
}

/// A service that has persisted exchange 0.
async fn scene(patience: &str) -> Scene {
    let cluster = Cluster::start().await;
    let proxy = Proxy::start(cluster.socket()).await;
    let service = precis(&proxy.url(), patience).await;
    recorded(&service, 0).await;
    Scene { cluster, proxy, service }
}

impl Scene {
    async fn sql(&self, sql: &str) {
        let mut connection = PgConnection::connect(self.cluster.url()).await.expect("connected");
        connection.execute(AssertSqlSafe(sql.to_owned())).await.expect(sql);
    }

    /// Has the service use all the connections that it may have.
    async fn use_all_connections(&self) {
        join_all((0..40).map(|_| async { self.service.context("s", &json!({})).await })).await;
    }
}

#[tokio::test]
async fn a_restart_that_is_over_fails_no_request() {
    let scene = scene(PATIENT).await;
    for (number, at_once) in (1..).zip([false, true]) {
        scene.use_all_connections().await;
        if at_once {
            scene.cluster.stop_at_once().await;
        } else {
            scene.cluster.stop().await;
        }
        scene.cluster.go_on().await;
        // Each of the dead connections is met, by reads and by writes; without a key, nothing is done twice.
        for _ in 0..12 {
            let body = json!({"user_message": "Question?", "assistant_reply": "Answer."});
            let path = "/sessions/other/exchanges";
            let sent = scene.service.request(Method::POST, path).json(&body).send().await.expect("an answer");
            assert_eq!(sent.status(), StatusCode::CREATED);
            scene.service.context("s", &json!({})).await;
        }
        recorded(&scene.service, number).await;
        assert_eq!(status(&scene.service, "/readyz").await, StatusCode::OK);
    }
    history_is(&scene.service, 0..3).await;
    assert_eq!(scene.service.history("other").await.len(), 48);
}

/// A pooler or a load balancer that switches takes no time at all: connections are cut that were in use just now.
#[tokio::test]
async fn a_failover_fails_no_context_and_no_exchange_with_a_key() {
    let scene = scene(PATIENT).await;
    for number in 1..9 {
        scene.use_all_connections().await;
        scene.proxy.cut();
        recorded(&scene.service, number).await;
        scene.use_all_connections().await;
        scene.proxy.cut();
        scene.service.context("s", &json!({})).await;
    }
    history_is(&scene.service, 0..9).await;
    // Whether a key is needed is asked anew after two seconds, and with connections that were in use just now.
    sleep(Duration::from_millis(2100)).await;
    join_all((0..40).map(|_| status(&scene.service, "/readyz"))).await;
    scene.proxy.cut();
    scene.service.context("s", &json!({})).await;
}

#[tokio::test]
async fn a_database_that_is_gone_is_said_and_comes_back() {
    let scene = scene(HASTY).await;
    scene.cluster.stop_at_once().await;
    until_ready_is(&scene.service, StatusCode::SERVICE_UNAVAILABLE).await;
    refused(exchange(&scene.service, 1).await).await;
    refused(scene.service.context_request("s", &json!({})).send().await.expect("an answer")).await;
    lives(&scene.service).await;
    scene.cluster.go_on().await;
    recorded(&scene.service, 1).await;
    until_ready_is(&scene.service, StatusCode::OK).await;
    history_is(&scene.service, 0..2).await;
}

#[tokio::test]
async fn an_exchange_whose_outcome_is_unknown_is_there_once_when_repeated() {
    let scene = scene(HASTY).await;
    scene.proxy.set(Weather::LoseAnswers);
    refused(exchange(&scene.service, 1).await).await;
    scene.proxy.set(Weather::Fair);
    // It was written, and the one who wrote it could not know.
    let repeated = exchange(&scene.service, 1).await;
    assert_eq!(repeated.status(), StatusCode::CREATED);
    let again = exchange(&scene.service, 1).await;
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    assert_eq!(
        repeated.text().await.expect("a body"),
        again.text().await.expect("a body"),
        "one exchange, one answer"
    );
    history_is(&scene.service, 0..2).await;
}

#[tokio::test]
async fn silence_is_told_and_what_waits_is_done_when_it_ends() {
    let scene = scene(PATIENT).await;
    let hasty = precis(&scene.proxy.url(), HASTY).await;
    scene.proxy.set(Weather::Still);
    let began = Instant::now();
    assert_eq!(status(&hasty, "/readyz").await, StatusCode::SERVICE_UNAVAILABLE);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    lives(&hasty).await;
    scene.proxy.set(Weather::Fair);
    recorded(&hasty, 1).await;

    scene.use_all_connections().await;
    scene.proxy.set(Weather::Still);
    let end = async {
        lives(&scene.service).await;
        scene.proxy.set(Weather::Fair);
    };
    timeout(SOON, join(recorded(&scene.service, 2), end)).await.expect("nothing is stuck");
    history_is(&scene.service, 0..3).await;
}

/// A host that is gone without a word, or a lock that is never let go.
#[tokio::test]
async fn a_statement_without_an_answer_is_given_up_and_so_is_its_connection() {
    let scene = scene(PATIENT).await;
    let hasty =
        Precis::new().env("DATABASE_URL", &scene.proxy.url()).set("database.statement_timeout", "500ms");
    let hasty = hasty.start().await;
    recorded(&hasty, 1).await;
    let mut other = PgConnection::connect(scene.cluster.url()).await.expect("connected");
    other.execute("BEGIN; SELECT FROM sessions FOR UPDATE").await.expect("held");
    refused(exchange(&hasty, 2).await).await;
    other.execute("ROLLBACK").await.expect("let go");
    recorded(&hasty, 2).await;
    history_is(&hasty, 0..3).await;
}

#[tokio::test]
async fn a_slow_database_is_waited_for() {
    let scene = scene(PATIENT).await;
    scene.proxy.set(Weather::Slow(Duration::from_millis(30)));
    recorded(&scene.service, 1).await;
    scene.service.context("s", &json!({})).await;
    assert_eq!(status(&scene.service, "/readyz").await, StatusCode::OK);
    history_is(&scene.service, 0..2).await;
}

#[tokio::test]
async fn a_full_disk_refuses_writes_and_leaves_nothing_of_them() {
    const FULL: &str = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full';
        END $$;
        CREATE TRIGGER full_disk AFTER INSERT ON messages FOR EACH STATEMENT EXECUTE FUNCTION full_disk()";
    let scene = scene(PATIENT).await;
    scene.sql(FULL).await;
    refused(exchange(&scene.service, 1).await).await;
    lives(&scene.service).await;
    scene.service.context("s", &json!({})).await;
    history_is(&scene.service, 0..1).await;
    scene.sql("DROP TRIGGER full_disk ON messages").await;
    recorded(&scene.service, 1).await;
    history_is(&scene.service, 0..2).await;
}

#[tokio::test]
async fn a_server_that_only_reads_is_read_and_told() {
    let scene = scene(HASTY).await;
    scene.use_all_connections().await;
    scene.sql("ALTER SYSTEM SET default_transaction_read_only = on").await;
    scene.sql("SELECT pg_reload_conf()").await;
    until_ready_is(&scene.service, StatusCode::SERVICE_UNAVAILABLE).await;
    refused(exchange(&scene.service, 1).await).await;
    scene.service.context("s", &json!({})).await;
    let writable =
        "SET default_transaction_read_only = off; ALTER SYSTEM RESET default_transaction_read_only";
    let mut connection = PgConnection::connect(scene.cluster.url()).await.expect("connected");
    for sql in writable.split(';') {
        connection.execute(AssertSqlSafe(sql.to_owned())).await.expect("set");
    }
    scene.sql("SELECT pg_reload_conf()").await;
    until_ready_is(&scene.service, StatusCode::OK).await;
    recorded(&scene.service, 1).await;
    history_is(&scene.service, 0..2).await;
}

#[tokio::test]
async fn a_server_without_a_connection_to_give_refuses_until_it_has_one() {
    let scene = scene(PATIENT).await;
    scene.sql("CREATE ROLE small LOGIN CONNECTION LIMIT 3").await;
    scene.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO small").await;
    let url = scene.proxy.url_of("small");
    let small = Precis::new().env("DATABASE_URL", &url).set("database.acquire_timeout", "1s");
    let small = small.args(["--no-migrate"]).start().await;
    recorded(&small, 1).await;
    // As if others had taken all of them.
    scene.sql("ALTER ROLE small CONNECTION LIMIT 0").await;
    scene.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'small'").await;
    refused(exchange(&small, 2).await).await;
    until_ready_is(&small, StatusCode::SERVICE_UNAVAILABLE).await;
    scene.sql("ALTER ROLE small CONNECTION LIMIT 3").await;
    until_ready_is(&small, StatusCode::OK).await;
    recorded(&small, 2).await;
    history_is(&small, 0..3).await;
}
