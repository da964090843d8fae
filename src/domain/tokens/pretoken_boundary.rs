//! Finds positions in a text that no token spans, whatever text comes before and after. The text between two of them has
//! the same tokens in every text, because the encoding splits texts there before it looks for tokens.

/// Returns the first boundary, in bytes.
pub(super) fn first(text: &str) -> Option<usize> {
    let mut pairs = text.chars().zip(text.char_indices().skip(1));
    pairs.find(|(a, (at, _))| is_boundary(*a, text.split_at(*at).1)).map(|(_, (at, _))| at)
}

/// Returns the last boundary, in bytes.
pub(super) fn last(text: &str) -> Option<usize> {
    let mut pairs = text.chars().rev().skip(1).zip(text.char_indices().rev());
    pairs.find(|(a, (at, _))| is_boundary(*a, text.split_at(*at).1)).map(|(_, (at, _))| at)
}

/// Returns `true` if there is a boundary between `a` and the text that follows it: between a letter or digit and
/// punctuation, before white space, and after the last line feed of white space. Only characters that certainly split in
/// the encoding are listed. The apostrophe is not, because `'s` belongs to its word.
fn is_boundary(a: char, rest: &str) -> bool {
    let Some(b) = rest.chars().next() else { return false };
    if is_blank(b) {
        return match a {
            '\r' | '\n' => rest.chars().find(|c| !is_blank(*c)).is_some_and(|c| !c.is_whitespace()),
            _ => !a.is_whitespace(),
        };
    }
    let is_word = a.is_ascii_alphanumeric()
        || matches!(a, 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    is_word && (b.is_ascii_punctuation() && b != '\'' || matches!(b, '\n' | '、' | '。' | '，'))
}

/// Returns `true` for white space except line feeds and carriage returns, which can end a token of punctuation.
fn is_blank(c: char) -> bool {
    c.is_whitespace() && !matches!(c, '\r' | '\n')
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
            ("!\u{a0}!", Some((1, 1))),
            ("!\n/", None),
            ("!\n\t ", None),
            ("!\n\t \n!", None),
            ("!\n\r \t!", Some((3, 3))),
            ("a\nb! c", Some((1, 4))),
            ("茶、茶。", Some((3, 9))),
        ] {
            assert_eq!(first(text).zip(last(text)), boundaries, "{text:?}");
        }
    }
}
