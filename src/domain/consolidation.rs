//! The rules of consolidation: when it is due, which messages it summarises, and when it is retried after a failure.
//!
//! The rule is [`Policy::due_by`]; [`Policy::due`] applies it to a session.

use super::budget::smallest_tokens;
use super::message_metadata::MessageMetadata;
use super::session::{ConsolidationState, Session, Summary, Window};
use super::split_points::{self, OrphanResults, SplitPoint, UnansweredCalls};
use super::summary;
use super::tail::TailLimit;
use super::tokens::{self, PER_MESSAGE};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The rules of consolidation, from the settings `consolidation.*`.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Number of messages in the tail above which its older part is summarised.
    pub threshold: i64,
    /// The threshold was configured, so it applies to lists with a window, too.
    pub is_threshold_set: bool,
    /// Number of tokens in the tail above which its older part is summarised.
    pub max_tail_tokens: Option<i64>,
    /// Number of messages, at least, that stay verbatim.
    pub keep_recent: usize,
    /// Number of words of the summary above which it is compressed.
    pub summary_word_limit: usize,
    /// Number of sentences that a compressed summary should have.
    pub summary_sentences: usize,
    /// Largest number of messages that a context contains verbatim.
    pub max_history_messages: usize,
    /// Largest size of these messages.
    pub max_context_bytes: usize,
    /// The window of requests that name none, in tokens of the stored encoding.
    pub context_window: Option<i64>,
    /// The share of the window above which a list is consolidated.
    pub trigger_share: f64,
    /// The share of the window that stays verbatim.
    pub keep_share: f64,
    /// The share of the window above which the summary is compressed.
    pub summary_share: f64,
    /// Number of tokens of the summary above which it is compressed, whatever the window.
    pub summary_max_tokens: i64,
    /// Delay of the first retry after a failure.
    pub retry_initial: Duration,
    /// Largest delay between retries.
    pub retry_max: Duration,
}

/// Tokens of a sentence of a summary, approximately.
pub const SENTENCE_TOKENS: i64 = 30;
/// Tokens of messages for each sentence of their summary.
const TOKENS_PER_SENTENCE: i64 = 200;

/// The defaults of the settings.
impl Default for Policy {
    fn default() -> Self {
        Self {
            threshold: 100,
            is_threshold_set: false,
            max_tail_tokens: None,
            keep_recent: 20,
            summary_word_limit: 600,
            summary_sentences: 8,
            max_history_messages: 200,
            max_context_bytes: 32 * 1024 * 1024,
            context_window: None,
            trigger_share: 0.92,
            keep_share: 0.12,
            summary_share: 0.6,
            summary_max_tokens: 4000,
            retry_initial: Duration::from_secs(5),
            retry_max: Duration::from_mins(10),
        }
    }
}

/// The time for which a run takes and renews the lease of its session: a session is locked for at most this long after the
/// process of its run was killed.
pub const LEASE_TTL: Duration = Duration::from_secs(4);

/// The time at which a context request consolidates its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", rename_all = "snake_case")]
#[schema(as = ConsolidationMode, rename_all = "snake_case")]
pub enum Mode {
    /// During the request.
    Inline,
    /// After the response.
    Background,
    /// Never.
    Off,
}

named_variants!(Mode { Inline = "inline", Background = "background", Off = "off" });

/// The parts of a list that grow with the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionSize {
    pub tail_messages: i64,
    pub tail_tokens: i64,
    pub summary_tokens: i64,
}

impl From<&Session> for SessionSize {
    fn from(session: &Session) -> Self {
        Self {
            tail_messages: session.tail_len(),
            tail_tokens: session.tail_tokens(),
            summary_tokens: session.summary.tokens,
        }
    }
}

/// The rule that makes a consolidation due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ConsolidationRule)]
pub enum Rule {
    /// The tail has more messages than `consolidation.threshold`.
    Threshold,
    /// The tail has more tokens than `consolidation.max_tail_tokens`.
    MaxTailTokens,
    /// The list takes more than `consolidation.trigger_share` of its window.
    Window,
}

