//! The part of the state of the search index that a replica remembers, so that exchanges can be indexed by their own statement.

use super::append::SessionGroup;
use super::values::DbTime;
use super::{AppendRequest, append};
use crate::blocking;
use crate::domain::id::TenantId;
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::index_terms;
use crate::domain::search::recent::RecentTerms;
use crate::domain::search::text::OwnResults;
use foldhash::HashMap;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The terms of the messages of an exchange.
#[derive(Clone, Debug)]
pub struct ExchangeTerms {
    pub(super) analyzer: Analyzer,
    /// Those of each message, separated by spaces.
    pub(super) of_messages: Vec<String>,
}

/// The terms of the messages of a batch.
pub(super) struct BatchTerms {
    pub(super) analyzer: Analyzer,
    /// Those of each group, as [`RecentTerms`].
    pub(super) of_groups: Vec<String>,
}

impl BatchTerms {
    /// Returns the terms of the messages of groups, or `None` if an exchange has none, or those of another analyzer.
    pub(super) fn new(requests: &[AppendRequest], groups: &[SessionGroup<'_>]) -> Option<Self> {
        let mut exchanges = groups.iter().flat_map(|group| group.exchanges(requests));
        let analyzer_of = |request: &AppendRequest| Some(request.terms.as_ref()?.analyzer);
        let analyzer = analyzer_of(exchanges.next()?.1)?;
        let of_group = |group: &SessionGroup<'_>| {
            let mut text = String::with_capacity(usize::try_from(group.bytes).unwrap_or_default());
            for (_, AppendRequest { exchange, terms, .. }, offset) in group.exchanges(requests) {
                let mut times = exchange.given_times();
                let of_messages = terms.iter().flat_map(|terms| &terms.of_messages);
                for (position, terms) in (offset..).zip(of_messages) {
                    let micros = times.next().flatten().map(|time| DbTime(time).micros());
                    RecentTerms { from_end: group.messages - 1 - position, micros, terms }.write(&mut text);
                }
            }
            text
        };
        let is_complete = exchanges.all(|(_, request, _)| analyzer_of(request) == Some(analyzer));
        is_complete.then(|| Self { analyzer, of_groups: groups.iter().map(of_group).collect() })
    }
}

/// A part of the index state that a replica remembers.
#[derive(Debug, Default)]
pub(super) struct IndexHints {
    /// The analyzer of the index, if this release knows it. An exchange with another one is indexed later.
    analyzer: Mutex<Option<Analyzer>>,
    /// Tenants that may have work for the index worker. Row-level security hides the sessions of other tenants.
    tenants: Mutex<BTreeSet<TenantId>>,
    /// Number of rows, and of their messages, that were added for each tenant since the last work for it.
    recent: Mutex<HashMap<TenantId, (usize, i64)>>,
    /// The tenant that the worker took last.
    last_taken: Mutex<Option<TenantId>>,
    /// The turns of the tenants in which messages are being removed from the index.
    removals: Mutex<HashMap<TenantId, Arc<tokio::sync::Mutex<()>>>>,
}

/// There is work for the worker after so many rows, or so many messages. Each search reads all of them, at about 2 µs per message.
pub(super) const MAX_RECENT_ROWS: usize = 32;
pub(super) const MAX_RECENT_MESSAGES: i64 = 512;
/// The largest number of tenants whose rows are counted. The worker looks at the others when it looks for missing messages.
const MAX_COUNTED_TENANTS: usize = 10_000;

impl IndexHints {
    pub(super) fn set_analyzer(&self, analyzer: Option<Analyzer>) {
        *lock(&self.analyzer) = analyzer;
    }

    pub(super) fn note_unindexed(&self, tenant: &TenantId) {
        lock(&self.tenants).insert(tenant.clone());
    }

    /// Remembers that a row with the messages of each tenant of the groups of a batch was added.
    pub(super) fn note_batch(&self, groups: &[SessionGroup<'_>]) {
        for of_tenant in groups.chunk_by(|a, b| a.tenant == b.tenant) {
            let Some(first) = of_tenant.first() else { continue };
            self.note_row(first.tenant, of_tenant.iter().map(|group| group.messages).sum());
        }
    }

    /// Remembers that a row with messages of a tenant was added. After some rows, there is work for the worker.
    pub(super) fn note_row(&self, tenant: &TenantId, added: i64) {
        let mut recent = lock(&self.recent);
        if recent.len() >= MAX_COUNTED_TENANTS && !recent.contains_key(tenant) {
            recent.clear();
        }
        let (rows, messages) = recent.entry(tenant.clone()).or_default();
        *rows += 1;
        *messages += added;
        if *rows >= MAX_RECENT_ROWS || *messages >= MAX_RECENT_MESSAGES {
            recent.remove(tenant);
            self.note_unindexed(tenant);
        }
    }

    /// Removes and returns one of the tenants that may have work for the worker, each in its turn.
    pub(super) fn take_tenant(&self) -> Option<TenantId> {
        let (mut tenants, mut last) = (lock(&self.tenants), lock(&self.last_taken));
        let following = last.as_ref().and_then(|last| {
            tenants.range::<TenantId, _>((Bound::Excluded(last), Bound::Unbounded)).next().cloned()
        });
        let tenant = following.or_else(|| tenants.first().cloned())?;
        tenants.remove(&tenant);
        *last = Some(tenant.clone());
        Some(tenant)
    }

    /// Returns the turn of removing messages of a tenant from the index: concurrent removals would write the same segments.
    pub(super) fn removal_turn(&self, tenant: &TenantId) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = lock(&self.removals);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(tenant.clone()).or_default())
    }

    /// Returns the exchange with its terms, except if it is so large that others would wait for it.
    pub(super) async fn analyzed(&self, mut request: AppendRequest) -> AppendRequest {
        let analyzer = *lock(&self.analyzer);
        if let Some(analyzer) = analyzer.filter(|_| !append::is_large(&request)) {
            let exchange = Arc::clone(&request.exchange);
            let analyze = move || {
                let mut own_results = OwnResults::default();
                let of_message = |(message, _): &(Message, i64)| {
                    let terms = || index_terms::message_terms(analyzer, message, &mut own_results);
                    catch_unwind(AssertUnwindSafe(terms)).ok()
                };
                exchange.messages.iter().map(of_message).collect::<Option<Vec<String>>>()
            };
            let bytes = append::message_bytes(&request);
            let of_messages = blocking::spawn_cpu_to_count(bytes, analyze).await;
            request.terms = of_messages.map(|of_messages| ExchangeTerms { analyzer, of_messages });
        }
        request
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
