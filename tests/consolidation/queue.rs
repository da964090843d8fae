//! Many sessions are due at once, and the model accepts few concurrent calls: each session is consolidated or gets the
//! reason, and requests that need no model are not delayed.

use crate::harness::{Answer, PATIENCE, covering, plain, record, seen, start, state, turns};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const SESSIONS: usize = 70;
const AT_ONCE: usize = 8;
const WAITING: usize = 40;

/// Six messages, of which four are due, with `seq`s that are unique per session, so that a prompt identifies
/// its session.
fn given(session: usize) -> Vec<String> {
    turns(10 * session + 1..=10 * session + 6)
}

fn name(session: usize) -> String {
    format!("s{session}")
}

/// Sends one request for each of these sessions at once.
fn ask_all(app: &Arc<TestApp>, sessions: impl Iterator<Item = usize>) -> JoinSet<(usize, Answer)> {
    let mut requests = JoinSet::new();
    for session in sessions {
        let app = Arc::clone(app);
        requests.spawn(async move { (session, plain(&app, &name(session), &given(session)).await) });
    }
    requests
}

async fn next(requests: &mut JoinSet<(usize, Answer)>) -> (usize, Answer) {
    let next = tokio::time::timeout(PATIENCE, requests.join_next());
    next.await.expect("each request is answered").expect("there is one more").expect("no panic")
}

/// Checks a response without consolidation: all messages, the reason and the time of the next attempt.
fn assert_rejected(session: usize, answer: &Answer) {
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("failed", 6), "{session}");
    let reason = answer.consolidation.reason.as_deref().expect("a reason");
    let full = format!("its queue is full with {WAITING} calls");
    let polite = reason.contains(&full) || reason.contains("no free call slot within");
    assert!(polite, "{session}: {reason}");
    assert!(answer.consolidation.retry_at.is_some(), "{session}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_due_sessions_with_few_concurrent_calls_lose_nothing(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    for _ in 0..AT_ONCE {
        model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    }
    model.default(Behaviour::Delayed(Duration::from_secs(2), "They met.".to_owned()));
    let (at_once, waiting) = (AT_ONCE.to_string(), WAITING.to_string());
    let set = [
        ("llm.models.small.max_concurrent_calls", at_once.as_str()),
        ("llm.models.small.max_queued_calls", waiting.as_str()),
        ("llm.models.small.queue_timeout", "5s"),
        ("llm.pools.default.deadline", "20s"),
        ("consolidation.threshold", "4"),
        ("consolidation.keep_recent", "2"),
        ("consolidation.retry_initial", "1ms"),
        ("consolidation.retry_max", "1ms"),
    ];
    let app = Arc::new(start(&backend, &model, &set).await);
    for session in 0..SESSIONS {
        record(&app, &name(session), &given(session)).await;
    }
    let small = turns(1..=3);
    record(&app, "small", &small).await;

    // Requests that do not fit into the queue are answered first, because all calls are held.
    let mut requests = ask_all(&app, 0..SESSIONS);
    let mut rejected = Vec::new();
    for _ in 0..SESSIONS - AT_ONCE - WAITING {
        let (session, answer) = next(&mut requests).await;
        assert_rejected(session, &answer);
        rejected.push(session);
    }
    let others = async {
        for _ in 0..50 {
            assert_eq!(plain(&app, "small", &small).await.outcome(), "not_due");
        }
    };
    tokio::time::timeout(PATIENCE, others).await.expect("they do not wait for a model");
    assert!(model.calls().iter().all(|call| !call.answered), "nothing was released meanwhile");
    assert!(requests.try_join_next().is_none(), "all of them were there meanwhile");

    release.add_permits(AT_ONCE);
    let mut done = 0;
    while !requests.is_empty() {
        let (session, answer) = next(&mut requests).await;
        if answer.outcome() == "consolidated" {
            assert_eq!((answer.coverage.summary_through, answer.verbatim().len()), (4, 2), "{session}");
            done += 1;
        } else {
            assert_rejected(session, &answer);
            rejected.push(session);
        }
    }
    assert!(done > AT_ONCE, "{done}: some of those that waited had their turn");
    assert_eq!((model.calls().len(), model.max_in_flight()), (done, AT_ONCE));

    // The next request of each session consolidates it.
    model.default(Behaviour::reply(covering));
    for session in rejected {
        assert_eq!(plain(&app, &name(session), &given(session)).await.outcome(), "consolidated");
    }
    let calls = model.calls();
    assert!(model.max_in_flight() <= AT_ONCE, "never more than the limit");
    let mut read: Vec<usize> = calls.iter().flat_map(seen).collect();
    read.sort_unstable();
    let due = (0..SESSIONS).flat_map(|session| 10 * session + 1..=10 * session + 4);
    assert_eq!(read, due.collect::<Vec<_>>(), "each message was summarised once");
    for session in 0..SESSIONS {
        let state = state(&app, &name(session)).await;
        assert_eq!((&state["cursor"], &state["summary"]["revision"]), (&4.into(), &1.into()), "{session}");
    }
}
