//! Coverage: which messages of a session a context contains.
//!
//! Each message of 1 … `last_seq` is in exactly one of three parts: covered by the summary, sent verbatim, or in an omitted
//! range with its reason. The last ranges may lie in the verbatim part: a placeholder is sent for each redacted message.

use super::message_metadata::MessageMetadata;
use super::split_points::{self, UnansweredCalls};
use serde::Serialize;
use utoipa::ToSchema;

/// The reason for which messages are omitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OmissionReason {
    /// More than `consolidation.max_history_messages` messages are not summarised.
    MaxHistoryMessages,
    /// The messages that are not summarised have more than `limits.max_context_bytes`.
    MaxContextBytes,
    /// Consolidation failed and `consolidation.on_failure` is `recent`.
    OnFailure,
    /// The messages do not fit into the `max_tokens` of the request.
    MaxTokens,
    /// The content of the messages was removed; placeholders are sent in their place.
    Redacted,
}

impl OmissionReason {
    /// Returns the name in responses and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxHistoryMessages => "max_history_messages",
            Self::MaxContextBytes => "max_context_bytes",
            Self::OnFailure => "on_failure",
            Self::MaxTokens => "max_tokens",
            Self::Redacted => "redacted",
        }
    }
}

/// A range of messages that are neither summarised nor sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct OmittedRange {
    /// `seq` of the first omitted message.
    pub from_seq: i64,
    /// `seq` of the last omitted message.
    pub to_seq: i64,
    pub reason: OmissionReason,
}

/// The messages that the summary covers, that are sent verbatim, and that are omitted: together 1 … `last_seq`, each
/// exactly once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Coverage {
    /// The newest message; 0 if there are none.
    pub last_seq: i64,
    /// The last message that the summary covers; 0 if there is none.
    pub summary_through: i64,
    /// The first message that is sent verbatim; `last_seq + 1` if there is none.
    pub verbatim_from: i64,
    /// The messages in between, and redacted messages of the verbatim part, in order.
    pub omitted: Vec<OmittedRange>,
    /// The messages of the verbatim part of which only the beginning and the end are sent.
    pub shortened: Vec<ShortenedMessage>,
    /// A message that the summary covers, and that is repeated at the beginning of the list, because the turn that it began is not over.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub repeated: Option<i64>,
}

