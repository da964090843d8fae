//! Attacks on the share of another tenant.

use crate::service::{Bystander, Service, flood};
use crate::support::backend::Backend;
use crate::support::factor::test_factor;
use serde_json::{Value, json};
use std::time::Duration;
use test_case::test_case;

/// Returns the time of each measurement. `scripts/abuse` takes longer ones, because the 99th percentile of a hundred requests is nearly the
/// longest.
fn duration() -> Duration {
    Duration::from_secs(2 * u64::from(test_factor()))
}

/// Each attack is a number of clients that repeat a request. Without a factor, a third of them is measured.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run and scripts/abuse"]
async fn large_requests_of_one_tenant_leave_others_their_share(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let bystander = Bystander::new(&service, "bystander").await;
    for part in 0..10 {
        let message = |number: usize| {
            let words = (0..1500).map(|word| format!(" f{}", (number * 1500 + word) * 7919 % 50_021));
            json!({"role": "user", "content": format!("the ferry{}", words.collect::<String>())})
        };
        let messages: Vec<Value> = (0..50).map(|number| message(part * 50 + number)).collect();
        attacker.record("words", &messages).await;
    }
    attacker.get("/search?q=ferry").await.ok(200);
    let idle = bystander.measure(duration(), async {}).await;
    println!("idle: {}", idle.figures());
    let idle_searches = bystander.measure_searches(duration(), async {}).await;
    println!("idle: searches: {}", idle_searches.figures());
    let marks = |bytes: usize| json!({"user_message": "!".repeat(bytes), "assistant_reply": "b"}).to_string();
    let four =
        json!({"messages": vec![json!({"role": "user", "content": "!".repeat(1 << 20)}); 4]}).to_string();
    let question = json!({"user_message": "a b! ".repeat(400_000)}).to_string();
    let exchanges = |name: &str| format!("/sessions/{name}/exchanges");
    let attacks = [
        ("exchanges of 4 MB", 4, "POST", exchanges("a"), four),
        ("exchanges of 1 MB", 6, "POST", exchanges("b"), marks(1 << 20)),
        ("contexts with 2 MB", 4, "POST", "/sessions/c/context".to_owned(), question),
        ("searches", 6, "GET", "/search?q=ferry&limit=50".to_owned(), String::new()),
        ("searches with prefixes", 8, "GET", "/search?q=f*+ferr*".to_owned(), String::new()),
        ("small contexts", 100, "POST", "/sessions/d/context".to_owned(), String::new()),
    ];
    let step = if test_factor() > 1 { 1 } else { 3 };
    for (attack, clients, method, path, body) in attacks.into_iter().step_by(step) {
        let flooding = || {
            let (attacker, path, body) = (attacker.clone(), path.clone(), body.clone());
            async move {
                let request = async move |_| {
                    let request = attacker.request(method.parse().expect("a method"), &path);
                    let request = if body.is_empty() { request } else { request.json(&body) };
                    request.unchecked().await.map_or(0, |response| response.status().as_u16())
                };
                let statuses = flood(clients, duration(), request).await;
                println!("{attack} by {clients} clients: {statuses:?}");
            }
        };
        let served = bystander.measure(duration(), flooding()).await;
        println!("beside them: {}; peak {} MB", served.figures(), service.peak_memory());
        let searches = bystander.measure_searches(duration(), flooding()).await;
        println!("beside them: searches: {}; peak {} MB", searches.figures(), service.peak_memory());
        for served in [served, searches] {
            assert!(served.has_its_share(), "{attack}: {}", served.figures());
        }
    }
}
