//! Messages that say which they are, and summaries that say which messages they cover.
//!
//! The content of the second of four messages of exchange 12 of session 3 begins with `s3e12.2of4`. The scripted model
//! repeats these names, and instead of compressing a summary it says how many messages it covers and where it ends: so
//! a summary proves, by its text alone, what is in it.

use crate::support::model_server::Call;
use serde_json::{Value, json};
use std::fmt;

/// One message of an exchange; the first has place 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name {
    pub(crate) session: usize,
    pub(crate) exchange: usize,
    pub(crate) place: usize,
    pub(crate) of: usize,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}e{}.{}of{}", self.session, self.exchange, self.place, self.of)
    }
}

impl Name {
    fn parse(word: &str) -> Option<Self> {
        let (session, rest) = word.strip_prefix('s')?.split_once('e')?;
        let (exchange, rest) = rest.split_once('.')?;
        let (place, of) = rest.split_once("of")?;
        let number = |digits: &str| digits.parse().ok();
        Some(Self {
            session: number(session)?,
            exchange: number(exchange)?,
            place: number(place)?,
            of: number(of)?,
        })
    }

    /// The name of a message, by the beginning of its content.
    pub(crate) fn of_message(message: &Value) -> Self {
        let content = message["content"].as_str().unwrap_or_default();
        let first = content.split(' ').next().unwrap_or_default();
        Self::parse(first).unwrap_or_else(|| panic!("not one of ours: {message}"))
    }

    /// The message itself: the same for the same name, so that any byte that changed would show.
    pub(crate) fn message(self) -> Value {
        // One exchange in eight is long: it takes many packets and many pages.
        let padding =
            if self.exchange % 8 == 7 { "and so on, \u{1F980} ".repeat(200) } else { String::new() };
        let content = format!("{self} what was said there {padding}");
        let id = format!("call-{}-{}", self.exchange, self.place.div_ceil(2));
        let is_tool_turn = self.of == 4;
        match self.place {
            2 if is_tool_turn => {
                let function = json!({"name": "look", "arguments": "{}"});
                let id = format!("call-{}-2", self.exchange);
                json!({"role": "assistant", "content": content,
                    "tool_calls": [{"id": id, "type": "function", "function": function}]})
            }
            3 if is_tool_turn => json!({"role": "tool", "tool_call_id": id, "content": content}),
            place if place % 2 == 1 => json!({"role": "user", "content": content}),
            _ => json!({"role": "assistant", "content": content}),
        }
    }
}

/// Whether the names are those of whole exchanges.
pub(crate) fn are_whole(names: &[Name]) -> bool {
    let mut rest = names;
    while let Some(first) = rest.first() {
        let Some((exchange, after)) = rest.split_at_checked(first.of) else {
            return false;
        };
        let whole = (1..).zip(exchange).all(|(place, name)| *name == Name { place, ..*first });
        if !whole {
            return false;
        }
        rest = after;
    }
    true
}

/// What a summary says that it covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Covered {
    /// How many messages are not named because they were compressed, and the last of them.
    through: Option<(usize, Name)>,
    names: Vec<Name>,
}

impl Covered {
    pub(crate) fn read(text: &str) -> Self {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
        let words: Vec<&str> =
            words.map(|word| word.trim_matches('.')).filter(|word| !word.is_empty()).collect();
        let mut covered = Self::default();
        let mut rest = &words[..];
        while let [word, after @ ..] = rest {
            if let ["Through", count, "messages", "until", last, after @ ..] = rest {
                assert_eq!(covered, Self::default(), "what was compressed comes first: {text}");
                let count = count.parse().expect("a number");
                covered.through = Some((count, Name::parse(last).expect("a name")));
                rest = after;
                continue;
            }
            covered.names.extend(Name::parse(word));
            rest = after;
        }
        covered
    }

    pub(crate) fn len(&self) -> usize {
        self.through.map_or(0, |(count, _)| count) + self.names.len()
    }

    /// Whether it is these messages, in this order, each once.
    pub(crate) fn is(&self, names: &[Name]) -> bool {
        let Some((count, last)) = self.through else {
            return self.names == names;
        };
        let Some((compressed, rest)) = names.split_at_checked(count) else {
            return false;
        };
        compressed.last() == Some(&last) && self.names == rest
    }

    /// The names from this place on, the first place being 0, as far as they are named.
    pub(crate) fn named(&self) -> (usize, &[Name]) {
        (self.through.map_or(0, |(count, _)| count), &self.names)
    }
}

/// What the model answers.
pub(crate) fn summarise(call: &Call) -> String {
    if call.user().starts_with("Compress this summary") {
        let covered = Covered::read(call.user());
        let last = covered.names.last().expect("a summary is compressed after something was added");
        return format!("Through {} messages until {last} .", covered.len());
    }
    let lines = call.user().lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let names = lines.filter_map(|line| Name::parse(line["text"].as_str()?.split(' ').next()?));
    let names: Vec<String> = names.map(|name| name.to_string()).collect();
    format!("It covers {} .", names.join(" "))
}
