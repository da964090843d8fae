//! Counts tokens of texts that are made from counted texts, without counting the unchanged parts again.

use super::{count_text, pretoken_boundary};

/// A token count of texts that are made from counted source texts. The result equals a full count.
///
/// The caller goes through the source texts and the new texts side by side. Only the surroundings of a difference are
/// counted: from the last [boundary](pretoken_boundary) before it to the first boundary after it.
#[derive(Debug, Default)]
pub struct IncrementalCount {
    total: i64,
    /// End of the source text after its last boundary.
    source: String,
    /// End of the new text after its last boundary.
    new: String,
}

impl IncrementalCount {
    /// Adds text that is part of both texts.
    pub fn keep(&mut self, text: &str) {
        let boundaries = pretoken_boundary::first(text).zip(pretoken_boundary::last(text));
        let Some((first, last)) = boundaries else {
            self.remove(text);
            self.insert(text);
            return;
        };
        let ((start, _), (_, remainder)) = (text.split_at(first), text.split_at(last));
        self.remove(start);
        self.insert(start);
        self.total = self.total();
        remainder.clone_into(&mut self.source);
        remainder.clone_into(&mut self.new);
    }

    /// Adds text that is only part of the source text.
    pub fn remove(&mut self, text: &str) {
        self.source.push_str(text);
    }

    /// Adds text that is only part of the new text.
    pub fn insert(&mut self, text: &str) {
        self.new.push_str(text);
    }

    /// Ends the source text, whose count is `tokens`.
    pub fn source_tokens(&mut self, tokens: i64) {
        self.total += tokens - count_text(&self.source);
        self.source.clear();
    }

    /// Ends the new text and begins another one.
    pub fn end_text(&mut self) {
        self.total += count_text(&self.new);
        self.new.clear();
    }

    /// Returns the tokens of all new texts. If the tokens of the source text are unknown (no [`Self::source_tokens`]),
    /// returns the difference from them.
    #[must_use]
    pub fn total(&self) -> i64 {
        let is_same = self.source == self.new;
        self.total + if is_same { 0 } else { count_text(&self.new) - count_text(&self.source) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn text() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            "[a-z]{1,8}",
            "[A-Z0-9]{1,5}",
            " ",
            "\n",
            "\n\n",
            "  ",
            "\t",
            "\r\n",
            "[.!?,;:/#*'\"{}-]{1,4}",
            "'s",
            "'",
            "é",
            "私は",
            "茶、",
            "カ。",
            "，",
            "\u{3000}",
            "한글",
            "🍵",
            "\u{301}",
            "\u{a0}",
            "\u{2028}",
            "Ⓐ",
            "<|endoftext|>",
        ];
        vec(word, 0..30).prop_map(|words| words.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn count_of_a_text_made_of_known_texts_equals_full_count(
            texts in vec(vec((text(), "[a-z \n]{0,3}"), 0..4), 0..4)
        ) {
            let (mut count, mut whole) = (IncrementalCount::default(), String::new());
            for parts in &texts {
                count.insert("\n\n## Your Memory\n\n");
                whole.push_str("\n\n## Your Memory\n\n");
                for (part, between) in parts {
                    count.keep(part);
                    count.insert(between);
                    whole = format!("{whole}{part}{between}");
                }
                let known: String = parts.iter().map(|(part, _)| part.as_str()).collect();
                count.source_tokens(count_text(&known));
            }
            prop_assert_eq!(count.total(), count_text(&whole), "{:?}", whole);
        }

        #[test]
        fn count_of_the_parts_of_a_known_text_equals_full_counts(
            parts in vec((text(), "[a-z \n]{0,3}"), 0..4)
        ) {
            let mut count = IncrementalCount::default();
            for (part, between) in &parts {
                count.keep(part);
                count.end_text();
                count.remove(between);
            }
            let whole: String = parts.iter().flat_map(|(part, between)| [part.as_str(), between]).collect();
            let alone: i64 = parts.iter().map(|(part, _)| count_text(part)).sum();
            prop_assert_eq!(count_text(&whole) + count.total(), alone, "{:?}", parts);
        }
    }
}
