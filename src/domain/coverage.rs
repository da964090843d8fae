//! Coverage: which messages of a session a context contains.
//!
//! Each message of 1 … `last_seq` is in exactly one of three parts: covered by the summary, sent verbatim, or in an omitted
//! range with its reason.

use super::message_metadata::MessageMetadata;
use super::session::Session;
use super::split_points::{self, UnansweredCalls};
use serde::Serialize;
use utoipa::ToSchema;

/// The reason for which messages are omitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OmissionReason {
    /// More than `consolidation.max_history_messages` messages are not summarised.
    MaxHistoryMessages,
    /// Consolidation failed and `consolidation.on_failure` is `recent`.
    OnFailure,
    /// The messages do not fit into the `max_tokens` of the request.
    MaxTokens,
}

/// A range of messages that are neither summarised nor sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct OmittedRange {
    pub from_seq: i64,
    pub to_seq: i64,
    pub reason: OmissionReason,
}

/// The messages that the summary covers, that are sent verbatim, and that are omitted: together 1 … `last_seq`, each
/// exactly once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Coverage {
    /// The newest message; 0 if there are none.
    pub last_seq: i64,
    /// The last message that the summary covers; 0 if there is none.
    pub summary_through: i64,
    /// The first message that is sent verbatim; `last_seq + 1` if there is none.
    pub verbatim_from: i64,
    /// The messages in between, in order.
    pub omitted: Vec<OmittedRange>,
}

impl Coverage {
    /// Omits the first `messages` messages of the verbatim part.
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

/// The part of the tail that is sent verbatim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailSelection {
    /// All messages.
    All,
    /// The last messages, at least `keep`, because consolidation failed.
    Recent { keep: usize },
}

/// Determines the coverage of a context with at most `max_messages` verbatim messages. The verbatim part begins at a safe
/// split point. `messages` are the newest messages of the tail: all of them, or `max_messages`.
#[must_use]
pub fn plan_coverage(
    session: Option<&Session>,
    max_messages: usize,
    selection: TailSelection,
    messages: &[MessageMetadata],
) -> Coverage {
    let (cursor, last_seq) = session.map_or((0, 0), |session| (session.cursor, session.last_seq));
    let tail_len = usize::try_from(last_seq - cursor).unwrap_or(0);
    let keep = match selection {
        TailSelection::Recent { keep } => keep,
        TailSelection::All => tail_len,
    };
    let mut coverage =
        Coverage { last_seq, summary_through: cursor, verbatim_from: cursor + 1, omitted: Vec::new() };
    if tail_len <= max_messages && tail_len <= keep {
        return coverage;
    }
    let not_loaded = tail_len - messages.len();
    let over_limit = if not_loaded == 0 && tail_len <= max_messages {
        0
    } else {
        split_points::first_at_or_after(messages, messages.len().saturating_sub(max_messages))
    };
    let candidates = messages.get(over_limit..).unwrap_or_default();
    let surplus = candidates.len().saturating_sub(keep);
    // With a surplus of 0 there is no split point in `1..=surplus`, and all candidates are sent.
    let not_recent =
        split_points::last_at_or_before(candidates, surplus, UnansweredCalls::Block).unwrap_or(0);
    coverage.omit(not_loaded + over_limit, OmissionReason::MaxHistoryMessages);
    coverage.omit(not_recent, OmissionReason::OnFailure);
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

    fn coverage_of(cursor: i64, last_seq: i64, verbatim: TailSelection) -> Coverage {
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
    fn tail_within_limit_is_sent_completely() {
        let coverage = coverage_of(80, 280, TailSelection::All);
        assert_eq!(parts(&coverage), [(1, 80), (81, 280)]);
        let nothing = plan_coverage(None, 200, TailSelection::All, &[]);
        assert_eq!((nothing.last_seq, nothing.verbatim_from), (0, 1));
    }

    #[test]
    fn messages_over_limit_are_reported_as_omitted() {
        let coverage = coverage_of(80, 300, TailSelection::All);
        assert_eq!(parts(&coverage), [(1, 80), (81, 100), (101, 300)]);
        assert_eq!(coverage.omitted[0].reason, OmissionReason::MaxHistoryMessages);
    }

    #[test]
    fn recent_selection_after_failure_reports_omitted_messages() {
        let coverage = coverage_of(80, 200, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&coverage), [(1, 80), (81, 180), (181, 200)]);
        assert_eq!(coverage.omitted[0].reason, OmissionReason::OnFailure);
        let both = coverage_of(0, 300, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&both), [(1, 0), (1, 100), (101, 280), (281, 300)]);
        let short = coverage_of(0, 15, TailSelection::Recent { keep: 20 });
        assert_eq!(parts(&short), [(1, 0), (1, 15)]);
    }
}
