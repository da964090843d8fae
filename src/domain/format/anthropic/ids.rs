//! Ids and names that Anthropic takes: letters of ASCII, digits, `_` and `-`; and no id twice in a list.

use sha2::{Digest as _, Sha256};
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// The longest id or name.
const LONGEST: usize = 128;

/// The ids of the calls of a list.
#[derive(Debug, Default)]
pub(in super::super) struct Ids {
    taken: HashSet<String>,
    /// What the latest call of that id is called.
    latest: HashMap<String, String>,
}

impl Ids {
    /// The id of a new call of the message `seq`: its own where that will do. A call whose id came before in the list has
    /// the number of its message behind it.
    pub(super) fn open(&mut self, id: &str, seq: i64) -> String {
        let own = if is_sound(id) { id.to_owned() } else { hashed(id) };
        let mut name = own.clone();
        if self.taken.contains(&name) {
            name = format!("{own}_{seq}");
        }
        while !self.taken.insert(name.clone()) {
            name.push('_');
        }
        self.latest.insert(id.to_owned(), name.clone());
        name
    }

    /// What the latest call of that id is called.
    pub(super) fn of(&self, id: &str) -> String {
        self.latest.get(id).cloned().unwrap_or_else(|| hashed(id))
    }
}

/// The name of a tool: what can't stand in one is `_`.
pub(super) fn tool_name(name: &str) -> String {
    let letter = |c: char| if may_stand(c) { c } else { '_' };
    name.chars().map(letter).take(LONGEST).collect()
}

fn may_stand(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

fn is_sound(id: &str) -> bool {
    (1..=LONGEST).contains(&id.len()) && id.chars().all(may_stand)
}

/// The same for the same id, and for no other.
fn hashed(id: &str) -> String {
    let hash = Sha256::digest(id);
    hash.iter().take(12).fold("call_".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