/// The list that a consolidation makes room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanScope {
    pub window: Option<Window>,
    pub summary_tokens: i64,
    /// Largest number of messages that stay verbatim. `None` if only their tokens matter.
    pub keep: Option<usize>,
    /// Messages would have to be omitted or shortened without a consolidation, whatever their number and tokens.
    pub overflows: bool,
    /// Messages would have to be omitted.
    pub omits: bool,
    /// A new message of the user follows the tail.
    pub has_new_message: bool,
}

/// The result of applying the policy to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The tail does not exceed the threshold.
    No,
    /// Consolidation is due now.
    Yes,
    /// Consolidation is due, and another run holds the lease.
    InProgress,
    /// Consolidation is due, but the last run failed: start none before `until`.
    Backoff { until: OffsetDateTime },
}

/// The present state of a session's consolidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Idle,
    /// A run holds the lease.
    Running,
    /// The last run failed, and the next automatic one is not permitted before `until`.
    Backoff {
        until: OffsetDateTime,
    },
}

/// The messages that a consolidation summarises, counted from the cursor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsolidationPlan {
    /// Positions at which a batch may end, ascending, never empty. The last one is the end of the plan.
    pub batch_ends: Vec<usize>,
    /// Tokens of each message up to the end of the plan, as stored.
    pub message_tokens: Vec<i64>,
}

impl Policy {
    /// Returns the part of the tail that a list can contain. A window has room for any number of messages.
    pub fn tail_limit(&self, window: Option<i64>) -> TailLimit {
        let of_window = |tokens: i64| usize::try_from(tokens / PER_MESSAGE).unwrap_or(0).max(1);
        let messages = window.map_or(self.max_history_messages, of_window);
        TailLimit { messages, bytes: self.max_context_bytes }
    }

    /// **The rule**: without a window, consolidation is due if the tail has more than `threshold` messages or more than
    /// `max_tail_tokens` tokens. With a window, it is due if the list has more than its `trigger_share`; then the number of messages
    /// matters only if the threshold was configured. `Store::due_sessions` repeats the rule in SQL for the metric, and
    /// `due_sessions_are_counted_by_the_rule` compares both.
    pub fn due_by(&self, size: SessionSize, window: Option<Window>) -> Option<Rule> {
        let applies_threshold = window.is_none() || self.is_threshold_set;
        let list = |window: Window| window.fixed + size.summary_tokens + size.tail_tokens;
        if applies_threshold && size.tail_messages > self.threshold {
            Some(Rule::Threshold)
        } else if self.max_tail_tokens.is_some_and(|max| size.tail_tokens > max) {
            Some(Rule::MaxTailTokens)
        } else {
            window
                .filter(|window| list(*window) > share(window.tokens, self.trigger_share))
                .map(|_| Rule::Window)
        }
    }

    /// Applies the rule to a session: at most one consolidation runs at a time, and none before its retry time.
    pub fn due(&self, session: &Session, window: Option<Window>, now: OffsetDateTime) -> Due {
        match self.due_by(session.into(), window) {
            Some(_) => self.possible(session, now),
            None => Due::No,
        }
    }

    /// Returns the state of a session whose consolidation is due.
    pub fn possible(&self, session: &Session, now: OffsetDateTime) -> Due {
        match self.activity(&session.consolidation, now) {
            Activity::Idle => Due::Yes,
            Activity::Running => Due::InProgress,
            Activity::Backoff { until } => Due::Backoff { until },
        }
    }

    /// Interprets the times of a lease and of a retry. A time is ignored if it lies more than twice as far in the future as
    /// it is ever set: the clock of the database was set back since.
    pub fn activity(&self, state: &ConsolidationState, now: OffsetDateTime) -> Activity {
        let pending = |time: Option<OffsetDateTime>, longest: Duration| {
            time.filter(|time| *time > now && *time - now <= longest.saturating_mul(2))
        };
        if pending(state.lease_until, LEASE_TTL).is_some() {
            Activity::Running
        } else if let Some(until) = pending(state.retry_at, self.retry_max) {
            Activity::Backoff { until }
        } else {
            Activity::Idle
        }
    }

