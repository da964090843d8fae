//! Makes a list fit its window: shortens results of tools, then omits the oldest turns.

use super::format;
use super::message::{Message, Role};
use super::message_metadata::MessageMetadata;
use super::shorten::shorten_middle;
use super::split_points::newest_turn;
use super::tokens;
use std::collections::BTreeMap;

/// A result of a tool is shortened to at least this many tokens, so that the mark and some of the text remain.
const MIN_RESULT_TOKENS: i64 = 96;

/// Tokens that a message adds to a message list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageCost {
    pub tokens: i64,
    /// Tokens of the messages that the format inserts before this one if the list begins with it.
    pub tokens_if_first: i64,
}

/// The messages that are sent, and those of them that are shortened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fit {
    /// Position of the first message that is sent.
    pub first: usize,
    /// Largest number of tokens of each message that must be shortened, by position.
    pub shortened: BTreeMap<usize, i64>,
}

/// Returns the number of tokens to which a message can be shortened.
pub(super) fn smallest_tokens(message: &MessageMetadata) -> i64 {
    if message.role == Role::Tool { message.tokens.min(MIN_RESULT_TOKENS) } else { message.tokens }
}

/// Returns how the messages fit into `budget` tokens. Results of tools in earlier turns are shortened before those of the newest turn,
/// the largest ones first. If that does not suffice, the oldest turns are omitted, so that the list begins with a user message. The
/// newest turn is omitted only if `has_new_message`, which is then the newest one itself.
///
/// # Errors
/// The number of tokens that the newest turn needs.
pub fn fit(
    messages: &[MessageMetadata],
    costs: &[MessageCost],
    budget: i64,
    has_new_message: bool,
    may_shorten: bool,
) -> Result<Fit, i64> {
    let cost = |position: usize| costs.get(position).copied().unwrap_or_default();
    let is_result = |position: &usize| {
        may_shorten && messages.get(*position).is_some_and(|message| message.role == Role::Tool)
    };
    let smallest = |position: usize| {
        let tokens = cost(position).tokens;
        if is_result(&position) { tokens.min(MIN_RESULT_TOKENS) } else { tokens }
    };
    let list = |first: usize, tokens: &dyn Fn(usize) -> i64| {
        cost(first).tokens_if_first + (first..messages.len()).map(tokens).sum::<i64>()
    };
    let turn = newest_turn(messages);
    let is_turn = |position: &usize| {
        *position == 0
            || messages.get(*position).map_or(has_new_message, |message| message.role == Role::User)
    };
    let mut starts = (0..=messages.len()).filter(is_turn);
    let first = starts
        .find(|first| list(*first, &smallest) <= budget)
        .ok_or_else(|| list(if has_new_message { messages.len() } else { turn }, &smallest))?;
    let mut fit = Fit { first, shortened: BTreeMap::new() };
    let mut surplus = list(first, &|position| cost(position).tokens) - budget;
    for group in [first..turn.max(first), turn.max(first)..messages.len()] {
        let results: Vec<usize> = group.filter(is_result).collect();
        let saved =
            |level: i64| results.iter().map(|position| (cost(*position).tokens - level).max(0)).sum::<i64>();
        if surplus <= 0 || saved(MIN_RESULT_TOKENS) == 0 {
            continue;
        }
        // The highest level that saves enough, found by halving.
        let (mut low, mut high) =
            (MIN_RESULT_TOKENS, results.iter().map(|place| cost(*place).tokens).max().unwrap_or(0));
        while low < high {
            let middle = low + (high - low + 1) / 2;
            if saved(middle) >= surplus { low = middle } else { high = middle - 1 }
        }
        surplus -= saved(low);
        fit.shortened.extend(
            results
                .into_iter()
                .filter(|position| cost(*position).tokens > low)
                .map(|position| (position, low)),
        );
    }
    Ok(fit)
}

/// Returns a result of a tool with at most `max_tokens` tokens, as far as its id and the mark permit.
pub fn shorten_result(message: &Message, seq: i64, max_tokens: i64) -> Option<Message> {
    let with_text = |text: &str| Some(Message::tool_result(message.tool_call_id()?, text));
    let overhead = format::count_tokens(&with_text("")?);
    with_text(&shorten_text(message.content(), seq, max_tokens - overhead))
}

