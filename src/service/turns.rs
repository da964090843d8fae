//! Turns of clients that do not know the history: finds the place of their list, builds the context for it, and stores the turn with
//! its answer in one exchange. The rules of the place are those of [`reconcile`](crate::domain::reconcile).

use super::contexts::{Context, ContextOptions};
use super::export::message_page;
use super::{Error, MemoryService, StoreError, decode_message, to_i64};
use crate::blocking;
use crate::capacity;
use crate::domain::consolidation::Mode;
use crate::domain::exchange::{Exchange, IdempotencyKey};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::reconcile::{HistoryMessage, Placement, is_newest, place};
use crate::domain::tokens;
use crate::storage::AppendRequest;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// Messages of the history that are compared in addition to as many as the list has: instructions that the client does not send, and
/// an answer that it did not receive.
const MORE_MESSAGES: usize = 16;
/// A parsed message takes about this many times its JSON.
const COPIES: usize = 3;
/// A turn that replaces more messages rewinds the session before its context is built, because they can be all that is loaded.
const MAX_REPLACED: i64 = 50;
/// Time for which storing a turn is repeated while the store is unavailable.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The list of a client, and the session that it belongs to.
#[derive(Clone, Debug)]
pub struct ClientTurn {
    pub tenant: TenantId,
    pub session: SessionId,
    pub user: Option<UserId>,
    /// The user if neither the session nor the request names one.
    pub default_user: Option<UserId>,
    /// Without the system prompt.
    pub list: Arc<Vec<Message>>,
    /// The client says that it repeats a request.
    pub is_retry: bool,
    /// A repeated attempt to store the turn has the same key.
    pub key: Uuid,
}

/// The place of a turn, as of a state of the session.
#[derive(Clone, Copy, Debug)]
pub struct TurnPlace {
    place: Placement,
    last_seq: i64,
    cursor: i64,
}

impl TurnPlace {
    /// Returns the messages that the turn and its answer will have, if no other turn comes first.
    #[must_use]
    pub fn expected(&self, turn: &ClientTurn) -> RangeInclusive<i64> {
        let new = to_i64(turn.list.len().saturating_sub(self.place.from));
        self.place.keep + 1..=self.place.keep + new + 1
    }

    /// Returns the last stored message before the turn.
    #[must_use]
    pub fn keep(&self) -> i64 {
        self.place.keep
    }
}

impl MemoryService {
    /// Returns the number of tokens of a text, as [`ContextOptions::reserved_tokens`] counts them.
    #[must_use]
    pub fn count_tokens(&self, text: &str) -> i64 {
        self.config.tokenizer.scale(tokens::count_text(text))
    }

    /// Returns the window in tokens for contexts without one.
    #[must_use]
    pub fn default_window(&self) -> Option<i64> {
        self.config.policy.context_window
    }

    /// Returns the place of a turn; `None` if its list is no part of the conversation.
    pub async fn place_turn(&self, turn: &ClientTurn) -> Result<Option<TurnPlace>, Error> {
        let head = self.store.session_head(&turn.tenant, &turn.session).await?;
        let (last_seq, cursor) = head.as_ref().map_or((0, 0), |head| (head.last_seq, head.cursor));
        let count = to_i64(turn.list.len() + MORE_MESSAGES);
        let recent = self.history(turn, (last_seq - count).max(0), last_seq).await?;
        let (list, is_retry) = (Arc::clone(&turn.list), turn.is_retry);
        let bytes = bytes(&recent);
        let placed = move || (place(&recent, &list, is_retry), is_newest(&recent, &list));
        let (mut found, is_newest) = blocking::spawn_cpu_if_large(bytes, placed).await;
        if found.is_none() && last_seq > count && turn.list.len() > 1 {
            let (beginning, list) = (self.history(turn, 0, count).await?, Arc::clone(&turn.list));
            found = blocking::spawn_cpu_if_large(bytes, move || place(&beginning, &list, is_retry)).await;
        }
        let newest = is_newest.then_some(Placement { keep: last_seq, from: 0 });
        Ok(found.or(newest).map(|place| TurnPlace { place, last_seq, cursor }))
    }

    /// Reads a part of the history.
    async fn history(&self, turn: &ClientTurn, after: i64, last: i64) -> Result<Vec<HistoryMessage>, Error> {
        let mut messages: Vec<HistoryMessage> = Vec::new();
        let mut read = after;
        while read < last {
            let page = message_page(&self.store, &turn.tenant, &turn.session, read, last).await?;
            let Some(newest) = page.last() else { break };
            read = newest.seq;
            let bytes: usize = page.iter().map(|message| message.json.len()).sum();
            if blocking::is_large(bytes) {
                capacity::claim(bytes.saturating_mul(COPIES)).await?;
            }
            for stored in page {
                let (seq, is_redacted) = (stored.seq, stored.redacted_at.is_some());
                messages.push(HistoryMessage { seq, is_redacted, message: decode_message(&stored.json)? });
            }
        }
        Ok(messages)
    }

