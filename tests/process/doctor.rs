//! `precis doctor`: what it says about broken setups.

use crate::service::Precis;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer, refused_base_url};
use crate::support::postgres::TestDatabase;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, PgConnection};
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{PermissionsExt as _, symlink};

/// Runs the examination. Asserts that its exit status fits, and returns the lines that are not `ok`.
async fn found(precis: Precis) -> Vec<String> {
    let examined = precis.args(["doctor"]).run().await;
    let lines: Vec<String> = examined.stdout.lines().map(str::to_owned).collect();
    let has_problem = lines.iter().any(|line| line.starts_with("PROBLEM "));
    assert_eq!(examined.code, Some(i32::from(has_problem)), "{examined:?}");
    assert!(!examined.stderr.contains("panicked"), "{examined:?}");
    lines.into_iter().filter(|line| !line.starts_with("ok ")).collect()
}

/// Asserts that the examination finds this alone: severity and part, and a piece of the text.
async fn assert_finds(precis: Precis, kind: [&str; 2], text: &str) {
    let lines = found(precis).await;
    let [line] = lines.as_slice() else { panic!("one finding with {text:?} is expected: {lines:?}") };
    assert_eq!(line.split_whitespace().take(2).collect::<Vec<_>>(), kind, "{line}");
    assert!(line.contains(text), "{line}");
}

/// Returns a command whose setup is whole: a free port and a migrated database.
fn healthy(backend: &Backend) -> Precis {
    Precis::on(backend).set("server.bind", "127.0.0.1:0")
}

#[tokio::test]
async fn whole_setups_have_no_problem() {
    for backend in [Backend::sqlite().await, Backend::postgres().await] {
        assert_eq!(found(healthy(&backend)).await, [""; 0]);
    }
    // Before the first start.
    let precis = Precis::new().set("server.bind", "127.0.0.1:0");
    let file = precis.folder().join("precis.db");
    assert_finds(precis, ["warning", "database"], "precis.db does not exist; the service creates it").await;
    assert!(!file.exists());
}

#[tokio::test]
async fn broken_settings_and_machines_are_found() {
    let backend = Backend::sqlite().await;
    let precis = || healthy(&backend);
    assert_finds(
        precis().set("consolidation.threshold", "many"),
        ["PROBLEM", "settings"],
        "consolidation.threshold",
    )
    .await;
    let unknown = precis().file("precis.toml", "[consolidation]\ntreshold = 1\n");
    assert_finds(unknown, ["PROBLEM", "settings"], "threshold").await;
    let mistyped = precis().env("PRECIS_CONSOLIDATION_THRESHOLD", "5");
    assert_finds(mistyped, ["warning", "settings"], "did you mean PRECIS__CONSOLIDATION__THRESHOLD?").await;
    assert_finds(precis().env("TMPDIR", "/absent"), ["PROBLEM", "disk"], "/absent").await;

    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let bind = other.local_addr().expect("an address").to_string();
    drop(std::thread::spawn(move || other.incoming().for_each(drop)));
    assert_finds(precis().set("server.bind", &bind), ["PROBLEM", "address"], "another program uses").await;
    let foreign = precis().set("server.bind", "192.0.2.1:8080").set("server.allow_unauthenticated", "true");
    assert_finds(foreign, ["PROBLEM", "address"], "can't listen on 192.0.2.1:8080").await;
    assert_finds(precis().set("server.bind", "0.0.0.0:0"), ["PROBLEM", "keys"], "precis keys create").await;
    // A running service occupies its address, which is right.
    let service = Precis::on(&backend).start().await;
    let address = service.url.trim_start_matches("http://").to_owned();
    assert_eq!(found(precis().set("server.bind", &address)).await, [""; 0]);
}

#[tokio::test]
async fn incomplete_index_is_found() {
    for backend in [Backend::sqlite().await, Backend::postgres().await] {
        let service = Precis::on(&backend).start().await;
        service.record("s", &[serde_json::json!({"role": "user", "content": "a ferry"})]).await;
        drop(service);
        let reindexed = Precis::on(&backend).args(["reindex"]).run().await;
        assert_eq!(reindexed.code, Some(0), "{reindexed:?}");
        assert_eq!(found(healthy(&backend)).await, [""; 0]);
        let german = healthy(&backend).set("search.language", "german");
        assert_finds(german, ["warning", "search"], "the analyzer auto-3, and the settings say german-3")
            .await;
        let forgotten = "DELETE FROM search_analyzer";
        backend.execute(forgotten, forgotten).await;
        assert_finds(healthy(&backend), ["warning", "search"], "the index may lack messages").await;
    }
}