    /// Plans the consolidation of a tail of `tail_len` messages. `messages` are the first messages of the tail: all of
    /// them, or as many as are planned at once. Returns `None` if there is no point at which the tail can be split.
    pub fn plan(
        &self,
        messages: &[MessageMetadata],
        tail_len: usize,
        scope: &PlanScope,
    ) -> Option<ConsolidationPlan> {
        let recent = Recent::new(self, messages, tail_len, scope);
        // A tool call whose result never arrives would hold the cursor forever. It does so until messages would have to be
        // omitted from the context. From then on, such a call is ignored if a user message follows it, and as a last
        // resort in any case, because an agent may work for long without a user message.
        let mut attempts = vec![UnansweredCalls::Block];
        if recent.overflows {
            attempts.extend([UnansweredCalls::BlockUntilUserMessage, UnansweredCalls::Ignore]);
        }
        let points = |unanswered| split_points::split_points(messages, unanswered, OrphanResults::Ignore);
        let split = |unanswered| Some((recent.split(&points(unanswered))?, unanswered));
        let splits: Vec<_> = attempts.into_iter().filter_map(split).collect();
        // The messages before an unanswered call may be too few to make room. Then calls are separated from their results, the fewest
        // possible.
        let separating = || {
            let end =
                recent.least_separating(&points(UnansweredCalls::Ignore)).filter(|_| recent.overflows)?;
            Some((end, UnansweredCalls::Ignore))
        };
        let fitting = splits.iter().copied().find(|(end, _)| recent.fits(*end));
        let (end, unanswered) = fitting.or_else(separating).or_else(|| splits.first().copied())?;
        Some(ConsolidationPlan {
            batch_ends: split_points::all_up_to(messages, end, unanswered),
            message_tokens: messages.iter().take(end).map(|message| message.tokens).collect(),
        })
    }

    /// Returns the delay before the next run after this many consecutive failures: exponential backoff with a limit.
    pub fn retry_delay(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.retry_initial.saturating_mul(1 << doublings).min(self.retry_max)
    }

    /// Returns the size of a summary above which it is compressed.
    pub fn summary_limit(&self, window: Option<Window>) -> SummaryLimit {
        window.map_or(SummaryLimit::Words(self.summary_word_limit), |window| {
            SummaryLimit::Tokens(self.summary_tokens(window))
        })
    }

    fn summary_tokens(&self, window: Window) -> i64 {
        self.of_window(window, self.summary_share).min(self.summary_max_tokens)
    }

    /// Returns a share of a window. If a large part of the window is fixed, the shares become smaller in the same proportion, so that some
    /// room is left between two consolidations.
    fn of_window(&self, window: Window, part: f64) -> i64 {
        let trigger = share(window.tokens, self.trigger_share).max(1);
        let free = (trigger - window.fixed).max(0);
        let whole = i128::from(share(window.tokens, part)) * i128::from(free) / i128::from(trigger);
        i64::try_from(whole).unwrap_or(i64::MAX)
    }
}

fn share(tokens: i64, part: f64) -> i64 {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "far below 2^52")]
    let tokens = (tokens as f64 * part) as i64;
    tokens
}

/// The size of a summary above which it is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SummaryLimit {
    Words(usize),
    Tokens(i64),
}

impl SummaryLimit {
    /// Returns the size of a text in the unit of the limit.
    pub fn size(self, text: &str) -> usize {
        match self {
            Self::Words(_) => summary::words(text),
            Self::Tokens(_) => tokens::count(text),
        }
    }

    /// Returns the largest size.
    pub fn largest(self) -> usize {
        match self {
            Self::Words(words) => words,
            Self::Tokens(tokens) => usize::try_from(tokens).unwrap_or(0),
        }
    }

    /// Returns `true` if a text has at most the largest size.
    pub fn permits(self, text: &str) -> bool {
        self.size(text) <= self.largest()
    }

