//! What a tenant's consolidations spend in tokens, by the day.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use test_case::test_case;

async fn spend(demo: &Conversation, tokens: u64) {
    demo.store.add_token_usage(&demo.tenant, tokens).await.unwrap();
}

async fn spent(demo: &Conversation) -> i64 {
    demo.store.tokens_used_today(&demo.tenant).await.unwrap()
}

/// The days of the account, as days from today, and what was spent on each.
async fn account(sql: &mut Sql) -> Vec<String> {
    let today = today(sql);
    let account = format!("SELECT (day - {today}) || ': ' || tokens FROM token_usage ORDER BY day");
    sql.texts(&account).await
}

/// Today in SQL, by the clock that the store goes by.
fn today(sql: &Sql) -> &'static str {
    match sql {
        Sql::Sqlite(_) => "unixepoch() / 86400",
        Sql::Postgres(_) => "floor(extract(epoch FROM now()) / 86400)::bigint",
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_spent_adds_up(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sum = 0;
    for tokens in [0, 1, 20, 0, 5_000_000_000] {
        assert_eq!(spent(&demo).await, sum);
        spend(&demo, tokens).await;
        sum += tokens as i64;
    }
    assert_eq!(spent(&demo).await, sum);
    assert_eq!(spent(&Conversation::on(&backend).await).await, sum, "in the database, not in the process");
    assert_eq!(account(&mut Sql::on(&backend).await).await, ["0: 5000000021"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_tenant_has_its_own_account(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let tenants = ["acme", "Acme", "acme ", "é"].map(|name| demo.tenant(name));
    for (tokens, tenant) in (1..).zip(&tenants) {
        spend(tenant, tokens).await;
    }
    for (tokens, tenant) in (1..).zip(&tenants) {
        assert_eq!(spent(tenant).await, tokens);
    }
    assert_eq!(spent(&demo).await, 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_day_begins_anew(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let today = today(&sql);
    for (tokens, day) in [(100, "- 1"), (200, "+ 1"), (400, "- 365")] {
        sql.run(&format!("INSERT INTO token_usage VALUES ('default', {today} {day}, {tokens})")).await;
    }
    assert_eq!(spent(&demo).await, 0);
    spend(&demo, 7).await;
    spend(&demo, 8).await;
    assert_eq!(spent(&demo).await, 15);
    assert_eq!(account(&mut sql).await, ["-365: 400", "-1: 100", "0: 15", "1: 200"]);
    sql.run("UPDATE token_usage SET day = day - 1000").await;
    assert_eq!(spent(&demo).await, 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sum_stops_where_the_column_ends(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for tokens in [u64::MAX, 1, i64::MAX as u64, u64::MAX] {
        spend(&demo, tokens).await;
        assert_eq!(spent(&demo).await, i64::MAX);
    }
    let other = demo.tenant("other");
    for (tokens, sum) in [(i64::MAX as u64 - 1, i64::MAX - 1), (1, i64::MAX), (1, i64::MAX)] {
        spend(&other, tokens).await;
        assert_eq!(spent(&other).await, sum);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spending_at_once_adds_up(backend: Backend) {
    // As replicas over one server; an embedded database has one store.
    let one = Conversation::on(&backend).await;
    let two =
        if matches!(backend, Backend::Sqlite(_)) { one.clone() } else { Conversation::on(&backend).await };
    let spends = (1..=50).flat_map(|tokens| [spend(&one, tokens), spend(&two, tokens)]);
    join_all(spends).await;
    assert_eq!(spent(&one).await, 50 * 51);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_leaves_the_account(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    spend(&demo, 7).await;
    assert!(demo.store.erase_user(&demo.tenant, &demo.state().await.user_id).await.unwrap());
    assert_eq!(spent(&demo).await, 7);
}
