//! The rules of consolidation: when it is due, which messages it summarises, and when it is retried after a failure.
//!
//! The rule is [`Policy::exceeds_threshold`]; [`Policy::due`] applies it to a session.

use super::message_metadata::MessageMetadata;
use super::session::{ConsolidationState, Session};
use super::split_points::{self, UnansweredCalls};
use super::tail::TailLimit;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The rules of consolidation, from the settings `consolidation.*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number of messages in the tail above which its older part is summarised.
    pub threshold: i64,
    /// Number of tokens in the tail above which its older part is summarised.
    pub max_tail_tokens: Option<i64>,
    /// Number of messages, at least, that stay verbatim.
    pub keep_recent: usize,
    /// Number of words of the summary above which it is compressed.
    pub summary_word_limit: usize,
    /// Number of sentences that a compressed summary should have.
    pub summary_sentences: usize,
    /// Largest number of messages that a context contains verbatim.
    pub max_history_messages: usize,
    /// Largest size of these messages.
    pub max_context_bytes: usize,
    /// Delay of the first retry after a failure.
    pub retry_initial: Duration,
    /// Largest delay between retries.
    pub retry_max: Duration,
}

/// The time for which a run takes and renews the lease of its session: a session is locked for at most this long after the
/// process of its run was killed.
pub const LEASE_TTL: Duration = Duration::from_secs(4);

/// The time at which a context request consolidates its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", rename_all = "snake_case")]
#[schema(as = ConsolidationMode, rename_all = "snake_case")]
pub enum Mode {
    /// During the request.
    Inline,
    /// After the response.
    Background,
    /// Never.
    Off,
}

named_variants!(Mode { Inline = "inline", Background = "background", Off = "off" });

/// The result of applying the policy to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The tail does not exceed the threshold.
    No,
    /// Consolidation is due now.
    Yes,
    /// Consolidation is due, and another run holds the lease.
    InProgress,
    /// Consolidation is due, but the last run failed: start none before `until`.
    Backoff { until: OffsetDateTime },
}

/// The present state of a session's consolidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Idle,
    /// A run holds the lease.
    Running,
    /// The last run failed, and the next automatic one is not permitted before `until`.
    Backoff {
        until: OffsetDateTime,
    },
}

/// The messages that a consolidation summarises, counted from the cursor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsolidationPlan {
    /// Positions at which a batch may end, ascending, never empty. The last one is the end of the plan.
    pub batch_ends: Vec<usize>,
    /// Tokens of each message up to the end of the plan, as stored.
    pub message_tokens: Vec<i64>,
}

impl Policy {
    /// Returns the part of the tail that a context can contain.
    pub fn tail_limit(&self) -> TailLimit {
        TailLimit { messages: self.max_history_messages, bytes: self.max_context_bytes }
    }

    /// **The rule**: consolidation is due if the tail has more than `threshold` messages or more than `max_tail_tokens`
    /// tokens. `Store::due_sessions` repeats it in SQL for the metric, and `due_sessions_are_counted_by_the_rule` compares both.
    pub fn exceeds_threshold(&self, tail_len: i64, tail_tokens: i64) -> bool {
        tail_len > self.threshold || self.max_tail_tokens.is_some_and(|max| tail_tokens > max)
    }

    /// Applies the rule to a session: at most one consolidation runs at a time, and none before its retry time.
    pub fn due(&self, session: &Session, now: OffsetDateTime) -> Due {
        if !self.exceeds_threshold(session.tail_len(), session.tail_tokens()) {
            return Due::No;
        }
        match self.activity(&session.consolidation, now) {
            Activity::Idle => Due::Yes,
            Activity::Running => Due::InProgress,
            Activity::Backoff { until } => Due::Backoff { until },
        }
    }

    /// Interprets the times of a lease and of a retry. A time is ignored if it lies more than twice as far in the future as
    /// it is ever set: the clock of the database was set back since.
    pub fn activity(&self, state: &ConsolidationState, now: OffsetDateTime) -> Activity {
        let pending = |time: Option<OffsetDateTime>, longest: Duration| {
            time.filter(|time| *time > now && *time - now <= longest.saturating_mul(2))
        };
        if pending(state.lease_until, LEASE_TTL).is_some() {
            Activity::Running
        } else if let Some(until) = pending(state.retry_at, self.retry_max) {
            Activity::Backoff { until }
        } else {
            Activity::Idle
        }
    }

    /// Plans the consolidation of a tail of `tail_len` messages. `messages` are the first messages of the tail: all of
    /// them, or as many as are planned at once. Returns `None` if there is no safe split point.
    pub fn plan(&self, messages: &[MessageMetadata], tail_len: usize) -> Option<ConsolidationPlan> {
        let limit = tail_len.saturating_sub(self.keep_recent).min(messages.len());
        // A tool call whose result never arrives would hold the cursor forever. It does so until messages would have to be
        // omitted from the context. From then on, such a call is ignored if a user message follows it, and as a last
        // resort in any case, because an agent may work for long without a user message.
        let mut attempts = vec![UnansweredCalls::Block];
        if tail_len > self.max_history_messages {
            attempts.extend([UnansweredCalls::BlockUntilUserMessage, UnansweredCalls::Ignore]);
        }
        let split =
            |unanswered| Some((split_points::last_at_or_before(messages, limit, unanswered)?, unanswered));
        let splits: Vec<_> = attempts.into_iter().filter_map(split).collect();
        // The messages before an unanswered call may be too few to prevent omissions.
        let suffices = |(end, _): &&(usize, _)| tail_len - end <= self.max_history_messages;
        let (end, unanswered) = *splits.iter().find(suffices).or_else(|| splits.first())?;
        Some(ConsolidationPlan {
            batch_ends: split_points::all_up_to(messages, end, unanswered),
            message_tokens: messages.iter().take(end).map(|message| message.tokens).collect(),
        })
    }

    /// Returns the delay before the next run after this many consecutive failures: exponential backoff with a limit.
    pub fn retry_delay(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.retry_initial.saturating_mul(1 << doublings).min(self.retry_max)
    }

    /// Returns `true` if a summary of this many words has to be compressed.
    pub fn needs_meta_consolidation(&self, words: usize) -> bool {
        words > self.summary_word_limit
    }
}

/// Returns the number of sentences that a summary of this many messages should have: a tenth, from 5 to 50.
pub fn requested_sentences(messages: usize) -> usize {
    (messages / 10).clamp(5, 50)
}

/// Divides the requested sentences of a batch among its parts, at least one for each.
pub fn divide_sentences(sentences: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| (sentences / parts + usize::from(part < sentences % parts)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    fn policy() -> Policy {
        Policy {
            threshold: 100,
            max_tail_tokens: None,
            keep_recent: 20,
            summary_word_limit: 600,
            summary_sentences: 8,
            max_history_messages: 200,
            max_context_bytes: 1 << 20,
            retry_initial: Duration::from_secs(5),
            retry_max: Duration::from_mins(10),
        }
    }

    #[test]
    fn consolidation_is_due_above_threshold() {
        assert!(!policy().exceeds_threshold(100, i64::MAX) && policy().exceeds_threshold(101, 0));
        let policy = Policy { max_tail_tokens: Some(5000), ..policy() };
        assert!(!policy.exceeds_threshold(3, 5000) && policy.exceeds_threshold(3, 5001));
    }

    #[test]
    fn meta_consolidation_is_needed_above_word_limit() {
        assert!(!policy().needs_meta_consolidation(600) && policy().needs_meta_consolidation(601));
    }

    #[test]
    fn requested_sentences_are_a_tenth_of_the_messages() {
        let sentences = [1, 23, 59, 60, 98, 499, 500, 1000].map(requested_sentences);
        assert_eq!(sentences, [5, 5, 5, 6, 9, 49, 50, 50]);
    }

    #[test]
    fn sentences_of_a_batch_are_divided_among_its_parts() {
        let divided = |sentences, parts| divide_sentences(sentences, parts).collect::<Vec<_>>();
        assert_eq!(divided(5, 1), [5]);
        assert_eq!(divided(50, 4), [13, 13, 12, 12]);
        assert_eq!(divided(5, 7), [1; 7], "each part needs a sentence");
        assert_eq!(divided(5, 0), Vec::<usize>::new());
    }

    #[test_case(&"u a ".repeat(51), 102 => Some(82); "keeps recent messages")]
    #[test_case(&format!("{}u", "u a ".repeat(50)), 101 => Some(80); "moves to a user message")]
    #[test_case(&"u a ".repeat(10), 20 => None; "only recent messages")]
    #[test_case(&"u a ".repeat(5), 5000 => Some(8); "plans only the given messages")]
    #[test_case(&format!("u Ax {}", "u a ".repeat(99)), 200 => Some(1); "before an unanswered call")]
    #[test_case(&format!("Ax {}", "u a ".repeat(99)), 199 => None; "unanswered call holds the cursor")]
    #[test_case(&format!("Ax {}", "u a ".repeat(200)), 201 => Some(181); "until messages would be omitted")]
    #[test_case(&format!("u a u Ax {}", "u a ".repeat(101)), 206 => Some(186); "if the messages before the call are too few")]
    #[test_case(&format!("{}u Ax {}", "u a ".repeat(5), "u a ".repeat(99)), 210 => Some(10); "unless the messages before the call suffice")]
    #[test_case(&format!("Ax {}", "a ".repeat(199)), 200 => None; "without user messages")]
    #[test_case(&format!("Ax {}", "a ".repeat(200)), 201 => Some(181); "without user messages until messages would be omitted")]
    fn plan_ends_at_a_safe_split_point(script: &str, tail_len: usize) -> Option<usize> {
        let plan = policy().plan(&conversation(script), tail_len)?;
        assert_eq!(plan.batch_ends.last(), Some(&plan.message_tokens.len()));
        plan.batch_ends.last().copied()
    }

    #[test]
    fn times_too_far_in_the_future_are_ignored() {
        let now = OffsetDateTime::UNIX_EPOCH;
        let activity = |leases: Option<u32>, minutes: Option<u64>| {
            let lease_until = leases.map(|leases| now + LEASE_TTL * leases);
            let retry_at = minutes.map(|minutes| now + Duration::from_mins(minutes));
            let state = ConsolidationState { lease_until, retry_at, ..ConsolidationState::default() };
            policy().activity(&state, now)
        };
        assert_eq!(activity(None, None), Activity::Idle);
        assert_eq!(activity(Some(0), Some(0)), Activity::Idle, "expired");
        assert_eq!(activity(Some(2), Some(5)), Activity::Running);
        let until = now + Duration::from_mins(20);
        assert_eq!(activity(Some(3), Some(20)), Activity::Backoff { until }, "not a lease of this clock");
        assert_eq!(activity(Some(3), Some(21)), Activity::Idle);
    }

    #[test]
    fn retry_delay_doubles_up_to_the_maximum() {
        let delays: Vec<u64> = (0..10).map(|failures| policy().retry_delay(failures).as_secs()).collect();
        assert_eq!(delays, [5, 5, 10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(policy().retry_delay(u32::MAX), Duration::from_mins(10));
    }
}
