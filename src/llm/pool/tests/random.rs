//! Whatever models do, in whatever order, to the millisecond: over a clock that only moves when everybody waits.

use super::{entry, model, prompts};
use crate::llm::circuit_breaker::CircuitBreakerPolicy;
use crate::llm::error::TimeoutPhase;
use crate::llm::model::{ModelSpec, QueuePolicy, RetryPolicy};
use crate::llm::pool::{ModelPools, PoolSpec, PoolStrategy as Order};
use crate::llm::provider::{Completion, Finish, Provider, Request};
use crate::llm::{Llm as _, ModelError, Task, Usage};
use async_trait::async_trait;
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// What a model does with one call, after so many milliseconds.
#[derive(Clone, Debug)]
struct Move {
    after: u64,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Good,
    CutOff,
    Broken,
    Refused,
    Overloaded(Option<u64>),
    Unauthorized,
    PromptTooLong,
}

/// Plays one move after another, from the beginning again after the last, and notes when.
#[derive(Debug)]
struct Player {
    moves: Vec<Move>,
    turn: AtomicUsize,
    calls: Arc<Mutex<Vec<(Instant, Instant)>>>,
    at_once: AtomicUsize,
    most_at_once: Arc<AtomicUsize>,
}

/// One less when the call ends, however it does.
struct Under<'a>(&'a Player, Instant);

impl Drop for Under<'_> {
    fn drop(&mut self) {
        self.0.at_once.fetch_sub(1, Ordering::Relaxed);
        self.0.calls.lock().expect("whole").push((self.1, Instant::now()));
    }
}

#[async_trait]
impl Provider for Player {
    async fn complete(&self, _: &Request<'_>) -> Result<Completion, ModelError> {
        let at_once = self.at_once.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_at_once.fetch_max(at_once, Ordering::Relaxed);
        let _under = Under(self, Instant::now());
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let Move { after, end } = self.moves[turn % self.moves.len()].clone();
        sleep(Duration::from_millis(after)).await;
        let status = |status, retry_after: Option<u64>| ModelError::Status {
            status,
            message: "BAD".to_owned(),
            retry_after: retry_after.map(Duration::from_millis),
        };
        let (text, finish) = match end {
            End::Good => ("good", Finish::Complete),
            End::CutOff => ("BAD", Finish::Length),
            End::Broken => return Err(ModelError::StreamTruncated),
            End::Refused => ("none", Finish::Complete),
            End::Overloaded(retry_after) => return Err(status(429, retry_after)),
            End::Unauthorized => return Err(status(401, None)),
            End::PromptTooLong => return Err(ModelError::PromptTooLong("BAD".to_owned())),
        };
        let text = format!("{text} in turn {turn}");
        let text =
            if finish == Finish::Complete && text.starts_with("none") { "none".to_owned() } else { text };
        Ok(Completion { text, finish, usage: Usage::default(), tokens: 7, first_token: None })
    }
}

#[derive(Clone, Debug)]
struct Story {
    models: Vec<Vec<Move>>,
    order: Order,
    deadline: u64,
    questions: usize,
    max_calls: usize,
}

fn stories() -> impl Strategy<Value = Story> {
    let end = prop_oneof![
        3 => Just(End::Good),
        1 => Just(End::CutOff),
        2 => Just(End::Broken),
        1 => Just(End::Refused),
        2 => prop::option::of(0_u64..20_000).prop_map(End::Overloaded),
        1 => Just(End::Unauthorized),
        1 => Just(End::PromptTooLong),
    ];
    let moves = vec((0_u64..15_000, end).prop_map(|(after, end)| Move { after, end }), 1..6);
    let order = prop_oneof![Just(Order::Fallback), Just(Order::RoundRobin)];
    (vec(moves, 1..4), order, 1_u64..40_000, 1_usize..12, 1_usize..4).prop_map(
        |(models, order, deadline, questions, max_calls)| Story {
            models,
            order,
            deadline,
            questions,
            max_calls,
        },
    )
}

async fn play(story: Story) -> Result<(), TestCaseError> {
    let deadline = Duration::from_millis(story.deadline);
    let (calls, most) = (Arc::default(), Arc::<AtomicUsize>::default());
    let mut specs = Vec::new();
    for (index, moves) in story.models.iter().enumerate() {
        let player = Player {
            moves: moves.clone(),
            turn: AtomicUsize::new(0),
            calls: Arc::clone(&calls),
            at_once: AtomicUsize::new(0),
            most_at_once: Arc::clone(&most),
        };
        let second = Duration::from_secs(1);
        specs.push(ModelSpec {
            provider: Arc::new(player),
            retry: RetryPolicy { retries: 2, initial: second / 2, max: 10 * second },
            queue: QueuePolicy { max_calls: story.max_calls, max_waiting: 4, timeout: 8 * second },
            breaker: CircuitBreakerPolicy {
                failure_percent: 50,
                min_calls: 3,
                window: 60 * second,
                open_for: 5 * second,
            },
            ..model(&format!("m{index}"), 100_000)
        });
    }
    let models = specs.iter().map(|spec| spec.name.clone()).collect();
    let pool = PoolSpec { name: "p".to_owned(), models, strategy: story.order, deadline };
    let pools = ModelPools::new(specs, vec![pool], prompts()).expect("valid");
    let entries = [entry("I fly on 3 May.")];
    let task = Task::Consolidate { entries: &entries, sentences: 5 };
    let began = Instant::now();
    let asked = join_all((0..story.questions).map(|_| pools.complete("p", task))).await;
    prop_assert!(began.elapsed() <= deadline, "{:?}", began.elapsed());
    let mut made = 0;
    for asked in &asked {
        let cost = asked.as_ref().map_or_else(|error| error.cost, |answer| answer.cost);
        made += usize::try_from(cost.calls).expect("few");
        match asked {
            Ok(answer) => {
                prop_assert!(answer.text.starts_with("good in turn "), "{}", answer.text);
                prop_assert_eq!(cost.calls, cost.failures + 1);
            }
            Err(error) => {
                prop_assert_eq!(cost.calls, cost.failures);
                let called = error.attempts.iter().filter(|attempt| attempt.cause.was_sent()).count();
                prop_assert_eq!(called, usize::try_from(cost.calls).expect("few"));
                let late = error.attempts.iter().filter(|attempt| {
                    matches!(attempt.cause, ModelError::Timeout(TimeoutPhase::Deadline, _))
                });
                prop_assert!(late.count() <= 1, "nothing comes after the deadline: {}", error);
            }
        }
    }
    let calls: Vec<(Instant, Instant)> = calls.lock().expect("whole").clone();
    prop_assert_eq!(calls.len(), made);
    for (from, to) in calls {
        prop_assert!(from < began + deadline, "a call begins past the deadline");
        prop_assert!(to <= began + deadline, "a call goes on past the deadline");
    }
    prop_assert!(most.load(Ordering::Relaxed) <= story.max_calls);
    Ok(())
}

#[test]
fn no_failed_text_is_used_and_no_call_is_made_past_the_deadline() {
    let config = Config { cases: 1000, failure_persistence: None, ..Config::default() };
    let played = TestRunner::new(config).run(&stories(), |story| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(play(story))
    });
    played.unwrap_or_else(|error| panic!("{error}"));
}
