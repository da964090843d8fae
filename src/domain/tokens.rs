//! Counts the tokens of texts. Messages are counted once, when they are written, and the system message for each context.
//! `docs/tokens.md` describes the counts for users.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use tiktoken::CoreBpe;

mod pretoken_boundary;

/// The encoding of all stored counts.
pub const ENCODING: &str = "o200k_base";

static ENCODER: LazyLock<CoreBpe> = LazyLock::new(tiktoken::encoding::o200k_base);

/// Tokens that the chat format adds to each list: the markers at the beginning of the reply (OpenAI's cookbook, "How to
/// count tokens").
pub const PER_LIST: i64 = 3;

/// Tokens that the chat format adds to the content of each message: the markers of its beginning and end, and its
/// role (OpenAI's cookbook, "How to count tokens").
pub const PER_MESSAGE: i64 = 4;

/// Tokens of a content part that is not text: those of an image of 1024 × 1024 in high detail (OpenAI's vision guide).
pub const PER_ATTACHMENT: i64 = 765;

/// Texts are counted in pieces of about this size, because the time for some texts is quadratic. A piece ends at a
/// pre-token boundary, so the sum of the pieces is the count of the text.
const PIECE_BYTES: usize = 4 * 1024;

/// The size of a piece without such a boundary.
const MAX_PIECE_BYTES: usize = 64 * 1024;

/// The setting `tokens.tokenizer`: the encoding, and a factor for models whose tokenizer is not public. Stored counts do
/// not include the factor, so the setting can change at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokenizer {
    thousandths: i64,
}

impl Default for Tokenizer {
    fn default() -> Self {
        Self { thousandths: 1000 }
    }
}

impl Tokenizer {
    /// Multiplies a count of [`ENCODING`] with the factor and rounds up.
    pub fn scale(self, tokens: i64) -> i64 {
        let scaled = i128::from(tokens.max(0)) * i128::from(self.thousandths);
        i64::try_from((scaled + 999) / 1000).unwrap_or(i64::MAX)
    }

    /// Returns the largest count of [`ENCODING`] whose scaled value is at most `most`.
    pub fn unscale(self, most: i64) -> i64 {
        let unscaled = i128::from(most.max(0)) * 1000 / i128::from(self.thousandths);
        i64::try_from(unscaled).unwrap_or(i64::MAX)
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ENCODING)?;
        if self.thousandths != 1000 {
            let (whole, rest) = (self.thousandths / 1000, format!("{:03}", self.thousandths % 1000));
            write!(f, "*{whole}.{}", if rest == "000" { "0" } else { rest.trim_end_matches('0') })?;
        }
        Ok(())
    }
}

impl FromStr for Tokenizer {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        const INVALID: &str = "must be \"o200k_base\", or with a factor from 0.1 to 10 for models that count differently, \
            of at most three decimals: \"o200k_base*1.2\"";
        let factor = match name.strip_prefix(ENCODING).ok_or(INVALID)? {
            "" => return Ok(Self::default()),
            factor => factor.strip_prefix('*').ok_or(INVALID)?,
        };
        let (whole, decimals) = factor.split_once('.').unwrap_or((factor, "0"));
        let digits = |text: &str| (1..=3).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(decimals) {
            return Err(INVALID);
        }
        let thousandths = format!("{whole}{decimals:0<3}").parse().map_err(|_| INVALID)?;
        if (100..=10_000).contains(&thousandths) { Ok(Self { thousandths }) } else { Err(INVALID) }
    }
}

/// Loads the encoding before the first request needs it.
pub fn warm_up() {
    LazyLock::force(&ENCODER);
}

/// Counts the tokens of a text. Special tokens such as `<|endoftext|>` count as plain text.
pub fn count(text: &str) -> usize {
    let (mut rest, mut total) = (text, 0);
    while rest.len() > PIECE_BYTES {
        let (piece, next) = rest.split_at(end_of_piece(rest));
        total += ENCODER.count(piece);
        rest = next;
    }
    total + ENCODER.count(rest)
}

