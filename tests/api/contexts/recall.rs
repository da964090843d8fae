//! Earlier messages that match the new one: which are recalled, where they are in the list, and that they are never stored.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::lists::{assert_anthropic_accepts, assert_openai_accepts, tokens_of_openai};
use serde_json::{Value, json};
use test_case::test_case;

const QUESTION: &str = "Which boat does Ida sail to Hydra?";

/// Records a session of which the summary covers the first messages. The boat is named in message 1 only.
async fn fill(app: &TestApp, session: &str, user: &str) {
    let turn = |user_message: String, assistant_reply: String| json!({"user_message": user_message, "assistant_reply": assistant_reply, "user_id": user});
    let path = format!("/sessions/{session}/exchanges");
    app.post(&path, turn("Ida sails to Hydra on her boat Amphitrite.".into(), "Noted.".into())).await.ok(201);
    for number in 0..30 {
        let topic = ["garden", "kitchen", "library", "museum"][number % 4];
        let question = format!("Please describe room {number} of the {topic}, with all details.");
        app.post(&path, turn(question, format!("The {topic} has a door, a window and a lamp.")))
            .await
            .ok(201);
    }
    app.request(reqwest::Method::POST, &format!("/sessions/{session}/consolidations")).await.ok(201);
}

fn seqs(context: &Value) -> Vec<i64> {
    let recalled = context["recall"].as_array().expect("a list");
    recalled.iter().map(|message| message["seq"].as_i64().expect("a number")).collect()
}

