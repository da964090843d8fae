//! The transcript states the time of messages, so that a model can write a date for "yesterday".

use crate::harness::{assistant, consolidate, covering, start, turns, user};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use reqwest::{Method, StatusCode};
use serde_json::Value;
use test_case::test_case;

/// Returns the lines of the transcript: the time of a line that states it, or the text of a message up to its second word.
fn transcript(call: &Call) -> Vec<String> {
    let (_, block) = call.user().split_once("<conversation>\n").expect("the block begins");
    let (block, _) = block.split_once("</conversation>").expect("the block ends");
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let text = line["text"].as_str().map(|text| text.split(' ').next().unwrap_or_default());
        text.or(line["time"].as_str()).expect("a message or a time").to_owned()
    };
    block.lines().map(line).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_reads_each_change_of_date(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[("consolidation.keep_recent", "1")]).await;
    let record = async |messages: &[String], time: &str| {
        let body = format!(r#"{{"messages":[{}],"created_at":"{time}"}}"#, messages.join(","));
        app.post("/sessions/s/exchanges", body).await.ok(201);
    };
    record(&turns(1..=2), "2026-03-01T09:00:00Z").await;
    record(&turns(3..=4), "2026-03-01T09:30:00Z").await;
    record(&turns(5..=6), "2026-03-03T00:30:00+01:00").await;
    record(&[user(7), assistant(8), user(9)], "2026-03-04T12:00:00Z").await;
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let first = transcript(&model.calls()[0]);
    let expected = "Sunday 2026-03-01 09:00 UTC|m1|m2|m3|m4|Monday 2026-03-02 23:30 UTC|m5|m6|\
        Wednesday 2026-03-04 12:00 UTC|m7|m8";
    assert_eq!(first.join("|"), expected);
    // The same state produces the same prompt.
    app.request(Method::POST, "/sessions/s/revisions/0/restore").await.ok(201);
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let calls = model.calls();
    assert_eq!((calls[1].system(), calls[1].user()), (calls[0].system(), calls[0].user()));
    // The next prompt begins with the time again.
    record(&turns(10..=12), "2026-03-04T12:10:00Z").await;
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    assert_eq!(transcript(&model.calls()[2])[0], "Wednesday 2026-03-04 12:00 UTC");
}
