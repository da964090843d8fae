//! Keys and headers: they are sent where the settings say and never shown.

use crate::harness::{
    GOOD, KEY, PROTOCOLS, client, consolidate, labels, model, pool, pool_of, provider, provider_settings,
    secret,
};
use crate::model_server::{Behaviour, ModelServer};
use precis::config::{self, SecretSource};
use serde_json::json;

#[tokio::test]
async fn key_is_redacted_in_every_error() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let message = format!("wrong key {KEY}, go away. {}", KEY.repeat(50));
        let body = format!("{{\"detail\": [\"{KEY}\"]}}");
        for behaviour in [
            Behaviour::fail(401, &message),
            Behaviour::fail(200, &message),
            Behaviour::Raw(403, Vec::new(), body),
            Behaviour::Raw(200, vec![("content-type", format!("text/{KEY}"))], "<html>".to_owned()),
            Behaviour::Raw(200, vec![("content-encoding", format!("x-{KEY}"))], String::new()),
        ] {
            server.default(behaviour);
            let pools = pool(protocol, &server);
            let error = consolidate(&pools).await.expect_err("no response");
            let text = format!("{error} {error:?} {pools:?}");
            assert!(!text.contains("sk-very") && !text.contains("secret-0"), "{text}");
            assert!(text.contains("[key]"), "{text}");
        }
    }
}

#[tokio::test]
async fn configured_headers_and_body_fields_are_sent_with_each_call() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let body = [("reasoning".to_owned(), json!({"effort": "low"})), ("seed".to_owned(), json!(7))];
        let settings = config::Provider {
            api_key_header: Some("api-key".to_owned()),
            headers: [("x-title".to_owned(), secret("precis"))].into(),
            body: body.into(),
            ..provider_settings(&format!("{}?api-version=1", server.base_url()))
        };
        let pools = pool_of(vec![model("m0", provider(client(), protocol, &settings))]);
        consolidate(&pools).await.expect("a response");
        let call = &server.calls()[0];
        assert_eq!((call.header("api-key"), call.header("x-title")), (KEY, "precis"));
        assert_eq!((call.header("authorization"), call.header("x-api-key")), ("", ""));
        assert_eq!((&call.body["reasoning"]["effort"], &call.body["seed"]), (&json!("low"), &json!(7)));
        assert!(call.path.ends_with("?api-version=1"), "{}", call.path);
    }
}

#[tokio::test]
async fn secret_in_a_file_is_read_again_for_each_call() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        let settings = config::Provider {
            api_key_header: Some("x-other".to_owned()),
            headers: [("x-api-key".to_owned(), SecretSource::File(path.clone()).into())].into(),
            ..provider_settings(&server.base_url())
        };
        let pools = pool_of(vec![model("m0", provider(client(), protocol, &settings))]);
        let error = consolidate(&pools).await.expect_err("no key");
        assert_eq!(labels(&error), [("m0", "secret")]);
        let text = error.to_string();
        assert!(text.contains("m0: secret unavailable: header x-api-key: cannot read the file"), "{text}");
        assert_eq!(server.connections(), 0, "nothing is sent without the key");
        for (index, key) in ["key-1", "key-2"].into_iter().enumerate() {
            std::fs::write(&path, key).expect("written");
            server.push(Behaviour::answer(GOOD));
            consolidate(&pools).await.expect("a response");
            assert_eq!(server.calls()[index].header("x-api-key"), key);
        }
    }
}
