//! Runs the commands of README.md and of all pages in docs/ against the service, and compares the output that is shown.
//!
//! Each fenced block `sh` of a page runs, in the order of the page, in one shell. A failing command or an error response of
//! the service fails the test. The output is compared if it is shown: in a block `json` or in one without a language that
//! follows, or in a comment `# {…}` after the command. JSON is compared by the fields that are shown; `…` stands for anything, and
//! a time for any time.
//!
//! A block that can't run here names the reason after the language, such as `sh no-test=docker`; see [`NOT_TESTED`].

use crate::service::{Precis, Process};
use crate::support::backend::Backend;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use test_case::test_case;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The reasons for which a block does not run.
const NOT_TESTED: [&str; 6] = [
    // Builds the program, as the test did.
    "build",
    // Needs a container engine. Tests build the file system of the image and run the binary in it.
    "docker",
    // Needs a cluster.
    "kubernetes",
    // Takes minutes; the script itself is part of the checks or of releases.
    "minutes",
    // Needs a program of another vendor.
    "vendor",
    // Starts further services on fixed ports; other tests of this suite start such services on free ones.
    "ports",
];

/// Pages whose commands another test runs.
const TESTED_ELSEWHERE: [(&str, &str); 1] = [("docs/backup.md", include_str!("backup.rs"))];

/// Output that a page shows.
#[derive(Debug)]
enum Shown {
    Json(Value),
    Text(String),
}

/// Commands, and the output of the last one.
#[derive(Debug, Default)]
struct Step {
    commands: String,
    shown: Option<Shown>,
}

/// Returns the steps of a page. Asserts that its blocks have a known mark or none.
fn steps(page: &str, text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    // Output is shown directly after its command, or after a paragraph that introduces it.
    let mut parts = text.split("\n```");
    let mut is_command = false;
    while let (Some(before), Some(block)) = (parts.next(), parts.next()) {
        let (info, block) = block.split_once('\n').unwrap_or((block, ""));
        let between = before.trim();
        is_command &= between.is_empty() || between.ends_with(':') && !between.contains("\n\n");
        match info {
            "sh" => steps.extend(steps_of_block(block)),
            "json" if is_command => {
                let shown = serde_json::from_str(&quoted(block)).unwrap_or_else(|error| {
                    panic!("{page}: {error}: {block}");
                });
                steps.last_mut().expect("a command").shown = Some(Shown::Json(shown));
            }
            "" if is_command => {
                steps.last_mut().expect("a command").shown = Some(Shown::Text(block.to_owned()));
            }
            _ => {
                let mark = info.strip_prefix("sh ").map(|mark| mark.strip_prefix("no-test=").unwrap_or(mark));
                assert!(mark.is_none_or(|mark| NOT_TESTED.contains(&mark)), "{page}: unknown mark {info:?}");
            }
        }
        is_command = info == "sh";
    }
    steps
}

/// Divides a block after each output that is shown as a comment.
fn steps_of_block(block: &str) -> Vec<Step> {
    let mut steps = vec![Step::default()];
    for line in block.lines() {
        let step = steps.last_mut().expect("at least one");
        let shown = line.strip_prefix("# ").and_then(|text| serde_json::from_str(&quoted(text)).ok());
        if let Some(shown) = shown {
            step.shown = Some(Shown::Json(shown));
            steps.push(Step::default());
        } else {
            step.commands.push_str(line);
            step.commands.push('\n');
        }
    }
    steps.retain(|step| !step.commands.trim().is_empty());
    steps
}

/// Replaces objects and lists that are not shown, `{…}` and `[…]`, by strings, so that the text is JSON.
fn quoted(text: &str) -> String {
    text.replace("{…}", "\"…\"").replace("[…]", "\"…\"")
}

/// Returns `true` if the output has what is shown.
fn shows(shown: &Value, output: &Value) -> bool {
    let is_time = |text: &str| OffsetDateTime::parse(text, &Rfc3339).is_ok();
    match (shown, output) {
        (Value::String(shown), _) if shown == "…" => true,
        (Value::String(shown), Value::String(output)) => {
            // The text before and after `…`. An id or a key can begin with anything.
            let parts = shown.split_once('…');
            let has_ends = |(start, end): (&str, &str)| {
                let is_id = start.bytes().all(|byte| byte.is_ascii_hexdigit());
                (is_id || output.starts_with(start)) && output.ends_with(end)
            };
            shown == output || (is_time(shown) && is_time(output)) || parts.is_some_and(has_ends)
        }
        (Value::Object(shown), Value::Object(output)) => {
            shown.iter().all(|(name, value)| output.get(name).is_some_and(|output| shows(value, output)))
        }
        (Value::Array(shown), Value::Array(output)) => {
            let is_cut = shown.last() == Some(&json!("…"));
            let shown = if is_cut { &shown[..shown.len() - 1] } else { shown };
            (is_cut || shown.len() == output.len())
                && shown.iter().zip(output).all(|(shown, output)| shows(shown, output))
        }
        _ => shown == output,
    }
}

