//! A server's own words, made fit for a log: on one line, short, without a secret and without a word of the
//! conversation.
//!
//! Many servers quote what they could not take or read, and a request holds the conversation.

use super::super::prompt::Prompt;
use secrecy::{ExposeSecret, SecretString};
use std::collections::HashSet;
use std::fmt::Write as _;

/// Characters of a message that are kept.
const MESSAGE_CHARS: usize = 300;

/// Bytes of letters and digits in a row that make a quote. With fewer, common words would be taken for one.
const RUN: usize = 16;

/// Shorter secrets (a flag in an extra header) are no secrets, and taking them out would tear words apart.
const SECRET_BYTES: usize = 6;

/// The message without all that. In this order, since what is taken out could have parted a secret, and what is cut
/// off could be half of it.
pub(super) fn redact(message: &str, prompt: &Prompt, secrets: &[SecretString]) -> String {
    if is_in(message, &prompt.user) {
        return "[left out: it quotes the conversation]".to_owned();
    }
    let mut message: String = message
        .chars()
        .map(|c| if c.is_whitespace() { ' ' } else { c })
        .filter(|c| !c.is_control())
        .collect();
    for secret in secrets.iter().map(ExposeSecret::expose_secret).filter(|text| text.len() >= SECRET_BYTES) {
        message = message.replace(secret, "[key]");
    }
    let message = message.trim();
    match message.char_indices().nth(MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", message.get(..end).unwrap_or_default()),
        None => message.to_owned(),
    }
}

/// Whether a run of letters and digits of the prompt is in the message, however either has spaced or escaped it.
fn is_in(message: &str, prompt: &str) -> bool {
    let message = letters(message);
    let runs: HashSet<&[u8]> = message.as_bytes().windows(RUN).collect();
    if runs.is_empty() {
        return false;
    }
    let quotes = |prompt: &str| letters(prompt).as_bytes().windows(RUN).any(|run| runs.contains(run));
    // What `\u6771`, or `%E6%9D%B1` and `\xe6\x9d\xb1`, leave of a text that is not in Latin letters.
    quotes(prompt) || (!prompt.is_ascii() && (quotes(&numbered(prompt)) || quotes(&in_bytes(prompt))))
}

/// Letters and digits, without the one after a backslash: a line feed is `\n` in one text and none in the other, and
/// who quotes a quote escapes the escapes.
fn letters(text: &str) -> String {
    let mut escaped = false;
    let mut counts = |c: char| {
        let counts = !escaped && c.is_alphanumeric();
        escaped = c == '\\';
        counts
    };
    text.chars().filter(|c| counts(*c)).flat_map(char::to_lowercase).collect()
}

fn numbered(text: &str) -> String {
    escaped(text, |c, escaped| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "{unit:04x}");
        }
    })
}

fn in_bytes(text: &str) -> String {
    escaped(text, |c, escaped| {
        for byte in c.encode_utf8(&mut [0; 4]).bytes() {
            let _ = write!(escaped, "{byte:02x}");
        }
    })
}

/// The text with something else in place of each character beyond ASCII.
fn escaped(text: &str, escape: impl Fn(char, &mut String)) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if c.is_ascii() { escaped.push(c) } else { escape(c, &mut escaped) }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_is_found_and_a_message_is_not() {
        let prompt =
            "Summarise: {\"role\":\"user\",\"text\":\"My PIN is 4711,\\nthe 東京 office opens at nine.\"}";
        for quoting in [
            "could not handle 'my pin is 4711, the 東京 office opens at nine.'",
            "[{'type': 'value_error', 'input': 'THE 東京 OFFICE opens'}]",
            "…s 4711,\nthe 東京 off…",
            "…My PIN is 4711,\\\\nthe 東…",
        ] {
            assert!(is_in(quoting, prompt), "{quoting}");
        }
        let prompt = "{\"role\":\"user\",\"text\":\"会議は東京で、パスワードは秘密です\"}";
        for quoting in [
            r"unexpected: '\u6771\u4eac\u3067\u3001\u30d1\u30b9\u30ef\u30fc\u30c9'",
            r#"{\"input\": \"\\u6771\\u4EAC\\u3067\\u3001\\u30d1\\u30b9\\u30ef\"}"#,
            r"b'\xe6\x9d\xb1\xe4\xba\xac\xe3\x81\xa7\xe3\x80\x81\xe3\x83\x91\xe3\x82\xb9'",
            "text=%E6%9D%B1%E4%BA%AC%E3%81%A7%E3%80%81%E3%83%91%E3%82%B9",
        ] {
            assert!(is_in(quoting, prompt), "{quoting}");
        }
        let prompt =
            "Summarise: {\"role\":\"user\",\"text\":\"My PIN is 4711,\\nthe 東京 office opens at nine.\"}";
        for other in
            ["", "You exceeded your current quota, please check your plan.", "model 'small' not found"]
        {
            assert!(!is_in(other, prompt), "{other}");
        }
        assert!(!is_in("anything at all, and long enough", ""));
    }

    #[test]
    fn secrets_go_before_the_cut() {
        let prompt = Prompt { system: String::new(), user: "Ada flies to Zürich.".to_owned() };
        let redact = |message: &str| redact(message, &prompt, &["sk-secret".into(), "1".into()]);
        assert_eq!(redact(" bad key 1\r\nsk-secret\u{7}! "), "bad key 1  [key]!");
        assert_eq!(redact("split: sk-se\u{0}cret"), "split: [key]");
        assert_eq!(redact("not \"ada flies\nto Zürich\""), "[left out: it quotes the conversation]");
        let long = redact(&format!("{}sk-secret", "ä".repeat(297)));
        assert_eq!(long, format!("{}[ke…", "ä".repeat(297)));
    }
}
