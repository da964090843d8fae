//! Fitting a conversation into what a model can take at once.

use super::tokens;
use super::transcript::TranscriptEntry;

/// Tokens of each entry as a model gets to see it: its line, and the line feed.
#[must_use]
pub fn measure(entries: &[TranscriptEntry]) -> Vec<usize> {
    entries.iter().map(size).collect()
}

fn size(entry: &TranscriptEntry) -> usize {
    tokens::count(&entry.encode()) + 1
}

/// How many of the leading entries fit, up to one of the places in `ends` (ascending) where a chunk may end. The
/// first of these is taken even if it doesn't fit: what may not be parted is committed at once, see [`pieces`].
#[must_use]
pub fn batch_end(sizes: &[usize], ends: &[usize], capacity: usize) -> Option<usize> {
    let mut total = 0;
    let mut from = 0;
    let mut best = None;
    for &end in ends {
        total += sizes.get(from..end).unwrap_or_default().iter().sum::<usize>();
        from = end;
        if total > capacity && best.is_some() {
            break;
        }
        best = Some(end);
    }
    best
}

/// The entries in pieces that fit, in order; an entry that alone is too large is split. Together they hold all of
/// the text; only the short forms of tool calls give way where they alone are too much.
#[must_use]
pub fn split_to_fit(entries: Vec<TranscriptEntry>, capacity: usize) -> Vec<Vec<TranscriptEntry>> {
    let mut pieces = Vec::new();
    let mut piece = Vec::new();
    let mut filled = 0;
    for entry in entries.into_iter().flat_map(|entry| split_entry(entry, capacity)) {
        let size = size(&entry);
        if filled + size > capacity && !piece.is_empty() {
            pieces.push(std::mem::take(&mut piece));
            filled = 0;
        }
        filled += size;
        piece.push(entry);
    }
    pieces.push(piece);
    pieces
}

/// Splits an entry until each part fits.
fn split_entry(entry: TranscriptEntry, capacity: usize) -> Vec<TranscriptEntry> {
    /// Below this, in bytes of text, a part is taken as it is: a capacity this small serves nobody.
    const SMALLEST: usize = 64;
    if size(&entry) <= capacity {
        return vec![entry];
    }
    let bytes = entry.text.len();
    if bytes <= SMALLEST {
        return vec![TranscriptEntry { calls: Vec::new(), ..entry }];
    }
    // A token of plain text has about four bytes: the first guess is usually right, and halving ends the search.
    let part = bytes.div_ceil(2).min(capacity.saturating_mul(3)).max(SMALLEST);
    entry.split(part).into_iter().flat_map(|part| split_entry(part, capacity)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;

    fn entry(text: &str) -> TranscriptEntry {
        TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }
    }

    #[test]
    fn a_chunk_ends_where_it_may() {
        let sizes = [10, 10, 10, 10];
        assert_eq!(batch_end(&sizes, &[1, 2, 3, 4], 100), Some(4));
        assert_eq!(batch_end(&sizes, &[1, 2, 3, 4], 30), Some(3));
        assert_eq!(batch_end(&sizes, &[2, 4], 30), Some(2));
        assert_eq!(batch_end(&sizes, &[3, 4], 20), Some(3), "what may not be parted comes whole");
        assert_eq!(batch_end(&sizes, &[], 20), None);
    }

    #[test]
    fn pieces_fit_and_hold_everything() {
        let han = "语".repeat(700);
        let texts = ["short", &"many words in a row ".repeat(400), &"<>".repeat(900), &han, "end"];
        let entries: Vec<TranscriptEntry> = texts.iter().map(|text| entry(text)).collect();
        let pieces = split_to_fit(entries, 400);
        assert!(pieces.iter().all(|piece| measure(piece).iter().sum::<usize>() <= 400));
        let all: String = pieces.iter().flatten().map(|entry| entry.text.as_str()).collect();
        assert_eq!(all, texts.concat());
    }

    #[test]
    fn calls_that_are_too_much_give_way() {
        let mut large = entry("text");
        large.calls = vec!["call(argument argument argument)".repeat(30); 40];
        let pieces = split_to_fit(vec![large], 100);
        assert_eq!(pieces.len(), 1);
        assert!(pieces[0][0].calls.is_empty() && pieces[0][0].text == "text");
    }
}
