//! Tokens of texts that are made of others, to the token, without counting anew what is known of those.

use super::{count_text, pretoken_boundary};

/// Goes through the texts that were counted and those that are made of them, side by side, and counts where the two
/// differ: from the last [pretoken_boundary](pretoken_boundary) before a difference to the first behind it.
#[derive(Debug, Default)]
pub struct IncrementalCount {
    total: i64,
    /// What comes after the last pretoken_boundary in the text that was counted, and in the one that is made of it.
    before: String,
    after: String,
}

impl IncrementalCount {
    /// This stands in both.
    pub fn keep(&mut self, text: &str) {
        let (Some(first), Some(last)) = (pretoken_boundary::first(text), pretoken_boundary::last(text))
        else {
            self.cut(text);
            self.put(text);
            return;
        };
        let ((start, _), (_, rest)) = (text.split_at(first), text.split_at(last));
        self.cut(start);
        self.put(start);
        self.total = self.total();
        rest.clone_into(&mut self.before);
        rest.clone_into(&mut self.after);
    }

    /// This was counted, and is left out.
    pub fn cut(&mut self, text: &str) {
        self.before.push_str(text);
    }

    /// This is put in.
    pub fn put(&mut self, text: &str) {
        self.after.push_str(text);
    }

    /// The text that was counted ends here, and has so many tokens.
    pub fn known(&mut self, tokens: i64) {
        self.total += tokens - count_text(&self.before);
        self.before.clear();
    }

    /// The text that is made ends here; what comes next is another.
    pub fn end(&mut self) {
        self.total += count_text(&self.after);
        self.after.clear();
    }

    /// Tokens of all that is made; of a text whose tokens are not [`known`](Self::known), how many more than it had.
    #[must_use]
    pub fn total(&self) -> i64 {
        let same = self.before == self.after;
        self.total + if same { 0 } else { count_text(&self.after) - count_text(&self.before) }
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
        fn what_is_made_of_known_texts_has_as_many_tokens_as_it_has_whole(
            texts in vec(vec((text(), "[a-z \n]{0,3}"), 0..4), 0..4)
        ) {
            let (mut recount, mut whole) = (IncrementalCount::default(), String::new());
            for parts in &texts {
                recount.put("\n\n## Your Memory\n\n");
                whole.push_str("\n\n## Your Memory\n\n");
                for (part, between) in parts {
                    recount.keep(part);
                    recount.put(between);
                    whole = format!("{whole}{part}{between}");
                }
                let known: String = parts.iter().map(|(part, _)| part.as_str()).collect();
                recount.known(count_text(&known));
            }
            prop_assert_eq!(recount.total(), count_text(&whole), "{:?}", whole);
        }

        #[test]
        fn the_parts_of_a_known_text_have_as_many_tokens_as_they_have_alone(
            parts in vec((text(), "[a-z \n]{0,3}"), 0..4)
        ) {
            let mut recount = IncrementalCount::default();
            for (part, between) in &parts {
                recount.keep(part);
                recount.end();
                recount.cut(between);
            }
            let whole: String = parts.iter().flat_map(|(part, between)| [part.as_str(), between]).collect();
            let alone: i64 = parts.iter().map(|(part, _)| count_text(part)).sum();
            prop_assert_eq!(count_text(&whole) + recount.total(), alone, "{:?}", parts);
        }
    }
}
