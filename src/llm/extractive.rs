//! The built-in summariser: it picks the sentences that carry most of a conversation. No key, no network.
//!
//! Messages are cut into [`sentences`]; neighbouring ones make a [`passage`], and a passage is one sentence of what
//! comes out; sentences are read as weighted [`terms`]; [`pick`] takes the passages that cover most of the weight,
//! again and again; [`prose`] writes them down in their order with who said them. Everything that is
//! language-specific in it is a short list of abbreviations; everything that is tuned is a constant in one of these
//! files, or below. `examples/rouge.rs` measures what a change of them does.
//!
//! Pure functions: the same input gives the same bytes, on every machine.

use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;
use passage::Neighbour;
use plain_text::Statement;
use selection::{Part, pick};
use std::borrow::Cow;
use std::ops::Range;
use terms::Terms;
use unicode_segmentation::UnicodeSegmentation;

mod passage;
mod plain_text;
mod selection;
mod sentences;
mod terms;

#[cfg(test)]
mod tests;

/// What revisions keep as their prompt version; to be raised with each change of what is picked.
pub const VERSION: &str = "extractive-1";

/// What tool results, calls and code blocks weigh beside what people and models say: they show how, seldom what.
const MACHINE: f64 = 0.3;
/// Questions ask for a fact; the answer holds it.
const QUESTION: f64 = 0.8;
/// What each name or figure in a sentence adds, for the first two of them.
const FIGURE: f64 = 0.3;
/// What the very beginning of a conversation adds: that is where people say what it is about.
const LEAD: f64 = 0.3;
/// How fast that wears off: an eighth into the conversation, a third of it is left.
const LEAD_DECAY: f64 = 8.0;

/// One sentence, and where it comes from.
#[derive(Debug)]
struct Found<'a> {
    /// Who says it, where that is known.
    label: Option<&'a str>,
    /// The message, or the part of a summary under one label.
    source: usize,
    text: Cow<'a, str>,
}

/// What carries most of a conversation: at most `sentences` sentences (at least one), in their order, as one
/// paragraph of plain prose with who said them: `Ada: … Assistant: …`.
///
/// Each is a sentence of a message or up to three neighbouring ones, with semicolons between them; verbatim but for
/// white space, markup, punctuation that could be taken for an end, and colons that could be taken for a speaker's.
/// The result is empty only if the entries are ([`TranscriptEntry::is_empty`]).
#[must_use]
pub fn consolidate(entries: &[TranscriptEntry], sentences: usize) -> String {
    let labels: Vec<String> = entries.iter().map(plain_text::label).collect();
    let mut terms = Terms::default();
    let (mut found, mut parts, mut neighbours) = (Vec::new(), Vec::new(), Vec::new());
    for (entry, (message, label)) in entries.iter().zip(&labels).enumerate() {
        let source = if message.role == Role::Tool { MACHINE } else { 1.0 };
        let place = 1.0 + LEAD * (-LEAD_DECAY * ratio(entry, entries.len())).exp();
        terms.begin_document(source);
        let said = sentences::split(&message.text)
            .into_iter()
            .map(|sentence| (Cow::Borrowed(sentence.text), !sentence.code));
        let done = message.calls.iter().map(|call| (Cow::Owned(format!("called {call}")), false));
        for (text, prose) in said.chain(done) {
            let bag = terms.read(&text);
            let form = if prose { form(&text) } else { MACHINE };
            let asks = plain_text::is_question(&text);
            neighbours.push(Neighbour { message: entry, words: bag.words, prose, asks });
            parts.push(Part { bag, factor: source * place * form });
            found.push(Found { label: Some(label), source: entry, text });
        }
    }
    let passages = passage::all(&neighbours);
    let picked = pick(&parts, &passages, &terms, sentences.max(1), |passage| size(&found, passage));
    if picked.is_empty() {
        return wordless(entries);
    }
    write(&found, picked)
}

/// Stands in for a summary where nobody said a word: the longest of the emoji, or of the punctuation.
fn wordless(entries: &[TranscriptEntry]) -> String {
    let longest = entries
        .iter()
        .rev() // of equals, `max_by_key` takes the last
        .filter(|entry| !entry.text.trim().is_empty())
        .max_by_key(|entry| entry.text.len());
    longest.map_or_else(String::new, |entry| {
        let words: Vec<&str> = entry.text.split_whitespace().take(10).collect();
        let text: String = words.join(" ").chars().take(40).collect();
        format!("{}: {text}", plain_text::label(entry))
    })
}

