//! Failing models: requests are answered, no message is lost, and none is summarised twice.

use crate::harness::{
    Answer, PATIENCE, config, consolidate, covering, is_meta, named, plain, record, revisions, sent, start,
    state, turns, until,
};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use precis::domain::exchange::Exchange;
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::llm::{self, Llm, LlmError, LlmStatus, Prompt, Task};
use precis::service::consolidation::Outcome;
use precis::service::contexts::ContextOptions;
use precis::service::{Error, MemoryService};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use test_case::test_case;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

fn text() -> String {
    "HALF of a summary".to_owned()
}

fn misbehaviours() -> Vec<(&'static str, Behaviour)> {
    vec![
        ("fails", Behaviour::fail(500, "down")),
        ("hangs", Behaviour::Hang),
        ("hangs-later", Behaviour::HangAfter(text())),
        ("empty", Behaviour::answer(" \n")),
        ("none", Behaviour::answer("None.")),
        ("breaks-off", Behaviour::BreakOff(text())),
        ("ends-early", Behaviour::EndEarly(text())),
        ("cut-off", Behaviour::Finish(text(), "length")),
        ("errs", Behaviour::ErrorAfter(text(), "overloaded")),
        ("garbage", Behaviour::garbage()),
    ]
}

/// A session with 82 summarised messages and 102 in its tail, so that it is due.
async fn due(app: &TestApp, model: &ModelServer, session: &str) -> Vec<String> {
    model.push(Behaviour::reply(covering));
    let mut given = turns(1..=102);
    record(app, session, &given).await;
    assert_eq!(plain(app, session, &given).await.outcome(), "consolidated");
    given.extend(turns(103..=184));
    record(app, session, &given[102..]).await;
    given
}

fn at(time: &Value) -> OffsetDateTime {
    OffsetDateTime::parse(time.as_str().expect("a time"), &Rfc3339).unwrap()
}

