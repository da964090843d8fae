//! The built-in summariser copies sentences of the conversation, so each of its texts is accepted.

use crate::harness::{plain, record, revisions};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use serde_json::{Value, json};
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_look_like_no_answer_are_consolidated(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for (session, name, content, text) in [
        ("summary", "Summary", "None", "Summary: None"),
        ("not-applicable", "N", "A", "N: A"),
        ("emoji", "Ada", "👍", "Ada: 👍"),
    ] {
        let given = vec![json!({"role": "user", "name": name, "content": content}).to_string(); 102];
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 82), "{session}");
        assert_eq!(revisions(&app, session).await[0]["text"], text);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extract_without_letters_moves_cursor_without_text(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let given = vec![json!({"role": "user", "name": "_", "content": "👍"}).to_string(); 102];
    record(&app, "s", &given).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.coverage.summary_through), ("consolidated", 82));
    assert_eq!((&answer.consolidation.model, answer.system().len()), (&None, 0));
    let revision = revisions(&app, "s").await.remove(0);
    assert_eq!(
        (&revision["model"], &revision["text"], &revision["added"]),
        (&Value::Null, &json!(""), &json!(""))
    );
}
