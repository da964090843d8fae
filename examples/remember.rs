//! Measures what an agent can still answer from the contexts of conversations that are much longer than its window.
//!
//! `scripts/remember [--check] [FILES or FOLDER]`, with conversations in the format of `LoCoMo` (Maharana et al., ACL
//! 2024): `session_N` with turns, `qa` with questions and answers. Each conversation is fed turn by turn to a service in
//! this process, for each window, with a context after each turn. Then a context is built for each question, with and
//! without recall. Its score is the share of the answer's words that the list contains outside the question: lower-cased
//! words of letters and digits without a final "s", except function words. Categories 3 (inference) and 5 (no answer) are
//! left out.
//!
//! The simple alternatives have as many tokens as the lists with recall. Many answers are dates, or have other words than
//! the conversation, so the score of the whole history is below 1.
#![expect(clippy::print_stdout, reason = "prints its results")]

use clap::Parser;
use precis::app::App;
use precis::config::{Settings, Sources};
use precis::domain::exchange::Exchange;
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::domain::sentence_bounds::sentence_ends;
use precis::domain::tokens::{PER_LIST, PER_MESSAGE, count_text};
use precis::service::MemoryService;
use precis::service::consolidation::Outcome;
use precis::service::contexts::{Context, ContextOptions};
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

const WINDOWS: [i64; 3] = [2_000, 4_000, 8_000];
/// The smallest scores that `--check` accepts: window, without recall, with recall.
const FLOORS: [(i64, f64, f64); 3] = [(2_000, 0.43, 0.0), (4_000, 0.57, 0.69), (8_000, 0.68, 0.0)];

const SMALL_TALK: &str = "Thanks, that's great!|ok|Good morning! How are you?|haha nice|Sounds good to me.|\
    See you tomorrow, bye!|Sure, no problem.|Wow, that's amazing!|Hi there!|Yes, please.|\
    I totally agree.|Hmm, let me think about it.|You're welcome!|Talk to you later.|\
    That's so kind of you.|Oh no, I'm sorry to hear that.|Good night, sleep well.|Not much, and you?|\
    Great, thank you so much!|Cool 😊";
/// The last ones are parts of "don't", "we'll" and the like, which are split at the apostrophe.
const FUNCTION_WORDS: &str = "a an the of and or but if in on at to for from by with as about into than then so \
    that this these those it its is are was were be been am has have had do does did will would can could should not \
    no i you he she we they me him her us them my your his our their there who which what when where how \
    s t d ll m re ve don";

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Words = HashSet<String>;

