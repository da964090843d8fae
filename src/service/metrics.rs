//! Metrics of the service. They belong to the recorder that is installed when they are created, as those of the models do.

use super::consolidation::Outcome;
use metrics::{Counter, counter, describe_counter};

const CONSOLIDATIONS: &str = "precis_consolidations_total";

/// Counters of consolidation runs by outcome.
#[derive(Clone, Debug)]
pub(super) struct ServiceMetrics {
    consolidated: Counter,
    not_due: Counter,
    in_progress: Counter,
    failed: Counter,
}

impl ServiceMetrics {
    pub(super) fn new() -> Self {
        describe_counter!(CONSOLIDATIONS, "Finished consolidation runs by outcome");
        let runs = |outcome| counter!(CONSOLIDATIONS, "outcome" => outcome);
        Self {
            consolidated: runs("consolidated"),
            not_due: runs("not_due"),
            in_progress: runs("in_progress"),
            failed: runs("failed"),
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
