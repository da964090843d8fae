//! Places in a text over which no token reaches, whatever stands before and after: what lies between two of them has the
//! same tokens in every text. The encoding splits a text there before it looks for tokens.

/// The first of them, in bytes.
pub(super) fn first(text: &str) -> Option<usize> {
    let mut pairs = text.char_indices().zip(text.chars().skip(1));
    pairs.find(|((_, a), b)| is_border(*a, *b)).map(|((at, a), _)| at + a.len_utf8())
}

/// The last of them, in bytes.
pub(super) fn last(text: &str) -> Option<usize> {
    let mut pairs = text.char_indices().rev().zip(text.chars().rev().skip(1));
    pairs.find(|((_, b), a)| is_border(*a, *b)).map(|((at, _), _)| at)
}

/// Before a blank, unless there are more of them; and behind a letter or digit, before what is neither nor a mark on it.
/// Of letters only those are taken that are sure to be some, of what follows only what is common; not the apostrophe, since
/// `'s` belongs to its word.
fn is_border(a: char, b: char) -> bool {
    let is_word = a.is_ascii_alphanumeric()
        || matches!(a, 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    let ends_it = b.is_ascii_punctuation() && b != '\'' || matches!(b, '\n' | '、' | '。' | '，');
    (b == ' ' && !a.is_whitespace()) || (is_word && ends_it)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_are_found_from_both_ends() {
        for (text, borders) in [
            ("", None),
            ("tea", None),
            (" tea", None),
            ("it's", None),
            ("a  b", Some((1, 1))),
            ("a\nb! c", Some((1, 4))),
            ("茶、茶。", Some((3, 9))),
        ] {
            assert_eq!(first(text).zip(last(text)), borders, "{text:?}");
        }
    }
}
