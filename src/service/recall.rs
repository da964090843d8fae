//! Recall: searches earlier messages that match the new message of a context request.

use super::contexts::{Context, ContextOptions};
use super::search::{SearchFilter, SearchHit, SearchRequest, SearchResults};
use super::{MemoryService, decode_message};
use crate::domain::budget::shorten_text;
use crate::domain::error_chain::ErrorChain;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::recall::{self, RecallOptions, RecallScope, RecalledMessage};
use crate::domain::search::MessageRef;
use crate::domain::search::query::Query;
use crate::domain::tokens;
use std::time::Duration;
use tokio::time::timeout;

/// Tokens of recalled messages without a window, and their share of a window.
const DEFAULT_TOKENS: i64 = 800;
const WINDOW_SHARE: i64 = 10;
/// Tokens of a block around its messages, and of the ends of its lines.
const BLOCK_TOKENS: i64 = 48;
/// A message takes at most this part of the tokens.
const MAX_PART: i64 = 2;
/// A context does not wait longer for a search.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Messages are recalled if one of the hits contains a word whose weight is at least this share of the greatest possible one, so that
/// common words recall nothing. The shares were chosen by `scripts/remember`: most questions recall messages, small talk none.
const MIN_WORD_WEIGHT: f64 = 0.6;
/// Its score is at least this share of the weight of a word that occurs once.
const MIN_SCORE: f64 = 0.9;
/// The scores of the others are at least this share of the best one. An answer often shares its words with its neighbours only.
const MIN_RELATIVE_SCORE: f64 = 0.4;

impl MemoryService {
    /// Returns the recall of requests that do not specify it.
    #[must_use]
    pub fn default_recall(&self) -> Option<RecallOptions> {
        self.config.recall
    }

    /// Returns the number of tokens that recalled messages may have.
    pub(super) fn recall_tokens(&self, options: &ContextOptions) -> i64 {
        let max_tokens = options.recall.and_then(|recall| recall.max_tokens);
        let default = || self.list_tokens(options).map_or(DEFAULT_TOKENS, |window| window / WINDOW_SHARE);
        max_tokens.unwrap_or_else(default)
    }

    /// Returns the earlier messages that match the new message best and that `context` does not contain, in the order of the history. A
    /// search that fails is logged, and recalls nothing.
    pub(super) async fn recall(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        options: &ContextOptions,
        context: &Context,
    ) -> Vec<RecalledMessage> {
        let (Some(recall), Some(message)) = (options.recall, &options.user_message) else {
            return Vec::new();
        };
        let before = context.coverage.verbatim_from;
        // Without a user, the session is the whole scope: other sessions without a user are those of others.
        let (session_filter, user) = match (recall.scope, &context.user) {
            (RecallScope::User, Some(user)) => (None, Some(user.clone())),
            _ => (Some(session.clone()), None),
        };
        let is_everything_sent = before <= 1 && user.is_none();
        let text = recall::query(message.content());
        let room = self
            .list_tokens(options)
            .map_or(i64::MAX, |window| window - tokens::PER_LIST - context.tokens.total);
        let budget = self.recall_tokens(options).min(room) - BLOCK_TOKENS;
        let Some(analyzer) = self.config.search else { return Vec::new() };
        let is_worthless =
            Query::parse(analyzer, &text).map_or(true, |query| query.has_only_stop_words(analyzer));
        if is_everything_sent || is_worthless || budget <= 0 || recall.limit == 0 {
            return Vec::new();
        }
        let unseen = Some(MessageRef { session: session.clone(), seq: before });
        let filter = SearchFilter { session: session_filter, user, unseen, ..SearchFilter::default() };
        let request = SearchRequest {
            text,
            filter,
            limit: recall.limit,
            neighbours: 0,
            with_messages: true,
            reranks: false,
        };
        match timeout(TIMEOUT, self.search(tenant, request)).await {
            Ok(Ok(results)) => self.choose(results, session, budget),
            Ok(Err(error)) => {
                tracing::warn!(error = %ErrorChain(&error), "failed to search for earlier messages for a context");
                Vec::new()
            }
            Err(_elapsed) => {
                tracing::warn!(timeout = ?TIMEOUT, "timed out searching for earlier messages for a context");
                Vec::new()
            }
        }
    }

    /// Returns the best hits above the threshold, as many as fit.
    fn choose(&self, results: SearchResults, session: &SessionId, mut budget: i64) -> Vec<RecalledMessage> {
        let (max_tokens, greatest) = (budget / MAX_PART, results.greatest_weight);
        let best = results.hits.first().map_or(0.0, |hit| hit.score);
        let is_good = |hit: &SearchHit| {
            hit.word_weight >= greatest * MIN_WORD_WEIGHT && hit.score >= greatest * MIN_SCORE
        };
        if !results.hits.iter().any(is_good) {
            return Vec::new();
        }
        let mut recalled = Vec::new();
        for hit in results.hits.into_iter().filter(|hit| hit.score >= best * MIN_RELATIVE_SCORE) {
            let Some(message) = hit.message.and_then(|json| decode_message(&json).ok()) else { continue };
            let message = RecalledMessage {
                session_id: hit.session_id,
                seq: hit.seq,
                created_at: hit.created_at,
                role: hit.role,
                name: message.name().map(str::to_owned),
                text: shorten_text(message.content(), hit.seq, max_tokens),
                score: hit.score,
            };
            let tokens = self.config.tokenizer.scale(tokens::count_text(&message.line(session)) + 1);
            if tokens <= budget {
                budget -= tokens;
                recalled.push(message);
            }
        }
        recalled
            .sort_by(|a, b| (a.created_at, &a.session_id, a.seq).cmp(&(b.created_at, &b.session_id, b.seq)));
        recalled
    }
}
