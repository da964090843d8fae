//! Reads a conversation from a file and splits it into exchanges.

use super::Result;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Returns the exchanges of a file. Each begins with a user message and ends before the next one.
pub(super) fn read(file: &Path) -> Result<Vec<Vec<Value>>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
    let parts = match serde_json::from_str::<LoCoMo>(&text) {
        Ok(conversation) => conversation.sessions(),
        // A file with both fields is meant to be in this format, so its error is reported.
        Err(error) if text.contains("\"speaker_a\"") && text.contains("\"speaker_b\"") => Err(error.into()),
        Err(_) => lines(&text).map(|messages| vec![messages]),
    };
    let parts = parts.map_err(|error| named(&error))?;
    // An exchange does not continue in the next part.
    let exchanges: Vec<_> = parts.into_iter().flat_map(exchanges).collect();
    if exchanges.is_empty() { Err(named(&"there is no message in this file").into()) } else { Ok(exchanges) }
}

fn exchanges(messages: Vec<Value>) -> Vec<Vec<Value>> {
    let mut exchanges: Vec<Vec<Value>> = Vec::new();
    let mut replied = true;
    for message in messages {
        let user = message.get("role").is_some_and(|role| role == "user");
        match exchanges.last_mut() {
            Some(exchange) if !(user && replied) => exchange.push(message),
            _ => exchanges.push(vec![message]),
        }
        replied = !user;
    }
    exchanges
}

/// A file of `LoCoMo`. Its sessions are the fields `session_1`, `session_2` … among others.
#[derive(Deserialize)]
struct LoCoMo {
    speaker_a: String,
    speaker_b: String,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Turn {
    speaker: String,
    text: String,
    blip_caption: Option<String>,
}

impl LoCoMo {
    /// The messages of each session: the first speaker is the user, the second the assistant.
    fn sessions(self) -> Result<Vec<Vec<Value>>> {
        let number = |key: &str| key.strip_prefix("session_")?.parse::<u32>().ok();
        let mut numbered: Vec<_> =
            self.rest.iter().filter_map(|(key, turns)| Some((number(key)?, turns))).collect();
        numbered.sort_by_key(|(number, _)| *number);
        let session = |(number, turns): (u32, &Value)| {
            let turns = Vec::<Turn>::deserialize(turns);
            let turns = turns.map_err(|error| format!("session_{number} is not a list of turns: {error}"))?;
            turns.into_iter().map(|turn| self.message(turn)).collect()
        };
        numbered.into_iter().map(session).collect()
    }

    fn message(&self, turn: Turn) -> Result<Value> {
        let role = match &turn.speaker {
            speaker if *speaker == self.speaker_a => "user",
            speaker if *speaker == self.speaker_b => "assistant",
            speaker => return Err(format!("{speaker:?} is neither speaker_a nor speaker_b").into()),
        };
        let content = match turn.blip_caption {
            Some(caption) => format!("{} [photo: {caption}]", turn.text),
            None => turn.text,
        };
        // OpenAI rejects other characters in names.
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
        let named = (1..=64).contains(&turn.speaker.len()) && turn.speaker.bytes().all(fits);
        Ok(if named {
            json!({"role": role, "name": turn.speaker, "content": content})
        } else {
            json!({"role": role, "content": content})
        })
    }
}

/// Reads one message of the chat format per line. Only the role is checked here; the service validates the rest.
fn lines(text: &str) -> Result<Vec<Value>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let message = |(index, line): (usize, &str)| {
        let message = serde_json::from_str::<Value>(line).ok();
        message.filter(|message| message.get("role").is_some_and(Value::is_string)).ok_or_else(|| {
            let line = index + 1;
            format!("not a conversation: the file is not JSON of LoCoMo, and line {line} is not like {{\"role\": \"user\", \"content\": \"…\"}}").into()
        })
    };
    lines.map(message).collect()
}
