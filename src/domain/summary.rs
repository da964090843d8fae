//! Length and growth of the rolling summary.

use unicode_segmentation::UnicodeSegmentation as _;

/// Counts words by Unicode word boundaries (UAX #29): `can't` is one word, and so is each Han character.
pub fn words(text: &str) -> usize {
    text.unicode_words().count()
}

/// Appends `new` to a summary, after a blank line.
pub fn append(existing: &str, new: &str) -> String {
    match (existing.is_empty(), new.is_empty()) {
        (true, _) => new.to_owned(),
        (_, true) => existing.to_owned(),
        _ => format!("{existing}\n\n{new}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_text_follows_after_a_blank_line() {
        assert_eq!(append("", "b"), "b");
        assert_eq!(append("a\n", "b"), "a\n\n\nb");
        assert_eq!(append("a", "b"), "a\n\nb");
        assert_eq!(append("a", ""), "a");
    }

    #[test]
    fn words_are_counted_in_every_script() {
        assert_eq!(words("Don't panic, it's 42.5 percent."), 5);
        assert_eq!(words("我喜欢喝茶"), 5);
        assert_eq!(words(" … — !"), 0);
    }
}
