//! How many tokens a text or a message has. Counted when something is written, never when it is read.

use super::message::Message;
use tiktoken_rs::o200k_base_singleton;

/// The encoding, as responses name it. Models of other makers count differently; the name says what was counted.
pub const TOKENIZER: &str = "o200k_base";

/// Tokens that the chat format adds to each message beside its content: the marks of its beginning and end, and its
/// role (OpenAI's cookbook, "How to count tokens").
pub const PER_MESSAGE: i64 = 4;

/// What a content part that isn't text counts: an image of 1024 × 1024 in high detail (OpenAI's vision guide).
pub const PER_ATTACHMENT: i64 = 765;

/// The tokenizer panics on very long runs of white space; pieces of this many bytes are safe, and cost at most a
/// token each.
const PIECE: usize = 64 * 1024;

/// Loads the encoding (about 0.2 s), so that the first request doesn't have to.
pub fn warm_up() {
    o200k_base_singleton();
}

/// Tokens of a text. What looks like one of the tokenizer's own marks (`<|endoftext|>`) counts as plain text.
#[must_use]
pub fn count(text: &str) -> usize {
    let encoding = o200k_base_singleton();
    let (mut rest, mut total) = (text, 0);
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(rest.floor_char_boundary(PIECE));
        total += encoding.count_ordinary(piece);
        rest = tail;
    }
    total
}

/// [`count`] as the store keeps it.
#[must_use]
pub fn of_text(text: &str) -> i64 {
    i64::try_from(count(text)).unwrap_or(i64::MAX)
}

/// Tokens of a message: [`PER_MESSAGE`], its text and name, the names and arguments of its tool calls with
/// [`PER_MESSAGE`] each, and [`PER_ATTACHMENT`] for each part that isn't text.
#[must_use]
pub fn of_message(message: &Message) -> i64 {
    let calls: i64 = message
        .tool_calls()
        .iter()
        .map(|call| PER_MESSAGE + of_text(&call.id) + of_text(&call.name) + of_text(&call.arguments))
        .sum();
    let attachments = i64::try_from(message.other_parts().len()).unwrap_or(i64::MAX);
    PER_MESSAGE
        + of_text(message.content())
        + message.name().map_or(0, of_text)
        + message.tool_call_id().map_or(0, of_text)
        + calls
        + attachments.saturating_mul(PER_ATTACHMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_counts() {
        assert_eq!(count(""), 0);
        assert_eq!(count("hello world"), 2);
        assert!(count("<|endoftext|>") > 1);
        assert_eq!(count("私はお茶が好きです"), 6);
    }

    #[test]
    fn a_megabyte_of_spaces_is_counted() {
        assert!(count(&" ".repeat(1 << 20)) > 0);
        assert!(count(&"é".repeat(PIECE)) > 0);
    }
}
