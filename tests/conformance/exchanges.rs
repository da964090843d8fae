//! Appending exchanges: `seq`, tokens, times and atomicity. Idempotency keys are tested in `idempotency`.

use crate::conversation::{Conversation, exchange, exchange_of, key, recorded, user_id};
use crate::search::{probe, seqs};
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use precis::capacity::{self, Capacity, CapacityLimits, ClientId, Kind, Work};
use precis::domain::exchange::Exchange;
use precis::domain::message::Message;
use precis::domain::tail::TailLimit;
use precis::storage::SearchFilter;
use precis::storage::{AppendOutcome, AppendRequest, StoreError};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

/// Uses two stores, like two replicas.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writers_get_seq_without_gaps_or_duplicates(backend: Backend) {
    const WRITERS: usize = 40;
    let replicas = [Conversation::on(&backend).await, Conversation::on(&backend).await];
    let barrier = Arc::new(Barrier::new(WRITERS));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (demo, barrier) = (replicas[writer % 2].clone(), barrier.clone());
        writers.spawn(async move {
            barrier.wait().await;
            let mut written = Vec::new();
            for round in 0..3 {
                let texts: Vec<_> =
                    (0..=(writer + round) % 4).map(|at| format!("{writer}/{round}/{at}")).collect();
                let exchange = exchange(&texts.iter().map(String::as_str).collect::<Vec<_>>());
                let recorded = demo.record(&exchange).await;
                assert_eq!(recorded.last_seq - recorded.first_seq + 1, texts.len() as i64);
                written.push((recorded, exchange));
            }
            assert!(written.is_sorted_by_key(|(recorded, _)| (recorded.first_seq, recorded.created_at)));
            written
        });
    }
    let mut written = writers.join_all().await.concat();
    written.sort_by_key(|(recorded, _)| recorded.first_seq);
    let history = replicas[0].history().await;
    let state = replicas[1].state().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=history.len() as i64));
    assert_eq!(state.last_seq, history.len() as i64);
    assert_eq!(state.tokens, written.iter().map(|(_, exchange)| exchange.tokens()).sum::<i64>());
    let expected = written.iter().flat_map(|(recorded, exchange)| {
        exchange.messages.iter().map(|(message, _)| (recorded.created_at, message.json()))
    });
    assert!(history.iter().map(|stored| (stored.created_at, &*stored.json)).eq(expected));
    assert!(history.is_sorted_by_key(|stored| stored.created_at));
    assert_eq!(state.updated_at, history.last().unwrap().created_at);
}

/// A read whose client disconnects must not leave a transaction open that later writes on its connection end up in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_after_cancelled_reads_are_committed_on_postgres() {
    let backend = Backend::postgres().await;
    let (demo, other) = (Conversation::on(&backend).await, Conversation::on(&backend).await);
    demo.say(&["a", "b"]).await;
    for round in 0..20 {
        let mut reads = JoinSet::new();
        for number in 0..20 {
            let demo = demo.clone();
            reads.spawn(async move {
                let read = demo.context(None, TailLimit { messages: 10, bytes: 9999 });
                let _ = tokio::time::timeout(Duration::from_micros(100 * number), read).await;
            });
        }
        reads.join_all().await;
        let stored = demo.say(&["c", "d"]).await;
        assert_eq!(
            other.state().await.last_seq,
            stored.last_seq,
            "round {round}, read by another connection"
        );
    }
}

