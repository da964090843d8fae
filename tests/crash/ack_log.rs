//! The knowledge of the clients: acknowledged exchanges, and exchanges with an unknown outcome.

use crate::message_ids::MessageId;
use crate::removals::RemovalLog;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ack {
    pub(crate) messages: usize,
    pub(crate) first_seq: usize,
}

impl Ack {
    pub(crate) fn last_seq(self) -> usize {
        self.first_seq + self.messages - 1
    }
}

/// The exchanges of one session by their numbers. One client writes to a session, one exchange after another.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionAcks {
    pub(crate) acknowledged: BTreeMap<usize, Ack>,
    /// Exchanges that were acknowledged before the client sent the next one. They must be stored in this order.
    pub(crate) in_order: BTreeSet<usize>,
    /// Exchanges that were sent without an acknowledgement, with their number of messages.
    pub(crate) unknown: BTreeMap<usize, usize>,
    /// Acknowledged exchanges that a rewind has removed, or may have removed, with their number of messages. Each of them is in
    /// the session or in one of its branches.
    pub(crate) removed: BTreeMap<usize, usize>,
    /// Exchanges like these that a loss of power may have removed completely.
    pub(crate) lost: BTreeMap<usize, usize>,
    /// The last message that a rewind without an acknowledgement keeps.
    pub(crate) rewind: Option<usize>,
    pub(crate) forks: Vec<ForkAck>,
    /// An attempt to sync a diverging list has an unknown outcome. Should the database execute it after a rewind, the list would
    /// continue the session instead of diverging from it.
    pub(crate) has_late_list: bool,
}

/// An acknowledged fork.
#[derive(Clone, Debug)]
pub(crate) struct ForkAck {
    pub(crate) id: String,
    /// The exchanges that the fork has, as acknowledged for its source. A sync adds another one.
    pub(crate) acks: SessionAcks,
}

/// The number of the first exchange that a sync appends to a fork.
pub(crate) const FIRST_OF_FORK: usize = 1_000_000;

impl SessionAcks {
    /// Returns the number of messages in the history.
    pub(crate) fn acknowledged_messages(&self) -> usize {
        self.acknowledged.values().map(|ack| ack.messages).sum()
    }

    /// Returns a number that grows with each acknowledgement.
    pub(crate) fn progress(&self) -> usize {
        self.acknowledged_messages() + self.removed.values().sum::<usize>() + self.forks.len()
    }

    /// Returns the exchanges that end before or at a message.
    pub(crate) fn through(&self, seq: usize) -> BTreeMap<usize, Ack> {
        let acks = self.acknowledged.iter().filter(|(_, ack)| ack.last_seq() <= seq);
        acks.map(|(exchange, ack)| (*exchange, *ack)).collect()
    }

    /// Keeps the exchanges that both have at the same position. A rewind may have removed the others meanwhile.
    pub(crate) fn retain_common(&mut self, later: &Self) {
        let first_seq = |ack: Option<&Ack>| ack.map(|ack| ack.first_seq);
        self.acknowledged
            .retain(|exchange, ack| first_seq(later.acknowledged.get(exchange)) == Some(ack.first_seq));
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

    /// Returns `true` if the client sends its complete list of messages each time.
    pub(crate) fn is_synced(&self) -> bool {
        self.number % 2 == 1
    }

    /// Returns the messages of all earlier exchanges that were sent.
    pub(crate) fn ids_before(&self, exchange: usize) -> Vec<MessageId> {
        let acks = self.acks().clone();
        let acknowledged = acks.acknowledged.into_iter().map(|(number, ack)| (number, ack.messages));
        let sent: BTreeMap<usize, usize> = acknowledged.chain(acks.unknown).collect();
        sent.range(..exchange).flat_map(|(number, messages)| self.message_ids(*number, *messages)).collect()
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

    /// Records a rewind before it is sent: from now on, the exchanges after the message may be in a branch. Does nothing and
    /// returns `false` if the load is paused, because the invariant check reads a session by several requests.
    pub(crate) fn record_rewind_sent(&self, after: usize, is_paused: impl Fn() -> bool) -> bool {
        let mut acks = self.acks();
        if is_paused() {
            return false;
        }
        assert!(acks.unknown.is_empty(), "a rewind could remove an exchange while it is repeated");
        let kept = acks.through(after);
        let removed = std::mem::replace(&mut acks.acknowledged, kept.clone()).into_iter();
        let removed: BTreeMap<usize, usize> = removed
            .filter(|(exchange, _)| !kept.contains_key(exchange))
            .map(|(exchange, ack)| (exchange, ack.messages))
            .collect();
        acks.in_order.retain(|exchange| kept.contains_key(exchange));
        acks.removed.extend(removed);
        acks.rewind = Some(after);
        true
    }

    /// Records the acknowledgement of the rewind.
    pub(crate) fn record_rewound(&self) {
        self.acks().rewind = None;
    }

    /// Records a fork with the exchanges up to a message, and with those that were appended to it.
    pub(crate) fn record_fork(&self, id: String, through_seq: usize, appended: Option<(usize, Ack)>) {
        let mut acks = self.acks();
        let acknowledged = acks.through(through_seq).into_iter().chain(appended).collect();
        let of_fork = SessionAcks { acknowledged, ..SessionAcks::default() };
        acks.forks.push(ForkAck { id, acks: of_fork });
    }

    /// Makes the outcome of all exchanges unknown that were acknowledged after `earlier`, because a loss of power may
    /// have removed them. It may also have undone rewinds.
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
        let is_known = |exchange: &usize| {
            earlier.acknowledged.contains_key(exchange) || earlier.removed.contains_key(exchange)
        };
        let (removed, lost): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut acks.removed).into_iter().partition(|(exchange, _)| is_known(exchange));
        acks.removed = removed;
        acks.lost.extend(lost);
        // The rewind may have no message to remove any more. Its process was killed, so it can't run later.
        acks.rewind = None;
        acks.forks.truncate(earlier.forks.len());
    }
}

/// The logs of all sessions of a run.
#[derive(Debug, Default)]
pub(crate) struct AckLog {
    pub(crate) removals: RemovalLog,
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
