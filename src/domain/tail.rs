//! The tail of a session in memory: few allocations and one copy of each text, so that a replica can keep many of them.
//! A tail that has advanced shares its chunks with the earlier one.

use super::message::Message;
use super::message_metadata::{ContextMessage, MessageMetadata};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The part of a tail that a context can contain: its newest messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailLimit {
    /// Largest number of messages.
    pub messages: usize,
    /// Largest sum of the sizes of their stored JSON.
    pub bytes: usize,
}

/// Largest size of a chunk of several messages. An exchange copies the last chunk of a cached tail.
const MAX_CHUNK_BYTES: usize = 32 * 1024;

/// Consecutive messages of a session, oldest first. They never change, because a history is append-only.
#[derive(Clone, Debug)]
pub struct Tail {
    first_seq: i64,
    /// The JSON of the messages. The first chunk can also contain earlier messages.
    chunks: Vec<Chunk>,
    /// Offset of the end of the message before the first one, and of the end of each message.
    ends: Vec<usize>,
    metadata: Vec<MessageMetadata>,
}

/// The JSON of consecutive messages.
#[derive(Clone, Debug)]
struct Chunk {
    /// Offset of the first message.
    start: usize,
    json: Arc<String>,
}

/// A message of a [`Tail`]. Its JSON is read only if it is needed.
#[derive(Clone, Copy, Debug)]
pub struct TailMessage<'t> {
    tail: &'t Tail,
    position: usize,
    pub metadata: &'t MessageMetadata,
}

impl<'t> TailMessage<'t> {
    pub fn seq(&self) -> i64 {
        self.tail.seq_at(self.position)
    }

    /// Returns the message as stored.
    pub fn json(&self) -> &'t str {
        self.tail.json(self.position)
    }
}

impl Chunk {
    fn end(&self) -> usize {
        self.start + self.json.len()
    }
}

impl Tail {
    /// Returns the messages, which must be consecutive. The first one has, or will have, the `seq` `first_seq`.
    pub fn new(first_seq: i64, messages: Vec<ContextMessage>) -> Self {
        let mut tail = Self {
            first_seq,
            chunks: Vec::new(),
            ends: Vec::with_capacity(messages.len() + 1),
            metadata: Vec::with_capacity(messages.len()),
        };
        tail.ends.push(0);
        tail.push(messages);
        tail
    }

    fn push(&mut self, messages: Vec<ContextMessage>) {
        let mut rest = messages.as_slice();
        while !rest.is_empty() {
            let last = self.chunks.last().map_or(0, |chunk| self.json_in(chunk).len());
            let (mut count, mut size) = fill_chunk(last, rest);
            let extended = if count > 0 { self.chunks.pop() } else { None };
            if extended.is_none() {
                (count, size) = fill_chunk(0, rest);
            }
            let mut json = String::with_capacity(size);
            if let Some(chunk) = &extended {
                json.push_str(self.json_in(chunk));
            }
            let start = self.ends.last().map_or(0, |end| end - json.len());
            let (added, others) = rest.split_at(count);
            for message in added {
                json.push_str(&message.json);
                self.ends.push(start + json.len());
            }
            self.chunks.push(Chunk { start, json: Arc::new(json) });
            rest = others;
        }
        self.metadata.extend(messages.into_iter().map(|message| message.metadata));
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
        while skipped < self.len() && self.bytes_from(skipped) + new_bytes > max_bytes {
            skipped += 1;
        }
        let mut first_seq = self.seq_at(skipped);
        while new_bytes > max_bytes {
            new_bytes -= messages.remove(0).json.len();
            first_seq += 1;
        }
        let start = self.end(skipped);
        let mut tail = Self {
            first_seq,
            chunks: self.chunks.iter().filter(|chunk| chunk.end() > start).cloned().collect(),
            ends: Vec::with_capacity(self.len() - skipped + messages.len() + 1),
            metadata: Vec::with_capacity(self.len() - skipped + messages.len()),
        };
        tail.ends.extend_from_slice(self.ends.get(skipped..).unwrap_or_default());
        tail.metadata.extend(self.metadata.iter().skip(skipped).cloned());
        tail.push(messages);
        Some(tail)
    }

