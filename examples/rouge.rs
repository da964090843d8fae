//! Compares the built-in summariser with four simple ones by the overlap with reference summaries.
//!
//! `cargo run --release --example rouge -- DIR`, where DIR holds conversations in the format of `LoCoMo` (Maharana
//! et al., ACL 2024): `session_N` with turns, `session_N_summary` with a reference. Each session is summarised in
//! `max(5, turns / 10)` sentences and scored by ROUGE-1 F: lower-cased words of letters and digits, no stemming,
//! clipped counts. A conversation's score is the mean of its sessions; the last line is the mean of those.
//!
//! Speaker labels contain words, too. Therefore all summarisers run in two forms: with the names of the speakers before
//! each message, and without labels, when the built-in summariser knows only roles. The program exits with 1 unless the
//! built-in summariser has the best score in both forms. A release build also prints times for very long conversations.
#![expect(clippy::print_stdout, reason = "prints its results")]

use precis::domain::message::Role;
use precis::domain::transcript::TranscriptEntry;
use precis::llm::extractive::consolidate;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;
use unicode_segmentation::UnicodeSegmentation;

/// A session with its reference summary.
struct Session {
    entries: Vec<TranscriptEntry>,
    reference: String,
    sentences: usize,
}

/// A sentence in the form that the simple summarisers use.
struct Sentence {
    turn: usize,
    text: String,
    words: Vec<String>,
}

type Baseline = fn(&[Sentence], usize) -> Vec<usize>;
const BASELINES: [(&str, Baseline); 4] =
    [("longest", longest), ("TextRank", textrank), ("LexRank", lexrank), ("first", first)];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: rouge DIR")?;
    let mut files: Vec<_> =
        std::fs::read_dir(&dir)?.map(|file| file.map(|file| file.path())).collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();

    let columns = BASELINES.map(|(name, _)| name).join("  ");
    println!("conversation  names: extractive  {columns}  |  no names: extractive  {columns}");
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for file in &files {
        let sessions = read(&serde_json::from_str(&std::fs::read_to_string(file)?)?)?;
        let scores: Vec<Vec<f64>> = sessions.iter().map(score).collect();
        let row = means(&scores);
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        print_row(&name, &row);
        rows.push(row);
    }
    let mean = means(&rows);
    print_row("mean", &mean);
    if !cfg!(debug_assertions) {
        print_times();
    }
    let is_best = mean.chunks(1 + BASELINES.len()).all(|form| match form {
        [ours, others @ ..] => others.iter().all(|other| ours > other),
        [] => false,
    });
    println!("{}", if is_best { "ahead of every baseline" } else { "NOT ahead of every baseline" });
    Ok(if is_best { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_times() {
    for (script, write, characters) in [
        ("Latin", latin as Write, 300),
        ("Latin", latin, 2000),
        ("Chinese", chinese, 300),
        ("Chinese", chinese, 2000),
    ] {
        let entries = long_conversation(characters, write);
        let start = Instant::now();
        let summary = consolidate(&entries, 50);
        let (time, words) = (start.elapsed(), summary.unicode_words().count());
        println!("5,000 messages of {characters} characters, {script}: {time:?}, {words} words");
    }
}

fn print_row(name: &str, row: &[f64]) {
    let cells: Vec<String> = row.iter().map(|score| format!("{score:.4}")).collect();
    println!("{name:>6}  {}", cells.join("  "));
}

fn means(rows: &[Vec<f64>]) -> Vec<f64> {
    let width = rows.first().map_or(0, Vec::len);
    (0..width)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).sum::<f64>() / real(rows.len()))
        .collect()
}

