//! What the README tells a newcomer to paste gives what it shows.
#![cfg(test)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The service, in a folder of its own; it ends with the value.
struct Service(Child, String);

impl Service {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_precis"))
            .args(["--bind", "127.0.0.1:0"])
            .current_dir(folder)
            .env_clear()
            .stderr(Stdio::piped())
            .spawn()
            .expect("the service starts");
        let mut log = BufReader::new(child.stderr.take().expect("its log")).lines();
        let listening = |line: &String| line.contains("listening on http://");
        let line = log.by_ref().map_while(Result::ok).find(listening).expect("it listens");
        let (_, address) = line.split_once("listening on http://").expect("an address");
        let address = address.split('"').next().expect("an address").to_owned();
        // Someone has to read on, or the service would wait for room in the pipe.
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        Self(child, address)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The fenced blocks of a section: language and text.
fn blocks<'a>(readme: &'a str, heading: &str) -> Vec<(&'a str, &'a str)> {
    let (_, section) = readme.split_once(&format!("\n{heading}\n")).expect("the section");
    let section = section.split("\n\n## ").next().expect("its text");
    let fences: Vec<&str> = section.split("```").skip(1).step_by(2).collect();
    fences.into_iter().map(|block| block.split_once('\n').expect("a language and a text")).collect()
}

#[test]
fn what_is_pasted_gives_what_is_shown() {
    let readme = include_str!("../README.md");
    let (mut commands, mut shown) = (String::new(), String::new());
    for (language, text) in blocks(readme, "## Try it") {
        match language {
            "sh" if text.contains("cargo run") => {}
            "sh" => commands.push_str(text),
            _ => shown.push_str(text),
        }
    }
    assert!(commands.contains("localhost:8080") && shown.contains("summary_through"), "{commands}\n{shown}");
    let folder = tempfile::tempdir().expect("a folder");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    symlink(examples, folder.path().join("examples")).expect("a link");
    let service = Service::start(folder.path());
    let commands = commands.replace("localhost:8080", &service.1);
    let pasted = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &commands])
        .current_dir(folder.path())
        .output()
        .expect("bash and curl");
    let (stdout, stderr) = (String::from_utf8_lossy(&pasted.stdout), String::from_utf8_lossy(&pasted.stderr));
    assert!(pasted.status.success(), "{stderr}");
    assert_eq!(stdout, shown);
}
