//! The built-in extractive summariser: it selects the most informative sentences of a conversation, without a model.
//!
//! The steps, one module each:
//!
//! 1. [`sentences`] splits each message into sentences.
//! 2. [`terms`] reads each sentence as a bag of terms and weights each term by its frequency and length.
//! 3. [`passage`] forms the candidates: single sentences, and up to three neighbouring sentences of one message. One
//!    passage becomes one sentence of the summary.
//! 4. [`selection`] greedily selects the passages that cover most of the total weight within the budget.
//! 5. [`plain_text`] writes the selected passages in their original order, with their speakers, as one paragraph.
//!
//! Only a short list of abbreviations depends on the language. All tuned values are constants in these files;
//! `examples/rouge.rs` measures the effect of a change. The functions are pure: the same input gives the same bytes on
//! every machine.

use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;
use passage::SourceSentence;
use selection::select;
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

/// The name of the built-in model.
pub use crate::config::EXTRACTIVE as MODEL;

/// The prompt version of extractive summaries in revisions. Increase it with every change of the selection.
pub const VERSION: &str = "extractive-1";

/// Factor for tool results, tool calls and code, which rarely contain facts. A tool result is reduced three times: its
/// terms count less for the frequencies, its sentences score less, and code in it scores less again.
const MACHINE_FACTOR: f64 = 0.3;
/// Factor for questions: the fact is in the answer.
const QUESTION_FACTOR: f64 = 0.8;
/// Bonus for each of the first two names or numbers of a sentence.
const NAME_OR_NUMBER_BONUS: f64 = 0.3;
/// Bonus at the beginning of a conversation, where people state its topic.
const LEAD_BONUS: f64 = 0.3;
/// Decay of the lead bonus: after an eighth of the conversation, about a third of it is left.
const LEAD_DECAY: f64 = 8.0;

/// Returns the most informative sentences of a conversation as one paragraph with speakers: `Ada: … Assistant: …`. The
/// result has at least one and at most `sentences` sentences, in the order of the conversation.
///
/// Each sentence consists of up to three neighbouring sentences of one message, joined by semicolons. They are verbatim
/// except for white space, markup, and punctuation that could be mistaken for a sentence end or a speaker label. The
/// result is empty only if all entries are ([`TranscriptEntry::is_empty`]).
#[must_use]
pub fn consolidate(entries: &[TranscriptEntry], sentences: usize) -> String {
    let labels: Vec<String> = entries.iter().map(plain_text::label).collect();
    let mut terms = Terms::default();
    let mut sources = Vec::new();
    for (index, (entry, label)) in entries.iter().zip(&labels).enumerate() {
        let role_factor = if entry.role == Role::Tool { MACHINE_FACTOR } else { 1.0 };
        let position_factor = 1.0 + LEAD_BONUS * (-LEAD_DECAY * ratio(index, entries.len())).exp();
        terms.begin_document(role_factor);
        let text = sentences::split(&entry.text)
            .into_iter()
            .map(|sentence| (Cow::Borrowed(sentence.text), !sentence.is_code));
        let calls = entry.calls.iter().map(|call| (Cow::Owned(format!("called {call}")), false));
        for (text, is_prose) in text.chain(calls) {
            let bag = terms.read(&text);
            let form_factor = if is_prose { form_factor(&text) } else { MACHINE_FACTOR };
            let factor = role_factor * position_factor * form_factor;
            sources.push(SourceSentence { label: Some(label), source: index, text, bag, factor, is_prose });
        }
    }
    let passages = passage::candidates(&sources);
    let selected = select(&sources, &passages, terms.weights(), sentences.max(1), |passage| {
        passage::sentence_count(&passage_text(&sources, passage))
    });
    if selected.is_empty() {
        return longest_wordless_text(entries);
    }
    write(&sources, selected)
}

/// Returns a substitute for a conversation without words: the longest text of emoji or punctuation.
fn longest_wordless_text(entries: &[TranscriptEntry]) -> String {
    let longest = entries
        .iter()
        .rev() // `max_by_key` returns the last of equal elements
        .filter(|entry| !entry.text.trim().is_empty())
        .max_by_key(|entry| entry.text.len());
    longest.map_or_else(String::new, |entry| {
        let words: Vec<&str> = entry.text.split_whitespace().take(10).collect();
        let text: String = words.join(" ").chars().take(40).collect();
        format!("{}: {text}", plain_text::label(entry))
    })
}

