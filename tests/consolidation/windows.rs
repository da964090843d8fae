//! Lists with a window: when they are consolidated, which messages stay, and what happens to messages that do not fit.

use crate::harness::{PATIENCE, start, until};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::factor::test_factor;
use crate::support::lists::{assert_anthropic_accepts, assert_openai_accepts, tokens_of_openai};
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_case::test_case;
use tokio::sync::Semaphore;

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn call(id: &str) -> Value {
    let function = json!({"name": "read", "arguments": "{}"});
    json!({"role": "assistant", "content": null, "tool_calls": [{"id": id, "type": "function", "function": function}]})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

/// Shares of the window with a long verbatim part.
const SHARES: [(&str, &str); 3] = [
    ("consolidation.trigger_share", "0.8"),
    ("consolidation.keep_share", "0.3"),
    ("consolidation.summary_share", "0.25"),
];

/// Returns a text of about this number of tokens.
fn words(tokens: usize) -> String {
    "lorem ferry harbour island ".repeat(tokens / 6)
}

/// Checks what holds for each list: the coverage names each message exactly once, the list fits its window and is valid.
fn verify(context: &Value, messages: usize, window: Option<usize>) {
    let number = |value: &Value| usize::try_from(value.as_u64().expect("a number")).expect("small");
    let coverage = &context["coverage"];
    let mut next = number(&coverage["summary_through"]) + 1;
    for range in coverage["omitted"].as_array().expect("a list") {
        assert_eq!(number(&range["from_seq"]), next, "{coverage}");
        next = number(&range["to_seq"]) + 1;
    }
    assert_eq!(number(&coverage["verbatim_from"]), next, "{coverage}");
    assert_eq!(number(&coverage["last_seq"]), messages);
    let list = context["messages"].as_array().expect("a list");
    let is_system = |message: &&Value| message["role"] == "system";
    let first = list.iter().find(|message| !is_system(message));
    assert!(first.is_none_or(|first| first["role"] == "user"), "{first:?}");
    if context["format"] == "openai" {
        assert_openai_accepts(list);
        let tokens = tokens_of_openai(list);
        assert_eq!(tokens, number(&context["tokens"]["total"]) + 3);
        assert!(window.is_none_or(|window| tokens <= window), "{tokens} of {window:?}");
    } else {
        assert_anthropic_accepts(context);
        assert!(window.is_none_or(|window| number(&context["tokens"]["total"]) + 3 <= window));
    }
}

fn is_complete(context: &Value) -> bool {
    context["coverage"]["omitted"] == json!([]) && context["coverage"]["shortened"] == json!([])
}

fn text_of(context: &Value) -> String {
    context["messages"].to_string()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_results_are_consolidated_before_they_are_omitted(backend: Backend) {
    let app = TestApp::start(&backend, &SHARES).await;
    for turn in 1..=12 {
        let id = format!("c{turn}");
        let question = format!("What does chapter {turn} say about the ferry?");
        let exchange =
            [user(&question), call(&id), result(&id, &words(6000)), assistant("It leaves at nine.")];
        app.record("s", &exchange).await;
        let context = app.context("s", &json!({"max_tokens": 30_000, "user_message": "Go on."})).await;
        verify(&context, turn * 4, Some(30_000));
        assert!(is_complete(&context), "{}", context["coverage"]);
    }
    let context = app.context("s", &json!({"max_tokens": 30_000})).await;
    assert!(context["coverage"]["summary_through"].as_u64() >= Some(31));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn number_of_messages_does_not_matter_with_a_window(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let text = |number: usize| format!("Message {number} has a few words about the ferry and the island.");
    let messages: Vec<Value> = (1..=332)
        .map(|number| if number % 2 == 1 { user(&text(number)) } else { assistant(&text(number)) })
        .collect();
    app.record("s", &messages).await;
    let context = app.context("s", &json!({"max_tokens": 100_000})).await;
    verify(&context, 332, Some(100_000));
    assert_eq!(
        (&context["consolidation"]["outcome"], &context["coverage"]["verbatim_from"]),
        (&json!("not_due"), &json!(1))
    );
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(332));
    // The same session without a window, and with a configured one.
    let context = app.context("s", &json!({"mode": "off"})).await;
    assert_eq!(context["coverage"]["omitted"][0]["reason"], "max_history_messages");
    let set = [&SHARES[..], &[("consolidation.context_window", "4000")]].concat();
    let limited = TestApp::start(&backend, &set).await;
    let context = limited.context("s", &json!({})).await;
    verify(&context, 332, Some(4000));
    assert_eq!(context["consolidation"]["outcome"], "consolidated");
    let verbatim = context["tokens"]["history"].as_u64().unwrap();
    assert!((1000..=1200).contains(&verbatim), "as many messages as fit 0.3 of the window: {verbatim}");
    let explicit = TestApp::start(&backend, &[("consolidation.threshold", "100")]).await;
    app.record("explicit", &messages[..120]).await;
    let context = explicit.context("explicit", &json!({"max_tokens": 100_000})).await;
    assert_eq!(context["coverage"]["summary_through"], 100, "a configured threshold counts");
}

/// A system prompt that takes half of the window leaves less for the summary and for messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn part_of_the_window_is_free_after_a_consolidation(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for (session, prompt, least) in [("small", words(60), 12), ("large", words(2000), 5)] {
        let (mut turns, mut runs) = (0, Vec::new());
        while runs.len() < 5 {
            turns += 1;
            let text = format!("Turn {turns}: {}", words(40));
            app.record(session, &[user(&text), assistant(&text)]).await;
            let context = app.context(session, &json!({"max_tokens": 4000, "system_prompt": prompt})).await;
            verify(&context, turns * 2, Some(4000));
            assert!(is_complete(&context));
            if context["consolidation"]["outcome"] == "consolidated" {
                runs.push(turns);
            }
        }
        assert!(runs.windows(2).all(|pair| pair[1] - pair[0] >= least), "{session}: {runs:?}");
    }
}

