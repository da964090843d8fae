//! When consolidation is due, what is asked for, and how long to wait after a failure.

use super::message_metadata::MessageMetadata;
use super::session::Session;
use super::split_points::{self, UnansweredCalls};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::OffsetDateTime;

/// The rules of consolidation, as the settings give them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Messages in the tail above which the older part is summarised.
    pub threshold: i64,
    /// Tokens in the tail above which the older part is summarised.
    pub max_tail_tokens: Option<i64>,
    /// Messages that stay verbatim, at least.
    pub keep_recent: usize,
    /// Words of the summary above which it is compressed.
    pub summary_word_limit: usize,
    /// Sentences asked for when it is.
    pub summary_sentences: usize,
    /// Most messages that go verbatim into a context.
    pub max_history_messages: usize,
    /// The wait after a first failure.
    pub retry_initial: Duration,
    /// The longest wait after a failure.
    pub retry_max: Duration,
}

/// When consolidation happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Inside the request that finds it due.
    Inline,
    /// After that request was answered.
    Background,
    /// Only when asked for.
    Off,
}

/// What is to be done about a session's tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The tail is short enough.
    No,
    /// It's too long: summarise its older part.
    Yes,
    /// It's too long, and somebody is at it.
    InProgress,
    /// It's too long, and the last attempt failed: not before this time.
    NotBefore(OffsetDateTime),
}

impl Policy {
    /// **The rule**: consolidation is due when the tail has more than `threshold` messages, or more than
    /// `max_tail_tokens` tokens.
    #[must_use]
    pub fn is_due(&self, tail_len: i64, tail_tokens: i64) -> bool {
        tail_len > self.threshold || self.max_tail_tokens.is_some_and(|most| tail_tokens > most)
    }

    /// The rule, applied to a session: at most one consolidation at a time, and none before its retry time.
    ///
    /// A time that lies far further ahead than it is ever set was set by a clock that has been put back since: nobody
    /// waits for it. `lease` is the time that a lease is taken for.
    #[must_use]
    pub fn due(&self, session: &Session, now: OffsetDateTime, lease: Duration) -> Due {
        let state = &session.consolidation;
        let ahead = |time: Option<OffsetDateTime>, longest: Duration| {
            time.filter(|time| *time > now && *time - now <= longest.saturating_mul(2))
        };
        if !self.is_due(session.tail_len(), session.tail_tokens()) {
            Due::No
        } else if ahead(state.lease_until, lease).is_some() {
            Due::InProgress
        } else if let Some(retry_at) = ahead(state.retry_at, self.retry_max) {
            Due::NotBefore(retry_at)
        } else {
            Due::Yes
        }
    }

    /// How many messages of a tail of `tail_len` are to be summarised, and where such a summary may be committed in
    /// parts. `messages` are the first messages of the tail: all of it, or as many as are looked at in one go.
    #[must_use]
    pub fn plan(&self, messages: &[MessageMetadata], tail_len: usize) -> Option<Plan> {
        let limit = tail_len.saturating_sub(self.keep_recent).min(messages.len());
        // A call that never gets its result would hold the cursor for ever. It does so until messages would have to
        // be left out of the context; from then on, a call that the user has gone on from is taken as given up, and
        // any call where there is none of these: an agent may work for long without a user.
        let mut waiting = vec![UnansweredCalls::Block];
        if tail_len > self.max_history_messages {
            waiting.extend([UnansweredCalls::BlockUntilUserMessage, UnansweredCalls::Ignore]);
        }
        waiting.into_iter().find_map(|unanswered| {
            let end = split_points::last_at_or_before(messages, limit, unanswered)?;
            Some(Plan { end, parts: split_points::all_up_to(messages, end, unanswered) })
        })
    }

    /// The wait before the next attempt after this many failures in a row: doubling, bounded.
    #[must_use]
    pub fn retry_in(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.retry_initial.saturating_mul(1 << doublings).min(self.retry_max)
    }

