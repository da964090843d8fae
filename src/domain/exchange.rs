//! Exchanges. An exchange is one turn of a conversation and is persisted completely or not at all.

use super::id::UserId;
use super::message::Message;
use super::tokens;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

/// An exchange to persist. It has at least one message.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The messages, oldest first, with their token counts. Tokens are counted once, by [`Exchange::new`], so that reading
    /// does not count them again.
    pub messages: Vec<(Message, i64)>,
    /// The user of the session. `None` keeps the user of an existing session, and means `default` for a new one.
    pub user_id: Option<UserId>,
    /// A JSON object that replaces the metadata of the session.
    pub metadata: Option<String>,
}

/// An idempotency key. Two requests with the same key are the same request, sent twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// The key as the client sent it.
    pub key: String,
    /// Hash of the exchange. A later request with the same key must have the same hash.
    pub fingerprint: Vec<u8>,
}

/// The result of persisting an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistedExchange {
    /// The `seq` of its first message.
    pub first_seq: i64,
    /// The `seq` of its last message.
    pub last_seq: i64,
    pub created_at: OffsetDateTime,
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
                let tokens = tokens::count_message(&message);
                (message, tokens)
            })
            .collect();
        Self { messages, user_id, metadata }
    }

    /// Returns the number of tokens of all messages.
    pub fn tokens(&self) -> i64 {
        self.messages.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Returns a hash of everything that is persisted. White space between the tokens of the JSON does not change it.
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
        hash.finalize().to_vec()
    }
}

/// Hashes a text after its length. Without the length, moving bytes from one text to the next would not change the hash.
fn hash_text(hash: &mut Sha256, text: &str) {
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
}
