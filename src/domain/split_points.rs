//! Safe split points: positions at which a conversation can be split without separating a tool call from its result.
//!
//! A split point `i` lies before message `i`. It is *safe* if no tool call is open there. A call is open from its message
//! to its result; [`UnansweredCalls`] defines how long a call without a result stays open. Among the safe points, one
//! before a user message is preferred, because a turn of the conversation begins there.

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
enum OrphanResults {
    /// The call is already summarised, so no split can separate the two any more.
    Ignore,
    /// The call is omitted from the context, so the result has to be omitted, too.
    Block,
}

/// A safe split point.
#[derive(Clone, Copy)]
struct SplitPoint {
    position: usize,
    before_user_message: bool,
}

/// Returns the safe split points in ascending order. The first and the last position, 0 and `messages.len()`, are
/// included if they are safe.
fn safe_split_points(
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
        if let Some(id) = message.result_of.as_deref() {
            match open_calls.get_mut(id).and_then(Vec::pop) {
                Some(call) => block(call + 1, position),
                None if orphans == OrphanResults::Block => block(0, position),
                None => {}
            }
        }
        for id in &message.calls {
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
    let mut open = 0;
    let before_user_message = messages.iter().map(is_user).chain([false]);
    (0..)
        .zip(deltas)
        .zip(before_user_message)
        .filter_map(|((position, delta), before_user_message)| {
            open += delta;
            (open == 0).then_some(SplitPoint { position, before_user_message })
        })
        .collect()
}

/// Returns the last safe split point in `1..=limit`: the messages before it can be summarised. Prefers the last point
/// before a user message. Returns `None` if no point in the range is safe.
#[must_use]
pub fn last_at_or_before(
    messages: &[MessageMetadata],
    limit: usize,
    unanswered: UnansweredCalls,
) -> Option<usize> {
    let points = safe_split_points(messages, unanswered, OrphanResults::Ignore);
    let mut candidates = points.into_iter().filter(|point| (1..=limit).contains(&point.position)).rev();
    let last = candidates.clone().next()?;
    Some(candidates.find(|point| point.before_user_message).unwrap_or(last).position)
}

/// Returns all positions in `1..=end` at which a batch may end. `end` is always the last of them.
#[must_use]
pub fn all_up_to(messages: &[MessageMetadata], end: usize, unanswered: UnansweredCalls) -> Vec<usize> {
    let points = safe_split_points(messages, unanswered, OrphanResults::Ignore).into_iter();
    points.map(|point| point.position).filter(|position| (1..end).contains(position)).chain([end]).collect()
}

/// Returns the first safe split point at or after `from`: the messages after it are sent verbatim.
///
/// Prefers a point before a user message, unless this would omit more than half of the messages that could be sent: an
/// agent may work for long without a user message. Unanswered calls stay with the messages that follow them if possible.
#[must_use]
pub fn first_at_or_after(messages: &[MessageMetadata], from: usize) -> usize {
    let len = messages.len();
    [UnansweredCalls::Block, UnansweredCalls::Ignore]
        .into_iter()
        .find_map(|unanswered| {
            let points = safe_split_points(messages, unanswered, OrphanResults::Block);
            let mut candidates = points.into_iter().filter(|point| (from..len).contains(&point.position));
            let first = candidates.clone().next()?.position;
            let user = candidates.find(|point| point.before_user_message).map(|point| point.position);
            Some(user.filter(|user| (len - user) * 2 >= len - first).unwrap_or(first))
        })
        .unwrap_or(len)
}

/// Returns all positions, in ascending order, that do not separate a tool call from its result. Calls without a result
/// block no position, because omitting messages on either side leaves no result behind.
#[must_use]
pub fn all(messages: &[MessageMetadata]) -> Vec<usize> {
    let points = safe_split_points(messages, UnansweredCalls::Ignore, OrphanResults::Ignore);
    points.into_iter().map(|point| point.position).collect()
}

#[cfg(test)]
mod tests {
    use super::UnansweredCalls::{Block, BlockUntilUserMessage, Ignore};
    use super::*;

    /// Parses a conversation: `u` and `a` are plain messages, `A(x,y)` makes tool calls, `t(x)` is a result.
    fn conversation(script: &str) -> Vec<MessageMetadata> {
        let ids = |word: &str| -> Vec<String> {
            let inner = word.split_once('(').map_or("", |(_, rest)| rest.trim_end_matches(')'));
            inner.split(',').filter(|id| !id.is_empty()).map(str::to_owned).collect()
        };
        let message = |role, calls, result_of| MessageMetadata { role, tokens: 0, calls, result_of };
        script
            .split_whitespace()
            .map(|word| match &word[..1] {
                "u" => message(Role::User, Vec::new(), None),
                "a" | "A" => message(Role::Assistant, ids(word), None),
                _ => message(Role::Tool, Vec::new(), ids(word).pop()),
            })
            .collect()
    }

    #[test]
    fn last_split_point_prefers_user_message() {
        let messages = conversation("u a u a u a");
        assert_eq!(last_at_or_before(&messages, 5, Block), Some(4));
        assert_eq!(last_at_or_before(&messages, 4, Block), Some(4));
        assert_eq!(last_at_or_before(&messages, 3, Block), Some(2));
        assert_eq!(last_at_or_before(&messages, 1, Block), Some(1), "without a user message: any message");
        assert_eq!(last_at_or_before(&messages, 0, Block), None);
    }

    #[test]
    fn split_points_keep_calls_and_results_together() {
        let messages = conversation("u A(x,y) t(x) t(y) a a");
        assert_eq!(last_at_or_before(&messages, 3, Block), Some(1));
        assert_eq!(last_at_or_before(&messages, 4, Block), Some(4));
        // The result follows a later user message, so the point before that message is not safe.
        let late_result = conversation("u A(x) u a t(x) a u");
        assert_eq!(last_at_or_before(&late_result, 3, Block), Some(1));
        assert_eq!(last_at_or_before(&late_result, 6, Block), Some(6));
        assert_eq!(first_at_or_after(&late_result, 2), 6);
    }

    #[test]
    fn unanswered_call_blocks_as_configured() {
        let messages = conversation("u a A(x,y) t(x) u a u a");
        assert_eq!(last_at_or_before(&messages, 6, Block), Some(2));
        assert_eq!(last_at_or_before(&messages, 6, BlockUntilUserMessage), Some(6));
        assert_eq!(last_at_or_before(&messages, 3, BlockUntilUserMessage), Some(2));
        assert_eq!(last_at_or_before(&messages, 3, Ignore), Some(2), "t(x) stays with its call");
        let pending = conversation("u a A(x)");
        assert_eq!(last_at_or_before(&pending, 3, BlockUntilUserMessage), Some(2));
    }

    #[test]
    fn reused_call_id_belongs_to_latest_call() {
        let messages = conversation("u A(1) u A(1) t(1) u");
        assert_eq!(last_at_or_before(&messages, 5, BlockUntilUserMessage), Some(5));
        assert_eq!(last_at_or_before(&messages, 4, BlockUntilUserMessage), Some(2));
    }

    #[test]
    fn result_without_call_is_omitted_with_preceding_messages() {
        assert_eq!(first_at_or_after(&conversation("a t(x) a u a"), 0), 3);
        assert_eq!(first_at_or_after(&conversation("a t(x) a"), 0), 2);
        assert_eq!(
            first_at_or_after(&conversation("a t(x)"), 0),
            2,
            "an empty list is better than an orphan"
        );
        assert_eq!(
            first_at_or_after(&conversation("A(x) a a"), 1),
            1,
            "an unanswered call is no reason to omit"
        );
    }

    #[test]
    fn late_user_message_does_not_empty_the_context() {
        assert_eq!(first_at_or_after(&conversation("a a a u a a"), 0), 3);
        assert_eq!(first_at_or_after(&conversation("a A(x) t(x) a a u"), 0), 0);
        assert_eq!(first_at_or_after(&conversation("t(x) A(y) t(y) a a u"), 0), 1);
    }

    #[test]
    fn batches_end_at_safe_split_points() {
        let messages = conversation("u A(x) t(x) a u a");
        assert_eq!(all_up_to(&messages, 4, Block), [1, 3, 4]);
    }
}