/// Checks that the response has the old summary, the complete tail, and the time of the next attempt.
fn assert_unharmed(what: &str, answer: &Answer, old: &Value) {
    assert_eq!(answer.outcome(), "failed", "{what}");
    assert_eq!((answer.coverage.summary_through, answer.verbatim().len()), (82, 102), "{what}");
    assert!(answer.coverage.omitted.is_empty(), "{what}");
    assert!(answer.system().contains(old["summary"]["text"].as_str().unwrap()), "{what}");
    assert_eq!((answer.consolidation.messages, answer.summary.revision), (0, 1), "{what}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_is_complete_when_model_misbehaves(backend: Backend) {
    let model = ModelServer::start().await;
    let set = [
        ("llm.models.small.timeout", "500ms"),
        ("consolidation.retry_initial", "1h"),
        ("consolidation.retry_max", "2h"),
    ];
    let app = start(&backend, &model, &set).await;
    for (session, behaviour) in misbehaviours() {
        let given = due(&app, &model, session).await;
        let (old, calls) = (state(&app, session).await, model.calls().len());
        model.default(behaviour);
        let began = Instant::now();
        let answer = plain(&app, session, &given).await;
        assert!(began.elapsed() < PATIENCE / 2, "{session}: {:?}", began.elapsed());
        assert_unharmed(session, &answer, &old);
        let retry_at = json!(answer.consolidation.retry_at);
        let wait = at(&retry_at) - OffsetDateTime::from(SystemTime::now());
        assert!((50..=60).contains(&wait.whole_minutes()), "{session}: {wait}");
        assert_eq!(model.calls().len(), calls + 1, "{session}");
        let now = state(&app, session).await;
        for unchanged in ["cursor", "last_seq", "summary", "tokens", "tail_messages", "updated_at"] {
            assert_eq!(now[unchanged], old[unchanged], "{session}");
        }
        assert_eq!(now["consolidation"]["state"], "waiting", "{session}");
        assert_eq!(
            (&now["consolidation"]["failures"], &now["consolidation"]["retry_at"]),
            (&json!(1), &retry_at)
        );
        let why = now["consolidation"]["last_failure"].as_str().unwrap();
        assert!(why.contains("small: ") && !why.contains("m103"), "{session}: {why}");
        assert_eq!(answer.consolidation.reason.as_deref(), Some(why), "{session}");
        // Requests before that time get the same response, and no model is called.
        let again = plain(&app, session, &given).await;
        assert_unharmed(session, &again, &old);
        assert_eq!(json!(again.consolidation.retry_at), retry_at, "{session}");
        assert_eq!(again.consolidation.reason.as_deref(), Some(why), "{session}");
        assert_eq!(model.calls().len(), calls + 1, "{session}");
        assert_eq!(revisions(&app, session).await.len(), 1, "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_delay_doubles_up_to_maximum(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::fail(503, "busy"));
    let set = [("consolidation.retry_initial", "1h"), ("consolidation.retry_max", "7h")];
    let app = start(&backend, &model, &set).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    assert_eq!(plain(&app, "s", &given).await.outcome(), "failed");
    for (failures, hours) in [(1, 1), (2, 2), (3, 4), (4, 7), (5, 7)] {
        let now = state(&app, "s").await["consolidation"].clone();
        assert_eq!(now["failures"], failures);
        let wait = at(&now["retry_at"]) - OffsetDateTime::from(SystemTime::now());
        assert_eq!((wait + Duration::from_mins(10)).whole_hours(), hours, "{failures}: {wait}");
        // An explicit request ignores the backoff, and its failure extends the backoff for others.
        let (status, problem) = consolidate(&app, "s").await;
        assert_eq!(status, StatusCode::BAD_GATEWAY, "{problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains("small: status 503 (server_error): the provider failed or is overloaded"),
            "{detail}"
        );
        assert_eq!(model.calls().len(), failures + 1);
    }
    model.default(Behaviour::reply(covering));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let now = until(&app, "s", |state| state["consolidation"]["state"] == "idle").await;
    assert_eq!(
        now["consolidation"],
        json!({"state": "idle", "failures": 0, "last_failure": null, "retry_at": null})
    );
    plain(&app, "s", &given).await;
}

/// After a failed compression, the new part is appended to the summary.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_meta_consolidation_keeps_uncompressed_summary(backend: Backend) {
    let model = ModelServer::start().await;
    // The summaries have 84 and 166 words. Above twice the limit, the built-in summariser compresses them.
    let set = [("llm.models.small.timeout", "500ms"), ("consolidation.summary_word_limit", "83")];
    let app = start(&backend, &model, &set).await;
    let as_long = |call: &Call| {
        let (_, block) = call.user().split_once("\n<summary>\n").unwrap();
        serde_json::from_str::<String>(block.lines().next().unwrap()).unwrap()
    };
    let mut cases = misbehaviours();
    cases.push(("longer", Behaviour::reply(|call| format!("{} And so on.", call.user()))));
    cases.push(("as-long", Behaviour::reply(as_long)));
    for (session, behaviour) in cases {
        let before = model.calls().len();
        let mut given = Vec::new();
        for (last, verbatim) in [(102, 20), (183, 21)] {
            let from = given.len();
            given.extend(turns(from + 1..=last));
            record(&app, session, &given[from..]).await;
            model.push(Behaviour::reply(covering));
            model.push(behaviour.clone());
            let answer = plain(&app, session, &given).await;
            assert_eq!((answer.outcome(), answer.consolidation.meta), ("consolidated", false), "{session}");
            assert_eq!(
                (answer.verbatim().len(), answer.consolidation.retry_at),
                (verbatim, None),
                "{session}"
            );
        }
        let calls = model.calls().split_off(before);
        assert_eq!(calls.iter().map(is_meta).collect::<Vec<_>>(), [false, true, false, true], "{session}");
        let revisions = revisions(&app, session).await;
        assert!(revisions.iter().all(|revision| revision["meta"].is_null()), "{session}");
        let whole =
            [&revisions[0], &revisions[1]].map(|revision| revision["added"].as_str().unwrap()).join("\n\n");
        assert_eq!(state(&app, session).await["summary"]["text"], whole, "{session}");
        assert_eq!(named(&whole), (1..=162).collect::<Vec<_>>(), "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_model_of_pool_is_used_after_failure(backend: Backend) {
    let (broken, works) = (ModelServer::start().await, ModelServer::start().await);
    works.default(Behaviour::reply(covering));
    let base_url = works.base_url();
    let set = [
        ("llm.providers.second.base_url", base_url.as_str()),
        ("llm.models.large.provider", "second"),
        ("llm.models.large.model", "scripted-2"),
        ("llm.pools.both.models", "small,large"),
        ("consolidation.pool", "both"),
        ("llm.models.small.timeout", "500ms"),
    ];
    let app = start(&backend, &broken, &set).await;
    for (session, behaviour) in misbehaviours() {
        broken.default(behaviour);
        let given = turns(1..=102);
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!(answer.outcome(), "consolidated", "{session}");
        assert_eq!(answer.consolidation.model.as_deref(), Some("large"), "{session}");
        assert_eq!(named(&answer.system()), (1..=82).collect::<Vec<_>>(), "{session}");
    }
    assert_eq!(broken.calls().len(), works.calls().len());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_with_on_failure_recent_sends_recent_messages(backend: Backend) {
    let model = ModelServer::start().await;
    let set = [
        ("consolidation.on_failure", "recent"),
        ("consolidation.retry_initial", "1m"),
        ("server.shutdown_grace", "1s"),
    ];
    let app = start(&backend, &model, &set).await;
    let given = due(&app, &model, "s").await;
    model.default(Behaviour::fail(500, "down"));
    // At the failure itself, and during the backoff.
    for _ in 0..2 {
        let answer = plain(&app, "s", &given).await;
        assert_eq!((answer.outcome(), answer.verbatim().len()), ("failed", 20));
        let omitted = &answer.coverage.omitted[..];
        assert_eq!(
            json!(omitted.iter().map(|o| (o.from_seq, o.to_seq, &o.reason)).collect::<Vec<_>>()),
            json!([[83, 164, "on_failure"]])
        );
    }
    model.default(Behaviour::reply(covering));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let answer = plain(&app, "s", &given).await;
    assert_eq!(named(&answer.system()), (1..=164).collect::<Vec<_>>(), "what was left out was not lost");
    assert_eq!(answer.verbatim().len(), 20);
}

/// A summariser that panics.
#[derive(Debug)]
struct Bug;

#[async_trait::async_trait]
impl Llm for Bug {
    async fn complete(&self, _: &str, _: Task<'_>) -> Result<llm::PoolResponse, LlmError> {
        panic!("of a bug in a test")
    }

    fn capacity(&self, _: &str) -> usize {
        10_000
    }

    fn prompt(&self, _: &str, _: Task<'_>) -> Option<Prompt> {
        None
    }

    fn status(&self) -> LlmStatus {
        LlmStatus::default()
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panic_during_consolidation_is_reported_as_failure(backend: Backend) {
    let service = MemoryService::new(backend.store().await, Arc::new(Bug), config());
    let (tenant, session) = (TenantId::default(), SessionId::new("s").unwrap());
    let messages = (0..6).map(|_| Message::text(Role::User, "hi")).collect();
    service
        .append_exchange(&tenant, &session, Exchange::new(messages, None, None), None, None)
        .await
        .unwrap();
    for _ in 0..2 {
        let context = service.build_context(&tenant, &session, ContextOptions::default()).await.unwrap();
        assert_eq!((context.consolidation.outcome, sent(&context)), (Outcome::Failed, 6));
        assert!(context.consolidation.retry_at.is_some());
        assert_eq!(
            context.consolidation.reason.as_deref(),
            Some("a bug in precis: the consolidation panicked")
        );
    }
    let asked = service.consolidate_session(&tenant, &session).await;
    assert!(matches!(asked, Err(Error::ConsolidationFailed(_))), "{asked:?}");
    let state = service.session(&tenant, &session).await.unwrap().consolidation;
    assert_eq!((state.failures, state.lease_until), (2, None), "the lease is released");
    assert!(!state.last_failure.unwrap().contains("of a bug"), "a panic's text may quote the conversation");
}