/// The database rejects the third message.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_with_rejected_message_is_not_stored(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    sql.reject_rows("messages", "message", "%rejected%").await;
    let rejected =
        Exchange { metadata: Some(r#"{"a":1}"#.to_owned()), ..exchange(&["a", "b", "rejected", "d"]) };
    let key = key("k", &rejected);
    for before in [None, Some(exchange(&["before", "it"]))] {
        if let Some(before) = before {
            demo.record(&before).await;
        }
        let rows = sql.rows().await;
        let request = AppendRequest::new(&demo.tenant, &demo.session, rejected.clone(), Some(key.clone()));
        let error = demo.store.append_exchange(request).await.unwrap_err();
        assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
        assert_eq!(sql.rows().await, rows);
    }
    sql.accept_rows("messages").await;
    let recorded = recorded(demo.append(&rejected, Some(&key)).await);
    assert_eq!((recorded.first_seq, recorded.last_seq, recorded.replayed), (3, 6, false));
}

/// Exchanges of several tenants, sessions and users that arrive at the same time. The database rejects one of them in every
/// second round.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_that_share_a_transaction_do_not_affect_each_other(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    Sql::on(&backend).await.reject_rows("messages", "message", "%rejected%").await;
    let of_user = |name: &str, exchange: Exchange| Exchange { user_id: Some(user_id(name)), ..exchange };
    let tenants = ["a", "b", "c"].map(|tenant| (demo.tenant(tenant), demo.session("owned").tenant(tenant)));
    for (_, owned) in &tenants {
        owned.record(&of_user("alice", exchange(&["first"]))).await;
    }
    let mut stored: BTreeMap<_, BTreeMap<i64, String>> = BTreeMap::new();
    for round in 0..6 {
        let mut requests = Vec::new();
        for (plain, owned) in &tenants {
            let text = |name: &str| exchange(&[&format!("{}/{round}/{name}", plain.tenant), name]);
            let (same, one, two) = (text("same"), text("one"), text("two"));
            requests.extend([
                (plain, text("plain"), None, "new"),
                (plain, text("plain, too"), None, "new"),
                (owned, of_user("alice", text("alice")), None, "new"),
                (owned, of_user("bob", text("bob")), None, "mismatch"),
                (owned, text("of no user"), None, "new"),
                (plain, same.clone(), Some(key(&format!("same {round}"), &same)), "same"),
                (plain, same.clone(), Some(key(&format!("same {round}"), &same)), "same"),
                (plain, one.clone(), Some(key(&format!("different {round}"), &one)), "different"),
                (plain, two.clone(), Some(key(&format!("different {round}"), &two)), "different"),
            ]);
        }
        if round % 2 == 1 {
            requests.push((&tenants[1].0, exchange(&["kept out", "rejected"]), None, "rejected"));
        }
        let appends = requests.iter().map(|(session, exchange, key, _)| {
            let (tenant, session) = (&session.tenant, &session.session);
            demo.store.append_exchange(AppendRequest::new(tenant, session, exchange.clone(), key.clone()))
        });
        let mut counts: BTreeMap<_, usize> = BTreeMap::new();
        for (outcome, (session, exchange, _, kind)) in join_all(appends).await.into_iter().zip(&requests) {
            let result = match outcome {
                Ok(AppendOutcome::Appended(appended)) => {
                    let history =
                        stored.entry((session.tenant.to_string(), session.session.to_string())).or_default();
                    for (seq, (message, _)) in (appended.first_seq..).zip(&exchange.messages) {
                        // The original and its replay return in any order.
                        let known = history.insert(seq, message.json().to_owned());
                        assert!(known.is_none_or(|known| known == message.json()), "{seq} is used twice");
                    }
                    if appended.replayed { "replayed" } else { "appended" }
                }
                Ok(AppendOutcome::UserMismatch) => "mismatch",
                Ok(AppendOutcome::KeyReused) => "reused",
                Err(StoreError::Statement(_)) => "rejected",
                other => panic!("{other:?}"),
            };
            *counts.entry((*kind, result)).or_default() += 1;
        }
        let mut expected = BTreeMap::from([
            (("new", "appended"), 12),
            (("mismatch", "mismatch"), 3),
            (("same", "appended"), 3),
            (("same", "replayed"), 3),
            (("different", "appended"), 3),
            (("different", "reused"), 3),
        ]);
        if round % 2 == 1 {
            expected.insert(("rejected", "rejected"), 1);
        }
        assert_eq!(counts, expected);
    }
    for session in tenants.iter().flat_map(|(plain, owned)| [plain, owned]) {
        let history = session.history().await;
        let first = usize::from(session.session.to_string() == "owned");
        let expected = &stored[&(session.tenant.to_string(), session.session.to_string())];
        assert!(history.iter().skip(first).map(|message| (&message.seq, &message.json)).eq(expected));
        assert!(history.iter().map(|message| message.seq).eq(1..=history.len() as i64));
    }
}

