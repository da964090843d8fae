//! Safe split points: positions at which a conversation can be split without separating a tool call from its result.
//!
//! A split point `i` lies before message `i`. It is *safe* if no tool call is open there. A call is open from its message
//! to its result; [`UnansweredCalls`] defines how long a call without a result stays open. Among the safe points, one
//! before a user message is preferred, because a turn of the conversation begins there. If calls are open everywhere, messages are
//! split where the fewest are separated from their results: missing halves are inserted when a list is rendered.

use super::message::Role;
use super::message_metadata::MessageMetadata;
use std::collections::HashMap;

/// Defines which split points a tool call without a result blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnansweredCalls {
    /// All points after the call: its result may still arrive.
    Block,
    /// All points up to the next user message: the conversation has continued without the result.
    BlockUntilUserMessage,
    /// No points. Only calls that have a result block the points in between.
    Ignore,
}

/// Defines how a result is treated whose call lies before the given messages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OrphanResults {
    /// The call is already summarised, so no split can separate the two any more.
    Ignore,
    /// The call is omitted from the context, so the result has to be omitted, too.
    Block,
}

/// A position at which messages can be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPoint {
    pub position: usize,
    pub before_user_message: bool,
    /// Number of tool calls that the split separates from their results. The point is safe if there are none.
    pub separated: i64,
}

impl SplitPoint {
    pub fn is_safe(&self) -> bool {
        self.separated == 0
    }
}

/// Returns all positions from 0 to `messages.len()`.
pub fn split_points(
    messages: &[MessageMetadata],
    unanswered: UnansweredCalls,
    orphans: OrphanResults,
) -> Vec<SplitPoint> {
    // Each open call blocks a range of positions. `deltas` holds +1 where a range begins and -1 after its end; the
    // running sum is the number of calls that are open at a position.
    let mut deltas = vec![0_i64; messages.len() + 2];
    let mut block = |from: usize, to: usize| {
        if from <= to {
            for (position, delta) in [(from, 1), (to + 1, -1)] {
                if let Some(sum) = deltas.get_mut(position) {
                    *sum += delta;
                }
            }
        }
    };
    // Some clients reuse ids ("call_1" in each turn), so a result belongs to the latest open call of its id.
    let mut open_calls: HashMap<&str, Vec<usize>> = HashMap::new();
    for (position, message) in messages.iter().enumerate() {
        if let Some(id) = message.result_of() {
            match open_calls.get_mut(id).and_then(Vec::pop) {
                Some(call) => block(call + 1, position),
                None if orphans == OrphanResults::Block => block(0, position),
                None => {}
            }
        }
        for id in message.calls() {
            open_calls.entry(id).or_default().push(position);
        }
    }
    let is_user = |message: &MessageMetadata| message.role == Role::User;
    let user_messages: Vec<usize> =
        (0..).zip(messages).filter(|(_, message)| is_user(message)).map(|(position, _)| position).collect();
    for call in open_calls.into_values().flatten() {
        let until = match unanswered {
            UnansweredCalls::Block => messages.len(),
            UnansweredCalls::BlockUntilUserMessage => {
                let next = user_messages.partition_point(|user| *user <= call);
                user_messages.get(next).map_or(messages.len(), |user| user - 1)
            }
            UnansweredCalls::Ignore => continue,
        };
        block(call + 1, until);
    }
    let mut separated = 0;
    let before_user_message = messages.iter().map(is_user).chain([false]);
    let point = |((position, delta), before_user_message)| {
        separated += delta;
        SplitPoint { position, before_user_message, separated }
    };
    (0..).zip(deltas).zip(before_user_message).map(point).collect()
}

/// Returns the last safe split point in `1..=limit`: the messages before it can be summarised. Prefers the last point
/// before a user message. Returns `None` if no point in the range is safe.
pub fn last_at_or_before(
    messages: &[MessageMetadata],
    limit: usize,
    unanswered: UnansweredCalls,
) -> Option<usize> {
    let points = split_points(messages, unanswered, OrphanResults::Ignore).into_iter().rev();
    let mut candidates = points.filter(|point| point.is_safe() && (1..=limit).contains(&point.position));
    let last = candidates.clone().next()?;
    Some(candidates.find(|point| point.before_user_message).unwrap_or(last).position)
}

/// Returns all positions in `1..=end` at which a batch may end. `end` is always the last of them.
pub fn all_up_to(messages: &[MessageMetadata], end: usize, unanswered: UnansweredCalls) -> Vec<usize> {
    let points = split_points(messages, unanswered, OrphanResults::Ignore).into_iter();
    let safe = points.filter(SplitPoint::is_safe).map(|point| point.position);
    safe.filter(|position| (1..end).contains(position)).chain([end]).collect()
}

