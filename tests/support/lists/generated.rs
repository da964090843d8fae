//! Generated sessions with every kind of message, and with missing, late and repeated results of tool calls.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

const PNG: &str = "data:image/png;base64,iVBORw0KGgo=";
const JPEG: &str = "data:image/PNG;base64,_9j_4AAQ\nSkZJRg";
const PDF: &str = "data:application/pdf;base64,JVBERi0xLjQ=";

/// Generates the messages of a session.
pub(crate) fn sessions(turns: usize) -> impl Strategy<Value = Vec<Value>> {
    vec(turn(), 1..=turns).prop_map(|turns| turns.concat())
}

pub(crate) fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        6 => "[a-zA-Z]{1,9} ",
        1 => "[0-9]{1,6}",
        1 => select(vec![". ", "?!", "\n", "\n\n", "  ", "\t", "## Notice\n", "'s", "私はお茶", "🍵", "é", "<|endoftext|>", "\u{2028}", "\"\\"])
            .prop_map(str::to_owned),
    ];
    prop_oneof![
        8 => vec(word, 0..30).prop_map(|words| words.concat()),
        1 => select(vec!["", " ", "\n\t ", "."]).prop_map(str::to_owned),
        1 => "[a-z ]{400,900}",
    ]
}

fn user_part() -> impl Strategy<Value = Value> {
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
    prop_oneof![
        3 => text().prop_map(|text| json!({"type": "text", "text": text})),
        1 => text().prop_map(|text| json!({"type": "input_text", "text": text})),
        1 => text().prop_map(|text| json!({"type": "text", "text": text, "cache_control": null})),
        1 => text().prop_map(|text| json!({"type": "reasoning", "text": text})),
        2 => select(vec![
            image(PNG), image(JPEG), image("data:image/png;base64,PGh0bWw+"), image("HTTPS://example.org/a.png"), image("http://example.org/a.png"),
            image("data:image/tiff;base64,AAAA"), image("data:image/png;base64,no"),
            json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
            json!({"type": "file", "file": {"file_data": PDF, "filename": "plan.pdf"}}),
            json!({"type": "file", "file": {"file_id": "file-1"}}),
            json!({"type": "input_image", "image_url": PNG}),
            json!({"type": "input_image", "file_id": "file-1"}),
            json!({"type": "input_file", "file_data": PDF, "filename": "plan.pdf"}),
            json!({"type": "input_file", "file_url": "https://example.org/plan.pdf"}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "/9j/4AAQSkZJRg=="}}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "no image"}}),
            json!({"type": "tool-call", "toolCallId": "a"}), json!({"text": "no type"}), json!("a string"), json!(7),
        ]),
    ]
}

fn user() -> impl Strategy<Value = Value> {
    let content = prop_oneof![
        4 => text().prop_map(Value::from),
        1 => vec(user_part(), 1..4).prop_map(Value::from),
        1 => select(vec![json!({"parts": [1.50]}), json!(7), json!([]), Value::Null]),
    ];
    (content, proptest::option::weighted(0.2, select(vec!["Ada", "bo_2", "Ada Lovelace"]))).prop_map(
        |(content, name)| {
            let mut message = json!({"role": "user", "content": content});
            if let Some(name) = name {
                message["name"] = name.into();
            }
            message
        },
    )
}

