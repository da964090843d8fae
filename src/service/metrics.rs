//! Metrics of the service. They belong to the recorder that is installed when they are created, as those of the models do.

use super::consolidation::{ConsolidationReport, Outcome};
use crate::domain::consolidation_record::RunCause;
use crate::domain::coverage::OmissionReason;
use crate::storage::ConnectionCounts;
use metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
use std::time::Duration;

const CONSOLIDATIONS: &str = "precis_consolidations_total";
const CONSOLIDATION_DURATION: &str = "precis_consolidation_duration_seconds";
const CONSOLIDATIONS_RUNNING: &str = "precis_consolidations_running";
const CONSOLIDATED_MESSAGES: &str = "precis_consolidated_messages_total";
const META_CONSOLIDATIONS: &str = "precis_meta_consolidations_total";
const CONTEXTS: &str = "precis_contexts_total";
const OMISSIONS: &str = "precis_contexts_with_omissions_total";
const CACHE_REQUESTS: &str = "precis_context_cache_requests_total";
const CACHE_BYTES: &str = "precis_context_cache_bytes";
const CACHE_SESSIONS: &str = "precis_context_cache_sessions";
const CONNECTIONS: &str = "precis_database_connections";
const MAX_CONNECTIONS: &str = "precis_database_connections_max";
const STORED_BYTES: &str = "precis_stored_bytes";
const DUE_SESSIONS: &str = "precis_due_sessions";
const RERANKINGS: &str = "precis_search_rerankings_total";
const SESSIONS_EXPIRED: &str = "precis_retention_sessions_erased_total";
const RETENTION_ERRORS: &str = "precis_retention_errors_total";
const RETENTION_LAST_RUN: &str = "precis_retention_last_run_timestamp_seconds";

/// The reason in the metric for contexts with shortened messages.
pub(super) const SHORTENED: &str = "shortened";

/// The reasons for which a context lacks messages.
const OMISSION_REASONS: [&str; 5] = [
    OmissionReason::MaxHistoryMessages.name(),
    OmissionReason::MaxContextBytes.name(),
    OmissionReason::OnFailure.name(),
    OmissionReason::MaxTokens.name(),
    SHORTENED,
];

/// Runs by outcome.
#[derive(Clone, Debug)]
struct RunMetrics {
    consolidated: Counter,
    not_due: Counter,
    in_progress: Counter,
    abandoned: Counter,
    failed: Counter,
}

impl RunMetrics {
    fn new(cause: &'static str) -> Self {
        let runs = |outcome| counter!(CONSOLIDATIONS, "outcome" => outcome, "cause" => cause);
        Self {
            consolidated: runs("consolidated"),
            not_due: runs("not_due"),
            in_progress: runs("in_progress"),
            abandoned: runs("abandoned"),
            failed: runs("failed"),
        }
    }
}

