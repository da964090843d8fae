//! Whether a server's message quotes the request. Many do, with what they could not take or read, and a request holds
//! the conversation: such a message must not get into a log.

use std::collections::HashSet;

/// Bytes of letters and digits in a row that make a quote. With fewer, common words would be taken for one.
const RUN: usize = 16;

/// Whether a run of letters and digits of the prompt is in the message, however either has spaced or escaped it.
pub(super) fn is_in(message: &str, prompt: &str) -> bool {
    let (message, prompt) = (letters(message), letters(prompt));
    let runs: HashSet<&[u8]> = message.as_bytes().windows(RUN).collect();
    !runs.is_empty() && prompt.as_bytes().windows(RUN).any(|run| runs.contains(run))
}

/// Letters and digits, without those of an escape: a line feed is `\n` in one text and none in the other.
fn letters(text: &str) -> String {
    let mut escaped = false;
    let mut counts = |c: char| {
        let counts = !escaped && c.is_alphanumeric();
        escaped = c == '\\' && !escaped;
        counts
    };
    text.chars().filter(|c| counts(*c)).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::is_in;

    #[test]
    fn a_quote_is_found_and_a_message_is_not() {
        let prompt =
            "Summarise: {\"role\":\"user\",\"text\":\"My PIN is 4711,\\nthe 東京 office opens at nine.\"}";
        for quoting in [
            "could not handle 'my pin is 4711, the 東京 office opens at nine.'",
            "[{'type': 'value_error', 'input': 'THE 東京 OFFICE opens'}]",
            "…s 4711,\nthe 東京 off…",
        ] {
            assert!(is_in(quoting, prompt), "{quoting}");
        }
        for other in
            ["", "You exceeded your current quota, please check your plan.", "model 'small' not found"]
        {
            assert!(!is_in(other, prompt), "{other}");
        }
        assert!(!is_in("anything at all, and long enough", ""));
    }
}
