//! Where a conversation may be cut: a tool call and its results are never parted.
//!
//! A cut at `i` stands before message `i`. It is *safe* before a user message, or, where no user message offers
//! itself, before any message, as long as no tool call is open there. A call is open from its message to its result,
//! and without a result as long as [`Unanswered`] says.

use super::message::{Message, Role};
use std::collections::HashMap;

/// What a cut needs to know of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Who speaks.
    pub role: Role,
    /// The ids of the tool calls that it opens.
    pub opens: Vec<String>,
    /// The id of the tool call that it answers.
    pub answers: Option<String>,
}

impl Mark {
    /// The mark of a message.
    #[must_use]
    pub fn of(message: &Message) -> Self {
        Self {
            role: message.role(),
            opens: message.tool_calls().iter().map(|call| call.id.clone()).collect(),
            answers: message.tool_call_id().map(str::to_owned),
        }
    }
}

/// How long a tool call without a result stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// For ever: its result may still come.
    Open,
    /// Up to the next user message: the agent has gone on without it.
    OpenUntilUser,
    /// Not at all: only what would be parted now counts.
    Closed,
}

/// What a result whose call lies before the messages at hand does to the cuts before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stray {
    /// The call is summarised already: no cut can part the two any more.
    Ignored,
    /// The call is left out of what is sent: the result has to be left out as well.
    Blocks,
}

