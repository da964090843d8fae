//! Shortening of texts.

/// Returns the text, if it is longer than `max_chars`, with its middle replaced: two thirds of `max_chars` remain from its
/// beginning and one third from its end. `mark` receives the number of the characters that are left out.
pub fn shorten_middle(text: &str, max_chars: usize, mark: impl FnOnce(usize) -> String) -> String {
    let count = text.chars().count();
    if count <= max_chars {
        return text.to_owned();
    }
    let (begin, end) = (max_chars * 2 / 3, max_chars / 3);
    let mark = mark(count - begin - end);
    text.chars().take(begin).chain(mark.chars()).chain(text.chars().skip(count - end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginning_and_end_remain() {
        let mark = |left_out: usize| format!("[{left_out}]");
        assert_eq!(shorten_middle("äbcdef", 6, mark), "äbcdef");
        assert_eq!(shorten_middle("äbcdefg", 6, mark), "äbcd[1]fg");
        assert_eq!(shorten_middle("äbcdefghijü", 3, mark), "äb[8]ü");
        assert_eq!(shorten_middle("äb", 0, mark), "[2]");
    }
}