/// Measures what an agent can still answer from contexts of long conversations
#[derive(Parser)]
struct Args {
    /// Conversations: JSON files of `LoCoMo`
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Exit with 1 if a score is too low, a message is omitted or shortened, or a list exceeds the window
    #[arg(long)]
    check: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let failures = run(&args.files).await.map(|failures| if args.check { failures } else { Vec::new() });
    let errors = failures.unwrap_or_else(|error| vec![error.to_string()]);
    for error in &errors {
        eprintln!("remember: {error}");
    }
    if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints the measurements. Returns the requirements that are not met.
async fn run(files: &[PathBuf]) -> Result<Vec<String>> {
    let conversations = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?;
    let conversations = Arc::new(conversations);
    // In memory if possible, because each turn waits until it is stored.
    let parent = Some(Path::new("/dev/shm")).filter(|shm| shm.is_dir());
    let folder = parent.map_or_else(tempfile::tempdir, tempfile::tempdir_in)?;
    let database = format!("sqlite://{}", folder.path().join("precis.db").display());
    let own = [("PRECIS__DATABASE__URL", database.as_str()), ("PRECIS__LOG__FILTER", "off")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    // Other settings can be tried.
    let environment = std::env::vars().filter(|(name, _)| name.starts_with("PRECIS__")).chain(own).collect();
    let settings = Settings::load(&Sources { environment, ..Sources::default() })?.settings;
    let app = App::new(&settings, true).await?;
    let tasks = WINDOWS.map(|window| {
        let (service, conversations) = (app.service().clone(), Arc::clone(&conversations));
        let measure = async move {
            let mut sums = Vec::new();
            for conversation in conversations.iter() {
                let session = SessionId::new(format!("{}-{window}", conversation.name))?;
                sums.push(Session { service: &service, id: session, window }.measure(conversation).await?);
            }
            Result::Ok(sums)
        };
        (window, tokio::spawn(measure))
    });
    let (mut failures, mut recalled) = (Vec::new(), Vec::new());
    println!("window  conversation  questions  {COLUMNS}");
    for (window, task) in tasks {
        let mut all = Sums::default();
        for (conversation, sums) in conversations.iter().zip(task.await??) {
            sums.print(window, &conversation.name);
            all.add(&sums);
        }
        all.print(window, "all");
        let [without, with, .., for_question] = all.means();
        recalled.push(format!("{for_question:.1} and {:.2}", all.small_talk / all.messages));
        let floors = FLOORS.into_iter().filter(|(of, ..)| *of == window);
        let floors = floors
            .flat_map(|(_, least, least_with)| [(least, without, "without"), (least_with, with, "with")]);
        for (least, score, kind) in floors {
            if score < least {
                let found = format!("the score {kind} recall is {score:.3}");
                failures.push(format!("window {window}: {found}; it must be at least {least:.2}"));
            }
        }
        let [omitted, shortened, too_long, _] = all.faults;
        if omitted + shortened + too_long > 0 {
            let found =
                format!("{omitted} messages are omitted, {shortened} shortened, {too_long} lists too long");
            failures.push(format!("window {window}: {found}; none may be"));
        }
    }
    println!("recalled messages per question and per message of small talk: {}", recalled.join(", "));
    Ok(failures)
}

struct Conversation {
    name: String,
    /// Each begins with a user message, except perhaps the first one.
    exchanges: Vec<Vec<Message>>,
    texts: Vec<String>,
    /// The questions with the words of their answers.
    questions: Vec<(String, Words)>,
}

fn read(file: &Path) -> Result<Conversation> {
    let invalid = |problem: &str| format!("{}: {problem}; pass a conversation of LoCoMo", file.display());
    let json = std::fs::read_to_string(file).map_err(|error| invalid(&error.to_string()))?;
    let json: Value = serde_json::from_str(&json).map_err(|error| invalid(&error.to_string()))?;
    let field = |object: &Value, name: &str| {
        let text = object.get(name).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| invalid(&format!("a text {name:?} is missing")))
    };
    let user = field(&json, "speaker_a")?;
    let (mut exchanges, mut texts, mut is_answered) = (Vec::<Vec<Message>>::new(), Vec::new(), false);
    let turns = (1..).map_while(|number| json.get(format!("session_{number}"))?.as_array());
    for turn in turns.flatten() {
        let speaker = field(turn, "speaker")?;
        let is_user = speaker == user;
        let text = format!("{speaker}: {}", field(turn, "text")?);
        let message = Message::text(if is_user { Role::User } else { Role::Assistant }, &text);
        match exchanges.last_mut() {
            Some(exchange) if !(is_user && is_answered) => exchange.push(message),
            _ => exchanges.push(vec![message]),
        }
        is_answered = !is_user;
        texts.push(text);
    }
    let mut questions = Vec::new();
    for qa in json.get("qa").and_then(Value::as_array).into_iter().flatten() {
        let answer = match qa.get("answer") {
            Some(Value::String(answer)) => words(answer),
            Some(Value::Number(answer)) => words(&answer.to_string()),
            _ => continue,
        };
        let answer = &answer - &words(FUNCTION_WORDS);
        if !answer.is_empty() && matches!(qa.get("category").and_then(Value::as_u64), Some(1 | 2 | 4)) {
            questions.push((field(qa, "question")?, answer));
        }
    }
    if texts.is_empty() || questions.is_empty() {
        return Err(invalid("turns or questions are missing").into());
    }
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Conversation { name, exchanges, texts, questions })
}

impl Conversation {
    /// Returns the newest messages within a number of tokens.
    fn newest(&self, mut tokens: i64) -> String {
        let fits = |text: &&String| {
            tokens -= count_text(text) + PER_MESSAGE;
            tokens >= 0
        };
        self.texts.iter().rev().take_while(fits).cloned().collect::<Vec<_>>().join("\n")
    }

    /// Returns as many evenly spread sentences as one message with this number of tokens has.
    fn spread(&self, tokens: i64) -> String {
        let mut sentences = Vec::new();
        for text in &self.texts {
            let mut start = 0;
            for end in sentence_ends(text) {
                sentences.extend(text.get(start..end).map(|sentence| (sentence, count_text(sentence))));
                start = end;
            }
        }
        let sentences = &sentences;
        let of = |count| (0..count).filter_map(move |at: usize| sentences.get(at * sentences.len() / count));
        let fits = |count: &usize| of(*count).map(|(_, tokens)| tokens).sum::<i64>() + PER_MESSAGE <= tokens;
        let count = (0..=sentences.len()).rev().find(fits).unwrap_or(0);
        of(count).map(|(sentence, _)| *sentence).collect()
    }
}

/// The columns after the number of questions. A list is too long if it exceeds the window, and late if a consolidation
/// failed or was not over in time.
const COLUMNS: &str =
    "no recall  recall  newest  spread  whole  tokens  with recall  omitted  shortened  too long  late";

