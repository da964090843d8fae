//! The built-in summariser: it picks the sentences that carry most of a conversation. No key, no network.
//!
//! Messages are cut into [`sentences`]; sentences are read as weighted [`terms`]; [`pick`] takes those that cover
//! most of the weight, again and again; [`prose`] writes them down in their order with who said them. Everything
//! that is language-specific in it is a short list of abbreviations; everything that is tuned is a constant in one
//! of these files, or below. `examples/rouge.rs` measures what a change of them does.
//!
//! Pure functions: the same input gives the same bytes, on every machine.

use crate::domain::message::Role;
use crate::domain::transcript::Entry;
use pick::{Candidate, pick};
use prose::Statement;
use std::borrow::Cow;
use terms::Terms;
use unicode_segmentation::UnicodeSegmentation;

mod pick;
mod prose;
mod sentences;
mod terms;

#[cfg(test)]
mod tests;

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

/// One sentence of a message, and where it comes from.
#[derive(Debug)]
struct Found<'a> {
    entry: usize,
    text: Cow<'a, str>,
}

/// What carries most of a conversation: at most `sentences` of its sentences (at least one), in their order, as one
/// paragraph of plain prose with who said them: `Ada: … Assistant: …`.
///
/// Sentences are verbatim but for white space, markup, and colons that could be taken for a speaker's. The result
/// is empty only if the entries are ([`Entry::is_empty`]).
#[must_use]
pub fn consolidate(entries: &[Entry], sentences: usize) -> String {
    let mut terms = Terms::default();
    let (mut found, mut candidates) = (Vec::new(), Vec::new());
    for (entry, message) in entries.iter().enumerate() {
        let source = if message.role == Role::Tool { MACHINE } else { 1.0 };
        let place = 1.0 + LEAD * (-LEAD_DECAY * ratio(entry, entries.len())).exp();
        terms.begin_document(source);
        for sentence in sentences::split(&message.text) {
            let form = if sentence.code { MACHINE } else { form(sentence.text) };
            candidates.push(Candidate { bag: terms.read(sentence.text), factor: source * place * form });
            found.push(Found { entry, text: Cow::Borrowed(sentence.text) });
        }
        for call in &message.calls {
            candidates.push(Candidate { bag: terms.read(call), factor: MACHINE * place });
            found.push(Found { entry, text: Cow::Owned(format!("called {call}")) });
        }
    }
    let mut picked = pick(&candidates, &terms, sentences.max(1));
    picked.sort_unstable();
    let picked: Vec<(usize, String, String)> = picked
        .into_iter()
        .filter_map(|number| found.get(number))
        .filter_map(|found| {
            let speaker = entries.get(found.entry)?;
            Some((found.entry, prose::label(speaker), prose::plain(&found.text)))
        })
        .collect();
    if picked.is_empty() {
        return wordless(entries);
    }
    prose::join(picked.iter().map(|(source, label, text)| Statement {
        label: Some(label),
        source: *source,
        text,
    }))
}

/// Stands in for a summary where nobody said a word: the longest of the emoji, or of the punctuation.
fn wordless(entries: &[Entry]) -> String {
    let longest = entries
        .iter()
        .rev() // of equals, `max_by_key` takes the last
        .filter(|entry| !entry.text.trim().is_empty())
        .max_by_key(|entry| entry.text.len());
    longest.map_or_else(String::new, |entry| {
        let words: Vec<&str> = entry.text.split_whitespace().take(10).collect();
        let text: String = words.join(" ").chars().take(40).collect();
        format!("{}: {text}", prose::label(entry))
    })
}

/// Compresses a summary to at most `sentences` of its sentences (at least one), as one paragraph, speakers kept.
///
/// Shorter than the summary, in Unicode words, whenever that has two words or more. Takes any prose: paragraphs
/// without labels come back without.
#[must_use]
pub fn compress(summary: &str, sentences: usize) -> String {
    let mut terms = Terms::default();
    let (mut found, mut candidates) = (Vec::new(), Vec::new());
    let (mut label, mut source) = (None, 0);
    for line in summary.lines() {
        if line.trim().is_empty() {
            // Each paragraph is a summary of its own: whoever spoke last in one did not begin the next.
            label = None;
        }
        for (speaker, part) in prose::labelled(line) {
            label = speaker.or(label);
            source += 1;
            for sentence in sentences::split(part) {
                terms.begin_document(1.0);
                candidates.push(Candidate { bag: terms.read(sentence.text), factor: form(sentence.text) });
                found.push((label, source, prose::plain(sentence.text)));
            }
        }
    }
    let limit = summary.unicode_words().count();
    let mut best = pick(&candidates, &terms, sentences.max(1));
    while best.len() > 1 {
        let mut picked = best.clone();
        picked.sort_unstable();
        let text = write(&found, &picked);
        if text.unicode_words().count() < limit {
            return text;
        }
        best.pop();
    }
    let text = if best.is_empty() {
        prose::plain(summary) // nothing but labels, or not a word
    } else {
        write(&found, &best)
    };
    shorten(&text, limit)
}

fn write(found: &[(Option<&str>, usize, String)], picked: &[usize]) -> String {
    prose::join(
        picked.iter().filter_map(|number| found.get(*number)).map(|(label, source, text)| Statement {
            label: *label,
            source: *source,
            text,
        }),
    )
}

/// One sentence: as it is if that has fewer words than `limit`, else its first two thirds.
fn shorten(sentence: &str, limit: usize) -> String {
    let words = sentence.unicode_word_indices().count();
    if words < limit || words < 2 {
        return sentence.to_owned();
    }
    let end = sentence.unicode_word_indices().nth((limit * 2 / 3).max(1));
    let (kept, _) = sentence.split_at(end.map_or(sentence.len(), |(at, _)| at));
    prose::end(kept.to_owned())
}

/// What the form of a sentence says of its worth: a factor around 1.
fn form(sentence: &str) -> f64 {
    let figures = sentence
        .split_whitespace()
        .skip(1) // the first word is capitalised whatever it is
        .filter(|word| is_figure(word))
        .take(2)
        .fold(1.0, |sum, _| sum + FIGURE);
    if prose::is_question(sentence) { QUESTION * figures } else { figures }
}

/// Whether a word is a name or a figure: it has a digit, or begins with a capital and is not just one letter
/// (English writes "I'm").
fn is_figure(word: &str) -> bool {
    let mut chars = word.chars().skip_while(|c| !c.is_alphanumeric());
    let name =
        chars.next().is_some_and(char::is_uppercase) && chars.next().is_some_and(char::is_alphanumeric);
    name || word.chars().any(char::is_numeric)
}

/// `part / whole`, exact for any number of messages that fits into memory.
fn ratio(part: usize, whole: usize) -> f64 {
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    number(part) / number(whole.max(1))
}
