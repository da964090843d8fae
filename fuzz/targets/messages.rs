//! Fuzzes messages of any format. An accepted message is kept verbatim, can be read again, and becomes JSON in every format and profile.
//!
//! The input is one JSON value, which is used as a message and as the content of a message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use precis::domain::format::{self, Format, ListOptions, Profile, RenderInput};
use precis::domain::message::{Message, Role};
use precis::domain::message_metadata::{ContextMessage, MessageMetadata};
use precis::domain::sync::difference;
use precis::domain::tail::Tail;
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
    // The service replaces halves of surrogate pairs before it reads a message.
    if serde_json::from_str::<Value>(text).is_err() {
        return;
    }
    let error_text = |FieldError { field, detail }: FieldError| format!("{field}: {detail}");
    match format::read_given(raw) {
        Ok(messages) => {
            if let [message] = messages.as_slice() {
                assert_kept_verbatim(message, raw.get());
            }
            assert_consistent(&messages);
        }
        Err(_) => {
            let rejection =
                |json: &str| format::read_given(serde_json::from_str(json).ok()?).err().map(error_text);
            assert_eq!(quoted(raw.get(), rejection), Vec::<String>::new());
        }
    }
    for role in Role::ALL {
        let whole = format!(r#"{{"role":"{role}","content":{}}}"#, raw.get());
        let whole = format::read_given(serde_json::from_str(&whole).expect("JSON"));
        // Content of another type is accepted only in a message.
        if let Ok(messages) = format::read_content(role, raw) {
            assert_eq!(Ok(messages), whole, "content alone is content of a message");
        }
        assert_consistent(&whole.expect("any content is accepted"));
    }
    let message = Message::text(Role::User, text);
    assert_eq!(message.content(), text);
    assert_consistent(&[message]);
});

/// Checks that nothing but white space between tokens was removed.
fn assert_kept_verbatim(message: &Message, given: &str) {
    let without_white_space =
        |text: &str| -> String { text.chars().filter(|c| !c.is_ascii_whitespace()).collect() };
    assert_eq!(without_white_space(message.json()), without_white_space(given));
    let given = serde_json::from_str::<Value>(given).expect("JSON");
    assert_eq!(serde_json::from_str::<Value>(message.json()).ok(), Some(given.clone()));
    if let Some(content) = given["content"].as_str().filter(|content| !content.is_empty()) {
        assert!(message.content().starts_with(content));
    }
    assert!(!message.json().contains(['\n', '\r']), "one message is one line");
}

/// Checks that the messages can be read again, compared, counted, written as lines of a transcript, and rendered.
fn assert_consistent(messages: &[Message]) {
    let mut stored = Vec::new();
    for (seq, message) in (1..).zip(messages) {
        assert_eq!(format::read(message.json()).as_ref(), Ok(message));
        assert_eq!(difference(message, message), None);
        let redacted = message.redacted();
        assert_eq!((redacted.redacted(), format::read(redacted.json())), (redacted.clone(), Ok(redacted)));
        let tokens = format::count_tokens(message);
        assert!(tokens >= tokens::PER_MESSAGE);
        let line = TranscriptEntry::of(message).encode();
        assert!(!line.contains(['\n', '\r', '<', '>', '\u{2028}', '\u{2029}', '\u{85}']), "{line}");
        serde_json::from_str::<Value>(&line).expect("JSON");
        let metadata = MessageMetadata::new(message, tokens);
        stored.push(ContextMessage { seq, metadata, json: message.json().to_owned() });
    }
    let tail = Tail::new(1, stored);
    for format in Format::ALL {
        for profile in Profile::ALL {
            let options = ListOptions { profile, ..ListOptions::default() };
            let history = format.render_messages(options, &tail, 0).expect("messages");
            assert!(history.iter().all(|message| message.tokens > 0));
            let input = RenderInput { history, profile, ..RenderInput::default() };
            let list = format.render_context(input).messages;
            assert!(serde_json::from_str::<Vec<Value>>(&list).is_ok());
        }
    }
}
