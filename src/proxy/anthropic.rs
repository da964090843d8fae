//! Anthropic's messages.

use super::protocol::{AnswerReader, Progress, Protocol};
use super::session::in_user_id;
use crate::domain::format::Format;
use crate::domain::json_validation::{MAX_JSON_DEPTH, MAX_JSON_VALUES, check_json};
use crate::domain::message::object::{Object, as_string, elements, quote};
use crate::service::contexts::Context;
use std::collections::BTreeMap;

pub(super) const PATH: &str = "messages";

/// Number of marks for the cache that a request may have.
const MAX_MARKS: usize = 4;
const MARK: &str = "\"cache_control\"";

/// The protocol of Anthropic's messages.
pub(super) struct Anthropic;

/// Returns `true` if the context should mark its stable part for the cache: the client uses marks, and one is left.
pub(super) fn may_mark(request: &Object<'_>) -> bool {
    let marks = |key: &str| request.get(key).map_or(0, |json| json.matches(MARK).count());
    let is_automatic = request.get("cache_control").is_some();
    marks("messages") > 0 && !is_automatic && marks("system") + marks("tools") < MAX_MARKS
}

impl Protocol for Anthropic {
    fn format(&self) -> Format {
        Format::Anthropic
    }

    fn unsupported(&self, _: &Object<'_>) -> Option<&'static str> {
        None
    }

    fn leading(&self, _: &[&str]) -> usize {
        0
    }

    fn names(&self, request: &Object<'_>) -> (Option<String>, Option<String>) {
        let user_id = request.object("metadata").string("user_id");
        (user_id.as_deref().and_then(in_user_id), None)
    }

    fn answer_limit(&self, request: &Object<'_>) -> Option<i64> {
        request.get("max_tokens")?.parse().ok()
    }

    /// Keeps the blocks of the client in `system` as they are, because some of them identify it.
    fn insert(&self, request: &mut Object<'_>, _: usize, context: &Context) {
        if !context.system.is_empty() {
            let system = match request.get("system").unwrap_or("[]") {
                text if text.starts_with('"') => {
                    quote(&format!("{}\n\n{}", as_string(text).unwrap_or_default(), context.system))
                }
                blocks => {
                    let own = format!(r#"{{"type":"text","text":{}}}"#, quote(&context.system));
                    let blocks: Vec<&str> = elements(blocks).into_iter().chain([own.as_str()]).collect();
                    format!("[{}]", blocks.join(","))
                }
            };
            request.set("system", system);
        }
        request.set("messages", context.list.messages.clone());
    }

    fn answer(&self) -> Box<dyn AnswerReader> {
        Box::<Answer>::default()
    }
}

/// A content block whose parts have arrived.
#[derive(Default)]
struct Block {
    /// The block as it began, as JSON.
    start: String,
    kind: String,
    /// The texts of its deltas by field: `text`, `thinking`, `signature`, and `input` as JSON.
    texts: BTreeMap<&'static str, String>,
    citations: Vec<String>,
    is_complete: bool,
}

impl Block {
    fn json(&self) -> String {
        let mut block = Object::parse(&self.start);
        for (key, text) in &self.texts {
            let began = block.string(key).unwrap_or_default();
            match *key {
                "input" if text.trim().is_empty() => {}
                // A model that reaches its limit leaves half of the arguments.
                "input" if is_json(text) => block.set(key, text.clone()),
                "input" => block.set(key, quote(text)),
                key => block.set(key, quote(&(began + text))),
            }
        }
        if !self.citations.is_empty() {
            block.set("citations", format!("[{}]", self.citations.join(",")));
        }
        block.to_json()
    }
}

fn is_json(text: &str) -> bool {
    check_json(text, MAX_JSON_DEPTH, MAX_JSON_VALUES).is_ok()
}

/// The answer in a stream: its content blocks.
#[derive(Default)]
struct Answer {
    blocks: BTreeMap<u64, Block>,
    has_finished: bool,
}

impl Answer {
    fn add(&mut self, index: u64, delta: &Object<'_>) {
        let Some(block) = self.blocks.get_mut(&index) else { return };
        let (field, text) = match delta.text("type").as_str() {
            "text_delta" => ("text", delta.string("text")),
            "thinking_delta" => ("thinking", delta.string("thinking")),
            "signature_delta" => ("signature", delta.string("signature")),
            "input_json_delta" => ("input", delta.string("partial_json")),
            "citations_delta" => {
                block.citations.extend(delta.get("citation").map(str::to_owned));
                return;
            }
            _ => return,
        };
        block.texts.entry(field).or_default().push_str(&text.unwrap_or_default());
    }
}

impl AnswerReader for Answer {
    fn read_event(&mut self, name: &str, data: &str) -> Progress {
        let event = Object::parse(data);
        let index = event.get("index").and_then(|index| index.parse().ok()).unwrap_or_default();
        match event.string("type").as_deref().unwrap_or(name) {
            "content_block_start" => {
                let start = event.get("content_block").unwrap_or("{}").to_owned();
                let kind = Object::parse(&start).text("type");
                self.blocks.insert(index, Block { start, kind, ..Block::default() });
            }
            "content_block_delta" => self.add(index, &event.object("delta")),
            "content_block_stop" => {
                self.blocks.entry(index).and_modify(|block| block.is_complete = true);
            }
            "message_delta" => self.has_finished |= event.object("delta").get("stop_reason").is_some(),
            "message_stop" => return Progress::End,
            "error" => return Progress::Failed,
            _ => {}
        }
        Progress::Running
    }

    fn has_finished(&self) -> bool {
        self.has_finished
    }

    fn message(&self) -> Option<String> {
        // Half of a call, or of a signed thought, is worthless.
        let is_sound = |block: &&Block| block.is_complete || block.kind == "text" && !block.texts.is_empty();
        let blocks: Vec<String> = self.blocks.values().filter(is_sound).map(Block::json).collect();
        let has_text = self.blocks.values().filter(is_sound).any(|block| block.kind != "thinking");
        (has_text || self.has_finished)
            .then(|| format!(r#"{{"role":"assistant","content":[{}]}}"#, blocks.join(",")))
    }

    fn message_of(&self, body: &str) -> Option<String> {
        let body = Object::parse(body);
        let content = body.get("content").filter(|content| content.starts_with('['))?;
        (body.string("type").as_deref() == Some("message"))
            .then(|| format!(r#"{{"role":"assistant","content":{content}}}"#))
    }
}
