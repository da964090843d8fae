//! Where a conversation may be cut: a tool call and its results are never parted.
//!
//! A cut at `i` stands before message `i`. It is *safe* before a user message, or, where no user message offers
//! itself, before any message, as long as no tool call is open there. A call is open from its message to its result,
//! and without a result as long as [`UnansweredCalls`] says.

use super::message::Role;
use super::message_metadata::MessageMetadata;
use std::collections::HashMap;

/// How long a tool call without a result stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnansweredCalls {
    /// For ever: its result may still come.
    Block,
    /// Up to the next user message: the agent has gone on without it.
    BlockUntilUserMessage,
    /// Not at all: only what would be parted now counts.
    Ignore,
}

/// What a result whose call lies before the messages at hand does to the cuts before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OrphanResults {
    /// The call is summarised already: no cut can part the two any more.
    Ignore,
    /// The call is left out of what is sent: the result has to be left out as well.
    Block,
}

/// The safe cuts of a conversation, in order, each with whether a user message follows. The ends, 0 and the length, are
/// among them where they are safe.
fn safe_split_points(
    messages: &[MessageMetadata],
    unanswered: UnansweredCalls,
    stray: OrphanResults,
) -> Vec<(usize, bool)> {
    // Each call, with its result, blocks a range of cuts; the ranges are added up at their borders.
    let mut borders = vec![0_i64; messages.len() + 2];
    let mut block = |from: usize, to: usize| {
        if from <= to {
            for (at, step) in [(from, 1), (to + 1, -1)] {
                if let Some(border) = borders.get_mut(at) {
                    *border += step;
                }
            }
        }
    };
    // Ids come back in some clients ("call_1" in each turn): a result belongs to the latest open call.
    let mut open: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, message) in messages.iter().enumerate() {
        if let Some(id) = message.result_of.as_deref() {
            match open.get_mut(id).and_then(Vec::pop) {
                Some(call) => block(call + 1, at),
                None if stray == OrphanResults::Block => block(0, at),
                None => {}
            }
        }
        for id in &message.calls {
            open.entry(id).or_default().push(at);
        }
    }
    let users: Vec<usize> =
        (0..).zip(messages).filter(|(_, message)| message.role == Role::User).map(|(at, _)| at).collect();
    for call in open.into_values().flatten() {
        let until = match unanswered {
            UnansweredCalls::Block => messages.len(),
            UnansweredCalls::BlockUntilUserMessage => {
                let next = users.partition_point(|user| *user <= call);
                users.get(next).map_or(messages.len(), |user| user - 1)
            }
            UnansweredCalls::Ignore => continue,
        };
        block(call + 1, until);
    }
    let mut open_calls = 0;
    let follows = messages.iter().map(|message| message.role == Role::User).chain([false]);
    let cuts = (0..).zip(borders).zip(follows);
    cuts.filter_map(|((at, border), user)| {
        open_calls += border;
        (open_calls == 0).then_some((at, user))
    })
    .collect()
}

/// The latest safe cut at or before `limit` that leaves something before it: what lies before the cut can be
/// summarised. Before a user message, or, if there is none, before any message. `None`: nothing can.
#[must_use]
pub fn last_at_or_before(
    messages: &[MessageMetadata],
    limit: usize,
    unanswered: UnansweredCalls,
) -> Option<usize> {
    let cuts = safe_split_points(messages, unanswered, OrphanResults::Ignore);
    let mut candidates = cuts.into_iter().filter(|(at, _)| (1..=limit).contains(at)).rev();
    let (last, _) = candidates.clone().next()?;
    Some(candidates.find(|(_, user)| *user).map_or(last, |(at, _)| at))
}

/// All cuts in `1..=end` at which a part can end that is summarised on its own; `end` is always one of them.
#[must_use]
pub fn all_up_to(messages: &[MessageMetadata], end: usize, unanswered: UnansweredCalls) -> Vec<usize> {
    let cuts = safe_split_points(messages, unanswered, OrphanResults::Ignore);
    let inner = cuts.into_iter().map(|(at, _)| at).filter(|at| (1..end).contains(at));
    inner.chain([end]).collect()
}

/// The earliest safe cut at or after `from`: what lies behind it is sent verbatim. Before a user message, unless that
/// would leave out more than half of what could be sent: an agent may work for long without a user. Calls that are
/// still unanswered stay with what follows them where that is possible at all.
#[must_use]
pub fn first_at_or_after(messages: &[MessageMetadata], from: usize) -> usize {
    [UnansweredCalls::Block, UnansweredCalls::Ignore]
        .into_iter()
        .find_map(|unanswered| {
            let cuts = safe_split_points(messages, unanswered, OrphanResults::Block);
            let mut candidates = cuts.into_iter().filter(|(at, _)| (from..messages.len()).contains(at));
            let (first, _) = candidates.clone().next()?;
            let user = candidates.find(|(_, user)| *user).map(|(at, _)| at);
            Some(user.filter(|at| (messages.len() - at) * 2 >= messages.len() - first).unwrap_or(first))
        })
        .unwrap_or(messages.len())
}