/// Compresses a summary to at most `sentences` of its sentences (at least one), as one paragraph, speakers kept.
///
/// Shorter than the summary, in Unicode words, whenever that has two words or more. Takes any prose: paragraphs
/// without labels come back without.
#[must_use]
pub fn compress(summary: &str, sentences: usize) -> String {
    let mut terms = Terms::default();
    let (mut found, mut parts) = (Vec::new(), Vec::new());
    let (mut label, mut source) = (None, 0);
    for line in summary.lines() {
        if line.trim().is_empty() {
            // Each paragraph is a summary of its own: whoever spoke last in one did not begin the next.
            label = None;
        }
        for (speaker, part) in plain_text::labelled(line) {
            label = speaker.or(label);
            source += 1;
            for sentence in sentences::split(part) {
                terms.begin_document(1.0);
                parts.push(Part { bag: terms.read(sentence.text), factor: form(sentence.text) });
                found.push(Found { label, source, text: Cow::Borrowed(sentence.text) });
            }
        }
    }
    // What has been written as a summary's sentence is a passage already.
    let passages: Vec<_> = (0..parts.len()).map(|number| number..number + 1).collect();
    let limit = summary.unicode_words().count();
    let mut best = pick(&parts, &passages, &terms, sentences.max(1), |passage| size(&found, passage));
    while best.len() > 1 {
        let text = write(&found, best.clone());
        if text.unicode_words().count() < limit {
            return text;
        }
        best.pop();
    }
    let text = if best.is_empty() {
        plain_text::plain(summary) // nothing but labels, or not a word
    } else {
        write(&found, best)
    };
    shorten(&text, limit)
}

/// Writes passages down, in their order.
fn write(found: &[Found<'_>], mut passages: Vec<Range<usize>>) -> String {
    passages.sort_unstable_by_key(|passage| passage.start);
    let statements: Vec<_> = passages
        .iter()
        .filter_map(|passage| found.get(passage.start).map(|first| (first, text(found, passage))))
        .collect();
    plain_text::join(statements.iter().map(|(first, text)| Statement {
        label: first.label,
        source: first.source,
        text,
    }))
}

/// The text of a passage.
fn text(found: &[Found<'_>], passage: &Range<usize>) -> String {
    let sentences = found.get(passage.clone()).unwrap_or_default();
    passage::write(sentences.iter().map(|sentence| sentence.text.as_ref()))
}

/// How much of a budget a passage takes up.
fn size(found: &[Found<'_>], passage: &Range<usize>) -> usize {
    passage::count(&text(found, passage))
}

/// One sentence: as it is if that has fewer words than `limit`, else its first two thirds.
fn shorten(sentence: &str, limit: usize) -> String {
    let words = sentence.unicode_word_indices().count();
    if words < limit || words < 2 {
        return sentence.to_owned();
    }
    let end = sentence.unicode_word_indices().nth((limit * 2 / 3).max(1));
    let (kept, _) = sentence.split_at(end.map_or(sentence.len(), |(at, _)| at));
    plain_text::end(kept.to_owned())
}

/// What the form of a sentence says of its worth: a factor around 1.
fn form(sentence: &str) -> f64 {
    let figures = sentence
        .split_whitespace()
        .skip(1) // the first word is capitalised whatever it is
        .filter(|word| is_figure(word))
        .take(2)
        .fold(1.0, |sum, _| sum + FIGURE);
    if plain_text::is_question(sentence) { QUESTION * figures } else { figures }
}

/// Whether a word is a name or a figure: it has a digit, or begins with a capital and is not just one letter
/// (English writes "I'm").
fn is_figure(word: &str) -> bool {
    let mut chars = word.chars().skip_while(|c| !c.is_alphanumeric());
    let name =
        chars.next().is_some_and(char::is_uppercase) && chars.next().is_some_and(char::is_alphanumeric);
    // No ideograph is numeric, and not to look them up saves a tenth of the time where all are.
    name || word.chars().any(|c| !plain_text::is_wide(c) && c.is_numeric())
}

/// `part / whole`, exact for any number of messages that fits into memory.
fn ratio(part: usize, whole: usize) -> f64 {
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    number(part) / number(whole.max(1))
}
