//! Metrics of the service. They belong to the recorder that is installed when they are created, as those of the models do.

use super::consolidation::Outcome;
use metrics::{Counter, Gauge, counter, describe_counter, describe_gauge, gauge};

const CONSOLIDATIONS: &str = "precis_consolidations_total";
const RERANKINGS: &str = "precis_search_rerankings_total";
const SESSIONS_EXPIRED: &str = "precis_retention_sessions_erased_total";
const RETENTION_ERRORS: &str = "precis_retention_errors_total";
const RETENTION_LAST_RUN: &str = "precis_retention_last_run_timestamp_seconds";

/// Counters of consolidation runs and rerankings by outcome, and of retention.
#[derive(Clone, Debug)]
pub(super) struct ServiceMetrics {
    consolidated: Counter,
    not_due: Counter,
    in_progress: Counter,
    failed: Counter,
    /// Searches whose hits a model has ordered.
    pub(super) reranked: Counter,
    /// Searches whose hits kept the order by their words, although a pool is configured.
    pub(super) rerank_failed: Counter,
    /// Sessions that this replica has erased because they had expired.
    pub(super) sessions_expired: Counter,
    pub(super) retention_errors: Counter,
    /// The end of the last complete run of this replica, in seconds since 1970; 0 if there was none.
    pub(super) retention_last_run: Gauge,
}

impl ServiceMetrics {
    pub(super) fn new() -> Self {
        describe_counter!(CONSOLIDATIONS, "Finished consolidation runs by outcome");
        describe_counter!(RERANKINGS, "Searches with a pool for reranking, by outcome");
        describe_counter!(SESSIONS_EXPIRED, "Sessions erased because their retention had ended");
        describe_counter!(RETENTION_ERRORS, "Failed searches for expired sessions and failed erasures");
        describe_gauge!(
            RETENTION_LAST_RUN,
            "End of the last complete search for expired sessions by this replica"
        );
        let runs = |outcome| counter!(CONSOLIDATIONS, "outcome" => outcome);
        let rerankings = |outcome| counter!(RERANKINGS, "outcome" => outcome);
        Self {
            reranked: rerankings("reranked"),
            rerank_failed: rerankings("failed"),
            consolidated: runs("consolidated"),
            not_due: runs("not_due"),
            in_progress: runs("in_progress"),
            failed: runs("failed"),
            sessions_expired: counter!(SESSIONS_EXPIRED),
            retention_errors: counter!(RETENTION_ERRORS),
            retention_last_run: gauge!(RETENTION_LAST_RUN),
        }
    }

    /// Counts a finished run.
    pub(super) fn record_consolidation(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::Consolidated => &self.consolidated,
            Outcome::NotDue => &self.not_due,
            Outcome::InProgress => &self.in_progress,
            Outcome::Failed => &self.failed,
            // Outcomes of requests that start no run or do not wait for it.
            Outcome::Scheduled | Outcome::Disabled => return,
        };
        counter.increment(1);
    }
}