/// The call is cancelled at every await point, as happens if a task is aborted.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_append_is_stored_completely_or_not_at_all(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut given_up = 0;
    for attempt in 0..60 {
        let text = format!("{attempt}.");
        let exchange = exchange(&[&text, &text, &text]);
        // The number of await points is not known, so every number up to a limit is tried.
        given_up += usize::from(polled(attempt % 20, demo.append(&exchange, None)).await.is_none());
    }
    assert!(given_up > 3);
    // The store still works.
    let last = demo.say(&["after", "it"]).await;
    let history = demo.history().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=last.last_seq));
    for attempt in 0..60 {
        let parts = history.iter().filter(|stored| stored.json.contains(&format!("\"{attempt}.\""))).count();
        assert!(parts == 0 || parts == 3, "{parts} of 3 messages");
    }
    let tokens: i64 = history.iter().map(|stored| stored.json.len() as i64).sum();
    assert_eq!(demo.state().await.tokens, tokens);
}

/// Polls the future at most `most` times and returns its result if it is ready by then.
pub(crate) async fn polled<F: Future>(most: usize, future: F) -> Option<F::Output> {
    let (mut future, mut polls) = (pin!(future), 0);
    std::future::poll_fn(move |context| {
        if polls == most {
            return Poll::Ready(None);
        }
        polls += 1;
        future.as_mut().poll(context).map(Some)
    })
    .await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_exchanges_are_stored(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let long = "é".repeat(1 << 20);
    assert_eq!(demo.say(&["one", &long]).await.last_seq, 2);
    assert_eq!(demo.say(&["x"; 1000]).await.last_seq, 1002);
    let history = demo.history().await;
    assert_eq!(history[1].json, Message::text(precis::domain::message::Role::Assistant, &long).json());
    assert!(history.iter().map(|stored| stored.seq).eq(1..=1002));
}

/// On Postgres, large exchanges have connections of their own.
#[tokio::test]
async fn small_exchange_waits_for_one_large_exchange_on_sqlite() {
    const LARGE: usize = 8;
    let backend = Backend::sqlite().await;
    let demo = Conversation::on(&backend).await;
    let mut other = Sql::on(&backend).await;
    other.run("BEGIN IMMEDIATE").await;
    let long = "x".repeat(1 << 20);
    let mut appends = JoinSet::new();
    let capacity = Capacity::new(&CapacityLimits {
        key_share: 0.5,
        requests_in_flight: 100,
        running_requests: 100,
        bytes: 1 << 30,
        queue_timeout: Duration::from_mins(1),
    });
    for number in 0..=LARGE {
        let (session, text) = (demo.session(&format!("s{number}")), long.clone());
        // All are requests of one key.
        let work = Work::new(&capacity, ClientId(1), Kind::Request);
        appends.spawn(capacity::scope(work, async move {
            session.say(&[if number < LARGE { &text } else { "small" }]).await;
            number
        }));
        // The task runs on this thread until it waits for the writer.
        for _ in 0..9 {
            tokio::task::yield_now().await;
        }
    }
    other.run("COMMIT").await;
    let mut before = 0;
    while appends.join_next().await.expect("the small exchange").unwrap() < LARGE {
        before += 1;
    }
    assert!(before <= 2, "{before} large exchanges were stored before the small one");
    assert_eq!(appends.join_all().await.len(), LARGE - before);
}

/// SQLite appends a part of the messages at once, and the others by themselves.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_exchange_is_stored_in_order(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let size = |number: usize| 1 + number * 7919 % 9000 + if number.is_multiple_of(50) { 70_000 } else { 0 };
    let texts: Vec<_> = (0..400).map(|number| format!("{number} {}", "x".repeat(size(number)))).collect();
    assert!(texts.iter().map(String::len).sum::<usize>() > 2 << 20);
    let given = |number: usize| {
        let days = i64::try_from(number).unwrap();
        number.is_multiple_of(3).then(|| OffsetDateTime::UNIX_EPOCH + time::Duration::days(days))
    };
    let exchange = Exchange {
        message_times: (0..texts.len()).map(given).collect(),
        ..exchange(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let key = key("long", &exchange);
    let (before, long, after) =
        tokio::join!(demo.say(&["a"; 2]), demo.append(&exchange, Some(&key)), demo.say(&["b"; 2]));
    let long = recorded(long);
    assert_eq!((long.last_seq - long.first_seq + 1, before.replayed, after.replayed), (400, false, false));
    let history = demo.history().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=404));
    let stored = history.iter().skip_while(|stored| stored.seq < long.first_seq);
    for ((number, (message, _)), stored) in exchange.messages.iter().enumerate().zip(stored) {
        assert_eq!(stored.json, message.json(), "{number}");
        assert_eq!(stored.created_at, given(number).unwrap_or(long.created_at), "{number}");
    }
    let again = recorded(demo.append(&exchange, Some(&key)).await);
    assert_eq!((again.first_seq, again.last_seq, again.replayed), (long.first_seq, long.last_seq, true));
}

