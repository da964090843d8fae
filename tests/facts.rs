//! Measures how many facts of a conversation a context of half its tokens still has, in ten conversations in five languages that were
//! written without knowledge of the summariser.
//!
//! `tests/data/facts` has a file for each: messages, and facts as the parts of a text that must all occur in the context. Beside the
//! context, the table shows the newest messages alone and evenly spread sentences, of the same size:
//! `cargo test --test facts -- --nocapture`.

#![cfg(test)]

use precis::app::App;
use precis::config::{Settings, Sources};
use precis::domain::exchange::Exchange;
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::domain::sentence_bounds::sentence_ends;
use precis::domain::tokens::{PER_MESSAGE, count_text};
use precis::service::contexts::ContextOptions;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The smallest share over all conversations, and of a language. The goals are 0.75 and 0.65.
const MIN_MEAN: f64 = 0.66;
const MIN_LANGUAGE: f64 = 0.55;

#[derive(Deserialize)]
struct Conversation {
    language: String,
    topic: String,
    messages: Vec<Said>,
    facts: Vec<Fact>,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    text: String,
}

#[derive(Deserialize)]
struct Fact {
    fact: String,
    all: Vec<String>,
}

impl Conversation {
    /// Returns the share of the facts that a text has.
    fn share(&self, text: &str) -> f64 {
        let text = text.to_lowercase();
        let is_kept = |fact: &&Fact| fact.all.iter().all(|part| text.contains(&part.to_lowercase()));
        real(self.facts.iter().filter(is_kept).count()) / real(self.facts.len())
    }

    fn tokens(&self) -> i64 {
        self.messages.iter().map(|said| count_text(&said.text) + PER_MESSAGE).sum()
    }

    fn newest(&self, mut tokens: i64) -> String {
        let fits = |said: &&Said| {
            tokens -= count_text(&said.text) + PER_MESSAGE;
            tokens >= 0
        };
        self.messages
            .iter()
            .rev()
            .take_while(fits)
            .map(|said| said.text.as_str())
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn spread(&self, tokens: i64) -> String {
        let mut sentences = Vec::new();
        for Said { text, .. } in &self.messages {
            let mut start = 0;
            for end in sentence_ends(text) {
                sentences.push(&text[start..end]);
                start = end;
            }
        }
        let pick = |count: usize| -> String {
            (0..count).map(|at| sentences[at * sentences.len() / count]).collect()
        };
        let fitting = (1..=sentences.len()).rev().map(pick).find(|text| count_text(text) <= tokens);
        fitting.unwrap_or_default()
    }
}

fn real(count: usize) -> f64 {
    f64::from(u32::try_from(count).expect("small"))
}

fn conversations() -> Vec<Conversation> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/facts");
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    let read = |file: &std::path::PathBuf| {
        serde_json::from_str(&std::fs::read_to_string(file).expect("a file")).expect("a conversation")
    };
    files.iter().map(read).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_of_half_the_tokens_keeps_most_facts() {
    let folder = tempfile::tempdir().expect("a folder");
    let database = format!("sqlite://{}", folder.path().join("precis.db").display());
    let environment = [("PRECIS__DATABASE__URL", database.as_str()), ("PRECIS__LOG__FILTER", "off")];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let sources = Sources { environment: environment.into_iter().collect(), ..Sources::default() };
    let settings = Settings::load(&sources).expect("settings").settings;
    let app = App::new(&settings, true).await.expect("an app");
    let tenant = TenantId::default();
    let mut of_languages: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    println!("conversation     window  context  newest  spread");
    for conversation in conversations() {
        let session =
            SessionId::new(format!("{}-{}", conversation.language, conversation.topic)).expect("an id");
        let window = conversation.tokens() / 2;
        let mut text = String::new();
        for pair in conversation.messages.chunks(2) {
            let message = |said: &Said| {
                Message::text(if said.role == "user" { Role::User } else { Role::Assistant }, &said.text)
            };
            let exchange = Exchange::new(pair.iter().map(message).collect(), None, None);
            let appended = app.service().append_exchange(&tenant, &session, exchange, None, None).await;
            appended.expect("an exchange");
            let options = ContextOptions { max_tokens: Some(window), ..ContextOptions::default() };
            let context = app.service().build_context(&tenant, &session, options).await.expect("a context");
            assert!(context.coverage.omitted.is_empty() && context.tokens.total <= window);
            text = texts(&context.list.messages);
        }
        let tokens = count_text(&text);
        let shares = [&text, &conversation.newest(tokens), &conversation.spread(tokens)]
            .map(|text| conversation.share(text));
        let [context, newest, spread] = shares;
        println!("{:<15} {window:>7}    {context:>5.2}   {newest:>5.2}   {spread:>5.2}", session.as_str());
        let lost = conversation
            .facts
            .iter()
            .filter(|fact| !fact.all.iter().all(|part| text.to_lowercase().contains(&part.to_lowercase())));
        println!("    lost: {}", lost.map(|fact| fact.fact.as_str()).collect::<Vec<_>>().join("; "));
        of_languages.entry(conversation.language).or_default().push(context);
    }
    let means: Vec<(String, f64)> = of_languages
        .iter()
        .map(|(language, shares)| (language.clone(), shares.iter().sum::<f64>() / real(shares.len())))
        .collect();
    let all: Vec<f64> = of_languages.values().flatten().copied().collect();
    let mean = all.iter().sum::<f64>() / real(all.len());
    assert!(mean >= MIN_MEAN, "{mean:.3}");
    assert!(means.iter().all(|(_, mean)| *mean >= MIN_LANGUAGE), "{means:?}");
}

/// Returns the texts of a message list.
fn texts(list: &str) -> String {
    let messages: Vec<serde_json::Value> = serde_json::from_str(list).expect("a list");
    messages.iter().filter_map(|message| message["content"].as_str()).collect::<Vec<_>>().join("\n")
}
