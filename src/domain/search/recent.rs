//! The terms of messages of a session, as one text, which a store keeps until the messages become part of a segment.
//!
//! Each message has its distance from the last `seq` of the session, its time if it is not that of the others, and its terms, separated by
//! spaces. Messages are separated by a bar, which needs no escape sequence in JSON. The last `seq` is known when the messages are stored.

use super::segment::DamagedPage;
use std::fmt::Write as _;
use std::mem;

/// Separates messages. No term contains it.
const SEPARATOR: u8 = b'|';

/// A message in a text of terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentTerms<'t> {
    /// The last `seq` of the session minus that of the message.
    pub from_end: i64,
    /// In microseconds since 1970, if it is not the time of the others.
    pub micros: Option<i64>,
    /// Separated by spaces.
    pub terms: &'t str,
}

impl<'t> RecentTerms<'t> {
    /// Adds the message to a text.
    pub fn write(&self, text: &mut String) {
        let Self { from_end, micros, terms } = self;
        if !text.is_empty() {
            text.push(char::from(SEPARATOR));
        }
        // Writing to memory cannot fail.
        _ = write!(text, "{from_end} ");
        if let Some(micros) = micros {
            _ = write!(text, "{micros}");
        }
        text.push(' ');
        text.push_str(terms);
    }

    /// Returns the messages of a text that has at least one. A message that cannot be read is an error.
    pub fn read_all(text: &'t str) -> impl Iterator<Item = Result<Self, DamagedPage>> {
        let ends = memchr::memchr_iter(SEPARATOR, text.as_bytes()).chain([text.len()]);
        let message = |(start, end)| Self::read(text.get(start..end)?);
        let mut start = 0;
        ends.map(move |end| message((mem::replace(&mut start, end + 1), end)).ok_or(DamagedPage))
    }

    fn read(message: &'t str) -> Option<Self> {
        let (from_end, rest) = message.split_once(' ')?;
        let (micros, terms) = rest.split_once(' ')?;
        let micros = if micros.is_empty() { None } else { Some(micros.parse().ok()?) };
        Some(Self { from_end: from_end.parse().ok()?, micros, terms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            messages in proptest::collection::vec((any::<i64>(), any::<Option<i64>>(), "[a-zé:]{1,4}( [a-z]{1,3}){0,3}"), 1..9),
        ) {
            let messages: Vec<_> = messages
                .iter()
                .map(|(from_end, micros, terms)| RecentTerms { from_end: *from_end, micros: *micros, terms })
                .collect();
            let mut text = String::new();
            for message in &messages {
                message.write(&mut text);
            }
            prop_assert_eq!(RecentTerms::read_all(&text).collect::<Result<Vec<_>, _>>(), Ok(messages));
        }
    }

    #[test]
    fn damaged_message_is_an_error() {
        for text in ["", "0", "0 ", "x  plum", "1 x plum", "1  plum||0  plum"] {
            assert!(RecentTerms::read_all(text).any(|message| message == Err(DamagedPage)), "{text:?}");
        }
    }

    /// Databases contain this format. If this test fails, recent messages can't be read.
    #[test]
    fn format_does_not_change() {
        let mut text = String::new();
        RecentTerms { from_end: 1, micros: None, terms: ":ruser plum" }.write(&mut text);
        RecentTerms { from_end: 0, micros: Some(-5), terms: ":rtool" }.write(&mut text);
        assert_eq!(text, "1  :ruser plum|0 -5 :rtool");
    }
}
