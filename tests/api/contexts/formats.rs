//! The complete context of one session in both formats.

use super::SMALL;
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, assert_includes};
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/sessions/s/context";

fn call(id: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "look.up", "arguments": arguments}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_in_anthropic_format_has_system_and_content_blocks(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.put("/users/default/memory", r#"{"content":"Likes tea."}"#).await.ok(200);
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    app.record(
        "s",
        &[
            json!({"role": "assistant", "content": "Hello! \n"}),
            json!({"role": "user", "name": "Ada", "content": [
                {"type": "text", "text": "Look:"}, image("data:image/jpg;base64,/9j/"), image("https://example.org/a.png"),
                image("ftp://example.org/a.png"), {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0x", "filename": "a.pdf"}},
                {"type": "file", "file": {"file_id": "f", "filename": "b.txt"}},
            ]}),
            json!({"role": "assistant", "content": "", "tool_calls": [
                call("one", r#"{"q": 1.50}"#), call("t:2", ""), call("t;2", "[1]"),
            ]}),
            json!({"role": "tool", "tool_call_id": "t;2", "content": "second"}),
            json!({"role": "tool", "tool_call_id": "one", "name": "look.up", "content": ""}),
            json!({"role": "tool", "tool_call_id": "t:2", "content": [{"type": "text", "text": "third"}]}),
            json!({"role": "user", "content": " "}),
            json!({"role": "user", "content": "Well?"}),
            json!({"role": "assistant", "content": null, "refusal": "No."}),
        ],
    )
    .await;
    let options = json!({"format": "anthropic", "system_prompt": "Be kind.", "user_message": "And now?"});
    let response = app.post(PATH, options.to_string()).await;
    let context = response.ok(200);
    assert_eq!(context["system"], "Be kind.\n\n## Your Memory\n\nLikes tea.");
    let messages = context["messages"].as_array().expect("a list");
    let hashed = |at: usize| messages[3]["content"][at]["id"].as_str().expect("an id").to_owned();
    let (colon, semicolon) = (hashed(1), hashed(2));
    assert!(colon != semicolon && colon.len() == 29 && colon.starts_with("call_"), "{colon} {semicolon}");
    let result =
        |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
    let call =
        |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "look_up", "input": input});
    let expected = json!([
        {"role": "user", "content": [text("(The conversation began earlier.)")]},
        {"role": "assistant", "content": [text("Hello!")]},
        {"role": "user", "content": [
            text("Ada:"), text("Look:"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/"}},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            text("(an image that can't be shown here)"), text("(audio that can't be shown here)"),
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"}, "title": "a.pdf"},
            text("(the file \"b.txt\" that can't be shown here)"),
        ]},
        {"role": "assistant", "content": [
            call("one", json!({"q": 1.5})), call(&colon, json!({})), call(&semicolon, json!({"arguments": "[1]"})),
        ]},
        {"role": "user", "content": [
            result(&semicolon, json!([text("second")])), {"type": "tool_result", "tool_use_id": "one"},
            result(&colon, json!([text("third")])), text("(empty message)"), text("Well?"),
        ]},
        {"role": "assistant", "content": [text("No.")]},
        {"role": "user", "content": [text("And now?")]},
    ]);
    assert_eq!(context["messages"], expected, "{context:#}");
    assert!(response.text.contains(r#""input":{"q": 1.50}"#), "the bytes of the arguments are kept");
    assert_includes(&context, &json!({"inserted": 0, "coverage": {"verbatim_from": 1}}));
    // The stable prefix ends with the reply, because the question is not stored.
    let cache = &context["cache"];
    assert_includes(cache, &json!({"stable_messages": 6, "stable_blocks": 1}));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_calls_and_results_are_inserted_in_both_formats(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let result = |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
    let given = [
        json!({"role": "user", "content": "Go."}),
        json!({"role": "assistant", "content": "Both.", "tool_calls": [call("a", "{}"), call("b", "{}")]}),
        result("a", "A"),
        json!({"role": "user", "content": "And b?"}),
        json!({"role": "assistant", "content": "Wait."}),
        result("b", "B"),
        json!({"role": "assistant", "content": "Again.", "tool_calls": [call("a", "{}")]}),
    ];
    app.record("s", &given).await;
    let context = app.context("s", &json!({})).await;
    let none = "No result of this call had been recorded at this point.";
    let called = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
    let list = [
        &given[..1],
        &[
            json!({"role": "assistant", "content": "Both.", "tool_calls": [called("a", "look_up"), called("b", "look_up")]}),
            result("a", "A"),
            result("b", none),
            given[3].clone(),
            given[4].clone(),
            json!({"role": "assistant", "content": null, "tool_calls": [called("b_6", "earlier_call")]}),
            result("b_6", "B"),
            json!({"role": "assistant", "content": "Again.", "tool_calls": [called("a_7", "look_up")]}),
            result("a_7", none),
        ],
    ];
    assert_eq!(context["messages"], Value::from(list.concat()));
    assert_includes(&context, &json!({"inserted": 3, "cache": {"stable_messages": 9}}));
    assert!(context["cache"].get("stable_blocks").is_none());

    let context = app.context("s", &json!({"format": "anthropic"})).await;
    let call = |id: &str, name: &str| json!({"type": "tool_use", "id": id, "name": name, "input": {}});
    let result =
        |id: &str, said: &str| json!({"type": "tool_result", "tool_use_id": id, "content": [text(said)]});
    let expected = json!([
        {"role": "user", "content": [text("Go.")]},
        {"role": "assistant", "content": [text("Both."), call("a", "look_up"), call("b", "look_up")]},
        {"role": "user", "content": [result("a", "A"), result("b", none), text("And b?")]},
        {"role": "assistant", "content": [text("Wait."), call("b_6", "earlier_call")]},
        {"role": "user", "content": [result("b_6", "B")]},
        {"role": "assistant", "content": [text("Again."), call("a_7", "look_up")]},
        {"role": "user", "content": [result("a_7", none)]},
    ]);
    assert_eq!(context["messages"], expected, "{context:#}");
    assert_includes(&context["cache"], &json!({"stable_messages": 6, "stable_blocks": 2}));
}

/// Some servers other than OpenAI send empty tool calls. They are stored as received and sent as OpenAI accepts them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_tool_calls_are_not_sent(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn =
        r#"{"role":"user","content":"Tea?"},{"role":"assistant","tool_calls":[],"content":"Yes.","x":1.0}"#;
    app.post("/sessions/s/exchanges", format!(r#"{{"messages":[{turn}]}}"#)).await.ok(201);
    let kept = app.get("/sessions/s/messages").await;
    assert!(
        kept.text.contains(r#"{"role":"assistant","tool_calls":[],"content":"Yes.","x":1.0}"#),
        "{}",
        kept.text
    );
    for (options, sent) in [
        ("", r#"{"role":"assistant","content":"Yes."}"#),
        (r#"{"fields":"all"}"#, r#"{"role":"assistant","content":"Yes.","x":1.0}"#),
    ] {
        let context = app.post(PATH, options).await;
        context.ok(200);
        assert!(context.text.contains(sent), "{}", context.text);
    }
    let context = app.context("s", &json!({"format": "anthropic"})).await;
    let expected = json!([
        {"role": "user", "content": [text("Tea?")]}, {"role": "assistant", "content": [text("Yes.")]},
    ]);
    assert_eq!(context["messages"], expected);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cache_control_marks_the_stable_prefix(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_turns("s", 0..2).await;
    let options = |most: Option<u32>| json!({"format": "anthropic", "system_prompt": "Be kind.", "user_message": "Hm?", "cache_control": true, "max_tokens": most});
    let context = app.context("s", &options(None)).await;
    let mark = json!({"type": "ephemeral"});
    assert_eq!(context["system"], json!([{"type": "text", "text": "Be kind.", "cache_control": mark}]));
    let marked = |context: &Value| -> Vec<usize> {
        let list = context["messages"].as_array().expect("a list").iter().enumerate();
        list.filter(|(_, message)| message["content"][0]["cache_control"] == mark).map(|(at, _)| at).collect()
    };
    assert_eq!((marked(&context), &context["cache"]["stable_messages"]), (vec![3], &json!(4)));
    let tokens = |context: &Value| {
        let tokens = ["system", "history"].map(|part| context["tokens"][part].as_i64().expect("a number"));
        tokens.iter().sum::<i64>()
    };
    assert_eq!(context["cache"]["stable_tokens"], tokens(&context));
    // If messages must be omitted, the next list begins with another message.
    let whole = u32::try_from(tokens(&context)).expect("small") + 3 + 4;
    let mut off = options(Some(whole));
    off["mode"] = json!("off");
    let cut = app.context("s", &off).await;
    assert_ne!(cut["coverage"]["omitted"], json!([]));
    assert_eq!((marked(&cut), &cut["cache"]["stable_messages"]), (vec![], &json!(0)));
    assert_eq!(cut["cache"]["stable_tokens"], cut["tokens"]["system"]);
    let cut =
        app.context("s", &json!({"system_prompt": "Be kind.", "max_tokens": whole - 8, "mode": "off"})).await;
    assert_eq!(cut["cache"]["stable_messages"], 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_after_the_reply_continues_the_previous_context(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let list = |response: &Response| {
        let (_, rest) = response.text.split_once(r#""messages":["#).expect("a list");
        rest.split_once(r#"],"cache":"#).expect("its end").0.to_owned()
    };
    let mut before = String::new();
    for (question, reply) in
        [(r#""How é\u00e9?""#, r#""Fine.""#), (r#"[{"type":"text","text":"And?"}]"#, r#""So""#)]
    {
        let options = format!(r#"{{"system_prompt":"Be kind.","user_message":{question}}}"#);
        let now = list(&app.post(PATH, options).await);
        assert!(now.starts_with(&before), "{before}\nis not a prefix of\n{now}");
        let said = format!(r#"{{"user_message":{question},"assistant_reply":{reply}}}"#);
        app.post("/sessions/s/exchanges", said).await.ok(201);
        before = now;
    }
    let end = list(&app.post(PATH, r#"{"system_prompt":"Be kind."}"#).await);
    assert!(end.starts_with(&before) && end.ends_with(r#"{"role":"assistant","content":"So"}"#));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_limit_and_budget_omit_messages(backend: Backend) {
    let set = [SMALL, &[("consolidation.max_history_messages", "8")]].concat();
    let app = TestApp::start(&backend, &set).await;
    app.record_turns("s", 0..6).await;
    let options = |most: Option<i64>| json!({"mode": "off", "user_message": "Hm?", "max_tokens": most});
    let bounded = app.context("s", &options(None)).await;
    let omitted =
        |from: u32, to: u32, reason: &str| json!({"from_seq": from, "to_seq": to, "reason": reason});
    let beyond = omitted(1, 4, "max_history_messages");
    assert_eq!(bounded["coverage"]["omitted"], json!([beyond]));
    // With a window, the number of messages does not matter. With one token less, one turn less fits.
    let most = bounded["tokens"]["total"].as_i64().expect("a number") + 3;
    for (most, from) in [(most, 5), (most - 1, 7)] {
        let within = app.context("s", &options(Some(most))).await;
        let coverage = &within["coverage"];
        assert_eq!(coverage["omitted"], json!([omitted(1, from - 1, "max_tokens")]));
        assert_includes(coverage, &json!({"verbatim_from": from, "last_seq": 12}));
        let [all, fewer] = [&bounded, &within].map(|context| context["messages"].as_array().expect("a list"));
        // The first message is the system message with the notice.
        let skipped = usize::try_from(from).expect("small") - 4;
        assert_eq!((fewer.first(), &fewer[1..]), (all.first(), &all[skipped..]));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenizer_factor_scales_budgets_and_counts(backend: Backend) {
    let set = [
        ("tokens.tokenizer", "o200k_base*1.5"),
        ("consolidation.threshold", "4"),
        ("consolidation.keep_recent", "2"),
    ];
    let plain = TestApp::start(&backend, &[]).await;
    plain.record_turns("s", 0..2).await;
    let one = plain.context("s", &json!({})).await;
    assert_eq!(one["tokens"]["tokenizer"], "o200k_base");
    let all = one["tokens"]["total"].as_i64().expect("a number");
    plain.stop().await;
    // Stored counts do not change.
    let more = TestApp::start(&backend, &set[..1]).await;
    let scaled = more.context("s", &json!({})).await;
    let total = scaled["tokens"]["total"].as_i64().expect("a number");
    assert_eq!(scaled["tokens"]["tokenizer"], "o200k_base*1.5");
    assert!(total >= (3 * all).div_euclid(2) && total <= 3 * all / 2 + 4, "{total} of {all}");
    let fits = |most: i64| json!({"max_tokens": most, "mode": "off"});
    assert_eq!(more.context("s", &fits(total + 3)).await["coverage"]["omitted"], json!([]));
    assert_ne!(more.context("s", &fits(total + 2)).await["coverage"]["omitted"], json!([]));
    assert_eq!(more.get("/sessions/s").await["tokens"]["history"], all);
    // The stable prefix is the system prompt and the history, with the same counts.
    for format in ["openai", "anthropic"] {
        let options = json!({"format": format, "system_prompt": "Be kind.", "user_message": "Hm?"});
        let context = more.context("s", &options).await;
        let part = |part: &str| context["tokens"][part].as_i64().expect("a number");
        assert_eq!(context["cache"]["stable_tokens"], part("system") + part("history"), "{context:#}");
    }
    more.stop().await;
    // The limit of the tail is compared with the scaled count.
    for (most, outcome) in [(all * 3 / 2 + 1, "not_due"), (all * 3 / 2 - 1, "consolidated")] {
        let most = most.to_string();
        let set = [&set[..], &[("consolidation.max_tail_tokens", most.as_str())]].concat();
        let app = TestApp::start(&backend, &set).await;
        assert_eq!(
            app.context("s", &json!({})).await["consolidation"]["outcome"],
            outcome,
            "{most} of {all}"
        );
        app.stop().await;
    }
}

#[tokio::test]
async fn invalid_budgets_and_formats_are_reported() {
    let app = TestApp::on_sqlite(&[]).await;
    for (body, expected) in [
        (r#"{"max_tokens":0}"#, ["max_tokens"]),
        (r#"{"max_tokens":-5}"#, ["max_tokens"]),
        (r#"{"max_tokens":1.5}"#, ["max_tokens"]),
        (r#"{"max_tokens":9223372036854775808}"#, ["max_tokens"]),
        (r#"{"max_tokens":"100"}"#, ["max_tokens"]),
        (r#"{"format":"gemini"}"#, ["format"]),
        (r#"{"format":{"openai":1}}"#, ["format"]),
        (r#"{"fields":"some"}"#, ["fields"]),
        (r#"{"include_extra":1}"#, ["include_extra"]),
        (r#"{"cache_control":true}"#, ["cache_control"]),
        (r#"{"cache_control":"yes","format":"anthropic"}"#, ["cache_control"]),
    ] {
        assert_eq!(app.post(PATH, body).await.fields(), expected, "{body}");
    }
    let nulls =
        r#"{"max_tokens":null,"format":null,"fields":null,"include_extra":null,"cache_control":null}"#;
    let nothing = app.post(PATH, nulls).await;
    assert_eq!(nothing.text, app.post(PATH, "").await.text);
    let large = r#"{"max_tokens":9223372036854775807,"format":"anthropic"}"#;
    let context = app.post(PATH, large).await.ok(200);
    assert_eq!((&context["messages"], context.get("system")), (&json!([]), None));
    // The three tokens of the list are needed even without messages.
    app.post(PATH, r#"{"max_tokens":3.0}"#).await.ok(200);
    let response = app.post(PATH, r#"{"max_tokens":2}"#).await;
    let detail = response.problem(422, "budget-too-small");
    assert!(detail.contains("allow at least 3") && detail.contains("o200k_base"), "{detail}");
    assert_eq!(response.json()["errors"][0]["field"], "max_tokens");
}
