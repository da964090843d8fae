//! The promise as a property: whatever comes, every message is covered exactly once, and no tool call is parted.
//!
//! [`oracle`] says what has to come out of each step, to the letter; it is written after the contract, message by
//! message, where the service counts ranges. [`story`] makes up conversations, failures and restores.

mod oracle;
mod story;

use crate::harness::{Answer, consolidate, context, covering, is_meta, record, start, state, until};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use oracle::Oracle;
use proptest::test_runner::{Config, TestRunner};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::cell::Cell;
use std::time::Duration;
use story::{Mode, Op, Story, Trouble};
use test_case::test_case;
use tokio::runtime::Handle;

/// Of each store; the environment variable `PRECIS_TEST_CASES` is for a longer search.
const CASES: u32 = 24;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_message_is_covered_once_whatever_comes(backend: Backend) {
    let cases = std::env::var("PRECIS_TEST_CASES").map_or(CASES, |cases| cases.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let handle = Handle::current();
    let sessions = Cell::new(0);
    tokio::task::block_in_place(|| {
        let told = TestRunner::new(config).run(&story::stories(), |story| {
            sessions.set(sessions.get() + 1);
            handle.block_on(tell(&backend, &format!("case-{}", sessions.get()), story));
            Ok(())
        });
        told.unwrap_or_else(|failure| panic!("{failure}"));
    });
}

/// Tells a story to a service, and checks each answer against the oracle's.
async fn tell(backend: &Backend, session: &str, story: Story) {
    let model = ModelServer::start().await;
    let set = story.setup.settings();
    let set: Vec<_> = set.iter().map(|(path, value)| (*path, value.as_str())).collect();
    let app = start(backend, &model, &set).await;
    let mut teller = Teller { app, model, session, oracle: Oracle::new(story.setup), hung: false };
    for op in story.ops {
        match op {
            Op::Write(pieces) => {
                let from = teller.oracle.history.len();
                for piece in pieces {
                    teller.oracle.history.push(piece);
                }
                let written = &teller.oracle.history.texts()[from..];
                record(&teller.app, session, written).await;
            }
            Op::Context(mode, trouble) => teller.context(mode, trouble).await,
            Op::Consolidate(trouble) => teller.consolidate(trouble).await,
            Op::Restore(which) => teller.restore(which.index(teller.oracle.revisions.len() + 1)).await,
        }
        teller.check().await;
    }
    teller.app.stop().await;
}

struct Teller<'a> {
    app: TestApp,
    model: ModelServer,
    session: &'a str,
    oracle: Oracle,
    hung: bool,
}

impl Teller<'_> {
    async fn context(&mut self, mode: Mode, trouble: Trouble) {
        let trouble = self.script(trouble);
        let (expected, run) = self.oracle.context(mode, trouble);
        // A run in the background that has nothing to do leaves no trace to wait for: so not in the background.
        let idle = run.as_ref().is_some_and(|run| run.revisions.is_empty() && !run.failed);
        let (mode, expected) =
            if mode == Mode::Background && idle { (Mode::Inline, "not_due") } else { (mode, expected) };
        let given = self.oracle.history.texts().to_vec();
        let before = self.oracle.cursor;
        if let Some(run) = run {
            self.oracle.carry(run);
        }
        let answer = context(&self.app, self.session, &json!({"mode": mode.name()}), &given).await;
        assert_eq!(answer.outcome(), expected, "{:?}", answer.consolidation);
        let scheduled = answer.outcome() == "scheduled";
        assert_eq!(answer.coverage.summary_through, if scheduled { before } else { self.oracle.cursor });
        self.oracle.assert_verbatim(&answer);
        if scheduled {
            until(&self.app, self.session, |state| self.oracle.is_reached(state)).await;
        }
    }

    async fn consolidate(&mut self, trouble: Trouble) {
        let trouble = self.script(trouble);
        let run = self.oracle.run(true, trouble);
        let expected = match (run.failed, run.revisions.last()) {
            (true, _) => StatusCode::BAD_GATEWAY,
            (false, Some(_)) => StatusCode::CREATED,
            (false, None) => StatusCode::OK,
        };
        self.oracle.carry(run);
        let (status, body) = consolidate(&self.app, self.session).await;
        assert_eq!(status, expected, "{body}");
        if status == StatusCode::CREATED {
            assert_eq!(body["revision"], self.oracle.revisions.len());
        }
    }

    async fn restore(&mut self, revision: usize) {
        let path = format!("/sessions/{}/revisions/{revision}/restore", self.session);
        let made = self.app.post(&path, &serde_json::json!({})).await;
        self.oracle.restore(revision);
        assert_eq!(
            (&made["kind"], &made["revision"]),
            (&json!("restore"), &json!(self.oracle.revisions.len()))
        );
    }

    /// Sets the model up for the next step. It hangs once in a story: that takes its time.
    fn script(&mut self, trouble: Trouble) -> Trouble {
        let trouble = match trouble {
            Trouble::Hang if self.hung || !self.oracle.setup.impatient => Trouble::Status,
            trouble => trouble,
        };
        self.hung |= trouble == Trouble::Hang;
        self.model.default(behaviour(trouble));
        trouble
    }

    /// The session and the revisions of this step are what the oracle says.
    async fn check(&mut self) {
        let oracle = &mut self.oracle;
        let now = state(&self.app, self.session).await;
        assert_eq!(now["last_seq"], oracle.history.len());
        assert_eq!(
            (&now["cursor"], &now["summary"]["text"]),
            (&json!(oracle.cursor), &json!(oracle.summary))
        );
        assert_eq!(now["summary"]["revision"], oracle.revisions.len());
        assert_eq!(now["consolidation"]["failures"], oracle.failures);
        assert_eq!(now["tokens"]["tail"], oracle.tail_tokens(oracle.cursor));
        assert_ne!(now["consolidation"]["state"], "running");
        while oracle.checked < oracle.revisions.len() {
            oracle.checked += 1;
            let path = format!("/sessions/{}/revisions/{}", self.session, oracle.checked);
            oracle.revisions[oracle.checked - 1].assert_is(&self.app.get(&path).await);
        }
    }
}

