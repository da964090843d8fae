//! The part of the next context in which a message is.

use super::contexts::ContextOptions;
use super::{Error, MAX_PAGE_BYTES, MemoryService, MessageQuery};
use crate::capacity::WorkPermit;
use crate::domain::consolidation::Mode;
use crate::domain::coverage::{OmissionReason, OmittedRange, ShortenedMessage};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::summary_sources::SentenceSource;
use serde::Serialize;
use utoipa::ToSchema;

/// The part of a context in which a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContextPart {
    /// It is sent as it was stored.
    Verbatim,
    /// Its beginning and end are sent.
    Shortened,
    /// The summary covers it.
    Summarised,
    /// It is neither sent nor summarised.
    Omitted,
    /// Its content was removed; a placeholder is sent if it is in the verbatim part.
    Redacted,
}

/// The place of a message in the next context.
#[derive(Clone, Debug)]
pub struct Placement {
    pub part: ContextPart,
    /// The reason of an omission.
    pub reason: Option<OmissionReason>,
    /// Tokens before and after a message was shortened.
    pub shortened: Option<ShortenedMessage>,
    /// The message is repeated before the new message, because it matches that.
    pub is_recalled: bool,
    /// The revision that summarised it.
    pub revision: Option<i64>,
    /// The sentences of the present summary that come from it.
    pub sentences: Vec<String>,
}

impl MemoryService {
    /// Returns the place of a message in the next context: with the window of the latest context request, unless another one is given, and
    /// with this new message. Nothing is consolidated.
    pub async fn placement(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        seq: i64,
        max_tokens: Option<i64>,
        user_message: Option<Message>,
    ) -> Result<Placement, Error> {
        let state = self.session(tenant, session).await?;
        let query = MessageQuery {
            after_seq: seq.saturating_sub(1),
            before_seq: seq.saturating_add(1),
            descending: false,
            limit: 1,
            max_bytes: MAX_PAGE_BYTES,
        };
        let found = self.messages(tenant, session, query).await?.messages.pop();
        let message = found.ok_or(Error::MessageNotFound { seq, last_seq: state.last_seq })?;
        // The system prompt of the client is not known, only the tokens that the last one left.
        let scale = |tokens| self.config.tokenizer.scale(tokens);
        let latest = state.window.map(|window| (scale(window.tokens), scale(window.fixed)));
        let (max_tokens, fixed) = match (max_tokens, latest) {
            (Some(max_tokens), latest) => (Some(max_tokens), latest.map_or(0, |(_, fixed)| fixed)),
            (None, Some((tokens, fixed))) => (Some(tokens), fixed),
            (None, None) => (None, 0),
        };
        let options = ContextOptions {
            user_message,
            max_tokens,
            reserved_tokens: if max_tokens.is_some() {
                self.reserved_of(tenant, session, fixed).await?
            } else {
                0
            },
            mode: Some(Mode::Off),
            recall: self.default_recall(),
            permit: WorkPermit::default(),
            is_preview: true,
            ..ContextOptions::default()
        };
        let context = self.build_context(tenant, session, options).await?;
        let coverage = &context.coverage;
        let range = coverage
            .omitted
            .iter()
            .find(|OmittedRange { from_seq, to_seq, .. }| (*from_seq..=*to_seq).contains(&seq));
        let shortened = coverage.shortened.iter().copied().find(|message| message.seq == seq);
        let part = match range.map(|range| range.reason) {
            _ if message.redacted_at.is_some() => ContextPart::Redacted,
            Some(_) => ContextPart::Omitted,
            None if seq <= coverage.summary_through => ContextPart::Summarised,
            None if shortened.is_some() => ContextPart::Shortened,
            None => ContextPart::Verbatim,
        };
        let is_summarised = seq <= coverage.summary_through;
        let mut placement = Placement {
            part,
            reason: range.map(|range| range.reason).filter(|_| part == ContextPart::Omitted),
            shortened,
            is_recalled: context
                .recall
                .iter()
                .any(|recalled| recalled.seq == seq && recalled.session == *session),
            revision: None,
            sentences: Vec::new(),
        };
        if is_summarised {
            placement.revision = self.store.revision_of_message(tenant, session, seq).await?;
            let sources = self.revision_sources(tenant, session, state.revision).await?;
            let own = sources.sentences.into_iter().filter(|sentence| sentence.seq == Some(seq));
            placement.sentences = own.filter(SentenceSource::is_supported).map(|own| own.text).collect();
        }
        Ok(placement)
    }

    /// Returns the tokens to reserve so that a list without system prompt leaves as much room as one with `fixed` tokens.
    async fn reserved_of(&self, tenant: &TenantId, session: &SessionId, fixed: i64) -> Result<i64, Error> {
        let options = ContextOptions { mode: Some(Mode::Off), is_preview: true, ..ContextOptions::default() };
        let context = self.build_context(tenant, session, options).await?;
        let summary = self.session(tenant, session).await?.summary.tokens;
        Ok((fixed - (context.tokens.system - summary).max(0)).max(0))
    }
}
