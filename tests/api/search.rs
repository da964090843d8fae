//! `GET /search`.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use test_case::test_case;

mod bounds;
mod identifiers;
mod questions;
mod rerank;
mod times;

/// Returns the path of a search with percent-encoded parameters.
fn path(query: &[(&str, &str)]) -> String {
    let mut path = "/search?".to_owned();
    for (name, value) in query {
        let _ = write!(path, "{name}=");
        value.bytes().for_each(|byte| write!(path, "%{byte:02X}").expect("a string takes all"));
        path.push('&');
    }
    path.trim_end_matches('&').to_owned()
}

/// Returns `SESSION:SEQ` of each hit, in order.
async fn found(app: &TestClient, query: &[(&str, &str)]) -> Vec<String> {
    let response = app.get(&path(query)).await.ok(200);
    assert_eq!(response["next"], Value::Null);
    let place = |hit: &Value| format!("{}:{}", hit["session_id"].as_str().expect("a session"), hit["seq"]);
    response["items"].as_array().expect("hits").iter().map(place).collect()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Measures recall on real conversations with questions and the messages that answer them (`LoCoMo`; see `scripts/recall`).
/// The questions of category 5 have no answer.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_finds_the_evidence_of_questions(backend: Backend) {
    let Ok(folder) = std::env::var("PRECIS_DATA") else {
        eprintln!("PRECIS_DATA is not set: recall was not measured");
        return;
    };
    let app = TestApp::start(&backend, &[("limits.requests_per_second", "0")]).await;
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path()).collect();
    files.sort();
    let mut recalls: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for file in files.into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "json")) {
        let conversation: Value =
            serde_json::from_str(&std::fs::read_to_string(&file).expect("a text")).expect("JSON");
        let session = file.file_stem().expect("a name").to_string_lossy().into_owned();
        let (mut places, mut messages) = (BTreeMap::new(), Vec::new());
        let turns = (1..).map_while(|number| conversation[format!("session_{number}")].as_array());
        for turn in turns.flatten() {
            let role = if turn["speaker"] == conversation["speaker_a"] { "user" } else { "assistant" };
            let text = format!(
                "{}: {}",
                turn["speaker"].as_str().expect("a name"),
                turn["text"].as_str().expect("a text")
            );
            messages.push(json!({"role": role, "content": text}));
            places.insert(turn["dia_id"].as_str().expect("an id"), messages.len());
        }
        app.record(&session, &messages).await;
        for question in conversation["qa"].as_array().expect("questions") {
            let evidence = question["evidence"].as_array().into_iter().flatten();
            let evidence = evidence.filter_map(Value::as_str).flat_map(|ids| ids.split([';', ' ']));
            let evidence: BTreeSet<String> =
                evidence.filter_map(|id| places.get(id)).map(|seq| format!("{session}:{seq}")).collect();
            let category = question["category"].as_u64().expect("a category");
            if evidence.is_empty() || category == 5 {
                continue;
            }
            let asked = question["question"].as_str().expect("a question");
            let hits = found(&app, &[("q", asked), ("session_id", &session), ("neighbours", "0")]).await;
            assert!(hits.len() <= 10);
            let seen = hits.iter().filter(|hit| evidence.contains(*hit)).count();
            #[expect(clippy::cast_precision_loss, reason = "a few")]
            recalls.entry(category).or_default().push(seen as f64 / evidence.len() as f64);
        }
    }
    assert!(
        !recalls.is_empty(),
        "the folder PRECIS_DATA has no conversations with questions; set it to the folder with their JSON files"
    );
    #[expect(clippy::cast_precision_loss, reason = "some hundred")]
    let mean = |recalls: &[f64]| recalls.iter().sum::<f64>() / recalls.len() as f64;
    for (category, recalls) in &recalls {
        println!("category {category}: {:.3}, {} questions", mean(recalls), recalls.len());
    }
    let recalls = recalls.into_values().flatten().collect::<Vec<_>>();
    let recall = mean(&recalls);
    println!("mean recall among the first ten hits: {recall:.3}, {} questions", recalls.len());
    assert!(recall >= 0.765, "{recall}");
}