fn read(conversation: &Value) -> Result<Vec<Session>, Box<dyn Error>> {
    let first_speaker = conversation.get("speaker_a").and_then(Value::as_str);
    let mut sessions = Vec::new();
    for number in 1.. {
        let key = format!("session_{number}");
        let Some(turns) = conversation.get(&key).and_then(Value::as_array) else {
            break;
        };
        let Some(reference) = conversation.get(format!("{key}_summary")).and_then(Value::as_str) else {
            continue;
        };
        let entries = turns
            .iter()
            .map(|turn| {
                let speaker = turn.get("speaker").and_then(Value::as_str).ok_or("turn without speaker")?;
                let text = turn.get("text").and_then(Value::as_str).ok_or("turn without text")?;
                Ok(TranscriptEntry {
                    role: if Some(speaker) == first_speaker { Role::User } else { Role::Assistant },
                    name: Some(speaker.to_owned()),
                    text: text.to_owned(),
                    calls: Vec::new(),
                })
            })
            .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        sessions.push(Session {
            sentences: (entries.len() / 10).max(5),
            entries,
            reference: reference.to_owned(),
        });
    }
    Ok(sessions)
}

/// Returns the ROUGE-1 F scores of all summarisers with names, then without names.
fn score(session: &Session) -> Vec<f64> {
    let sentences = split(&session.entries);
    let nameless: Vec<TranscriptEntry> =
        session.entries.iter().map(|entry| TranscriptEntry { name: None, ..entry.clone() }).collect();
    let mut scores = Vec::new();
    for (entries, labels) in [(&session.entries, true), (&nameless, false)] {
        scores.push(rouge(&consolidate(entries, session.sentences), &session.reference));
        for (_, baseline) in BASELINES {
            let mut picked = baseline(&sentences, session.sentences);
            picked.sort_unstable();
            let mut text = String::new();
            let mut last = None;
            for sentence in picked.iter().filter_map(|number| sentences.get(*number)) {
                let entry = entries.get(sentence.turn);
                if let Some(name) = entry.and_then(|entry| entry.name.as_deref())
                    && labels
                    && last != Some(sentence.turn)
                {
                    text.push_str(name);
                    text.push_str(": ");
                }
                last = Some(sentence.turn);
                text.push_str(&sentence.text);
                text.push(' ');
            }
            scores.push(rouge(&text, &session.reference));
        }
    }
    scores
}

fn split(entries: &[TranscriptEntry]) -> Vec<Sentence> {
    let mut sentences = Vec::new();
    for (turn, entry) in entries.iter().enumerate() {
        for text in entry.text.split_sentence_bounds().map(str::trim) {
            let words = words(text);
            if !words.is_empty() {
                let text = text.to_owned();
                sentences.push(Sentence { turn, text, words });
            }
        }
    }
    sentences
}

fn words(text: &str) -> Vec<String> {
    text.to_lowercase()
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

fn counts<'a>(words: impl IntoIterator<Item = &'a String>) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    for word in words {
        *counts.entry(word.as_str()).or_insert(0) += 1;
    }
    counts
}

fn rouge(candidate: &str, reference: &str) -> f64 {
    let (candidate, reference) = (words(candidate), words(reference));
    let wanted = counts(&reference);
    let kept: usize = counts(&candidate)
        .iter()
        .map(|(word, count)| wanted.get(word).map_or(0, |wanted| *wanted.min(count)))
        .sum();
    2.0 * real(kept) / real((candidate.len() + reference.len()).max(1))
}

fn first(sentences: &[Sentence], count: usize) -> Vec<usize> {
    (0..sentences.len().min(count)).collect()
}

fn longest(sentences: &[Sentence], count: usize) -> Vec<usize> {
    let lengths: Vec<f64> = sentences.iter().map(|sentence| real(sentence.words.len())).collect();
    best(&lengths, count)
}

/// Mihalcea and Tarau, EMNLP 2004: overlap over the logarithms of the lengths, as weights of a graph.
fn textrank(sentences: &[Sentence], count: usize) -> Vec<usize> {
    let sets: Vec<BTreeSet<&String>> =
        sentences.iter().map(|sentence| sentence.words.iter().collect()).collect();
    let rank = page_rank(sentences.len(), |a, b| {
        let (Some(x), Some(y)) = (sets.get(a), sets.get(b)) else {
            return 0.0;
        };
        let length = real(x.len()).ln() + real(y.len()).ln();
        if length > 0.0 { real(x.intersection(y).count()) / length } else { 0.0 }
    });
    best(&rank, count)
}

