//! A context out of what was read: what fits, what is left out, and what it weighs.

use super::{Context, Outcome, Report, Request, Tokens};
use crate::domain::budget::{self, Weight};
use crate::domain::context::{self, Counted, System, SystemParts};
use crate::domain::coverage::{self, Coverage, Reason, Verbatim};
use crate::domain::cut::Mark;
use crate::domain::format::{Draft, Format, Piece};
use crate::domain::message::Message;
use crate::domain::session::Session;
use crate::domain::tokens::{self, Tokenizer};
use crate::domain::window::WindowMessage;
use crate::service::{Error, MemoryService, no_message};
use crate::storage::recall::Recalled;

impl MemoryService {
    /// What is sent: within the bound and the budget.
    pub(super) fn assemble(
        &self,
        recalled: Recalled,
        request: Request,
        report: Report,
    ) -> Result<Context, Error> {
        let tokenizer = self.rules.tokenizer;
        let system = self.system(&recalled, &request);
        let Recalled { session, memory, mut window, .. } = recalled;
        let mut marks: Vec<Mark> = window.iter().map(|message| message.mark.clone()).collect();
        let mut coverage = self.cover(session.as_ref(), &marks, &report);
        let before = window.iter().take_while(|message| message.seq < coverage.verbatim_from).count();
        marks.drain(..before);
        window.drain(..before);
        let mut history = request.format.pieces(window).map_err(no_message)?;
        let user_message =
            request.user_message.map(|message| new(request.format, coverage.last_seq, &message));
        let user_message = user_message.transpose()?;
        let mut weights = Weights::of(tokenizer, &system, &history, user_message.as_ref());
        if let Some(most) = request.max_tokens {
            let first = weights.first_that_fits(&marks, most)?;
            coverage.omit(first, Reason::MaxTokens);
            history.drain(..first);
            weights.history.drain(..first);
        }
        let list = request.format.list(Draft {
            system: system.text,
            system_tokens: system.tokens,
            history,
            user_message,
            begins_the_same: coverage.omitted.is_empty(),
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

    fn system(&self, recalled: &Recalled, request: &Request) -> System {
        let Recalled { session, memory, .. } = recalled;
        let memory = memory.as_ref().map(|memory| Counted { text: &memory.content, tokens: memory.tokens });
        let summary = session.as_ref().map(|session| &session.summary);
        let summary = summary.map(|summary| Counted { text: &summary.text, tokens: summary.tokens });
        let tail_len = session.as_ref().map_or(0, Session::tail_len);
        context::system_message(&SystemParts {
            system_prompt: request.system_prompt.as_deref().unwrap_or_default(),
            memory: memory.unwrap_or_default(),
            summary: summary.unwrap_or_default(),
            skills: &request.skills,
            notice: context::notice_due(tail_len, self.rules.policy.max_history_messages),
        })
    }

    /// What covers which messages, whatever they weigh.
    fn cover(&self, session: Option<&Session>, marks: &[Mark], report: &Report) -> Coverage {
        let policy = &self.rules.policy;
        let verbatim = if self.rules.recent_on_failure && report.outcome == Outcome::Failed {
            Verbatim::Recent { keep: policy.keep_recent }
        } else {
            Verbatim::Tail
        };
        coverage::decide(session, policy.max_history_messages, verbatim, marks)
    }
}

/// What the parts of a context weigh, each message scaled by itself.
struct Weights {
    tokenizer: Tokenizer,
    system: i64,
    history: Vec<Weight>,
    user_message: i64,
}

impl Weights {
    fn of(tokenizer: Tokenizer, system: &System, history: &[Piece], user_message: Option<&Piece>) -> Self {
        let weight = |piece: &Piece| Weight {
            tokens: tokenizer.scale(piece.tokens),
            as_first: tokenizer.scale(piece.tokens_as_first),
        };
        Self {
            tokenizer,
            system: tokenizer.scale(system.tokens),
            history: history.iter().map(weight).collect(),
            user_message: user_message.map_or(0, |piece| tokenizer.scale(piece.tokens)),
        }
    }

    /// The first message of the history that goes into a list of at most so many tokens.
    fn first_that_fits(&self, marks: &[Mark], most: i64) -> Result<usize, Error> {
        let needed = tokens::PER_LIST + self.system + self.user_message;
        if needed > most {
            return Err(Error::BudgetTooSmall { most, needed, tokenizer: self.tokenizer });
        }
        Ok(budget::first_that_fits(marks, &self.history, most - needed))
    }

    fn tokens(&self, stable: i64) -> Tokens {
        let first = self.history.first().map_or(0, |weight| weight.as_first);
        Tokens {
            system: self.system,
            history: first + self.history.iter().map(|weight| weight.tokens).sum::<i64>(),
            user_message: self.user_message,
            stable,
            tokenizer: self.tokenizer,
        }
    }
}

/// The message that the request brought, as it stands in the list.
fn new(format: Format, last_seq: i64, message: &Message) -> Result<Piece, Error> {
    let window = WindowMessage {
        seq: last_seq + 1,
        tokens: tokens::of_message(message),
        mark: Mark::of(message),
        json: message.json().to_owned(),
    };
    Ok(format.pieces(vec![window]).map_err(no_message)?.pop().unwrap_or_default())
}