/// Each exchange is small enough for a batch, and together they are larger than what SQLite appends at once.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_batch_is_stored(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let sessions = ["a", "b", "c"].map(|id| demo.session(id));
    let appends = (0..30).map(|number| {
        let session = &sessions[number % 3];
        let exchange = exchange(&[&format!("{number}"), &"é".repeat(50 * 1024)]);
        async move { (number, session.record(&exchange).await) }
    });
    let appended = join_all(appends).await;
    for (place, session) in sessions.iter().enumerate() {
        let history = session.history().await;
        assert!(history.iter().map(|stored| stored.seq).eq(1..=20));
        for (number, exchange) in appended.iter().filter(|(number, _)| number % 3 == place) {
            assert_eq!(exchange.last_seq, exchange.first_seq + 1);
            let of_exchange = |seq| history.iter().find(|stored| stored.seq == seq).unwrap();
            let (first, last) = (of_exchange(exchange.first_seq), of_exchange(exchange.last_seq));
            assert!(first.json.contains(&format!("\"{number}\"")) && last.json.len() > 100 * 1024);
            assert_eq!(first.created_at, exchange.created_at);
        }
    }
}

/// An exchange without a time, one with a time, and one with times of its messages share transactions.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn given_times_are_stored_with_the_messages_only(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let day = |day| OffsetDateTime::UNIX_EPOCH + time::Duration::days(day) + time::Duration::microseconds(7);
    let sessions: Vec<_> =
        (0..9).map(|id| demo.tenant(&format!("t{}", id % 2)).session(&format!("s{id}"))).collect();
    let before = OffsetDateTime::now_utc() - time::Duration::seconds(1);
    for round in 1..4 {
        let appends = sessions.iter().zip(0..).map(async |(session, number)| {
            let plain = exchange(&["a", "b", "c"]);
            let exchange = match number % 3 {
                0 => plain,
                1 => Exchange { created_at: Some(day(round)), ..plain },
                _ => Exchange { message_times: vec![Some(day(9 - round)), None], ..plain },
            };
            session.record(&exchange).await
        });
        for (appended, number) in join_all(appends).await.iter().zip(0..) {
            assert_eq!(appended.created_at == day(round), number % 3 == 1, "{number}: {appended:?}");
        }
    }
    for (session, number) in sessions.iter().zip(0..) {
        let given = match number % 3 {
            0 => [None; 9],
            1 => [1, 1, 1, 2, 2, 2, 3, 3, 3].map(Some),
            _ => [Some(8), None, None, Some(7), None, None, Some(6), None, None],
        };
        for (message, given) in session.history().await.iter().zip(given) {
            match given {
                Some(given) => assert_eq!(message.created_at, day(given)),
                None => assert!(message.created_at > before, "{message:?}"),
            }
        }
        let state = session.state().await;
        assert!(state.created_at > before && state.updated_at > before, "{state:?}");
    }
}