    /// Returns the messages, of which those at some positions are replaced by others with these tokens.
    #[must_use]
    pub fn with_replaced(&self, mut replacements: BTreeMap<usize, (Message, i64)>) -> Self {
        let message = |(position, message): (usize, TailMessage<'_>)| {
            let (metadata, json) = match replacements.remove(&position) {
                Some((new, tokens)) => (MessageMetadata::new(&new, tokens), new.json().to_owned()),
                None => (message.metadata.clone(), message.json().to_owned()),
            };
            ContextMessage { seq: message.seq(), metadata, json }
        };
        Self::new(self.first_seq, self.messages(0).enumerate().map(message).collect())
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
        let messages = self.metadata.iter().enumerate().skip(position);
        messages.map(|(position, metadata)| TailMessage { tail: self, position, metadata })
    }

    /// Returns the size of the stored JSON in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes_from(0)
    }

    /// Returns the size of the messages from `position` on.
    fn bytes_from(&self, position: usize) -> usize {
        self.end(self.len()) - self.end(position)
    }

    /// Returns the memory that the tail takes, approximately.
    pub fn memory(&self) -> usize {
        size_of::<Self>()
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.chunks.iter().map(|chunk| size_of::<String>() + chunk.json.capacity()).sum::<usize>()
            + self.ends.capacity() * size_of::<usize>()
            + self.metadata.capacity() * size_of::<MessageMetadata>()
            + self.metadata.iter().map(MessageMetadata::heap_bytes).sum::<usize>()
    }

    /// Returns the offset of the end of the message before `position`, which is at most the number of messages.
    fn end(&self, position: usize) -> usize {
        self.ends.get(position).copied().unwrap_or_default()
    }

    /// Returns the JSON of the message at `position`.
    fn json(&self, position: usize) -> &str {
        let (start, end) = (self.end(position), self.end(position + 1));
        let following = self.chunks.partition_point(|chunk| chunk.start <= start);
        let chunk = following.checked_sub(1).and_then(|index| self.chunks.get(index));
        chunk.and_then(|chunk| chunk.json.get(start - chunk.start..end - chunk.start)).unwrap_or_default()
    }

    /// Returns the part of a chunk that belongs to messages of this tail.
    fn json_in<'c>(&self, chunk: &'c Chunk) -> &'c str {
        chunk.json.get(self.end(0).saturating_sub(chunk.start)..).unwrap_or_default()
    }
}

/// Returns how many of the messages fit into a chunk that has `size` bytes already, and its size with them. An empty chunk takes at
/// least one message.
fn fill_chunk(mut size: usize, messages: &[ContextMessage]) -> (usize, usize) {
    let mut count = 0;
    for message in messages {
        let next = size + message.json.len();
        if size > 0 && next > MAX_CHUNK_BYTES {
            break;
        }
        (count, size) = (count + 1, next);
    }
    (count, size)
}

impl Default for Tail {
    fn default() -> Self {
        Self::new(0, Vec::new())
    }
}

/// Compares the messages. Their chunks depend on how the tail came to be.
impl PartialEq for Tail {
    fn eq(&self, other: &Self) -> bool {
        self.first_seq == other.first_seq
            && self.metadata == other.metadata
            && (0..self.len()).all(|position| self.json(position) == other.json(position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;
    use proptest::prelude::*;

    /// Returns messages of 34 bytes to almost the size of a chunk, and some of more than one.
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
                prop_assert_eq!(message.seq(), expected);
                prop_assert_eq!(message.metadata.tokens, expected);
                let text = format!("\"{expected}\"");
                prop_assert!(message.json().contains(&text));
            }
            let parts = |message: TailMessage<'_>| (message.seq(), message.json().to_owned());
            let rest: Vec<_> = advanced.messages(1).map(parts).collect();
            prop_assert_eq!(rest, advanced.messages(0).skip(1).map(parts).collect::<Vec<_>>());
            let stored: Vec<_> = advanced.messages(0).map(|message| message.json()).collect();
            prop_assert_eq!(advanced.bytes(), stored.concat().len());
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