    /// Returns the limit for a part of a text, in the same proportion.
    #[must_use]
    pub fn share(self, part: usize, whole: usize) -> Self {
        let of = |limit: usize| limit.saturating_mul(part) / whole.max(1);
        match self {
            Self::Words(words) => Self::Words(of(words)),
            Self::Tokens(_) => Self::Tokens(i64::try_from(of(self.largest())).unwrap_or(i64::MAX)),
        }
    }

    /// Returns `true` if a summary has more than `times` this size.
    pub fn is_exceeded(self, summary: &Summary, times: i64) -> bool {
        match self {
            Self::Words(limit) => {
                summary.words > i64::try_from(limit).unwrap_or(i64::MAX).saturating_mul(times)
            }
            Self::Tokens(limit) => summary.tokens > limit.saturating_mul(times),
        }
    }
}

/// The part of a tail that stays verbatim after a consolidation.
struct Recent {
    /// The tail is split at this position, or before it.
    latest: usize,
    /// The tail is split after `latest` if the recent part would not fit otherwise, but not after this position.
    latest_to_fit: usize,
    /// Tokens of the messages from each position on; empty if the number of tokens does not matter.
    tokens_from: Vec<i64>,
    tail_len: usize,
    /// Tokens that the recent part should have at most if it begins with a user message.
    soft_tokens: i64,
    max_tokens: i64,
    max_messages: usize,
    /// Messages would have to be omitted without a consolidation.
    overflows: bool,
}

impl Recent {
    fn new(policy: &Policy, messages: &[MessageMetadata], tail_len: usize, scope: &PlanScope) -> Self {
        // The end of a very long tail is planned later.
        let is_whole = tail_len <= messages.len();
        let keep = scope.keep.unwrap_or(if is_whole { tail_len } else { policy.keep_recent });
        let max_messages = if scope.window.is_some() { usize::MAX } else { policy.max_history_messages };
        let turn = split_points::newest_turn(messages);
        let mut recent = Self {
            latest: tail_len.saturating_sub(keep).min(messages.len()),
            latest_to_fit: 0,
            tokens_from: Vec::new(),
            tail_len,
            soft_tokens: i64::MAX,
            max_tokens: i64::MAX,
            max_messages,
            overflows: scope.overflows || tail_len > max_messages,
        };
        let keep = match (scope.window, policy.max_tail_tokens) {
            _ if !is_whole => return recent,
            (Some(window), _) => {
                let keep = policy.of_window(window, policy.keep_share);
                recent.soft_tokens = keep + keep / 4;
                recent.max_tokens = window.tokens - window.fixed - policy.summary_tokens(window);
                keep
            }
            (None, Some(max)) => {
                recent.max_tokens = max;
                max
            }
            (None, None) => return recent,
        };
        let mut sum = 0;
        recent.tokens_from = messages
            .iter()
            .rev()
            .map(|message| {
                sum += message.tokens;
                sum
            })
            .collect();
        recent.tokens_from.reverse();
        recent.tokens_from.push(0);
        let tail_tokens = recent.tokens_from.first().copied().unwrap_or(0);
        recent.overflows |= scope
            .window
            .is_some_and(|window| window.fixed + scope.summary_tokens + tail_tokens > window.tokens);
        let round = split_points::last_round(messages);
        recent.latest_to_fit = if round > turn + 1 && round < tail_len { round } else { turn };
        let by_tokens = recent.tokens_from.partition_point(|tokens| *tokens > keep);
        // At least the newest turn stays, if it began after the cursor.
        recent.latest = match turn {
            0 => recent.latest.max(by_tokens.min(recent.latest_to_fit)),
            _ => recent.latest.max(by_tokens).min(turn),
        };
        // A turn that does not fit, even with shortened results, is summarised if another one follows it.
        let least: i64 = messages.iter().skip(turn).map(smallest_tokens).sum();
        if scope.has_new_message && (least > recent.max_tokens || (scope.omits && turn == 0)) {
            (recent.latest, recent.latest_to_fit) = (tail_len, tail_len);
        }
        recent
    }

    /// Returns `true` if the messages from `position` on are few enough.
    fn fits(&self, position: usize) -> bool {
        self.tail_len - position <= self.max_messages && self.tokens_from(position) <= self.max_tokens
    }

