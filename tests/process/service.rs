//! Runs the binary as a child process with its own environment and folder.

use crate::support::backend::{Backend, temporary_folder};
use crate::support::client::TestClient;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqliteConnection};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir, TempPath};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Timeout for events that normally take no time. Machines that run tests are busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

impl Backend {
    /// Runs a statement directly in the database. Returns the number of changed rows.
    pub(crate) async fn execute(&self, postgres: &str, sqlite: &str) -> u64 {
        match self {
            Self::Postgres(database) => {
                let mut connection = PgConnection::connect(&database.admin_url()).await.expect("connected");
                let statement = sqlx::query(AssertSqlSafe(postgres.to_owned()));
                statement.execute(&mut connection).await.expect(postgres).rows_affected()
            }
            Self::Sqlite(_) => {
                let mut connection = SqliteConnection::connect(&self.url()).await.expect("connected");
                let statement = sqlx::query(AssertSqlSafe(sqlite.to_owned()));
                statement.execute(&mut connection).await.expect(sqlite).rows_affected()
            }
        }
    }
}

/// Compiles C code to a library that a process can preload. Docker does not permit to execute files in `/dev/shm`.
pub(crate) fn compile_library(code: &str) -> TempPath {
    let library = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file").into_temp_path();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-x", "c", "-", "-ldl", "-o"]).arg(&library).stdin(Stdio::piped());
    let mut compiler = compiler.spawn().expect("a C compiler");
    compiler.stdin.take().expect("piped").write_all(code.as_bytes()).expect("written");
    assert!(compiler.wait().expect("waited for").success());
    library
}

/// A command of precis that has not been started.
pub(crate) struct Precis {
    folder: TempDir,
    command: Command,
}

impl Precis {
    /// Creates a command in an empty folder with an empty environment.
    pub(crate) fn new() -> Self {
        Self::started_by(Command::new(env!("CARGO_BIN_EXE_precis")))
    }

    /// Creates a command that uses this database.
    pub(crate) fn on(backend: &Backend) -> Self {
        Self::new().env("DATABASE_URL", &backend.url())
    }

    /// Creates a command that is started by another program, which replaces itself with precis.
    pub(crate) fn started_by(mut command: Command) -> Self {
        let folder = temporary_folder();
        command.env_clear().current_dir(folder.path()).stdin(Stdio::null());
        Self { folder, command }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn args<'a>(mut self, args: impl IntoIterator<Item = &'a str>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets a setting by its path in the environment.
    pub(crate) fn set(self, path: &str, value: &str) -> Self {
        let name = format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        self.env(&name, value)
    }

    /// Writes a file into the folder.
    pub(crate) fn file(self, name: &str, text: &str) -> Self {
        std::fs::write(self.folder().join(name), text).expect("written");
        self
    }

    /// Configures a single model at `base_url`.
    pub(crate) fn model(self, base_url: &str) -> Self {
        self.set("llm.providers.scripted.base_url", base_url)
            .set("llm.models.small.provider", "scripted")
            .set("llm.models.small.model", "scripted-1")
            // Every request is one call, and the circuit breaker stays closed.
            .set("llm.models.small.retries", "0")
            .set("llm.models.small.breaker_min_calls", "1000")
            .set("llm.pools.default.models", "small")
    }

    /// Runs the command until it exits.
    pub(crate) async fn run(&mut self) -> CommandResult {
        let mut child = ChildProcess::start(&mut self.command);
        let (code, _) = child.ended().await;
        CommandResult {
            code,
            stdout: child.stdout.lines().join("\n"),
            stderr: child.stderr.lines().join("\n"),
        }
    }

    /// Starts the service on a free port and waits until it listens.
    pub(crate) async fn start(self) -> Process {
        const QUEUE_TIMEOUT: &str = "PRECIS__LIMITS__QUEUE_TIMEOUT";
        let mut precis = self.env("PRECIS__SERVER__BIND", "127.0.0.1:0");
        // Otherwise a busy machine looks like overload.
        if !precis.command.get_envs().any(|(name, _)| name == QUEUE_TIMEOUT) {
            precis = precis.env(QUEUE_TIMEOUT, "30s");
        }
        let child = ChildProcess::start(&mut precis.command);
        let client = TestClient::new(String::new());
        let mut process = Process { child, client, folder: precis.folder };
        let listening = process.wait_for_log("listening on ").await;
        let message = listening["message"].as_str().expect("a message");
        process.client.url = message.trim_start_matches("listening on ").to_owned();
        process
    }
}

/// The output of a process, read line by line.
#[derive(Clone)]
struct Lines {
    lines: Arc<Mutex<Vec<String>>>,
    /// Notifies about each line; `true` at the end of the output.
    ended: watch::Sender<bool>,
}

impl Lines {
    fn read(from: impl Read + Send + 'static) -> Self {
        let read = Self { lines: Arc::default(), ended: watch::Sender::new(false) };
        let lines = read.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                lines.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                lines.ended.send_replace(false);
            }
            lines.ended.send_replace(true);
        });
        read
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A child process, which is killed on drop.
struct ChildProcess {
    child: Child,
    stdout: Lines,
    stderr: Lines,
}

