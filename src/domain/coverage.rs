//! What covers which messages of a session: every message of 1 … `last_seq` is in the summary, in the verbatim part,
//! or in an omitted range that says why; and in only one of them.

use super::message_metadata::MessageMetadata;
use super::session::Session;
use super::split_points;

/// Why messages are in neither part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OmissionReason {
    /// More than `consolidation.max_history_messages` messages were not summarised.
    MaxHistoryMessages,
    /// Consolidation failed and `consolidation.on_failure` is `recent`.
    OnFailure,
    /// They don't fit into the request's `max_tokens`.
    MaxTokens,
}

impl OmissionReason {
    /// The word of the interface.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxHistoryMessages => "max_history_messages",
            Self::OnFailure => "on_failure",
            Self::MaxTokens => "max_tokens",
        }
    }
}

/// Messages in neither part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OmittedRange {
    /// The first of them.
    pub from_seq: i64,
    /// The last of them.
    pub to_seq: i64,
    /// Why.
    pub reason: OmissionReason,
}

/// What covers what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// The newest message; 0 = none.
    pub last_seq: i64,
    /// The last message that the summary covers; 0 = none.
    pub summary_through: i64,
    /// The first message that is sent verbatim; `last_seq + 1` where none is.
    pub verbatim_from: i64,
    /// What lies between the two, in order.
    pub omitted: Vec<OmittedRange>,
}

impl Coverage {
    /// Leaves the first messages of the verbatim part out, so many.
    pub fn omit(&mut self, messages: usize, reason: OmissionReason) {
        let Ok(messages) = i64::try_from(messages) else {
            return;
        };
        if messages > 0 {
            let from_seq = self.verbatim_from;
            self.verbatim_from += messages;
            self.omitted.push(OmittedRange { from_seq, to_seq: self.verbatim_from - 1, reason });
        }
    }
}

/// What part of the tail is wanted verbatim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailSelection {
    /// All of it.
    Tail,
    /// Its last messages, because consolidation failed.
    Recent {
        /// How many, at least.
        keep: usize,
    },
}

/// Decides what is sent verbatim: the tail, within `max_messages` messages, cut where no tool call is parted from its result.
/// `messages` are those of the newest messages of the tail: all of them, or `max_messages`.
#[must_use]
pub fn plan_coverage(
    session: Option<&Session>,
    max_messages: usize,
    verbatim: TailSelection,
    messages: &[MessageMetadata],
) -> Coverage {
    let (cursor, last_seq) = session.map_or((0, 0), |session| (session.cursor, session.last_seq));
    let tail_len = usize::try_from(last_seq - cursor).unwrap_or(0);
    let keep = match verbatim {
        TailSelection::Recent { keep } => keep,
        TailSelection::Tail => tail_len,
    };
    let mut coverage =
        Coverage { last_seq, summary_through: cursor, verbatim_from: cursor + 1, omitted: Vec::new() };
    if tail_len <= max_messages && tail_len <= keep {
        return coverage;
    }
    let before_window = tail_len - messages.len();
    // Among the newest `max_messages`, everything, from the first safe cut on.
    let bounded = if before_window == 0 && tail_len <= max_messages {
        0
    } else {
        split_points::first_at_or_after(messages, messages.len().saturating_sub(max_messages))
    };
    let kept = messages.get(bounded..).unwrap_or_default();
    let recent = kept.len().checked_sub(keep).filter(|surplus| *surplus > 0);
    let recent = recent
        .and_then(|surplus| {
            split_points::last_at_or_before(kept, surplus, split_points::UnansweredCalls::Block)
        })
        .unwrap_or(0);
    coverage.omit(before_window + bounded, OmissionReason::MaxHistoryMessages);
    coverage.omit(recent, OmissionReason::OnFailure);
    coverage
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::{SessionId, UserId};
    use crate::domain::message::Role;
    use crate::domain::session::{ConsolidationState, Summary};
    use time::OffsetDateTime;

    fn session(cursor: i64, last_seq: i64) -> Session {
        Session {
            session_id: SessionId::new("s").expect("valid"),
            user_id: UserId::default(),
            metadata: "{}".to_owned(),
            last_seq,
            tokens: 0,
            cursor,
            cursor_tokens: 0,
            summary: Summary::default(),
            revision: 0,
            consolidation: ConsolidationState::default(),
            created_at: OffsetDateTime::UNIX_EPOCH,
            updated_at: OffsetDateTime::UNIX_EPOCH,
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

    fn decide_for(cursor: i64, last_seq: i64, verbatim: TailSelection) -> Coverage {
        let session = session(cursor, last_seq);
        let window = usize::try_from(session.tail_len()).expect("small").min(200);
        plan_coverage(Some(&session), 200, verbatim, &turns(window))
    }

    fn parts(coverage: &Coverage) -> Vec<(i64, i64)> {
        let mut parts = vec![(1, coverage.summary_through)];
        parts.extend(coverage.omitted.iter().map(|omitted| (omitted.from_seq, omitted.to_seq)));
        parts.push((coverage.verbatim_from, coverage.last_seq));
        parts
    }

    #[test]
    fn a_tail_within_the_bound_goes_whole() {
        let coverage = decide_for(80, 280, TailSelection::Tail);
        assert_eq!(parts(&coverage), [(1, 80), (81, 280)]);
        let nothing = plan_coverage(None, 200, TailSelection::Tail, &[]);
        assert_eq!((nothing.last_seq, nothing.verbatim_from), (0, 1));
    }

    #[test]
    fn what_is_over_the_bound_is_reported() {
        let coverage = decide_for(80, 300, TailSelection::Tail);
        assert_eq!(parts(&coverage), [(1, 80), (81, 100), (101, 300)]);
        assert_eq!(coverage.omitted[0].reason, OmissionReason::MaxHistoryMessages);
    }

    #[test]
    fn after_a_failure_the_recent_part_may_do() {
        let coverage = decide_for(80, 200, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&coverage), [(1, 80), (81, 180), (181, 200)]);
        assert_eq!(coverage.omitted[0].reason, OmissionReason::OnFailure);
        let both = decide_for(0, 300, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&both), [(1, 0), (1, 100), (101, 280), (281, 300)]);
        let short = decide_for(0, 15, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&short), [(1, 0), (1, 15)]);
    }
}
