//! Random faults under load, with a check of all invariants after each fault.

use crate::ack_log::{AckLog, SessionAcks};
use crate::clients::{ClientLoad, ReplicaSet, is_plain_fork};
use crate::invariants::{check_final_context, check_session, check_synced_forks};
use crate::message_ids::summarise;
use crate::postgres_server::PostgresServer;
use crate::power_loss;
use crate::proxy::{Proxy, ProxyFault};
use crate::replica::Replica;
use crate::support::backend::temporary_folder;
use crate::support::factor::test_factor;
use crate::support::model_server::{Behaviour, ModelServer};
use fastrand::Rng;
use futures_util::future::join_all;
use sqlx::{Connection as _, PgConnection, SqliteConnection};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Kills of a run on SQLite until a loss of power has had an effect.
const MAX_MORE_KILLS: usize = 40;
/// Longest wait until the clients have sent each kind of rare request.
const MAX_WAIT_FOR_RARE_REQUESTS: Duration = Duration::from_mins(1);

/// A run over one database.
struct Run {
    name: &'static str,
    rng: Rng,
    service: Arc<ReplicaSet>,
    model: ModelServer,
    log: Arc<AckLog>,
    load: Option<ClientLoad>,
    writers: usize,
    /// The progress at the last check, by the number of the session.
    checked: BTreeMap<usize, usize>,
    /// The number of occurrences of each fault.
    faults: BTreeMap<&'static str, usize>,
    started_at: Instant,
}