/// Returns the first safe split point at or after `from`: the messages after it are sent verbatim.
///
/// Prefers a point before a user message, unless this would omit more than half of the messages that could be sent: an
/// agent may work for long without a user message. Unanswered calls stay with the messages that follow them if possible. If
/// the safe points would omit more than half of the messages, the split separates as few calls from their results as possible.
pub fn first_at_or_after(messages: &[MessageMetadata], from: usize) -> usize {
    let len = messages.len();
    let keeps_half = |position: usize, of: usize| (len - position) * 2 >= len - of;
    for unanswered in [UnansweredCalls::Block, UnansweredCalls::Ignore] {
        let points = split_points(messages, unanswered, OrphanResults::Block).into_iter();
        let mut candidates = points.filter(|point| point.is_safe() && (from..len).contains(&point.position));
        let Some(first) = candidates.clone().next().filter(|first| keeps_half(first.position, from)) else {
            continue;
        };
        let user = candidates.find(|point| point.before_user_message).map(|point| point.position);
        return user.filter(|user| keeps_half(*user, first.position)).unwrap_or(first.position);
    }
    let points = split_points(messages, UnansweredCalls::Ignore, OrphanResults::Block).into_iter();
    let candidates =
        points.filter(|point| (from..len).contains(&point.position) && keeps_half(point.position, from));
    let fewest = candidates.min_by_key(|point| (point.separated, !point.before_user_message, point.position));
    fewest.map_or(len, |point| point.position)
}

/// Returns the position of the newest turn: that of the last user message, or 0 without one.
pub fn newest_turn(messages: &[MessageMetadata]) -> usize {
    messages.iter().rposition(|message| message.role == Role::User).unwrap_or(0)
}

/// Returns the position of the last message that makes tool calls; `messages.len()` if there is none.
pub fn last_round(messages: &[MessageMetadata]) -> usize {
    messages.iter().rposition(|message| !message.calls().is_empty()).unwrap_or(messages.len())
}

#[cfg(test)]
mod tests {
    use super::UnansweredCalls::{Block, BlockUntilUserMessage, Ignore};
    use super::*;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    #[test_case("u a u a u a", 5, Block => Some(4); "prefers a user message")]
    #[test_case("u a u a u a", 4, Block => Some(4); "at a user message")]
    #[test_case("u a u a u a", 3, Block => Some(2); "before the limit")]
    #[test_case("u a u a u a", 1, Block => Some(1); "any message if there is no user message")]
    #[test_case("u a u a u a", 0, Block => None; "none in the range")]
    #[test_case("u Axy tx ty a a", 3, Block => Some(1); "not between a call and its results")]
    #[test_case("u Axy tx ty a a", 4, Block => Some(4); "after the results")]
    #[test_case("u Ax u a tx a u", 3, Block => Some(1); "not before a late result")]
    #[test_case("u Ax u a tx a u", 6, Block => Some(6); "after a late result")]
    #[test_case("u a Axy tx u a u a", 6, Block => Some(2); "unanswered call")]
    #[test_case("u a Axy tx u a u a", 6, BlockUntilUserMessage => Some(6); "unanswered call before a user message")]
    #[test_case("u a Axy tx u a u a", 3, BlockUntilUserMessage => Some(2); "unanswered call up to the user message")]
    #[test_case("u a Axy tx u a u a", 3, Ignore => Some(2); "answered call of an ignored one")]
    #[test_case("u a Ax", 3, BlockUntilUserMessage => Some(2); "pending call")]
    #[test_case("u A1 u A1 t1 u", 5, BlockUntilUserMessage => Some(5); "reused id belongs to the latest call")]
    #[test_case("u A1 u A1 t1 u", 4, BlockUntilUserMessage => Some(2); "reused id is open")]
    fn last_split_point_separates_no_call_from_its_result(
        script: &str,
        limit: usize,
        unanswered: UnansweredCalls,
    ) -> Option<usize> {
        last_at_or_before(&conversation(script), limit, unanswered)
    }

    #[test_case("u Ax u a tx a u", 5 => 6; "after a late result")]
    #[test_case("u Ax u a tx a u", 2 => 2; "a late result is no reason to omit most messages")]
    #[test_case("a tx a u a", 0 => 3; "result without call is omitted with the messages before it")]
    #[test_case("a tx a", 0 => 0; "without a user message")]
    #[test_case("a tx", 0 => 0; "an inserted call is better than an empty list")]
    #[test_case("u a u a u a u a tx a", 2 => 2; "result without call")]
    #[test_case("u Ax u Ay tx u Az ty u Aw tz a", 2 => 2; "overlapping calls")]
    #[test_case("Ax a a", 1 => 1; "an unanswered call is no reason to omit")]
    #[test_case("a a a u a a", 0 => 3; "user message in the middle")]
    #[test_case("a Ax tx a a u", 0 => 0; "late user message does not empty the context")]
    #[test_case("tx Ay ty a a u", 0 => 1; "late user message after an orphan")]
    fn first_split_point_keeps_most_messages(script: &str, from: usize) -> usize {
        first_at_or_after(&conversation(script), from)
    }

    #[test]
    fn batches_end_at_safe_split_points() {
        assert_eq!(all_up_to(&conversation("u Ax tx a u a"), 4, Block), [1, 3, 4]);
    }
}
