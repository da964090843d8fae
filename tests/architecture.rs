//! Checks the structure of the sources: the layers depend on each other as `src/lib.rs` describes, SQL stays in
//! `storage`, and files do not import each other in a circle.

#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The layers that each layer may use. `app`, `cli`, `main` and `lib` may use all of them.
const ALLOWED: &[(&str, &[&str])] = &[
    ("capacity", &[]),
    ("trace_context", &[]),
    ("blocking", &["capacity"]),
    ("domain", &[]),
    ("storage", &["blocking", "capacity", "domain"]),
    ("llm", &["capacity", "config", "domain", "trace_context"]),
    ("service", &["blocking", "capacity", "domain", "llm", "storage", "trace_context"]),
    ("config", &["domain"]),
    ("proxy", &["blocking", "capacity", "config", "domain", "llm", "service"]),
    ("http", &["blocking", "capacity", "config", "domain", "proxy", "service", "trace_context"]),
    ("telemetry", &["config", "trace_context"]),
    ("app", &["*"]),
    ("cli", &["*"]),
    ("lib", &["*"]),
    ("main", &["*"]),
];

#[test]
fn layers_use_only_allowed_layers() {
    let mut violations = Vec::new();
    for source in sources() {
        let layer = source.module.first().map_or("lib", String::as_str);
        let (_, allowed) = ALLOWED.iter().find(|(name, _)| *name == layer).expect("a layer in ALLOWED");
        for path in source.imports() {
            let used = path.first().map_or("", String::as_str);
            if used != layer && !allowed.contains(&used) && !allowed.contains(&"*") {
                violations.push(format!("{}: {layer} must not use crate::{}", source.file, path.join("::")));
            }
        }
    }
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

#[test]
fn sql_is_only_in_storage() {
    let sources = sources();
    let outside = sources.iter().filter(|source| !source.file.starts_with("src/storage"));
    let uses_sqlx = |source: &&Source| {
        let code = source.code();
        ["use sqlx", " sqlx::", "(sqlx::", "<sqlx::"].iter().any(|path| code.contains(path))
    };
    let files: Vec<_> = outside.filter(uses_sqlx).map(|source| &source.file).collect();
    assert!(files.is_empty(), "these files use sqlx: {files:?}");
}

/// A path leads to the file that defines its last name: re-exports are followed. A re-export alone is no import, but one whose name the file
/// uses itself is.
#[test]
fn files_do_not_import_each_other_in_a_circle() {
    let sources = sources();
    let modules: BTreeSet<&[String]> = sources.iter().map(|source| source.module.as_slice()).collect();
    let mut reexports: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    for source in &sources {
        for path in source.declared("pub use") {
            let name = path.last().expect("a name");
            reexports.insert([source.module.as_slice(), std::slice::from_ref(name)].concat(), path);
        }
    }
    let definition = |path: &[String]| {
        let mut path = path.to_owned();
        while let Some((length, to)) = (1..=path.len()).find_map(|n| Some((n, reexports.get(&path[..n])?))) {
            path = [to.as_slice(), &path[length..]].concat();
        }
        (1..=path.len()).rev().find_map(|length| modules.get(&path[..length]).copied())
    };
    let mut imports: BTreeMap<&[String], BTreeSet<&[String]>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.module.is_empty()) {
        let code = source.code();
        // A function is used by a call: fields may have the same name.
        let is_used = |path: &Vec<String>| {
            let name = path.last().expect("a name").as_str();
            let is_type = name.starts_with(char::is_uppercase);
            let words = code.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_');
            let uses = words.filter(|word| {
                word.strip_prefix(name).is_some_and(|end| match end {
                    "(" => true,
                    end => is_type && end.len() <= 1,
                })
            });
            uses.count() > usize::from(is_type)
        };
        let used = source.declared("pub use").into_iter().filter(is_used);
        let paths = source.declared("use").into_iter().chain(source.inline_paths()).chain(used);
        let files = paths.filter_map(|path| definition(&path)).filter(|file| *file != source.module);
        imports.entry(&source.module).or_default().extend(files);
    }
    let mut circles = Vec::new();
    for (&module, used) in &imports {
        let (mut reached, mut next) = (BTreeSet::new(), used.iter().copied().collect::<Vec<_>>());
        while let Some(used) = next.pop() {
            if reached.insert(used) {
                next.extend(imports.get(used).into_iter().flatten());
            }
        }
        if reached.contains(module) {
            circles.push(module.join("::"));
        }
    }
    assert!(circles.is_empty(), "these files import each other in a circle: {circles:#?}");
}