/// Compresses a summary to its most informative sentences, at least one and of at most `max_words` words, as one paragraph with the
/// speakers.
///
/// The result has fewer Unicode words than the summary if the summary has at least two. The input may be any prose;
/// text without speaker labels stays without.
#[must_use]
pub fn compress(summary: &str, max_words: usize) -> String {
    let mut terms = Terms::default();
    let mut sources = Vec::new();
    let (mut label, mut source) = (None, 0);
    for line in summary.lines() {
        if line.trim().is_empty() {
            // A paragraph is a summary in itself, so the last speaker of one is not the first of the next.
            label = None;
        }
        for (speaker, part) in plain_text::split_at_labels(line) {
            label = speaker.or(label);
            source += 1;
            for sentence in sentences::split(part) {
                terms.begin_document(1.0);
                let (text, bag) = (Cow::Borrowed(sentence.text), terms.read(sentence.text));
                let factor = form_factor(sentence.text);
                sources.push(SourceSentence { label, source, text, bag, factor, is_prose: true });
            }
        }
    }
    // A sentence of a summary is a passage already.
    let passages: Vec<_> = (0..sources.len()).map(|number| number..number + 1).collect();
    let max_words = max_words.min(summary.unicode_words().count().saturating_sub(1)).max(1);
    let mut selected = select(&sources, &passages, terms.weights(), max_words, |passage| {
        passage_text(&sources, passage).unicode_words().count()
    });
    while selected.len() > 1 {
        let text = write(&sources, selected.clone());
        if text.unicode_words().count() <= max_words {
            return text;
        }
        selected.pop();
    }
    let text = if selected.is_empty() {
        plain_text::to_plain_sentence(summary) // only labels, or no words
    } else {
        write(&sources, selected)
    };
    shorten(&text, max_words + 1)
}

/// Writes the passages in the order of the conversation. A label precedes the first passage of each source.
fn write(sources: &[SourceSentence<'_>], mut passages: Vec<Range<usize>>) -> String {
    passages.sort_unstable_by_key(|passage| passage.start);
    let (mut out, mut last) = (String::new(), None);
    for passage in passages {
        let Some(first) = sources.get(passage.start) else { continue };
        if !out.is_empty() {
            out.push(' ');
        }
        if let Some(label) = first.label.filter(|_| last != Some(first.source)) {
            out.push_str(label);
            out.push_str(": ");
        }
        out.push_str(&passage_text(sources, &passage));
        last = Some(first.source);
    }
    out
}

fn passage_text(sources: &[SourceSentence<'_>], passage: &Range<usize>) -> String {
    let sentences = sources.get(passage.clone()).unwrap_or_default();
    passage::write(sentences.iter().map(|sentence| sentence.text.as_ref()))
}

/// Returns the first two thirds of a sentence that has `max_words` words or more.
fn shorten(sentence: &str, max_words: usize) -> String {
    let words = sentence.unicode_word_indices().count();
    if words < max_words || words < 2 {
        return sentence.to_owned();
    }
    let end = sentence.unicode_word_indices().nth((max_words * 2 / 3).max(1));
    let (kept, _) = sentence.split_at(end.map_or(sentence.len(), |(at, _)| at));
    plain_text::with_end(kept.to_owned())
}

/// Returns the factor for the form of a sentence: names and numbers increase it, a question decreases it.
fn form_factor(sentence: &str) -> f64 {
    let factor = sentence
        .split_whitespace()
        .skip(1) // the first word is always capitalised
        .filter(|word| is_name_or_number(word))
        .take(2)
        .fold(1.0, |sum, _| sum + NAME_OR_NUMBER_BONUS);
    if plain_text::is_question(sentence) { QUESTION_FACTOR * factor } else { factor }
}

/// Returns `true` if the word contains a digit, or starts with a capital and has more than one letter (unlike "I'm").
fn is_name_or_number(word: &str) -> bool {
    let mut chars = word.chars().skip_while(|c| !c.is_alphanumeric());
    let is_name =
        chars.next().is_some_and(char::is_uppercase) && chars.next().is_some_and(char::is_alphanumeric);
    is_name || word.chars().any(char::is_numeric)
}

fn ratio(part: usize, total: usize) -> f64 {
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    number(part) / number(total.max(1))
}
