//! The modules depend on each other only as `src/lib.rs` describes, and SQL stays in `storage`.
//!
//! A new top-level module needs a line in [`ARROWS`]. How the sources are read, and what that misses, is in `source`.

#![cfg(test)]

#[path = "architecture/source.rs"]
mod source;

use source::{blank, blank_comments, references, words};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What each top-level module may name, besides itself. `app`, `main` and `lib` put things together: they may name
/// anything, and nothing below them may name them.
const ARROWS: &[(&str, &[&str])] = &[
    ("blocking", &[]),
    ("domain", &[]),
    ("storage", &["domain", "blocking"]),
    ("llm", &["domain"]),
    ("service", &["domain", "storage", "llm", "blocking"]),
    ("http", &["domain", "service", "blocking"]),
    ("config", &["domain"]),
    ("telemetry", &["config"]),
];

const COMPOSITION: &[&str] = &["app", "main", "lib"];

/// The service sees traits, never what stands behind them.
const BACKENDS: &[(&str, &[&str])] = &[
    ("storage", &["postgres", "sqlite"]),
    (
        "llm",
        &[
            "anthropic",
            "breaker",
            "check",
            "extractive",
            "meters",
            "model",
            "openai",
            "pool",
            "remote",
            "slots",
        ],
    ),
];

/// Routes that are about the interface and no part of it; and MCP, which describes itself.
const UNDOCUMENTED: &[&str] = &["/docs", "/mcp", "/openapi.json"];

const METHODS: &[&str] = &["delete", "get", "head", "options", "patch", "post", "put"];

#[test]
fn imports_run_one_way() {
    assert_none(sources().iter().flat_map(|(file, text)| arrows(file, text)));
}

#[test]
fn sql_stays_in_storage() {
    assert_none(sources().iter().flat_map(|(file, text)| sql(file, text)));
}

#[test]
fn every_source_file_has_a_module_comment() {
    assert_none(sources().iter().flat_map(|(file, text)| shape(file, text)));
}

#[test]
fn the_document_names_the_routes_of_the_table() {
    let table = routes(&std::fs::read_to_string(root().join("src/http.rs")).unwrap());
    let document = std::fs::read_to_string(root().join("openapi/openapi.json")).unwrap();
    let document = documented(&serde_json::from_str(&document).unwrap());
    let missing = |from: &BTreeSet<_>, of: &BTreeSet<_>, place| {
        of.difference(from).map(|route| format!("{place}: {route} is missing")).collect::<Vec<_>>()
    };
    let of_document = missing(&document, &table, "openapi/openapi.json");
    assert_none([of_document, missing(&table, &document, "src/http.rs")].concat().into_iter());
}

/// So that one build of what precis depends on serves both. precis itself is built for each.
#[test]
fn fuzzing_is_optimised_as_the_tests_are() {
    let read = |path| std::fs::read_to_string(root().join(path)).unwrap();
    let (ours, theirs) = (profiles(&read("Cargo.toml")), profiles(&read("fuzz/Cargo.toml")));
    let lock = read("fuzz/Cargo.lock");
    let is_built = |package: &str| lock.contains(&format!("name = \"{package}\"\n"));
    let is_shared = |profile: &str| match profile.strip_prefix(".package.") {
        None | Some("\"*\"") => true,
        Some(package) => package != "precis" && is_built(package),
    };
    let missing = ours.difference(&theirs).filter(|(profile, _)| is_shared(profile));
    assert_none(
        missing.map(|(profile, says)| format!("fuzz/Cargo.toml: profile.dev{profile} has not {says}")),
    );
}

fn assert_none(violations: impl Iterator<Item = String>) {
    let violations: Vec<_> = violations.collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The dev profiles of a manifest, of packages and of all, by what follows `profile.dev`, with what they say.
fn profiles(manifest: &str) -> BTreeSet<(String, String)> {
    let sections = manifest.split("\n[").filter_map(|section| section.strip_prefix("profile.dev"));
    let profiles = sections.filter_map(|section| section.split_once("]\n"));
    let said = |text: &str| text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join(" ");
    profiles.map(|(name, text)| (name.to_owned(), said(text).trim().to_owned())).collect()
}

/// Path below the root and text of each source file.
fn sources() -> Vec<(String, String)> {
    let (mut sources, mut folders) = (Vec::new(), vec![root().join("src")]);
    while let Some(folder) = folders.pop() {
        for path in entries(&folder) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                sources.push((path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(), text));
            }
        }
    }
    sources.sort();
    assert!(!sources.is_empty());
    sources
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The module that a file holds: `src/llm/pool.rs` is `["llm", "pool"]`, `src/lib.rs` is `[]`.
fn module(file: &str) -> Vec<String> {
    let path = file.trim_start_matches("src/").trim_end_matches(".rs");
    path.split('/').filter(|name| *name != "lib").map(str::to_owned).collect()
}

