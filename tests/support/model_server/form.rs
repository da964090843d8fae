//! What the bytes of a response look like: everything that a client must not mind, and some that it must.

use super::answer::Event;
use super::gzip;
use super::wire::{Framing, Response};
use serde_json::{Value, json};
use std::time::Duration;

/// What the bytes of a response look like. What is said of events is for streams that the server makes itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Each byte is sent for itself, in a chunk of its own, so that no layer puts them together again.
    EveryByte,
    /// Lines end with CR LF.
    Crlf,
    /// Lines end with CR alone.
    Cr,
    /// A byte order mark comes first.
    Bom,
    /// Comments before each event and within it, empty ones too.
    Comments,
    /// An event of a type that nobody knows before each event.
    UnknownEvents,
    /// Fields that nobody knows in each event and in each JSON object; those of the events that don't matter too.
    UnknownFields,
    /// A comment of so many bytes comes first.
    HugeComment(usize),
    /// An event of a type that nobody knows comes first, with so many bytes.
    HugeEvent(usize),
    /// Without what the answer cost.
    NoUsage,
    /// This as the content type.
    Labelled(&'static str),
    /// Compressed, and it says so, though nobody asked for it.
    Gzip,
    /// The length that is announced is so much more than what comes.
    LengthOver(usize),
    /// The length that is announced is so much less than what comes.
    LengthUnder(usize),
}

impl Response {
    /// In these forms, as far as they are not a matter of its events.
    pub(super) fn in_form(mut self, forms: &[Form]) -> Self {
        // The length of what is sent is known when it is compressed.
        if forms.contains(&Form::Gzip) {
            let body: Vec<u8> = self.parts.drain(..).flat_map(|(_, bytes)| bytes).collect();
            self.parts.push((Duration::ZERO, gzip::compress(&body)));
            self.headers.push(("content-encoding", "gzip".to_owned()));
        }
        let length: usize = self.parts.iter().map(|(_, bytes)| bytes.len()).sum();
        if let Framing::Length(announced) = &mut self.framing {
            *announced = length;
        }
        for form in forms {
            match *form {
                Form::Labelled(label) => {
                    self.headers.retain(|(name, _)| *name != "content-type");
                    self.headers.push(("content-type", label.to_owned()));
                }
                Form::LengthOver(more) => self.framing = Framing::Length(length + more),
                Form::LengthUnder(less) => self.framing = Framing::Length(length.saturating_sub(less)),
                Form::EveryByte => self.piece = 1,
                _ => {}
            }
        }
        self
    }
}

/// The events, and the pause before each part of them.
pub(super) fn stream(events: &[Event], forms: &[Form]) -> Vec<(Duration, Vec<u8>)> {
    let mut start = String::new();
    if forms.contains(&Form::Bom) {
        start.push('\u{feff}');
    }
    start.push_str(": a comment first\n\n");
    for form in forms {
        match *form {
            Form::HugeComment(bytes) => start.extend([": ", &"x".repeat(bytes), "\n\n"]),
            Form::HugeEvent(bytes) => start.push_str(&unknown_event(&"x".repeat(bytes))),
            _ => {}
        }
    }
    let mut parts = vec![(Duration::ZERO, start)];
    for next in events {
        if !next.pause.is_zero() {
            parts.push((next.pause, String::new()));
        }
        if let Some((_, part)) = parts.last_mut() {
            part.push_str(&event(next, forms));
        }
    }
    parts.into_iter().map(|(pause, part)| (pause, bytes(&part, forms))).collect()
}

/// An event, its lines ended with LF.
pub(super) fn event(event: &Event, forms: &[Form]) -> String {
    let has = |form| forms.contains(&form);
    let mut text = String::new();
    if has(Form::Comments) {
        text.push_str(": a comment: data: {\n:\n\n:\n");
    }
    if has(Form::UnknownEvents) {
        text.push_str(&unknown_event("not a part of the answer"));
    }
    if has(Form::UnknownFields) {
        text.push_str("id: 7\nretry: 60000\nx-unknown: 1\nx-empty\n");
    }
    if let Some(name) = event.name {
        text.extend(["event: ", name, "\n"]);
    }
    if has(Form::Comments) {
        text.push_str(": within an event\n");
    }
    let data = match &event.data {
        Value::String(mark) => mark.clone(),
        data => object(data, forms),
    };
    text.extend(["data: ", &data, "\n\n"]);
    text
}

/// With the line ends that they should have. JSON on one line has none of its own.
pub(super) fn bytes(lines: &str, forms: &[Form]) -> Vec<u8> {
    let end = forms.iter().find_map(|form| match form {
        Form::Crlf => Some("\r\n"),
        Form::Cr => Some("\r"),
        _ => None,
    });
    lines.replace('\n', end.unwrap_or("\n")).into_bytes()
}

/// An object of the response, on one line.
pub(super) fn object(object: &Value, forms: &[Form]) -> String {
    let mut object = object.clone();
    if forms.contains(&Form::UnknownFields) {
        object["x_unknown"] = json!({"list": [1, null, {}], "text": "not a part of the answer"});
    }
    object.to_string()
}

fn unknown_event(text: &str) -> String {
    format!("event: whatever\ndata: {}\n\n", json!({"type": "whatever", "text": text}))
}