impl ChildProcess {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let stdout = Lines::read(child.stdout.take().expect("piped"));
        let stderr = Lines::read(child.stderr.take().expect("piped"));
        Self { child, stdout, stderr }
    }

    /// Waits until the process exits. Returns its exit status and the time; the status is `None` after a signal.
    async fn ended(&mut self) -> (Option<i32>, Duration) {
        let began = Instant::now();
        for lines in [&self.stdout, &self.stderr] {
            // The pipes close when the process exits.
            let mut ended = lines.ended.subscribe();
            let ended = timeout(SOON, ended.wait_for(|ended| *ended)).await;
            assert!(ended.is_ok(), "it has not ended:\n{}", self.stderr.lines().join("\n"));
        }
        (self.child.wait().expect("waited for").code(), began.elapsed())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The exit status and the output of a command.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CommandResult {
    /// Returns standard output. Asserts that the command succeeded.
    pub(crate) fn stdout_of_success(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Returns standard error. Asserts that the command failed and that standard output is empty.
    pub(crate) fn stderr_of_failure(self) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(1), ""), "{}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self.stderr
    }
}

/// A running service, which is killed on drop.
pub(crate) struct Process {
    child: ChildProcess,
    client: TestClient,
    pub(crate) folder: TempDir,
}

impl Deref for Process {
    type Target = TestClient;

    fn deref(&self) -> &TestClient {
        &self.client
    }
}

impl Process {
    /// Returns the lines of the log so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.child.stderr.lines()
    }

    /// Waits for a line whose message contains the text.
    pub(crate) async fn wait_for_log(&self, text: &str) -> Value {
        let has = |line: &Value| line["message"].as_str().is_some_and(|message| message.contains(text));
        self.wait_for_line(text, has).await
    }

    /// Waits for a line that meets the condition; `name` is for the error message.
    pub(crate) async fn wait_for_line(&self, name: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let find = || {
            let lines = self.log().into_iter().filter_map(|line| serde_json::from_str::<Value>(&line).ok());
            lines.into_iter().find(&is_it)
        };
        let mut seen = self.child.stderr.ended.subscribe();
        let found = timeout(SOON, async {
            loop {
                let ended = *seen.borrow_and_update();
                match find() {
                    Some(line) => return Some(line),
                    None if ended => return None,
                    None => seen.changed().await.expect("the sender is ours"),
                }
            }
        });
        let found = found.await.ok().flatten();
        found.unwrap_or_else(|| panic!("no {name:?} in the log:\n{}", self.log().join("\n")))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.child.id()
    }

    /// Sends a signal: `TERM`, `INT` or `KILL`.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.id().to_string();
        let sent = Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", signal, &pid]).status();
        assert!(sent.expect("a shell").success());
    }

    /// Waits until the process exits. Returns its exit status and the time; the status is `None` after a signal.
    pub(crate) async fn ended(&mut self) -> (Option<i32>, Duration) {
        self.child.ended().await
    }
}

/// Returns `count` messages of a conversation, questions and answers alternately.
pub(crate) fn messages(count: usize) -> Vec<Value> {
    let message = |index| match index % 2 {
        0 => {
            json!({"role": "user", "content": format!("Question {index}: which plan do we take for subject {index}?")})
        }
        _ => {
            json!({"role": "assistant", "content": format!("Answer {index}: the team of subject {index} took plan {index}.")})
        }
    };
    (0..count).map(message).collect()
}

/// Returns the outcome of consolidation. Asserts that the context covers every message exactly once.
pub(crate) fn outcome(context: &Value, last_seq: u64) -> &str {
    let coverage = &context["coverage"];
    assert_eq!(coverage["last_seq"], last_seq, "{coverage}");
    assert_eq!(coverage["omitted"], json!([]), "{coverage}");
    let through = coverage["summary_through"].as_u64().expect("a number");
    assert_eq!(coverage["verbatim_from"], through + 1, "{coverage}");
    let messages = context["messages"].as_array().expect("a list");
    let system = messages.iter().filter(|message| message["role"] == "system").count();
    assert_eq!(messages.len() - system, usize::try_from(last_seq - through).expect("small"));
    context["consolidation"]["outcome"].as_str().expect("a word")
}
