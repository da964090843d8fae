//! The part of the next context in which a message is.

use super::contexts::ContextOptions;
use super::{Error, MAX_PAGE_BYTES, MemoryService, MessageQuery};
use crate::domain::consolidation::Mode;
use crate::domain::coverage::{OmissionReason, OmittedRange};
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

/// The part of the next context in which a message is.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Placement {
    seq: i64,
    part: ContextPart,
    /// The reason for which the message is omitted, otherwise null.
    #[schema(required)]
    reason: Option<OmissionReason>,
    /// The message is also repeated before the new message, because it matches that.
    recalled: bool,
    /// Tokens of the message as it is sent, if it is shortened, otherwise null.
    #[schema(required)]
    sent_tokens: Option<i64>,
    /// The revision that summarised the message; null if the summary does not cover it.
    #[schema(required)]
    revision: Option<i64>,
    /// The sentences of the present summary that come from the message. The summary can cover it without one.
    sentences: Vec<String>,
}

impl MemoryService {
    /// Returns the part of the next context in which a message is. The context has the window of the latest context request, unless
    /// another one is given, and this new message. Nothing is consolidated.
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
        let window = state.window.map(|window| self.config.tokenizer.scale(window.tokens));
        let options = ContextOptions {
            user_message,
            max_tokens: max_tokens.or(window),
            mode: Some(Mode::Off),
            recall: self.default_recall(),
            is_preview: true,
            ..ContextOptions::default()
        };
        let context = self.build_context(tenant, session, options).await?;
        let coverage = &context.coverage;
        let contains = |range: &&OmittedRange| (range.from_seq..=range.to_seq).contains(&seq);
        let omitted = coverage.omitted.iter().find(contains).map(|range| range.reason);
        let shortened = coverage.shortened.iter().find(|message| message.seq == seq);
        let is_summarised = seq <= coverage.summary_through;
        let part = match omitted {
            _ if message.redacted_at.is_some() => ContextPart::Redacted,
            Some(_) => ContextPart::Omitted,
            None if is_summarised => ContextPart::Summarised,
            None if shortened.is_some() => ContextPart::Shortened,
            None => ContextPart::Verbatim,
        };
        let (mut revision, mut sentences) = (None, Vec::new());
        if is_summarised {
            revision = self.store.revision_of_message(tenant, session, seq).await?;
            let sources = self.revision_sources(tenant, session, state.revision).await?.sentences;
            let own = sources.into_iter().filter(|sentence| sentence.seq == Some(seq));
            sentences = own.filter(SentenceSource::is_supported).map(|own| own.text).collect();
        }
        let recalled = context.recall.iter().any(|found| found.seq == seq && found.session_id == *session);
        let sent_tokens = shortened.map(|message| message.sent_tokens);
        let reason = omitted.filter(|_| part == ContextPart::Omitted);
        Ok(Placement { seq, part, reason, recalled, sent_tokens, revision, sentences })
    }
}