/// On Postgres, the table has no row-level security, so each statement names the tenant. The merge of SQLite returns no rows.
#[test]
fn three_functions_name_the_table_of_the_search_index() {
    const TABLE: &str = "search_terms";
    let mut functions = BTreeMap::new();
    for source in sources() {
        let code = source.code();
        let lines: Vec<&str> = code.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            // The name of a module is outside of texts, and the list of all tables has it in quotes.
            let named = line.match_indices(TABLE).any(|(at, _)| {
                let (before, after) = (&line[..at], &line[at + TABLE.len()..]);
                let is_path = after.starts_with("::") || before.ends_with("mod ") || before.ends_with("::");
                let is_quoted = before.ends_with('\'') && after.starts_with('\'');
                let is_listed = is_quoted && source.file == "src/storage/migrations.rs";
                !is_path && !is_listed
            });
            if named {
                let (name, body) = function_around(&lines, number).expect("a function");
                functions.entry(name).or_insert(body);
            }
        }
    }
    assert_eq!(functions.keys().collect::<Vec<_>>(), ["merge_step", "search_add", "search_match"]);
    for name in ["search_add", "search_match"] {
        let statements = statements(&functions[name]);
        assert!(!statements.is_empty(), "{name}");
        for statement in statements {
            assert!(statement.contains("tenant_id") && statement.contains("$1"), "{name}: {statement}");
        }
    }
}

/// Returns the name and the text of the innermost function around a line, by the indentation of `rustfmt`.
fn function_around(lines: &[&str], number: usize) -> Option<(String, String)> {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    (0..=number).rev().find_map(|start| {
        let (before, rest) = lines[start].split_once("fn ")?;
        let is_declared = before.split_whitespace().all(|word| {
            word.starts_with("pub") || word.ends_with("sync") || word.starts_with("in") || word == "const"
        });
        let end = lines[start..]
            .iter()
            .position(|line| **line == format!("{}}}", " ".repeat(indentation(lines[start]))));
        let end = start + end.filter(|_| is_declared)?;
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        (end >= number).then(|| (name.to_owned(), lines[start..=end].join("\n")))
    })
}

/// Returns the SQL statements of a function. The texts of a macro that are joined are one statement.
fn statements(function: &str) -> Vec<String> {
    const VERBS: [&str; 5] = ["SELECT", "INSERT", "UPDATE", "DELETE", "WITH"];
    let texts = function.split('"').enumerate().filter(|(place, _)| place % 2 == 1).map(|(_, text)| text);
    let mut statements: Vec<String> = Vec::new();
    let joined: Vec<&str> =
        function.split("concat!(").skip(1).filter_map(|rest| rest.split("\n            )").next()).collect();
    for text in texts.filter(|text| VERBS.iter().any(|verb| text.trim_start().starts_with(verb))) {
        let whole = joined.iter().find(|joined| joined.contains(text));
        statements.push(whole.map_or_else(|| text.to_owned(), |joined| (*joined).to_owned()));
    }
    statements
}

#[test]
fn each_file_has_a_module_comment() {
    let without = sources().into_iter().filter(|source| !source.text.starts_with("//!"));
    let without: Vec<_> = without.map(|source| source.file).collect();
    assert!(without.is_empty(), "{without:?}");
}

/// The two manifests then share the builds of their dependencies. precis itself is built for each.
#[test]
fn fuzzing_uses_the_profiles_of_the_tests() {
    let read = |path| std::fs::read_to_string(root().join(path)).unwrap();
    let profiles = |manifest: &str| {
        let sections = manifest.split("\n[").filter_map(|section| section.strip_prefix("profile.dev"));
        let lines = |text: &str| text.lines().filter(|line| !line.starts_with('#')).collect::<String>();
        let sections = sections.filter_map(|section| section.split_once("]\n"));
        sections.map(|(name, text)| (name.to_owned(), lines(text))).collect::<BTreeMap<_, _>>()
    };
    let (tests, fuzzing) = (profiles(&read("Cargo.toml")), profiles(&read("fuzz/Cargo.toml")));
    let lock = read("fuzz/Cargo.lock");
    for (name, options) in tests {
        let package = name.strip_prefix(".package.").map(|package| package.trim_matches('"'));
        let is_shared =
            package.is_none_or(|name| name == "*" || lock.contains(&format!("name = \"{name}\"\n")));
        if is_shared && package != Some("precis") {
            assert_eq!(fuzzing.get(&name), Some(&options), "profile.dev{name} in fuzz/Cargo.toml");
        }
    }
}