fn layer(file: &str) -> String {
    module(file).first().cloned().unwrap_or_else(|| "lib".to_owned())
}

fn shape(file: &str, text: &str) -> Vec<String> {
    let mut violations = Vec::new();
    if !text.starts_with("//!") {
        violations.push(format!("{file}:1: begins without a module comment (//!) that says why it exists"));
    }
    if file.ends_with("/mod.rs") {
        violations.push(format!("{file}:1: no mod.rs: call it after its folder"));
    }
    violations
}

fn sql(file: &str, text: &str) -> Vec<String> {
    let words = words(&blank(text));
    let outside = words.into_iter().filter(|word| word.text == "sqlx" && layer(file) != "storage");
    outside.map(|word| format!("{file}:{}: sqlx outside of storage", word.line)).collect()
}

fn arrows(file: &str, text: &str) -> Vec<String> {
    let from = layer(file);
    if COMPOSITION.contains(&from.as_str()) {
        return Vec::new();
    }
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == from) else {
        return vec![format!(
            "{file}:1: no rule for the module `{from}`: add it to ARROWS in tests/architecture.rs"
        )];
    };
    let mut violations = Vec::new();
    for reference in references(&module(file), &words(&blank(text))) {
        let path: Vec<_> = reference.path.iter().map(String::as_str).collect();
        let (Some(to), rest) = (path.first(), path.get(1)) else {
            continue;
        };
        let backends = BACKENDS.iter().find(|(module, _)| from == "service" && module == to);
        let place = format!("{file}:{}: {from} -> {to} (crate::{})", reference.line, path.join("::"));
        if *to != from && !allowed.contains(to) {
            violations.push(format!("{place}: only {allowed:?} allowed"));
        } else if backends
            .is_some_and(|(_, names)| rest.is_some_and(|name| *name == "*" || names.contains(name)))
        {
            violations.push(format!("{place}: only the traits, never a backend"));
        }
    }
    violations
}

/// `get /path` for each method in the `.route("/path", …)` lines.
fn routes(text: &str) -> BTreeSet<String> {
    let text = blank_comments(text);
    let mut found = BTreeSet::new();
    for route in text.split(".route(").skip(1) {
        let (path, handlers) = route.trim_start().strip_prefix('"').unwrap().split_once('"').unwrap();
        if UNDOCUMENTED.iter().any(|prefix| path == *prefix || path.starts_with(&format!("{prefix}/"))) {
            continue;
        }
        let (words, mut depth) = (words(handlers), 0);
        for (word, next) in words.iter().zip(words.iter().skip(1)) {
            match word.text.as_str() {
                "(" => depth += 1,
                ")" if depth == 0 => break,
                ")" => depth -= 1,
                // Not the handlers' arguments: a handler may be called `get`.
                method if depth == 0 && next.text == "(" && METHODS.contains(&method) => {
                    found.insert(format!("{method} {path}"));
                }
                _ => {}
            }
        }
    }
    found
}

/// `get /path` for each operation of an OpenAPI document.
fn documented(document: &serde_json::Value) -> BTreeSet<String> {
    let paths = document["paths"].as_object().unwrap().iter();
    let operations = paths.flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().keys().filter(|key| METHODS.contains(&key.as_str()));
        methods.map(move |method| format!("{method} {path}"))
    });
    operations.collect()
}

/// The checker itself: what it must catch, and what it must not.
mod checker {
    use super::*;

    /// Where the snippet, as the file's text, breaks the rule on arrows: `line from -> to`.
    fn broken(file: &str, text: &str) -> Vec<String> {
        let violations = arrows(file, text).into_iter();
        let short = violations.map(|violation| {
            let place =
                violation.strip_prefix(&format!("{file}:")).unwrap().split(" (").next().unwrap().to_owned();
            place.replacen(':', "", 1)
        });
        short.collect()
    }

