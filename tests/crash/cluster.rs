//! A Postgres server of a test's own, that the test may stop at once and start again.
//!
//! `scripts/postgres` makes it, with `fsync`, `synchronous_commit` and `full_page_writes` on. An immediate stop ends
//! the server's processes as a crash of them does: no checkpoint, no goodbye, and a start that recovers from the log.
//! What it can't model is a machine that loses power; that part of the promise is Postgres' own.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tokio::task::spawn_blocking;

/// A running server with an empty database. It ends with the value, or with the test.
#[derive(Debug)]
pub(crate) struct Cluster {
    script: Child,
    url: String,
    folder: PathBuf,
    ctl: PathBuf,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        spawn_blocking(|| {
            // The script ends the cluster when its command ends, and that ends when its input does: with this process,
            // however that ends.
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/postgres");
            let say = r#"printf '%s\n' "$PRECIS_TEST_POSTGRES" "$PRECIS_TEST_POSTGRES_FOLDER" "$PRECIS_TEST_POSTGRES_CTL"
                cat"#;
            let mut script = Command::new(script)
                .args(["sh", "-c", say])
                .env("PRECIS_TEST_POSTGRES_DURABLE", "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("scripts/postgres starts");
            let said = BufReader::new(script.stdout.take().expect("piped"));
            let mut lines = said.lines().map(|line| line.expect("scripts/postgres says where the server is"));
            let mut line = || lines.next().expect("scripts/postgres starts a server");
            let (url, folder, ctl) = (line(), line().into(), line().into());
            Self { script, url, folder, ctl }
        })
        .await
        .expect("started")
    }

    /// By way of its socket, whatever stands between it and others.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join(".s.PGSQL.5432")
    }

    /// Ends its processes at once.
    pub(crate) async fn stop_at_once(&self) {
        self.ctl(&["stop", "--mode=immediate"]).await;
    }

    /// Ends it in good order: sessions are told, and what they do is rolled back.
    pub(crate) async fn stop(&self) {
        self.ctl(&["stop", "--mode=fast"]).await;
    }

    pub(crate) async fn go_on(&self) {
        self.ctl(&["start"]).await;
    }

    async fn ctl(&self, arguments: &'static [&str]) {
        let mut command = Command::new(&self.ctl);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        let status = spawn_blocking(move || command.status()).await.expect("no panic").expect("it runs");
        assert!(status.success(), "pg_ctl {arguments:?}: {status}");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        if let Some(mut rest) = self.script.stdout.take() {
            let _ = rest.read_to_end(&mut Vec::new());
        }
        let _ = self.script.wait();
    }
}
