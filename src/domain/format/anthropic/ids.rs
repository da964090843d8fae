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
    /// the number of its message behind it; where that is too long, or an id that came before as well, the hash of that.
    pub(super) fn open(&mut self, id: &str, seq: i64) -> String {
        let mut name = if is_sound(id) { id.to_owned() } else { hashed(id) };
        if self.taken.contains(&name) {
            name = format!("{name}_{seq}");
        }
        while name.len() > LONGEST || self.taken.contains(&name) {
            name = hashed(&name);
        }
        self.taken.insert(name.clone());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_an_id_of_its_own_that_is_sound() {
        let (longest, longer) = ("x".repeat(LONGEST), "x".repeat(LONGEST + 1));
        let mut ids = Ids::default();
        let given =
            [("a", 1), ("a_3", 2), ("a", 3), ("a", 4), (&longest, 5), (&longest, 6), (&longer, 7), ("", 8)];
        let opened = given.map(|(id, seq)| ids.open(id, seq));
        assert!(opened.iter().all(|id| is_sound(id)), "{opened:?}");
        assert_eq!(opened.iter().collect::<HashSet<_>>().len(), given.len(), "{opened:?}");
        assert_eq!([&opened[0], &opened[1], &opened[3], &opened[4]], ["a", "a_3", "a_4", &longest]);
        assert_eq!([ids.of("a"), ids.of(&longest)], [opened[3].as_str(), &opened[5]]);
    }
}