/// Returns a text with at most `max_tokens` tokens: a mark takes the place of its middle, and says how much is left out and where the whole
/// text is. The mark remains if it is larger.
pub fn shorten_text(text: &str, seq: i64, max_tokens: i64) -> String {
    let (whole, chars) = (tokens::count_text(text), text.chars().count());
    if whole <= max_tokens {
        return text.to_owned();
    }
    let part = |amount: i64, of: usize, all: usize| {
        let amount =
            i128::from(amount) * i128::try_from(of).unwrap_or(0) / i128::try_from(all.max(1)).unwrap_or(1);
        i64::try_from(amount).unwrap_or(i64::MAX)
    };
    let mark = |left_out: usize| {
        let tokens = part(whole, left_out, chars);
        format!(
            "\n[… about {tokens} tokens are left out here; message {seq} of this session has the whole text, and \
             search_history finds its parts …]\n"
        )
    };
    let mark_tokens = tokens::count_text(&mark(chars));
    // Text that is dense in tokens is shortened again.
    let mut kept = usize::try_from((max_tokens - mark_tokens).max(0)).unwrap_or(0);
    kept =
        usize::try_from(part(i64::try_from(kept).unwrap_or(0), chars, usize::try_from(whole).unwrap_or(1)))
            .unwrap_or(0);
    loop {
        let shortened = shorten_middle(text, kept, mark);
        let tokens = tokens::count_text(&shortened);
        if tokens <= max_tokens || kept == 0 {
            return shortened;
        }
        let ratio = part(max_tokens.max(0), kept, usize::try_from(tokens).unwrap_or(usize::MAX));
        kept = usize::try_from(ratio).unwrap_or(0).min(kept - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    fn costs(tokens: &[i64]) -> Vec<MessageCost> {
        tokens.iter().map(|tokens| MessageCost { tokens: *tokens, tokens_if_first: 0 }).collect()
    }

    #[test_case("u a u a", &[40, 39, 30, 20], false => vec![Ok(0), Ok(2), Ok(2), Ok(2)]; "whole turns are omitted")]
    #[test_case("u a u a", &[19], false => vec![Err(20)]; "the newest turn is not omitted")]
    #[test_case("u a u a", &[19], true => vec![Ok(4)]; "unless it is not the newest one")]
    #[test_case("u a a a", &[39], false => vec![Err(40)]; "one turn")]
    #[test_case("a a u a", &[39], false => vec![Ok(2)]; "without a user message at the beginning")]
    fn oldest_turns_are_omitted(
        script: &str,
        budgets: &[i64],
        has_new_message: bool,
    ) -> Vec<Result<usize, i64>> {
        let messages = conversation(script);
        let costs = costs(&vec![10; messages.len()]);
        let first =
            |budget: &i64| fit(&messages, &costs, *budget, has_new_message, true).map(|fit| fit.first);
        budgets.iter().map(first).collect()
    }

    #[test_case(2450 => vec![]; "everything fits")]
    #[test_case(2400 => vec![(2, 950)]; "the largest result of the earlier turn")]
    #[test_case(1400 => vec![(2, 200), (3, 200)]; "both results of the earlier turn")]
    #[test_case(1000 => vec![(2, 96), (3, 96), (6, 758)]; "then that of the newest turn")]
    #[test_case(340 => vec![(2, 96), (3, 96), (6, 98)]; "as far as possible")]
    fn results_are_shortened_before_turns_are_omitted(budget: i64) -> Vec<(usize, i64)> {
        let messages = conversation("u Axy tx ty u Az tz");
        let costs = costs(&[10, 10, 1000, 450, 10, 20, 950]);
        let fit = fit(&messages, &costs, budget, false, true).expect("fits");
        assert_eq!(fit.first, 0);
        fit.shortened.into_iter().collect()
    }

    #[test]
    fn budget_includes_messages_inserted_before_the_first() {
        let mut costs = costs(&[10; 4]);
        costs[0].tokens_if_first = 5;
        let first = |budget| fit(&conversation("a u a u"), &costs, budget, false, true).map(|fit| fit.first);
        assert_eq!([45, 44, 30, 29].map(first), [Ok(0), Ok(1), Ok(1), Ok(3)]);
    }

    #[test]
    fn shortened_result_keeps_its_beginning_and_end() {
        for text in ["word ".repeat(3000), "数据".repeat(2000), "\u{1f375}".repeat(900)] {
            let message = Message::tool_result("c", &format!("first {text} last"));
            for max_tokens in [MIN_RESULT_TOKENS, 200, 800] {
                let shortened = shorten_result(&message, 7, max_tokens).expect("a message");
                assert!(format::count_tokens(&shortened) <= max_tokens);
                assert!(format::count_tokens(&shortened) > max_tokens / 2, "as long as possible");
                let text = shortened.content();
                assert!(text.starts_with("first") && text.ends_with("last"), "{text}");
                assert!(text.contains("message 7 of this session"), "{text}");
            }
        }
    }
}