/// The safe cuts of a conversation, in order, each with whether a user message follows. The ends, 0 and the length, are
/// among them where they are safe.
fn safe_cuts(marks: &[Mark], unanswered: Unanswered, stray: Stray) -> Vec<(usize, bool)> {
    // Each call, with its result, blocks a range of cuts; the ranges are added up at their borders.
    let mut borders = vec![0_i64; marks.len() + 2];
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
    for (at, mark) in marks.iter().enumerate() {
        if let Some(id) = mark.answers.as_deref() {
            match open.get_mut(id).and_then(Vec::pop) {
                Some(call) => block(call + 1, at),
                None if stray == Stray::Blocks => block(0, at),
                None => {}
            }
        }
        for id in &mark.opens {
            open.entry(id).or_default().push(at);
        }
    }
    let users: Vec<usize> =
        (0..).zip(marks).filter(|(_, mark)| mark.role == Role::User).map(|(at, _)| at).collect();
    for call in open.into_values().flatten() {
        let until = match unanswered {
            Unanswered::Open => marks.len(),
            Unanswered::OpenUntilUser => {
                let next = users.partition_point(|user| *user <= call);
                users.get(next).map_or(marks.len(), |user| user - 1)
            }
            Unanswered::Closed => continue,
        };
        block(call + 1, until);
    }
    let mut open_calls = 0;
    let follows = marks.iter().map(|mark| mark.role == Role::User).chain([false]);
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
pub fn latest(marks: &[Mark], limit: usize, unanswered: Unanswered) -> Option<usize> {
    let cuts = safe_cuts(marks, unanswered, Stray::Ignored);
    let mut candidates = cuts.into_iter().filter(|(at, _)| (1..=limit).contains(at)).rev();
    let (last, _) = candidates.clone().next()?;
    Some(candidates.find(|(_, user)| *user).map_or(last, |(at, _)| at))
}

/// All cuts in `1..=end` at which a part can end that is summarised on its own; `end` is always one of them.
#[must_use]
pub fn all_until(marks: &[Mark], end: usize, unanswered: Unanswered) -> Vec<usize> {
    let cuts = safe_cuts(marks, unanswered, Stray::Ignored);
    let inner = cuts.into_iter().map(|(at, _)| at).filter(|at| (1..end).contains(at));
    inner.chain([end]).collect()
}

/// The earliest safe cut at or after `from`: what lies behind it is sent verbatim. Before a user message, unless that
/// would leave out more than half of what could be sent: an agent may work for long without a user. Calls that are
/// still unanswered stay with what follows them where that is possible at all.
#[must_use]
pub fn earliest(marks: &[Mark], from: usize) -> usize {
    [Unanswered::Open, Unanswered::Closed]
        .into_iter()
        .find_map(|unanswered| {
            let cuts = safe_cuts(marks, unanswered, Stray::Blocks);
            let mut candidates = cuts.into_iter().filter(|(at, _)| (from..marks.len()).contains(at));
            let (first, _) = candidates.clone().next()?;
            let user = candidates.find(|(_, user)| *user).map(|(at, _)| at);
            Some(user.filter(|at| (marks.len() - at) * 2 >= marks.len() - first).unwrap_or(first))
        })
        .unwrap_or(marks.len())
}

/// All cuts in order that part no call from its result. A call without one holds none of them: what is left out from
/// either side of the cut leaves nothing behind that would ask for it.
#[must_use]
pub fn all(marks: &[Mark]) -> Vec<usize> {
    safe_cuts(marks, Unanswered::Closed, Stray::Ignored).into_iter().map(|(at, _)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `u`, `a` plain messages; `A(x,y)` calls, `t(x)` a result.
    fn marks(script: &str) -> Vec<Mark> {
        let ids = |word: &str| -> Vec<String> {
            let inner = word.split_once('(').map_or("", |(_, rest)| rest.trim_end_matches(')'));
            inner.split(',').filter(|id| !id.is_empty()).map(str::to_owned).collect()
        };
        script
            .split_whitespace()
            .map(|word| match &word[..1] {
                "u" => Mark { role: Role::User, opens: Vec::new(), answers: None },
                "a" | "A" => Mark { role: Role::Assistant, opens: ids(word), answers: None },
                _ => Mark { role: Role::Tool, opens: Vec::new(), answers: ids(word).pop() },
            })
            .collect()
    }

    #[test]
    fn a_cut_stands_before_a_user_message() {
        let script = marks("u a u a u a");
        assert_eq!(latest(&script, 5, Unanswered::Open), Some(4));
        assert_eq!(latest(&script, 4, Unanswered::Open), Some(4));
        assert_eq!(latest(&script, 3, Unanswered::Open), Some(2));
        assert_eq!(latest(&script, 1, Unanswered::Open), Some(1), "no user message: before any");
        assert_eq!(latest(&script, 0, Unanswered::Open), None);
    }

    #[test]
    fn calls_and_results_stay_together() {
        let script = marks("u A(x,y) t(x) t(y) a a");
        assert_eq!(latest(&script, 3, Unanswered::Open), Some(1));
        assert_eq!(latest(&script, 4, Unanswered::Open), Some(4));
        // The result comes after a user message: that border is not safe.
        let late = marks("u A(x) u a t(x) a u");
        assert_eq!(latest(&late, 3, Unanswered::Open), Some(1));
        assert_eq!(latest(&late, 6, Unanswered::Open), Some(6));
        assert_eq!(earliest(&late, 2), 6);
    }

    #[test]
    fn an_unanswered_call_holds_the_cut_as_long_as_told() {
        let script = marks("u a A(x,y) t(x) u a u a");
        assert_eq!(latest(&script, 6, Unanswered::Open), Some(2));
        assert_eq!(latest(&script, 6, Unanswered::OpenUntilUser), Some(6));
        assert_eq!(latest(&script, 3, Unanswered::OpenUntilUser), Some(2));
        assert_eq!(latest(&script, 3, Unanswered::Closed), Some(2), "t(x) belongs to it");
        let pending = marks("u a A(x)");
        assert_eq!(latest(&pending, 3, Unanswered::OpenUntilUser), Some(2));
    }

    #[test]
    fn an_id_that_comes_back_belongs_to_the_latest_call() {
        let script = marks("u A(1) u A(1) t(1) u");
        assert_eq!(latest(&script, 5, Unanswered::OpenUntilUser), Some(5));
        assert_eq!(latest(&script, 4, Unanswered::OpenUntilUser), Some(2));
    }

    #[test]
    fn a_result_whose_call_is_gone_takes_what_precedes_with_it() {
        let script = marks("a t(x) a u a");
        assert_eq!(earliest(&script, 0), 3);
        assert_eq!(earliest(&marks("a t(x) a"), 0), 2);
        assert_eq!(earliest(&marks("a t(x)"), 0), 2, "nothing verbatim is better than a parted call");
        assert_eq!(earliest(&marks("A(x) a a"), 1), 1, "an unanswered call does not empty the context");
    }

    #[test]
    fn a_late_user_message_does_not_empty_what_is_sent() {
        assert_eq!(earliest(&marks("a a a u a a"), 0), 3);
        assert_eq!(earliest(&marks("a A(x) t(x) a a u"), 0), 0);
        assert_eq!(earliest(&marks("t(x) A(y) t(y) a a u"), 0), 1);
    }

    #[test]
    fn parts_end_at_safe_cuts() {
        let script = marks("u A(x) t(x) a u a");
        assert_eq!(all_until(&script, 4, Unanswered::Open), [1, 3, 4]);
    }
}