    fn tokens_from(&self, position: usize) -> i64 {
        self.tokens_from.get(position).copied().unwrap_or(0)
    }

    /// Returns the best safe split point. Prefers one before a user message, then one from which on the messages fit.
    fn split(&self, points: &[SplitPoint]) -> Option<usize> {
        let safe = points.iter().filter(|point| point.is_safe() && point.position > 0);
        let (mut until, mut after) = (Vec::new(), Vec::new());
        for point in safe {
            if point.position <= self.latest {
                until.push(*point);
            } else if point.position <= self.latest_to_fit {
                after.push(*point);
            }
        }
        let before_user = |point: &&SplitPoint| point.before_user_message;
        let position = |point: &SplitPoint| point.position;
        let is_near =
            |position: &usize| self.tokens_from(*position) <= self.soft_tokens && self.fits(*position);
        let near_user = || until.iter().rev().filter(before_user).map(position).find(is_near);
        let next_user =
            || after.iter().filter(before_user).map(position).find(|position| self.fits(*position));
        let last = || until.iter().rev().map(position).find(|position| self.fits(*position));
        let next = || after.iter().map(position).find(|position| self.fits(*position));
        let none_fits =
            || after.last().or(until.iter().rev().find(before_user)).or(until.last()).map(position);
        near_user().or_else(next_user).or_else(last).or_else(next).or_else(none_fits)
    }

    /// Returns the point that separates the fewest calls from their results, the last one of equals. If the newest turn is too large by
    /// itself, it is the beginning of that turn.
    fn least_separating(&self, points: &[SplitPoint]) -> Option<usize> {
        let candidates = points.iter().filter(|point| point.position > 0 && point.position <= self.latest);
        let fitting = candidates.rev().filter(|point| self.fits(point.position));
        let fewest = fitting.min_by_key(|point| (point.separated, !point.before_user_message));
        let newest = (self.latest > 0 && self.max_tokens < i64::MAX).then_some(self.latest);
        fewest.map(|point| point.position).or(newest)
    }
}

/// Returns the number of sentences that a summary of these messages should have: a tenth of their number, from 5 to 50. With a window,
/// more for long messages: one for each [`TOKENS_PER_SENTENCE`] tokens, as long as they take at most half of the summary's limit.
pub fn requested_sentences(messages: usize, tokens: i64, limit: SummaryLimit) -> usize {
    let for_tokens = match limit {
        SummaryLimit::Words(_) => 0,
        SummaryLimit::Tokens(limit) => (tokens / TOKENS_PER_SENTENCE).min(limit / (2 * SENTENCE_TOKENS)),
    };
    (messages / 10).max(usize::try_from(for_tokens).unwrap_or(0)).clamp(5, 50)
}

