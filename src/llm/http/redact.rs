//! Redacts error messages of providers for logs: one short line without secrets and without text of the conversation.
//!
//! Many servers quote the input that they reject, and a request contains the conversation.

use crate::llm::prompt::Prompt;
use secrecy::{ExposeSecret, SecretString};
use std::collections::HashSet;
use std::fmt::Write as _;

/// Maximum length of a message in characters.
const MAX_MESSAGE_CHARS: usize = 300;

/// Number of consecutive bytes of letters and digits that are considered a quotation. A smaller number would match
/// common words.
const QUOTE_BYTES: usize = 16;

/// Shorter values of headers (for example flags) are not treated as secrets, because their removal would mutilate words.
const MIN_SECRET_BYTES: usize = 6;

/// Returns the redacted message. Secrets shorter than [`MIN_SECRET_BYTES`] and quotations shorter than [`QUOTE_BYTES`] stay,
/// and so does a quotation that the server has translated or encoded in an unknown way. The order of the steps matters: control characters could split a secret, and the
/// length limit could leave a half of one.
pub(super) fn redact(message: &str, prompt: &Prompt, secrets: &[SecretString]) -> String {
    if quotes_prompt(message, &prompt.user) {
        return "[redacted: the message quotes the conversation]".to_owned();
    }
    let mut message: String = message
        .chars()
        .map(|c| if c.is_whitespace() { ' ' } else { c })
        .filter(|c| !c.is_control())
        .collect();
    for secret in
        secrets.iter().map(ExposeSecret::expose_secret).filter(|text| text.len() >= MIN_SECRET_BYTES)
    {
        message = message.replace(secret, "[key]");
    }
    let message = message.trim();
    match message.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", message.get(..end).unwrap_or_default()),
        None => message.to_owned(),
    }
}

/// Returns `true` if the message contains a sequence of letters and digits of the prompt, regardless of the white space
/// and the escapes in either of them.
fn quotes_prompt(message: &str, prompt: &str) -> bool {
    let message = letters_and_digits(message);
    let sequences: HashSet<&[u8]> = message.as_bytes().windows(QUOTE_BYTES).collect();
    if sequences.is_empty() {
        return false;
    }
    let is_quoted = |prompt: &str| {
        letters_and_digits(prompt)
            .as_bytes()
            .windows(QUOTE_BYTES)
            .any(|sequence| sequences.contains(sequence))
    };
    is_quoted(prompt)
        // The digits of escapes such as `\u6771`, or `%E6%9D%B1` and `\xe6\x9d\xb1`.
        || (!prompt.is_ascii() && (is_quoted(&utf16_escaped(prompt)) || is_quoted(&utf8_escaped(prompt))))
}

/// Returns letters and digits in lower case. A character after a backslash is left out: a line feed is `\n` in one text
/// and white space in the other, and escapes may be escaped again.
fn letters_and_digits(text: &str) -> String {
    let mut is_escaped = false;
    let mut is_kept = |c: char| {
        let is_kept = !is_escaped && c.is_alphanumeric();
        is_escaped = c == '\\';
        is_kept
    };
    text.chars().filter(|c| is_kept(*c)).flat_map(char::to_lowercase).collect()
}

fn utf16_escaped(text: &str) -> String {
    replace_non_ascii(text, |c, escaped| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "{unit:04x}"); // writing to a String cannot fail
        }
    })
}

fn utf8_escaped(text: &str) -> String {
    replace_non_ascii(text, |c, escaped| {
        for byte in c.encode_utf8(&mut [0; 4]).bytes() {
            let _ = write!(escaped, "{byte:02x}"); // writing to a String cannot fail
        }
    })
}

fn replace_non_ascii(text: &str, escape: impl Fn(char, &mut String)) -> String {
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
    fn quotation_of_the_prompt_is_detected_whatever_its_escapes() {
        let prompt =
            "Summarise: {\"role\":\"user\",\"text\":\"My PIN is 4711,\\nthe 東京 office opens at nine.\"}";
        for quoting in [
            "could not handle 'my pin is 4711, the 東京 office opens at nine.'",
            "[{'type': 'value_error', 'input': 'THE 東京 OFFICE opens'}]",
            "…s 4711,\nthe 東京 off…",
            "…My PIN is 4711,\\\\nthe 東…",
        ] {
            assert!(quotes_prompt(quoting, prompt), "{quoting}");
        }
        let prompt = "{\"role\":\"user\",\"text\":\"会議は東京で、パスワードは秘密です\"}";
        for quoting in [
            r"unexpected: '\u6771\u4eac\u3067\u3001\u30d1\u30b9\u30ef\u30fc\u30c9'",
            r#"{\"input\": \"\\u6771\\u4EAC\\u3067\\u3001\\u30d1\\u30b9\\u30ef\"}"#,
            r"b'\xe6\x9d\xb1\xe4\xba\xac\xe3\x81\xa7\xe3\x80\x81\xe3\x83\x91\xe3\x82\xb9'",
            "text=%E6%9D%B1%E4%BA%AC%E3%81%A7%E3%80%81%E3%83%91%E3%82%B9",
        ] {
            assert!(quotes_prompt(quoting, prompt), "{quoting}");
        }
        let prompt =
            "Summarise: {\"role\":\"user\",\"text\":\"My PIN is 4711,\\nthe 東京 office opens at nine.\"}";
        for other in
            ["", "You exceeded your current quota, please check your plan.", "model 'small' not found"]
        {
            assert!(!quotes_prompt(other, prompt), "{other}");
        }
        assert!(!quotes_prompt("anything at all, and long enough", ""));
    }

    #[test]
    fn secrets_are_redacted_before_the_message_is_shortened() {
        let prompt = Prompt { system: String::new(), user: "Ada flies to Zürich.".to_owned() };
        let redact = |message: &str| redact(message, &prompt, &["sk-secret".into(), "1".into()]);
        assert_eq!(redact(" bad key 1\r\nsk-secret\u{7}! "), "bad key 1  [key]!");
        assert_eq!(redact("split: sk-se\u{0}cret"), "split: [key]");
        assert_eq!(redact("not \"ada flies\nto Zürich\""), "[redacted: the message quotes the conversation]");
        let long = redact(&format!("{}sk-secret", "ä".repeat(297)));
        assert_eq!(long, format!("{}[ke…", "ä".repeat(297)));
    }
}
