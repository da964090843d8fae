//! A context out of what was read: what fits, what is left out, and what it weighs.

use super::{Context, ContextOptions, ContextTokens, Outcome, Report};
use crate::domain::budget::{self, MessageCost};
use crate::domain::context::{self, CountedText, SystemMessage, SystemParts};
use crate::domain::coverage::{self, Coverage, OmissionReason, TailSelection};
use crate::domain::format::{Format, RenderInput, RenderedMessage};
use crate::domain::message::Message;
use crate::domain::message_metadata::ContextMessage;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::session::Session;
use crate::domain::tokens::{self, Tokenizer};
use crate::service::{Error, MemoryService, corrupt_message};
use crate::storage::ContextSnapshot;

impl MemoryService {
    /// What is sent: within the bound and the budget.
    pub(super) fn assemble(
        &self,
        snapshot: ContextSnapshot,
        request: ContextOptions,
        report: Report,
    ) -> Result<Context, Error> {
        let tokenizer = self.config.tokenizer;
        let system = self.system(&snapshot, &request);
        let ContextSnapshot { session, memory, mut tail, .. } = snapshot;
        let mut metadata: Vec<MessageMetadata> =
            tail.iter().map(|message| message.metadata.clone()).collect();
        let mut coverage = self.cover(session.as_ref(), &metadata, &report);
        let before = tail.iter().take_while(|message| message.seq < coverage.verbatim_from).count();
        metadata.drain(..before);
        tail.drain(..before);
        let mut history = request.format.render_messages(tail).map_err(corrupt_message)?;
        let user_message =
            request.user_message.map(|message| new(request.format, coverage.last_seq, &message));
        let user_message = user_message.transpose()?;
        let mut weights = Weights::of(tokenizer, &system, &history, user_message.as_ref());
        if let Some(most) = request.max_tokens {
            let first = weights.first_that_fits(&metadata, most)?;
            coverage.omit(first, OmissionReason::MaxTokens);
            history.drain(..first);
            weights.history.drain(..first);
        }
        let list = request.format.render_context(RenderInput {
            system: system.text,
            system_tokens: system.tokens,
            history,
            user_message,
            is_prefix_stable: coverage.omitted.is_empty(),
            cache_control: request.cache_control,
            tokenizer,
        });
        Ok(Context {
            tokens: weights.tokens(list.stable.tokens),
            list,
            coverage,
            summary_revision: session.as_ref().map_or(0, |session| session.revision),
            summary_words: session.as_ref().map_or(0, |session| session.summary.words),
            memory_version: memory.as_ref().map_or(0, |memory| memory.version),
            memory_words: memory.as_ref().map_or(0, |memory| memory.words),
            consolidation: report,
        })
    }

    fn system(&self, snapshot: &ContextSnapshot, request: &ContextOptions) -> SystemMessage {
        let ContextSnapshot { session, memory, .. } = snapshot;
        let memory =
            memory.as_ref().map(|memory| CountedText { text: &memory.content, tokens: memory.tokens });
        let summary = session.as_ref().map(|session| &session.summary);
        let summary = summary.map(|summary| CountedText { text: &summary.text, tokens: summary.tokens });
        let tail_len = session.as_ref().map_or(0, Session::tail_len);
        context::system_message(&SystemParts {
            system_prompt: request.system_prompt.as_deref().unwrap_or_default(),
            memory: memory.unwrap_or_default(),
            summary: summary.unwrap_or_default(),
            skills: &request.skills,
            notice: context::notice_due(tail_len, self.config.policy.max_history_messages),
        })
    }

    /// What covers which messages, whatever they weigh.
    fn cover(&self, session: Option<&Session>, metadata: &[MessageMetadata], report: &Report) -> Coverage {
        let policy = &self.config.policy;
        let verbatim = if self.config.recent_on_failure && report.outcome == Outcome::Failed {
            TailSelection::Recent { keep: policy.keep_recent }
        } else {
            TailSelection::Tail
        };
        coverage::plan_coverage(session, policy.max_history_messages, verbatim, metadata)
    }
}

/// What the parts of a context weigh, each message scaled by itself.
struct Weights {
    tokenizer: Tokenizer,
    system: i64,
    history: Vec<MessageCost>,
    user_message: i64,
}

impl Weights {
    fn of(
        tokenizer: Tokenizer,
        system: &SystemMessage,
        history: &[RenderedMessage],
        user_message: Option<&RenderedMessage>,
    ) -> Self {
        let weight = |piece: &RenderedMessage| MessageCost {
            tokens: tokenizer.scale(piece.tokens),
            tokens_if_first: tokenizer.scale(piece.tokens_as_first),
        };
        Self {
            tokenizer,
            system: tokenizer.scale(system.tokens),
            history: history.iter().map(weight).collect(),
            user_message: user_message.map_or(0, |piece| tokenizer.scale(piece.tokens)),
        }
    }

    /// The first message of the history that goes into a list of at most so many tokens.
    fn first_that_fits(&self, metadata: &[MessageMetadata], most: i64) -> Result<usize, Error> {
        let needed = tokens::PER_LIST + self.system + self.user_message;
        if needed > most {
            return Err(Error::BudgetTooSmall { most, needed, tokenizer: self.tokenizer });
        }
        Ok(budget::first_that_fits(metadata, &self.history, most - needed))
    }

    fn tokens(&self, stable: i64) -> ContextTokens {
        let first = self.history.first().map_or(0, |weight| weight.tokens_if_first);
        ContextTokens {
            system: self.system,
            history: first + self.history.iter().map(|weight| weight.tokens).sum::<i64>(),
            user_message: self.user_message,
            stable,
            tokenizer: self.tokenizer,
        }
    }
}

/// The message that the request brought, as it stands in the list.
fn new(format: Format, last_seq: i64, message: &Message) -> Result<RenderedMessage, Error> {
    let window = ContextMessage {
        seq: last_seq + 1,
        metadata: MessageMetadata::new(message, tokens::count_message(message)),
        json: message.json().to_owned(),
    };
    Ok(format.render_messages(vec![window]).map_err(corrupt_message)?.pop().unwrap_or_default())
}
