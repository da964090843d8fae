//! The tail of a session in memory: few allocations and one copy of each text, so that a replica can keep many of them.

use super::message::{Message, SentForm};
use super::message_metadata::{ContextMessage, MessageMetadata};
use super::tokens;
use std::sync::{Arc, OnceLock};

/// The part of a tail that a context can contain: its newest messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailLimit {
    /// Largest number of messages.
    pub messages: usize,
    /// Largest sum of the sizes of their stored JSON.
    pub bytes: usize,
}

/// Consecutive messages of a session, oldest first. They never change, because a history is append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    first_seq: i64,
    /// The JSON of all messages, without a separator.
    json: String,
    /// End of each message in `json`.
    ends: Vec<usize>,
    metadata: Vec<MessageMetadata>,
    /// Messages that are sent in another form than they are stored in, ordered by `seq`. There are few.
    sent_forms: Vec<(i64, Arc<SentMessage>)>,
}

/// The form in which a message is sent, computed once.
#[derive(Debug, PartialEq, Eq)]
struct SentMessage {
    json: Box<str>,
    tokens: i64,
    lacks_attachments: bool,
    /// Tokens of the message in the Anthropic format, once they were counted.
    anthropic_tokens: OnceLock<i64>,
}

/// A message of a [`Tail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailMessage<'t> {
    pub seq: i64,
    pub metadata: &'t MessageMetadata,
    /// The message as stored.
    pub json: &'t str,
    /// The message as chat completions accept it.
    pub sent_json: &'t str,
    /// Tokens of `sent_json`.
    pub sent_tokens: i64,
    /// In `sent_json`, a text has replaced an image, audio or a file.
    pub lacks_attachments: bool,
    /// Keeps the tokens of a message that was recorded in the Anthropic format.
    pub anthropic_tokens: Option<&'t OnceLock<i64>>,
}

impl SentMessage {
    fn of(message: &ContextMessage) -> Option<Self> {
        let SentForm { json, lacks_attachments } =
            SentForm::of(&message.json, !message.metadata.calls.is_empty())?;
        let mut tokens = message.metadata.tokens;
        if lacks_attachments && let Ok(message) = Message::from_stored(json.clone()) {
            tokens = tokens::count_message(&message);
        }
        Some(Self { json: json.into(), tokens, lacks_attachments, anthropic_tokens: OnceLock::new() })
    }
}

impl Tail {
    /// Returns the messages, which must be consecutive. The first one has, or will have, the `seq` `first_seq`.
    pub fn new(first_seq: i64, messages: Vec<ContextMessage>) -> Self {
        let mut tail = Self {
            first_seq,
            json: String::with_capacity(messages.iter().map(|message| message.json.len()).sum()),
            ends: Vec::with_capacity(messages.len()),
            metadata: Vec::with_capacity(messages.len()),
            sent_forms: Vec::new(),
        };
        tail.push(messages);
        tail
    }

    fn push(&mut self, messages: Vec<ContextMessage>) {
        for message in messages {
            let seq = self.last_seq() + 1;
            self.sent_forms.extend(SentMessage::of(&message).map(|form| (seq, Arc::new(form))));
            self.json.push_str(&message.json);
            self.ends.push(self.json.len());
            self.metadata.push(message.metadata);
        }
    }

    /// Returns the messages from `first_seq` on, followed by `messages`: the newest of them that have at most `max_bytes`.
    /// Returns `None` if the result would have a gap.
    #[must_use]
    pub fn advance(
        &self,
        first_seq: i64,
        max_bytes: usize,
        mut messages: Vec<ContextMessage>,
    ) -> Option<Self> {
        if messages.first().is_some_and(|message| message.seq != self.last_seq() + 1) {
            return None;
        }
        let mut skipped =
            usize::try_from(first_seq - self.first_seq).ok().filter(|skipped| *skipped <= self.len())?;
        let mut new_bytes = messages.iter().map(|message| message.json.len()).sum::<usize>();
        while skipped < self.len() && self.json.len() - self.start(skipped) + new_bytes > max_bytes {
            skipped += 1;
        }
        let mut first_seq = self.seq_at(skipped);
        while new_bytes > max_bytes {
            new_bytes -= messages.remove(0).json.len();
            first_seq += 1;
        }
        let start = self.start(skipped);
        let json = self.json.get(start..).unwrap_or_default();
        let mut tail = Self {
            first_seq,
            json: String::with_capacity(json.len() + new_bytes),
            ends: Vec::with_capacity(self.len() - skipped + messages.len()),
            metadata: Vec::with_capacity(self.len() - skipped + messages.len()),
            sent_forms: self.sent_forms.iter().filter(|(seq, _)| *seq >= first_seq).cloned().collect(),
        };
        tail.json.push_str(json);
        tail.ends.extend(self.ends.iter().skip(skipped).map(|end| end - start));
        tail.metadata.extend(self.metadata.iter().skip(skipped).cloned());
        tail.push(messages);
        Some(tail)
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the `seq` of the last message, or the one before the first if the tail is empty.
    pub fn last_seq(&self) -> i64 {
        self.seq_at(self.len()) - 1
    }

    /// Returns the `seq` of the message at a position, which is at most the number of messages.
    fn seq_at(&self, position: usize) -> i64 {
        self.first_seq + i64::try_from(position).unwrap_or(i64::MAX)
    }

    pub fn first_seq(&self) -> i64 {
        self.first_seq
    }

    pub fn metadata(&self) -> &[MessageMetadata] {
        &self.metadata
    }

    /// Returns the messages from `position` on.
    pub fn messages(&self, position: usize) -> impl Iterator<Item = TailMessage<'_>> {
        let mut start = self.start(position);
        let messages = self.ends.iter().zip(&self.metadata).skip(position);
        let mut sent_forms = self.sent_forms.iter().peekable();
        (self.first_seq..).skip(position).zip(messages).map(move |(seq, (end, metadata))| {
            let json = self.json.get(start..*end).unwrap_or_default();
            start = *end;
            while sent_forms.next_if(|(earlier, _)| *earlier < seq).is_some() {}
            let sent = sent_forms.next_if(|(sent, _)| *sent == seq).map(|(_, sent)| sent);
            TailMessage {
                seq,
                metadata,
                json,
                sent_json: sent.map_or(json, |sent| &sent.json),
                sent_tokens: sent.map_or(metadata.tokens, |sent| sent.tokens),
                lacks_attachments: sent.is_some_and(|sent| sent.lacks_attachments),
                anthropic_tokens: sent.map(|sent| &sent.anthropic_tokens),
            }
        })
    }

