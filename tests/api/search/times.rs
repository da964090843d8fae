//! `GET /search` and the tool `search_history` with imported messages of earlier days.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use test_case::test_case;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use time::{Duration, OffsetDateTime};

/// An hour less than a number of days.
fn within(days: i64) -> Duration {
    Duration::days(days) - Duration::HOUR
}

/// Formats a time as an export does, in microseconds.
fn export_time(time: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    time.format(format).expect("a time")
}

/// Returns an export of user `ada` with messages of different ages, oldest first.
fn export(messages: &[(&str, Duration)]) -> String {
    let now = OffsetDateTime::now_utc();
    let times: Vec<String> = messages.iter().map(|(_, age)| export_time(now - *age)).collect();
    let session = json!({
        "session_id": "old", "user_id": "ada", "metadata": {}, "created_at": times[0], "updated_at": times.last(),
    });
    let mut lines =
        json!({"precis_export": 1, "session": session, "messages": messages.len(), "revisions": 0})
            .to_string();
    lines.push('\n');
    for (at, (content, _)) in messages.iter().enumerate() {
        let message = json!({"role": "user", "content": content});
        let line = json!({"seq": at + 1, "created_at": times[at], "message": message});
        writeln!(lines, "{line}").expect("a string takes all");
    }
    let hash = Sha256::digest(&lines).iter().fold(String::new(), |hash, byte| format!("{hash}{byte:02x}"));
    let end = json!({"end": {"messages": messages.len(), "revisions": 0, "sha256": hash}});
    format!("{lines}{end}\n")
}

/// Starts a service with one message of today, and an imported session with messages of the last weeks.
async fn start(backend: &Backend) -> TestApp {
    let app = TestApp::start(backend, &[]).await;
    let turn = json!({"messages": [{"role": "user", "content": "plum today"}], "user_id": "ada"});
    app.post("/sessions/new/exchanges", &turn).await.ok(201);
    let lines = export(&[
        ("plum of a year ago", within(365)),
        ("plum of last month", within(30)),
        ("a pear of last week", within(7)),
        ("plum of last week", within(7)),
        ("plum of yesterday", within(1)),
    ]);
    let import = app.request(Method::POST, "/sessions/old/import");
    import.header("content-type", "application/x-ndjson").body(lines).await.ok(201);
    app
}

/// Returns `SESSION:SEQ` of each hit, in the order of time.
fn places(hits: &Value) -> Vec<String> {
    let hits = hits.as_array().expect("hits").iter();
    let mut places: Vec<_> = hits
        .map(|hit| {
            let time = hit["created_at"].as_str().expect("a time");
            let time = OffsetDateTime::parse(time, &Rfc3339).expect("a time");
            (time, format!("{}:{}", hit["session_id"].as_str().expect("a session"), hit["seq"]))
        })
        .collect();
    places.sort();
    places.into_iter().map(|(_, place)| place).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_history_with_days_excludes_older_messages(backend: Backend) {
    let app = start(&backend).await;
    let of = async |days: Value| {
        let arguments = json!({"query": "plum", "days": days}).to_string();
        let response = app.post("/sessions/new/tools/search_history", arguments).await.ok(200);
        assert_eq!(response["is_error"], false, "{response}");
        places(&response["data"]["hits"])
    };
    let all = ["old:1", "old:2", "old:4", "old:5", "new:1"];
    for (days, found) in [
        (json!(1), &all[3..]),
        (json!(6), &all[3..]),
        (json!(7), &all[2..]),
        (json!(29), &all[2..]),
        (json!(30), &all[1..]),
        (json!(364), &all[1..]),
        (json!(365), &all[..]),
        (Value::Null, &all[..]),
    ] {
        assert_eq!(of(days.clone()).await, found, "{days}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_with_since_and_until_returns_messages_in_between(backend: Backend) {
    let app = start(&backend).await;
    let times: Vec<String> = app.get("/sessions/old/messages").await["items"]
        .as_array()
        .expect("messages")
        .iter()
        .map(|message| message["created_at"].as_str().expect("a time").to_owned())
        .collect();
    let of = async |filter: &str| {
        let hits = app.get(&format!("/search?q=plum&neighbours=1{filter}")).await.ok(200);
        (places(&hits["items"]), hits["items"][0]["before"].clone())
    };
    let all = ["old:1", "old:2", "old:4", "old:5", "new:1"];
    for (since, until, found) in [
        (None, None, &all[..]),
        (Some(0), None, &all[..]),
        (Some(1), None, &all[1..]),
        (Some(4), None, &all[3..]),
        (None, Some(0), &all[..0]),
        (None, Some(1), &all[..1]),
        (None, Some(4), &all[..3]),
        (Some(1), Some(4), &all[1..3]),
        // Both messages have the same time.
        (Some(2), Some(3), &all[..0]),
        (Some(4), Some(1), &all[..0]),
    ] {
        let filter = [("since", since), ("until", until)]
            .into_iter()
            .filter_map(|(name, at)| Some(format!("&{name}={}", times[at?])))
            .collect::<String>();
        assert_eq!(of(&filter).await.0, found, "{filter}");
        let of_session: Vec<_> = found.iter().filter(|place| place.starts_with("old")).collect();
        let narrow = of(&format!("{filter}&session_id=old")).await.0;
        assert_eq!(narrow.iter().collect::<Vec<_>>(), of_session, "{filter}");
    }
    // Neighbours need not be in the time range.
    let (found, before) = of(&format!("&since={}&until={}", times[1], times[2])).await;
    assert_eq!((found, &before[0]["seq"]), (vec!["old:2".to_owned()], &json!(1)));
}