#[tokio::test]
async fn broken_models_are_found() {
    let backend = Backend::sqlite().await;
    let model = ModelServer::start().await;
    model.default(Behaviour::fail(401, "no"));
    assert_finds(healthy(&backend).model(&model.base_url()), ["PROBLEM", "models"], "small: status 401")
        .await;
    let unreachable = refused_base_url();
    assert_finds(healthy(&backend).model(&unreachable), ["PROBLEM", "models"], &unreachable).await;
}

#[tokio::test]
async fn unreachable_upstreams_are_found() {
    let backend = Backend::sqlite().await;
    let upstream = ModelServer::start().await;
    let whole = healthy(&backend).set("proxy.openai.base_url", &upstream.base_url());
    assert_eq!(found(whole).await, [""; 0]);
    let unreachable = healthy(&backend).set("proxy.anthropic.base_url", &refused_base_url());
    assert_finds(
        unreachable,
        ["PROBLEM", "proxy"],
        "anthropic: it is unreachable: check proxy.anthropic.base_url",
    )
    .await;
}

#[tokio::test]
async fn broken_sqlite_files_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let on = |name: &str| {
        let url = format!("sqlite://{}", path(name).display());
        Precis::new().env("DATABASE_URL", &url).set("server.bind", "127.0.0.1:0")
    };
    let problem = ["PROBLEM", "database"];
    assert_finds(on("absent/precis.db"), problem, "absent does not exist: create it").await;
    assert_finds(on(""), problem, "is a folder: name a file in it").await;
    symlink(path("absent/precis.db"), path("link.db")).expect("linked");
    assert_finds(on("link.db"), problem, "absent does not exist: create it").await;
    fs::write(path("text.db"), "a text of more than a hundred bytes".repeat(9)).expect("written");
    assert_finds(on("text.db"), problem, "is no SQLite database").await;

    let other = SqliteConnectOptions::new().filename(path("other.db")).create_if_missing(true);
    let mut connection = other.connect().await.expect("created");
    connection.execute("CREATE TABLE sessions (id)").await.expect("a table");
    connection.close().await.expect("closed");
    assert_finds(on("other.db"), problem, "other.db has tables of another program, such as sessions").await;
    for (url, text) in [
        ("sqlite://", "\"sqlite://\" names no file"),
        ("sqlite:?cache=private", "names no file"),
        ("sqlite::memory:", "in-memory"),
        ("sqlite://precis.db?mode=rwc&vfs=unix-none", "the parameter \"vfs\" is not supported"),
    ] {
        let precis = Precis::new().env("DATABASE_URL", url).set("server.bind", "127.0.0.1:0");
        assert_finds(precis, problem, text).await;
    }

    on("precis.db").args(["migrate"]).run().await.stdout_of_success();
    fs::set_permissions(path("precis.db"), Permissions::from_mode(0o644)).expect("set");
    assert_finds(on("precis.db"), ["warning", "database"], "chmod 600").await;
    fs::set_permissions(path("precis.db"), Permissions::from_mode(0o600)).expect("set");
    let file = SqliteConnectOptions::new().filename(path("precis.db"));
    let mut connection = file.connect().await.expect("opened");
    let newest = "(SELECT max(version) FROM _sqlx_migrations)";
    let update = |version: &str| {
        sqlx::AssertSqlSafe(format!(
            "UPDATE _sqlx_migrations SET version = {version} WHERE version = {newest}"
        ))
    };
    connection.execute(update("9999")).await.expect("changed");
    assert_finds(on("precis.db"), ["PROBLEM", "schema"], "a newer release of precis").await;
    connection.execute("DELETE FROM _sqlx_migrations WHERE version = 9999").await.expect("changed");
    assert_finds(on("precis.db"), ["warning", "schema"], "`precis migrate`").await;

    on("damaged.db").args(["migrate"]).run().await.stdout_of_success();
    let mut connection = file.filename(path("damaged.db")).connect().await.expect("opened");
    connection.execute("DROP INDEX sessions_by_activity").await.expect("dropped");
    assert_finds(on("damaged.db"), ["warning", "schema"], "index sessions_by_activity is missing").await;
    connection.execute("DROP TABLE consolidation_records").await.expect("dropped");
    assert_finds(on("damaged.db"), ["PROBLEM", "schema"], "table consolidation_records is missing").await;
}

