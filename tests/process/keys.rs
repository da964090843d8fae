//! `precis keys`, what an address that others reach needs, and what is said and logged of keys.

use crate::service::{Ended, Precis, Process};
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use test_case::test_case;

async fn precis(backend: &Backend, args: &[&str]) -> Ended {
    Precis::new().env("DATABASE_URL", &backend.url()).args(args.iter().copied()).run().await
}

/// Makes a key: the id and the key.
async fn create(backend: &Backend, args: &[&str]) -> (String, String) {
    let ended = precis(backend, &[&["keys", "create"], args].concat()).await;
    let said = ended.stderr.clone();
    let key = ended.printed();
    assert!(key.starts_with("precis_") && key.len() == 62 && !key.contains(char::is_whitespace), "{key}");
    let id = key[7..15].to_owned();
    assert!(said.contains(&id) && said.contains("shown this once") && !said.contains(&key), "{said}");
    (id, key)
}

async fn status(service: &Process, key: Option<&str>, method: Method, path: &str) -> u16 {
    let request = service.request(method, path);
    let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
    request.send().await.expect("an answer").status().as_u16()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_made_listed_and_revoked(backend: Backend) {
    let empty = precis(&backend, &["keys", "list"]).await.printed();
    assert_eq!(empty, "ID  TENANT  NAME  SCOPE  CREATED  REVOKED");
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    assert_eq!(status(&service, None, Method::GET, "/sessions").await, 200);

    let (acme, acme_key) = create(&backend, &["--tenant", "acme", "--name", "the ärchive"]).await;
    let (other, other_key) = create(&backend, &["--tenant", "other", "--scope", "admin"]).await;
    let listed = precis(&backend, &["keys", "list"]).await.printed();
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
    let of_acme = precis(&backend, &["keys", "list", "--tenant", "acme"]).await.printed();
    assert!(of_acme.contains(&acme) && !of_acme.contains(&other), "{of_acme}");
    for key in [&acme_key, &other_key] {
        assert!(!listed.contains(&key[15..]), "{listed}");
    }

    assert_eq!(status(&service, Some(&acme_key), Method::GET, "/sessions").await, 200);
    assert_eq!(status(&service, Some(&acme_key), Method::DELETE, "/sessions/s").await, 403);
    assert_eq!(status(&service, Some(&other_key), Method::DELETE, "/sessions/s").await, 404);

    // By its id; and by the key itself, as it was found somewhere.
    for (id, given) in [(&acme, &acme), (&other, &other_key), (&acme, &acme)] {
        let ended = precis(&backend, &["keys", "revoke", given]).await;
        assert!(ended.stderr.contains(&format!("Key {id} is revoked")), "{ended:?}");
        assert!(!format!("{ended:?}").contains(&other_key), "{ended:?}");
        assert_eq!(ended.printed(), "");
    }
    let listed = precis(&backend, &["keys", "list"]).await.printed();
    assert!(listed.lines().skip(1).all(|line| !line.ends_with('-')), "{listed}");
}

#[tokio::test]
async fn what_cannot_be_done_is_said() {
    let backend = Backend::sqlite().await;
    for (args, part) in [
        (&["keys", "revoke", "00000000"][..], "there is no key 00000000 in sqlite://"),
        (&["keys", "revoke", "hunter2"], "no id of a key"),
        (&["keys", "revoke", "precis_hunter2"], "no id of a key"),
    ] {
        let said = precis(&backend, args).await.refused();
        assert!(said.contains(part) && said.contains("precis keys list"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    for (args, part) in [
        (&["keys", "create"][..], "--tenant"),
        (&["keys", "create", "--tenant", ""], "must not be empty"),
        (&["keys", "create", "--tenant", "a\nb"], "must not contain control characters"),
        (&["keys", "create", "--tenant", "a", "--scope", "root"], "read, write, admin"),
        (&["keys"], "revoke"),
    ] {
        let ended = precis(&backend, args).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
        assert!(ended.stderr.contains(part), "{ended:?}");
    }
    assert_eq!(precis(&backend, &["keys", "list"]).await.printed().lines().count(), 1);
    let nowhere = "postgres://precis:hunter2@127.0.0.1:1/precis";
    for command in ["list", "create --tenant a", "revoke 00000000"] {
        let args = ["keys"].into_iter().chain(command.split(' '));
        let said = Precis::new().env("DATABASE_URL", nowhere).args(args).run().await.refused();
        assert!(said.contains("can't work with the database") && !said.contains("hunter2"), "{said}");
    }
}

/// The first command over a new database may be this one.
#[tokio::test]
async fn keys_bring_the_schema_along() {
    let database = TestDatabase::create("empty", async |_| {}).await;
    let precis = |args: &'static [&'static str]| {
        Precis::new().env("DATABASE_URL", &database.url()).args(args.iter().copied())
    };
    let said = precis(&["--no-migrate", "keys", "create", "--tenant", "a"]).run().await.refused();
    assert!(said.contains("`precis migrate`"), "{said}");
    precis(&["keys", "create", "--tenant", "a"]).run().await.printed();
    precis(&["--no-migrate", "--bind", "0.0.0.0:0"]).start().await.get("/readyz").await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_open_to_others_needs_a_key_or_a_word(backend: Backend) {
    let open = |address: &str| Precis::new().env("DATABASE_URL", &backend.url()).args(["--bind", address]);
    for address in ["0.0.0.0:0", "[::]:0"] {
        let said = open(address).run().await.refused();
        for part in
            [address, "server.bind", "`precis keys create", "server.allow_unauthenticated", "127.0.0.1"]
        {
            assert!(said.contains(part), "{said}");
        }
    }
    let allowed = open("0.0.0.0:0").set("server.allow_unauthenticated", "true").start().await;
    assert_eq!(status(&allowed, None, Method::GET, "/sessions").await, 200);
    let (id, key) = create(&backend, &["--tenant", "acme"]).await;
    let service = open("0.0.0.0:0").start().await;
    assert_eq!(status(&service, None, Method::GET, "/sessions").await, 401);
    assert_eq!(status(&service, Some(&key), Method::GET, "/sessions").await, 200);
    // Without any valid key it is closed, and starts all the same.
    precis(&backend, &["keys", "revoke", &id]).await.printed();
    let restarted = open("0.0.0.0:0").start().await;
    for key in [None, Some(key.as_str())] {
        assert_eq!(status(&restarted, key, Method::GET, "/sessions").await, 401);
    }
    restarted.get("/readyz").await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_is_logged(backend: Backend) {
    let (id, key) = create(&backend, &["--tenant", "acme", "--scope", "write"]).await;
    let (revoked, revoked_key) = create(&backend, &["--tenant", "acme"]).await;
    precis(&backend, &["keys", "revoke", &revoked]).await.printed();
    let service = Precis::new().env("DATABASE_URL", &backend.url()).set("log.filter", "trace");
    let service = service.set("consolidation.keep_recent", "2").start().await;
    let ask = async |key: &str, method: Method, path: &str, request_id: &str| {
        let request = service.request(method, path).bearer_auth(key).header("x-request-id", request_id);
        let status = request.send().await.expect("an answer").status();
        let answered = service.until_line(request_id, |line| {
            line["message"] == "answered" && line["spans"][0]["request_id"] == request_id
        });
        (status, answered.await["spans"][0].clone())
    };
    let (status, span) = ask(&key, Method::GET, "/sessions", "good").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!((&span["tenant"], &span["key"]), (&Value::from("acme"), &Value::from(id.as_str())));
    let (status, span) = ask(&key, Method::DELETE, "/sessions/s", "scope").await;
    assert_eq!((status, &span["key"]), (StatusCode::FORBIDDEN, &Value::from(id.as_str())));
    let (status, span) = ask(&revoked_key, Method::GET, "/sessions", "revoked").await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert_eq!((&span["tenant"], &span["key"]), (&Value::Null, &Value::from(revoked.as_str())));
    let mistyped = format!("{}x", &key[..61]);
    let (status, span) = ask(&mistyped, Method::GET, "/sessions", "mistyped").await;
    assert_eq!((status, &span["key"]), (StatusCode::UNAUTHORIZED, &Value::Null));
    // People paste keys where an id should be.
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
        let request = service.request(method, &path).bearer_auth(&key).header("x-request-id", &request_id);
        let request = if body.is_null() { request } else { request.json(&body) };
        let answer = request.send().await.expect("an answer");
        assert_eq!(answer.status(), status, "{path}");
        let said = answer.text().await.expect("a text");
        assert!(status < 400 || !said.contains(&key[15..40]), "{said}");
        let answered = |line: &Value| {
            line["message"] == "answered" && line["spans"][0]["request_id"] == request_id.as_str()
        };
        let line = service.until_line(&request_id, answered).await;
        let shown = line["path"].as_str().expect("a path");
        assert!(shown == "/sessions" || shown.starts_with(&format!("/sessions/precis_{id}…")), "{shown}");
    }
    let named = service.request(Method::GET, "/sessions").bearer_auth(&key).header("x-request-id", &key);
    let named = named.send().await.expect("an answer");
    assert_ne!(named.headers()["x-request-id"], key.as_str());
    let log = service.log().join("\n");
    assert!(log.contains(&format!("\"session\":\"precis_{id}…\"")), "{log}");
    for key in [&key, &revoked_key] {
        assert!(!log.contains(&key[15..40]), "{log}");
    }
}
