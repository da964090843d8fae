//! The rolling summary: how it grows and how its length is measured.

use unicode_segmentation::UnicodeSegmentation as _;

/// Words by Unicode word boundaries (UAX #29): `can't` is one, each Han character is one.
#[must_use]
pub fn words(text: &str) -> usize {
    text.unicode_words().count()
}

/// The summary after a consolidation: what there was, a blank line, what is new.
#[must_use]
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
    fn a_summary_only_grows() {
        assert_eq!(append("", "b"), "b");
        assert_eq!(append("a\n", "b"), "a\n\n\nb");
        assert_eq!(append("a", "b"), "a\n\nb");
        assert_eq!(append("a", ""), "a");
    }

    #[test]
    fn words_count_in_every_script() {
        assert_eq!(words("Don't panic, it's 42.5 percent."), 5);
        assert_eq!(words("我喜欢喝茶"), 5);
        assert_eq!(words(" … — !"), 0);
    }
}