    /// Builds the context for a turn. An edit of a message that the summary covers, or of one far back, rewinds the session first, because the
    /// summary must not know what follows; every other one is applied when the turn is stored.
    pub async fn turn_context(
        &self,
        turn: &ClientTurn,
        mut placed: TurnPlace,
        options: ContextOptions,
    ) -> Result<(Context, TurnPlace), Error> {
        let (keep, max_messages) = (placed.place.keep, self.config.max_fork_messages);
        if keep < placed.last_seq && !self.config.allow_rewind {
            return Err(Error::RewindForbidden);
        }
        if keep < placed.last_seq && placed.last_seq > to_i64(max_messages) {
            return Err(Error::CopyTooLarge { messages: placed.last_seq, max_messages });
        }
        if keep < placed.cursor || placed.last_seq - keep > MAX_REPLACED {
            let rewound = self.rewind_session(&turn.tenant, &turn.session, keep).await?;
            placed = TurnPlace { last_seq: keep, cursor: rewound.session.cursor, ..placed };
        }
        let mut new = turn.list.get(placed.place.from..).unwrap_or_default().to_vec();
        let user_message = new.pop_if(|last| last.role() == Role::User);
        // A run could summarise what the turn replaces.
        let mode = (keep < placed.last_seq).then_some(Mode::Off);
        let options = ContextOptions { user_message, continuation: Some((keep, new)), mode, ..options };
        Ok((self.build_context(&turn.tenant, &turn.session, options).await?, placed))
    }

    /// Stores a turn with its answer, in place of the messages that it replaces, which remain in a branch. Returns the `seq` of its first and
    /// its last message. Repeats that while the store is unavailable.
    pub async fn store_turn(
        &self,
        turn: &ClientTurn,
        placed: TurnPlace,
        answer: Message,
    ) -> Result<RangeInclusive<i64>, Error> {
        let deadline = Instant::now() + STORE_TIMEOUT;
        loop {
            let stored = self.try_store_turn(turn, placed, &answer).await;
            match stored {
                Err(Error::Store(StoreError::Unavailable(_)) | Error::Overloaded(_))
                    if Instant::now() < deadline =>
                {
                    sleep(RETRY_DELAY).await;
                }
                stored => return stored,
            }
        }
    }

    async fn try_store_turn(
        &self,
        turn: &ClientTurn,
        mut placed: TurnPlace,
        answer: &Message,
    ) -> Result<RangeInclusive<i64>, Error> {
        let mut turn = turn.clone();
        loop {
            let Placement { keep, from } = placed.place;
            let mut new = turn.list.get(from..).unwrap_or_default().to_vec();
            new.push(answer.clone());
            if keep < placed.last_seq {
                let end = keep + to_i64(new.len());
                let stored = self.history(&turn, keep, end).await?;
                // Another request, or an earlier attempt, has stored the same turn.
                if stored.iter().map(|stored| stored.message.json()).eq(new.iter().map(Message::json)) {
                    return Ok(keep + 1..=end);
                }
                match self.rewind_session(&turn.tenant, &turn.session, keep).await {
                    // Another turn has replaced more.
                    Err(Error::AfterEnd { .. } | Error::SessionNotFound) => {
                        placed = self.place_again(&mut turn, from).await?;
                        continue;
                    }
                    rewound => rewound?,
                };
            }
            let bytes = new.iter().map(|message| message.json().len()).sum();
            let user = turn.user.clone();
            let count = move || Exchange::new(new, user, None);
            let exchange = blocking::spawn_cpu_to_count(bytes, count).await;
            let exchange = Exchange { expected_last_seq: Some(keep), ..exchange };
            let key = IdempotencyKey { key: turn.key.to_string(), fingerprint: exchange.fingerprint() };
            let request = AppendRequest {
                default_user: turn.default_user.clone(),
                ..AppendRequest::new(&turn.tenant, &turn.session, exchange, Some(key))
            };
            match self.append(request).await {
                Ok(appended) => return Ok(appended.first_seq..=appended.last_seq),
                // Another turn came first: perhaps the same one, which the client has repeated.
                Err(Error::LastSeqMismatch { .. } | Error::IdempotencyKeyReused) => {}
                Err(error) => return Err(error),
            }
            placed = self.place_again(&mut turn, from).await?;
        }
    }

    /// Returns the place of a turn after another one has changed the session; at its end if the list is no part of it any more.
    async fn place_again(&self, turn: &mut ClientTurn, from: usize) -> Result<TurnPlace, Error> {
        (turn.is_retry, turn.key) = (true, Uuid::new_v4());
        if let Some(placed) = self.place_turn(turn).await? {
            return Ok(placed);
        }
        let head = self.store.session_head(&turn.tenant, &turn.session).await?;
        let last_seq = head.map_or(0, |head| head.last_seq);
        Ok(TurnPlace { place: Placement { keep: last_seq, from }, last_seq, cursor: 0 })
    }
}

fn bytes(messages: &[HistoryMessage]) -> usize {
    messages.iter().map(|stored| stored.message.json().len()).sum()
}
