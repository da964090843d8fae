//! A Postgres server that a test can stop and restart.
//!
//! `scripts/postgres` creates it with `fsync`, `synchronous_commit` and `full_page_writes`. An immediate stop ends the
//! server's processes like a crash: without a checkpoint, so that the next start recovers from the log. It does not
//! simulate a machine that loses power; Postgres itself guarantees durability then.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tokio::task::spawn_blocking;

/// A running server with an empty database. It stops when the value is dropped or the test process ends.
#[derive(Debug)]
pub(crate) struct PostgresServer {
    script: Child,
    url: String,
    folder: PathBuf,
    ctl: PathBuf,
}

impl PostgresServer {
    pub(crate) async fn start() -> Self {
        spawn_blocking(|| {
            // The script stops the server when its command ends. The command ends at the end of its input, which
            // is also closed if this process is killed.
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/postgres");
            let command = r#"printf '%s\n' "$PRECIS_TEST_POSTGRES" "$PRECIS_TEST_POSTGRES_FOLDER" "$PRECIS_TEST_POSTGRES_CTL"
                cat"#;
            let mut script = Command::new(script)
                .args(["sh", "-c", command])
                .env("PRECIS_TEST_POSTGRES_DURABLE", "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("scripts/postgres starts");
            let stdout = BufReader::new(script.stdout.take().expect("piped"));
            let mut lines = stdout.lines().map(|line| line.expect("scripts/postgres prints the server's address"));
            let mut line = || lines.next().expect("scripts/postgres starts a server");
            let (url, folder, ctl) = (line(), line().into(), line().into());
            Self { script, url, folder, ctl }
        })
        .await
        .expect("started")
    }

    /// The URL of its socket, which bypasses the proxy.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join(".s.PGSQL.5432")
    }

    /// Ends the server processes like a crash.
    pub(crate) async fn stop_immediately(&self) {
        self.pg_ctl(&["stop", "--mode=immediate"]).await;
    }

    /// Stops the server in good order: connections are closed and their transactions are rolled back.
    pub(crate) async fn stop_gracefully(&self) {
        self.pg_ctl(&["stop", "--mode=fast"]).await;
    }

    pub(crate) async fn restart(&self) {
        self.pg_ctl(&["start"]).await;
    }

    async fn pg_ctl(&self, arguments: &'static [&str]) {
        let mut command = Command::new(&self.ctl);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        let status = spawn_blocking(move || command.status()).await.expect("no panic").expect("it runs");
        assert!(status.success(), "pg_ctl {arguments:?}: {status}");
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        if let Some(mut stdout) = self.script.stdout.take() {
            let _ = stdout.read_to_end(&mut Vec::new());
        }
        let _ = self.script.wait();
    }
}
