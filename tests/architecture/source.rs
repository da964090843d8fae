//! Which paths a source file names, read as text: comments and strings are blanked out, what is left is cut into
//! words, and each path that begins with `crate`, `super`, `self` or the name of an imported module is followed,
//! through groups and nested modules. Not followed: what a macro builds, and what a module re-exports.

use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// A path from the root of the crate, and where it is named. A glob ends with `*`.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) path: Vec<String>,
    pub(crate) line: usize,
}

/// The text with comments, strings and characters replaced by blanks; lines stay where they were.
pub(crate) fn blank(text: &str) -> String {
    cut(text, false)
}

/// The text with only its comments replaced by blanks.
pub(crate) fn blank_comments(text: &str) -> String {
    cut(text, true)
}

fn cut(text: &str, keep_strings: bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let in_word = out.ends_with(|last: char| last.is_alphanumeric() || last == '_');
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' if !in_word || out.ends_with(['b', 'c']) => raw_string(rest),
            '\'' => character(rest),
            _ => 0,
        };
        if length == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else if keep_strings && first != '/' {
            out.push_str(&rest[..length]);
            rest = &rest[length..];
        } else {
            out.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[length..];
        }
    }
    out
}

/// Block comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    at
}

fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            _ => escaped = c == '\\' && !escaped,
        }
    }
    text.len()
}

/// 0 where `r` begins a name (`r#type` included) and no string.
fn raw_string(text: &str) -> usize {
    let hashes = text[1..].bytes().take_while(|byte| *byte == b'#').count();
    if text.as_bytes().get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let (body, end) = (hashes + 2, format!("\"{}", "#".repeat(hashes)));
    text[body..].find(&end).map_or(text.len(), |at| body + at + end.len())
}

/// 0 where `'` begins a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        // The character after the backslash may be a quote itself.
        (Some((_, '\\')), Some((at, _))) => text[at + 1..].find('\'').map_or(0, |end| at + end + 2),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// Names, `::`, and every other character on its own.
pub(crate) fn words(text: &str) -> Vec<Word> {
    let mut words = Vec::new();
    for (number, mut rest) in text.lines().enumerate() {
        while let Some(first) = rest.chars().next() {
            let name = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let length = if rest.starts_with("::") { 2 } else { name.max(first.len_utf8()) };
            if !first.is_whitespace() {
                words.push(Word { text: rest[..length].to_owned(), line: number + 1 });
            }
            rest = &rest[length..];
        }
    }
    words
}

/// Every path of ours that the file names; `module` is the file's own.
pub(crate) fn references(module: &[String], words: &[Word]) -> Vec<Reference> {
    let word = |at: usize| words.get(at).map_or("", |word| word.text.as_str());
    let mut found = Vec::new();
    // Modules that a `use` has brought in by name: their paths go on after it.
    let mut imported: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // Nested modules around this place, and how many braces were open before each.
    let (mut here, mut nested, mut depth) = (module.to_vec(), Vec::new(), 0);
    let mut at = 0;
    while at < words.len() {
        let line = words[at].line;
        match word(at) {
            "mod" if word(at + 2) == "{" => {
                here.push(word(at + 1).to_owned());
                nested.push(depth);
            }
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                if nested.last() == Some(&depth) {
                    nested.pop();
                    here.pop();
                }
            }
            "use" => {
                let mut leaves = Vec::new();
                at = tree(words, at + 1, &[], &mut leaves);
                for (path, line, name) in leaves {
                    let Some(path) = resolve(&here, &imported, &path) else {
                        continue;
                    };
                    if name.starts_with(char::is_lowercase) {
                        imported.insert(name, path.clone());
                    }
                    found.push(Reference { path, line });
                }
                continue;
            }
            _ if word(at + 1) == "::" && (at == 0 || !["::", "."].contains(&word(at - 1))) => {
                let mut path = vec![word(at).to_owned()];
                while word(at + 1) == "::"
                    && word(at + 2).starts_with(|c: char| c.is_alphabetic() || c == '_')
                {
                    path.push(word(at + 2).to_owned());
                    at += 2;
                }
                let path = resolve(&here, &imported, &path);
                found.extend(path.map(|path| Reference { path, line }));
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Reads one tree of a `use` and returns where it ends.
fn tree(
    words: &[Word],
    mut at: usize,
    prefix: &[String],
    leaves: &mut Vec<(Vec<String>, usize, String)>,
) -> usize {
    let mut path = prefix.to_vec();
    while let Some(word) = words.get(at) {
        match word.text.as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while words.get(at).is_some_and(|word| word.text != "}") {
                    at = tree(words, at, &path, leaves);
                    at += usize::from(words.get(at).is_some_and(|word| word.text == ","));
                }
                return at + 1;
            }
            "," | "}" | ";" => break,
            "as" => {
                let name = words.get(at + 1).map_or("", |word| &word.text);
                leaves.push((path, word.line, name.to_owned()));
                return at + 2;
            }
            text => {
                path.push(text.to_owned());
                at += 1;
            }
        }
    }
    let line = words.get(at.saturating_sub(1)).map_or(0, |word| word.line);
    let name = path.iter().rev().find(|name| *name != "self").cloned().unwrap_or_default();
    if path.len() > prefix.len() {
        leaves.push((path, line, name));
    }
    at
}

/// The path from the root of the crate; `None` where it leads out of it, or names something beside or below.
fn resolve(
    here: &[String],
    imported: &BTreeMap<String, Vec<String>>,
    path: &[String],
) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let mut full = match first.as_str() {
        "crate" => Vec::new(),
        "self" => here.to_vec(),
        "super" => here.split_last().map(|(_, above)| above.to_vec())?,
        name => imported.get(name)?.clone(),
    };
    for name in rest {
        match name.as_str() {
            "self" => {}
            "super" => _ = full.pop(),
            name => full.push(name.to_owned()),
        }
    }
    Some(full)
}
