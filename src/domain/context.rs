//! The system message: system prompt, memory document, summary, skills and notice, joined under reserved headings.

use super::headings::{MEMORY_HEADING, NOTICE_HEADING, SUMMARY_HEADING, escape_stored};
use super::memory::MemoryDocument;
use super::session::Summary;
use super::tokens::{self, CountedEnds, JoinedCount};
use std::borrow::Cow;
use std::sync::{LazyLock, OnceLock};

/// The text between two parts, and between a heading and its text: a blank line.
const SEPARATOR: &str = "\n\n";
const SEPARATOR_JSON: &str = r"\n\n";

/// A note in the system message about messages that the list lacks, or will lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Messages will be omitted soon: see [`notice_due`].
    Soon,
    /// Messages are omitted.
    Omitted,
}

impl Notice {
    pub fn text(self) -> &'static str {
        match self {
            Self::Soon => {
                "This conversation has grown almost too long to be sent whole. Its oldest messages will soon be \
                 dropped from what you see. If anything in them matters later, save it with the memory tool now."
            }
            Self::Omitted => {
                "This conversation has grown too long to be sent whole. Older messages are missing from what you see, and \
                 from the summary; the tool search_history finds them, if you have it. If anything that you still see \
                 matters later, save it with the memory tool now."
            }
        }
    }

    fn part(self) -> &'static SystemPart {
        static PARTS: LazyLock<[SystemPart; 2]> = LazyLock::new(|| {
            let part =
                |notice: Notice| SystemPart::new(&format!("{NOTICE_HEADING}{SEPARATOR}{}", notice.text()));
            [part(Notice::Soon), part(Notice::Omitted)]
        });
        let [soon, omitted] = &*PARTS;
        if self == Self::Soon { soon } else { omitted }
    }
}

/// A part of the system message as it is sent: encoded and counted once, and used in many contexts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemPart {
    /// The text as the inside of a JSON string; empty if the part is left out.
    json: String,
    count: CountedEnds,
}

impl SystemPart {
    /// Prepares a text that is sent unchanged.
    pub fn new(text: &str) -> Self {
        if text.trim().is_empty() { Self::default() } else { Self::counted(text, tokens::count_text(text)) }
    }

    /// Prepares a text below its heading, with reserved headings in it escaped. `tokens` is the size of the text.
    fn below(heading: &str, text: &str, tokens: i64) -> Self {
        if text.trim().is_empty() {
            return Self::default();
        }
        let (escaped, mut count) = (escape_stored(text), JoinedCount::default());
        count.push(heading);
        count.push(SEPARATOR);
        match &escaped {
            Cow::Borrowed(text) => count.push_counted(text, tokens),
            Cow::Owned(escaped) => count.push(escaped),
        }
        Self::counted(&format!("{heading}{SEPARATOR}{escaped}"), count.total())
    }

    fn counted(text: &str, tokens: i64) -> Self {
        Self { json: json_inside(text), count: CountedEnds::of(text, tokens) }
    }

    /// Returns the memory that the part takes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.json.capacity() + self.count.heap_bytes()
    }
}

/// The parts of the system message that are stored. They are prepared when a context needs them first.
#[derive(Debug, Default)]
pub struct StoredParts {
    memory: OnceLock<SystemPart>,
    summary: OnceLock<SystemPart>,
}

impl StoredParts {
    /// Returns the part of a memory document, which must be the same in each call.
    pub fn memory(&self, document: &MemoryDocument) -> &SystemPart {
        self.memory.get_or_init(|| SystemPart::below(MEMORY_HEADING, &document.content, document.tokens))
    }

    /// Returns the part of a summary, which must be the same in each call.
    pub fn summary(&self, summary: &Summary) -> &SystemPart {
        self.summary.get_or_init(|| SystemPart::below(SUMMARY_HEADING, &summary.text, summary.tokens))
    }

    /// Returns an upper bound of the memory that the part of this text takes on the heap. It does not include the backslashes before
    /// forged headings.
    pub fn max_heap_bytes(text: &str) -> usize {
        const HEADING_BYTES: usize = 64;
        const LONGEST_ESCAPE: usize = r"\u0001".len();
        let is_escaped = |byte: &u8| byte.is_ascii_control() || matches!(byte, b'"' | b'\\');
        let json = text.len() + text.bytes().filter(is_escaped).count() * (LONGEST_ESCAPE - 1);
        json + CountedEnds::bytes_of(text) + HEADING_BYTES
    }
}

/// The parts of a system message. Missing and empty ones are left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemParts<'a> {
    /// The system prompt of the request, unchanged.
    pub system_prompt: Option<&'a SystemPart>,
    pub memory: Option<&'a SystemPart>,
    pub summary: Option<&'a SystemPart>,
    /// The part about skills including its headings: see [`super::skill::section`].
    pub skills: Option<&'a SystemPart>,
    pub notice: Option<Notice>,
}

/// A system message and its size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemMessage {
    /// The text as the inside of a JSON string. Empty if the context has no system message.
    pub json: String,
    /// Tokens of the text, and of the message around it.
    pub tokens: i64,
}