/// The case C01: the question stays, and the middle of the result is left out.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn result_that_exceeds_the_window_is_shortened(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let text = format!("first line {} last line", words(20_000));
    app.record("s", &[user("What does the file say?"), call("c"), result("c", &text)]).await;
    for (body, length) in [
        (json!({}), 3),
        (json!({"user_message": "And in short?"}), 4),
        (json!({"format": "anthropic"}), 3),
        (json!({"reserved_tokens": 6000}), 3),
        (json!({"mode": "off"}), 3 + 1),
    ] {
        let mut body = body;
        body["max_tokens"] = json!(8000);
        let context = app.context("s", &body).await;
        let window = 8000 - usize::try_from(body["reserved_tokens"].as_u64().unwrap_or(0)).unwrap();
        verify(&context, 3, Some(window));
        let shortened = &context["coverage"]["shortened"][0];
        assert_eq!((&shortened["seq"], &context["coverage"]["omitted"]), (&json!(3), &json!([])));
        assert!(shortened["tokens"].as_u64() > Some(12_000));
        let total = context["tokens"]["total"].as_u64().unwrap();
        assert!(total > u64::try_from(window).unwrap() - 200, "the window is used: {total}");
        assert_eq!(context["messages"].as_array().map(Vec::len), Some(length), "{body}");
        let list = text_of(&context);
        for part in ["What does the file say?", "first line", "last line", "message 3 of this session"] {
            assert!(list.contains(part), "{part}");
        }
    }
    // The turn, shortened, does not fit.
    let refused = app.post("/sessions/s/context", json!({"max_tokens": 100})).await;
    assert!(refused.problem(422, "budget-too-small").contains("newest turn"));
    let needed: u64 =
        refused.json()["errors"][0]["detail"].as_str().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    verify(&app.context("s", &json!({"max_tokens": needed})).await, 3, usize::try_from(needed).ok());
    let refused = app.post("/sessions/s/context", json!({"max_tokens": 8000, "reserved_tokens": 9000})).await;
    assert!(refused.problem(422, "budget-too-small").contains("of which 9000 are reserved"));
    assert_eq!(app.post("/sessions/s/context", json!({"reserved_tokens": -1})).await.status, 422);
}

