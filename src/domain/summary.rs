//! Length and growth of the rolling summary.

use super::validation::FieldError;
use unicode_segmentation::UnicodeSegmentation as _;

/// Largest summary of an import or an edit: twice the largest response of a model that a consolidation accepts. Every context of
/// the session contains its summary.
pub const MAX_BYTES: usize = 1024 * 1024;

/// Counts words by Unicode word boundaries (UAX #29): `can't` is one word, and so is each Han character.
pub fn words(text: &str) -> usize {
    text.unicode_words().count()
}

/// Checks a summary that a client writes, at `path`.
pub fn check_written(path: &str, text: &str) -> Result<(), FieldError> {
    if text.trim().is_empty() {
        let detail = "is empty: write the summary, or restore an earlier revision to remove it";
        return Err(FieldError::new(path, detail));
    }
    // Postgres cannot store this character.
    if text.contains('\0') {
        return Err(FieldError::new(path, "must not contain the NUL character"));
    }
    check_length(path, text)
}

/// Checks the length of a text of a revision that did not come from a model, at `path`.
pub fn check_length(path: &str, text: &str) -> Result<(), FieldError> {
    let bytes = text.len();
    if bytes <= MAX_BYTES {
        return Ok(());
    }
    let detail = format!("has {bytes} bytes, at most {MAX_BYTES} are allowed in a summary: shorten it");
    Err(FieldError::new(path, detail))
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
    fn written_summary_is_checked() {
        assert_eq!(check_written("summary", " a\n"), Ok(()));
        assert_eq!(check_written("summary", &"x".repeat(MAX_BYTES)), Ok(()));
        for text in ["", " \n\t\u{3000}", "a\0", &"x".repeat(MAX_BYTES + 1)] {
            assert_eq!(check_written("summary", text).expect_err("invalid").field, "summary");
        }
    }

    #[test]
    fn words_are_counted_in_every_script() {
        assert_eq!(words("Don't panic, it's 42.5 percent."), 5);
        assert_eq!(words("我喜欢喝茶"), 5);
        assert_eq!(words(" … — !"), 0);
    }
}
