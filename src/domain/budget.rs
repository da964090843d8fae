//! What fits a budget: the newest messages, from a safe cut on.

use super::cut::{self, Mark};

/// What a message adds to a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// Its tokens.
    pub tokens: i64,
    /// What stands before it in addition where the list begins with it.
    pub as_first: i64,
}

/// **The rule**: the list begins at the earliest safe cut at which everything from there on fits into `room`, in
/// tokens; at the end, with none of the messages, where nothing does. Of what is left over, no further part between two
/// safe cuts could be added, be it a single message.
#[must_use]
pub fn first_that_fits(marks: &[Mark], weights: &[Weight], room: i64) -> usize {
    let mut total: i64 = 0;
    // What a list that begins at each place takes, from the end backwards.
    let mut lists: Vec<i64> = weights
        .iter()
        .rev()
        .map(|weight| {
            total = total.saturating_add(weight.tokens);
            total.saturating_add(weight.as_first)
        })
        .collect();
    lists.reverse();
    let fits = |at: &usize| lists.get(*at).is_some_and(|tokens| *tokens <= room);
    // The whole needs no cut.
    if fits(&0) { 0 } else { cut::all(marks).into_iter().find(fits).unwrap_or(marks.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    fn marks(roles: &str) -> Vec<Mark> {
        let mark = |c: char| Mark {
            role: match c {
                'u' => Role::User,
                't' => Role::Tool,
                _ => Role::Assistant,
            },
            opens: if c == 'A' { vec!["x".to_owned()] } else { Vec::new() },
            answers: (c == 't').then(|| "x".to_owned()),
        };
        roles.chars().map(mark).collect()
    }

    fn begins(roles: &str, room: i64) -> usize {
        let weights = vec![Weight { tokens: 10, as_first: 0 }; roles.len()];
        first_that_fits(&marks(roles), &weights, room)
    }

    #[test]
    fn the_newest_stay_and_the_budget_is_used() {
        assert_eq!([40, 39, 30, 29, 10, 9, 0, -5].map(|room| begins("uaua", room)), [0, 1, 1, 2, 3, 4, 4, 4]);
    }

    #[test]
    fn no_call_is_parted_from_its_result() {
        assert_eq!([50, 49, 40, 39, 20, 19].map(|room| begins("uAtua", room)), [0, 1, 1, 3, 3, 4]);
        // Late, with others in between.
        assert_eq!([40, 30, 19].map(|room| begins("uAuta", room)), [1, 4, 4]);
        // Never answered: nothing is parted.
        assert_eq!(begins("uAua", 29), 2);
        // The call is summarised already.
        assert_eq!(begins("tau", 30), 0);
        assert_eq!(begins("tau", 29), 1);
    }

    #[test]
    fn what_stands_before_the_first_counts() {
        let weight = |as_first| Weight { tokens: 10, as_first };
        let weights = [weight(0), weight(5), weight(0), weight(5)];
        assert_eq!(
            [40, 35, 34, 20, 15, 14].map(|room| first_that_fits(&marks("uaua"), &weights, room)),
            [0, 1, 2, 2, 3, 4]
        );
    }
}