/// Returns the end of the first piece of a text that is longer than [`PIECE_BYTES`].
fn end_of_piece(text: &str) -> usize {
    let (start, rest) = text.split_at(text.floor_char_boundary(PIECE_BYTES));
    let (rest, _) = rest.split_at(rest.floor_char_boundary(MAX_PIECE_BYTES - start.len()));
    pretoken_boundary::last(start)
        .unwrap_or_else(|| start.len() + pretoken_boundary::first(rest).unwrap_or(rest.len()))
}

/// Counts the tokens of a text and returns the type that the store uses.
pub fn count_text(text: &str) -> i64 {
    i64::try_from(count(text)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tiktoken_rs::o200k_base_singleton;

    const ODD_TEXT: &str = "([a-z]{1,8}|[A-Z0-9]{1,5}|[ \n]{1,2}|\t|\r\n|[.!?,;:/#*'\"{}-]{1,4}|'s|é|私は|茶、|カ。|，|\u{3000}|한글|🍵|\u{301}\
        |\u{a0}|\u{2028}|Ⓐ|<.endoftext.>){0,30}";

    fn odd_text() -> impl Strategy<Value = String> {
        proptest::string::string_regex(ODD_TEXT).expect("a pattern")
    }

    #[test]
    fn count_matches_known_token_counts() {
        assert_eq!(count(""), 0);
        assert_eq!(count("hello world"), 2);
        assert!(count("<|endoftext|>") > 1);
        assert_eq!(count("私はお茶が好きです"), 6);
    }

    #[test]
    fn tokenizer_name_round_trips_and_invalid_names_are_rejected() {
        for name in ["o200k_base", "o200k_base*1.2", "o200k_base*0.125", "o200k_base*2.0"] {
            assert_eq!(name.parse::<Tokenizer>().expect("valid").to_string(), name);
        }
        assert_eq!("o200k_base*1.000".parse(), Ok(Tokenizer::default()));
        for name in [
            "",
            "cl100k_base",
            "o200k_base*",
            "o200k_base*0",
            "o200k_base*11",
            "o200k_base*1.2345",
            "o200k_base*-1",
        ] {
            assert!(name.parse::<Tokenizer>().is_err(), "{name}");
        }
        let larger: Tokenizer = "o200k_base*1.2".parse().expect("valid");
        assert_eq!([0, 1, 5, 100].map(|tokens| larger.scale(tokens)), [0, 2, 6, 120]);
        assert_eq!(larger.scale(i64::MAX), i64::MAX);
        for most in 0..50 {
            let unscaled = larger.unscale(most);
            assert!(larger.scale(unscaled) <= most && larger.scale(unscaled + 1) > most);
        }
    }

    #[test]
    fn count_in_pieces_equals_count_of_the_whole_text() {
        let text = "It's 12345 words, isn't it?! ".repeat(10_000);
        assert!(text.len() > 4 * MAX_PIECE_BYTES);
        assert_eq!(count(&text), ENCODER.count(&text));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn count_equals_that_of_another_tokenizer(odd in odd_text(), any in ".{0,20}", spaces in "[\\s\u{a0}!]{0,8}") {
            let text = odd + &spaces + &any;
            prop_assert_eq!(count(&text), o200k_base_singleton().count_ordinary(&text), "{:?}", text);
        }

        #[test]
        fn boundary_splits_the_tokens_in_every_text(
            before in odd_text(), text in "([a-z!/é]{0,2}[\\s\u{a0}]{0,4}){1,4}", after in odd_text()
        ) {
            for boundary in [pretoken_boundary::first(&text), pretoken_boundary::last(&text)].into_iter().flatten() {
                let (head, tail) = text.split_at(boundary);
                let (head, tail) = (format!("{before}{head}"), format!("{tail}{after}"));
                let whole = format!("{head}{tail}");
                prop_assert_eq!(count(&whole), count(&head) + count(&tail), "{:?} {:?}", head, tail);
            }
        }
    }

    #[test]
    fn text_of_pieces_without_a_boundary_near_their_end_is_counted_exactly() {
        let piece = format!("{} tea", "é".repeat(PIECE_BYTES));
        let text = piece.repeat(20);
        assert_eq!(count(&text), ENCODER.count(&text));
    }

    #[test]
    fn megabyte_of_spaces_is_counted_without_panic() {
        assert!(count(&" ".repeat(1 << 20)) > 0);
        assert!(count(&"é".repeat(MAX_PIECE_BYTES)) > 0);
    }
}