/// All cuts in order that part no call from its result. A call without one holds none of them: what is left out from
/// either side of the cut leaves nothing behind that would ask for it.
#[must_use]
pub fn all(messages: &[MessageMetadata]) -> Vec<usize> {
    safe_split_points(messages, UnansweredCalls::Ignore, OrphanResults::Ignore)
        .into_iter()
        .map(|(at, _)| at)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `u`, `a` plain messages; `A(x,y)` calls, `t(x)` a result.
    fn messages(script: &str) -> Vec<MessageMetadata> {
        let ids = |word: &str| -> Vec<String> {
            let inner = word.split_once('(').map_or("", |(_, rest)| rest.trim_end_matches(')'));
            inner.split(',').filter(|id| !id.is_empty()).map(str::to_owned).collect()
        };
        script
            .split_whitespace()
            .map(|word| match &word[..1] {
                "u" => MessageMetadata { role: Role::User, calls: Vec::new(), result_of: None, tokens: 0 },
                "a" | "A" => {
                    MessageMetadata { role: Role::Assistant, calls: ids(word), result_of: None, tokens: 0 }
                }
                _ => MessageMetadata {
                    role: Role::Tool,
                    calls: Vec::new(),
                    result_of: ids(word).pop(),
                    tokens: 0,
                },
            })
            .collect()
    }

    #[test]
    fn a_cut_stands_before_a_user_message() {
        let script = messages("u a u a u a");
        assert_eq!(last_at_or_before(&script, 5, UnansweredCalls::Block), Some(4));
        assert_eq!(last_at_or_before(&script, 4, UnansweredCalls::Block), Some(4));
        assert_eq!(last_at_or_before(&script, 3, UnansweredCalls::Block), Some(2));
        assert_eq!(
            last_at_or_before(&script, 1, UnansweredCalls::Block),
            Some(1),
            "no user message: before any"
        );
        assert_eq!(last_at_or_before(&script, 0, UnansweredCalls::Block), None);
    }

    #[test]
    fn calls_and_results_stay_together() {
        let script = messages("u A(x,y) t(x) t(y) a a");
        assert_eq!(last_at_or_before(&script, 3, UnansweredCalls::Block), Some(1));
        assert_eq!(last_at_or_before(&script, 4, UnansweredCalls::Block), Some(4));
        // The result comes after a user message: that border is not safe.
        let late = messages("u A(x) u a t(x) a u");
        assert_eq!(last_at_or_before(&late, 3, UnansweredCalls::Block), Some(1));
        assert_eq!(last_at_or_before(&late, 6, UnansweredCalls::Block), Some(6));
        assert_eq!(first_at_or_after(&late, 2), 6);
    }

    #[test]
    fn an_unanswered_call_holds_the_cut_as_long_as_told() {
        let script = messages("u a A(x,y) t(x) u a u a");
        assert_eq!(last_at_or_before(&script, 6, UnansweredCalls::Block), Some(2));
        assert_eq!(last_at_or_before(&script, 6, UnansweredCalls::BlockUntilUserMessage), Some(6));
        assert_eq!(last_at_or_before(&script, 3, UnansweredCalls::BlockUntilUserMessage), Some(2));
        assert_eq!(last_at_or_before(&script, 3, UnansweredCalls::Ignore), Some(2), "t(x) belongs to it");
        let pending = messages("u a A(x)");
        assert_eq!(last_at_or_before(&pending, 3, UnansweredCalls::BlockUntilUserMessage), Some(2));
    }

    #[test]
    fn an_id_that_comes_back_belongs_to_the_latest_call() {
        let script = messages("u A(1) u A(1) t(1) u");
        assert_eq!(last_at_or_before(&script, 5, UnansweredCalls::BlockUntilUserMessage), Some(5));
        assert_eq!(last_at_or_before(&script, 4, UnansweredCalls::BlockUntilUserMessage), Some(2));
    }

    #[test]
    fn a_result_whose_call_is_gone_takes_what_precedes_with_it() {
        let script = messages("a t(x) a u a");
        assert_eq!(first_at_or_after(&script, 0), 3);
        assert_eq!(first_at_or_after(&messages("a t(x) a"), 0), 2);
        assert_eq!(
            first_at_or_after(&messages("a t(x)"), 0),
            2,
            "nothing verbatim is better than a parted call"
        );
        assert_eq!(
            first_at_or_after(&messages("A(x) a a"), 1),
            1,
            "an unanswered call does not empty the context"
        );
    }

    #[test]
    fn a_late_user_message_does_not_empty_what_is_sent() {
        assert_eq!(first_at_or_after(&messages("a a a u a a"), 0), 3);
        assert_eq!(first_at_or_after(&messages("a A(x) t(x) a a u"), 0), 0);
        assert_eq!(first_at_or_after(&messages("t(x) A(y) t(y) a a u"), 0), 1);
    }

    #[test]
    fn parts_end_at_safe_cuts() {
        let script = messages("u A(x) t(x) a u a");
        assert_eq!(all_up_to(&script, 4, UnansweredCalls::Block), [1, 3, 4]);
    }
}