/// Divides the requested sentences of a batch among its parts, at least one for each.
pub fn divide_sentences(sentences: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| (sentences / parts + usize::from(part < sentences % parts)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    fn policy() -> Policy {
        Policy { trigger_share: 0.8, keep_share: 0.3, summary_share: 0.25, ..Policy::default() }
    }

    #[test]
    fn consolidation_is_due_above_threshold() {
        let due = |policy: &Policy, tail_messages, tail_tokens| {
            policy.due_by(SessionSize { tail_messages, tail_tokens, summary_tokens: 9000 }, None)
        };
        assert_eq!(due(&policy(), 100, i64::MAX), None);
        assert_eq!(due(&policy(), 101, 0), Some(Rule::Threshold));
        let policy = Policy { max_tail_tokens: Some(5000), ..policy() };
        assert_eq!([due(&policy, 3, 5000), due(&policy, 3, 5001)], [None, Some(Rule::MaxTailTokens)]);
    }

    #[test]
    fn window_decides_instead_of_threshold() {
        let window = Some(Window { tokens: 1000, fixed: 100 });
        let due = |policy: &Policy, tail_messages, tail_tokens| {
            policy.due_by(SessionSize { tail_messages, tail_tokens, summary_tokens: 200 }, window)
        };
        assert_eq!([due(&policy(), 1, 501), due(&policy(), 1000, 500)], [Some(Rule::Window), None]);
        let policy = Policy { is_threshold_set: true, ..policy() };
        assert_eq!([due(&policy, 101, 500), due(&policy, 100, 500)], [Some(Rule::Threshold), None]);
    }

    #[test]
    fn meta_consolidation_is_needed_above_word_limit() {
        let summary = |words, tokens| Summary { text: String::new(), words, tokens };
        let words = policy().summary_limit(None);
        assert!(!words.is_exceeded(&summary(600, 9999), 1) && words.is_exceeded(&summary(601, 1), 1));
        let tokens = |tokens, fixed| policy().summary_limit(Some(Window { tokens, fixed }));
        assert!(!tokens(8000, 0).is_exceeded(&summary(9999, 2000), 1));
        assert!(
            tokens(8000, 0).is_exceeded(&summary(1, 2001), 1)
                && !tokens(8000, 0).is_exceeded(&summary(1, 4000), 2)
        );
        assert_eq!(tokens(100_000, 0), SummaryLimit::Tokens(4000), "the largest one");
        assert_eq!(tokens(8000, 3200), SummaryLimit::Tokens(1000), "in proportion to the rest of the window");
    }

    #[test]
    fn requested_sentences_are_a_tenth_of_the_messages() {
        let words = |messages| requested_sentences(messages, 1_000_000, SummaryLimit::Words(600));
        assert_eq!([1, 23, 59, 60, 98, 499, 500, 1000].map(words), [5, 5, 5, 6, 9, 49, 50, 50]);
        let tokens = |tokens, limit| requested_sentences(20, tokens, SummaryLimit::Tokens(limit));
        assert_eq!(
            [tokens(900, 4000), tokens(4000, 4000), tokens(4000, 600), tokens(90_000, 4000)],
            [5, 20, 10, 50]
        );
    }

    #[test]
    fn sentences_of_a_batch_are_divided_among_its_parts() {
        let divided = |sentences, parts| divide_sentences(sentences, parts).collect::<Vec<_>>();
        assert_eq!(divided(5, 1), [5]);
        assert_eq!(divided(50, 4), [13, 13, 12, 12]);
        assert_eq!(divided(5, 7), [1; 7], "each part needs a sentence");
        assert_eq!(divided(5, 0), Vec::<usize>::new());
    }

    #[test_case(&"u a ".repeat(51), 102 => Some(82); "keeps recent messages")]
    #[test_case(&format!("{}u", "u a ".repeat(50)), 101 => Some(80); "moves to a user message")]
    #[test_case(&"u a ".repeat(10), 20 => None; "only recent messages")]
    #[test_case(&"u a ".repeat(5), 5000 => Some(8); "plans only the given messages")]
    #[test_case(&format!("u Ax {}", "u a ".repeat(99)), 200 => Some(1); "before an unanswered call")]
    #[test_case(&format!("Ax {}", "u a ".repeat(99)), 199 => None; "unanswered call holds the cursor")]
    #[test_case(&format!("Ax {}", "u a ".repeat(200)), 201 => Some(181); "until messages would be omitted")]
    #[test_case(&format!("u a u Ax {}", "u a ".repeat(101)), 206 => Some(186); "if the messages before the call are too few")]
    #[test_case(&format!("{}u Ax {}", "u a ".repeat(5), "u a ".repeat(99)), 210 => Some(10); "unless the messages before the call suffice")]
    #[test_case(&format!("Ax {}", "a ".repeat(199)), 200 => None; "without user messages")]
    #[test_case(&format!("Ax {}", "a ".repeat(200)), 201 => Some(181); "without user messages until messages would be omitted")]
    fn plan_ends_at_a_safe_split_point(script: &str, tail_len: usize) -> Option<usize> {
        let scope = PlanScope { keep: Some(20), ..PlanScope::default() };
        let plan = policy().plan(&conversation(script), tail_len, &scope)?;
        assert_eq!(plan.batch_ends.last(), Some(&plan.message_tokens.len()));
        plan.batch_ends.last().copied()
    }

    /// Each message has 100 tokens, a result of a tool 1000. The recent part has 900 tokens, or up to 1125 if it begins with a user message.
    #[test_case(&"u a ".repeat(20), false => Some(30); "as many messages as fit")]
    #[test_case("u a u a Ax tx Ay ty Az tz a", false => Some(8); "rounds of the newest turn")]
    #[test_case("u a u Ax tx a u a u a", false => Some(6); "a later turn if the result does not fit")]
    #[test_case("u a u a u Ax tx a", false => Some(4); "the newest turn stays")]
    #[test_case("u Ax tx", true => None; "the question stays with its result")]
    #[test_case("u Ax Ay tx Az ty tz Aw a a a a a a a a a u a", false => Some(7); "not between calls and results")]
    fn plan_leaves_what_fits_into_the_window(script: &str, has_new_message: bool) -> Option<usize> {
        let mut messages = conversation(script);
        for message in &mut messages {
            message.tokens = if message.role == Role::Tool { 1000 } else { 100 };
        }
        let window = Some(Window { tokens: 3000, fixed: 0 });
        let scope = PlanScope { window, has_new_message, ..PlanScope::default() };
        policy().plan(&messages, messages.len(), &scope)?.batch_ends.last().copied()
    }

    #[test]
    fn text_that_does_not_fit_is_summarised_before_a_new_message() {
        let mut messages = conversation("u a");
        messages[0].tokens = 5000;
        let plan = |has_new_message| {
            let window = Some(Window { tokens: 3000, fixed: 0 });
            policy().plan(&messages, 2, &PlanScope { window, has_new_message, ..PlanScope::default() })
        };
        assert_eq!(plan(true).map(|plan| plan.batch_ends), Some(vec![1, 2]));
        assert_eq!(plan(false), None);
    }

    /// Returns turns in which each call is answered one turn later.
    fn overlapping_calls() -> String {
        let id = |number: u8| char::from(b'0' + number);
        let turn = |number| format!("u A{} t{} a", id(number), id(number - 1));
        let turns: Vec<String> = (1..60).map(turn).collect();
        format!("u A0 {}", turns.join(" "))
    }

    #[test_case(&overlapping_calls(); "overlapping calls")]
    #[test_case(&format!("{}tx a", "u a ".repeat(115)); "late result")]
    fn plan_advances_beyond_the_limit_of_messages(script: &str) {
        let messages = conversation(script);
        let scope = PlanScope { keep: Some(20), ..PlanScope::default() };
        let plan = policy().plan(&messages, messages.len(), &scope).expect("a plan");
        assert!(messages.len() - plan.message_tokens.len() <= 24, "{}", plan.message_tokens.len());
    }

    #[test]
    fn times_too_far_in_the_future_are_ignored() {
        let now = OffsetDateTime::UNIX_EPOCH;
        let activity = |leases: Option<u32>, minutes: Option<u64>| {
            let lease_until = leases.map(|leases| now + LEASE_TTL * leases);
            let retry_at = minutes.map(|minutes| now + Duration::from_mins(minutes));
            let state = ConsolidationState { lease_until, retry_at, ..ConsolidationState::default() };
            policy().activity(&state, now)
        };
        assert_eq!(activity(None, None), Activity::Idle);
        assert_eq!(activity(Some(0), Some(0)), Activity::Idle, "expired");
        assert_eq!(activity(Some(2), Some(5)), Activity::Running);
        let until = now + Duration::from_mins(20);
        assert_eq!(activity(Some(3), Some(20)), Activity::Backoff { until }, "not a lease of this clock");
        assert_eq!(activity(Some(3), Some(21)), Activity::Idle);
    }

    #[test]
    fn retry_delay_doubles_up_to_the_maximum() {
        let delays: Vec<u64> = (0..10).map(|failures| policy().retry_delay(failures).as_secs()).collect();
        assert_eq!(delays, [5, 5, 10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(policy().retry_delay(u32::MAX), Duration::from_mins(10));
    }
}
