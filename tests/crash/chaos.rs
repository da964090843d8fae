//! Fault after fault, under load, with a look at everything after each.

use crate::chance::Chance;
use crate::check::{check, context};
use crate::cluster::Cluster;
use crate::ledger::{Known, Ledger};
use crate::load::{Load, Service};
use crate::names::summarise;
use crate::power;
use crate::proxy::{Proxy, Weather};
use crate::replica::Replica;
use crate::support::model_server::{Behaviour, ModelServer};
use futures_util::future::join_all;
use sqlx::{Connection as _, PgConnection, SqliteConnection};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tokio::time::{Instant, sleep};

/// Kills of a run, at least: those of `PRECIS_CRASH_KILLS`, or as many as a suite can afford.
pub(crate) fn kills(few: usize) -> usize {
    std::env::var("PRECIS_CRASH_KILLS").map_or(few, |kills| kills.parse().expect("a number"))
}

/// A run over one store, whatever that is.
pub(crate) struct Run {
    pub(crate) chance: Chance,
    pub(crate) service: Arc<Service>,
    model: ModelServer,
    ledger: Arc<Ledger>,
    load: Option<Load>,
    workers: usize,
    /// By the session's number: its messages when it was last looked at.
    checked: BTreeMap<usize, usize>,
    /// How often each fault happened.
    faults: BTreeMap<&'static str, usize>,
    began: Instant,
}

impl Run {
    pub(crate) async fn start(name: &str, url: &str, replicas: usize, workers: usize) -> Self {
        let mut chance = Chance::of_run(name);
        let model = ModelServer::start().await;
        model.default(Behaviour::reply(summarise));
        let set = |path: &'static str, value: &str| (path, value.to_owned());
        let settings = [
            set("database.url", url),
            set("database.acquire_timeout", "2s"),
            set("database.max_connections", "6"),
            set("consolidation.threshold", "12"),
            set("consolidation.keep_recent", "4"),
            set("consolidation.summary_word_limit", "60"),
            set("consolidation.retry_initial", "20ms"),
            set("consolidation.retry_max", "100ms"),
            // So that a context that leaves something out is wrong, whatever was in its way.
            set("consolidation.max_history_messages", "100000"),
            set("llm.providers.scripted.base_url", &model.base_url()),
            set("llm.models.small.provider", "scripted"),
            set("llm.models.small.model", "scripted-1"),
            set("llm.models.small.timeout", "2s"),
            set("llm.models.small.retries", "0"),
            set("llm.models.small.breaker_min_calls", "1000"),
            set("llm.pools.default.models", "small"),
        ];
        let replicas: Vec<_> = (0..replicas).map(|_| Replica::new(&settings)).collect();
        join_all(replicas.iter().map(Replica::start)).await;
        let (service, ledger) = (Arc::new(Service::new(replicas)), Arc::<Ledger>::default());
        let load = Some(Load::start(&service, &ledger, &mut chance, workers));
        let (checked, faults, began) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        Self { chance, service, model, ledger, load, workers, checked, faults, began }
    }

    pub(crate) fn count(&mut self, fault: &'static str) -> usize {
        let count = self.faults.entry(fault).or_default();
        *count += 1;
        *count
    }

    pub(crate) fn how_often(&self, fault: &str) -> usize {
        self.faults.get(fault).copied().unwrap_or(0)
    }

    /// Lets the clients work for a while, and a model fail or hang now and then.
    pub(crate) async fn work(&mut self) {
        match self.chance.below(4) {
            0 => self.model.push(Behaviour::fail(500, "down")),
            1 => self.model.push(Behaviour::Hang),
            _ => {}
        }
        sleep(self.chance.millis(100..500)).await;
    }

    /// Kills a replica, at once.
    pub(crate) fn kill(&mut self, replica: usize) {
        if self.service.replicas[replica].kill() {
            self.count("kill");
        }
    }

    /// Starts whatever is down.
    pub(crate) async fn heal(&mut self) {
        let down = self.service.replicas.iter().filter(|replica| replica.url().is_none());
        join_all(down.map(Replica::start)).await;
    }

    /// Looks at every session that has changed, while its clients rest.
    pub(crate) async fn check(&mut self) {
        let load = self.load.as_mut().expect("at work");
        load.look();
        load.rest(true);
        for book in self.ledger.from(0) {
            let messages = book.known().messages;
            let is_known = self.checked.get(&book.number) == Some(&messages);
            if !is_known || !book.known().unknown.is_empty() {
                check(&self.service, &book).await;
                self.checked.insert(book.number, messages);
            }
        }
        load.look();
        load.rest(false);
    }

