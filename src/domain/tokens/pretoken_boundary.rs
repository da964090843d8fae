//! Finds positions in a text that no token spans, whatever text comes before and after. The text between two of them has
//! the same tokens in every text, because the encoding splits texts there before it looks for tokens.

/// Returns the first boundary, in bytes.
pub(super) fn first(text: &str) -> Option<usize> {
    let mut pairs = text.char_indices().zip(text.chars().skip(1));
    pairs.find(|((_, a), b)| is_boundary(*a, *b)).map(|((at, a), _)| at + a.len_utf8())
}

/// Returns the last boundary, in bytes.
pub(super) fn last(text: &str) -> Option<usize> {
    let mut pairs = text.char_indices().rev().zip(text.chars().rev().skip(1));
    pairs.find(|((_, b), a)| is_boundary(*a, *b)).map(|((at, _), _)| at)
}

/// Returns `true` before a single space, and between a letter or digit and punctuation. Only characters that certainly
/// split in the encoding are listed. The apostrophe is not, because `'s` belongs to its word.
fn is_boundary(a: char, b: char) -> bool {
    let is_word = a.is_ascii_alphanumeric()
        || matches!(a, 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    let ends_word = b.is_ascii_punctuation() && b != '\'' || matches!(b, '\n' | '、' | '。' | '，');
    (b == ' ' && !a.is_whitespace()) || (is_word && ends_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_boundary_are_found() {
        for (text, boundaries) in [
            ("", None),
            ("tea", None),
            (" tea", None),
            ("it's", None),
            ("a  b", Some((1, 1))),
            ("a\nb! c", Some((1, 4))),
            ("茶、茶。", Some((3, 9))),
        ] {
            assert_eq!(first(text).zip(last(text)), boundaries, "{text:?}");
        }
    }
}
