//! `precis keys`, the rule that a reachable address needs a key, and the redaction of keys in output and logs.

use crate::service::{CommandResult, Precis};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::postgres::TestDatabase;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

async fn precis(backend: &Backend, args: &[&str]) -> CommandResult {
    Precis::on(backend).args(args.iter().copied()).run().await
}

/// Creates a key. Returns its ID and the key.
async fn create(backend: &Backend, args: &[&str]) -> (String, String) {
    let ended = precis(backend, &[&["keys", "create"], args].concat()).await;
    let output = ended.stderr.clone();
    let key = ended.stdout_of_success();
    assert!(key.starts_with("precis_") && key.len() == 62 && !key.contains(char::is_whitespace), "{key}");
    let id = key[7..15].to_owned();
    assert!(output.contains(&id) && output.contains("shown this once") && !output.contains(&key), "{output}");
    (id, key)
}

async fn status(service: &TestClient, key: Option<&str>, method: Method, path: &str) -> u16 {
    let client = key.map_or_else(|| service.clone(), |key| service.with_key(key));
    client.request(method, path).await.status
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_created_listed_and_revoked(backend: Backend) {
    let empty = precis(&backend, &["keys", "list"]).await.stdout_of_success();
    assert_eq!(empty, "ID  TENANT  NAME  SCOPE  CREATED  REVOKED");
    let service = Precis::on(&backend).start().await;
    assert_eq!(status(&service, None, Method::GET, "/sessions").await, 200);

    let (acme, acme_key) = create(&backend, &["--tenant", "acme", "--name", "the ärchive"]).await;
    let (other, other_key) = create(&backend, &["--tenant", "other", "--scope", "admin"]).await;
    let listed = precis(&backend, &["keys", "list"]).await.stdout_of_success();
    let rows: Vec<Vec<&str>> = listed
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    assert_eq!(rows.len(), 3, "{listed}");
    assert_eq!(rows[1][..4], [acme.as_str(), "acme", "the ärchive", "write"]);
    assert_eq!(rows[2][..4], [other.as_str(), "other", "-", "admin"]);
    for row in &rows[1..] {
        assert!(row[4].ends_with('Z') && row[4].len() == 20 && row[5] == "-", "{listed}");
    }
    let of_acme = precis(&backend, &["keys", "list", "--tenant", "acme"]).await.stdout_of_success();
    assert!(of_acme.contains(&acme) && !of_acme.contains(&other), "{of_acme}");
    for key in [&acme_key, &other_key] {
        assert!(!listed.contains(&key[15..]), "{listed}");
    }

    assert_eq!(status(&service, Some(&acme_key), Method::GET, "/sessions").await, 200);
    assert_eq!(status(&service, Some(&acme_key), Method::DELETE, "/sessions/s").await, 403);
    assert_eq!(status(&service, Some(&other_key), Method::DELETE, "/sessions/s").await, 404);

    // Revokes one key by its ID, and the other by the key itself, as found in a leak.
    for (id, given) in [(&acme, &acme), (&other, &other_key), (&acme, &acme)] {
        let ended = precis(&backend, &["keys", "revoke", given]).await;
        assert!(ended.stderr.contains(&format!("Key {id} is revoked")), "{ended:?}");
        assert!(!format!("{ended:?}").contains(&other_key), "{ended:?}");
        assert_eq!(ended.stdout_of_success(), "");
    }
    let listed = precis(&backend, &["keys", "list"]).await.stdout_of_success();
    assert!(listed.lines().skip(1).all(|line| !line.ends_with('-')), "{listed}");
}

#[tokio::test]
async fn keys_commands_report_errors() {
    let backend = Backend::sqlite().await;
    for (args, part) in [
        (&["keys", "revoke", "00000000"][..], "there is no key 00000000 in sqlite://"),
        (&["keys", "revoke", "hunter2"], "not the ID of a key"),
        (&["keys", "revoke", "precis_hunter2"], "not the ID of a key"),
    ] {
        let output = precis(&backend, args).await.stderr_of_failure();
        assert!(output.contains(part) && output.contains("precis keys list"), "{output}");
        assert!(!output.contains("hunter2"), "{output}");
    }
    for (args, part) in [
        (&["keys", "create"][..], "--tenant"),
        (&["keys", "create", "--tenant", ""], "must not be empty"),
        (&["keys", "create", "--tenant", "a\nb"], "must not contain control characters"),
        (&["keys", "create", "--tenant", " alpha"], "must not begin or end with white space"),
        (&["keys", "create", "--tenant", "al\u{200b}pha"], "the invisible character U+200B"),
        (&["keys", "create", "--tenant", "a", "--scope", "root"], "read, write, admin"),
        (&["keys"], "revoke"),
    ] {
        let ended = precis(&backend, args).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
        assert!(ended.stderr.contains(part), "{ended:?}");
    }
    assert_eq!(precis(&backend, &["keys", "list"]).await.stdout_of_success().lines().count(), 1);
    let nowhere = "postgres://precis:hunter2@127.0.0.1:1/precis";
    for command in ["list", "create --tenant a", "revoke 00000000"] {
        let args = ["keys"].into_iter().chain(command.split(' '));
        let output = Precis::new().env("DATABASE_URL", nowhere).args(args).run().await.stderr_of_failure();
        assert!(output.contains("can't work with the database") && !output.contains("hunter2"), "{output}");
    }
}

/// Another folder means another database, whose keys do not close the one of the service.
#[tokio::test]
async fn keys_commands_name_the_database_that_they_create() {
    let mut precis = Precis::new().args(["keys", "list"]);
    let file = precis.folder().join("precis.db").display().to_string();
    let (first, second) = (precis.run().await, precis.run().await);
    assert!(first.stderr.starts_with(&format!("Created the database {file}, which is empty.")), "{first:?}");
    assert_eq!((second.code, second.stderr.as_str()), (Some(0), ""), "{second:?}");
}

/// `precis keys create` may be the first command for a new database.
#[tokio::test]
async fn keys_commands_migrate_the_schema() {
    let database = TestDatabase::create("empty", async |_| {}).await;
    let precis = |args: &'static [&'static str]| {
        Precis::new().env("DATABASE_URL", &database.url()).args(args.iter().copied())
    };
    let output = precis(&["--no-migrate", "keys", "create", "--tenant", "a"]).run().await.stderr_of_failure();
    assert!(output.contains("`precis migrate`"), "{output}");
    precis(&["keys", "create", "--tenant", "a"]).run().await.stdout_of_success();
    precis(&["--no-migrate", "--bind", "0.0.0.0:0"]).start().await.get("/readyz").await.ok(200);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reachable_address_requires_key_or_setting(backend: Backend) {
    let open = |address: &str| Precis::on(&backend).args(["--bind", address]);
    for address in ["0.0.0.0:0", "[::]:0"] {
        let output = open(address).run().await.stderr_of_failure();
        for part in
            [address, "server.bind", "`precis keys create", "server.allow_unauthenticated", "127.0.0.1"]
        {
            assert!(output.contains(part), "{output}");
        }
    }
    let allowed = open("0.0.0.0:0").set("server.allow_unauthenticated", "true").start().await;
    assert_eq!(status(&allowed, None, Method::GET, "/sessions").await, 200);
    let (id, key) = create(&backend, &["--tenant", "acme"]).await;
    let service = open("0.0.0.0:0").start().await;
    assert_eq!(status(&service, None, Method::GET, "/sessions").await, 401);
    assert_eq!(status(&service, Some(&key), Method::GET, "/sessions").await, 200);
    // If all keys are revoked, the service starts and rejects every request.
    precis(&backend, &["keys", "revoke", &id]).await.stdout_of_success();
    let restarted = open("0.0.0.0:0").start().await;
    for key in [None, Some(key.as_str())] {
        assert_eq!(status(&restarted, key, Method::GET, "/sessions").await, 401);
    }
    restarted.get("/readyz").await.ok(200);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_redacted_in_log_and_errors(backend: Backend) {
    let (id, key) = create(&backend, &["--tenant", "acme", "--scope", "write"]).await;
    let (revoked, revoked_key) = create(&backend, &["--tenant", "acme"]).await;
    precis(&backend, &["keys", "revoke", &revoked]).await.stdout_of_success();
    let service = Precis::on(&backend).set("log.filter", "trace");
    let service = service.set("consolidation.keep_recent", "2").start().await;
    let ask = async |key: &str, method: Method, path: &str, request_id: &str| {
        let request = service.with_key(key).request(method, path).header("x-request-id", request_id);
        let status = request.await.status;
        let answered = service.wait_for_line(request_id, |line| {
            line["message"] == "answered" && line["spans"][0]["request_id"] == request_id
        });
        (status, answered.await["spans"][0].clone())
    };
    let (status, span) = ask(&key, Method::GET, "/sessions", "good").await;
    assert_eq!(status, 200);
    assert_eq!((&span["tenant"], &span["key"]), (&Value::from("acme"), &Value::from(id.as_str())));
    let (status, span) = ask(&key, Method::DELETE, "/sessions/s", "scope").await;
    assert_eq!((status, &span["key"]), (403, &Value::from(id.as_str())));
    let (status, span) = ask(&revoked_key, Method::GET, "/sessions", "revoked").await;
    assert_eq!(status, 401);
    assert_eq!((&span["tenant"], &span["key"]), (&Value::Null, &Value::from(revoked.as_str())));
    let mistyped = format!("{}x", &key[..61]);
    let (status, span) = ask(&mistyped, Method::GET, "/sessions", "mistyped").await;
    assert_eq!((status, &span["key"]), (401, &Value::Null));
    // Users paste keys in the place of IDs.
    let path = |escaped: &str| format!("/sessions/{}", key.replacen('p', escaped, 1));
    let turns = json!({"messages": [
        {"role": "user", "content": "Tea was late today."}, {"role": "assistant", "content": "So it was."},
        {"role": "user", "content": "And tomorrow?"}, {"role": "assistant", "content": "It will be on time."},
    ]});
    for (at, (method, path, body, status)) in [
        (Method::POST, path("p") + "/exchanges", turns, 201),
        (Method::POST, path("%70") + "/consolidations", Value::Null, 201),
        (Method::GET, path("%70"), Value::Null, 200),
        (Method::PUT, path("%70"), Value::Null, 405),
        (Method::GET, path("p") + "/nothing", Value::Null, 404),
        (Method::GET, format!("/sessions?cursor={key}"), Value::Null, 422),
    ]
    .into_iter()
    .enumerate()
    {
        let request_id = format!("pasted-{at}");
        let request = service.with_key(&key).request(method, &path).header("x-request-id", &request_id);
        let request = if body.is_null() { request } else { request.json(&body) };
        let response = request.await;
        assert_eq!(response.status, status, "{path}");
        let output = response.text;
        assert!(status < 400 || !output.contains(&key[15..40]), "{output}");
        let answered = |line: &Value| {
            line["message"] == "answered" && line["spans"][0]["request_id"] == request_id.as_str()
        };
        let line = service.wait_for_line(&request_id, answered).await;
        let route = line["route"].as_str().expect("a route");
        assert!(route == "(no route)" || route.starts_with("/sessions"), "{route}");
        assert!(!line.to_string().contains("precis_"), "{line}");
    }
    let named = service.with_key(&key).get("/sessions").header("x-request-id", &key).await;
    assert_ne!(named.header("x-request-id"), Some(key.as_str()));
    let log = service.log().join("\n");
    assert!(log.contains(&format!("\"session\":\"precis_{id}…\"")), "{log}");
    for key in [&key, &revoked_key] {
        assert!(!log.contains(&key[15..40]), "{log}");
    }
}
