//! `POST /sessions/{session_id}/sync`: complete lists of clients are stored once.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use futures_util::future::join_all;
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use std::fmt::Write as _;
use test_case::test_case;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

const PATH: &str = "/sessions/s/sync";

async fn sync(app: &TestClient, messages: &[Value]) -> Response {
    app.post(PATH, json!({ "messages": messages })).await
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// Returns the numbers of a response: matched, appended, first and last `seq`.
fn numbers(response: &Value) -> [Value; 4] {
    ["matched", "appended", "first_seq", "last_seq"].map(|field| response[field].clone())
}

/// Returns the message as a framework sends it in the next turn.
fn rewritten(message: &Value) -> Value {
    let mut written = message.clone();
    written["id"] = json!("msg_1");
    written["name"] = Value::Null;
    written["refusal"] = Value::Null;
    written["reasoning_content"] = json!("Let me think.");
    match &message["content"] {
        Value::String(text) => {
            written["content"] =
                json!([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]);
        }
        Value::Null => written["content"] = json!(""),
        _ => {}
    }
    for call in written["tool_calls"].as_array_mut().into_iter().flatten() {
        call["function"]["arguments"] = json!("{\"b\":2,\"a\":1}");
    }
    written
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_that_is_sent_each_turn_is_stored_once(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let system = json!({"role": "system", "content": "Be kind."});
    let function = json!({"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"});
    let call = json!({"id": "c1", "type": "function", "function": function});
    let turns = [
        vec![user("ok"), assistant("ok")],
        // The same messages once more are new messages.
        vec![user("ok"), assistant("ok")],
        vec![
            user("1 + 2?"),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "c1", "content": "3"}),
            assistant("3"),
        ],
        vec![user("ok")],
    ];
    let (mut list, mut stored) = (vec![system.clone()], Vec::new());
    for turn in &turns {
        list.extend(turn.iter().cloned());
        let before = stored.len();
        stored.extend(turn.iter().cloned());
        let response = sync(&app, &list).await.ok(201);
        let expected = [json!(before), json!(turn.len()), json!(before + 1), json!(stored.len())];
        assert_eq!(numbers(&response), expected);
        assert_includes(&response, &json!({"session_id": "s", "user_id": "default", "diverged_at": null}));
        // A repetition and a shorter list store nothing.
        let repeated = sync(&app, &list).await.ok(200);
        assert_eq!(numbers(&repeated), [json!(stored.len()), json!(0), Value::Null, json!(stored.len())]);
        let shorter = sync(&app, &list[..list.len() - 1]).await.ok(200);
        assert_eq!(numbers(&shorter), [json!(stored.len() - 1), json!(0), Value::Null, json!(stored.len())]);
        list = list.iter().map(rewritten).collect();
        list[0] = json!({"role": "developer", "content": [{"type": "text", "text": "Be brief."}]});
    }
    assert_eq!(app.history("s").await, stored, "as first sent");
    // Exchanges and lists continue the same history.
    app.record("s", &[assistant("fine")]).await;
    list.push(assistant("fine"));
    list.push(user("bye"));
    assert_eq!(numbers(&sync(&app, &list).await.ok(201)), [10, 1, 11, 11].map(|number| json!(number)));
    let context = app.context("s", &json!({})).await;
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(11));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn diverging_list_is_rejected_and_writes_nothing(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let list = [user("a"), assistant("b"), user("c"), assistant("d")];
    sync(&app, &list).await.ok(201);
    let before = app.get("/sessions/s").await.json();
    let changed = |index: usize, message: Value| {
        let mut changed = list.to_vec();
        changed[index] = message;
        changed.push(user("new"));
        changed
    };
    for (given, at, roles, part) in [
        (changed(0, user("A")), 1, ["user", "user"], "content"),
        (changed(1, user("b")), 2, ["assistant", "user"], "role"),
        (
            changed(3, json!({"role": "assistant", "content": "d", "name": "Ada"})),
            4,
            ["assistant"; 2],
            "name",
        ),
        // A client that has dropped its oldest messages.
        (list[2..].to_vec(), 1, ["user", "user"], "content"),
        (list[1..].to_vec(), 1, ["user", "assistant"], "role"),
        (vec![user("a"), assistant("x")], 2, ["assistant"; 2], "content"),
    ] {
        let body = json!({"messages": given, "metadata": {"x": 1}, "on_divergence": "error"});
        let response = app.post(PATH, body).header("idempotency-key", "k").await;
        let detail = response.problem(409, "history-diverged");
        assert!(detail.contains(&format!("differs in {part} from")), "{detail}");
        assert!(!detail.contains("new"), "it does not quote messages: {detail}");
        let expected = json!({"diverged_at": at, "stored_role": roles[0], "given_role": roles[1]});
        assert_includes(&response.json(), &expected);
    }
    assert_eq!(app.get("/sessions/s").await, before);
    assert_eq!(app.history("s").await, list);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_sync_the_same_list_store_it_once(backend: Backend) {
    let replicas = [TestApp::start(&backend, &[]).await, TestApp::start(&backend, &[]).await];
    let mut list = Vec::new();
    for round in 0..8 {
        let known = list.len();
        list.extend([user("again"), assistant(&format!("round {}", round / 2))]);
        let requests = (0..8).map(|client| sync(&replicas[client % 2], &list));
        let responses = join_all(requests).await;
        let mut created = responses.iter().filter(|response| response.status == 201);
        let first = created.next().expect("one client stores the messages").json();
        assert_eq!(numbers(&first), [known, 2, known + 1, known + 2].map(|number| json!(number)));
        assert!(created.next().is_none(), "{responses:?}");
        for response in responses.iter().filter(|response| response.status != 201) {
            assert_eq!(numbers(&response.ok(200))[..2], [json!(known + 2), json!(0)]);
        }
        assert_eq!(replicas[0].history("s").await, list);
    }
    // Of different continuations, one is stored, and the others diverge after the common beginning.
    let requests = (0..8).map(|client| {
        let mut list = list.clone();
        list.extend([user(&format!("client {client}")), assistant("x")]);
        let app = &replicas[client % 2];
        async move { sync(app, &list).await }
    });
    let mut created = 0;
    for response in join_all(requests).await {
        if response.status == 201 {
            created += 1;
        } else {
            response.problem(409, "history-diverged");
            assert_eq!(response.json()["diverged_at"], list.len() + 1);
        }
    }
    assert_eq!((created, replicas[0].history("s").await.len()), (1, list.len() + 2));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sync_with_reused_key_is_replayed_or_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body = json!({"messages": [user("a"), assistant("b")]});
    let with_key = |key: &'static str, body: &Value| app.post(PATH, body).header("idempotency-key", key);
    let first = with_key("k", &body).await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    app.record("s", &[user("c")]).await;
    let again = with_key("k", &body).await;
    assert_eq!((again.ok(201), again.is_replay()), (first.json(), true));
    let longer = json!({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]});
    with_key("k", &longer).await.problem(422, "idempotency-key-reused");
    let exchange = app.post("/sessions/s/exchanges", json!({"messages": [user("a"), assistant("b")]}));
    exchange.header("idempotency-key", "k").await.problem(422, "idempotency-key-reused");
    // A sync that appends nothing uses up no key.
    with_key("l", &body).await.ok(200);
    with_key("l", &longer).await.ok(201);
    // Of the same requests at the same time, one is not a replay.
    let mut longer = longer;
    longer["messages"].as_array_mut().expect("a list").push(user("e"));
    let responses = join_all((0..6).map(|_| with_key("m", &longer).send())).await;
    let first = responses[0].ok(201);
    assert!(responses.iter().all(|response| response.ok(201) == first), "{responses:?}");
    assert_eq!(responses.iter().filter(|response| !response.is_replay()).count(), 1);
    assert_eq!(app.history("s").await.len(), 5);
    assert_eq!(with_key("a b", &body).await.fields(), ["Idempotency-Key"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sync_stores_user_metadata_and_times(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let timed = |text: &str, time: Value| json!({"role": "user", "content": text, "created_at": time});
    let mut list =
        vec![timed("a", json!("2020-02-03T05:06:07+01:00")), timed("b", json!(1_580_702_400.5)), user("c")];
    let body = |list: &[Value], user: Value, metadata: Value| json!({"messages": list, "user_id": user, "metadata": metadata});
    let started_at = OffsetDateTime::now_utc().format(&Rfc3339).expect("a time");
    let response = app.post(PATH, body(&list, json!("ada"), json!({"x": 1}))).await.ok(201);
    assert_eq!(response["user_id"], "ada");
    let messages = app.get("/sessions/s/messages").await;
    let time = |index: usize| messages["items"][index]["created_at"].as_str().expect("a time");
    assert_eq!((time(0), time(1)), ("2020-02-03T04:06:07Z", "2020-02-03T04:00:00.5Z"));
    assert!(time(2)[..19] >= started_at[..19], "{messages:?}");
    assert_eq!(app.history("s").await, list, "the field stays part of the message");
    let state = app.get("/sessions/s").await;
    assert_includes(&state, &json!({"user_id": "ada", "metadata": {"x": 1}}));
    assert!(state["created_at"].as_str() >= Some(&started_at[..19]), "{state:?}");
    // Metadata is stored even if no message is new. Times are no part of the comparison.
    list[0] = user("a");
    app.post(PATH, body(&list, Value::Null, json!({"x": 2}))).await.ok(200);
    assert_eq!(app.get("/sessions/s").await["metadata"], json!({"x": 2}));
    for new in [list.clone(), vec![user("other")]] {
        let body = body(&new, json!("bo"), json!({"x": 3}));
        app.post(PATH, body).await.problem(409, "session-user-mismatch");
    }
    assert_eq!(app.get("/sessions/s").await["metadata"], json!({"x": 2}));
    // A list without messages creates no session.
    for list in [json!([]), json!([{"role": "system", "content": "x"}])] {
        let response =
            app.post("/sessions/new/sync", json!({"messages": list, "user_id": "ada"})).await.ok(200);
        assert_eq!(numbers(&response), [json!(0), json!(0), Value::Null, json!(0)]);
        assert_eq!(response["user_id"], "ada");
    }
    app.get("/sessions/new").await.problem(404, "session-not-found");
}

/// With keys, there is no default user.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sync_binds_a_session_without_a_user(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let app = app.with_key(backend.key("acme", Scope::Write).await.expose());
    let request = |session: &str, messages: &[Value], user: Option<&str>| {
        app.post(&format!("/sessions/{session}/sync"), json!({"messages": messages, "user_id": user}))
    };
    let list = [user("a"), assistant("b"), user("c")];
    for (session, known) in [("with-new", 2), ("without-new", 3)] {
        assert_eq!(request(session, &list[..2], None).await.ok(201)["user_id"], Value::Null);
        request(session, &list[..known], None).await.ok(if known == 2 { 200 } else { 201 });
        // A list that diverges binds nothing.
        request(session, &[user("x"), user("y")], Some("bo")).await.problem(409, "history-diverged");
        let response = request(session, &list, Some("ada")).await;
        assert_eq!((&response["user_id"], &response["last_seq"]), (&json!("ada"), &json!(3)));
        request(session, &list, Some("bo")).await.problem(409, "session-user-mismatch");
        assert_eq!(app.get(&format!("/sessions/{session}")).await["user_id"], "ada");
        assert_eq!(app.history(session).await, list);
    }
    // A session that is bound before its first message.
    app.context("bound", &json!({"user_id": "ada"})).await;
    request("bound", &list, Some("bo")).await.problem(409, "session-user-mismatch");
    assert_eq!(request("bound", &list, None).await.ok(201)["user_id"], "ada");
}

/// The history has several pages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_of_many_pages_is_compared_to_its_end(backend: Backend) {
    const MESSAGES: usize = 5000;
    const LIMIT: Set<'static> = &[("limits.max_messages_per_exchange", "10")];
    let app = TestApp::start(&backend, LIMIT).await;
    let mut lines = String::new();
    let mut list: Vec<Value> = Vec::new();
    for seq in 1..=MESSAGES {
        let text = format!("message {seq}");
        let message = if seq % 2 == 1 { user(&text) } else { assistant(&text) };
        writeln!(lines, "{message}").expect("a String");
        list.push(message);
    }
    let import =
        app.request(Method::POST, "/sessions/s/import").header("content-type", "application/x-ndjson");
    import.body(lines).await.ok(201);
    list.extend([user("new"), assistant("new")]);
    // Half of the messages have other bytes.
    let rewritten: Vec<Value> = list
        .iter()
        .enumerate()
        .map(|(at, message)| if at % 2 == 0 { rewritten(message) } else { message.clone() })
        .collect();
    let response = sync(&app, &rewritten).await.ok(201);
    assert_eq!(numbers(&response), [MESSAGES, 2, MESSAGES + 1, MESSAGES + 2].map(|number| json!(number)));
    for at in [1, 1000, 1001, MESSAGES / 2, MESSAGES, MESSAGES + 2] {
        let mut changed = list.clone();
        changed[at - 1]["content"] = json!("changed");
        let response = sync(&app, &changed).await;
        response.problem(409, "history-diverged");
        assert_eq!(response.json()["diverged_at"], at);
    }
    // Only new messages count against the limit.
    list.extend((0..11).map(|number| user(&number.to_string())));
    let response = sync(&app, &list).await;
    assert_eq!(response.fields(), ["messages"]);
    assert!(response.text.contains("has 11 new messages, at most 10 are allowed"), "{response}");
    list.pop();
    assert_eq!(sync(&app, &list).await.ok(201)["appended"], 10);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_is_synced_anew(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let list = [user("a"), assistant("b")];
    for _ in 0..2 {
        assert_eq!(numbers(&sync(&app, &list).await.ok(201))[..2], [json!(0), json!(2)]);
        app.context("s", &json!({})).await;
        app.delete("/sessions/s").await.ok(204);
    }
}

#[tokio::test]
async fn invalid_list_is_rejected_with_all_its_fields() {
    let app = TestApp::on_sqlite(&[]).await;
    let system = json!({"role": "system", "content": "x"});
    for (body, fields) in [
        (json!({}), vec!["messages"]),
        (json!({"messages": null}), vec!["messages"]),
        (json!({"messages": [user("a")], "x": 1}), vec!["x"]),
        (json!({"messages": [system, {"role": "robot"}, 7]}), vec!["messages[1].role", "messages[2]"]),
        (json!({"messages": [user("a")], "on_divergence": "merge"}), vec!["on_divergence"]),
        (json!({"messages": [user("a")], "format": "x"}), vec!["format"]),
        (json!({"messages": [user("a")], "user_id": "", "metadata": []}), vec!["user_id", "metadata"]),
    ] {
        assert_eq!(app.post(PATH, &body).await.fields(), fields, "{body}");
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

/// Returns the list with another ending.
fn with_end(list: &[Value], common: usize, end: &[Value]) -> Vec<Value> {
    [&list[..common], end].concat()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn diverging_list_is_stored_in_a_fork(backend: Backend) {
    let app =
        TestApp::start(&backend, &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")])
            .await;
    let list: Vec<Value> =
        (0..5).flat_map(|turn| [user(&format!("q{turn}")), assistant(&format!("a{turn}"))]).collect();
    let body = json!({"messages": list, "metadata": {"x": 1}});
    app.post(PATH, body).await.ok(201);
    assert_eq!(app.context("s", &json!({})).await["summary"]["revision"], 1);
    let (before, export) = (app.get("/sessions/s").await.json(), app.get("/sessions/s/export").await.text);
    let end = [user("other"), assistant("answer")];
    for (common, cursor) in [(9, 8), (8, 8), (7, 0), (1, 0), (0, 0)] {
        let fork = with_end(&list, common, &end);
        for (named, key) in [(true, false), (false, false), (true, true), (false, true)] {
            let mut body =
                json!({"messages": fork, "on_divergence": "fork", "metadata": {"named": named, "key": key}});
            let new_id = format!("fork {common} {key}");
            if named {
                body["new_id"] = json!(new_id);
            }
            let send = || {
                let request = app.post(PATH, &body);
                if key {
                    request.header("idempotency-key", format!("{common} {named}").replace(' ', "-"))
                } else {
                    request
                }
            };
            let origin = json!({"session_id": "s", "through_seq": common, "kind": "fork"});
            let first = send().await.ok(201);
            let id = first["session_id"].as_str().expect("an id").to_owned();
            assert!(!named || id == new_id, "{first}");
            let expected = json!({
                "session_id": id, "user_id": "default", "matched": common, "appended": 2,
                "diverged_at": common + 1, "forked_from": origin, "first_seq": common + 1, "last_seq": common + 2,
            });
            assert_eq!(first, expected);
            assert_eq!(app.history(&id).await, fork);
            let state = app.get(&format!("/sessions/{}", id.replace(' ', "%20"))).await.json();
            let metadata = json!({"named": named, "key": key});
            let summary = json!({"cursor": cursor, "last_seq": common + 2, "forked_from": origin, "metadata": metadata});
            assert_includes(&state, &summary);
            assert_eq!(state["summary"]["revision"], usize::from(cursor > 0));
            // A repetition stores nothing.
            let again = send().await;
            if key {
                assert_eq!((again.ok(201), again.is_replay()), (first, true));
            } else {
                let mut expected = expected;
                expected["matched"] = json!(common + 2);
                expected["appended"] = json!(0);
                expected["first_seq"] = Value::Null;
                assert_eq!(again.ok(200), expected);
            }
            assert_eq!(app.history(&id).await, fork);
        }
    }
    assert_eq!(app.get("/sessions/s").await.json(), before, "the session itself stays as it is");
    assert_eq!(app.get("/sessions/s/export").await.text, export);
    assert_eq!(app.get("/sessions").await["items"].as_array().map(Vec::len), Some(21));
    // Search finds the messages of the fork. It finds copied messages in the fork and in the session.
    let found = async |query: &str| {
        let hits = app.get(&format!("/search?q={query}&limit=50")).await;
        hits["items"].as_array().expect("a list").len()
    };
    assert_eq!((found("other").await, found("a0").await), (20, 1 + 4 * 3));
    // A list that does not diverge is stored in the session.
    let longer = with_end(&list, 10, &end);
    let response =
        app.post(PATH, json!({"messages": longer, "on_divergence": "fork", "new_id": "unused"})).await;
    assert_includes(
        &response.ok(201),
        &json!({"session_id": "s", "appended": 2, "forked_from": null, "diverged_at": null}),
    );
    app.get("/sessions/unused").await.problem(404, "session-not-found");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_continues_the_fork_by_its_id(backend: Backend) {
    let app = TestApp::start(
        &backend,
        &[("limits.max_messages_per_exchange", "3"), ("limits.max_fork_messages", "2")],
    )
    .await;
    let list = [user("a"), assistant("b"), user("c")];
    sync(&app, &list).await.ok(201);
    let to = async |new_id: &str, messages: &[Value]| {
        app.post(PATH, json!({"messages": messages, "on_divergence": "fork", "new_id": new_id})).await
    };
    let mut edited = with_end(&list, 2, &[user("d")]);
    assert_eq!(numbers(&to("fork", &edited).await.ok(201)), [2, 1, 3, 3].map(|number| json!(number)));
    edited.extend([assistant("e"), user("f")]);
    let response = to("fork", &edited).await.ok(201);
    assert_eq!(numbers(&response), [3, 2, 4, 5].map(|number| json!(number)));
    assert_eq!((&response["session_id"], &response["diverged_at"]), (&json!("fork"), &json!(3)));
    // Other lists need another id, and so do other sessions.
    to("fork", &with_end(&list, 2, &[user("x")])).await.problem(409, "session-exists");
    app.record("taken", &list).await;
    to("taken", &edited).await.problem(409, "session-exists");
    app.context("bound", &json!({"user_id": "ada"})).await;
    to("bound", &edited).await.problem(409, "session-exists");
    assert_eq!(to("s", &edited).await.fields(), ["new_id"]);
    for body in [
        json!({"messages": edited, "new_id": "x"}),
        json!({"messages": edited, "new_id": "", "on_divergence": "fork"}),
    ] {
        assert_eq!(app.post(PATH, &body).await.fields(), ["new_id"], "{body}");
    }
    // Limits of copied and of new messages.
    let many: Vec<Value> = (0..4).map(|number| user(&number.to_string())).collect();
    assert_eq!(to("large", &with_end(&list, 2, &many)).await.fields(), ["messages"]);
    sync(&app, &with_end(&list, 3, &many[..3])).await.ok(201);
    to("long", &with_end(&list, 3, &many[1..])).await.problem(422, "copy-too-large");
    for id in ["large", "long"] {
        app.get(&format!("/sessions/{id}")).await.problem(404, "session-not-found");
    }
    assert_eq!(app.history("fork").await, edited);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_diverging_lists_at_the_same_time_have_one_fork(backend: Backend) {
    let replicas = [TestApp::start(&backend, &[]).await, TestApp::start(&backend, &[]).await];
    let list = [user("a"), assistant("b"), user("c"), assistant("d")];
    sync(&replicas[0], &list).await.ok(201);
    for (round, key) in [None, Some("k")].into_iter().enumerate() {
        let fork = with_end(&list, 2, &[user(&format!("round {round}")), assistant("x")]);
        let requests = (0..8).map(|client| {
            let request = replicas[client % 2].post(PATH, json!({"messages": fork, "on_divergence": "fork"}));
            if let Some(key) = key { request.header("idempotency-key", key) } else { request }.send()
        });
        let responses = join_all(requests).await;
        let id = responses[0].json()["session_id"].clone();
        assert!(responses.iter().all(|response| response.json()["session_id"] == id), "{responses:?}");
        let stored = responses.iter().filter(|response| response.status == 201 && !response.is_replay());
        assert_eq!(stored.count(), 1, "{responses:?}");
        assert_eq!(replicas[0].history(id.as_str().expect("an id")).await, fork);
        assert_eq!(replicas[1].get("/sessions").await["items"].as_array().map(Vec::len), Some(round + 2));
    }
    // A key belongs to one list.
    let other = with_end(&list, 1, &[user("z")]);
    let body = json!({"messages": other, "on_divergence": "fork"});
    let response = replicas[0].post(PATH, body).header("idempotency-key", "k").await;
    response.problem(422, "idempotency-key-reused");
}

/// SQLite copies them in several transactions.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_large_diverging_lists_have_one_fork(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let large = "x".repeat(1_200_000);
    let list = [user(&large), assistant(&large), user("c")];
    sync(&app, &list).await.ok(201);
    for (round, (key, new_id)) in
        [(None, None), (Some("k"), None), (None, Some("named"))].into_iter().enumerate()
    {
        let messages = with_end(&list, 2, &[user(&format!("round {round}")), assistant("x")]);
        let mut body = json!({"messages": messages, "on_divergence": "fork"});
        if let Some(id) = new_id {
            body["new_id"] = json!(id);
        }
        let requests = (0..3).map(|_| {
            let request = app.post(PATH, body.clone());
            if let Some(key) = key { request.header("idempotency-key", key) } else { request }.send()
        });
        let responses = join_all(requests).await;
        let facts = |response: &Response| (response.status, response.json()["session_id"].clone());
        let facts: Vec<_> = responses.iter().map(facts).collect();
        assert!(
            facts.iter().all(|(status, id)| matches!(status, 200 | 201) && *id == facts[0].1),
            "{facts:?}"
        );
        let stored = responses.iter().filter(|response| response.status == 201 && !response.is_replay());
        assert_eq!(stored.count(), 1, "{facts:?}");
        assert_eq!(app.get("/sessions").await["items"].as_array().map(Vec::len), Some(round + 2));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_outlives_its_session(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let (list, fork) = ([user("a"), assistant("b")], [user("a"), assistant("c")]);
    let send = async |key: Option<&str>| {
        let request = app.post(PATH, json!({"messages": fork, "on_divergence": "fork"}));
        if let Some(key) = key { request.header("idempotency-key", key) } else { request }.await
    };
    sync(&app, &list).await.ok(201);
    let ids =
        [send(None).await.ok(201), send(Some("k")).await.ok(201)].map(|body| body["session_id"].clone());
    app.delete("/sessions/s").await.ok(204);
    // The key still has its response, without the erased session.
    let again = send(Some("k")).await;
    assert_includes(
        &again.ok(201),
        &json!({"session_id": ids[1], "matched": 1, "forked_from": null, "diverged_at": null}),
    );
    assert!(again.is_replay());
    // Another session with the same id has other forks.
    sync(&app, &list).await.ok(201);
    let other = send(None).await.ok(201);
    assert_eq!(other["forked_from"]["session_id"], "s");
    assert_ne!(other["session_id"], ids[0]);
    assert_eq!(send(None).await.ok(200)["session_id"], other["session_id"]);
    for id in [&ids[0], &ids[1], &other["session_id"]] {
        assert_eq!(app.history(id.as_str().expect("an id")).await, fork);
    }
}

/// With keys, there is no default user.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_keeps_the_user_or_gets_the_named_one(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let app = app.with_key(backend.key("acme", Scope::Write).await.expose());
    let list = [user("a plum"), assistant("b")];
    sync(&app, &list).await.ok(201);
    let send = async |path: &str, user_id: Option<&str>, new_id: &str| {
        let messages = [user("a plum"), assistant("c")];
        let body =
            json!({"messages": messages, "user_id": user_id, "on_divergence": "fork", "new_id": new_id});
        app.post(path, body).await
    };
    assert_eq!(send(PATH, None, "none").await.ok(201)["user_id"], Value::Null);
    assert_eq!(send(PATH, Some("ada"), "ada's").await.ok(201)["user_id"], "ada");
    assert_eq!(send(PATH, Some("ada"), "ada's").await.ok(200)["user_id"], "ada");
    assert_eq!(app.get("/sessions/s").await["user_id"], Value::Null, "the session got no message");
    // The search finds the copied messages under the user.
    let hits = app.get("/search?q=plum&user_id=ada").await;
    assert_eq!(hits["items"][0]["session_id"], "ada's", "{hits:?}");
    assert_eq!(hits["items"].as_array().map(Vec::len), Some(1));
    app.post(PATH, json!({"messages": list, "user_id": "bo"})).await.ok(200);
    send(PATH, Some("ada"), "x").await.problem(409, "session-user-mismatch");
    assert_eq!(send(PATH, None, "bo's").await.ok(201)["user_id"], "bo");
}

/// Returns the messages of a turn with parallel calls, in the chat format and in the Anthropic format.
fn turn_in_both_formats() -> [Vec<Value>; 2] {
    let url = "data:image/png;base64,iVBORw0KGgo=";
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let chat = json!([
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url}}]},
        {"role": "assistant", "content": "Two calls.", "tool_calls": [
            call("a:1", "f.g", "{\"x\": 1.0}"), call("b", "h", ""),
        ]},
        {"role": "tool", "tool_call_id": "a:1", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "Error:\nbroken"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Done."},
    ]);
    // The id and the name as a context in the format has them.
    let id = "call_2b2c40a6706d9e5f320d5536";
    let anthropic = json!([
        {"role": "user", "content": [
            {"type": "text", "text": "Look."},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
            {"type": "text", "text": "Two calls."},
            {"type": "tool_use", "id": id, "name": "f_g", "input": {"x": 1}},
            {"type": "tool_use", "id": "b", "name": "h", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "one"}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "broken", "is_error": true},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
    ]);
    [chat, anthropic].map(|list| list.as_array().expect("a list").clone())
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_in_one_format_matches_messages_in_the_other(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let [chat, anthropic] = turn_in_both_formats();
    let lists = [("openai", &chat), ("anthropic", &anthropic)];
    for (stored_format, stored) in lists {
        let path = format!("/sessions/{stored_format}/sync");
        let body = |format: &str, messages: &[Value]| json!({"format": format, "messages": messages});
        let first = app.post(&path, body(stored_format, stored)).await.ok(201);
        assert_eq!(numbers(&first), [0, 6, 1, 6].map(|number| json!(number)));
        for (format, list) in lists {
            let response = app.post(&path, body(format, list)).await.ok(200);
            assert_eq!(
                numbers(&response),
                [json!(6), json!(0), Value::Null, json!(6)],
                "{stored_format}, {format}"
            );
            // Each part counts.
            for (text, other) in [
                ("Look.", "Lock."),
                ("iVBORw0KGgo=", "iVBORw0KGgs="),
                ("Two", "2"),
                ("\"b\"", "\"d\""),
                ("\"h\"", "\"i\""),
                ("one", "two"),
                ("broken", "fixed"),
                ("And", "Or"),
                ("Done", "No"),
            ] {
                let changed = serde_json::to_string(list).expect("JSON").replace(text, other);
                let changed: Vec<Value> = serde_json::from_str(&changed).expect("JSON");
                app.post(&path, body(format, &changed)).await.problem(409, "history-diverged");
            }
        }
        // Each client goes on in its own format.
        for (format, list) in lists {
            let text = format!("{format} goes on");
            let longer = with_end(list, list.len(), &[user(&text)]);
            let response =
                app.post(&path, json!({"format": format, "messages": longer, "on_divergence": "fork"})).await;
            assert_eq!(response.ok(201)["matched"], 6);
        }
    }
    // A list with several results in one message has more messages when it is stored.
    let changed = serde_json::to_string(&anthropic).expect("JSON").replace("And?", "So?");
    let changed: Vec<Value> = serde_json::from_str(&changed).expect("JSON");
    let response =
        app.post("/sessions/openai/sync", json!({"format": "anthropic", "messages": changed})).await;
    response.problem(409, "history-diverged");
    assert_eq!(response.json()["diverged_at"], 5);
    // Every context in the format is a list that matches.
    let context = app.context("anthropic", &json!({"format": "anthropic"})).await;
    let body = json!({"format": "anthropic", "messages": context["messages"]});
    assert_eq!(app.post("/sessions/anthropic/sync", body).await.ok(200)["matched"], 7);
}
