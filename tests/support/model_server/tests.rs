//! The server itself: also what keeps all of it in use in every binary that includes it.

use super::{Behaviour, ModelServer};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Every behaviour, as a plain client meets it.
#[tokio::test]
async fn the_model_server_keeps_to_its_script() {
    let server = ModelServer::start().await;
    let released = Arc::new(Semaphore::new(0));
    let cases = [
        (Behaviour::answer("Ada flies."), "[DONE]"),
        (Behaviour::Finish("Ada".to_owned(), "length"), "\"length\""),
        (Behaviour::echo_longer(), "And so "),
        (Behaviour::Held(Arc::clone(&released), "Held.".to_owned()), "Held."),
        (Behaviour::Delayed(Duration::from_millis(1), "Late.".to_owned()), "Late."),
        (Behaviour::Whole("Whole.".to_owned()), "\"message\""),
        (Behaviour::fail(500, "down"), "down"),
        (Behaviour::garbage(), "oops"),
        (Behaviour::BreakOff("Ada".to_owned()), "broke"),
        (Behaviour::EndEarly("Ada".to_owned()), "Ada"),
        (Behaviour::ErrorAfter("Ada".to_owned(), "overloaded"), "overloaded"),
        (Behaviour::Hang, "timeout"),
        (Behaviour::HangAfter("Ada".to_owned()), "timeout"),
    ];
    let http = precis::llm::openai::http_client(Duration::from_secs(5)).expect("a client");
    let release = async {
        server.until_calls(4).await;
        assert!(!server.calls()[3].answered);
        released.add_permits(1);
    };
    let calls = async {
        for (behaviour, expected) in cases.clone() {
            server.push(behaviour);
            let request =
                http.post(format!("{}/chat/completions", server.base_url())).header("x-test", "1").body(
                    r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}"#,
                );
            let read = async { request.send().await?.text().await };
            // Only what is meant to hang has to be quick about it.
            let patience = if expected == "timeout" { 200 } else { 10_000 };
            let text = match tokio::time::timeout(Duration::from_millis(patience), read).await {
                Ok(Ok(text)) => text,
                Ok(Err(_)) => "broke".to_owned(),
                Err(_) => "timeout".to_owned(),
            };
            assert!(text.contains(expected), "{expected}: {text}");
        }
    };
    tokio::join!(release, calls);
    let calls = server.calls();
    assert!(calls.is_sorted_by_key(|call| call.at) && calls.len() == cases.len());
    assert!(calls.iter().all(|call| (call.system(), call.user(), call.header("x-test")) == ("S", "U", "1")));
    let unanswered: Vec<usize> = (0..calls.len()).filter(|&index| !calls[index].answered).collect();
    assert_eq!(unanswered, [8, 11, 12]);
    server.until_idle().await;
    assert!(server.most_in_flight() >= 1);
    server.default(Behaviour::answer(""));
}
