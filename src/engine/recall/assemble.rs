//! A context out of what was read: what fits, what is left out, and what it weighs.

use super::{Context, Outcome, Report, Request, Tokens};
use crate::domain::budget::{self, Weight};
use crate::domain::context::{self, Counted, SystemParts};
use crate::domain::coverage::{self, Reason, Verbatim};
use crate::domain::cut::Mark;
use crate::domain::format::{Draft, Format, Piece};
use crate::domain::message::{Invalid, Message};
use crate::domain::session::Session;
use crate::domain::tokens;
use crate::domain::window::WindowMessage;
use crate::engine::{Error, MemoryService};
use crate::storage::StoreError;
use crate::storage::recall::Recalled;

impl MemoryService {
    pub(super) fn assemble(
        &self,
        recalled: Recalled,
        request: Request,
        report: Report,
    ) -> Result<Context, Error> {
        let (policy, tokenizer) = (&self.rules.policy, self.rules.tokenizer);
        let Recalled { session, memory, mut window, .. } = recalled;
        let verbatim = if self.rules.recent_on_failure && report.outcome == Outcome::Failed {
            Verbatim::Recent { keep: policy.keep_recent }
        } else {
            Verbatim::Tail
        };
        let mut marks: Vec<Mark> = window.iter().map(|message| message.mark.clone()).collect();
        let mut coverage = coverage::decide(session.as_ref(), policy.max_history_messages, verbatim, &marks);
        marks.drain(..window.iter().take_while(|message| message.seq < coverage.verbatim_from).count());
        window.retain(|message| message.seq >= coverage.verbatim_from);

        let tail_len = session.as_ref().map_or(0, Session::tail_len);
        let summary = session.as_ref().map(|session| &session.summary);
        let system_prompt = request.system_prompt.unwrap_or_default();
        let system = context::system_message(&SystemParts {
            system_prompt: &system_prompt,
            memory: memory.as_ref().map_or_else(Counted::default, |memory| Counted {
                text: &memory.content,
                tokens: memory.tokens,
            }),
            summary: summary.map_or_else(Counted::default, |summary| Counted {
                text: &summary.text,
                tokens: summary.tokens,
            }),
            skills: &request.skills,
            notice: context::notice_due(tail_len, policy.max_history_messages),
        });
        let mut history = request.format.pieces(window).map_err(corrupt)?;
        let user_message =
            request.user_message.map(|message| new(request.format, coverage.last_seq, &message));
        let user_message = user_message.transpose()?;

        let system_tokens = tokenizer.scale(system.tokens);
        let user_tokens = user_message.as_ref().map_or(0, |piece| tokenizer.scale(piece.tokens));
        let weights: Vec<Weight> = history
            .iter()
            .map(|piece| Weight {
                tokens: tokenizer.scale(piece.tokens),
                as_first: tokenizer.scale(piece.tokens_as_first),
            })
            .collect();
        let mut first = 0;
        if let Some(most) = request.max_tokens {
            let needed = tokens::PER_LIST + system_tokens + user_tokens;
            if needed > most {
                return Err(Error::BudgetTooSmall { most, needed, tokenizer });
            }
            first = budget::first_that_fits(&marks, &weights, most - needed);
            coverage.omit(first, Reason::MaxTokens);
            history.drain(..first);
        }
        let sent = weights.get(first..).unwrap_or_default();
        let history_tokens = sent.iter().map(|weight| weight.tokens).sum::<i64>()
            + sent.first().map_or(0, |weight| weight.as_first);
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
            tokens: Tokens {
                system: system_tokens,
                history: history_tokens,
                user_message: user_tokens,
                stable: list.stable.tokens,
                tokenizer,
            },
            list,
            coverage,
            summary_revision: session.as_ref().map_or(0, |session| session.revision),
            summary_words: summary.map_or(0, |summary| summary.words),
            memory_version: memory.as_ref().map_or(0, |memory| memory.version),
            memory_words: memory.as_ref().map_or(0, |memory| memory.words),
            consolidation: report,
        })
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
    Ok(format.pieces(vec![window]).map_err(corrupt)?.pop().unwrap_or_default())
}

fn corrupt(_: Vec<Invalid>) -> StoreError {
    StoreError::Corrupt { what: "a message", why: "not of the chat format".into() }
}