impl Run {
    async fn start(name: &'static str, url: &str, replicas: usize, writers: usize) -> Self {
        let seed = std::env::var("PRECIS_CRASH_SEED");
        let seed = seed.map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("a number"));
        println!("{name}: PRECIS_CRASH_SEED={seed} repeats this run");
        let mut rng = Rng::with_seed(seed);
        let model = ModelServer::start().await;
        model.default(Behaviour::reply(summarise));
        let settings = [
            ("database.url", url),
            ("database.acquire_timeout", "2s"),
            ("database.max_connections", "6"),
            ("consolidation.threshold", "12"),
            ("consolidation.keep_recent", "4"),
            ("consolidation.summary_word_limit", "60"),
            ("consolidation.retry_initial", "20ms"),
            ("consolidation.retry_max", "100ms"),
            // Large, so that every context with omitted messages is an error.
            ("consolidation.max_history_messages", "100000"),
            ("llm.providers.scripted.base_url", &model.base_url()),
            ("llm.models.small.provider", "scripted"),
            ("llm.models.small.model", "scripted-1"),
            ("llm.models.small.timeout", "2s"),
            ("llm.models.small.retries", "0"),
            ("llm.models.small.breaker_min_calls", "1000"),
            ("llm.pools.default.models", "small"),
            ("retention.interval", "300ms"),
        ];
        let replicas: Vec<_> = (0..replicas).map(|_| Replica::new(&settings)).collect();
        join_all(replicas.iter().map(Replica::start)).await;
        let (service, log) = (Arc::new(ReplicaSet::new(replicas)), Arc::<AckLog>::default());
        let load = Some(ClientLoad::start(&service, &log, &mut rng, writers));
        let (checked, faults, started_at) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        Self { name, rng, service, model, log, load, writers, checked, faults, started_at }
    }

    fn count(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    fn occurrences(&self, fault: &str) -> usize {
        self.faults.get(fault).copied().unwrap_or(0)
    }

    async fn sleep(&mut self, millis: Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
    }

    /// Lets the clients work for a while. Sometimes the next call of a model fails or hangs.
    async fn work(&mut self) {
        match self.rng.usize(..4) {
            0 => self.model.push(Behaviour::fail(500, "down")),
            1 => self.model.push(Behaviour::Hang),
            _ => {}
        }
        self.sleep(100..500).await;
    }

    fn kill(&mut self, replica: usize) {
        if self.service.replicas[replica].kill() {
            self.count("kill");
        }
    }

    async fn restart_killed_replicas(&mut self) {
        let killed = self.service.replicas.iter().filter(|replica| replica.url().is_none());
        join_all(killed.map(Replica::start)).await;
    }

    /// Checks every session that has changed since its last check. The clients pause meanwhile.
    async fn check(&mut self) {
        let load = self.load.as_mut().expect("running");
        load.assert_running();
        load.set_paused(true);
        for session in self.log.sessions() {
            let messages = session.acks().progress();
            let is_unchanged = self.checked.get(&session.number) == Some(&messages);
            let is_known = session.acks().unknown.is_empty() && session.acks().rewind.is_none();
            if !is_unchanged || !is_known {
                check_session(&self.service, &session).await;
                self.checked.insert(session.number, messages);
            }
        }
        self.log.removals.check_some(&self.service, &mut self.rng).await;
        load.assert_running();
        load.set_paused(false);
    }

    /// Lets the clients work until they have rewound, forked, redacted and erased: on a slow machine they send few requests between
    /// the faults.
    async fn await_rare_requests(&self) {
        let sent = async {
            while !self.has_rare_requests() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(MAX_WAIT_FOR_RARE_REQUESTS, sent).await.expect("each kind is one of a few hundred requests");
    }

    /// Returns `true` if a session was rewound, forked by a fork and by a sync, and the removals have each kind.
    fn has_rare_requests(&self) -> bool {
        let has_fork = |is_plain: bool| {
            let mut sessions = self.log.sessions().into_iter();
            sessions
                .any(|session| session.acks().forks.iter().any(|fork| is_plain_fork(&fork.id) == is_plain))
        };
        let rewinds = self.service.rewinds.load(Ordering::Relaxed);
        rewinds > 0 && has_fork(true) && has_fork(false) && self.log.removals.has_each_kind()
    }

    /// Stops the load and checks every session once more.
    async fn finish(mut self) {
        self.await_rare_requests().await;
        self.check().await;
        self.load.take().expect("running").stop().await;
        let (mut exchanges, mut messages, mut forks) = (0, 0, 0);
        for session in self.log.sessions() {
            check_session(&self.service, &session).await;
            check_final_context(&self.service, &session).await;
            let acks = session.acks();
            assert!(acks.unknown.is_empty());
            exchanges += acks.acknowledged.len();
            messages += acks.acknowledged_messages();
            forks += acks.forks.len();
        }
        let removals = self.log.removals.check_all(&self.service).await;
        let synced_forks = check_synced_forks(&self.service).await;
        let rewinds = self.service.rewinds.load(Ordering::Relaxed);
        let (calls, sessions) = (self.model.calls().len(), self.log.sessions().len());
        println!(
            "{}: {:?}; {exchanges} exchanges with {messages} messages in {sessions} sessions, {} of them with an \
             unknown outcome at first; {rewinds} rewinds and {forks} forks, {synced_forks} of them by syncs; {removals}; {} contexts checked; {calls} \
             calls of the model; {:?}",
            self.name,
            self.faults,
            self.service.unknown_outcomes.load(Ordering::Relaxed),
            self.service.checked_contexts.load(Ordering::Relaxed),
            self.started_at.elapsed(),
        );
        assert!(calls > 0 && exchanges > 0, "the run did not test anything");
        assert!(rewinds > 0 && forks > 0 && synced_forks > 0, "no session was rewound or forked");
    }
}

/// Runs three processes over one Postgres server.
pub(crate) async fn run_on_postgres() {
    let server = PostgresServer::start().await;
    let proxy = Proxy::start(server.socket()).await;
    let mut run = Run::start("postgres", &proxy.url(), 3, 6).await;
    let kills = 8 * test_factor() as usize;
    let mut round = 0;
    while run.occurrences("kill") < kills {
        run.work().await;
        // The first nine rounds cause each fault once.
        let fault = if round < 9 { round } else { run.rng.usize(..9) };
        round += 1;
        let replica = run.rng.usize(..3);
        match fault {
            0 => {
                run.count("immediate stop");
                server.stop_immediately().await;
                run.sleep(1..300).await;
                server.restart().await;
            }
            1 => {
                run.count("graceful stop");
                server.stop_gracefully().await;
                run.kill(replica);
                server.restart().await;
            }
            2 => {
                run.count("cut connections");
                proxy.cut_connections();
            }
            3 => {
                run.count("dropped responses");
                proxy.set_fault(ProxyFault::DropResponses);
                run.sleep(20..200).await;
            }
            4 => {
                run.count("delay");
                proxy.set_fault(ProxyFault::Delay(Duration::from_millis(run.rng.u64(5..60))));
                run.sleep(100..500).await;
                run.kill(replica);
            }
            5 => {
                run.count("silence");
                proxy.set_fault(ProxyFault::Silence);
                run.sleep(50..500).await;
                run.kill(replica);
                proxy.cut_connections();
            }
            6 => (0..3).for_each(|replica| run.kill(replica)),
            _ => run.kill(replica),
        }
        run.sleep(1..100).await;
        proxy.set_fault(ProxyFault::None);
        run.restart_killed_replicas().await;
        // Killed processes leave leases that last some seconds. Running ones may lose a lease if a clock jumps.
        let mut connection = PgConnection::connect(server.url()).await.expect("connected");
        let locked = "SELECT count(*) FROM sessions WHERE lease_until > now() + interval '5 seconds'";
        let locked: i64 = sqlx::query_scalar(locked).fetch_one(&mut connection).await.expect("a number");
        assert_eq!(locked, 0, "a session is locked for more than five seconds");
        let expire = sqlx::query("UPDATE sessions SET lease_until = now() WHERE lease_until > now()");
        expire.execute(&mut connection).await.expect("expired");
        run.check().await;
    }
    run.finish().await;
}

/// Runs one process over one SQLite file.
pub(crate) async fn run_on_sqlite() {
    let folder = temporary_folder();
    let file = folder.path().join("precis.db");
    let url = format!("sqlite://{}", file.display());
    let mut run = Run::start("sqlite", &url, 1, 4).await;
    let kills = 6 * test_factor() as usize;
    let mut round = 0;
    // A loss of power has no effect if the log was restarted just before it, as by each erasure.
    while run.occurrences("kill") < kills || run.occurrences("power loss") == 0 {
        assert!(
            run.occurrences("kill") < kills + MAX_MORE_KILLS,
            "no power was lost after the log had grown"
        );
        run.work().await;
        round += 1;
        if round % 2 == 0 {
            run.kill(0);
        } else {
            lose_power(&mut run, &file).await;
        }
        run.restart_killed_replicas().await;
        let mut connection = SqliteConnection::connect(&url).await.expect("connected");
        let locked = "SELECT count(*) FROM sessions WHERE lease_until > (unixepoch('subsec') + 5) * 1000000";
        let locked: i64 = sqlx::query_scalar(locked).fetch_one(&mut connection).await.expect("a number");
        assert_eq!(locked, 0, "a session is locked for more than five seconds");
        let expire = sqlx::query("UPDATE sessions SET lease_until = 1 WHERE lease_until > 1");
        expire.execute(&mut connection).await.expect("expired");
        connection.close().await.expect("closed");
        run.check().await;
    }
    let (service, log) = (Arc::clone(&run.service), Arc::clone(&run.log));
    run.finish().await;
    log.removals.check_files(&service, folder.path()).await;
}

/// Kills the process and removes bytes that may not have reached the disk.
async fn lose_power(run: &mut Run, file: &Path) {
    // The acknowledgements are read before the log, so that the log contains all of them.
    let sessions = run.log.sessions();
    let earlier: BTreeMap<usize, SessionAcks> =
        sessions.iter().map(|session| (session.number, session.acks().clone())).collect();
    let earlier_removals = run.log.removals.states();
    let synced = power_loss::wal_extent(file);
    run.sleep(1..60).await;
    run.kill(0);
    // Stopping the load waits for responses that are still on their way to a client.
    run.load.take().expect("running").stop().await;
    if synced.is_some_and(|synced| power_loss::lose_power(file, &synced, &mut run.rng)) {
        run.count("power loss");
        for session in run.log.sessions() {
            session.forget_since(earlier.get(&session.number).unwrap_or(&SessionAcks::default()));
        }
        run.log.removals.forget_since(&earlier_removals);
    }
    run.load = Some(ClientLoad::start(&run.service, &run.log, &mut run.rng, run.writers));
}