/// The case C02: `max_tail_tokens` holds, although each result is larger.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_limit_in_tokens_bounds_the_recent_part(backend: Backend) {
    let app = TestApp::start(&backend, &[("consolidation.max_tail_tokens", "5000")]).await;
    let mut messages = vec![user("Read all chapters."), assistant("I begin.")];
    for round in 1..=8 {
        let id = format!("c{round}");
        messages.extend([call(&id), result(&id, &words(10_000))]);
    }
    messages.extend([assistant("That was all."), user("Thanks.")]);
    app.record("turns", &messages).await;
    app.record("rounds", &messages[..18]).await;
    for (session, count) in [("turns", 20), ("rounds", 18)] {
        let context = app.context(session, &json!({})).await;
        verify(&context, count, None);
        assert!(context["tokens"]["history"].as_u64() <= Some(5000), "{}", context["tokens"]);
        assert_eq!(
            (&context["consolidation"]["outcome"], &context["coverage"]["omitted"]),
            (&json!("consolidated"), &json!([]))
        );
        let next = app.context(session, &json!({})).await;
        assert_eq!(
            (&next["consolidation"]["outcome"], &next["messages"]),
            (&json!("not_due"), &context["messages"])
        );
    }
}

/// The case A20: the agent still sees its task, and the list begins with the user, in both formats.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_in_the_middle_of_a_turn_begins_with_its_task(backend: Backend) {
    let app = TestApp::start(&backend, &SHARES).await;
    let mut messages = vec![user("Build the site of the ferry to Hydra.")];
    for round in 1..=60 {
        let id = format!("c{round}");
        messages.extend([call(&id), result(&id, &words(60))]);
    }
    for (session, body) in [("count", json!({})), ("window", json!({"max_tokens": 4000}))] {
        app.record(session, &messages).await;
        for format in ["openai", "anthropic"] {
            let mut body = body.clone();
            body["format"] = json!(format);
            let context = app.context(session, &body).await;
            verify(&context, 121, body["max_tokens"].as_u64().and_then(|max| usize::try_from(max).ok()));
            assert!(is_complete(&context));
            assert_eq!(context["coverage"]["repeated"], 1, "{}", context["coverage"]);
            assert!(text_of(&context).contains("Build the site of the ferry to Hydra."));
        }
        // The turn ends, and nothing is repeated.
        app.record(session, &[assistant("Done.")]).await;
        let context = app.context(session, &json!({"user_message": "Thanks!", "max_tokens": 4000})).await;
        assert_eq!(context["coverage"]["repeated"], Value::Null);
    }
}

/// The case A26: calls whose results come one turn later, so that a call is open everywhere.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_calls_do_not_hold_the_cursor(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record("s", &[user("Crawl 0"), call("bg0")]).await;
    for number in 1..=60 {
        let (own, earlier) = (format!("bg{number}"), format!("bg{}", number - 1));
        let turn =
            [user(&format!("And {number}")), call(&own), result(&earlier, "ok"), assistant("Started.")];
        app.record("s", &turn).await;
        let context = app.context("s", &json!({"user_message": "How many?"})).await;
        verify(&context, 2 + number * 4, None);
        assert!(is_complete(&context), "{number}: {}", context["coverage"]);
    }
    let context = app.context("s", &json!({})).await;
    assert!(context["coverage"]["summary_through"].as_u64() > Some(150), "{}", context["coverage"]);
    app.record("window", &app.history("s").await).await;
    let context = app.context("window", &json!({"max_tokens": 1500})).await;
    verify(&context, 242, Some(1500));
    assert!(is_complete(&context));
}

