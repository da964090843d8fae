//! Messages that contain their identity, and summaries that name the messages they cover.
//!
//! The content of the second of four messages of exchange 12 in session 3 begins with `s3e12.2of4`. The scripted model
//! repeats these ids in its summaries. A compressed summary states how many messages it covers and the last one of them.
//! So the text of a summary alone proves which messages it covers.

use crate::removals;
use crate::support::model_server::Call;
use serde_json::{Value, json};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MessageId {
    pub(crate) session: usize,
    pub(crate) exchange: usize,
    /// The position in the exchange, beginning with 1.
    pub(crate) position: usize,
    pub(crate) exchange_len: usize,
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}e{}.{}of{}", self.session, self.exchange, self.position, self.exchange_len)
    }
}

impl MessageId {
    fn parse(word: &str) -> Option<Self> {
        let (session, rest) = word.strip_prefix('s')?.split_once('e')?;
        let (exchange, rest) = rest.split_once('.')?;
        let (position, exchange_len) = rest.split_once("of")?;
        let number = |digits: &str| digits.parse().ok();
        Some(Self {
            session: number(session)?,
            exchange: number(exchange)?,
            position: number(position)?,
            exchange_len: number(exchange_len)?,
        })
    }

    /// Reads the id at the beginning of a message's content.
    pub(crate) fn of_message(message: &Value) -> Self {
        let content = message["content"].as_str().unwrap_or_default();
        let first = content.split(' ').next().unwrap_or_default();
        Self::parse(first).unwrap_or_else(|| panic!("unexpected message: {message}"))
    }

    /// Returns the message. It depends only on the id, so that any changed byte is detected.
    pub(crate) fn message(self) -> Value {
        // Every eighth exchange is long, so that it needs many packets and many database pages.
        let padding =
            if self.exchange % 8 == 7 { "and so on, \u{1F980} ".repeat(200) } else { String::new() };
        let content = format!("{self} some text {padding}");
        let call_id = format!("call-{}", self.exchange);
        match (self.position, self.exchange_len) {
            (2, 4) => {
                let function = json!({"name": "look", "arguments": "{}"});
                json!({"role": "assistant", "content": content,
                    "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
            }
            (3, 4) => json!({"role": "tool", "tool_call_id": call_id, "content": content}),
            (position, _) if position % 2 == 1 => json!({"role": "user", "content": content}),
            _ => json!({"role": "assistant", "content": content}),
        }
    }
}

/// Returns `true` if the ids are those of complete exchanges.
pub(crate) fn are_complete_exchanges(ids: &[MessageId]) -> bool {
    let mut rest = ids;
    while let Some(first) = rest.first() {
        let Some((exchange, after)) = rest.split_at_checked(first.exchange_len) else {
            return false;
        };
        if !(1..).zip(exchange).all(|(position, id)| *id == MessageId { position, ..*first }) {
            return false;
        }
        rest = after;
    }
    true
}

/// The messages that a summary claims to cover.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SummaryCoverage {
    /// The number of messages in the compressed part, and the last of them.
    compressed: Option<(usize, MessageId)>,
    ids: Vec<MessageId>,
}

impl SummaryCoverage {
    pub(crate) fn parse(text: &str) -> Self {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
        let words: Vec<&str> =
            words.map(|word| word.trim_matches('.')).filter(|word| !word.is_empty()).collect();
        let mut coverage = Self::default();
        let mut rest = &words[..];
        while let [word, after @ ..] = rest {
            if let ["Through", count, "messages", "until", last, after @ ..] = rest {
                assert_eq!(coverage, Self::default(), "the compressed part must come first: {text}");
                let count = count.parse().expect("a number");
                coverage.compressed = Some((count, MessageId::parse(last).expect("a message id")));
                rest = after;
                continue;
            }
            coverage.ids.extend(MessageId::parse(word));
            rest = after;
        }
        coverage
    }

    pub(crate) fn len(&self) -> usize {
        self.compressed_len() + self.ids.len()
    }

    pub(crate) fn compressed_len(&self) -> usize {
        self.compressed.map_or(0, |(count, _)| count)
    }

    /// Returns the ids after the compressed part.
    pub(crate) fn ids(&self) -> &[MessageId] {
        &self.ids
    }

    /// Returns `true` if the summary covers exactly these messages, in this order.
    pub(crate) fn matches(&self, ids: &[MessageId]) -> bool {
        let Some((count, last)) = self.compressed else {
            return self.ids == ids;
        };
        let Some((compressed, rest)) = ids.split_at_checked(count) else {
            return false;
        };
        compressed.last() == Some(&last) && self.ids == rest
    }
}

/// Returns the answer of the scripted model.
pub(crate) fn summarise(call: &Call) -> String {
    if call.user().starts_with("Compress this summary") {
        let coverage = SummaryCoverage::parse(call.user());
        let Some(last) = coverage.ids.last() else {
            // The session of a client that removes messages.
            let words = call.user().split(|c: char| !c.is_ascii_alphanumeric());
            let words: Vec<&str> = words.filter(|word| removals::is_word(word)).take(10).collect();
            return format!("Earlier {} .", words.join(" "));
        };
        return format!("Through {} messages until {last} .", coverage.len());
    }
    let lines = call.user().lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let first_word = |line: Value| Some(line["text"].as_str()?.split(' ').next()?.to_owned());
    let ids = lines.filter_map(first_word);
    let ids: Vec<String> =
        ids.filter(|word| MessageId::parse(word).is_some() || removals::is_word(word)).collect();
    format!("It covers {} .", ids.join(" "))
}