/// Compares both stores on generated messages and queries over few words, common and rare.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_results_are_equal_on_both_stores() {
    const WORDS: [&str; 12] = [
        "the",
        "the",
        "the",
        "ferry",
        "ferries",
        "Night",
        "café",
        "harbour",
        "数据库",
        "boat",
        "ticket",
        "Zürich",
    ];
    let word = || select(&WORDS[..]);
    let text = || vec(word(), 1..9).prop_map(|words| words.join(" "));
    // Few enough that all of them are candidates: others would depend on the order in which the sessions are indexed.
    let sessions = vec(vec(text(), 20..37), 4);
    let part = prop_oneof![
        4 => word().prop_map(str::to_owned),
        1 => text().prop_map(|text| format!("\"{text}\"")),
        1 => word().prop_map(|word| format!("-{word}")),
        1 => word().prop_map(|word| format!("{}*", word.chars().take(2).collect::<String>())),
    ];
    let query = (vec(part, 0..4), word()).prop_map(|(parts, word)| format!("{} {word}", parts.join(" ")));
    let filter = select(vec![
        None,
        None,
        Some(("session_id", "s1")),
        Some(("user_id", "ada")),
        Some(("role", "user")),
    ]);
    let queries = vec((query, filter), 60);
    let mut runner = TestRunner::deterministic();
    let (sessions, queries) = (sessions, queries).new_tree(&mut runner).expect("a case").current();
    let mut responses = Vec::new();
    for backend in [Backend::sqlite().await, Backend::postgres().await] {
        let app = TestApp::start(&backend, &[("limits.requests_per_second", "0")]).await;
        for (number, texts) in sessions.iter().enumerate() {
            let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
            let messages: Vec<_> = texts
                .iter()
                .enumerate()
                .map(|(at, text)| json!({"role": role(at), "content": text}))
                .collect();
            let user = if number % 2 == 0 { "ada" } else { "bo" };
            let body = json!({"messages": messages, "user_id": user});
            app.post(&format!("/sessions/s{number}/exchanges"), &body).await.ok(201);
        }
        // The frequencies of words in messages that are not indexed yet do not count messages with an excluded phrase.
        let mut found = Vec::new();
        for (query, filter) in &queries {
            let parameters: Vec<_> = [("q", query.as_str())].into_iter().chain(*filter).collect();
            let response = app.get(&path(&parameters)).await.ok(200);
            let hits = response["items"].as_array().expect("hits").iter();
            let hits = hits.map(|hit| json!([hit["session_id"], hit["seq"], hit["score"], hit["snippet"]]));
            found.push((query.clone(), hits.collect::<Vec<_>>()));
        }
        responses.push(found);
    }
    assert!(responses[0].iter().filter(|(_, hits)| !hits.is_empty()).count() > 30, "most find something");
    for (sqlite, postgres) in responses[0].iter().zip(&responses[1]) {
        assert_eq!(sqlite, postgres);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hit_contains_position_snippet_and_neighbours(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record("s", &[user("one"), user("two <b>"), user("The night ferry"), user("four"), user("five")])
        .await;
    let response = app.get("/search?q=ferries+-boats").await;
    let hit = &response["items"][0];
    assert_eq!(
        (&hit["session_id"], &hit["seq"], &hit["message"]),
        (&json!("s"), &json!(3), &user("The night ferry"))
    );
    assert_eq!(hit["snippet"], "The night <mark>ferry</mark>");
    assert!(hit["score"].as_f64().expect("a score") > 0.0);
    assert!(hit["created_at"].as_str().expect("a time").ends_with('Z'));
    let seqs = |side: &Value| -> Vec<Value> {
        side.as_array().expect("messages").iter().map(|message| message["seq"].clone()).collect()
    };
    assert_eq!((seqs(&hit["before"]), seqs(&hit["after"])), (vec![json!(2)], vec![json!(4)]));
    assert_eq!(hit["before"][0]["message"], user("two <b>"));
    let response = app.get("/search?q=ferry&neighbours=10").await;
    let hit = &response["items"][0];
    assert_eq!(
        (seqs(&hit["before"]), seqs(&hit["after"])),
        (vec![json!(1), json!(2)], vec![json!(4), json!(5)])
    );
    let response = app.get("/search?q=ferry&neighbours=0").await;
    assert_eq!((&response["items"][0]["before"], &response["items"][0]["after"]), (&json!([]), &json!([])));
    assert_eq!(
        app.get("/search?q=nothing").await,
        json!({"items": [], "next": null, "ranking": {"order": "lexical", "model": null, "reason": null}})
    );
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_ignores_case_accents_and_endings_in_every_script(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let call = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "find_harbour", "arguments": "{\"city\":\"Gda\\u0144sk\"}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "1", "content": "[\"pier\\n17b\"]"});
    app.record(
        "s",
        &[
            user("Der CAFÉ-Besuch war gemütlich"),
            user("我们的数据库在服务器上"),
            user("東京タワーに行きました"),
            user("แมวกินปลาทุกวัน"),
            user("학교에서 만나요"),
            call,
            result,
            user("Она читает книги"),
        ],
    )
    .await;
    for (query, seq) in [
        ("cafe", 1),
        ("Gemutlich", 1),
        ("数据库", 2),
        ("库", 2),
        ("東京", 3),
        ("タワー", 3),
        ("ﾀﾜｰ", 3),
        ("ปลา", 4),
        ("학교", 5),
        ("harbours", 6),
        ("GDANSK", 6),
        ("17b", 7),
        ("pier", 7),
        ("КНИГИ", 8),
        ("visit* besu*", 1),
    ] {
        assert_eq!(found(&app, &[("q", query)]).await, [format!("s:{seq}")], "{query}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_filters_restrict_hits(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for (session, owner) in [("a", "ada"), ("b", "ada"), ("c", "bob")] {
        let turn = json!({"user_message": "a plum", "assistant_reply": "one more plum", "user_id": owner});
        app.post(&format!("/sessions/{session}/exchanges"), &turn).await.ok(201);
    }
    let of = async |query: &[(&str, &str)]| found(&app, &[&[("q", "plum")], query].concat()).await;
    // Equal scores are sorted newest first.
    assert_eq!(of(&[]).await, ["c:2", "c:1", "b:2", "b:1", "a:2", "a:1"]);
    assert_eq!(of(&[("limit", "1")]).await, ["c:2"]);
    assert_eq!(of(&[("session_id", "a")]).await, ["a:2", "a:1"]);
    assert_eq!(of(&[("user_id", "ada")]).await, ["b:2", "b:1", "a:2", "a:1"]);
    assert_eq!(of(&[("user_id", "ada"), ("session_id", "c")]).await, [""; 0]);
    assert_eq!(of(&[("role", "assistant"), ("user_id", "bob")]).await, ["c:2"]);
    assert_eq!(of(&[("role", "tool")]).await, [""; 0]);
    let page = app.get("/sessions/b/messages").await;
    let time = page["items"][0]["created_at"].as_str().expect("a time");
    assert_eq!(of(&[("since", time)]).await, ["c:2", "c:1", "b:2", "b:1"]);
    assert_eq!(of(&[("until", time)]).await, ["a:2", "a:1"]);
    assert_eq!(of(&[("since", time), ("until", time)]).await, [""; 0]);
    // Extreme times are either accepted or rejected.
    for (time, after) in
        [("0000-01-01T00:00:00Z", 6), ("0000-01-01T00:00:00+23:59", 6), ("9999-12-31T23:59:59.999999999Z", 0)]
    {
        assert_eq!(of(&[("since", time)]).await.len(), after, "{time}");
    }
    let none = path(&[("q", "plum"), ("since", "9999-12-31T23:59:59-23:59")]);
    assert_eq!(app.get(&none).await.fields(), ["since"]);
    app.delete("/sessions/c").await.ok(204);
    assert_eq!(of(&[]).await, ["b:2", "b:1", "a:2", "a:1"]);
}

/// On SQLite, one of them indexes the pending messages, and the others wait for it.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_searches_find_pending_messages(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for session in 1..=3 {
        app.record(&format!("s{session}"), &[user("a ferry")]).await;
        let searches = (0..8).map(|_| found(&app, &[("q", "ferry")]));
        for hits in join_all(searches).await {
            assert_eq!(hits.len(), session);
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rarer_of_two_common_words_ranks_higher(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let third = [user("a boat"), user("a ship"), user("a ship")];
    app.record("s", &third.iter().cycle().take(1500).cloned().collect::<Vec<_>>()).await;
    for query in ["ship boat", "boat ship"] {
        // The newest message with the rarer word that has four messages on each side.
        assert_eq!(found(&app, &[("q", query), ("limit", "1")]).await, ["s:1495"], "{query}");
    }
}

/// With and without rarer words in the query.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn common_words_find_messages(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let text = |n| match (n % 12, n % 50) {
        (0, _) => "a boat",
        (_, 1) => "a ferry",
        _ => "a ship",
    };
    app.record("s", &(0..4000).map(|n| user(text(n))).collect::<Vec<_>>()).await;
    for (query, word) in [("a boat", "a boat"), ("a ferry", "a ferry"), ("ship", "a ship")] {
        let response = app.get(&path(&[("q", query), ("limit", "50")])).await.ok(200);
        let hits = response["items"].as_array().expect("hits");
        assert_eq!(hits.iter().filter(|hit| hit["message"]["content"] == word).count(), 50, "{query}");
    }
    app.record("t", &[user("zebra")]).await;
    assert_eq!(found(&app, &[("q", "zebra ferry"), ("limit", "50")]).await.len(), 50);
}

/// The excluded messages are newer, and more than one search reads.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excluded_messages_do_not_displace_hits(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let mut messages = vec![user("night"); 3];
    messages.resize(403, user("a night ferry"));
    app.record("s", &messages).await;
    let of = async |query| found(&app, &[("q", query)]).await;
    assert_eq!(of("night -ferry").await, ["s:2", "s:3", "s:1"]);
    assert_eq!(of("night boat -ferries -ship").await, ["s:2", "s:3", "s:1"]);
    // Now more messages contain the word than one search reads.
    app.record("s", &vec![user("a night ferry"); 1000]).await;
    assert_eq!(of("night -ferry").await, ["s:2", "s:3", "s:1"]);
    assert_eq!(found(&app, &[("q", "night -ferry"), ("session_id", "s")]).await, ["s:2", "s:3", "s:1"]);
}

