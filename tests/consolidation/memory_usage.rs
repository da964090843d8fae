//! The memory usage of a long consolidation depends on the size of a batch and not on the number of batches.
//!
//! Measured on the real binary in its own process, because the test process holds the conversation itself.
#![cfg(target_os = "linux")]

use crate::batches::long;
use crate::harness::{covering, plain, record, start};
use crate::support::app::{TestApp, one_model};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use test_case::test_case;

/// Number of messages of a session that takes several batches, so that all buffers reach their full size.
const FEW: usize = 1500;
const MANY: usize = 10_000;

/// Allowance for pages that the allocator keeps, which took 0 to 14 MB in twelve runs. A run that loads all messages at
/// once takes 42 to 84 MB more.
const SLACK_KB: u64 = 28 * 1024;

/// The installed service; killed on drop.
struct Service {
    child: Child,
    url: String,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Service {
    fn start(backend: &Backend, model: &ModelServer) -> Self {
        let variable = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        let mut command = Command::new(env!("CARGO_BIN_EXE_precis"));
        command.env_clear().env("DATABASE_URL", backend.url()).env(variable("server.bind"), "127.0.0.1:0");
        let model = one_model(&model.base_url());
        command.envs(model.iter().map(|(path, value)| (variable(path), value)));
        // A directory without a settings file.
        let folder = tempfile::tempdir().unwrap();
        let mut child = command.current_dir(folder.path()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut lines = stderr.lines().map(|line| line.expect("a line of the log"));
        let listening = lines.find_map(|line| {
            let line: Value = serde_json::from_str(&line).expect("a log in JSON");
            Some(line["message"].as_str()?.strip_prefix("listening on ")?.to_owned())
        });
        // The rest of the log must be read, or the process blocks.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, url: listening.expect("it says where it listens") }
    }

    /// Returns the peak memory of the process.
    fn peak_kb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    async fn consolidate(&self, app: &TestApp, session: &str, messages: usize) {
        let request = app.http.post(format!("{}/sessions/{session}/context", self.url));
        let answer: Value = request.send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["consolidation"]["outcome"], json!("consolidated"), "{answer}");
        assert_eq!(answer["coverage"]["summary_through"], messages - 20);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_usage_is_independent_of_number_of_messages(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[("consolidation.mode", "off")]).await;
    for (session, messages) in [("first", FEW), ("second", FEW), ("third", FEW), ("many", MANY)] {
        let given: Vec<String> = (1..=messages).map(long).collect();
        record(&app, session, &given).await;
        assert_eq!(plain(&app, session, &given).await.outcome(), "disabled");
    }
    let service = Service::start(&backend, &model);
    for session in ["first", "second", "third"] {
        service.consolidate(&app, session, FEW).await;
    }
    // The peak of the first run still depends on the state of the allocator, so three runs precede the comparison.
    let few = service.peak_kb();
    service.consolidate(&app, "many", MANY).await;
    let many = service.peak_kb();
    assert!(model.calls().len() > 10);
    assert!(many < few + SLACK_KB, "{few} kB for {FEW} messages, {many} kB for {MANY}");
}