    #[test]
    fn catches_an_arrow_that_runs_back() {
        assert_eq!(broken("src/domain/id.rs", "//!\n\nuse crate::storage::Store;"), ["3 domain -> storage"]);
        assert_eq!(broken("src/storage.rs", "use crate::llm::Llm;"), ["1 storage -> llm"]);
        assert_eq!(broken("src/http.rs", "fn a(s: &dyn crate::storage::Store) {}"), ["1 http -> storage"]);
        assert_eq!(broken("src/llm.rs", "pub(in crate::http) fn a() {}"), ["1 llm -> http"]);
        assert_eq!(broken("src/config.rs", "use crate::app;"), ["1 config -> app"]);
        assert_eq!(broken("src/domain.rs", "use crate::*;"), ["1 domain -> *"]);
    }

    #[test]
    fn follows_super_out_of_the_module() {
        assert_eq!(broken("src/domain/id.rs", "use super::super::http::X;"), ["1 domain -> http"]);
        assert_eq!(broken("src/domain/id.rs", "use super::message::Message;"), [""; 0]);
        let nested = "mod a {\n fn f() {}\n mod b { use super::super::super::super::llm::Llm; } }\nuse super::session::S;";
        assert_eq!(broken("src/domain/id.rs", nested), ["3 domain -> llm"]);
    }

    #[test]
    fn reads_groups_and_imported_modules() {
        let group =
            "use {std::fmt, crate::{\n domain::{self, id::*},\n service::{Service as E, error::{A, B}},\n}};";
        assert_eq!(broken("src/llm/pool.rs", group), ["3 llm -> service"; 3]);
        let imported = "use crate::{domain, storage as s};\nfn a() {\n s::postgres::open(domain::x()) }";
        assert_eq!(broken("src/service.rs", imported), ["3 service -> storage"]);
        let root = "use crate as c;\nuse c::http::X;";
        assert_eq!(broken("src/service.rs", root), ["2 service -> http"]);
    }

    #[test]
    fn keeps_backends_from_the_service() {
        assert_eq!(
            broken("src/service/a.rs", "use crate::storage::{Store, sqlite::S};"),
            ["1 service -> storage"]
        );
        assert_eq!(broken("src/service/a.rs", "use crate::llm::*;"), ["1 service -> llm"]);
        assert_eq!(broken("src/service/a.rs", "use crate::llm::{Llm, pool};"), ["1 service -> llm"]);
        assert_eq!(broken("src/service/a.rs", "use crate::{llm::Llm, storage::Store};"), [""; 0]);
    }

    #[test]
    fn passes_over_comments_strings_and_characters() {
        let text = "//! [`crate::http`]\n/* /* use crate::http; */ crate::http::a */\n\
             const A: &str = \"\\\" crate::http::a\";\nconst B: &[u8] = br#\"\" crate::http::a\"#;\n\
             fn f<'a>(x: &'a str) { ['\"', '\\'', '\\u{1f}']; r#type::a(); }\n";
        assert_eq!(broken("src/domain.rs", text), [""; 0]);
        assert_eq!(broken("src/domain.rs", &format!("{text}use crate::http;")), ["6 domain -> http"]);
    }

    #[test]
    fn wants_a_rule_for_each_module() {
        assert_eq!(arrows("src/attic/a.rs", "").len(), 1);
        assert_eq!(arrows("src/app.rs", "use crate::{attic, http, storage::postgres};").len(), 0);
    }

    #[test]
    fn catches_sql_outside_of_storage() {
        assert_eq!(
            sql("src/service.rs", "// sqlx::query\nuse sqlx::query;"),
            ["src/service.rs:2: sqlx outside of storage"]
        );
        assert_eq!(sql("src/app.rs", "fn a() -> Result<(), ::sqlx::Error> {}").len(), 1);
        assert_eq!(sql("src/storage.rs", "use sqlx::query;").len(), 0);
        assert_eq!(sql("src/storage/sqlite/session.rs", "use sqlx::query;").len(), 0);
    }

    #[test]
    fn reads_the_route_table_and_the_document() {
        let table = "Router::new()\n// .route(\"/old\", get(a))\n\
             .route(\"/a/{id}\", get(a::get).put(a::put).layer(b(put())))\n\
             .route(\n\"/a/{id}/b\",\naxum::routing::post(b),\n)\n\
             .route(\"/docs/{*rest}\", get(c)).route(\"/openapi.json\", get(d)).fallback(delete(e))";
        let table = routes(table);
        assert_eq!(Vec::from_iter(&table), ["get /a/{id}", "post /a/{id}/b", "put /a/{id}"]);
        let document = serde_json::json!({"paths": {
            "/a/{id}": {"parameters": [], "get": {}, "put": {}},
            "/a/{id}/b": {"post": {}},
        }});
        assert_eq!(documented(&document), table);
    }
}
