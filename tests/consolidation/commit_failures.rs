//! Failed commits are handled like failed models: the next success summarises each message once.

use crate::harness::{
    consolidate, covering, named, plain, record, revisions, seen, start, state, turns, until,
};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::StatusCode;
use sqlx::{Connection as _, Executor as _, PgConnection, SqliteConnection};
use test_case::test_case;

/// The statement of the commit that fails: the first one, or one after the first write.
const PLACES: [(&str, &str); 2] = [("INSERT", "revisions"), ("UPDATE OF cursor_seq", "sessions")];

/// Makes one kind of write fail, as a full disk would.
async fn break_writes(backend: &Backend, event: &str, table: &str) {
    run(
        backend,
        &format!(
            "CREATE TRIGGER broken BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        ),
        &[
            "CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'disk full'; END $$",
            &format!("CREATE TRIGGER broken BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION fail()"),
        ],
    )
    .await;
}

async fn mend(backend: &Backend, table: &str) {
    run(backend, "DROP TRIGGER broken", &[&format!("DROP TRIGGER broken ON {table}")]).await;
}

/// Executes statements directly in the database, one for SQLite or several for Postgres.
pub(crate) async fn run(backend: &Backend, sqlite: &str, postgres: &[&str]) {
    match backend {
        Backend::Sqlite(_) => {
            let mut connection = SqliteConnection::connect(&backend.url()).await.unwrap();
            connection.execute(sqlx::AssertSqlSafe(sqlite.to_owned())).await.unwrap();
        }
        Backend::Postgres(database) => {
            let mut connection = PgConnection::connect(&database.admin_url()).await.unwrap();
            for &statement in postgres {
                connection.execute(sqlx::AssertSqlSafe(statement.to_owned())).await.unwrap();
            }
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_commit_is_reported_and_loses_nothing(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[("consolidation.retry_initial", "1m")]).await;
    for (event, table) in PLACES {
        let session = format!("on-{table}");
        let mut given = turns(1..=102);
        record(&app, &session, &given).await;
        plain(&app, &session, &given).await;
        given.extend(turns(103..=184));
        record(&app, &session, &given[102..]).await;
        let (old, before) = (state(&app, &session).await, model.calls().len());

        break_writes(&backend, event, table).await;
        let answer = plain(&app, &session, &given).await;
        assert_eq!(
            (answer.outcome(), answer.verbatim().len(), answer.coverage.summary_through),
            ("failed", 102, 82)
        );
        assert!(answer.consolidation.retry_at.is_some(), "{table}");
        let now = state(&app, &session).await;
        let why = answer.consolidation.reason.unwrap();
        assert_eq!(now["consolidation"]["last_failure"], why, "{table}");
        assert!(why.contains("database") && !why.contains("disk full"), "not the database's words: {why}");
        for unchanged in ["cursor", "last_seq", "summary", "tokens"] {
            assert_eq!(now[unchanged], old[unchanged], "{table}");
        }
        assert_eq!(now["consolidation"]["failures"], 1, "{table}");
        assert_eq!(plain(&app, &session, &given).await.outcome(), "failed");
        assert_eq!(model.calls().len(), before + 1, "{table}: no second call before its time");
        let (status, problem) = consolidate(&app, &session).await;
        assert_eq!(status, StatusCode::BAD_GATEWAY, "{table}");
        assert!(problem["detail"].as_str().unwrap().contains(&why), "{problem}");

        mend(&backend, table).await;
        let (status, revision) = consolidate(&app, &session).await;
        assert_eq!((status, revision["revision"].as_u64()), (StatusCode::CREATED, Some(2)), "{table}");
        let calls = model.calls().split_off(before);
        assert!(calls.len() == 3 && calls.iter().all(|call| seen(call) == (83..=164).collect::<Vec<_>>()));
        let answer = plain(&app, &session, &given).await;
        assert_eq!(named(&answer.system()), (1..=164).collect::<Vec<_>>(), "{table}");
        assert_eq!(revisions(&app, &session).await.len(), 2, "{table}");
        assert_eq!(state(&app, &session).await["consolidation"]["failures"], 0, "{table}");
    }
}

/// The failure itself cannot be recorded: until it expires, the lease prevents immediate retries.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unrecorded_failure_loses_nothing(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    break_writes(&backend, "UPDATE OF failures", "sessions").await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("failed", 102));
    assert_eq!(plain(&app, "s", &given).await.outcome(), "in_progress");
    assert_eq!(model.calls().len(), 1);
    mend(&backend, "sessions").await;
    // A restore is possible during the lease; consolidations wait until the lease expires.
    app.post("/sessions/s/revisions/0/restore", "{}").await.ok(201);
    assert_eq!(state(&app, "s").await["cursor"], 0);
    let free = "UPDATE sessions SET lease_token = NULL, lease_until = NULL";
    run(&backend, free, &[free]).await;
    until(&app, "s", |state| state["consolidation"]["state"] == "idle").await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!(named(&answer.system()), (1..=82).collect::<Vec<_>>());
}