/// Erkan and Radev, JAIR 2004: sentences whose tf-idf vectors have a cosine above 0.1 are neighbours.
fn lexrank(sentences: &[Sentence], count: usize) -> Vec<usize> {
    let mut frequency: BTreeMap<&str, usize> = BTreeMap::new();
    for sentence in sentences {
        for word in counts(&sentence.words).into_keys() {
            *frequency.entry(word).or_insert(0) += 1;
        }
    }
    let vectors: Vec<BTreeMap<&str, f64>> = sentences
        .iter()
        .map(|sentence| {
            let weigh = |(word, count): (&'_ str, usize)| {
                let documents = frequency.get(word).copied().unwrap_or(1);
                real(count) * (real(sentences.len()) / real(documents)).ln()
            };
            counts(&sentence.words).into_iter().map(|(word, count)| (word, weigh((word, count)))).collect()
        })
        .collect();
    let norm = |vector: &BTreeMap<&str, f64>| vector.values().map(|value| value * value).sum::<f64>().sqrt();
    let rank = page_rank(sentences.len(), |a, b| {
        let (Some(x), Some(y)) = (vectors.get(a), vectors.get(b)) else {
            return 0.0;
        };
        let product: f64 = x.iter().filter_map(|(word, value)| y.get(word).map(|other| value * other)).sum();
        if product > 0.1 * norm(x) * norm(y) { 1.0 } else { 0.0 }
    });
    best(&rank, count)
}

/// Power iteration with the usual damping of 0.85.
fn page_rank(size: usize, weight: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let edges: Vec<Vec<f64>> =
        (0..size).map(|a| (0..size).map(|b| if a == b { 0.0 } else { weight(a, b) }).collect()).collect();
    let sums: Vec<f64> = edges.iter().map(|row| row.iter().sum()).collect();
    let mut rank = vec![1.0; size];
    for _ in 0..50 {
        let shares: Vec<f64> =
            rank.iter().zip(&sums).map(|(rank, sum)| if *sum > 0.0 { rank / sum } else { 0.0 }).collect();
        // The weights are symmetric, so a row serves as a column.
        rank = edges
            .iter()
            .map(|row| 0.15 + 0.85 * row.iter().zip(&shares).map(|(edge, share)| edge * share).sum::<f64>())
            .collect();
    }
    rank
}

/// Returns the indices of the highest scores. Among equal scores the earlier one comes first.
fn best(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<(usize, &f64)> = scores.iter().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(a.1));
    order.into_iter().take(count).map(|(number, _)| number).collect()
}

/// Writes a word. Its number determines its letters; the number of preceding words determines the punctuation.
type Write = fn(u32, usize, &mut String);

fn latin(mut word: u32, before: usize, text: &mut String) {
    let begin = text.len();
    while word > 0 || text.len() < begin + 2 {
        text.push(char::from(b'a' + u8::try_from(word % 26).unwrap_or(0)));
        word /= 26;
    }
    text.push_str(if before % 10 == 9 { ". " } else { " " });
}

/// Words consist of two of 3,500 characters, about the number in common use.
fn chinese(word: u32, before: usize, text: &mut String) {
    text.extend([word, word * 7919].map(|number| char::from_u32(0x4e00 + number % 3500).unwrap_or('字')));
    if before % 10 == 9 {
        text.push('。');
    }
}

/// Returns 5,000 messages of generated words in sentences of ten. Low numbers of a vocabulary of 20,000 words are more
/// frequent.
fn long_conversation(characters: usize, write: Write) -> Vec<TranscriptEntry> {
    let mut state: u64 = 42;
    let mut next = |below: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((state >> 33) % u64::from(below)).unwrap_or(0)
    };
    (0..5000)
        .map(|number| {
            let mut text = String::new();
            let mut words = 0;
            // All characters of a text have the same number of bytes: one or three.
            while text.len() < characters * text.chars().next().map_or(1, char::len_utf8) {
                let range = next(20_000) + 1;
                write(next(range), words, &mut text);
                words += 1;
            }
            let role = if number % 2 == 0 { Role::User } else { Role::Assistant };
            TranscriptEntry { role, name: None, text, calls: Vec::new() }
        })
        .collect()
}

fn real(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}