fn behaviour(trouble: Trouble) -> Behaviour {
    let half = || "HALF".to_owned();
    let meta = |text: &'static str| {
        Behaviour::reply(move |call| if is_meta(call) { text.to_owned() } else { covering(call) })
    };
    match trouble {
        Trouble::No => Behaviour::reply(covering),
        Trouble::Status => Behaviour::fail(500, "down"),
        Trouble::Hang => Behaviour::Hang,
        Trouble::Empty => Behaviour::answer(""),
        Trouble::BareNone => Behaviour::answer("None"),
        Trouble::BreakOff => Behaviour::BreakOff(half()),
        Trouble::EndEarly => Behaviour::EndEarly(half()),
        Trouble::Filtered => Behaviour::Finish(half(), "content_filter"),
        Trouble::CutOff => Behaviour::Finish(half(), "length"),
        Trouble::Garbage => Behaviour::garbage(),
        Trouble::MetaEmpty => meta(" "),
        Trouble::MetaLonger => {
            let longer = |words: usize| "more ".repeat(words);
            Behaviour::reply(move |call| {
                if is_meta(call) { longer(call.user().split(' ').count()) } else { covering(call) }
            })
        }
    }
}

impl story::Setup {
    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut set = vec![
            ("consolidation.threshold", self.threshold.to_string()),
            ("consolidation.keep_recent", self.keep_recent.to_string()),
            ("consolidation.max_history_messages", self.most.to_string()),
            ("consolidation.summary_word_limit", self.word_limit.to_string()),
            ("consolidation.on_failure", if self.recent { "recent" } else { "verbatim" }.to_owned()),
        ];
        if let Some(most) = self.max_tail_tokens {
            set.push(("consolidation.max_tail_tokens", most.to_string()));
        }
        // For as long as the story lasts, or not at all.
        let wait = if self.waits { "1h" } else { "1us" };
        set.extend([
            ("consolidation.retry_initial", wait.to_owned()),
            ("consolidation.retry_max", wait.to_owned()),
        ]);
        if self.impatient {
            set.push(("llm.models.small.timeout", format!("{:?}", Duration::from_secs(2))));
        }
        set
    }
}

impl Oracle {
    fn is_reached(&self, state: &Value) -> bool {
        state["consolidation"]["state"] != "running"
            && state["summary"]["revision"] == self.revisions.len()
            && state["consolidation"]["failures"] == self.failures
    }

    /// What goes verbatim: within the bound, for a reason, and no result without its call.
    fn assert_verbatim(&self, answer: &Answer) {
        let (setup, coverage) = (&self.setup, &answer.coverage);
        let (tail, sent) = (self.history.len() - coverage.summary_through, answer.verbatim().len());
        let only_recent = setup.recent && answer.outcome() == "failed";
        assert!(sent <= setup.most, "{sent} messages, {coverage:?}");
        for omitted in &coverage.omitted {
            let reason = if only_recent && omitted.reason == "on_failure" { true } else { tail > setup.most };
            assert!(reason, "{coverage:?}");
        }
        if tail <= setup.most {
            assert!(sent >= if only_recent { tail.min(setup.keep_recent) } else { tail }, "{coverage:?}");
        }
        assert_eq!(answer.system().contains("## Notice"), tail * 5 >= setup.most * 4, "a tail of {tail}");
        for (index, call) in self.history.calls().iter().enumerate() {
            let from = coverage.verbatim_from;
            let parted = call.seq < from && call.result.is_some_and(|result| result >= from);
            let given_up = call.seq <= coverage.summary_through && self.given_up.contains(&index);
            assert!(!parted || given_up, "{call:?}: {coverage:?}");
        }
    }
}