    /// Returns the size of the stored JSON in bytes.
    pub fn bytes(&self) -> usize {
        self.json.len()
    }

    /// Returns the memory that the tail takes, approximately.
    pub fn memory(&self) -> usize {
        let ids = self.metadata.iter().flat_map(|metadata| metadata.calls.iter().chain(&metadata.result_of));
        size_of::<Self>()
            + self.json.capacity()
            + self.ends.capacity() * size_of::<usize>()
            + self.metadata.capacity() * size_of::<MessageMetadata>()
            + self
                .sent_forms
                .iter()
                .map(|(_, sent)| sent.json.len() + size_of::<(i64, SentMessage)>())
                .sum::<usize>()
            + ids.map(|id| id.capacity() + size_of::<String>()).sum::<usize>()
    }

    /// Returns the start of the message at `position` in `json`.
    fn start(&self, position: usize) -> usize {
        position.checked_sub(1).and_then(|previous| self.ends.get(previous)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages(seqs: std::ops::RangeInclusive<i64>) -> Vec<ContextMessage> {
        let message = |seq: i64| {
            // Every third message is sent in another form than it is stored in.
            let name = if seq % 3 == 0 { r#","name":null"# } else { "" };
            let json = format!(r#"{{"role":"user","content":"{seq}"{name}}}"#);
            let message = Message::from_stored(json.clone()).expect("a message");
            ContextMessage { seq, metadata: MessageMetadata::new(&message, seq), json }
        };
        seqs.map(message).collect()
    }

    proptest! {
        #[test]
        fn advanced_tail_equals_tail_of_the_same_messages(first in 1i64..9, len in 0i64..9, skip in 0i64..9, new in 0i64..9) {
            let tail = Tail::new(first, messages(first..=first + len - 1));
            let last = first + len - 1;
            prop_assume!(skip <= len);
            let advanced =
                tail.advance(first + skip, usize::MAX, messages(last + 1..=last + new)).expect("no gap");
            prop_assert_eq!(advanced.last_seq(), last + new);
            prop_assert_eq!(&advanced, &Tail::new(first + skip, messages(first + skip..=last + new)));
            for (expected, message) in (first + skip..).zip(advanced.messages(0)) {
                prop_assert_eq!(message.seq, expected);
                prop_assert_eq!(message.metadata.tokens, expected);
                let text = format!("\"{expected}\"");
                prop_assert!(message.json.contains(&text) && message.sent_json.contains(&text));
                prop_assert_eq!(message.sent_json.contains("name"), false);
            }
            let rest: Vec<_> = advanced.messages(1).collect();
            prop_assert_eq!(rest, advanced.messages(0).skip(1).collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn advanced_tail_has_the_newest_messages_within_the_size(len in 0i64..9, new in 0i64..9, max_bytes in 0usize..700) {
            let mut expected = messages(1..=len + new);
            let bytes = |messages: &[ContextMessage]| messages.iter().map(|message| message.json.len()).sum::<usize>();
            while bytes(&expected) > max_bytes {
                expected.remove(0);
            }
            let tail = Tail::new(1, messages(1..=len)).advance(1, max_bytes, messages(len + 1..=len + new));
            let first_seq = expected.first().map_or(len + new + 1, |message| message.seq);
            prop_assert_eq!(tail, Some(Tail::new(first_seq, expected)));
        }
    }

    #[test]
    fn tail_with_a_gap_is_rejected() {
        let tail = Tail::new(3, messages(3..=5));
        assert_eq!(tail.advance(3, 1000, messages(7..=8)), None);
        assert_eq!(tail.advance(2, 1000, messages(6..=6)), None, "message 2 is missing");
        assert_eq!(tail.advance(7, 1000, vec![]), None);
    }
}
