//! What the clients know: which exchanges were acknowledged, and which may or may not have been persisted.

use crate::names::Name;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where an acknowledged exchange is: the first of its `seq`s.
pub(crate) type FirstSeq = usize;

/// What is known of one session. Only one client writes to it, one exchange after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// By the exchange's number: how many messages, and where they are.
    pub(crate) acknowledged: BTreeMap<usize, (usize, FirstSeq)>,
    /// Those that were acknowledged before the next one was sent: these must stand in their order.
    pub(crate) in_turn: BTreeSet<usize>,
    /// By the exchange's number: how many messages. Sent at least once, and not acknowledged.
    pub(crate) unknown: BTreeMap<usize, usize>,
    /// Messages acknowledged.
    pub(crate) messages: usize,
}

/// One session's page in the ledger.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) number: usize,
    known: Mutex<Known>,
}

impl Book {
    pub(crate) fn id(&self) -> String {
        format!("session-{}", self.number)
    }

    pub(crate) fn names(&self, exchange: usize, of: usize) -> Vec<Name> {
        (1..=of).map(|place| Name { session: self.number, exchange, place, of }).collect()
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before it is sent.
    pub(crate) fn sends(&self, exchange: usize, of: usize) {
        let mut known = self.known();
        // The check may have repeated it already.
        if !known.acknowledged.contains_key(&exchange) {
            known.unknown.insert(exchange, of);
        }
    }

    pub(crate) fn acknowledge(&self, exchange: usize, first_seq: FirstSeq) {
        let mut known = self.known();
        let Some(of) = known.unknown.remove(&exchange) else {
            // Its writer repeated it, and so did the check.
            let before = known.acknowledged.get(&exchange).map(|(_, first_seq)| *first_seq);
            assert_eq!(before, Some(first_seq), "two answers to exchange {exchange} of {}", self.id());
            return;
        };
        let later = exchange + 1..;
        let is_last = known.unknown.range(later.clone()).next().is_none()
            && known.acknowledged.range(later).next().is_none();
        if is_last {
            known.in_turn.insert(exchange);
        }
        known.messages += of;
        known.acknowledged.insert(exchange, (of, first_seq));
    }

    /// Power was lost when no more than `then` had been acknowledged: what came later did not happen.
    pub(crate) fn forget_since(&self, then: &Known) {
        let mut known = self.known();
        let later: Vec<_> = known
            .acknowledged
            .iter()
            .filter(|(exchange, _)| !then.acknowledged.contains_key(exchange))
            .map(|(exchange, (of, _))| (*exchange, *of))
            .collect();
        for (exchange, of) in later {
            known.acknowledged.remove(&exchange);
            known.in_turn.remove(&exchange);
            known.unknown.insert(exchange, of);
            known.messages -= of;
        }
    }
}

/// All sessions of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    books: Mutex<Vec<Arc<Book>>>,
}

impl Ledger {
    /// A new session.
    pub(crate) fn open(&self) -> Arc<Book> {
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let book = Arc::new(Book { number: books.len(), known: Mutex::default() });
        books.push(Arc::clone(&book));
        book
    }

    /// Every session from this number on.
    pub(crate) fn from(&self, number: usize) -> Vec<Arc<Book>> {
        let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        books.iter().skip(number).cloned().collect()
    }
}
