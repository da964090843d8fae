//! One process of the service, which a test kills and restarts as a supervisor would.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// A start may have to wait until the database is back.
const START_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Replica {
    folder: TempDir,
    environment: Vec<(String, String)>,
    running: Mutex<Option<(Child, String)>>,
    log: Arc<Mutex<Vec<String>>>,
}

/// Returns the binary of this build, or the one that `PRECIS_CRASH_BINARY` names.
fn binary() -> PathBuf {
    std::env::var_os("PRECIS_CRASH_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_precis").into(), PathBuf::from)
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Replica {
    /// Creates a stopped replica with these settings, given by their paths.
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        let name = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        let mut environment: Vec<_> =
            settings.iter().map(|(path, value)| (name(path), (*value).to_owned())).collect();
        environment.push((name("server.bind"), "127.0.0.1:0".to_owned()));
        let folder = TempDir::new().expect("a temporary folder");
        Self { folder, environment, running: Mutex::default(), log: Arc::default() }
    }

    /// Returns the address that it listens on; `None` while it is stopped.
    pub(crate) fn url(&self) -> Option<String> {
        self.running().as_ref().map(|(_, url)| url.clone())
    }

    /// Kills the process by SIGKILL. Returns `false` if it was not running.
    pub(crate) fn kill(&self) -> bool {
        let Some((mut child, _)) = self.running().take() else {
            return false;
        };
        child.kill().expect("killed");
        child.wait().expect("ended");
        true
    }

    /// Starts the process. It ends by itself if it cannot reach its database; then it is started again.
    pub(crate) async fn start(&self) {
        let started_at = Instant::now();
        while !self.start_once().await {
            let log = || self.log().join("\n");
            assert!(started_at.elapsed() < START_TIMEOUT, "the process does not start:\n{}", log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn start_once(&self) -> bool {
        let mut command = Command::new(binary());
        command.env_clear().envs(self.environment.iter().cloned()).current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("started");
        let stderr = child.stderr.take().expect("piped");
        let (send_url, url) = oneshot::channel();
        let log = Arc::clone(&self.log);
        std::thread::spawn(move || {
            let mut send_url = Some(send_url);
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some((_, rest)) = line.split_once("\"listening on ")
                    && let Some((url, _)) = rest.split_once('"')
                    && let Some(send_url) = send_url.take()
                {
                    let _ = send_url.send(url.to_owned());
                }
                log.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        if let Ok(url) = url.await {
            *self.running() = Some((child, url));
            true
        } else {
            let _ = child.kill();
            child.wait().expect("ended");
            false
        }
    }

    /// Returns the log lines of all its processes.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn running(&self) -> MutexGuard<'_, Option<(Child, String)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
