//! The tail of a session in memory. A tail that has advanced shares its texts with the earlier one.

use super::message::Message;
use super::message_metadata::{ContextMessage, MessageMetadata};
use std::sync::Arc;

/// The part of a tail that a context can contain: its newest messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailLimit {
    /// Largest number of messages.
    pub messages: usize,
    /// Largest sum of the sizes of their stored JSON.
    pub bytes: usize,
}

/// Consecutive messages of a session, oldest first. They never change, because a history is append-only.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tail {
    first_seq: i64,
    metadata: Vec<MessageMetadata>,
    json: Vec<Arc<str>>,
}

/// A message of a [`Tail`].
#[derive(Clone, Copy, Debug)]
pub struct TailMessage<'t> {
    pub seq: i64,
    pub metadata: &'t MessageMetadata,
    /// The message as stored.
    pub json: &'t str,
}

impl Tail {
    /// Returns the messages, which must be consecutive. The first one has, or will have, the `seq` `first_seq`.
    pub fn new(first_seq: i64, messages: Vec<ContextMessage>) -> Self {
        let parts = messages.into_iter().map(|message| (message.metadata, Arc::from(message.json)));
        let (metadata, json) = parts.unzip();
        Self { first_seq, metadata, json }
    }

    /// Returns the messages from `first_seq` on, followed by `messages`: the newest of them that have at most `max_bytes`.
    /// Returns `None` if the result would have a gap.
    #[must_use]
    pub fn advance(&self, first_seq: i64, max_bytes: usize, messages: Vec<ContextMessage>) -> Option<Self> {
        let next_seq = self.last_seq() + 1;
        if first_seq < self.first_seq
            || first_seq > next_seq
            || messages.first().is_some_and(|message| message.seq != next_seq)
        {
            return None;
        }
        let new = Self::new(next_seq, messages);
        let mut tail = self.clone();
        tail.metadata.extend(new.metadata);
        tail.json.extend(new.json);
        let mut bytes = tail.bytes();
        let is_excluded = |message: &TailMessage<'_>| {
            let is_excluded = message.seq < first_seq || bytes > max_bytes;
            bytes -= message.json.len();
            is_excluded
        };
        let excluded = tail.messages(0).take_while(is_excluded).count();
        tail.first_seq = tail.seq_at(excluded);
        tail.metadata.drain(..excluded);
        tail.json.drain(..excluded);
        Some(tail)
    }

    /// Returns the messages through `last_seq`, followed by `messages`, which are not stored.
    #[must_use]
    pub fn continued(&self, last_seq: i64, messages: &[Message], tokens: impl Fn(&Message) -> i64) -> Self {
        let mut tail = self.clone();
        let kept = usize::try_from(last_seq + 1 - self.first_seq).unwrap_or(0);
        tail.metadata.truncate(kept);
        tail.json.truncate(kept);
        if tail.is_empty() {
            tail.first_seq = last_seq + 1;
        }
        tail.metadata.extend(messages.iter().map(|message| MessageMetadata::new(message, tokens(message))));
        tail.json.extend(messages.iter().map(|message| Arc::from(message.json())));
        tail
    }

    /// Replaces the message at a position by another one with these tokens.
    pub fn replace(&mut self, position: usize, message: &Message, tokens: i64) {
        if let Some((metadata, json)) = self.metadata.get_mut(position).zip(self.json.get_mut(position)) {
            (*metadata, *json) = (MessageMetadata::new(message, tokens), message.json().into());
        }
    }

    pub fn len(&self) -> usize {
        self.metadata.len()
    }

    pub fn is_empty(&self) -> bool {
        self.metadata.is_empty()
    }

    /// Returns the `seq` of the last message, or the one before the first if the tail is empty.
    pub fn last_seq(&self) -> i64 {
        self.seq_at(self.len()) - 1
    }

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
        let messages = (self.first_seq..).zip(&self.metadata).zip(&self.json).skip(position);
        messages.map(|((seq, metadata), json)| TailMessage { seq, metadata, json })
    }

    /// Returns the size of the stored JSON in bytes.
    pub fn bytes(&self) -> usize {
        self.json.iter().map(|json| json.len()).sum()
    }

    /// Returns the memory that the tail takes, approximately.
    pub fn memory(&self) -> usize {
        const COUNTERS_OF_ARC: usize = 2 * size_of::<usize>();
        let of_message = size_of::<MessageMetadata>() + size_of::<Arc<str>>() + COUNTERS_OF_ARC;
        let ids = self.metadata.iter().map(MessageMetadata::heap_bytes).sum::<usize>();
        size_of::<Self>() + self.len() * of_message + ids + self.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;
    use proptest::prelude::*;

    /// Returns messages of 34 bytes to 40 kB.
    fn messages(seqs: std::ops::RangeInclusive<i64>) -> Vec<ContextMessage> {
        let message = |seq: i64| {
            let text = " ".repeat(usize::try_from(seq * seq * seq % 17).expect("a size") * 2500);
            let json = format!(r#"{{"role":"user","content":"{seq}","x":"{text}"}}"#);
            ContextMessage { seq, metadata: MessageMetadata::new(&Message::text(Role::User, ""), seq), json }
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
                prop_assert!(message.json.contains(&text));
            }
        }
    }

    proptest! {
        #[test]
        fn advanced_tail_has_the_newest_messages_within_the_size(len in 0i64..9, new in 0i64..9, max_bytes in 0usize..250_000) {
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
