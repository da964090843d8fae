//! Exchanges. An exchange is one turn of a conversation and is persisted completely or not at all.

use super::format;
use super::id::UserId;
use super::message::Message;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

/// An exchange to persist. It has at least one message.
#[derive(Clone, Debug, Default)]
pub struct Exchange {
    /// The messages, oldest first, with their token counts. Tokens are counted once, by [`Exchange::new`], so that reading
    /// does not count them again.
    pub messages: Vec<(Message, i64)>,
    /// The user of the session. An exchange that names no user keeps the user of the session.
    pub user_id: Option<UserId>,
    /// A JSON object that replaces the metadata of the session.
    pub metadata: Option<String>,
    /// The time at which the messages were written, as read by [`given_time`](super::given_time::given_time). `None` is the time of the
    /// store.
    pub created_at: Option<OffsetDateTime>,
    /// The time of our clock when the exchange came in: a later `created_at` becomes this time.
    pub received_at: Option<OffsetDateTime>,
    /// The times of single messages, which take precedence; empty if there are none.
    pub message_times: Vec<Option<OffsetDateTime>>,
    /// The `seq` that the last message of the session must have; 0 means that the session must have no message.
    pub expected_last_seq: Option<i64>,
}

/// The data that is stored with a message in addition to its JSON. [`StoredMessage`] has the same fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageFacts {
    /// `None` is the time of the store.
    #[serde(with = "time::serde::timestamp::microseconds::option")]
    pub created_at: Option<OffsetDateTime>,
    /// Time at which the content of the message was removed.
    #[serde(with = "time::serde::timestamp::microseconds::option")]
    pub redacted_at: Option<OffsetDateTime>,
}

/// A message of the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// Time at which the content of the message was removed.
    pub redacted_at: Option<OffsetDateTime>,
    /// The JSON of the client without the white space between its tokens, or the redacted message.
    pub json: String,
}

impl StoredMessage {
    pub fn facts(&self) -> MessageFacts {
        MessageFacts { created_at: Some(self.created_at), redacted_at: self.redacted_at }
    }
}

/// An idempotency key. Two requests with the same key are the same request, sent twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// The key as the client sent it.
    pub key: String,
    /// Hash of the exchange. A later request with the same key must have the same hash.
    pub fingerprint: Vec<u8>,
}

impl IdempotencyKey {
    /// Returns `true` if the key was stored for the same request. A redaction removes the stored fingerprint, because short
    /// messages can be guessed from it. From then on, any request with the key counts as the same one, so that repeating a
    /// request does not store the redacted message again.
    pub fn is_of(&self, stored: &[u8]) -> bool {
        stored.is_empty() || self.fingerprint == stored
    }
}

/// The result of persisting an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistedExchange {
    /// The `seq` of its first message.
    pub first_seq: i64,
    /// The `seq` of its last message.
    pub last_seq: i64,
    pub created_at: OffsetDateTime,
    /// The user of the session, if it has one.
    pub user_id: Option<UserId>,
    /// The incarnation of the session; `None` if an earlier request persisted the exchange.
    pub incarnation: Option<Uuid>,
    /// `true` if an earlier request with the same key persisted the exchange.
    pub replayed: bool,
}

impl Exchange {
    /// Creates an exchange and counts the tokens of its messages.
    pub fn new(messages: Vec<Message>, user_id: Option<UserId>, metadata: Option<String>) -> Self {
        let messages = messages
            .into_iter()
            .map(|message| {
                let tokens = format::count_tokens(&message);
                (message, tokens)
            })
            .collect();
        Self { messages, user_id, metadata, ..Self::default() }
    }

    /// Returns the times that the client gave, one for each message; empty if it gave none.
    pub fn given_times(&self) -> impl Iterator<Item = Option<OffsetDateTime>> {
        let count = if self.has_given_times() { self.messages.len() } else { 0 };
        let created_at = self.time();
        (0..count).map(move |index| self.message_times.get(index).copied().flatten().or(created_at))
    }

    /// Returns the time that the client gave for the exchange, if any; one in the future becomes the time of our clock.
    pub fn time(&self) -> Option<OffsetDateTime> {
        self.created_at.map(|time| self.received_at.map_or(time, |received| time.min(received)))
    }

    /// Returns `true` if the client gave the time of any message.
    pub fn has_given_times(&self) -> bool {
        self.created_at.is_some() || !self.message_times.is_empty()
    }

    /// Returns the number of tokens of all messages.
    pub fn tokens(&self) -> i64 {
        self.messages.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Returns the size of all messages as JSON.
    pub fn bytes(&self) -> usize {
        self.messages.iter().map(|(message, _)| message.json().len()).sum()
    }

    /// Returns a hash of everything that the request contains. White space between the tokens of the JSON does not change it.
    pub fn fingerprint(&self) -> Vec<u8> {
        let mut hash = Sha256::new();
        let user_id = self.user_id.as_ref().map(UserId::as_str);
        for part in [user_id, self.metadata.as_deref()] {
            hash.update([u8::from(part.is_some())]);
            hash_text(&mut hash, part.unwrap_or_default());
        }
        for (message, _) in &self.messages {
            hash_text(&mut hash, message.json());
        }
        // Fields that a request does not have leave the hash as it was before they existed.
        let nanos = self.created_at.map(OffsetDateTime::unix_timestamp_nanos);
        for (name, value) in
            [("created_at", nanos), ("expected_last_seq", self.expected_last_seq.map(i128::from))]
        {
            if let Some(value) = value {
                hash_text(&mut hash, name);
                hash.update(value.to_le_bytes());
            }
        }
        hash.finalize().to_vec()
    }
}

/// Hashes a text after its length. Without the length, moving bytes from one text to the next would not change the hash.
pub(super) fn hash_text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    fn exchange(texts: &[&str], user: Option<&str>, metadata: Option<&str>) -> Vec<u8> {
        let messages = texts.iter().map(|text| Message::text(Role::User, text)).collect();
        let user = user.map(|user| UserId::new(user).expect("valid"));
        Exchange::new(messages, user, metadata.map(str::to_owned)).fingerprint()
    }

    #[test]
    fn different_exchanges_have_different_fingerprints() {
        let one = exchange(&["a", "b"], None, None);
        assert_eq!(one, exchange(&["a", "b"], None, None));
        let others = [
            exchange(&["ab"], None, None),
            exchange(&["b", "a"], None, None),
            exchange(&["a", "b"], Some("u"), None),
            exchange(&["a", "b"], None, Some("{}")),
            exchange(&["a"], None, None),
        ];
        assert!(!others.contains(&one));
    }

    #[test]
    fn given_time_and_expected_last_seq_change_the_fingerprint() {
        let messages = || vec![Message::text(Role::User, "a")];
        let plain = Exchange::new(messages(), None, None);
        let at = |seconds| OffsetDateTime::from_unix_timestamp(seconds).ok();
        let exchanges = [
            plain.clone(),
            Exchange { created_at: at(1), ..plain.clone() },
            Exchange { created_at: at(2), ..plain.clone() },
            Exchange { expected_last_seq: Some(1), ..plain.clone() },
            Exchange { expected_last_seq: Some(1), created_at: at(1), ..plain.clone() },
        ];
        let hashes: std::collections::HashSet<_> = exchanges.iter().map(Exchange::fingerprint).collect();
        assert_eq!(hashes.len(), exchanges.len());
    }
}
