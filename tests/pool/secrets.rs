//! Keys: where they go, and where they don't.

use crate::harness::{
    DEADLINE, GOOD, KEY, PROTOCOLS, client, consolidate, model, names, pool, pool_of, remote,
};
use crate::model_server::{Behaviour, ModelServer};
use precis::llm::http::{HttpProviderSpec, SecretSource};
use precis::llm::model::ModelSpec;
use precis::llm::pool::PoolStrategy;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[tokio::test]
async fn the_key_stays_in_its_header() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let quoted = format!("wrong key {KEY}, go away. {}", KEY.repeat(50));
        let body = format!("{{\"detail\": [\"{KEY}\"]}}");
        for behaviour in [
            Behaviour::fail(401, &quoted),
            Behaviour::fail(200, &quoted),
            Behaviour::Raw(403, Vec::new(), body),
            Behaviour::Raw(200, vec![("content-type", format!("text/{KEY}"))], "<html>".to_owned()),
            Behaviour::Raw(200, vec![("content-encoding", format!("x-{KEY}"))], String::new()),
        ] {
            server.default(behaviour);
            let pools = pool(protocol, &[&server]);
            let error = consolidate(&pools).await.expect_err("no answer");
            let text = format!("{error} {error:?} {pools:?}");
            assert!(!text.contains("sk-very") && !text.contains("secret-0"), "{text}");
            assert!(text.contains("[key]"), "{text}");
        }
    }
}

#[tokio::test]
async fn headers_and_fields_of_the_body_go_with_each_call() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let body = [("reasoning".to_owned(), json!({"effort": "low"})), ("seed".to_owned(), json!(7))];
        let spec = HttpProviderSpec {
            base_url: format!("{}?api-version=1", server.base_url()),
            key_header: Some("api-key".to_owned()),
            headers: vec![("x-title".to_owned(), SecretSource::fixed("precis"))],
            body: body.into_iter().collect(),
            ..HttpProviderSpec::default()
        };
        let spec = ModelSpec {
            provider: remote(client(), protocol, spec),
            ..model("m0", protocol, "http://127.0.0.1:9")
        };
        consolidate(&pool_of(vec![spec], PoolStrategy::Fallback, DEADLINE)).await.expect("an answer");
        let call = &server.calls()[0];
        assert_eq!((call.header("api-key"), call.header("x-title")), (KEY, "precis"));
        assert_eq!((call.header("authorization"), call.header("x-api-key")), ("", ""));
        assert_eq!((&call.body["reasoning"]["effort"], &call.body["seed"]), (&json!("low"), &json!(7)));
        assert!(call.path.ends_with("?api-version=1"), "{}", call.path);
    }
}

#[tokio::test]
async fn a_key_that_changes_is_used_from_the_next_call_on() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let turn = Arc::new(AtomicUsize::new(0));
        let turns = Arc::clone(&turn);
        let key = SecretSource::new(move || match turns.load(Ordering::Relaxed) {
            0 => Err("its file is empty".to_owned()),
            turn => Ok(format!("key-{turn}").into()),
        });
        let spec = HttpProviderSpec {
            base_url: server.base_url(),
            key_header: Some("x-api-key".to_owned()),
            headers: vec![("x-api-key".to_owned(), key)],
            ..HttpProviderSpec::default()
        };
        let spec = ModelSpec {
            provider: remote(client(), protocol, spec),
            ..model("m0", protocol, "http://127.0.0.1:9")
        };
        let pools = pool_of(vec![spec], PoolStrategy::Fallback, DEADLINE);
        let error = consolidate(&pools).await.expect_err("no key");
        assert_eq!(names(&error), [("m0", "key")]);
        assert!(
            error.to_string().contains("m0: no key: for the header x-api-key: its file is empty"),
            "{error}"
        );
        assert_eq!(server.connections(), 0, "nothing is sent without it");
        for number in [1, 2] {
            turn.store(number, Ordering::Relaxed);
            server.push(Behaviour::answer(GOOD));
            consolidate(&pools).await.expect("an answer");
            assert_eq!(server.calls()[number - 1].header("x-api-key"), format!("key-{number}"));
        }
    }
}
