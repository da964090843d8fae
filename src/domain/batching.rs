//! Divides a transcript into batches that fit into the input limit of a model.

use super::transcript::{MAX_TIME_TOKENS, TimeLines, TranscriptEntry, TranscriptLine};

/// Returns the largest position in `ends` (ascending) whose leading items have at most `capacity` tokens in total. The
/// first position is returned even if its items do not fit: messages before it must be summarised together, and
/// [`split_to_fit`] divides their text. Returns `None` if `ends` is empty.
pub fn batch_end(sizes: &[usize], ends: &[usize], capacity: usize) -> Option<usize> {
    let mut total = 0;
    let mut start = 0;
    let mut best = None;
    for &end in ends {
        total += sizes.get(start..end).unwrap_or_default().iter().sum::<usize>();
        start = end;
        if total > capacity && best.is_some() {
            break;
        }
        best = Some(end);
    }
    best
}

/// Divides the lines, in order, into groups of at most `capacity` tokens. A line that is too large is split. The groups
/// contain the complete text, except parts of white space, which a model could not summarise. The short forms of tool calls are
/// dropped if they are too large on their own. There is no group if nothing is left.
pub fn split_to_fit(lines: Vec<TranscriptLine>, capacity: usize) -> Vec<Vec<TranscriptLine>> {
    let mut groups = Vec::new();
    let mut group = Vec::new();
    let (mut filled, mut times) = (0, TimeLines::default());
    let lines = lines.into_iter().flat_map(|line| split_line(line, capacity));
    for line in lines.filter(|line| !line.entry.is_empty()) {
        let mut tokens = times.tokens_with(&line);
        if filled + tokens > capacity && !group.is_empty() {
            groups.push(std::mem::take(&mut group));
            (filled, times) = (0, TimeLines::default());
            tokens = times.tokens_with(&line);
        }
        filled += tokens;
        group.push(line);
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// Splits a line until each part fits.
fn split_line(line: TranscriptLine, capacity: usize) -> Vec<TranscriptLine> {
    /// Parts with at most this many bytes of text are not split further: no real model has such a small capacity.
    const SMALLEST: usize = 64;
    let time_tokens = line.time.map_or(0, |_| MAX_TIME_TOKENS);
    if line.tokens + time_tokens <= capacity {
        return vec![line];
    }
    let time = line.time;
    let to_line = |entry| TranscriptLine::at(entry, time);
    let bytes = line.entry.text.len();
    if bytes <= SMALLEST {
        return vec![to_line(TranscriptEntry { calls: Vec::new(), ..line.entry })];
    }
    // A token of plain text has about four bytes, so the first guess usually fits; halving bounds the recursion.
    let part = bytes.div_ceil(2).min(capacity.saturating_sub(time_tokens).saturating_mul(3)).max(SMALLEST);
    let parts = line.entry.split(part).into_iter().map(to_line);
    parts.flat_map(|part| split_line(part, capacity)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;
    use crate::domain::tokens;
    use crate::domain::transcript::encode_transcript;
    use time::OffsetDateTime;

    fn entry(text: &str) -> TranscriptEntry {
        TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }
    }

    #[test]
    fn batch_ends_at_last_position_that_fits() {
        let sizes = [10, 10, 10, 10];
        assert_eq!(batch_end(&sizes, &[1, 2, 3, 4], 100), Some(4));
        assert_eq!(batch_end(&sizes, &[1, 2, 3, 4], 30), Some(3));
        assert_eq!(batch_end(&sizes, &[2, 4], 30), Some(2));
        assert_eq!(batch_end(&sizes, &[3, 4], 20), Some(3), "inseparable messages are taken together");
        assert_eq!(batch_end(&sizes, &[], 20), None);
    }

    #[test]
    fn split_groups_fit_and_contain_the_complete_text() {
        let han = "语".repeat(700);
        let texts = ["short", &"many words in a row ".repeat(400), &"<>".repeat(900), &han, "end"];
        let day = |number| Some(OffsetDateTime::UNIX_EPOCH + time::Duration::days(number));
        for time in [|_| None, day] {
            let lines = texts.iter().zip(0..).map(|(text, at)| TranscriptLine::at(entry(text), time(at)));
            let groups = split_to_fit(lines.collect(), 400);
            for group in &groups {
                assert!(tokens::count(&encode_transcript(group)) <= 400);
                assert_eq!(encode_transcript(group).starts_with("{\"time\""), time(0).is_some());
            }
            let text: String = groups.iter().flatten().map(|line| line.entry.text.as_str()).collect();
            assert_eq!(text, texts.concat());
        }
    }

    #[test]
    fn oversized_tool_calls_are_dropped() {
        let calls = vec!["call(argument argument argument)".repeat(30); 40];
        let groups = split_to_fit(vec![TranscriptEntry { calls, ..entry("text") }.into()], 100);
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0][0].entry, entry("text"));
    }

    #[test]
    fn parts_without_text_are_left_out() {
        let blank = "\n".repeat(20_000);
        let calls = vec!["call(argument)".repeat(30); 40];
        let lines = [entry(&format!("before{blank}after")), TranscriptEntry { calls, ..entry(" ") }];
        let groups = split_to_fit(lines.map(TranscriptLine::from).into(), 100);
        assert!(groups.iter().flatten().all(|line| !line.entry.is_empty()));
        let text: String = groups.iter().flatten().map(|line| line.entry.text.trim()).collect();
        assert_eq!(text, "beforeafter");
        assert_eq!(split_to_fit(vec![entry(&blank).into()], 100).len(), 0);
    }
}
