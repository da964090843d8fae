//! A change of an API key file while the service runs, and the daily token limit.

use crate::service::{Precis, messages, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer, USAGE};
use serde_json::{Value, json};
use test_case::test_case;

#[tokio::test]
async fn replaced_api_key_file_is_used_immediately() {
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("They met."));
    let precis = Precis::new().file("key", "sk-first-0123456789\n").model(&model.base_url());
    let precis = precis.set("llm.providers.scripted.api_key__file", "key");
    let service =
        precis.set("consolidation.keep_recent", "2").set("consolidation.threshold", "4").start().await;
    let mut expected = Vec::new();
    // For the last one the file is missing for a moment: the previous key remains in use.
    for key in ["sk-first-0123456789", "sk-second-0123456789", "sk-third-0123456789", ""] {
        let session = format!("s{}", expected.len());
        let path = service.folder.path().join("key");
        if key.is_empty() {
            std::fs::remove_file(&path).expect("removed");
            expected.push("Bearer sk-third-0123456789".to_owned());
        } else {
            // A rename is atomic: no reader sees half a key.
            let new = service.folder.path().join("new");
            std::fs::write(&new, key).expect("written");
            std::fs::rename(&new, &path).expect("renamed");
            expected.push(format!("Bearer {key}"));
        }
        service.record(&session, &messages(6)).await;
        assert_eq!(outcome(&service.context(&session, &json!({})).await, 6), "consolidated");
    }
    let sent: Vec<_> = model.calls().iter().map(|call| call.header("authorization").to_owned()).collect();
    assert_eq!(sent, expected);
    assert!(!service.log().iter().any(|line| line.contains("0123456789")));
}

/// The next model of the pool answers instead, so nothing else shows that the key or the name of the model is wrong.
#[test_case(401, "check llm.providers.scripted.api_key"; "key")]
#[test_case(404, "check llm.models.small.model"; "name")]
#[tokio::test]
async fn refused_model_is_a_warning_until_it_works(status: u16, advice: &str) {
    let (refusing, working) = (ModelServer::start().await, ModelServer::start().await);
    refusing.default(Behaviour::fail(status, "bad key or name"));
    working.default(Behaviour::answer("They met."));
    let precis = Precis::new().model(&refusing.base_url()).set("llm.models.other.provider", "working");
    let precis = precis.set("llm.providers.working.base_url", &working.base_url());
    let precis =
        precis.set("llm.models.other.model", "scripted-1").set("llm.pools.default.models", "small,other");
    let service =
        precis.set("consolidation.keep_recent", "2").set("consolidation.threshold", "4").start().await;
    for session in ["a", "b"] {
        service.record(session, &messages(6)).await;
        assert_eq!(outcome(&service.context(session, &json!({})).await, 6), "consolidated");
    }
    assert_eq!(refusing.calls().len(), 2);
    let log = service.log();
    let warnings: Vec<_> = log.iter().filter(|line| line.contains(advice)).collect();
    let status = status.to_string();
    assert!(
        matches!(warnings.as_slice(), [warning] if warning.contains("WARN") && warning.contains(&status)),
        "{log:?}"
    );
    let ready = service.get("/readyz?verbose").await;
    let warning = ready["warnings"][0].as_str().expect("a warning");
    assert!(
        warning.contains(advice) && warning.contains("\"small\"") && warning.contains(&status),
        "{warning}"
    );
    assert_eq!(service.get("/readyz").await, json!({"status": "ok"}));
    refusing.default(Behaviour::answer("They met."));
    service.record("c", &messages(6)).await;
    assert_eq!(outcome(&service.context("c", &json!({})).await, 6), "consolidated");
    assert_eq!(service.get("/readyz?verbose").await, json!({"status": "ok", "warnings": []}));
}

/// The limit equals the usage of one call, so the second consolidation exceeds it.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daily_token_limit_stops_calls_and_loses_no_message(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("They met."));
    let (used, once) = (USAGE.0 + USAGE.1, messages(6));
    let mut service = Precis::on(&backend)
        .model(&model.base_url())
        .set("consolidation.threshold", "4")
        .set("consolidation.keep_recent", "2")
        .set("consolidation.daily_token_limit", &used.to_string())
        .start()
        .await;
    service.record("s", &once).await;
    let context = service.context("s", &json!({})).await;
    assert_eq!((outcome(&context, 6), &context["consolidation"]["reason"]), ("consolidated", &Value::Null));
    service.record("s", &once).await;
    let says = format!("{used} tokens are used, the limit is {used} (consolidation.daily_token_limit)");
    // The first report is about the failure, the second about the wait for the next attempt.
    for _ in 0..2 {
        let context = service.context("s", &json!({})).await;
        assert_eq!(outcome(&context, 12), "failed");
        let report = &context["consolidation"];
        assert!(report["reason"].as_str().expect("a reason").contains(&says), "{report}");
        assert!(report["retry_at"].is_string(), "{report}");
        assert_eq!(context["coverage"]["summary_through"], 4, "the summary as it was, and all that followed");
    }
    assert_eq!(model.calls().len(), 1);
    assert_eq!(service.history("s").await, [&once[..], &once[..]].concat());

    // The limit was configured: the log has a warning and no error.
    let line = service.wait_for_log("consolidation postponed").await;
    assert_eq!(line["level"], "WARN", "{line}");
    assert!(line["error"].as_str().expect("text").contains(&says), "{line}");
    service.signal("TERM");
    assert_eq!(service.ended().await.0, Some(0));
    let errors: Vec<_> = service.log().into_iter().filter(|line| line.contains("\"ERROR\"")).collect();
    assert!(errors.is_empty(), "{errors:?}");
}
