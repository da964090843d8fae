//! Token usage of a tenant per day.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use test_case::test_case;

async fn add_usage(demo: &Conversation, tokens: u64) {
    demo.store.add_token_usage(&demo.tenant, tokens).await.unwrap();
}

async fn usage_today(demo: &Conversation) -> i64 {
    demo.store.tokens_used_today(&demo.tenant).await.unwrap()
}

/// Returns the stored days, relative to today, with the usage of each.
async fn usage_by_day(sql: &mut Sql) -> Vec<String> {
    let today = today(sql);
    let account = format!("SELECT (day - {today}) || ': ' || tokens FROM token_usage ORDER BY day");
    sql.texts(&account).await
}

/// Returns the current day as an SQL expression, by the clock of the store.
fn today(sql: &Sql) -> &'static str {
    match sql {
        Sql::Sqlite(_) => "unixepoch() / 86400",
        Sql::Postgres(_) => "floor(extract(epoch FROM now()) / 86400)::bigint",
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_added_up(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for (tokens, sum) in [
        (0, 0),
        (1, 1),
        (20, 21),
        (5_000_000_000, 5_000_000_021),
        (i64::MAX as u64 - 5_000_000_021, i64::MAX),
        (1, i64::MAX),
        (u64::MAX, i64::MAX),
    ] {
        add_usage(&demo, tokens).await;
        assert_eq!(usage_today(&demo).await, sum);
    }
    assert_eq!(usage_today(&Conversation::on(&backend).await).await, i64::MAX, "in the database");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_counted_per_day(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let today = today(&sql);
    for (tokens, day) in [(100, "- 1"), (200, "+ 1"), (400, "- 365")] {
        sql.run(&format!("INSERT INTO token_usage VALUES ('default', {today} {day}, {tokens})")).await;
    }
    assert_eq!(usage_today(&demo).await, 0);
    add_usage(&demo, 7).await;
    add_usage(&demo, 8).await;
    assert_eq!(usage_today(&demo).await, 15);
    assert_eq!(usage_by_day(&mut sql).await, ["-365: 400", "-1: 100", "0: 15", "1: 200"]);
    sql.run("UPDATE token_usage SET day = day - 1000").await;
    assert_eq!(usage_today(&demo).await, 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_usage_is_added_up(backend: Backend) {
    // Several stores, like replicas, on Postgres; SQLite supports only one.
    let one = Conversation::on(&backend).await;
    let two =
        if matches!(backend, Backend::Sqlite(_)) { one.clone() } else { Conversation::on(&backend).await };
    let spends = (1..=50).flat_map(|tokens| [add_usage(&one, tokens), add_usage(&two, tokens)]);
    join_all(spends).await;
    assert_eq!(usage_today(&one).await, 50 * 51);
}
