//! One process of the service, started again whenever it was killed, as whatever watches over it would.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// How long a start may take, with a database that comes back meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Replica {
    folder: TempDir,
    environment: Vec<(String, String)>,
    running: Mutex<Option<(Child, String)>>,
    log: Arc<Mutex<Vec<String>>>,
}

/// The one of this build, or another, such as a release.
fn binary() -> PathBuf {
    std::env::var_os("PRECIS_CRASH_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_precis").into(), PathBuf::from)
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Replica {
    /// Not yet running. The settings are given by their paths.
    pub(crate) fn new(settings: &[(&str, String)]) -> Self {
        let name = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        let mut environment: Vec<_> =
            settings.iter().map(|(path, value)| (name(path), value.clone())).collect();
        environment.push((name("server.bind"), "127.0.0.1:0".to_owned()));
        let folder = TempDir::new().expect("a temporary folder");
        Self { folder, environment, running: Mutex::default(), log: Arc::default() }
    }

    /// Where it listens; `None` while it is down.
    pub(crate) fn url(&self) -> Option<String> {
        self.running().as_ref().map(|(_, url)| url.clone())
    }

    /// Ends it by SIGKILL, wherever it is. True where there was anything to end.
    pub(crate) fn kill(&self) -> bool {
        let Some((mut child, _)) = self.running().take() else {
            return false;
        };
        child.kill().expect("it is killed");
        child.wait().expect("it has ended");
        true
    }

    /// Starts it. It ends by itself where it can't reach its database: then it is started again.
    pub(crate) async fn start(&self) {
        let began = Instant::now();
        while !self.start_once().await {
            let log = || self.log().join("\n");
            assert!(began.elapsed() < PATIENCE, "it doesn't start:\n{}", log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn start_once(&self) -> bool {
        let mut command = Command::new(binary());
        command.env_clear().envs(self.environment.iter().cloned()).current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let stderr = child.stderr.take().expect("piped");
        let (says, said) = oneshot::channel();
        let log = Arc::clone(&self.log);
        std::thread::spawn(move || {
            let mut says = Some(says);
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some((_, rest)) = line.split_once("\"listening on ")
                    && let Some((url, _)) = rest.split_once('"')
                    && let Some(says) = says.take()
                {
                    let _ = says.send(url.to_owned());
                }
                log.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        if let Ok(url) = said.await {
            *self.running() = Some((child, url));
            true
        } else {
            let _ = child.kill();
            child.wait().expect("it has ended");
            false
        }
    }

    /// All that its processes have logged.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn running(&self) -> MutexGuard<'_, Option<(Child, String)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
