//! The knowledge of the clients: acknowledged exchanges, and exchanges with an unknown outcome.

use crate::message_ids::MessageId;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ack {
    pub(crate) messages: usize,
    pub(crate) first_seq: usize,
}

/// The exchanges of one session by their numbers. One client writes to a session, one exchange after another.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionAcks {
    pub(crate) acknowledged: BTreeMap<usize, Ack>,
    /// Exchanges that were acknowledged before the client sent the next one. They must be stored in this order.
    pub(crate) in_order: BTreeSet<usize>,
    /// Exchanges that were sent without an acknowledgement, with their number of messages.
    pub(crate) unknown: BTreeMap<usize, usize>,
}

impl SessionAcks {
    pub(crate) fn acknowledged_messages(&self) -> usize {
        self.acknowledged.values().map(|ack| ack.messages).sum()
    }
}

#[derive(Debug)]
pub(crate) struct SessionLog {
    pub(crate) number: usize,
    acks: Mutex<SessionAcks>,
}

impl SessionLog {
    pub(crate) fn id(&self) -> String {
        format!("session-{}", self.number)
    }

    pub(crate) fn message_ids(&self, exchange: usize, exchange_len: usize) -> Vec<MessageId> {
        let session = self.number;
        (1..=exchange_len).map(|position| MessageId { session, exchange, position, exchange_len }).collect()
    }

    pub(crate) fn acks(&self) -> MutexGuard<'_, SessionAcks> {
        self.acks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an exchange before it is sent.
    pub(crate) fn record_sent(&self, exchange: usize, messages: usize) {
        let mut acks = self.acks();
        // The invariant check may have repeated the exchange already.
        if !acks.acknowledged.contains_key(&exchange) {
            acks.unknown.insert(exchange, messages);
        }
    }

    pub(crate) fn record_ack(&self, exchange: usize, first_seq: usize) {
        let mut acks = self.acks();
        let Some(messages) = acks.unknown.remove(&exchange) else {
            // Both the writer and the invariant check repeated the exchange.
            let earlier = acks.acknowledged.get(&exchange).map(|ack| ack.first_seq);
            assert_eq!(
                earlier,
                Some(first_seq),
                "different responses to exchange {exchange} of {}",
                self.id()
            );
            return;
        };
        let later = exchange + 1..;
        let is_last = acks.unknown.range(later.clone()).next().is_none()
            && acks.acknowledged.range(later).next().is_none();
        if is_last {
            acks.in_order.insert(exchange);
        }
        acks.acknowledged.insert(exchange, Ack { messages, first_seq });
    }

    /// Makes the outcome of all exchanges unknown that were acknowledged after `earlier`, because a loss of power may
    /// have removed them.
    pub(crate) fn forget_since(&self, earlier: &SessionAcks) {
        let mut acks = self.acks();
        let (kept, lost): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut acks.acknowledged)
            .into_iter()
            .partition(|(exchange, _)| earlier.acknowledged.contains_key(exchange));
        acks.acknowledged = kept;
        for (exchange, ack) in lost {
            acks.in_order.remove(&exchange);
            acks.unknown.insert(exchange, ack.messages);
        }
    }
}

/// The logs of all sessions of a run.
#[derive(Debug, Default)]
pub(crate) struct AckLog {
    sessions: Mutex<Vec<Arc<SessionLog>>>,
}

impl AckLog {
    pub(crate) fn create_session(&self) -> Arc<SessionLog> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let session = Arc::new(SessionLog { number: sessions.len(), acks: Mutex::default() });
        sessions.push(Arc::clone(&session));
        session
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<SessionLog>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
