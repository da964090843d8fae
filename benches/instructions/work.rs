//! The counted functions.

use super::run;
use crate::domain::api_key::{ApiKey, RANDOM_BYTES};
use crate::domain::budget::{self, MessageCost};
use crate::domain::consolidation::{PlanScope, Policy};
use crate::domain::context::{self, StoredParts, SystemPart, SystemParts};
use crate::domain::coverage::{self, TailSelection};
use crate::domain::exchange::Exchange;
use crate::domain::format::{self, Format, ListOptions, RenderInput};
use crate::domain::headings;
use crate::domain::id::SessionId;
use crate::domain::json_validation::{MAX_JSON_DEPTH, MAX_JSON_VALUES, check_json};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::{Message, Role};
use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::segment::{self, Page, SegmentBuilder};
use crate::domain::search::text::OwnResults;
use crate::domain::search::{MessageRef, index_terms};
use crate::domain::session::Summary;
use crate::domain::tail::Tail;
use crate::domain::tokens;
use crate::domain::transcript::{TranscriptEntry, TranscriptLine};
use serde_json::json;
use serde_json::value::RawValue;
use std::hint::black_box;
use std::sync::Arc;
use time::OffsetDateTime;

/// Characters of a message.
const MESSAGE_CHARS: usize = 300;

const TEXT: &str = "The kiln reaches 1,240 degrees on Tuesday evening, so the glaze tests can start on Wednesday. Jonas asked \
if the \"cobalt blue\" from the shop in Porto is food safe; I don't know yet, but the supplier promised a data sheet. \
Please remind me to order 25 kg of stoneware clay, two new shelves, and the spare thermocouple.\nRent is due on the 3rd: \
850 euros, paid from the workshop account. Ada's course has eleven participants — three of them are left-handed, and one \
can't come before 18:30. ";

/// Returns a text of the same length and other words for each number.
fn text(number: usize) -> String {
    TEXT.chars().cycle().skip(number * 37).take(MESSAGE_CHARS).collect()
}

/// Returns a conversation in which each fifth turn calls a tool.
fn conversation(messages: usize) -> Vec<String> {
    let turn = |turn: usize| {
        let (user, assistant) = (text(2 * turn), text(2 * turn + 1));
        let mut messages = vec![json!({"role": "user", "content": user})];
        if turn % 5 == 4 {
            let id = format!("call_{turn}");
            let function = json!({"name": "find_supplier", "arguments": "{\"city\":\"Porto\",\"limit\":3}"});
            messages.extend([
                json!({"role": "assistant", "content": null, "tool_calls": [{"id": id, "type": "function", "function": function}]}),
                json!({"role": "tool", "tool_call_id": id, "content": text(turn)}),
            ]);
        }
        messages.push(json!({"role": "assistant", "content": assistant}));
        messages
    };
    (0..).flat_map(turn).take(messages).map(|message| message.to_string()).collect()
}

fn context_messages(messages: usize) -> Vec<ContextMessage> {
    let message = |(seq, json): (i64, String)| {
        let message = format::read(&json).expect("a valid message");
        ContextMessage { seq, metadata: MessageMetadata::new(&message, format::count_tokens(&message)), json }
    };
    (1..).zip(conversation(messages)).map(message).collect()
}

/// Runs each benchmark.
pub(crate) fn run_all() {
    count_and_parse();
    assemble();
    plan();
    index();
}

fn count_and_parse() {
    let english = text(0);
    run("count_tokens_of_300_characters", || {
        black_box(tokens::count(black_box(&english)));
    });
    // Merging the tokens of a long word pair by pair would need a hundred times as many.
    let hostile: Vec<String> =
        ["!", " ", "a", "😀", "7", "\n", "=", "\t", "é", "Aa", "'s", "\u{1}", "茶", "\\", "QUJDREVGR0h"]
            .map(|part| part.repeat(20_000 / part.len()))
            .into();
    run("count_tokens_of_300_kb_without_words", || {
        for text in &hostile {
            black_box(tokens::count(black_box(text)));
        }
    });
    let content = RawValue::from_string(json!(text(1)).to_string()).expect("JSON");
    run("parse_text_message", || drop(black_box(format::read_content(Role::User, black_box(&content)))));
    let mut messages = conversation(12).into_iter().map(|json| RawValue::from_string(json).expect("JSON"));
    let with_call = messages.nth(9).expect("a message with a tool call");
    assert!(with_call.get().contains("tool_calls"), "{with_call}");
    run("parse_message_with_tool_call", || drop(black_box(format::read_given(black_box(&with_call)))));

    let body = json!({"user_message": text(0), "assistant_reply": text(1)}).to_string();
    run("check_body_of_exchange", || {
        check_json(black_box(&body), MAX_JSON_DEPTH, MAX_JSON_VALUES).expect("a valid body");
    });

    let key = ApiKey::new(&[7; RANDOM_BYTES]);
    run("parse_and_hash_api_key", || {
        black_box(ApiKey::parse(black_box(key.expose())).expect("a valid key").hash());
    });

    let message = Message::text(Role::User, &text(2));
    let exchange = || Exchange::new(vec![message.clone(), message.clone()], None, None);
    run("create_exchange_of_2_messages", || drop(black_box(exchange())));
    let exchange = exchange();
    run("fingerprint_exchange_of_2_messages", || drop(black_box(black_box(&exchange).fingerprint())));
    run("encode_transcript_line", || {
        drop(black_box(TranscriptLine::from(TranscriptEntry::of(black_box(&message)))));
    });
    run("index_message", || {
        drop(black_box(index_terms::message_terms(
            Analyzer::default(),
            black_box(&message),
            &mut OwnResults::default(),
        )));
    });
}