/// A rejected exchange leaves no row, neither of the session nor of its key.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_that_expects_another_last_message_writes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let expecting = |last_seq| Exchange {
        expected_last_seq: Some(last_seq),
        metadata: Some(r#"{"a":1}"#.to_owned()),
        ..exchange(&["x", "y"])
    };
    for last_seq in [0, 2] {
        let rows = sql.rows().await;
        for wrong in [1, 3, i64::MAX].into_iter().chain((last_seq > 0).then_some(0)) {
            let wrong = expecting(wrong);
            for key in [None, Some(key("k", &wrong))] {
                let outcome = demo.append(&wrong, key.as_ref()).await;
                assert_eq!(outcome, AppendOutcome::LastSeqMismatch { last_seq });
            }
        }
        assert_eq!(sql.rows().await, rows);
        let right = expecting(last_seq);
        let key = key(&format!("k{last_seq}"), &right);
        let stored = recorded(demo.append(&right, Some(&key)).await);
        assert_eq!((stored.first_seq, stored.replayed), (last_seq + 1, false));
        let again = recorded(demo.append(&right, Some(&key)).await);
        assert_eq!((again.first_seq, again.last_seq, again.replayed), (last_seq + 1, last_seq + 2, true));
    }
    let head = demo.store.session_head(&demo.tenant, &demo.session).await.unwrap().unwrap();
    for (incarnation, is_appended) in [(uuid::Uuid::new_v4(), false), (head.incarnation, true)] {
        let request = AppendRequest::new(&demo.tenant, &demo.session, expecting(4), None);
        let request = AppendRequest { expected_incarnation: Some(incarnation), ..request };
        let outcome = demo.store.append_exchange(request).await.unwrap();
        assert_eq!(matches!(outcome, AppendOutcome::Appended(_)), is_appended, "{outcome:?}");
    }
}

/// Otherwise, a synchronisation would find the incarnation, append, and find it changed, without an end.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_in_another_hour_follows_the_incarnation_that_it_expects(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let mut sql = Sql::on(&backend).await;
    let earlier = OffsetDateTime::now_utc() - time::Duration::hours(2);
    let hour = sql.set_activity("demo", earlier).await;
    let head = async || demo.store.session_head(&demo.tenant, &demo.session).await.unwrap().unwrap();
    let expected = head().await.incarnation;
    let request = AppendRequest::new(&demo.tenant, &demo.session, exchange(&["c", "d"]), None);
    let request = AppendRequest { expected_incarnation: Some(expected), ..request };
    let outcome = demo.store.append_exchange(request).await.unwrap();
    assert!(matches!(outcome, AppendOutcome::Appended(_)), "{outcome:?}");
    assert_eq!(head().await.incarnation, expected);
    assert!(sql.number("SELECT activity_hour FROM sessions").await > hour);
}

/// Uses two stores, like two replicas. Exchanges without an expectation come in between.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_the_exchanges_that_expect_the_same_message_is_stored(backend: Backend) {
    const WRITERS: usize = 8;
    let replicas = [Conversation::on(&backend).await, Conversation::on(&backend).await];
    for _ in 0..10 {
        let last_seq = replicas[0].find().await.map_or(0, |state| state.last_seq);
        let appends = (0..WRITERS).map(async |writer| {
            let expected_last_seq = (writer > 0).then_some(last_seq);
            let exchange = Exchange { expected_last_seq, ..exchange(&[&format!("{writer}"), "x"]) };
            replicas[writer % 2].append(&exchange, None).await
        });
        let outcomes = join_all(appends).await;
        let mut firsts: Vec<i64> = Vec::new();
        for outcome in &outcomes {
            match outcome {
                AppendOutcome::Appended(stored) => firsts.push(stored.first_seq),
                AppendOutcome::LastSeqMismatch { last_seq: actual } => assert!(*actual > last_seq),
                other => panic!("{other:?}"),
            }
        }
        firsts.sort_unstable();
        // Either the exchange without an expectation was first, and no other is stored, or it followed one of the others.
        let plain = matches!(&outcomes[0], AppendOutcome::Appended(first) if first.first_seq == last_seq + 1);
        let expected = if plain { vec![last_seq + 1] } else { vec![last_seq + 1, last_seq + 3] };
        assert_eq!(firsts, expected, "{outcomes:?}");
        assert_eq!(replicas[0].state().await.last_seq, firsts.len() as i64 * 2 + last_seq);
    }
}