/// Newer messages of others contain the same words, adjacent or not.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_messages_are_found_after_many_newer_matches(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let of_ada = json!({"user_id": "ada", "messages": [user("see you at work"), user("you see")]});
    app.post("/sessions/old/exchanges", &of_ada).await.ok(201);
    app.record("new", &vec![user("you work, they see"); 1100]).await;
    assert_eq!(found(&app, &[("q", "work"), ("user_id", "ada")]).await, ["old:1"]);
    assert_eq!(found(&app, &[("q", "you see"), ("user_id", "ada")]).await, ["old:2", "old:1"]);
    // Messages that are not indexed yet are all read.
    app.record("new", &vec![user("you, they see"); 600]).await;
    app.record("b", &[user("rare, I see you")]).await;
    app.record("new", &vec![user("rare: you, they see"); 600]).await;
    assert_eq!(found(&app, &[("q", "\"see you\" rare")]).await, ["b:1"]);
}

#[tokio::test]
async fn unusual_queries_are_answered_or_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("s", 0..2).await;
    let long = "word ".repeat(500);
    let sound = [
        "what's up?",
        "c++",
        "-x y",
        "\"left open",
        "a\"b",
        "the and of",
        "' OR 1=1 --",
        "a & b | !c <-> d",
        "NEAR(a b)",
        "a:b",
        "a*",
        "\u{1f600} x",
        "x\u{0}y",
        "-\"a b\" c",
        "éé*",
        "語*",
        &long[..1000],
    ];
    for query in sound {
        app.get(&path(&[("q", query)])).await.ok(200);
    }
    for query in ["\"", "*", "\\", "{}", "((((", "-x", "aa* bb* cc* dd* ee*", &long] {
        assert_eq!(app.get(&path(&[("q", query)])).await.fields(), ["q"], "{query}");
    }
}

#[tokio::test]
async fn search_without_index_is_a_conflict() {
    let app = TestApp::on_sqlite(&[("search.enabled", "false")]).await;
    app.record_turns("s", 0..1).await;
    app.get("/search?q=a").await.problem(409, "search-disabled");
}

/// A search that reads messages without the index parses them while it has a thread.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test]
async fn simultaneous_searches_of_new_messages_do_not_block_each_other(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let text = "the ferry leaves at noon ".repeat(1000);
    app.record("s", &vec![json!({"role": "user", "content": text}); 10]).await;
    let searches = (0..16).map(|_| async { app.get("/search?q=ferry").await.ok(200) });
    for found in join_all(searches).await {
        assert_eq!(found["items"].as_array().expect("hits").len(), 10);
    }
}