/// Counters of contexts, consolidation runs and rerankings by outcome, and of retention; and gauges of the state.
#[derive(Clone, Debug)]
pub(super) struct ServiceMetrics {
    by_threshold: RunMetrics,
    by_request: RunMetrics,
    run_duration: Histogram,
    consolidated_messages: Counter,
    meta_consolidations: Counter,
    /// Contexts by the outcome of their consolidation.
    contexts: Vec<(Outcome, Counter)>,
    /// Contexts that lack messages, by reason.
    omissions: Vec<(&'static str, Counter)>,
    pub(super) cache: CacheMetrics,
    state: StateGauges,
    /// Searches whose hits a model has ordered.
    pub(super) reranked: Counter,
    /// Searches whose hits kept the order by their words, although a pool is configured.
    pub(super) rerank_failed: Counter,
    /// Sessions that this replica has erased because they had expired.
    pub(super) sessions_expired: Counter,
    pub(super) retention_errors: Counter,
    /// The end of the last complete run of this replica, in seconds since 1970; 0 if there was none.
    pub(super) retention_last_run: Gauge,
    /// The size of all messages, as of the last complete run of the retention worker of this replica.
    pub(super) stored_bytes: Gauge,
    /// The sessions that were active lately and are due for consolidation, as of the same run.
    pub(super) due_sessions: Gauge,
}

/// Counters of the cache of sessions.
#[derive(Clone, Debug)]
pub(super) struct CacheMetrics {
    /// Contexts for which only the head of the session was read, and new messages.
    pub(super) hits: Counter,
    pub(super) misses: Counter,
}

/// Gauges that are set when a client reads the metrics.
#[derive(Clone, Debug)]
struct StateGauges {
    consolidations_running: Gauge,
    cache_bytes: Gauge,
    cache_sessions: Gauge,
    connections_in_use: Gauge,
    connections_idle: Gauge,
    max_connections: Gauge,
}

/// The present state of the service.
pub(super) struct ServiceState {
    pub(super) consolidations_running: usize,
    pub(super) cache_bytes: u64,
    pub(super) cache_sessions: usize,
    pub(super) connections: ConnectionCounts,
}

impl ServiceMetrics {
    pub(super) fn new() -> Self {
        describe_counter!(CONSOLIDATIONS, "Finished consolidation runs by outcome and cause");
        describe_histogram!(
            CONSOLIDATION_DURATION,
            Unit::Seconds,
            "Duration of consolidation runs that took the lease"
        );
        describe_gauge!(CONSOLIDATIONS_RUNNING, "Running consolidations");
        describe_counter!(CONSOLIDATED_MESSAGES, "Messages that became part of a summary");
        describe_counter!(META_CONSOLIDATIONS, "Runs in which a summary was compressed");
        describe_counter!(CONTEXTS, "Contexts by the outcome of their consolidation");
        describe_counter!(
            OMISSIONS,
            "Contexts in which messages are neither summarised nor sent whole, by reason"
        );
        describe_counter!(CACHE_REQUESTS, "Contexts by the use of the cache of sessions");
        describe_gauge!(CACHE_BYTES, Unit::Bytes, "Memory of the cache of sessions");
        describe_gauge!(CACHE_SESSIONS, "Sessions in the cache");
        describe_gauge!(CONNECTIONS, "Open database connections by state");
        describe_gauge!(MAX_CONNECTIONS, "Largest number of database connections");
        describe_gauge!(STORED_BYTES, Unit::Bytes, "Size of the messages of all tenants as JSON");
        describe_gauge!(
            DUE_SESSIONS,
            "Sessions with exchanges in this or the previous hour that are due for consolidation"
        );
        describe_counter!(RERANKINGS, "Searches with a pool for reranking, by outcome");
        describe_counter!(SESSIONS_EXPIRED, "Sessions erased because their retention had ended");
        describe_counter!(RETENTION_ERRORS, "Failed searches for expired sessions and failed erasures");
        describe_gauge!(
            RETENTION_LAST_RUN,
            "End of the last complete search for expired sessions by this replica"
        );
        let rerankings = |outcome| counter!(RERANKINGS, "outcome" => outcome);
        Self {
            reranked: rerankings("reranked"),
            rerank_failed: rerankings("failed"),
            by_threshold: RunMetrics::new("threshold"),
            by_request: RunMetrics::new("request"),
            run_duration: histogram!(CONSOLIDATION_DURATION),
            consolidated_messages: counter!(CONSOLIDATED_MESSAGES),
            meta_consolidations: counter!(META_CONSOLIDATIONS),
            contexts: Outcome::ALL
                .map(|outcome| (outcome, counter!(CONTEXTS, "consolidation" => outcome.name())))
                .to_vec(),
            omissions: OMISSION_REASONS
                .map(|reason| (reason, counter!(OMISSIONS, "reason" => reason)))
                .to_vec(),
            cache: CacheMetrics {
                hits: counter!(CACHE_REQUESTS, "result" => "hit"),
                misses: counter!(CACHE_REQUESTS, "result" => "miss"),
            },
            state: StateGauges {
                consolidations_running: gauge!(CONSOLIDATIONS_RUNNING),
                cache_bytes: gauge!(CACHE_BYTES),
                cache_sessions: gauge!(CACHE_SESSIONS),
                connections_in_use: gauge!(CONNECTIONS, "state" => "in_use"),
                connections_idle: gauge!(CONNECTIONS, "state" => "idle"),
                max_connections: gauge!(MAX_CONNECTIONS),
            },
            sessions_expired: counter!(SESSIONS_EXPIRED),
            retention_errors: counter!(RETENTION_ERRORS),
            retention_last_run: gauge!(RETENTION_LAST_RUN),
            stored_bytes: gauge!(STORED_BYTES),
            due_sessions: gauge!(DUE_SESSIONS),
        }
    }

    /// Counts a finished run.
    pub(super) fn record_consolidation(
        &self,
        cause: RunCause,
        report: &ConsolidationReport,
        elapsed: Duration,
    ) {
        let runs = match cause {
            RunCause::Threshold => &self.by_threshold,
            RunCause::Request => &self.by_request,
        };
        let counter = match report.outcome {
            Outcome::Consolidated => &runs.consolidated,
            Outcome::NotDue => &runs.not_due,
            Outcome::InProgress if report.is_abandoned => &runs.abandoned,
            Outcome::InProgress => &runs.in_progress,
            Outcome::Failed => &runs.failed,
            // Outcomes of requests that start no run or do not wait for it.
            Outcome::Scheduled | Outcome::Disabled => return,
        };
        counter.increment(1);
        if report.outcome != Outcome::InProgress || report.is_abandoned {
            self.run_duration.record(elapsed);
        }
        self.consolidated_messages.increment(u64::try_from(report.messages).unwrap_or(0));
        self.meta_consolidations.increment(u64::from(report.meta));
    }

    /// Counts a context.
    pub(super) fn record_context(&self, consolidation: Outcome) {
        if let Some((_, counter)) = self.contexts.iter().find(|(outcome, _)| *outcome == consolidation) {
            counter.increment(1);
        }
    }

    /// Counts a context that lacks messages for this reason.
    pub(super) fn record_omission(&self, reason: &str) {
        if let Some((_, counter)) = self.omissions.iter().find(|(known, _)| *known == reason) {
            counter.increment(1);
        }
    }

    /// Sets the gauges of the state.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub(super) fn set_state(&self, state: &ServiceState) {
        let ConnectionCounts { open, idle, max } = state.connections;
        let gauges = &self.state;
        gauges.consolidations_running.set(state.consolidations_running as f64);
        gauges.cache_bytes.set(state.cache_bytes as f64);
        gauges.cache_sessions.set(state.cache_sessions as f64);
        gauges.connections_in_use.set(open.saturating_sub(idle) as f64);
        gauges.connections_idle.set(idle as f64);
        gauges.max_connections.set(max as f64);
    }
}