struct Source {
    /// The path below the root, such as `src/llm/pool.rs`.
    file: String,
    /// The path of the module, such as `["llm", "pool"]`; empty for `src/lib.rs`.
    module: Vec<String>,
    text: String,
}

impl Source {
    /// Returns the text without comments and without the unit tests at its end.
    fn code(&self) -> String {
        let text = self.text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Returns all paths to other modules.
    fn imports(&self) -> Vec<Vec<String>> {
        [self.declared("use"), self.declared("pub use"), self.inline_paths()].concat()
    }

    /// Returns the paths of `use` or `pub use` declarations.
    fn declared(&self, keyword: &str) -> Vec<Vec<String>> {
        let mut paths = Vec::new();
        for declaration in self.code().split(&format!("\n{keyword} ")).skip(1) {
            let declaration = declaration.split(';').next().unwrap_or_default();
            let mut words = declaration.split_whitespace();
            let mut tree = String::new();
            while let Some(word) = words.next() {
                if word == "as" {
                    let alias = words.next().unwrap_or_default();
                    tree.extend(alias.chars().filter(|c| ",{}".contains(*c)));
                } else {
                    tree.push_str(word);
                }
            }
            expand(String::new(), &tree, &mut paths);
        }
        paths.iter().filter_map(|path| self.resolve(path)).collect()
    }

    /// Returns the paths outside of declarations that lead to a module. Those of visibilities are not among them.
    fn inline_paths(&self) -> Vec<Vec<String>> {
        let code = self.code().replace("pub(in crate::", "pub(");
        let lines = code.lines().filter(|line| !line.starts_with("use ") && !line.starts_with("pub use "));
        let paths = lines.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':'));
        paths.filter(|path| path.contains("::")).filter_map(|path| self.resolve(path)).collect()
    }

    /// Resolves a path from this module. Returns `None` for paths into other crates.
    fn resolve(&self, path: &str) -> Option<Vec<String>> {
        let mut parts: Vec<&str> = path.split("::").filter(|part| !part.is_empty()).collect();
        let mut resolved = match *parts.first()? {
            "crate" => Vec::new(),
            "self" | "super" => self.module.clone(),
            child => {
                let folder = root().join(self.file.trim_end_matches(".rs"));
                folder.join(format!("{child}.rs")).exists().then(|| self.module.clone())?
            }
        };
        while let Some(&first @ ("crate" | "self" | "super")) = parts.first() {
            if first == "super" {
                resolved.pop();
            }
            parts.remove(0);
        }
        resolved.extend(parts.into_iter().map(str::to_owned));
        (!resolved.is_empty()).then_some(resolved)
    }
}

/// Expands the braces of a `use` declaration: `a::{b, c::d}` to `a::b` and `a::c::d`.
fn expand(prefix: String, tree: &str, paths: &mut Vec<String>) {
    let Some((head, group)) = tree.split_once('{') else {
        paths.push(prefix + tree);
        return;
    };
    let (mut depth, mut start) = (0, 0);
    let group = group.strip_suffix('}').unwrap_or(group);
    let mut parts = Vec::new();
    for (position, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&group[start..position]);
                start = position + 1;
            }
            _ => {}
        }
    }
    parts.push(&group[start..]);
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        expand(format!("{prefix}{head}"), part, paths);
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Vec<Source> {
    let (mut sources, mut folders) = (Vec::new(), vec![root().join("src")]);
    while let Some(folder) = folders.pop() {
        let entries: Vec<PathBuf> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        for path in entries {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
            let Some(module) = file.strip_prefix("src/").and_then(|file| file.strip_suffix(".rs")) else {
                continue;
            };
            // Files that contain only unit tests.
            if module.split('/').any(|part| part == "tests") {
                continue;
            }
            let module = module.split('/').filter(|part| *part != "lib").map(str::to_owned).collect();
            let text = std::fs::read_to_string(&path).unwrap();
            sources.push(Source { file: file.to_owned(), module, text });
        }
    }
    sources.sort_by(|a, b| a.file.cmp(&b.file));
    sources
}