/// Exchanges that arrive while another transaction blocks the store share the next ones.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_of_a_batch_are_decided_in_the_order_of_their_arrival(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let acme = demo.tenant("acme");
    let plain = || exchange(&["a", "b"]);
    let of = |user: &str| exchange_of(user, &["a", "b"]);
    let expecting = |last_seq| Exchange { expected_last_seq: Some(last_seq), ..plain() };
    let (named, other) = (key("k", &plain()), key("k", &exchange(&["other"])));
    // The session and the exchange, its key, and the messages that it gets, or `None` if it is rejected.
    let appends = [
        (demo.session("keys"), plain(), Some(&named), Some((1, false))),
        (demo.session("keys"), plain(), Some(&named), Some((1, true))),
        (demo.session("keys"), exchange(&["other"]), Some(&other), None),
        (acme.session("keys"), plain(), Some(&named), Some((1, false))),
        (demo.session("other"), plain(), Some(&named), Some((1, false))),
        (demo.session("users"), plain(), None, Some((1, false))),
        (demo.session("users"), of("ada"), None, Some((3, false))),
        (demo.session("users"), of("bob"), None, None),
        (acme.session("users"), of("bob"), None, Some((1, false))),
        (demo.session("users"), of("ada"), None, Some((5, false))),
        (demo.session("expecting"), expecting(2), None, None),
        (demo.session("expecting"), expecting(0), None, Some((1, false))),
        (demo.session("expecting"), expecting(0), None, None),
        (demo.session("expecting"), expecting(2), None, Some((3, false))),
        (acme.session("expecting"), expecting(2), None, None),
    ];
    for round in 0..4 {
        let tenant = |conversation: &Conversation| {
            conversation.tenant(&format!("{}{round}", conversation.tenant.as_str()))
        };
        // The first exchange begins a batch of its own, and the others follow together.
        let first = tenant(&demo).session("first");
        let first = async move { first.say(&["first"]).await };
        let others = appends.iter().map(|(session, exchange, key, _)| {
            let session = tenant(session);
            async move { session.append(exchange, *key).await }
        });
        let (_, outcomes) = tokio::join!(first, join_all(others));
        for ((session, _, _, expected), outcome) in appends.iter().zip(&outcomes) {
            let stored = match outcome {
                AppendOutcome::Appended(stored) => Some((stored.first_seq, stored.replayed)),
                AppendOutcome::KeyReused
                | AppendOutcome::UserMismatch
                | AppendOutcome::LastSeqMismatch { .. } => None,
            };
            assert_eq!(stored, *expected, "{}: {outcomes:?}", session.session);
        }
        assert_eq!(outcomes[2], AppendOutcome::KeyReused);
        assert_eq!(outcomes[7], AppendOutcome::UserMismatch);
        assert_eq!(outcomes[12], AppendOutcome::LastSeqMismatch { last_seq: 2 });
        for (session, user, last_seq) in
            [("keys", None, 2), ("users", Some(user_id("ada")), 6), ("expecting", None, 4)]
        {
            let session = tenant(&demo.session(session));
            let (state, history) = (session.state().await, session.history().await);
            assert_eq!((state.user_id, state.last_seq, history.len() as i64), (user, last_seq, last_seq));
            assert_eq!(
                state.stored_bytes,
                history.iter().map(|stored| stored.json.len() as i64).sum::<i64>()
            );
        }
        let of_ada = SearchFilter { user: Some(user_id("ada")), ..SearchFilter::default() };
        let found = tenant(&demo).lookup(&of_ada, &probe(&[&["b"]])).await;
        assert_eq!(seqs(&found), [6, 4, 2], "messages from before the session had its user are found, too");
        assert_eq!(tenant(&acme).indexed().await.len(), 4);
    }
}

/// Covers a clock that is set back and replicas with different clocks.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_of_a_session_never_decrease(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["now", "here"]).await;
    let mut sql = Sql::on(&backend).await;
    let later = OffsetDateTime::now_utc().replace_nanosecond(123_456_000).unwrap() + time::Duration::days(1);
    let hour = sql.set_activity("demo", later).await;
    let recorded = demo.say(&["back", "again"]).await;
    assert_eq!(recorded.created_at, later);
    assert_eq!(demo.state().await.updated_at, later);
    assert_eq!(demo.history().await[3].created_at, later);
    assert_eq!(sql.number("SELECT activity_hour FROM sessions").await, hour);
}