/// A result of a tool whose middle is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ShortenedMessage {
    pub seq: i64,
    /// Tokens of the message as it is stored.
    pub tokens: i64,
    /// Tokens of the message as it is sent.
    pub sent_tokens: i64,
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

    /// Reports the redacted messages of the verbatim part, whose messages are `sent`.
    pub fn report_redacted(&mut self, sent: &[MessageMetadata]) {
        for (seq, _) in (self.verbatim_from..).zip(sent).filter(|(_, message)| message.is_redacted) {
            match self.omitted.last_mut() {
                Some(last) if last.reason == OmissionReason::Redacted && last.to_seq == seq - 1 => {
                    last.to_seq = seq;
                }
                _ => self.omitted.push(OmittedRange {
                    from_seq: seq,
                    to_seq: seq,
                    reason: OmissionReason::Redacted,
                }),
            }
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
/// split point. `messages` are the newest messages of the tail: all of them, or `max_messages`, or fewer if they are large.
pub fn plan_coverage(
    cursor: i64,
    last_seq: i64,
    max_messages: usize,
    selection: TailSelection,
    messages: &[MessageMetadata],
) -> Coverage {
    let tail_len = usize::try_from(last_seq - cursor).unwrap_or(0);
    let keep = match selection {
        TailSelection::Recent { keep } => keep,
        TailSelection::All => tail_len,
    };
    let mut coverage =
        Coverage { last_seq, summary_through: cursor, verbatim_from: cursor + 1, ..Coverage::default() };
    let not_loaded = tail_len.saturating_sub(messages.len());
    if not_loaded == 0 && tail_len <= max_messages && tail_len <= keep {
        return coverage;
    }
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
    let too_many = tail_len.saturating_sub(max_messages);
    if not_loaded > too_many {
        coverage.omit(too_many, OmissionReason::MaxHistoryMessages);
        coverage.omit(not_loaded + over_limit - too_many, OmissionReason::MaxContextBytes);
    } else {
        coverage.omit(not_loaded + over_limit, OmissionReason::MaxHistoryMessages);
    }
    coverage.omit(not_recent, OmissionReason::OnFailure);
    coverage
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message_metadata::conversation;
    use OmissionReason::{MaxContextBytes, MaxHistoryMessages, OnFailure};
    use test_case::test_case;

    const RECENT: TailSelection = TailSelection::Recent { keep: 20 };

    #[test]
    fn redacted_messages_of_the_verbatim_part_are_reported_in_ranges() {
        let mut messages = conversation("u a u a u a");
        for index in [0, 2, 3, 5] {
            messages[index].is_redacted = true;
        }
        let mut coverage = plan_coverage(10, 16, 200, TailSelection::All, &messages);
        coverage.omit(1, OmissionReason::MaxTokens);
        coverage.report_redacted(&messages[1..]);
        let omitted = coverage.omitted.iter().map(|range| (range.from_seq, range.to_seq, range.reason));
        let redacted = OmissionReason::Redacted;
        let expected = [(11, 11, OmissionReason::MaxTokens), (13, 14, redacted), (16, 16, redacted)];
        assert_eq!(omitted.collect::<Vec<_>>(), expected);
        assert_eq!(coverage.verbatim_from, 12);
    }

    #[test_case(0, 0, TailSelection::All => (vec![], 1); "empty session")]
    #[test_case(80, 280, TailSelection::All => (vec![], 81); "tail within the limit")]
    #[test_case(80, 300, TailSelection::All => (vec![(81, 100, MaxHistoryMessages)], 101); "tail over the limit")]
    #[test_case(80, 200, RECENT => (vec![(81, 180, OnFailure)], 181); "recent messages after a failure")]
    #[test_case(0, 300, RECENT => (vec![(1, 100, MaxHistoryMessages), (101, 280, OnFailure)], 281); "both")]
    #[test_case(0, 15, RECENT => (vec![], 1); "fewer than the recent messages")]
    fn coverage_reports_omitted_messages(
        cursor: i64,
        last_seq: i64,
        selection: TailSelection,
    ) -> (Vec<(i64, i64, OmissionReason)>, i64) {
        coverage_of_loaded(cursor, last_seq, usize::MAX, selection)
    }

    #[test_case(0, 100, 30, TailSelection::All => (vec![(1, 70, MaxContextBytes)], 71); "large messages")]
    #[test_case(0, 100, 31, TailSelection::All => (vec![(1, 70, MaxContextBytes)], 71); "up to a safe split point")]
    #[test_case(0, 100, 0, TailSelection::All => (vec![(1, 100, MaxContextBytes)], 101); "one message that is too large")]
    #[test_case(0, 300, 30, TailSelection::All => (vec![(1, 100, MaxHistoryMessages), (101, 270, MaxContextBytes)], 271); "too many and too large")]
    #[test_case(0, 100, 30, RECENT => (vec![(1, 70, MaxContextBytes), (71, 80, OnFailure)], 81); "large messages after a failure")]
    fn coverage_reports_messages_that_are_too_large(
        cursor: i64,
        last_seq: i64,
        loaded: usize,
        selection: TailSelection,
    ) -> (Vec<(i64, i64, OmissionReason)>, i64) {
        coverage_of_loaded(cursor, last_seq, loaded, selection)
    }

    fn coverage_of_loaded(
        cursor: i64,
        last_seq: i64,
        loaded: usize,
        selection: TailSelection,
    ) -> (Vec<(i64, i64, OmissionReason)>, i64) {
        let all = conversation(&"u a ".repeat(150));
        let end = usize::try_from(last_seq).expect("small");
        let first = end - loaded.min(200).min(end - usize::try_from(cursor).expect("small"));
        let coverage = plan_coverage(cursor, last_seq, 200, selection, &all[first..end]);
        assert_eq!((coverage.summary_through, coverage.last_seq), (cursor, last_seq));
        let omitted = coverage.omitted.iter().map(|range| (range.from_seq, range.to_seq, range.reason));
        (omitted.collect(), coverage.verbatim_from)
    }
}
