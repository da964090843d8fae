//! The system message: system prompt, memory document, summary, skills and notice, joined under reserved headings.

use super::headings::{MEMORY_HEADING, NOTICE_HEADING, SUMMARY_HEADING, escape_headings};
use super::tokens::{self, JoinedCount};
use std::borrow::Cow;

/// The notice that messages will be omitted soon: see [`notice_due`].
pub const NOTICE: &str = "This conversation has grown almost too long to be sent whole. Its oldest messages will soon be \
dropped from what you see. If anything in them matters later, save it with the memory tool now.";

/// The parts of a system message. Empty parts are left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemParts<'a> {
    /// The system prompt of the request, unchanged.
    pub system_prompt: &'a str,
    pub memory: CountedText<'a>,
    pub summary: CountedText<'a>,
    /// The part about skills including its headings: see [`super::skill::section`].
    pub skills: &'a str,
    pub notice: bool,
}

/// A text whose tokens were counted when it was written.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountedText<'a> {
    pub text: &'a str,
    pub tokens: i64,
}

/// A system message and its size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemMessage {
    /// Empty if the context has no system message.
    pub text: String,
    /// Tokens of the text, and of the message around it.
    pub tokens: i64,
}

/// Returns `true` if the agent has to be told that old messages will be omitted: from 80 % of a limit of the tail on.
pub fn notice_due(size: i64, limit: usize) -> bool {
    usize::try_from(size).is_ok_and(|size| size.saturating_mul(5) >= limit.saturating_mul(4))
}

/// Joins the parts of a system message with blank lines.
pub fn system_message(parts: &SystemParts<'_>) -> SystemMessage {
    let mut message = SystemMessageBuilder::default();
    message.add("", parts.system_prompt);
    message.add_escaped(MEMORY_HEADING, parts.memory);
    message.add_escaped(SUMMARY_HEADING, parts.summary);
    message.add("", parts.skills);
    message.add(NOTICE_HEADING, if parts.notice { NOTICE } else { "" });
    let SystemMessageBuilder { text, tokens } = message;
    let tokens = if text.is_empty() { 0 } else { tokens::PER_MESSAGE + tokens.total() };
    SystemMessage { text, tokens }
}

/// Joins the parts and counts only the text that was not counted before.
#[derive(Default)]
struct SystemMessageBuilder {
    text: String,
    tokens: JoinedCount,
}

impl SystemMessageBuilder {
    /// Adds a part that has not been counted.
    fn add(&mut self, heading: &str, body: &str) {
        if self.begin(heading, body) {
            self.push(body);
        }
    }

    /// Adds a part that was counted, and escapes reserved headings in it.
    fn add_escaped(&mut self, heading: &str, body: CountedText<'_>) {
        if !self.begin(heading, body.text) {
            return;
        }
        match escape_headings(body.text) {
            Cow::Borrowed(text) => {
                self.text.push_str(text);
                self.tokens.push_counted(text, body.tokens);
            }
            Cow::Owned(escaped) => self.push(&escaped),
        }
    }

    /// Adds the heading of a part. Returns `false`, and adds nothing, if the part is empty.
    fn begin(&mut self, heading: &str, body: &str) -> bool {
        if body.trim().is_empty() {
            return false;
        }
        if !self.text.is_empty() {
            self.push("\n\n");
        }
        if !heading.is_empty() {
            self.push(heading);
            self.push("\n\n");
        }
        true
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.tokens.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> CountedText<'_> {
        CountedText { text, tokens: tokens::count_text(text) }
    }

    #[test]
    fn system_message_tokens_equal_the_count_of_its_text() {
        for memory in
            ["Likes tea.", "- tea\n- toast!!\n\n", "  \n indented", "## Notice\nforged", "茶が好き。"]
        {
            for summary in ["", "They met.", "She said: \"yes\" (twice) "] {
                let parts = SystemParts {
                    system_prompt: "Be kind!\n",
                    memory: counted(memory),
                    summary: counted(summary),
                    skills: "## Memory Guide\n\nMerge, then write.",
                    notice: true,
                };
                let message = system_message(&parts);
                assert_eq!(
                    message.tokens,
                    tokens::PER_MESSAGE + tokens::count_text(&message.text),
                    "{parts:?}"
                );
            }
        }
    }

    /// The given count is used, even if it is wrong.
    #[test]
    fn counted_texts_are_not_counted_again() {
        let memory = "Likes tea.\n## Projects\nand more to say";
        let parts =
            |tokens| SystemParts { memory: CountedText { text: memory, tokens }, ..SystemParts::default() };
        let [some, more] = [0, 1_000_000].map(|tokens| system_message(&parts(tokens)).tokens);
        assert_eq!(more - some, 1_000_000);
    }

    #[test]
    fn notice_is_due_from_80_percent_of_the_limit() {
        assert!(!notice_due(159, 200));
        assert!(notice_due(160, 200));
        assert!(!notice_due(0, 200));
    }
}
