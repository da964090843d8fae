//! The promises of the summariser, each by its name.

use super::*;

fn said(role: Role, name: Option<&str>, text: &str) -> Entry {
    Entry {
        role,
        name: name.map(str::to_owned),
        text: text.to_owned(),
        calls: Vec::new(),
    }
}

fn user(text: &str) -> Entry {
    said(Role::User, None, text)
}