    /// Whether a summary has grown too long.
    #[must_use]
    pub fn needs_meta(&self, words: usize) -> bool {
        words > self.summary_word_limit
    }
}

/// What a consolidation is to summarise, in numbers of messages from the cursor on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where it ends.
    pub end: usize,
    /// Where a part of it may end, ascending; the last is `end`.
    pub parts: Vec<usize>,
}

/// The sentences asked for, for a number of messages: a tenth, at least 5, at most 50.
#[must_use]
pub fn sentences(messages: usize) -> usize {
    (messages / 10).clamp(5, 50)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    fn policy() -> Policy {
        Policy {
            threshold: 100,
            max_tail_tokens: None,
            keep_recent: 20,
            summary_word_limit: 600,
            summary_sentences: 8,
            max_history_messages: 200,
            retry_initial: Duration::from_secs(5),
            retry_max: Duration::from_mins(10),
        }
    }

    fn turns(messages: usize) -> Vec<MessageMetadata> {
        let role = |at: usize| {
            if at.is_multiple_of(2) { Role::User } else { Role::Assistant }
        };
        (0..messages)
            .map(|at| MessageMetadata { role: role(at), calls: Vec::new(), result_of: None, tokens: 0 })
            .collect()
    }

    #[test]
    fn a_hundred_messages_are_not_due_and_one_more_is() {
        assert!(!policy().is_due(100, i64::MAX));
        assert!(policy().is_due(101, 0));
        let policy = Policy { max_tail_tokens: Some(5000), ..policy() };
        assert!(!policy.is_due(3, 5000));
        assert!(policy.is_due(3, 5001));
    }

    #[test]
    fn six_hundred_words_are_not_too_long_and_one_more_is() {
        assert!(!policy().needs_meta(600));
        assert!(policy().needs_meta(601));
    }

    #[test]
    fn a_tenth_in_sentences() {
        let asked = [1, 23, 59, 60, 98, 499, 500, 1000].map(sentences);
        assert_eq!(asked, [5, 5, 5, 6, 9, 49, 50, 50]);
    }

    #[test]
    fn the_recent_messages_stay() {
        assert_eq!(policy().plan(&turns(102), 102).map(|plan| plan.end), Some(82));
        assert_eq!(policy().plan(&turns(101), 101).map(|plan| plan.end), Some(80), "moves to a user message");
        assert_eq!(policy().plan(&turns(20), 20), None);
        assert_eq!(policy().plan(&turns(10), 5000).map(|plan| plan.end), Some(8), "only what was looked at");
    }

    #[test]
    fn a_call_without_a_result_holds_the_cut_until_messages_would_be_left_out() {
        let mut messages = turns(200);
        messages[1].calls.push("lost".to_owned());
        assert_eq!(policy().plan(&messages, 200).map(|plan| plan.end), Some(1));
        let rest = |from: usize| messages.get(from..).expect("in range").to_vec();
        assert_eq!(policy().plan(&rest(1), 199), None);
        let mut longer = rest(1);
        longer.extend(turns(200));
        assert_eq!(policy().plan(&longer, 201).map(|plan| plan.end), Some(181));
    }

    #[test]
    fn a_call_that_no_user_has_gone_on_from_holds_it_no_longer() {
        let said =
            |_| MessageMetadata { role: Role::Assistant, calls: Vec::new(), result_of: None, tokens: 0 };
        let mut messages: Vec<MessageMetadata> = (0..201).map(said).collect();
        messages[0].calls.push("lost".to_owned());
        assert_eq!(policy().plan(&messages[..200], 200), None);
        assert_eq!(policy().plan(&messages, 201).map(|plan| plan.end), Some(181));
    }

    #[test]
    fn the_wait_doubles_up_to_ten_minutes() {
        let waits: Vec<u64> = (0..10).map(|failures| policy().retry_in(failures).as_secs()).collect();
        assert_eq!(waits, [5, 5, 10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(policy().retry_in(u32::MAX), Duration::from_mins(10));
    }
}
