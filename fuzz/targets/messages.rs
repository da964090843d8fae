//! Fuzzes messages of the chat format. An accepted message is kept verbatim, can be parsed again, and means the same to
//! any other JSON parser.
//!
//! The input is one JSON value, which is used as a message and as the content of a message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use precis::domain::message::{Message, Role};
use precis::domain::tokens;
use precis::domain::transcript::TranscriptEntry;
use precis::domain::validation::FieldError;
use precis_fuzz::quoted;
use serde_json::Value;
use serde_json::value::RawValue;

fuzz_target!(|text: &str| {
    let Ok(raw) = serde_json::from_str::<&RawValue>(text) else {
        return;
    };
    let error_text = |errors: Vec<FieldError>| -> String {
        assert!(!errors.is_empty(), "rejected without an error");
        errors.into_iter().map(|FieldError { field, detail }| format!("{field}: {detail}; ")).collect()
    };
    match Message::parse(raw) {
        Ok(message) => {
            assert_kept_verbatim(&message, raw.get());
            assert_consistent(&message);
        }
        Err(errors) => {
            error_text(errors);
            let rejection =
                |json: &str| Message::parse(serde_json::from_str(json).ok()?).err().map(error_text);
            assert_eq!(quoted(raw.get(), rejection), Vec::<String>::new());
        }
    }
    for role in [Role::User, Role::Assistant] {
        let whole = format!(r#"{{"role":"{role}","content":{}}}"#, raw.get());
        let whole = Message::parse(serde_json::from_str(&whole).expect("JSON"));
        match Message::from_content(role, raw) {
            Ok(message) => {
                assert_consistent(&message);
                assert_eq!(Ok(message), whole, "content alone is content of a message");
            }
            // A message may lack its content; a reply may not.
            Err(errors) => {
                error_text(errors);
            }
        }
    }
    let message = Message::text(Role::Tool, text);
    assert_eq!((message.content(), message.role()), (text, Role::Tool));
    let message = Message::text(Role::User, text);
    assert_eq!(message.content(), text);
    assert_consistent(&message);
});

/// Checks that nothing but white space between tokens was removed.
fn assert_kept_verbatim(message: &Message, given: &str) {
    let without_white_space =
        |text: &str| -> String { text.chars().filter(|c| !c.is_ascii_whitespace()).collect() };
    assert_eq!(without_white_space(message.json()), without_white_space(given));
    // An unknown field may contain a lone surrogate, which `Value` rejects.
    if let Ok(given) = serde_json::from_str::<Value>(given) {
        assert_eq!(serde_json::from_str::<Value>(message.json()).ok(), Some(given.clone()));
        let is_current = given["role"] != "function" && given.get("function_call").is_none();
        assert!(!is_current || given["role"] == message.role().as_str());
        if let Some(content) = given["content"].as_str() {
            assert_eq!(content, message.content());
        }
        let calls = given["tool_calls"].as_array().map_or(0, Vec::len);
        assert!(!is_current || calls == message.tool_calls().len());
        let given = given["tool_calls"].as_array().into_iter().flatten().filter(|_| is_current);
        // Calls of custom tools have no function.
        for (call, given) in
            message.tool_calls().iter().zip(given).filter(|(_, given)| given["function"].is_object())
        {
            assert_eq!(given["id"], *call.id);
            assert_eq!(given["function"]["name"], *call.name);
            assert_eq!(given["function"]["arguments"], *call.arguments);
        }
    }
    assert!(!message.json().contains(['\n', '\r']), "one message is one line");
}

/// Checks that the message can be parsed again, counted, and written as a transcript line.
fn assert_consistent(message: &Message) {
    assert_eq!(Message::from_stored(message.json().to_owned()).as_ref(), Ok(message));
    assert_eq!(Message::parse(serde_json::from_str(message.json()).expect("JSON")).as_ref(), Ok(message));
    let most = tokens::PER_ATTACHMENT * i64::try_from(message.json().len()).expect("small");
    assert!((tokens::PER_MESSAGE..=most).contains(&tokens::count_message(message)));
    let line = TranscriptEntry::of(message).encode();
    assert!(!line.contains(['\n', '\r', '<', '>', '\u{2028}', '\u{2029}', '\u{85}']), "{line}");
    serde_json::from_str::<Value>(&line).expect("JSON");
}
