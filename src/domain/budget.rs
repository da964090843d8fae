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
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    #[test_case("u a u a", &[40, 39, 30, 29, 10, 9, 0, -5] => vec![0, 1, 1, 2, 3, 4, 4, 4]; "the newest messages fill it")]
    #[test_case("u Ax tx u a", &[50, 49, 40, 39, 20, 19] => vec![0, 1, 1, 3, 3, 4]; "calls stay with their results")]
    #[test_case("u Ax u tx a", &[40, 30, 19] => vec![1, 4, 4]; "late result")]
    #[test_case("u Ax u a", &[29] => vec![2]; "a call without a result blocks no split point")]
    #[test_case("tx a u", &[30, 29] => vec![0, 1]; "the call is already summarised")]
    fn budget_is_filled_without_separating_calls_and_results(script: &str, budgets: &[i64]) -> Vec<usize> {
        let messages = conversation(script);
        let costs = vec![MessageCost { tokens: 10, tokens_if_first: 0 }; messages.len()];
        budgets.iter().map(|budget| first_within_budget(&messages, &costs, *budget)).collect()
    }

    #[test]
    fn budget_includes_messages_inserted_before_the_first() {
        let cost = |tokens_if_first| MessageCost { tokens: 10, tokens_if_first };
        let costs = [cost(0), cost(5), cost(0), cost(5)];
        let first = |budget| first_within_budget(&conversation("u a u a"), &costs, budget);
        assert_eq!([40, 35, 34, 20, 15, 14].map(first), [0, 1, 2, 2, 3, 4]);
    }
}
