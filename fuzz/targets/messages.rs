//! Messages of the chat format, as clients send them: what is taken is kept to the letter, can be read again, and is
//! read as any other reader of JSON reads it.
//!
//! The input is one JSON value: a message; and the content of one.

#![no_main]

use precis::domain::validation::FieldError;
use libfuzzer_sys::fuzz_target;
use precis::domain::message::{Message, Role};
use precis::domain::tokens;
use precis::domain::transcript::TranscriptEntry;
use precis_fuzz::quoted;
use serde_json::Value;
use serde_json::value::RawValue;

fuzz_target!(|text: &str| {
    let Ok(raw) = serde_json::from_str::<&RawValue>(text) else {
        return;
    };
    let complain = |wrong: Vec<FieldError>| -> String {
        assert!(!wrong.is_empty(), "refused, and nothing is wrong");
        wrong.into_iter().map(|FieldError { field, detail }| format!("{field}: {detail}; ")).collect()
    };
    match Message::parse(raw) {
        Ok(message) => {
            is_kept(&message, raw.get());
            is_sound(&message);
        }
        Err(wrong) => {
            complain(wrong);
            let complaint = |json: &str| Message::parse(serde_json::from_str(json).ok()?).err().map(complain);
            assert_eq!(quoted(raw.get(), complaint), Vec::<String>::new());
        }
    }
    for role in [Role::User, Role::Assistant] {
        let whole = format!(r#"{{"role":"{role}","content":{}}}"#, raw.get());
        let whole = Message::parse(serde_json::from_str(&whole).expect("JSON"));
        match Message::from_content(role, raw) {
            Ok(message) => {
                is_sound(&message);
                assert_eq!(Ok(message), whole, "content alone is content of a message");
            }
            Err(wrong) => {
                complain(wrong);
                whole.expect_err("content alone is content of a message");
            }
        }
    }
    let message = Message::text(Role::Tool, text);
    assert_eq!((message.content(), message.role()), (text, Role::Tool));
    let message = Message::text(Role::User, text);
    assert_eq!(message.content(), text);
    is_sound(&message);
});

/// All but the white space between tokens is there, in its order.
fn is_kept(message: &Message, given: &str) {
    let bare = |text: &str| -> String { text.chars().filter(|c| !c.is_ascii_whitespace()).collect() };
    assert_eq!(bare(message.json()), bare(given));
    // A text with half a surrogate pair, in a field that nobody reads, is no value.
    if let Ok(given) = serde_json::from_str::<Value>(given) {
        assert_eq!(serde_json::from_str::<Value>(message.json()).ok(), Some(given.clone()));
        assert_eq!(given["role"], message.role().as_str());
        if let Some(content) = given["content"].as_str() {
            assert_eq!(content, message.content());
        }
        let calls = given["tool_calls"].as_array().map_or(0, Vec::len);
        assert_eq!(calls, message.tool_calls().len());
        for (call, given) in
            message.tool_calls().iter().zip(given["tool_calls"].as_array().into_iter().flatten())
        {
            assert_eq!(given["id"], *call.id);
            assert_eq!(given["function"]["name"], *call.name);
            assert_eq!(given["function"]["arguments"], *call.arguments);
        }
    }
    assert!(!message.json().contains(['\n', '\r']), "one message is one line");
}

/// It can be read again, be counted, and be shown to a model.
fn is_sound(message: &Message) {
    assert_eq!(Message::from_stored(message.json().to_owned()).as_ref(), Ok(message));
    assert_eq!(Message::parse(serde_json::from_str(message.json()).expect("JSON")).as_ref(), Ok(message));
    let most = tokens::PER_ATTACHMENT * i64::try_from(message.json().len()).expect("small");
    assert!((tokens::PER_MESSAGE..=most).contains(&tokens::count_message(message)));
    let line = Entry::of(message).encode();
    assert!(!line.contains(['\n', '\r', '<', '>', '\u{2028}', '\u{2029}', '\u{85}']), "{line}");
    serde_json::from_str::<Value>(&line).expect("JSON");
}