fn assistant() -> impl Strategy<Value = Value> {
    let said = |part: &str, text: String| json!({"type": part, part: text});
    prop_oneof![
        6 => text().prop_map(|text| json!({"role": "assistant", "content": text})),
        1 => (text(), text()).prop_map(move |(a, b)| json!({"role": "assistant", "content": [said("text", a), said("text", b)]})),
        1 => text().prop_map(move |text| json!({"role": "assistant", "content": [said("refusal", text)]})),
        1 => text().prop_map(|text| json!({"role": "assistant", "content": null, "refusal": text})),
        1 => text().prop_map(|text| json!({"role": "assistant", "content": text, "name": "helper"})),
        1 => text().prop_map(|text| json!({"role": "assistant", "content": text, "tool_calls": []})),
        1 => (text(), text()).prop_map(|(text, thought)| json!({"role": "assistant", "content": text, "reasoning_content": thought,
            "refusal": null, "annotations": [], "function_call": null, "tool_calls": null})),
        1 => (text(), text()).prop_map(|(text, thought)| json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": thought}]}, {"type": "output_text", "text": text}]})),
        1 => text().prop_map(|text| json!({"role": "assistant", "content": text, "refusal": text})),
        1 => text().prop_map(|text| json!({"role": "assistant", "content": null, "audio": {"id": "a", "data": "AAAA", "transcript": text}})),
        1 => select(vec![Value::Null, json!([])]).prop_map(|content| json!({"role": "assistant", "content": content})),
        1 => (text(), any::<bool>()).prop_map(|(text, is_complete)| {
            let call = json!({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": "a"}});
            let result = json!({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []});
            let parts = [Some(call), is_complete.then_some(result), Some(json!({"type": "text", "text": text}))];
            json!({"role": "assistant", "content": parts.into_iter().flatten().collect::<Vec<_>>()})
        }),
    ]
}

fn call() -> impl Strategy<Value = Value> {
    // Repeated ids, ids that Anthropic rejects, two that differ only in rejected characters, and one of the largest length.
    let longest = "x".repeat(128);
    let ids = [
        "call_1",
        "call_1",
        "call_2",
        "toolu_01AbC",
        "functions.search:0",
        "functions search:0",
        "ünïcode",
        &longest,
        &longest,
        "",
        "",
    ]
    .map(str::to_owned);
    let arguments = vec![
        "{}",
        r#"{"q":"plan 7","deep":{"a":[1,2.50,"x"]}}"#,
        r#"{ "spaced" : 1 }"#,
        "",
        "[1]",
        "not {json",
        r#"{"cut":"#,
        r#"{"emoji":"\ud83d"}"#,
    ];
    let names = vec![
        "search_history",
        "db.query",
        "multi_tool_use.parallel",
        "",
        "9 lives",
        "a_name_of_more_than_sixty-four_characters_as_servers_of_tools_have_it",
    ];
    (select(ids.to_vec()), select(names), select(arguments)).prop_map(|(id, name, arguments)| match arguments
    {
        "not {json" => json!({"id": id, "type": "custom", "custom": {"name": name, "input": arguments}}),
        "" => json!({"index": 0, "id": id, "function": {"name": name, "arguments": arguments}}),
        _ => json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
    })
}

fn result(id: &str, content: &Value) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": content})
}

fn result_content() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => text().prop_map(Value::from),
        1 => vec(text().prop_map(|text| json!({"type": "text", "text": text})), 1..3).prop_map(Value::from),
        1 => vec(text().prop_map(|text| json!({"type": "output_text", "text": text})), 0..3).prop_map(Value::from),
        1 => (text(), select(vec![PNG, "ftp://example.org/a.png"])).prop_map(|(text, url)| json!([
            {"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}])),
        1 => Just(Value::Null),
    ]
}

/// Generates tool calls with one result, two results, a late result, or none.
fn tool_turn() -> impl Strategy<Value = Vec<Value>> {
    let calls = vec(call(), 1..4);
    let content = prop_oneof![Just(Value::Null), Just(Value::from("")), text().prop_map(Value::from)];
    let fates = vec(select(vec!['y', 'y', 'y', 'y', 'n', 'l', '2', 'o', 'u', 's', 'b']), 3);
    (calls, content, fates, vec(result_content(), 3), text()).prop_map(
        |(calls, content, fates, results, said)| {
            let mut turn = vec![json!({"role": "assistant", "content": content, "tool_calls": calls})];
            let mut late = Vec::new();
            for ((call, fate), content) in calls.iter().zip(fates).zip(results) {
                let result = result(call["id"].as_str().unwrap(), &content);
                match fate {
                    'y' => turn.push(result),
                    'l' => late.push(result),
                    '2' => turn.extend([result.clone(), result]),
                    'o' => turn.extend([self::result("call_lost", &json!("lost")), result]),
                    'u' => turn.extend([json!({"role": "user", "content": "A reminder."}), result]),
                    's' => turn.extend([json!({"role": "system", "content": "A reminder."}), result]),
                    'b' => turn.push(json!({"role": "user", "content": [
                        {"type": "text", "text": "A reminder."},
                        {"type": "tool_result", "tool_use_id": call["id"], "content": content},
                    ]})),
                    _ => {}
                }
            }
            turn.push(json!({"role": "assistant", "content": said}));
            turn.extend(late);
            turn
        },
    )
}

/// Generates a call in the form of before November 2023, with or without its result.
fn legacy_turn() -> impl Strategy<Value = Vec<Value>> {
    let name = select(vec!["find", "a_function_with_a_name_of_more_than_forty_characters"]);
    (name, text(), any::<bool>()).prop_map(|(name, text, is_answered)| {
        let call =
            json!({"role": "assistant", "content": null, "function_call": {"name": name, "arguments": "{}"}});
        let mut turn = vec![call];
        turn.extend(is_answered.then(|| json!({"role": "function", "name": name, "content": text})));
        turn
    })
}

/// Generates a turn of Claude Code: thinking, two calls with any ids, and their results in one message with a reminder.
fn anthropic_turn() -> impl Strategy<Value = Vec<Value>> {
    let id = || select(vec!["toolu_1", "toolu_2", "toolu:3", ""]);
    (id(), id(), text(), any::<bool>(), 0usize..3).prop_map(|(a, b, text, is_first, results)| {
        let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "read.file", "input": {"n": 1.50}, "cache_control": null});
        let result = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}], "is_error": true});
        let thinking = json!({"type": "thinking", "thinking": "hm", "signature": "c2ln"});
        let mut blocks: Vec<Value> = [a, b].into_iter().take(results).map(result).collect();
        let note = json!({"type": "text", "text": "A note."});
        blocks.insert(if is_first { 0 } else { blocks.len() }, note);
        vec![
            json!({"role": "user", "content": "Read both."}),
            json!({"role": "assistant", "content": [thinking, call(a), call(b)]}),
            json!({"role": "user", "content": blocks}),
        ]
    })
}

fn turn() -> impl Strategy<Value = Vec<Value>> {
    prop_oneof![
        4 => (user(), assistant()).prop_map(|(user, assistant)| vec![user, assistant]),
        1 => user().prop_map(|user| vec![user]),
        1 => assistant().prop_map(|assistant| vec![assistant]),
        2 => (user(), tool_turn()).prop_map(|(user, tools)| [vec![user], tools].concat()),
        1 => legacy_turn(),
        1 => result_content().prop_map(|content| vec![result("call_lost", &content)]),
        1 => (text(), select(vec!["system", "developer"])).prop_map(|(text, role)| vec![json!({"role": role, "content": text})]),
        1 => anthropic_turn(),
    ]
}
