//! The part of the state of the search index that a replica on Postgres remembers, so that exchanges can be indexed by their own
//! statement.

use super::{AppendRequest, append};
use crate::blocking;
use crate::domain::id::TenantId;
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::lexemes;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The lexemes of the messages of an exchange, without that of the user.
#[derive(Clone, Debug)]
pub struct ExchangeLexemes {
    pub(super) analyzer: Analyzer,
    pub(super) of_messages: Vec<String>,
}

/// A part of the index state that a replica on Postgres remembers.
#[derive(Debug, Default)]
pub(super) struct IndexHints {
    /// The analyzer of the index, if this release knows it. An exchange with another one is indexed later.
    analyzer: Mutex<Option<Analyzer>>,
    /// Tenants that may have missing messages, because row-level security hides the sessions of other tenants.
    tenants: Mutex<BTreeSet<TenantId>>,
}

impl IndexHints {
    pub(super) fn set_analyzer(&self, analyzer: Option<Analyzer>) {
        *lock(&self.analyzer) = analyzer;
    }

    pub(super) fn note_unindexed(&self, tenant: &TenantId) {
        lock(&self.tenants).insert(tenant.clone());
    }

    /// Removes and returns one of the tenants that may have missing messages.
    pub(super) fn take_unindexed(&self) -> Option<TenantId> {
        lock(&self.tenants).pop_first()
    }

    /// Returns the exchange with its lexemes, except if it is so large that others would wait for it.
    pub(super) async fn analyzed(&self, mut request: AppendRequest) -> AppendRequest {
        let analyzer = *lock(&self.analyzer);
        if let Some(analyzer) = analyzer.filter(|_| !append::is_large(&request)) {
            let (tenant, session) = (request.tenant.clone(), request.session.clone());
            let exchange = Arc::clone(&request.exchange);
            let analyze = move || {
                let of_message = |(message, _): &(Message, i64)| {
                    let lexemes = || lexemes::message_lexemes(analyzer, &tenant, &session, message);
                    catch_unwind(AssertUnwindSafe(lexemes)).ok()
                };
                exchange.messages.iter().map(of_message).collect::<Option<Vec<String>>>()
            };
            let bytes = append::message_bytes(&request);
            let of_messages = blocking::spawn_cpu_if_large(bytes, analyze).await;
            request.lexemes = of_messages.map(|of_messages| ExchangeLexemes { analyzer, of_messages });
        }
        request
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