/// The sums of one or several sessions.
#[derive(Default)]
struct Sums {
    questions: f64,
    /// Over the questions: five scores, tokens without and with recall, recalled messages.
    per_question: [f64; 8],
    /// Over all contexts: messages omitted and shortened, lists too long and late.
    faults: [usize; 4],
    /// Messages of small talk, and messages recalled for them.
    messages: f64,
    small_talk: f64,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.questions += other.questions;
        self.per_question.iter_mut().zip(other.per_question).for_each(|(sum, other)| *sum += other);
        self.faults.iter_mut().zip(other.faults).for_each(|(sum, other)| *sum += other);
        self.messages += other.messages;
        self.small_talk += other.small_talk;
    }

    fn means(&self) -> [f64; 8] {
        self.per_question.map(|sum| sum / self.questions)
    }

    fn print(&self, window: i64, name: &str) {
        let [without, with, newest, spread, whole, fewer, more, _] = self.means();
        let ([omitted, shortened, too_long, late], questions) = (self.faults, self.questions);
        println!(
            "{window:>6}  {name:<12}  {questions:>9}  {without:>9.3}  {with:>6.3}  {newest:>6.3}  {spread:>6.3}  \
             {whole:>5.3}  {fewer:>6.0}  {more:>11.0}  {omitted:>7}  {shortened:>9}  {too_long:>8}  {late:>4}"
        );
    }
}

/// A session of the service, and the window of its contexts.
struct Session<'a> {
    service: &'a MemoryService,
    id: SessionId,
    window: i64,
}

impl Session<'_> {
    async fn measure(&self, conversation: &Conversation) -> Result<Sums> {
        let (mut sums, mut budget) = (Sums::default(), 0);
        for messages in &conversation.exchanges {
            let exchange = Exchange::new(messages.clone(), None, None);
            self.service.append_exchange(&TenantId::default(), &self.id, exchange, None, None).await?;
            self.context(&mut sums, None, false).await?;
        }
        for (question, answer) in &conversation.questions {
            let without = self.context(&mut sums, Some(question), false).await?;
            let with = self.context(&mut sums, Some(question), true).await?;
            let [score, score_with] = [list_words(&without, question)?, list_words(&with, question)?];
            let [score, score_with] = [score, score_with].map(|words| share(answer, &words));
            let (tokens, tokens_with) = (real(without.tokens.total), real(with.tokens.total));
            let recalled = real(with.recall.len());
            let per_question = [score, score_with, 0.0, 0.0, 0.0, tokens, tokens_with, recalled];
            sums.add(&Sums { questions: 1.0, per_question, ..Sums::default() });
            budget += with.tokens.total - with.tokens.user_message;
        }
        budget /= i64::try_from(conversation.questions.len())?;
        let others = [conversation.newest(budget), conversation.spread(budget), conversation.texts.join(" ")];
        let others = others.map(|text| words(&text));
        for (_, answer) in &conversation.questions {
            let [newest, spread, whole] = others.each_ref().map(|words| share(answer, words));
            let per_question = [0.0, 0.0, newest, spread, whole, 0.0, 0.0, 0.0];
            sums.add(&Sums { per_question, ..Sums::default() });
        }
        for message in SMALL_TALK.split('|') {
            let small_talk = real(self.context(&mut sums, Some(message), true).await?.recall.len());
            sums.add(&Sums { messages: 1.0, small_talk, ..Sums::default() });
        }
        Ok(sums)
    }

    /// Builds a context and adds its faults.
    async fn context(&self, sums: &mut Sums, message: Option<&str>, has_recall: bool) -> Result<Context> {
        let options = ContextOptions {
            user_message: message.map(|text| Message::text(Role::User, text)),
            max_tokens: Some(self.window),
            recall: self.service.default_recall().filter(|_| has_recall),
            ..ContextOptions::default()
        };
        let context = self.service.build_context(&TenantId::default(), &self.id, options).await?;
        let omitted =
            context.coverage.omitted.iter().map(|range| range.to_seq + 1 - range.from_seq).sum::<i64>();
        let is_too_long = context.tokens.total + PER_LIST > self.window;
        let is_late = !matches!(context.consolidation.outcome, Outcome::NotDue | Outcome::Consolidated);
        let shortened = context.coverage.shortened.len();
        let faults = [usize::try_from(omitted)?, shortened, is_too_long.into(), is_late.into()];
        sums.add(&Sums { faults, ..Sums::default() });
        Ok(context)
    }
}

/// Returns the words of a list without its new message, but with the messages that are recalled in it.
fn list_words(context: &Context, new_message: &str) -> Result<Words> {
    let messages: Vec<Value> = serde_json::from_str(&context.list.messages)?;
    let texts: Vec<&str> = messages.iter().filter_map(|message| message.get("content")?.as_str()).collect();
    let text = texts.join("\n");
    Ok(words(text.strip_suffix(new_message).ok_or("the list does not end with the new message")?))
}

fn words(text: &str) -> Words {
    let text = text.to_lowercase();
    let words = text.split(|c: char| !c.is_alphanumeric()).map(|word| word.strip_suffix('s').unwrap_or(word));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Returns the share of the words of an answer that a list contains.
fn share(answer: &Words, list: &Words) -> f64 {
    real(answer.intersection(list).count()) / real(answer.len())
}

/// Converts a number below 2^32.
fn real(number: impl TryInto<u32>) -> f64 {
    number.try_into().map_or(f64::NAN, f64::from)
}