    /// Ends the load and looks at every session once more.
    pub(crate) async fn finish(mut self, name: &str) {
        self.check().await;
        self.load.take().expect("at work").stop().await;
        let (mut exchanges, mut messages) = (0, 0);
        for book in self.ledger.from(0) {
            check(&self.service, &book).await;
            context(&self.service, &book).await;
            let known = book.known();
            assert!(known.unknown.is_empty());
            exchanges += known.acknowledged.len();
            messages += known.messages;
        }
        let (calls, sessions) = (self.model.calls().len(), self.ledger.from(0).len());
        println!(
            "{name}: {:?}; {exchanges} exchanges with {messages} messages in {sessions} sessions, {} of them of unknown \
             outcome at first; {} contexts checked; {calls} calls of the model; {:?}",
            self.faults,
            self.service.unknown(),
            self.service.contexts(),
            self.began.elapsed(),
        );
        assert!(calls > 0 && exchanges > 0, "a run in which nothing happens shows nothing");
    }
}

/// Three processes over one Postgres.
pub(crate) async fn postgres() {
    let cluster = Cluster::start().await;
    let proxy = Proxy::start(cluster.socket()).await;
    let mut run = Run::start("postgres", &proxy.url(), 3, 6).await;
    let kills = kills(8);
    let mut round = 0;
    while run.how_often("kill") < kills {
        run.work().await;
        // The short form meets each of them as well.
        let fault = if round < 9 { round } else { run.chance.below(9) };
        round += 1;
        let replica = run.chance.below(3);
        match fault {
            0 => {
                run.count("stop at once");
                cluster.stop_at_once().await;
                sleep(run.chance.millis(1..300)).await;
                cluster.go_on().await;
            }
            1 => {
                run.count("stop");
                cluster.stop().await;
                run.kill(replica);
                cluster.go_on().await;
            }
            2 => {
                run.count("cut");
                proxy.cut();
            }
            3 => {
                run.count("lost answers");
                proxy.set(Weather::LoseAnswers);
                sleep(run.chance.millis(20..200)).await;
            }
            4 => {
                run.count("delay");
                proxy.set(Weather::Slow(run.chance.millis(5..60)));
                sleep(run.chance.millis(100..500)).await;
                run.kill(replica);
            }
            5 => {
                run.count("silence");
                proxy.set(Weather::Still);
                sleep(run.chance.millis(50..500)).await;
                run.kill(replica);
                proxy.cut();
            }
            6 => (0..3).for_each(|replica| run.kill(replica)),
            _ => run.kill(replica),
        }
        sleep(run.chance.millis(1..100)).await;
        proxy.set(Weather::Fair);
        run.heal().await;
        // The leases of the dead end in half a minute; and those of the living may end early, when a clock jumps.
        let mut connection = PgConnection::connect(cluster.url()).await.expect("connected");
        let expired = sqlx::query("UPDATE sessions SET lease_until = now() WHERE lease_until > now()");
        expired.execute(&mut connection).await.expect("expired");
        run.check().await;
    }
    run.finish("postgres").await;
}

/// One process over one SQLite file.
pub(crate) async fn sqlite() {
    let parent = Some(Path::new("/dev/shm")).filter(|shm| shm.is_dir());
    let folder = parent.map_or_else(tempfile::tempdir, tempfile::tempdir_in).expect("a temporary folder");
    let file = folder.path().join("precis.db");
    let url = format!("sqlite://{}", file.display());
    let mut run = Run::start("sqlite", &url, 1, 4).await;
    let kills = kills(6);
    let mut round = 0;
    while run.how_often("kill") < kills {
        run.work().await;
        round += 1;
        if round % 2 == 0 {
            run.kill(0);
        } else {
            // In this order: what is noted as acknowledged is in the log by then.
            let noted: BTreeMap<usize, Known> =
                run.ledger.from(0).iter().map(|book| (book.number, book.known().clone())).collect();
            let then = power::reached(&file);
            sleep(run.chance.millis(1..60)).await;
            run.kill(0);
            // An answer that was sent may still be on its way to its client.
            run.load.take().expect("at work").stop().await;
            if then.is_some_and(|then| power::lose(&file, &then, &mut run.chance)) {
                run.count("power lost");
                for book in run.ledger.from(0) {
                    book.forget_since(noted.get(&book.number).unwrap_or(&Known::default()));
                }
            }
            let (service, ledger) = (Arc::clone(&run.service), Arc::clone(&run.ledger));
            run.load = Some(Load::start(&service, &ledger, &mut run.chance, run.workers));
        }
        run.heal().await;
        let mut connection = SqliteConnection::connect(&url).await.expect("connected");
        let expired = sqlx::query("UPDATE sessions SET lease_until = 1 WHERE lease_until > 1");
        expired.execute(&mut connection).await.expect("expired");
        connection.close().await.expect("closed");
        run.check().await;
    }
    let lost = run.how_often("power lost");
    assert!(lost > 0, "no loss of power met a log that had grown");
    run.finish("sqlite").await;
}