fn assemble() {
    let memory = format!("# Projects\n\n{}\n- {}\n\n## Garden\n{}\n", text(3), text(4), text(5));
    let summary: Vec<String> = (6..14).map(text).collect();
    let summary = summary.join("\n\n");
    let (content, summary) = (memory, Summary::new(summary));
    let document = MemoryDocument {
        version: 1,
        words: 0,
        tokens: tokens::count_text(&content),
        created_at: OffsetDateTime::UNIX_EPOCH,
        content,
    };
    run("prepare_stored_parts", || {
        let parts = StoredParts::default();
        black_box((parts.memory(black_box(&document)), parts.summary(black_box(&summary))));
    });
    run("prepare_system_prompt_of_300_characters", || drop(black_box(SystemPart::new(black_box(&text(0))))));
    let (stored, system_prompt) = (StoredParts::default(), SystemPart::new("You plan workshops."));
    let parts = SystemParts {
        system_prompt: Some(&system_prompt),
        memory: Some(stored.memory(&document)),
        summary: Some(stored.summary(&summary)),
        skills: None,
        notice: Some(context::Notice::Soon),
    };
    run("join_system_message", || drop(black_box(context::system_message(black_box(&parts)))));
    let system = context::system_message(&parts);
    // A quadratic search for the ends of tags and headings would need a hundred times as many.
    let hostile: Vec<String> = ["<", "<b", "#", "---\n", "<h2>\n"]
        .map(|part| format!("# {}", part.repeat(20_000 / part.len())))
        .into();
    run("escape_hostile_headings_of_100_kb", || {
        for text in &hostile {
            drop(black_box(headings::escape_headings(black_box(text))));
        }
    });

    for messages in [20, 100] {
        let tail = Arc::new(Tail::new(1, context_messages(messages)));
        let next = ContextMessage { seq: tail.last_seq() + 1, ..context_messages(1).remove(0) };
        run(&format!("append_to_tail_of_{messages}"), || {
            drop(black_box(black_box(&tail).advance(1, usize::MAX, vec![next.clone()])));
        });
        for format in [Format::OpenAi, Format::Anthropic] {
            run(&format!("render_{format}_{messages}_messages"), || {
                let history = format.render_messages(ListOptions::default(), black_box(&tail), 0);
                let history = history.expect("valid messages");
                let input = RenderInput {
                    system_json: system.json.clone(),
                    system_tokens: system.tokens,
                    history,
                    is_prefix_stable: true,
                    ..RenderInput::default()
                };
                drop(black_box(format.render_context(input)));
            });
        }
    }
}

fn plan() {
    let metadata: Vec<MessageMetadata> =
        context_messages(200).into_iter().map(|message| message.metadata).collect();
    let policy = Policy::default();
    run("plan_consolidation_of_200_messages", || {
        let scope = PlanScope { keep: Some(policy.keep_recent), ..PlanScope::default() };
        drop(black_box(policy.plan(black_box(&metadata), metadata.len(), &scope)));
    });
    run("plan_coverage_of_400_messages", || {
        let selection = TailSelection::Recent { keep: 20 };
        drop(black_box(coverage::plan_coverage(0, 400, 200, selection, black_box(&metadata))));
    });
    let cost = |metadata: &MessageMetadata| MessageCost { tokens: metadata.tokens, tokens_if_first: 0 };
    let costs: Vec<MessageCost> = metadata.iter().map(cost).collect();
    let budget = costs.iter().map(|cost| cost.tokens).sum::<i64>() / 2;
    run("fit_200_messages_into_budget", || {
        drop(black_box(budget::fit(black_box(&metadata), &costs, budget, false, true)));
    });
}

fn index() {
    const MESSAGES: usize = 512;
    let session = |number: usize| SessionId::new(format!("session-{number}")).expect("an id");
    // Some terms are in many messages, and most in few.
    let term = |number: usize, place: usize| format!("term{}", number * place % (1 + place * place));
    let terms_of = |number: usize| {
        let terms: Vec<String> = (0..55).map(|place| term(number, place)).collect();
        terms.join(" ")
    };
    let texts: Vec<String> = (0..8 * MESSAGES).map(terms_of).collect();
    let build = |texts: &[String]| {
        let mut builder = SegmentBuilder::default();
        for (number, terms) in texts.iter().enumerate() {
            let message = MessageRef { session: session(number / 2), seq: 1 };
            builder.add(message, terms.as_bytes().split(|byte| *byte == b' '));
        }
        builder.finish()
    };
    run("build_segment_of_512_messages", || {
        drop(black_box(build(black_box(texts.get(..MESSAGES).unwrap_or_default()))));
    });
    let bytes = |pages: Vec<Page>| pages.into_iter().map(|page| page.bytes).collect();
    let segments: Vec<Vec<Vec<u8>>> = texts.chunks(MESSAGES).map(|texts| bytes(build(texts))).collect();
    run("merge_8_segments_of_512_messages", || {
        drop(black_box(segment::merge(black_box(&segments), |_| true).expect("sound pages")));
    });
}