fn last(context: &Value) -> &Value {
    context["messages"].as_array().and_then(|messages| messages.last()).expect("a message")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn matching_messages_precede_the_new_one(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    fill(&app, "s", "ada").await;
    let plain = app.context("s", &json!({"user_message": QUESTION, "recall": false})).await;
    assert_eq!((&plain["recall"], &plain["tokens"]["recall"]), (&json!([]), &json!(0)));
    let context = app.context("s", &json!({"user_message": QUESTION})).await;
    assert_eq!(seqs(&context).first(), Some(&1), "{}", context["recall"]);
    assert!(context["recall"][0]["score"].as_f64() > Some(1.0) && context["recall"][0]["session_id"] == "s");
    let text = last(&context)["content"].as_str().expect("a text");
    let (block, question) = text.split_once("</recalled_messages>\n\n").expect("a block");
    assert!(block.starts_with("<recalled_messages>\n") && question == QUESTION, "{text}");
    assert!(block.contains("] user: Ida sails to Hydra on her boat Amphitrite."), "{block}");
    // Everything before the new message is as without recall, and the tokens are those of the list.
    let list = |context: &Value| context["messages"].as_array().expect("a list").clone();
    let (with, without) = (list(&context), list(&plain));
    assert_eq!(with[..with.len() - 1], without[..without.len() - 1]);
    assert_openai_accepts(&with);
    let tokens = &context["tokens"];
    assert_eq!(tokens["total"].as_u64(), Some(tokens_of_openai(&with) as u64 - 3));
    for part in ["user_message", "total"] {
        let [with, without] =
            [tokens, &plain["tokens"]].map(|tokens| tokens[part].as_u64().expect("a number"));
        assert_eq!(tokens["recall"], with - without, "{part}");
    }
    // Content parts, and the other format.
    let parts = json!([{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}]);
    let context = app.context("s", &json!({"user_message": parts})).await;
    let sent = last(&context)["content"].as_array().expect("parts").clone();
    assert_eq!((sent.len(), &sent[1..]), (3, parts.as_array().expect("a list").as_slice()));
    let context = app.context("s", &json!({"user_message": QUESTION, "format": "anthropic"})).await;
    assert_anthropic_accepts(&context);
    assert!(last(&context).to_string().contains("boat Amphitrite"));
    // A session that is sent completely, and small talk, recall nothing.
    app.record("short", &[json!({"role": "user", "content": "Ida sails to Hydra on her boat Amphitrite."})])
        .await;
    assert_eq!(app.context("short", &json!({"user_message": QUESTION})).await["recall"], json!([]));
    for small_talk in ["Thanks, that's great!", "ok", "Good morning! How are you?", "👍", "Please do that."]
    {
        assert_eq!(
            seqs(&app.context("s", &json!({"user_message": small_talk})).await),
            [0_i64; 0],
            "{small_talk}"
        );
    }
    let disabled = TestApp::start(&backend, &[("recall.enabled", "false")]).await;
    assert_eq!(disabled.context("s", &json!({"user_message": QUESTION})).await["recall"], json!([]));
    assert_ne!(
        disabled.context("s", &json!({"user_message": QUESTION, "recall": true})).await["recall"],
        json!([])
    );
    let unindexed = TestApp::start(&backend, &[("search.enabled", "false")]).await;
    assert_eq!(unindexed.context("s", &json!({"user_message": QUESTION})).await["recall"], json!([]));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recall_has_limits_and_scopes(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    fill(&app, "s", "ada").await;
    fill(&app, "other", "ada").await;
    fill(&app, "foreign", "bo").await;
    let recall = async |recall: Value| {
        app.context("s", &json!({"user_message": "Describe room 7 and room 9.", "recall": recall})).await
    };
    let all = recall(json!(true)).await;
    assert!((2..=8).contains(&seqs(&all).len()), "{}", all["recall"]);
    assert!(seqs(&all).is_sorted() && all["tokens"]["recall"].as_i64() <= Some(800));
    assert_eq!(seqs(&recall(json!({"limit": 1})).await).len(), 1);
    let few = recall(json!({"max_tokens": 100})).await;
    assert!(
        (1..seqs(&all).len()).contains(&seqs(&few).len()) && few["tokens"]["recall"].as_i64() <= Some(100),
        "{}",
        few["tokens"]
    );
    assert_eq!(recall(json!({"limit": 0})).await["recall"], json!([]));
    let of_user = recall(json!({"scope": "user"})).await;
    let sessions: Vec<&Value> =
        of_user["recall"].as_array().expect("a list").iter().map(|found| &found["session_id"]).collect();
    assert!(sessions.contains(&&json!("other")) && !sessions.contains(&&json!("foreign")), "{sessions:?}");
    assert!(last(&of_user).to_string().contains(" of session other, "));
    // Without a user, the scope is the session.
    let keyless = TestApp::start(&backend, &[("memory.default_user", "")]).await;
    for session in ["x", "y"] {
        keyless
            .record(session, &[json!({"role": "user", "content": "The parrot of my aunt is called Polly."})])
            .await;
    }
    let body = json!({"user_message": "What is the parrot of my aunt called?", "recall": {"scope": "user"}});
    assert_eq!(keyless.context("x", &body).await["recall"], json!([]));
    let window = app.context("s", &json!({"user_message": QUESTION, "max_tokens": 1500})).await;
    assert!(
        window["tokens"]["recall"].as_i64() <= Some(150) && seqs(&window).contains(&1),
        "{}",
        window["recall"]
    );
    for (invalid, field) in [
        (json!({"limits": 1}), "recall.limits"),
        (json!({"limit": 51}), "recall.limit"),
        (json!({"scope": "all"}), "recall.scope"),
        (json!("yes"), "recall"),
    ] {
        let response = app.post("/sessions/s/context", json!({"recall": invalid})).await;
        assert_eq!((response.status, response.fields()), (422, vec![field.to_owned()]), "{response}");
    }
    // A redacted message is not recalled.
    app.delete("/sessions/s/messages/1").await.ok(200);
    app.request(reqwest::Method::POST, "/sessions/s/consolidations").await.ok(201);
    assert!(!seqs(&app.context("s", &json!({"user_message": QUESTION})).await).contains(&1));
}

/// A client that stores the messages that it has sent to its model.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recalled_messages_are_not_stored(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    fill(&app, "s", "ada").await;
    let context = app.context("s", &json!({"user_message": QUESTION})).await;
    let sent = last(&context);
    assert_ne!(sent["content"], QUESTION);
    app.post(
        "/sessions/s/exchanges",
        json!({"user_message": sent["content"], "assistant_reply": "Amphitrite."}),
    )
    .await
    .ok(201);
    app.record("s", &[sent.clone(), json!({"role": "assistant", "content": "Amphitrite."})]).await;
    let blocks = app.context("s", &json!({"user_message": QUESTION, "format": "anthropic"})).await;
    let turn = json!({"format": "anthropic", "messages": [last(&blocks), {"role": "assistant", "content": "Amphitrite."}]});
    app.post("/sessions/s/exchanges", turn).await.ok(201);
    let history = app.history("s").await;
    let question = json!({"role": "user", "content": QUESTION});
    assert_eq!((&history[62], &history[64]), (&question, &question));
    assert!(!json!(history).to_string().contains("recalled_messages"), "{:?}", &history[60..]);
    let mut list = history.clone();
    list[62] = sent.clone();
    list.push(
        json!({"role": "user", "content": format!("{} And why?", sent["content"].as_str().expect("a text"))}),
    );
    let synced = app.post("/sessions/s/sync", json!({"messages": list})).await.ok(201);
    assert_eq!((&synced["matched"], &synced["appended"]), (&json!(68), &json!(1)));
    assert_eq!(app.history("s").await[68]["content"], format!("{QUESTION} And why?"));
}

/// Between two consolidations, each list without its last message is the beginning of the next one.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recall_keeps_the_prefix_of_the_list(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    fill(&app, "s", "ada").await;
    let (mut before, mut recalled, mut compared) = (Vec::new(), 0, 0);
    for turn in 0..40 {
        let question = format!("And the {} number {turn} of Hydra?", ["garden", "museum", "boat"][turn % 3]);
        let body = json!({"user_message": question, "max_tokens": 1800, "system_prompt": "Be kind."});
        let context = app.context("s", &body).await;
        let mut list = context["messages"].as_array().expect("a list").clone();
        recalled += seqs(&context).len();
        list.pop();
        if context["consolidation"]["outcome"] == "not_due" {
            compared += 1;
            assert!(list.starts_with(&before), "turn {turn}");
        }
        before = list;
        let reply = format!("It is the {turn}th one: {}", "a walk of ten minutes ".repeat(6));
        app.post("/sessions/s/exchanges", json!({"user_message": question, "assistant_reply": reply}))
            .await
            .ok(201);
    }
    assert!(recalled > 10 && (20..40).contains(&compared), "{recalled} recalled, {compared} compared");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_own_tools_are_neither_found_nor_summarised(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    fill(&app, "s", "ada").await;
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"role": "assistant", "content": null, "tool_calls": [{"id": id, "type": "function", "function": function}]})
    };
    let result = |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
    let text = |role: &str, content: &str| json!({"role": role, "content": content});
    app.record(
        "s",
        &[
            text("user", "Do you remember my zebra?"),
            call("a", "search_history", r#"{"query":"zebra"}"#),
            result("a", "1 found: the zebra is called Quagga."),
            call("b", "mcp__precis__memory_write", r#"{"content":"zebra Quagga"}"#),
            result("b", "Written: zebra Quagga."),
            call("c", "look_up", r#"{"q":"zebra"}"#),
            result("c", "A zebra has stripes."),
            text("assistant", "It is striped."),
        ],
    )
    .await;
    let found = app.get("/search?q=zebra+quagga&session_id=s&limit=50").await.ok(200);
    let hits = found["items"].as_array().expect("a list").iter();
    let seqs: Vec<i64> = hits.map(|hit| hit["seq"].as_i64().unwrap()).collect();
    // Neighbours of two hits are hits themselves.
    assert!(!seqs.iter().any(|seq| [64, 65, 66, 67].contains(seq)), "{seqs:?}");
    assert!(seqs.contains(&63) && seqs.contains(&69), "{seqs:?}");
    // A summary of five sentences has room for all of them.
    let mut messages = app.history("s").await.split_off(62);
    messages.extend((0..10).flat_map(|_| [text("user", "Go on."), text("assistant", "I do.")]));
    app.record("t", &messages).await;
    app.request(reqwest::Method::POST, "/sessions/t/consolidations").await.ok(201);
    let state = app.get("/sessions/t").await;
    assert!(state["cursor"].as_i64() >= Some(8));
    let summary = state["summary"]["text"].as_str().expect("a text");
    assert!(summary.contains("my zebra") && summary.contains("look_up"), "{summary}");
    assert!(!summary.contains("Quagga"), "{summary}");
}
