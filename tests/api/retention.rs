//! `/retention`, `/users/{user_id}/retention`, `/sessions/{session_id}/retention`, and the worker that erases sessions

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{TestClient, assert_includes};
use precis::domain::api_key::Scope;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use test_case::test_case;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

fn after(period: impl Into<Value>) -> Value {
    json!({"after_last_exchange": period.into()})
}

/// Returns the end of the retention of a session, or `None` if it is kept.
async fn expires_at(app: &TestClient, session: &str) -> Option<OffsetDateTime> {
    let retention = app.get(&format!("/sessions/{session}/retention")).await;
    retention["expires_at"].as_str().map(|time| OffsetDateTime::parse(time, &Rfc3339).expect("a time"))
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_is_set_and_read_at_each_level(backend: Backend) {
    let app = TestApp::start(&backend, &[("retention.after_last_exchange", "90d")]).await;
    app.record_for("s", "ada").await;
    let updated_at = app.get("/sessions/s").await["updated_at"].as_str().map(str::to_owned).expect("a time");
    let updated_at = OffsetDateTime::parse(&updated_at, &Rfc3339).expect("a time");
    let paths = ["/retention", "/users/ada/retention", "/sessions/s/retention"];
    let effective = |period: &str, source: &str| json!({"after_last_exchange": period, "source": source});
    for path in paths {
        let retention = app.get(path).await.ok(200);
        assert_includes(
            &retention,
            &json!({"after_last_exchange": null, "effective": effective("90d", "setting")}),
        );
    }
    assert_eq!(expires_at(&app, "s").await, Some(updated_at + time::Duration::days(90)));
    for (path, period, written, source) in [
        (paths[0], "48h", "2d", "tenant"),
        (paths[1], "36 hours", "36h", "user"),
        (paths[2], "never", "never", "session"),
    ] {
        let set = app.put(path, after(period)).await.ok(200);
        assert_includes(
            &set,
            &json!({"after_last_exchange": written, "effective": effective(written, source)}),
        );
        assert_eq!(set, app.get(path).await.ok(200));
        assert_includes(&app.get(paths[2]).await.ok(200), &json!({"effective": effective(written, source)}));
    }
    assert_eq!(expires_at(&app, "s").await, None);
    // Null removes a value, so that the next one applies.
    for (path, period, source) in
        [(paths[2], "36h", "user"), (paths[1], "2d", "tenant"), (paths[0], "90d", "setting")]
    {
        let removed = app.put(path, after(Value::Null)).await.ok(200);
        assert_includes(
            &removed,
            &json!({"after_last_exchange": null, "effective": effective(period, source)}),
        );
    }
    app.get("/sessions/unknown/retention").await.problem(404, "session-not-found");
    app.put("/sessions/unknown/retention", after("1d")).await.problem(404, "session-not-found");
    app.put("/users/ada/retention", after("1d")).await.ok(200);
    app.delete("/users/ada").await.ok(204);
    assert_includes(&app.get("/users/ada/retention").await.ok(200), &after(Value::Null));
}

#[tokio::test]
async fn invalid_periods_are_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for body in [json!({}), after(90), after("90"), after("0s"), after("1ms"), after("40000d"), after("")] {
        assert_eq!(app.put("/retention", &body).await.fields(), ["after_last_exchange"], "{body}");
    }
    let unknown = json!({"after_last_exchange": "1d", "after": "1d"});
    assert_eq!(app.put("/retention", unknown).await.fields(), ["after"]);
    assert_includes(&app.get("/retention").await.ok(200), &after(Value::Null));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_an_administrator_changes_retention(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let client = async |scope| app.with_key(backend.key("acme", scope).await.expose());
    let read = client(Scope::Read).await;
    let (write, admin) = (client(Scope::Write).await, client(Scope::Admin).await);
    write.record_for("s", "ada").await;
    for path in ["/retention", "/users/ada/retention", "/sessions/s/retention"] {
        for client in [&read, &write] {
            client.get(path).await.ok(200);
            client.put(path, after("1s")).await.problem(403, "forbidden");
        }
        admin.put(path, after("1d")).await.ok(200);
    }
}

const PATIENCE: Duration = Duration::from_secs(30);

async fn metric(app: &TestClient, name: &str) -> f64 {
    let metrics = app.get("/metrics").await;
    let prefix = format!("precis_{name} ");
    let value = metrics.text.lines().find_map(|line| line.strip_prefix(&prefix)?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {}", metrics.text))
}

async fn until_gone(app: &TestClient, session: &str) {
    let begun = Instant::now();
    while app.get(&format!("/sessions/{session}")).await.status != 404 {
        assert!(begun.elapsed() < PATIENCE, "{session} is not erased");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_erases_expired_sessions_only(backend: Backend) {
    let app = TestApp::start(&backend, &[("retention.interval", "100ms")]).await;
    for session in ["idle", "kept", "later"] {
        app.record_for(session, "ada").await;
    }
    app.record_for("of-bo", "bo").await;
    app.record_for("own", "bo").await;
    app.put("/sessions/kept/retention", after("never")).await.ok(200);
    app.put("/sessions/later/retention", after("1h")).await.ok(200);
    app.put("/users/bo/retention", after("never")).await.ok(200);
    app.put("/sessions/own/retention", after("1s")).await.ok(200);
    app.put("/retention", after("1s")).await.ok(200);
    until_gone(&app, "idle").await;
    until_gone(&app, "own").await;
    app.get("/sessions/idle/messages").await.problem(404, "session-not-found");
    for session in ["kept", "later", "of-bo"] {
        assert_eq!(app.get(&format!("/sessions/{session}")).await["last_seq"], 2);
    }
    // A context of an erased session is that of a new one.
    let context = app.post("/sessions/idle/context", json!({})).await.ok(200);
    assert_includes(&context, &json!({"exists": false, "coverage": {"last_seq": 0}}));
    app.put("/users/bo/retention", after("1s")).await.ok(200);
    until_gone(&app, "of-bo").await;
    // The counter follows the erasure.
    let begun = Instant::now();
    while metric(&app, "retention_sessions_erased_total").await < 3.0 {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(metric(&app, "retention_sessions_erased_total").await.to_string(), "3");
    assert_eq!(metric(&app, "retention_errors_total").await.to_string(), "0");
    assert!(metric(&app, "retention_last_run_timestamp_seconds").await > 1e9);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn branches_are_erased_by_the_setting(backend: Backend) {
    let set = [("retention.branches_after", "1s"), ("retention.interval", "100ms")];
    let app = TestApp::start(&backend, &set).await;
    app.record_turns("s", 0..3).await;
    let branch = app.delete("/sessions/s/messages?after=2").await.ok(200)["branch"].clone();
    let branch = branch.as_str().expect("an id");
    assert!(expires_at(&app, branch).await.is_some());
    assert_eq!(expires_at(&app, "s").await, None);
    until_gone(&app, branch).await;
    assert_eq!(app.get("/sessions/s").await["last_seq"], 2);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn due_sessions_are_a_metric(backend: Backend) {
    let set = [
        ("retention.interval", "100ms"),
        ("consolidation.threshold", "4"),
        ("consolidation.keep_recent", "2"),
    ];
    let app = TestApp::start(&backend, &set).await;
    let until = async |due: &str| {
        let begun = Instant::now();
        while metric(&app, "due_sessions").await.to_string() != due {
            assert!(begun.elapsed() < PATIENCE, "the metric is not {due}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    for (session, turns) in [("short", 2), ("long", 3), ("longer", 4)] {
        app.record_turns(session, 0..turns).await;
    }
    until("2").await;
    app.post("/sessions/long/consolidations", "").await.ok(201);
    until("1").await;
}
