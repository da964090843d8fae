//! What covers which messages of a session: every message of 1 … `last_seq` is in the summary, in the verbatim part,
//! or in an omitted range that says why; and in only one of them.

use super::cut::{self, Mark};
use super::session::Session;

/// Why messages are in neither part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// More than `consolidation.max_history_messages` messages were not summarised.
    MaxHistoryMessages,
    /// Consolidation failed and `consolidation.on_failure` is `recent`.
    OnFailure,
    /// They don't fit into the request's `max_tokens`.
    MaxTokens,
}

impl Reason {
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
pub struct Omitted {
    /// The first of them.
    pub from_seq: i64,
    /// The last of them.
    pub to_seq: i64,
    /// Why.
    pub reason: Reason,
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
    pub omitted: Vec<Omitted>,
}

impl Coverage {
    /// Leaves the first messages of the verbatim part out, so many.
    pub fn omit(&mut self, messages: usize, reason: Reason) {
        let Ok(messages) = i64::try_from(messages) else {
            return;
        };
        if messages > 0 {
            let from_seq = self.verbatim_from;
            self.verbatim_from += messages;
            self.omitted.push(Omitted { from_seq, to_seq: self.verbatim_from - 1, reason });
        }
    }
}

/// What part of the tail is wanted verbatim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbatim {
    /// All of it.
    Tail,
    /// Its last messages, because consolidation failed.
    Recent {
        /// How many, at least.
        keep: usize,
    },
}

/// Decides what is sent verbatim: the tail, within `most` messages, cut where no tool call is parted from its result.
/// `marks` are those of the newest messages of the tail: all of them, or `most`.
#[must_use]
pub fn decide(session: Option<&Session>, most: usize, verbatim: Verbatim, marks: &[Mark]) -> Coverage {
    let (cursor, last_seq) = session.map_or((0, 0), |session| (session.cursor, session.last_seq));
    let tail_len = usize::try_from(last_seq - cursor).unwrap_or(0);
    let keep = match verbatim {
        Verbatim::Recent { keep } => keep,
        Verbatim::Tail => tail_len,
    };
    let mut coverage =
        Coverage { last_seq, summary_through: cursor, verbatim_from: cursor + 1, omitted: Vec::new() };
    if tail_len <= most && tail_len <= keep {
        return coverage;
    }
    let before_window = tail_len - marks.len();
    // Among the newest `most`, everything, from the first safe cut on.
    let bounded = if before_window == 0 && tail_len <= most {
        0
    } else {
        cut::earliest(marks, marks.len().saturating_sub(most))
    };
    let kept = marks.get(bounded..).unwrap_or_default();
    let recent = kept.len().checked_sub(keep).filter(|surplus| *surplus > 0);
    let recent = recent.and_then(|surplus| cut::latest(kept, surplus, cut::Unanswered::Open)).unwrap_or(0);
    coverage.omit(before_window + bounded, Reason::MaxHistoryMessages);
    coverage.omit(recent, Reason::OnFailure);
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

    fn turns(messages: usize) -> Vec<Mark> {
        let role = |at: usize| {
            if at.is_multiple_of(2) { Role::User } else { Role::Assistant }
        };
        (0..messages).map(|at| Mark { role: role(at), opens: Vec::new(), answers: None }).collect()
    }

    fn decide_for(cursor: i64, last_seq: i64, verbatim: Verbatim) -> Coverage {
        let session = session(cursor, last_seq);
        let window = usize::try_from(session.tail_len()).expect("small").min(200);
        decide(Some(&session), 200, verbatim, &turns(window))
    }

    fn parts(coverage: &Coverage) -> Vec<(i64, i64)> {
        let mut parts = vec![(1, coverage.summary_through)];
        parts.extend(coverage.omitted.iter().map(|omitted| (omitted.from_seq, omitted.to_seq)));
        parts.push((coverage.verbatim_from, coverage.last_seq));
        parts
    }

    #[test]
    fn a_tail_within_the_bound_goes_whole() {
        let coverage = decide_for(80, 280, Verbatim::Tail);
        assert_eq!(parts(&coverage), [(1, 80), (81, 280)]);
        let nothing = decide(None, 200, Verbatim::Tail, &[]);
        assert_eq!((nothing.last_seq, nothing.verbatim_from), (0, 1));
    }

    #[test]
    fn what_is_over_the_bound_is_reported() {
        let coverage = decide_for(80, 300, Verbatim::Tail);
        assert_eq!(parts(&coverage), [(1, 80), (81, 100), (101, 300)]);
        assert_eq!(coverage.omitted[0].reason, Reason::MaxHistoryMessages);
    }

    #[test]
    fn after_a_failure_the_recent_part_may_do() {
        let coverage = decide_for(80, 200, Verbatim::Recent { keep: 20 });
        assert_eq!(parts(&coverage), [(1, 80), (81, 180), (181, 200)]);
        assert_eq!(coverage.omitted[0].reason, Reason::OnFailure);
        let both = decide_for(0, 300, Verbatim::Recent { keep: 20 });
        assert_eq!(parts(&both), [(1, 0), (1, 100), (101, 280), (281, 300)]);
        let short = decide_for(0, 15, Verbatim::Recent { keep: 20 });
        assert_eq!(parts(&short), [(1, 0), (1, 15)]);
    }
}