/// Returns `true` if the agent has to be told that old messages will be omitted: from 80 % of a limit on.
pub fn notice_due(size: i64, limit: usize) -> bool {
    usize::try_from(size).is_ok_and(|size| size.saturating_mul(5) >= limit.saturating_mul(4))
}

/// Joins the parts of a system message with blank lines.
pub fn system_message(parts: &SystemParts<'_>) -> SystemMessage {
    let SystemParts { system_prompt, memory, summary, skills, notice } = *parts;
    let parts = [system_prompt, memory, summary, skills, notice.map(Notice::part)];
    let parts = || parts.iter().copied().flatten().filter(|part| !part.json.is_empty());
    let bytes: usize = parts().map(|part| part.json.len() + SEPARATOR_JSON.len()).sum();
    let (mut json, mut tokens) = (String::with_capacity(bytes), JoinedCount::default());
    for part in parts() {
        if !json.is_empty() {
            json.push_str(SEPARATOR_JSON);
            tokens.push(SEPARATOR);
        }
        json.push_str(&part.json);
        tokens.push_ends(&part.count);
    }
    let tokens = if json.is_empty() { 0 } else { tokens::PER_MESSAGE + tokens.total() };
    SystemMessage { json, tokens }
}

/// Encodes a text as the inside of a JSON string.
fn json_inside(text: &str) -> String {
    let mut json = serde_json::to_string(text).unwrap_or_else(|_| unreachable!("strings are always JSON"));
    json.pop();
    json.remove(0);
    json.shrink_to_fit();
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(message: &SystemMessage) -> String {
        serde_json::from_str(&format!("\"{}\"", message.json)).expect("the inside of a JSON string")
    }

    #[test]
    fn system_message_tokens_equal_the_count_of_its_text() {
        let stored = |heading, text| SystemPart::below(heading, text, tokens::count_text(text));
        for memory in [
            "Likes tea.",
            "- tea\n- toast!!\n\n",
            "  \n indented",
            "## Notice\nforged",
            "茶が好き。",
            "\u{1}\\\"",
        ] {
            for summary in ["", "They met.", "She said: \"yes\" (twice) "] {
                let parts = SystemParts {
                    system_prompt: Some(&SystemPart::new("Be kind!\n")),
                    memory: Some(&stored(MEMORY_HEADING, memory)),
                    summary: Some(&stored(SUMMARY_HEADING, summary)),
                    skills: Some(&SystemPart::new("## Memory Guide\n\nMerge, then write.")),
                    notice: Some(Notice::Soon),
                };
                let message = system_message(&parts);
                let text = text_of(&message);
                let summary =
                    if summary.is_empty() { "" } else { &format!("{SUMMARY_HEADING}\n\n{summary}\n\n") };
                let memory = escape_stored(memory);
                let expected = format!(
                    "Be kind!\n\n\n{MEMORY_HEADING}\n\n{memory}\n\n{summary}## Memory Guide\n\nMerge, then write.\n\n{NOTICE_HEADING}\n\n{}",
                    Notice::Soon.text()
                );
                assert_eq!(text, expected);
                assert_eq!(message.tokens, tokens::PER_MESSAGE + tokens::count_text(&text), "{text}");
            }
        }
    }

    #[test]
    fn blank_parts_are_left_out() {
        let blank = SystemPart::new(" \n");
        assert_eq!(SystemPart::below(MEMORY_HEADING, "\t", 1), blank);
        let parts =
            SystemParts { system_prompt: Some(&blank), memory: Some(&blank), ..SystemParts::default() };
        assert_eq!(system_message(&parts), SystemMessage::default());
    }

    /// The given count is used, even if it is wrong.
    #[test]
    fn counted_texts_are_not_counted_again() {
        let memory =
            |tokens| SystemPart::below(MEMORY_HEADING, "Likes tea.\n## Projects\nand more to say", tokens);
        let [some, more] = [0, 1_000_000].map(|tokens| {
            system_message(&SystemParts { memory: Some(&memory(tokens)), ..SystemParts::default() }).tokens
        });
        assert_eq!(more - some, 1_000_000);
    }

    #[test]
    fn memory_of_a_stored_part_is_not_underestimated() {
        for text in ["Likes tea.", "\u{1}\u{2}\u{7f}", "\"\\\n", "茶が好き。", "ชอบชา"] {
            let text = text.repeat(1000);
            let part = SystemPart::below(SUMMARY_HEADING, &text, tokens::count_text(&text));
            let (bytes, max_bytes) = (part.heap_bytes(), StoredParts::max_heap_bytes(&text));
            assert!((text.len()..=max_bytes).contains(&bytes), "{bytes} of {max_bytes}");
        }
    }

    #[test]
    fn notice_is_due_from_80_percent_of_the_limit() {
        assert!(!notice_due(159, 200));
        assert!(notice_due(160, 200));
        assert!(!notice_due(0, 200));
    }
}
