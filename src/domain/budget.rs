//! What fits a budget: the newest messages, from a safe cut on.

use super::message_metadata::MessageMetadata;
use super::split_points;

/// What a message adds to a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageCost {
    /// Its tokens.
    pub tokens: i64,
    /// What stands before it in addition where the list begins with it.
    pub tokens_if_first: i64,
}

/// **The rule**: the list begins at the earliest safe cut at which everything from there on fits into `budget`, in
/// tokens; at the end, with none of the messages, where nothing does. Of what is left over, no further part between two
/// safe cuts could be added, be it a single message.
#[must_use]
pub fn first_that_fits(messages: &[MessageMetadata], costs: &[MessageCost], budget: i64) -> usize {
    let mut total: i64 = 0;
    // What a list that begins at each place takes, from the end backwards.
    let mut lists: Vec<i64> = costs
        .iter()
        .rev()
        .map(|cost| {
            total = total.saturating_add(cost.tokens);
            total.saturating_add(cost.tokens_if_first)
        })
        .collect();
    lists.reverse();
    let fits = |at: &usize| lists.get(*at).is_some_and(|tokens| *tokens <= budget);
    // The whole needs no cut.
    if fits(&0) { 0 } else { split_points::all(messages).into_iter().find(fits).unwrap_or(messages.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    fn messages(roles: &str) -> Vec<MessageMetadata> {
        let message = |c: char| MessageMetadata {
            role: match c {
                'u' => Role::User,
                't' => Role::Tool,
                _ => Role::Assistant,
            },
            calls: if c == 'A' { vec!["x".to_owned()] } else { Vec::new() },
            result_of: (c == 't').then(|| "x".to_owned()),
            tokens: 0,
        };
        roles.chars().map(message).collect()
    }

    fn begins(roles: &str, budget: i64) -> usize {
        let costs = vec![MessageCost { tokens: 10, tokens_if_first: 0 }; roles.len()];
        first_that_fits(&messages(roles), &costs, budget)
    }

    #[test]
    fn the_newest_stay_and_the_budget_is_used() {
        assert_eq!(
            [40, 39, 30, 29, 10, 9, 0, -5].map(|budget| begins("uaua", budget)),
            [0, 1, 1, 2, 3, 4, 4, 4]
        );
    }

    #[test]
    fn no_call_is_parted_from_its_result() {
        assert_eq!([50, 49, 40, 39, 20, 19].map(|budget| begins("uAtua", budget)), [0, 1, 1, 3, 3, 4]);
        // Late, with others in between.
        assert_eq!([40, 30, 19].map(|budget| begins("uAuta", budget)), [1, 4, 4]);
        // Never answered: nothing is parted.
        assert_eq!(begins("uAua", 29), 2);
        // The call is summarised already.
        assert_eq!(begins("tau", 30), 0);
        assert_eq!(begins("tau", 29), 1);
    }

    #[test]
    fn what_stands_before_the_first_counts() {
        let cost = |tokens_if_first| MessageCost { tokens: 10, tokens_if_first };
        let costs = [cost(0), cost(5), cost(0), cost(5)];
        assert_eq!(
            [40, 35, 34, 20, 15, 14].map(|budget| first_that_fits(&messages("uaua"), &costs, budget)),
            [0, 1, 2, 2, 3, 4]
        );
    }
}