/// The case A27: one orphaned result does not empty the list while nothing is consolidated.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphaned_result_omits_no_further_messages(backend: Backend) {
    let app = TestApp::start(&backend, &[("consolidation.mode", "off")]).await;
    for (session, first) in [("orphan", user("q")), ("late", call("x"))] {
        let mut messages = vec![first, assistant("a")];
        (1..115).for_each(|_| messages.extend([user("q"), assistant("a")]));
        messages.extend([result("x", "late"), assistant("ok")]);
        app.record(session, &messages).await;
        let context = app.context(session, &json!({})).await;
        verify(&context, 232, None);
        assert_eq!(context["coverage"]["verbatim_from"], 33, "200 messages");
        assert_eq!(context["inserted"], 1, "the call of the result");
        let system = context["messages"][0]["content"].as_str().unwrap();
        assert!(system.contains("Older messages are missing from what you see"), "{system}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_model_delays_a_context_by_inline_wait_at_most(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They talked about a ferry and an island.".to_owned()));
    let set = [&SHARES[..], &[("consolidation.inline_wait", "200ms")]].concat();
    let app = start(&backend, &model, &set).await;
    let text = words(100);
    let messages: Vec<Value> = (0..20).flat_map(|_| [user(&text), assistant(&text)]).collect();
    app.record("s", &messages).await;
    let started_at = Instant::now();
    let context = app.context("s", &json!({"max_tokens": 3300})).await;
    assert!(started_at.elapsed() < PATIENCE / 2);
    assert_eq!((&context["consolidation"]["outcome"], is_complete(&context)), (&json!("in_progress"), true));
    // A context that does not fit its window waits for the run of another request, too. Its coverage lists the omitted messages.
    let context = app.context("s", &json!({"max_tokens": 2000})).await;
    verify(&context, 40, Some(2000));
    assert_eq!(
        (&context["consolidation"]["outcome"], &context["coverage"]["omitted"][0]["reason"]),
        (&json!("in_progress"), &json!("max_tokens"))
    );
    release.add_permits(1);
    until(&app, "s", |state| state["cursor"].as_u64() > Some(0)).await;
    let context = app.context("s", &json!({"max_tokens": 2000})).await;
    assert!(is_complete(&context), "{}", context["coverage"]);
}

