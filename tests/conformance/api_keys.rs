//! Stored API keys, and the authenticator that uses them.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::api_key::{ApiKey, KeyRecord, RANDOM_BYTES, Scope};
use precis::domain::id::{KeyName, TenantId};
use precis::service::keys::authenticator::{AuthError, Authenticator, Staleness};
use precis::service::keys::create_key;
use precis::storage::NewApiKey;
use precis::storage::{Store, StoreError};
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;

fn key(seed: u8) -> ApiKey {
    ApiKey::new(&[seed; RANDOM_BYTES])
}

pub(crate) fn new_key(tenant: &str, seed: u8) -> NewApiKey {
    let key = key(seed);
    let name = KeyName::new(format!("é {seed}")).unwrap();
    let tenant = TenantId::new(tenant).unwrap();
    NewApiKey { id: key.id().clone(), hash: key.hash(), tenant, name: Some(name), scope: Scope::Write }
}

async fn create(store: &Arc<Store>, new: &NewApiKey) -> KeyRecord {
    store.create_api_key(new).await.unwrap().expect("a new id")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_key_is_found_by_its_id(backend: Backend) {
    let store = backend.store().await;
    assert!(!store.any_api_key().await.unwrap());
    assert!(store.api_key(key(1).id()).await.unwrap().is_none());
    for (seed, scope) in (1..).zip(Scope::ALL) {
        let mut new = NewApiKey { scope, ..new_key("acme ü", seed) };
        new.name = new.name.filter(|_| scope != Scope::Read);
        let record = create(&store, &new).await;
        assert_eq!((&record.id, &record.tenant, &record.name), (&new.id, &new.tenant, &new.name));
        assert_eq!((record.scope, record.revoked_at), (scope, None));
        let age = time::OffsetDateTime::now_utc() - record.created_at;
        assert!(age.abs() < time::Duration::minutes(1), "{age}");
        let found = store.api_key(&new.id).await.unwrap().expect("it is there");
        assert_eq!(found.record, record);
        assert!(found.hash.matches(&key(seed).hash()) && !found.hash.matches(&key(9).hash()));
        assert!(store.any_api_key().await.unwrap());
    }
    assert!(store.api_key(key(9).id()).await.unwrap().is_none());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_is_stored_as_hash_only(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let key = create_key(&demo.store, &demo.tenant, None, Scope::Admin).await.unwrap();
    let rows = Sql::on(&backend).await.rows().await;
    let secret = &key.expose()["precis_".len() + key.id().as_str().len()..];
    assert!(rows.iter().any(|row| row.contains(key.id().as_str())), "{rows:?}");
    for part in [secret, &secret[..20], &secret[20..40]] {
        assert!(!rows.iter().any(|row| row.contains(part)), "{rows:?}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicate_key_id_is_not_stored(backend: Backend) {
    let store = backend.store().await;
    let record = create(&store, &new_key("acme", 1)).await;
    let other = NewApiKey { hash: key(2).hash(), ..new_key("other", 1) };
    assert_eq!(store.create_api_key(&other).await.unwrap(), None);
    let kept = store.api_key(&other.id).await.unwrap().unwrap();
    assert_eq!(kept.record, record);
    assert!(kept.hash.matches(&key(1).hash()));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_listed_oldest_first(backend: Backend) {
    let store = backend.store().await;
    let mut all = Vec::new();
    for (seed, tenant) in [(3, "acme"), (1, "other"), (2, "acme"), (4, "Acme")] {
        all.push(create(&store, &new_key(tenant, seed)).await);
        // Ensures distinct times.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    store.revoke_api_key(key(3).id()).await.unwrap();
    all[0].revoked_at = store.api_keys(None).await.unwrap()[0].revoked_at;
    assert!(all[0].revoked_at.is_some());
    assert_eq!(store.api_keys(None).await.unwrap(), all);
    let acme = TenantId::new("acme").unwrap();
    assert_eq!(store.api_keys(Some(&acme)).await.unwrap(), [all[0].clone(), all[2].clone()]);
    assert_eq!(store.api_keys(Some(&TenantId::new("nobody").unwrap())).await.unwrap(), []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_key_stays_with_the_time_of_its_first_revocation(backend: Backend) {
    let store = backend.store().await;
    let (id, other) = (key(1).id().clone(), key(2).id().clone());
    assert!(!store.revoke_api_key(&id).await.unwrap());
    create(&store, &new_key("acme", 1)).await;
    create(&store, &new_key("acme", 2)).await;
    assert!(store.revoke_api_key(&id).await.unwrap());
    let revoked = store.api_key(&id).await.unwrap().unwrap().record;
    assert!(revoked.revoked_at.unwrap() >= revoked.created_at);
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(store.revoke_api_key(&id).await.unwrap());
    assert_eq!(store.api_key(&id).await.unwrap().unwrap().record, revoked, "the first time stays");
    assert_eq!(store.api_key(&other).await.unwrap().unwrap().record.revoked_at, None);
    store.revoke_api_key(&other).await.unwrap();
    assert!(store.any_api_key().await.unwrap(), "a service without a valid key stays closed");
    assert_eq!(store.create_api_key(&new_key("acme", 1)).await.unwrap(), None);
}

const NO_TIME: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_hours(1);

/// Returns `tenant/scope` of the authenticated principal, or the reason of the rejection.
async fn principal_of(authenticator: &Authenticator, key: &ApiKey) -> String {
    describe(authenticator.with_key(key, Staleness::Fresh).await)
}

async fn principal_without_key(authenticator: &Authenticator) -> String {
    describe(authenticator.without_key(Staleness::Fresh).await)
}

fn describe(known: Result<precis::service::keys::authenticator::Principal, AuthError>) -> String {
    match known {
        Ok(caller) => format!("{}/{}", caller.tenant, caller.scope),
        Err(AuthError::Unauthorized) => "unauthorized".to_owned(),
        Err(AuthError::Store(StoreError::Unavailable(_))) => "away".to_owned(),
        Err(other) => panic!("{other:?}"),
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authenticator_caches_keys_for_their_ttl(backend: Backend) {
    let store = backend.store().await;
    let new = |ttl| Authenticator::new(store.clone(), true, ttl);
    let (brief, long) = (new(NO_TIME), new(LONG));
    for authenticator in [&brief, &long] {
        assert_eq!(principal_of(authenticator, &key(1)).await, "unauthorized");
        assert_eq!(principal_without_key(authenticator).await, "default/admin");
    }
    create(&store, &new_key("acme", 1)).await;
    assert_eq!(
        (principal_of(&brief, &key(1)).await, principal_without_key(&brief).await),
        ("acme/write".into(), "unauthorized".into())
    );
    assert_eq!(
        (principal_of(&long, &key(1)).await, principal_without_key(&long).await),
        ("unauthorized".into(), "default/admin".into())
    );
    let long = new(LONG);
    assert_eq!(principal_of(&long, &key(1)).await, "acme/write");
    store.revoke_api_key(key(1).id()).await.unwrap();
    assert_eq!(
        (principal_of(&brief, &key(1)).await, principal_of(&long, &key(1)).await),
        ("unauthorized".into(), "acme/write".into())
    );
    // Clones, one per connection, share the cache.
    assert_eq!(principal_of(&long.clone(), &key(1)).await, "acme/write");
    let short = new(Duration::from_millis(50));
    create(&store, &new_key("other", 2)).await;
    assert_eq!(principal_of(&short, &key(2)).await, "other/write");
    store.revoke_api_key(key(2).id()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(principal_of(&short, &key(2)).await, "unauthorized");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_store_is_not_reported_as_invalid_key(backend: Backend) {
    let store = backend.store().await;
    create(&store, &new_key("acme", 1)).await;
    create(&store, &new_key("acme", 2)).await;
    store.revoke_api_key(key(2).id()).await.unwrap();
    let new = |ttl| Authenticator::new(store.clone(), true, ttl);
    let (brief, long, ignorant) = (new(NO_TIME), new(LONG), new(LONG));
    for authenticator in [&brief, &long] {
        assert_eq!(principal_of(authenticator, &key(1)).await, "acme/write");
        assert_eq!(principal_of(authenticator, &key(2)).await, "unauthorized");
        assert_eq!(principal_of(authenticator, &key(3)).await, "unauthorized");
    }
    store.close().await;
    assert_eq!(principal_of(&long, &key(1)).await, "acme/write");
    assert_eq!(
        (principal_of(&long, &key(2)).await, principal_of(&long, &key(3)).await),
        ("unauthorized".into(), "unauthorized".into())
    );
    for seed in [1, 2, 3] {
        assert_eq!(principal_of(&brief, &key(seed)).await, "away", "{seed}");
        assert_eq!(principal_of(&ignorant, &key(seed)).await, "away", "{seed}");
    }
    assert_eq!(principal_without_key(&ignorant).await, "away");
    // While the store is unavailable, the last known state applies.
    let while_away = async |seed| describe(brief.with_key(&key(seed), Staleness::AllowStale).await);
    assert_eq!((while_away(1).await, while_away(2).await), ("acme/write".into(), "unauthorized".into()));
    assert_eq!(while_away(4).await, "away");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_key_is_accepted_only_if_allowed_and_no_key_exists(backend: Backend) {
    let store = backend.store().await;
    let open = Authenticator::new(store.clone(), true, NO_TIME);
    let closed = Authenticator::new(store.clone(), false, NO_TIME);
    assert_eq!(
        (principal_without_key(&open).await, principal_without_key(&closed).await),
        ("default/admin".into(), "unauthorized".into())
    );
    assert_eq!(principal_of(&open, &key(1)).await, "unauthorized", "who sends a key means a tenant");
    create(&store, &new_key("acme", 1)).await;
    assert_eq!(
        (principal_without_key(&open).await, principal_without_key(&closed).await),
        ("unauthorized".into(), "unauthorized".into())
    );
}
