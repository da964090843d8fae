//! Checks the documentation: the README's quick start prints the output shown there, links resolve, and the tests, files and
//! names that it mentions exist.
#![cfg(test)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running service in its own folder. Dropping it kills the process.
struct Service {
    process: Child,
    address: String,
}

impl Service {
    fn start(folder: &Path) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_precis"))
            .args(["--bind", "127.0.0.1:0"])
            .current_dir(folder)
            .env_clear()
            .stderr(Stdio::piped())
            .spawn()
            .expect("the service starts");
        let mut log = BufReader::new(process.stderr.take().expect("its log")).lines();
        let listening = |line: &String| line.contains("listening on http://");
        let line = log.by_ref().map_while(Result::ok).find(listening).expect("it listens");
        let (_, address) = line.split_once("listening on http://").expect("an address");
        let address = address.split('"').next().expect("an address").to_owned();
        // Drain the log: a full pipe would block the service.
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        Self { process, address }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns language and text of each fenced block in a section.
fn fenced_blocks<'a>(readme: &'a str, heading: &str) -> Vec<(&'a str, &'a str)> {
    let (_, section) = readme.split_once(&format!("\n{heading}\n")).expect("the section");
    let section = section.split("\n\n## ").next().expect("its text");
    let fences: Vec<&str> = section.split("```").skip(1).step_by(2).collect();
    fences.into_iter().map(|block| block.split_once('\n').expect("a language and a text")).collect()
}

#[test]
fn quick_start_commands_print_the_output_shown() {
    let readme = include_str!("../README.md");
    let (mut commands, mut expected) = (String::new(), String::new());
    for (language, text) in fenced_blocks(readme, "## Quick start") {
        match language {
            "sh" if text.contains("cargo run") => {}
            "sh" => commands.push_str(text),
            "" => expected.push_str(text),
            _ => {}
        }
    }
    assert!(
        commands.contains("localhost:8080") && expected.contains("summary_through"),
        "{commands}\n{expected}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    symlink(examples, folder.path().join("examples")).expect("a link");
    let service = Service::start(folder.path());
    let commands = commands.replace("localhost:8080", &service.address);
    // Twice: pasting the commands again must give the same output.
    for _ in 0..2 {
        let output = Command::new("bash")
            .args(["-eu", "-c", &commands])
            .current_dir(folder.path())
            .output()
            .expect("bash and curl");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{stderr}");
        assert_eq!(trim_line_ends(&String::from_utf8_lossy(&output.stdout)), trim_line_ends(&expected));
    }
}

/// Removes trailing spaces of lines: `fold` leaves them, editors remove them.
fn trim_line_ends(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[test]
fn guarantees_name_existing_tests() {
    let sources: String = ["src", "tests"].iter().flat_map(|folder| rust_files(Path::new(folder))).collect();
    let code_spans = include_str!("../docs/guarantees.md").split('`').skip(1).step_by(2);
    let is_test_name = |span: &&str| {
        span.matches('_').count() >= 2
            && span.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let names: Vec<&str> = code_spans.filter(is_test_name).collect();
    assert!(names.len() > 30, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "docs/guarantees.md names tests that do not exist: {missing:#?}");
}

#[test]
fn relative_links_and_anchors_resolve() {
    let mut broken = Vec::new();
    for path in documents() {
        let folder = path.parent().expect("a folder");
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            let has_anchor = || std::fs::read_to_string(&target).is_ok_and(|text| has_heading(&text, anchor));
            if !link.contains("://") && !(target.exists() && (anchor.is_empty() || has_anchor())) {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Returns `true` if the document has a heading with this anchor, formed by GitHub's rule.
fn has_heading(markdown: &str, anchor: &str) -> bool {
    let is_part = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let headings = markdown.lines().filter(|line| line.starts_with('#'));
    let titles = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    titles
        .map(|title| title.chars().filter(is_part).collect::<String>().replace(' ', "-"))
        .any(|id| id == anchor)
}

#[test]
fn named_files_and_names_of_the_glossary_exist() {
    let mut missing = Vec::new();
    for path in documents() {
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        let spans = text.split('`').skip(1).step_by(2);
        let is_path = |span: &&str| {
            ["src/", "tests/", "migrations/"].iter().any(|folder| span.starts_with(folder))
                && !span.contains(['<', '{', ' ', '*'])
        };
        let absent = spans.filter(is_path).filter(|span| !Path::new(span).exists());
        missing.extend(absent.map(|span| format!("{}: {span}", path.display())));
    }
    let sources: String = ["src", "tests"].iter().flat_map(|folder| rust_files(Path::new(folder))).collect();
    let rows = include_str!("../docs/glossary.md").lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.trim_end_matches(" |").split(" | ").nth(2));
    for name in cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(|name| !name.contains('/')) {
        let last = name.rsplit("::").next().and_then(|name| name.split(':').next()).unwrap_or(name);
        if !sources.contains(last) {
            missing.push(format!("docs/glossary.md: {name}"));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_limit_is_documented() {
    let document = include_str!("../docs/limits.md");
    let example = include_str!("../precis.example.toml");
    let (_, section) = example.split_once("\n[limits]\n").expect("the section");
    let settings = section.lines().take_while(|line| !line.is_empty());
    let names: Vec<&str> = settings.filter_map(|line| line.split(" = ").next()).collect();
    assert!(names.len() > 10, "{names:?}");
    let is_documented = |name: &&str| document.contains(&format!("`limits.{name}`"));
    let missing: Vec<&&str> = names.iter().filter(|name| !is_documented(name)).collect();
    assert!(missing.is_empty(), "docs/limits.md lacks {missing:?}");
}

/// Returns the paths of README.md, CONTRIBUTING.md and all documents in docs/.
fn documents() -> Vec<PathBuf> {
    let of = |folder: &str| {
        let entries =
            std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect::<Vec<_>>()
    };
    let top = ["README.md", "CONTRIBUTING.md"].map(PathBuf::from);
    top.into_iter().chain(of("docs")).chain(of("docs/decisions")).collect()
}

/// Returns the text of all Rust files in a folder and its subfolders.
fn rust_files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
    let files = files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let mut texts: Vec<String> = files.map(|path| std::fs::read_to_string(path).expect("UTF-8")).collect();
    texts.extend(folders.iter().flat_map(|folder| rust_files(folder)));
    texts
}
