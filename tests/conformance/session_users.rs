//! Binding sessions to users, before and after their first exchange.

use crate::conversation::{
    ALL, Conversation, LONG, exchange, exchange_of, key, recorded, session_id, user_id,
};
use crate::search::probe;
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use precis::domain::id::UserId;
use precis::domain::tail::TailLimit;
use precis::storage::SearchFilter;
use precis::storage::{AppendOutcome, AppendRequest, LeaseCondition, SessionFilter, SessionOwner};
use std::collections::BTreeSet;
use test_case::test_case;
use uuid::Uuid;

async fn bind(demo: &Conversation, user: &str) -> UserId {
    demo.store.bind_session(&demo.tenant, &demo.session, &user_id(user)).await.unwrap()
}

async fn owner(demo: &Conversation) -> SessionOwner {
    demo.store.session_owner(&demo.tenant, &demo.session).await.unwrap()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bound_session_exists_from_its_first_exchange_on(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!(owner(&demo).await, SessionOwner::default());
    assert_eq!(bind(&demo, "ada").await, user_id("ada"));
    assert_eq!(bind(&demo, "bo").await, user_id("ada"));
    assert_eq!(owner(&demo).await, SessionOwner { user: Some(user_id("ada")), exists: false });
    let (store, tenant, session, ada) = (&demo.store, &demo.tenant, &demo.session, user_id("ada"));
    let of_ada = SessionFilter { user: Some(&ada), ..SessionFilter::default() };
    assert_eq!(demo.find().await, None);
    assert_eq!(demo.page(ALL).await, None);
    assert_eq!(demo.revisions().await, None);
    assert_eq!(store.sessions(tenant, SessionFilter::default(), None, 9, 999).await.unwrap().items, []);
    assert_eq!(store.sessions(tenant, of_ada, None, 9, 999).await.unwrap().items, []);
    assert_eq!(store.set_metadata(tenant, session, "{}").await.unwrap(), None);
    assert_eq!(demo.take(Uuid::new_v4(), LeaseCondition::Force, LONG).await, None);
    assert_eq!(demo.restore(0).await, None);
    // Another tenant has another session.
    assert_eq!(owner(&demo.tenant("acme")).await, SessionOwner::default());

    assert_eq!(demo.append(&exchange_of("bo", &["a"]), None).await, AppendOutcome::UserMismatch);
    assert_eq!(demo.find().await, None);
    let first = demo.say(&["a", "b"]).await;
    assert_eq!((first.first_seq, first.user_id), (1, Some(user_id("ada"))));
    let state = demo.state().await;
    assert_eq!((state.user_id, state.created_at), (Some(user_id("ada")), first.created_at));
    assert_eq!(owner(&demo).await, SessionOwner { user: Some(user_id("ada")), exists: true });
    assert_eq!(store.sessions(tenant, of_ada, None, 9, 999).await.unwrap().items.len(), 1);
}

/// Uses two stores, like two replicas. Half of the requests are exchanges.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_concurrent_requests_binds_the_session(backend: Backend) {
    let replicas = [Conversation::on(&backend).await, Conversation::on(&backend).await];
    for round in 0..10 {
        let requests = (0..8).map(|at| {
            let demo = replicas[at % 2].session(&format!("s{round}"));
            async move {
                let user = format!("u{at}");
                if at % 4 < 2 {
                    return Some(bind(&demo, &user).await);
                }
                match demo.append(&exchange_of(&user, &["a"]), None).await {
                    AppendOutcome::Appended(stored) => stored.user_id,
                    _ => None,
                }
            }
        });
        let seen: BTreeSet<UserId> = join_all(requests).await.into_iter().flatten().collect();
        assert_eq!(seen.len(), 1, "{seen:?}");
        let demo = replicas[0].session(&format!("s{round}"));
        assert_eq!(owner(&demo).await.user.as_ref(), seen.first());
        let stored = demo.find().await.map_or(0, |state| state.last_seq);
        assert!(stored <= 1, "exchanges of other users are stored");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_without_user_is_bound_by_the_first_that_names_one(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let unnamed = exchange(&["plum", "b"]);
    let unnamed_key = key("unnamed", &unnamed);
    let first = recorded(demo.append(&unnamed, Some(&unnamed_key)).await);
    assert_eq!((first.user_id, demo.state().await.user_id), (None, None));
    demo.remember(&user_id("ada"), "Ada's").await;
    let load = async |user: Option<&UserId>| demo.context(user, TailLimit { messages: 9, bytes: 9999 }).await;
    assert!(load(None).await.memory.is_none());
    let (before, ada) = (load(Some(&user_id("ada"))).await, user_id("ada"));
    assert_eq!(before.memory.map(|memory| memory.content.clone()).as_deref(), Some("Ada's"));

    let named = demo.record(&exchange_of("ada", &["c"])).await;
    assert_eq!((named.first_seq, named.user_id), (3, Some(ada.clone())));
    assert_ne!(named.incarnation, first.incarnation, "copies without the user would stay valid");
    assert_eq!(demo.append(&exchange_of("bo", &["d"]), None).await, AppendOutcome::UserMismatch);
    let next = demo.say(&["e"]).await;
    assert_eq!((next.user_id, next.incarnation), (Some(ada.clone()), named.incarnation));
    // Repeating a request returns the same result.
    let replayed = recorded(demo.append(&unnamed, Some(&unnamed_key)).await);
    assert_eq!((replayed.replayed, replayed.user_id), (true, None));

    // The default user applies only if neither the exchange nor the session has a user.
    for (session, named, default_user, expected) in [
        ("t", None, Some("bo"), Some("bo")),
        ("t", None, Some("cy"), Some("bo")),
        ("u", Some("ada"), Some("bo"), Some("ada")),
        ("v", None, None, None),
        ("v", None, Some("bo"), Some("bo")),
    ] {
        let exchange = named.map_or_else(|| exchange(&["x"]), |user| exchange_of(user, &["x"]));
        let default_user = default_user.map(user_id);
        let request = AppendRequest::new(&demo.tenant, &session_id(session), exchange, None);
        let outcome = demo.store.append_exchange(AppendRequest { default_user, ..request }).await.unwrap();
        assert_eq!(recorded(outcome).user_id, expected.map(user_id), "{session}");
    }
}

/// The session is bound by a request without messages, or by an exchange.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_finds_messages_from_before_the_session_had_a_user(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let of_ada = SearchFilter { user: Some(user_id("ada")), ..SearchFilter::default() };
    let mut expected = 0;
    for by_exchange in [false, true] {
        let session = demo.session(&format!("s{by_exchange}"));
        session.say(&["plum", "a"]).await;
        session.say(&["plum", &"x".repeat(1 << 20), "plum"]).await;
        session.say(&["plum"; 200]).await;
        if by_exchange {
            session.record(&exchange_of("ada", &["plum"])).await;
            expected += 1;
        } else {
            bind(&session, "ada").await;
        }
        expected += 203;
        assert_eq!(demo.lookup(&of_ada, &probe(&[&["plum"]])).await.len(), expected, "{by_exchange}");
    }
    let entries = i64::try_from(demo.indexed().await.len()).unwrap();
    assert_eq!(entries, Sql::on(&backend).await.number("SELECT count(*) FROM messages").await);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_removes_the_user_of_a_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    bind(&demo, "ada").await;
    assert!(demo.erase().await);
    assert_eq!(owner(&demo).await, SessionOwner::default());
    bind(&demo, "bo").await;
    bind(&demo.session("other"), "ada").await;
    assert!(demo.store.erase_user(&demo.tenant, &user_id("bo")).await.unwrap());
    assert_eq!(owner(&demo).await, SessionOwner::default());
    assert_eq!(owner(&demo.session("other")).await.user, Some(user_id("ada")));
}