/// Waits for the consolidation of another request, on another replica, instead of omitting messages.
#[test_case(Backend::postgres().await; "postgres")]
#[test_case(Backend::sqlite().await; "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_waits_for_the_run_that_makes_room(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::Delayed(
        Duration::from_millis(400),
        "They talked about ferries and islands.".to_owned(),
    ));
    let app = start(&backend, &model, &[]).await;
    let other = start(&backend, &model, &[("consolidation.mode", "background")]).await;
    let text = words(100);
    let messages: Vec<Value> = (0..20).flat_map(|_| [user(&text), assistant(&text)]).collect();
    app.record("s", &messages).await;
    let body = json!({"max_tokens": 2000});
    let (one, two) = tokio::join!(app.context("s", &body), other.context("s", &body));
    for context in [one, two] {
        verify(&context, 40, Some(2000));
        assert!(is_complete(&context), "{} {}", context["coverage"], context["consolidation"]);
    }
    assert_eq!(model.calls().len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_starts_the_consolidation_in_the_background(backend: Backend) {
    let app = TestApp::start(&backend, &[("consolidation.mode", "background")]).await;
    // Without a window, and with that of the latest context.
    for (session, body, messages) in [("count", json!({}), 102), ("window", json!({"max_tokens": 2000}), 60)]
    {
        let text = words(60);
        app.record(session, &[user("Hello."), assistant("Hello!")]).await;
        app.context(session, &body).await;
        let turns: Vec<Value> = (0..messages / 2).flat_map(|_| [user(&text), assistant(&text)]).collect();
        app.record(session, &turns).await;
        until(&app, session, |state| state["cursor"].as_u64() > Some(0)).await;
        let context = app.context(session, &body).await;
        assert_eq!(context["consolidation"]["outcome"], "not_due");
    }
}

/// A session that no model consolidates: results of tools, then turns are left out, and the agent is told.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn omissions_are_counted_and_told(backend: Backend) {
    let app = TestApp::start(&backend, &[("consolidation.mode", "off")]).await;
    let text = words(60);
    let turns: Vec<Value> =
        (0..10).flat_map(|_| [user(&text), call("c"), result("c", &words(600)), assistant(&text)]).collect();
    app.record("s", &turns).await;
    let notice = |context: &Value| context["messages"][0]["content"].as_str().unwrap_or_default().to_owned();
    let total = app.context("s", &json!({})).await["tokens"]["total"].as_u64().unwrap();
    let full = app.context("s", &json!({"max_tokens": total * 6 / 5})).await;
    assert!(is_complete(&full) && notice(&full).contains("will soon be dropped"), "{}", notice(&full));
    let window = usize::try_from(total * 3 / 5).unwrap();
    let shortened = app.context("s", &json!({"max_tokens": window})).await;
    verify(&shortened, 40, Some(window));
    assert_eq!(shortened["coverage"]["omitted"], json!([]));
    // The newest turn is whole.
    let seqs: Vec<&Value> =
        shortened["coverage"]["shortened"].as_array().unwrap().iter().map(|of| &of["seq"]).collect();
    assert!(!seqs.is_empty() && !seqs.contains(&&json!(39)), "{seqs:?}");
    let omitted = app.context("s", &json!({"max_tokens": window / 4})).await;
    verify(&omitted, 40, Some(window / 4));
    assert_eq!(omitted["coverage"]["omitted"][0]["reason"], "max_tokens");
    assert!(notice(&omitted).contains("Older messages are missing"), "{}", notice(&omitted));
    let metrics = app.get("/metrics").await.text;
    for (reason, count) in [("max_tokens", 1), ("shortened", 2)] {
        let line = format!("precis_contexts_with_omissions_total{{reason=\"{reason}\"}} {count}");
        assert!(metrics.contains(&line), "{line}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_tells_the_part_of_each_message(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let placement = async |session: &str, seq: usize, query: &str| {
        app.get(&format!("/sessions/{session}/messages/{seq}/placement{query}")).await.ok(200)
    };
    let mut messages = vec![user("My boat is called Amphitrite."), assistant("A fine name for a boat.")];
    messages.extend((0..20).flat_map(|number| [user(&format!("{number} {}", words(60))), assistant("Yes.")]));
    messages.extend([user("Read it."), call("c"), result("c", &words(3000))]);
    app.record("s", &messages).await;
    app.context("s", &json!({"max_tokens": 2000})).await;
    let first = placement("s", 1, "").await;
    assert_eq!(
        (&first["part"], &first["revision"], &first["recalled"]),
        (&json!("summarised"), &json!(1), &json!(false))
    );
    assert!(first["sentences"][0].as_str().is_some_and(|text| text.contains("Amphitrite")), "{first}");
    let recalled = placement("s", 1, "?max_tokens=8000&user_message=What%20was%20Amphitrite%3F").await;
    assert_eq!((&recalled["part"], &recalled["recalled"]), (&json!("summarised"), &json!(true)));
    assert_eq!(placement("s", 43, "").await["part"], "verbatim");
    let shortened = placement("s", 45, "").await;
    assert_eq!(
        (&shortened["part"], shortened["sent_tokens"].as_u64() < Some(2000)),
        (&json!("shortened"), true)
    );
    assert_eq!(placement("s", 45, "?max_tokens=20000").await["part"], "verbatim");
    app.delete("/sessions/s/messages/44").await.ok(200);
    assert_eq!(placement("s", 44, "").await["part"], "redacted");
    app.record("off", &messages[..40]).await;
    app.context("off", &json!({"max_tokens": 20_000})).await;
    let omitted = placement("off", 1, "?max_tokens=500").await;
    assert_eq!(
        (&omitted["part"], &omitted["reason"], &omitted["revision"]),
        (&json!("omitted"), &json!("max_tokens"), &Value::Null)
    );
    assert_eq!(placement("off", 1, "").await["part"], "verbatim", "the window of the latest context");
    app.get("/sessions/off/messages/41/placement").await.problem(404, "message-not-found");
}

/// The choices of a random session. The numbers of a seed repeat.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Returns the messages of a random turn: calls with results, without, late ones of earlier turns, and surplus ones.
fn random_turn(dice: &mut Dice, number: usize, open: &mut Vec<String>) -> Vec<Value> {
    let size = |dice: &mut Dice| [10, 40, 200, 1500][usize::try_from(dice.roll(4)).unwrap()];
    let mut turn = vec![user(&format!("Question {number}: {}", words(size(dice).min(200))))];
    for round in 0..dice.roll(4) {
        let id = format!("c{number}_{round}");
        turn.push(call(&id));
        match dice.roll(6) {
            0 => open.push(id),
            1 => turn.push(result(&format!("unknown{number}"), "late")),
            2 if !open.is_empty() => {
                turn.push(result(&id, &words(size(dice))));
                turn.push(result(&open.remove(0), &words(size(dice))));
            }
            _ => turn.push(result(&id, &words(size(dice)))),
        }
    }
    if dice.roll(5) > 0 {
        turn.push(assistant(&format!("Answer {number}: {}", words(size(dice).min(200)))));
    }
    turn
}

/// Random sessions with windows, modes and failing models: the coverage names each message once, no list exceeds its window, the newest
/// turn is in it, and nothing that could be summarised is omitted or shortened while the model works.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_sessions_fit_their_windows(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let model = ModelServer::start().await;
    model.default(Behaviour::fail(401, "no"));
    let failing = start(
        &backend,
        &model,
        &[("consolidation.retry_initial", "1ms"), ("consolidation.retry_max", "1ms")],
    )
    .await;
    let mut kinds = [0; 3];
    for seed in 1..=12 * u64::from(test_factor()) {
        let (mut dice, session, mut open) = (Dice(seed), format!("s{seed}"), Vec::new());
        let (mut count, mut last_turn) = (0, Vec::new());
        for number in 1..=12 {
            last_turn = random_turn(&mut dice, number, &mut open);
            count += last_turn.len();
            app.record(&session, &last_turn).await;
            let window = [300, 1200, 2500, 6000, 20_000][usize::try_from(dice.roll(5)).unwrap()];
            let format = ["openai", "anthropic"][usize::try_from(dice.roll(2)).unwrap()];
            let mode = ["inline", "inline", "background", "off"][usize::try_from(dice.roll(4)).unwrap()];
            let mut body = json!({"max_tokens": window, "format": format, "mode": mode});
            if dice.roll(2) == 0 {
                body["user_message"] = json!("What about the ferry?");
            }
            let is_failing = dice.roll(4) == 0;
            let client: &TestClient = if is_failing { &failing } else { &app };
            let response = client.post(&format!("/sessions/{session}/context"), &body).await;
            if response.status == 422 {
                response.problem(422, "budget-too-small");
                kinds[0] += 1;
                continue;
            }
            let context = response.ok(200);
            verify(&context, count, Some(window));
            let coverage = &context["coverage"];
            let first = u64::try_from(count - last_turn.len() + 1).unwrap();
            let works = !is_failing && mode != "off";
            if works {
                let omitted = coverage["omitted"].as_array().unwrap();
                assert!(
                    omitted.is_empty(),
                    "seed {seed}, turn {number}: {coverage} {}",
                    context["consolidation"]
                );
                let is_new = |of: &Value| of["seq"].as_u64() >= Some(first);
                let shortened = coverage["shortened"].as_array().unwrap();
                assert!(shortened.iter().all(is_new), "seed {seed}, turn {number}: {coverage}");
            }
            let is_sent = coverage["verbatim_from"].as_u64() <= Some(first);
            let is_known = coverage["repeated"].as_u64() == Some(first) || body["user_message"].is_string();
            assert!(is_sent || is_known, "seed {seed}, turn {number}: {coverage}");
            kinds[usize::from(is_complete(&context)) + 1] += 1;
        }
        assert!(!last_turn.is_empty());
    }
    assert!(kinds.iter().all(|count| *count >= 3), "refused, with omissions, complete: {kinds:?}");
}
