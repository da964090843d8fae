//! The built-in summariser: it keeps the sentences of a conversation that state most facts, without a model.
//!
//! 1. [`sentences`] splits each message into sentences.
//! 2. [`terms`] finds the content words of a sentence. New, rare words weigh most, and names, numbers and identifiers more than others.
//! 3. [`selection`] takes the sentences that add most weight for their length, until the summary has its largest permitted size.
//! 4. [`lines`] writes them as they were said, in their order: one line for each message, with its speaker, and a line for each new date.
//!
//! A summary is compressed by the same rules, so a fact is dropped because of its rank, whatever its age. Results of tools are never
//! quoted: a fetched page could contain orders, and a summary is a part of the system message.
//!
//! All tuned values are constants in these files; `scripts/remember` measures the effect of a change. The functions are pure: the same
//! input gives the same bytes on every machine.

use crate::domain::consolidation::SummaryLimit;
use crate::domain::message::Role;
use crate::domain::summary::{parse_date, words};
use crate::domain::transcript::{TranscriptEntry, TranscriptLine};
use lines::split_label;
use selection::{Line, Statement};
use terms::Terms;

mod cues;
mod lines;
mod selection;
mod sentences;
mod terms;

#[cfg(test)]
mod tests;

/// The name of the built-in model.
pub use crate::config::EXTRACTIVE as MODEL;

/// The prompt version of extractive summaries in revisions. Increase it with every change of the selection.
pub const VERSION: &str = "extractive-2";

/// Factor for code and tool calls, which rarely state facts.
const CODE_FACTOR: f64 = 0.5;
/// Factor for questions: the fact is in the answer.
const QUESTION_FACTOR: f64 = 0.5;
/// Factor for sentences without a name, a number or an identifier, which are mostly general advice.
const PLAIN_FACTOR: f64 = 0.45;
/// Factor for the user, who says what is true and what is wanted.
const USER_FACTOR: f64 = 1.2;
/// Factor for sentences that decide, demand or forbid something, or state a preference.
const CUE_FACTOR: f64 = 1.5;

/// Returns the sentences of a conversation that state most facts, as lines such as `Ada: The port is 8080.` The result has at most the
/// size of the limit, except that it has at least one word. It is empty only if all entries are ([`TranscriptEntry::is_empty`]).
#[must_use]
pub fn summarize(conversation: &[TranscriptLine], limit: SummaryLimit) -> String {
    let mut draft = Draft::new(conversation.iter().map(|message| message.entry.text.as_str()));
    for message in conversation.iter().filter(|message| message.entry.role != Role::Tool) {
        let entry = &message.entry;
        let factor = if entry.role == Role::User { USER_FACTOR } else { 1.0 };
        draft.begin_line(Line {
            date: message.time.map(time::OffsetDateTime::date),
            label: Some(lines::label(entry)),
        });
        for sentence in sentences::split(&entry.text) {
            let form_factor = if sentence.is_code { CODE_FACTOR } else { form_factor(sentence.text) };
            draft.add(sentence.text, factor * form_factor);
        }
        for call in &entry.calls {
            draft.add(&format!("called {call}"), CODE_FACTOR);
        }
    }
    let text = draft.write(limit);
    if text.is_empty() { substitute(conversation) } else { text }
}

/// Compresses a summary to the sentences that state most facts. The result has at most the size of the limit, and fewer words than the
/// summary if that has at least two. The input may be any prose; lines without a speaker stay without.
#[must_use]
pub fn compress(summary: &str, limit: SummaryLimit) -> String {
    let mut draft = Draft::new([summary]);
    let mut date = None;
    for line in summary.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(new) = parse_date(line) {
            date = Some(new);
            continue;
        }
        let (label, text) = split_label(line);
        draft.begin_line(Line { date, label: label.map(str::to_owned) });
        for sentence in sentences::split(text) {
            draft.add(sentence.text, form_factor(sentence.text));
        }
    }
    let fewer_words = SummaryLimit::Words(words(summary).saturating_sub(1).max(1));
    let text = draft.write(limit);
    let text = if text.is_empty() { lines::plain(summary) } else { text };
    if fewer_words.permits(&text) { text } else { lines::shorten(&text, fewer_words) }
}

/// Returns the share of the weight of the content words of a text that a material has. Returns `None` if text or material is too short to
/// tell.
pub(super) fn support<'m>(text: &str, material: impl IntoIterator<Item = &'m str>) -> Option<f64> {
    /// Number of different content words from which a summary shares some with its material.
    const MIN_WORDS: usize = 30;
    let mut terms = Terms::default();
    for part in material {
        terms.begin_document();
        terms.read(part);
    }
    if terms.len() >= MIN_WORDS { terms.support(text) } else { None }
}

/// Returns the factor for the form of a sentence.
fn form_factor(sentence: &str) -> f64 {
    let factor = if lines::is_question(sentence) { QUESTION_FACTOR } else { 1.0 };
    if cues::demands(sentence) { factor * CUE_FACTOR } else { factor }
}

/// Returns a substitute for a conversation without content words: its longest text, or the size of the results of tools.
fn substitute(conversation: &[TranscriptLine]) -> String {
    let entries = conversation.iter().map(|line| &line.entry);
    let said = entries.clone().filter(|entry| entry.role != Role::Tool && !entry.text.trim().is_empty());
    // The first one: `max_by_key` returns the last of equal elements.
    let longest = said.rev().max_by_key(|entry| entry.text.len());
    let results: Vec<&TranscriptEntry> = entries.filter(|entry| !entry.is_empty()).collect();
    match longest {
        Some(entry) => {
            let text: String = lines::plain(&entry.text).chars().take(80).collect();
            format!("{}: {}", lines::label(entry), text.trim())
        }
        None if results.is_empty() => String::new(),
        None => {
            let characters: usize = results.iter().map(|entry| entry.text.chars().count()).sum();
            format!("Tool: results of {characters} characters")
        }
    }
}

/// The sentences from which the summary is selected.
struct Draft {
    terms: Terms,
    lines: Vec<Line>,
    statements: Vec<Statement>,
}

impl Draft {
    fn new<'t>(texts: impl IntoIterator<Item = &'t str>) -> Self {
        Self { terms: Terms::new(texts), lines: Vec::new(), statements: Vec::new() }
    }

    fn begin_line(&mut self, line: Line) {
        self.terms.begin_document();
        self.lines.push(line);
    }

    fn add(&mut self, sentence: &str, factor: f64) {
        let text = lines::plain(sentence);
        let terms = self.terms.read(&text);
        let has_name = terms.iter().any(|term| term.is_name);
        // A single word is a greeting or an interjection, unless it is a name.
        if has_name || terms.len() > 1 {
            let is_correction = cues::corrects(&text);
            let factor = if has_name { factor } else { factor * PLAIN_FACTOR };
            self.statements.push(Statement {
                line: self.lines.len() - 1,
                text,
                terms,
                factor,
                is_correction,
            });
        }
    }

    /// Returns the best sentences within the limit. Returns an empty text if no sentence states anything.
    fn write(&self, limit: SummaryLimit) -> String {
        let mut selected = selection::select(&self.statements, &self.lines, &self.terms, limit);
        loop {
            let mut in_order = selected.clone();
            in_order.sort_unstable();
            let statements: Vec<&Statement> =
                in_order.iter().filter_map(|number| self.statements.get(*number)).collect();
            let text = lines::write(&self.lines, &statements);
            if limit.permits(&text) {
                return text;
            }
            if selected.len() <= 1 {
                return lines::shorten(&text, limit);
            }
            selected.pop();
        }
    }
}