/// Removes spaces at the ends of lines and empty lines at the end: `fold` leaves them, editors remove them.
fn trimmed(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// Runs the steps in one shell. Returns what fails or prints something else than is shown.
fn run(steps: &[Step], service: &Process, url: &str, folder: &Path) -> Vec<String> {
    const END: &str = "\u{1e}\n";
    let commands: Vec<&str> = steps.iter().map(|step| step.commands.as_str()).collect();
    let script = commands.join("\nprintf '\\036\\n'\n") + "\nprintf '\\036\\n'\n";
    let address = service.url.trim_start_matches("http://");
    let programs = Path::new(env!("CARGO_BIN_EXE_precis")).parent().expect("a folder").display();
    let path = std::env::var("PATH").expect("a path");
    let output = Command::new("bash")
        .args(["-eu", "-o", "pipefail", "-c", &script.replace("localhost:8080", address)])
        .current_dir(folder)
        .env("PATH", format!("{programs}:{path}"))
        .env("HOME", folder)
        .env("DATABASE_URL", url)
        .env_remove("CURL_HOME")
        .output()
        .expect("bash and curl");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let outputs: Vec<&str> = stdout.split_terminator(END).collect();
    if !output.status.success() || outputs.len() != steps.len() {
        return vec![format!("{script}\n{stdout}\n{stderr}")];
    }
    let mut differences = Vec::new();
    for (Step { commands, shown }, output) in steps.iter().zip(outputs) {
        let (is_shown, shown) = match shown {
            None => continue,
            Some(Shown::Text(shown)) => (trimmed(output) == trimmed(shown), shown.clone()),
            Some(Shown::Json(shown)) => {
                let last = output.trim_end().lines().last().unwrap_or_default();
                let found = serde_json::from_str(last).unwrap_or(Value::Null);
                (shows(shown, &found), shown.to_string())
            }
        };
        if !is_shown {
            differences.push(format!("{commands}\nis shown with\n{shown}\nand prints\n{output}"));
        }
    }
    differences
}

/// Returns README.md and the pages in docs/ with commands.
fn pages() -> Vec<(String, Vec<Step>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(folder.join("docs")).expect("a folder");
    let mut files: Vec<PathBuf> = docs.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.push(folder.join("README.md"));
    files.sort();
    let pages = files.into_iter().map(|file| {
        let page = file.strip_prefix(folder).expect("in the folder").display().to_string();
        let steps = steps(&page, &std::fs::read_to_string(&file).expect("UTF-8"));
        (page, steps)
    });
    pages.filter(|(_, steps)| !steps.is_empty()).collect()
}

/// Stores what the commands of a page presuppose: except for these pages, a session of 104 messages with a summary.
async fn prepare(page: &str, service: &Process) {
    match page {
        // They begin without data.
        "README.md" | "docs/guide.md" | "docs/concepts.md" => {}
        "docs/sync.md" => {
            let stored = json!([
                {"role": "user", "content": "My plum tree is two years old."},
                {"role": "assistant", "content": "Noted."},
            ]);
            service.record("demo", stored.as_array().expect("a list")).await;
        }
        _ => {
            for turn in include_str!("../../examples/turns.jsonl").lines() {
                let mut exchange: Value = serde_json::from_str(turn).expect("JSON");
                exchange["user_id"] = json!("ada");
                service.post("/sessions/demo/exchanges", exchange).await.ok(201);
            }
            service.context("demo", &json!({})).await;
        }
    }
}

#[test_case(async || Backend::sqlite().await; "sqlite")]
#[test_case(async || Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_commands_print_what_is_shown(backend: impl AsyncFn() -> Backend) {
    let pages = pages();
    assert!(pages.len() > 10, "{pages:?}");
    let mut differences = Vec::new();
    for (page, steps) in pages {
        if let Some((_, test)) = TESTED_ELSEWHERE.iter().find(|(elsewhere, _)| *elsewhere == page) {
            assert!(test.contains(&page), "the test reads the page");
            continue;
        }
        let backend = backend().await;
        let service = Precis::on(&backend).start().await;
        prepare(&page, &service).await;
        let folder = service.folder.path();
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        symlink(examples, folder.join("examples")).expect("a link");
        // An error response fails the command.
        std::fs::write(folder.join(".curlrc"), "silent\nshow-error\nfail-with-body\n").expect("written");
        // Pasting the commands of the README again must give the same output.
        for _ in 0..if page == "README.md" { 2 } else { 1 } {
            let found = run(&steps, &service, &backend.url(), folder);
            differences.extend(found.into_iter().map(|difference| format!("{page}:\n{difference}")));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

#[test]
fn output_is_compared_by_what_is_shown() {
    let page = "```sh\ncurl a\n# {\"id\": \"01…\", \"from\": {…}}\ncurl b\n```\n\nIts output:\n\n```json\n[1, \"…\"]\n```\n";
    let steps = steps("page", &format!("\n{page}"));
    let [first, second] = steps.as_slice() else { panic!("two steps: {steps:?}") };
    assert_eq!((first.commands.as_str(), second.commands.as_str()), ("curl a\n", "curl b\n"));
    assert!(
        matches!(&second.shown, Some(Shown::Json(shown)) if shows(shown, &json!([1, 2, 3]))),
        "{second:?}"
    );
    for (shown, output, is_shown) in [
        (json!({"a": 1}), json!({"a": 1, "b": 2}), true),
        (json!({"a": 1}), json!({"a": 2}), false),
        (json!({"a": 1}), json!({}), false),
        (json!("0198f3…"), json!("0c6f"), true),
        (json!("Saved…"), json!("Stored"), false),
        (json!("2026-08-01T09:30:00Z"), json!("2027-01-01T00:00:00.5Z"), true),
        (json!("2026-08-01T09:30:00Z"), json!(null), false),
        (json!([1]), json!([1, 2]), false),
    ] {
        assert_eq!(shows(&shown, &output), is_shown, "{shown} {output}");
    }
}
