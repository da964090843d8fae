//! Exchanges: one turn of a conversation, persisted completely or not at all.

use super::id::UserId;
use super::message::Message;
use super::tokens;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;

/// An exchange to persist; it has at least one message.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The messages, oldest first, with their token counts: counted here, once, and never on the read path.
    pub messages: Vec<(Message, i64)>,
    /// User of the session. `None` keeps the user of an existing session, and means `default` for a new one.
    pub user_id: Option<UserId>,
    /// Replaces the session's metadata: a JSON object.
    pub metadata: Option<String>,
}

/// A client's promise that two requests are one and the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// The key, as it was sent.
    pub key: String,
    /// Hash of the exchange. A later request with the same key must have the same hash.
    pub fingerprint: Vec<u8>,
}

/// The answer to a persisted exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistedExchange {
    /// The `seq` of its first message.
    pub first_seq: i64,
    /// The `seq` of its last message.
    pub last_seq: i64,
    pub created_at: OffsetDateTime,
    /// An earlier request with the same key persisted the exchange.
    pub replayed: bool,
}

impl Exchange {
    /// An exchange of these messages.
    #[must_use]
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

    /// Tokens of all its messages.
    #[must_use]
    pub fn tokens(&self) -> i64 {
        self.messages.iter().map(|(_, tokens)| tokens).sum()
    }

    /// A hash over all that is persisted: equal for equal exchanges, however their JSON was spaced.
    #[must_use]
    pub fn fingerprint(&self) -> Vec<u8> {
        let mut hash = Sha256::new();
        let user_id = self.user_id.as_ref().map(UserId::as_str);
        for part in [user_id, self.metadata.as_deref()] {
            hash.update([u8::from(part.is_some())]);
            field(&mut hash, part.unwrap_or_default());
        }
        for (message, _) in &self.messages {
            field(&mut hash, message.json());
        }
        hash.finalize().to_vec()
    }
}

/// Length first, so that two neighbours can't trade bytes.
fn field(hash: &mut Sha256, text: &str) {
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
