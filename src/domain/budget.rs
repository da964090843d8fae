//! Selects the newest messages that fit into a token budget.

use super::message_metadata::MessageMetadata;
use super::split_points;

/// Tokens that a message adds to a message list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageCost {
    pub tokens: i64,
    /// Tokens of the messages that the format inserts before this one if the list begins with it.
    pub tokens_if_first: i64,
}

/// Returns the position of the first message that is sent: the earliest position at which all following messages fit into
/// `budget` and that separates no tool call from its result. Returns `messages.len()` if no message fits.
#[must_use]
pub fn first_within_budget(messages: &[MessageMetadata], costs: &[MessageCost], budget: i64) -> usize {
    let mut total: i64 = 0;
    // Tokens of the list that begins at each position, computed from the end.
    let mut list_tokens: Vec<i64> = costs
        .iter()
        .rev()
        .map(|cost| {
            total = total.saturating_add(cost.tokens);
            total.saturating_add(cost.tokens_if_first)
        })
        .collect();
    list_tokens.reverse();
    let fits = |position: &usize| list_tokens.get(*position).is_some_and(|tokens| *tokens <= budget);
    // The complete list needs no split point.
    if fits(&0) { 0 } else { split_points::all(messages).into_iter().find(fits).unwrap_or(messages.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    /// Parses a conversation: `u` and `a` are plain messages, `A` makes a tool call, `t` is its result.
    fn conversation(script: &str) -> Vec<MessageMetadata> {
        let message = |c: char| MessageMetadata {
            role: match c {
                'u' => Role::User,
                't' => Role::Tool,
                _ => Role::Assistant,
            },
            tokens: 0,
            calls: if c == 'A' { vec!["x".to_owned()] } else { Vec::new() },
            result_of: (c == 't').then(|| "x".to_owned()),
        };
        script.chars().map(message).collect()
    }

    fn first(script: &str, budget: i64) -> usize {
        let costs = vec![MessageCost { tokens: 10, tokens_if_first: 0 }; script.len()];
        first_within_budget(&conversation(script), &costs, budget)
    }

    #[test]
    fn budget_is_filled_with_the_newest_messages() {
        assert_eq!(
            [40, 39, 30, 29, 10, 9, 0, -5].map(|budget| first("uaua", budget)),
            [0, 1, 1, 2, 3, 4, 4, 4]
        );
    }

    #[test]
    fn budget_separates_no_call_from_its_result() {
        assert_eq!([50, 49, 40, 39, 20, 19].map(|budget| first("uAtua", budget)), [0, 1, 1, 3, 3, 4]);
        // The result comes late, with other messages in between.
        assert_eq!([40, 30, 19].map(|budget| first("uAuta", budget)), [1, 4, 4]);
        // A call without a result blocks no split point.
        assert_eq!(first("uAua", 29), 2);
        // The call is already summarised.
        assert_eq!(first("tau", 30), 0);
        assert_eq!(first("tau", 29), 1);
    }

    #[test]
    fn budget_includes_messages_inserted_before_the_first() {
        let cost = |tokens_if_first| MessageCost { tokens: 10, tokens_if_first };
        let costs = [cost(0), cost(5), cost(0), cost(5)];
        let first = |budget| first_within_budget(&conversation("uaua"), &costs, budget);
        assert_eq!([40, 35, 34, 20, 15, 14].map(first), [0, 1, 2, 2, 3, 4]);
    }
}