#[tokio::test]
async fn broken_postgres_setups_are_found() {
    let on = |url: &str| Precis::new().env("DATABASE_URL", url).set("server.bind", "127.0.0.1:0");
    let problem = ["PROBLEM", "database"];
    let refused = on("postgres://precis:hunter2@127.0.0.1:1/precis");
    assert_finds(refused, problem, "no server listens on 127.0.0.1:1").await;

    let backend = Backend::postgres().await;
    let Backend::Postgres(database) = &backend else { unreachable!("it is on Postgres") };
    assert_finds(on(&database.admin_url()), ["PROBLEM", "role"], "create a role for precis").await;
    let mut admin = PgConnection::connect(&database.admin_url()).await.expect("connected");
    admin.execute("ALTER TABLE api_keys OWNER TO CURRENT_USER").await.expect("changed");
    assert_finds(on(&database.url()), problem, "can't read or write the table api_keys").await;
    // As after a migration by another role, whose new table was not granted.
    admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON api_keys TO PUBLIC").await.expect("granted");
    admin.execute("ALTER TABLE consolidation_records OWNER TO CURRENT_USER").await.expect("changed");
    admin.execute("GRANT SELECT ON consolidation_records TO PUBLIC").await.expect("granted");
    let not_granted = "can't read or write the table consolidation_records";
    assert_finds(on(&database.url()), problem, not_granted).await;
    admin.execute("GRANT INSERT, UPDATE, DELETE ON consolidation_records TO PUBLIC").await.expect("granted");
    assert_eq!(found(on(&database.url())).await, [""; 0]);
    for change in ["DISABLE", "NO FORCE"] {
        let change = format!("ALTER TABLE messages {change} ROW LEVEL SECURITY");
        admin.execute(sqlx::AssertSqlSafe(change)).await.expect("changed");
        assert_finds(on(&database.url()), problem, "row-level security of the table messages").await;
        let restore = "ALTER TABLE messages ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY";
        admin.execute(restore).await.expect("changed");
    }
    assert_eq!(found(on(&database.url())).await, [""; 0]);

    for (change, kind, text, restore) in [
        (
            "DROP TRIGGER append_only_truncate ON messages",
            "PROBLEM",
            "trigger append_only_truncate of messages is missing",
            "CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON messages
             FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change()",
        ),
        (
            "ALTER TABLE memories RENAME CONSTRAINT memories_pkey TO other",
            "PROBLEM",
            "key memories_pkey of memories is missing",
            "ALTER TABLE memories RENAME CONSTRAINT other TO memories_pkey",
        ),
        (
            "ALTER POLICY tenant_isolation ON messages RENAME TO other",
            "PROBLEM",
            "policy tenant_isolation of messages is missing",
            "ALTER POLICY other ON messages RENAME TO tenant_isolation",
        ),
        (
            "ALTER FUNCTION precis_tenant() RENAME TO other",
            "PROBLEM",
            "function precis_tenant with 0 arguments is missing",
            "ALTER FUNCTION other() RENAME TO precis_tenant",
        ),
        (
            "ALTER INDEX sessions_by_activity RENAME TO other",
            "warning",
            "index sessions_by_activity is missing",
            "ALTER INDEX other RENAME TO sessions_by_activity",
        ),
    ] {
        admin.execute(change).await.expect("changed");
        assert_finds(on(&database.url()), [kind, "schema"], text).await;
        admin.execute(restore).await.expect("changed");
    }
    assert_eq!(found(on(&database.url())).await, [""; 0]);

    let name: String =
        sqlx::query_scalar("SELECT current_database()").fetch_one(&mut admin).await.expect("a name");
    for statement in [
        "ALTER SCHEMA public RENAME TO \"Own Schema\"".to_owned(),
        format!("ALTER DATABASE {name} SET search_path = \"Own Schema\""),
    ] {
        admin.execute(sqlx::AssertSqlSafe(statement)).await.expect("changed");
    }
    assert_eq!(found(on(&database.url())).await, [""; 0]);
    let read_only = format!("ALTER DATABASE {name} SET default_transaction_read_only = on");
    admin.execute(sqlx::AssertSqlSafe(read_only)).await.expect("set");
    assert_finds(on(&database.url()), problem, "is read-only: connect to the primary server").await;

    let empty = TestDatabase::create("empty", async |_| {}).await;
    assert_finds(on(&empty.url()), ["warning", "schema"], "at migration 0 of").await;
    let mut admin = PgConnection::connect(&empty.admin_url()).await.expect("connected");
    admin.execute("CREATE TABLE messages (id integer)").await.expect("a table");
    assert_finds(on(&empty.url()), problem, "has tables of another program, such as messages").await;
    admin.execute("DROP TABLE messages").await.expect("dropped");
    admin.execute("REVOKE ALL ON SCHEMA public FROM public").await.expect("revoked");
    admin.execute("ALTER SCHEMA public OWNER TO CURRENT_USER").await.expect("owned");
    assert_finds(on(&empty.url()), ["PROBLEM", "schema"], "the role can't migrate it").await;
    let url = empty.url();
    let (server, name) = url.split_once("precis_test_").expect("a test's database");
    let rest = name.split_once('?').map(|(_, query)| format!("?{query}")).unwrap_or_default();
    let absent = format!("{server}precis_absent{rest}");
    assert_finds(on(&absent), problem, "has no database \"precis_absent\": create it with createdb").await;
}
