//! A context as it is answered.

use crate::http::json::stored;
use crate::service::Error;
use crate::service::contexts::Context;
use serde::Serialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// A context, ready to be sent to a model.
#[derive(Serialize, ToSchema)]
pub(in crate::http) struct ContextResponse {
    session_id: String,
    /// With the format `anthropic`: the system prompt (left out when empty); a text, or content blocks where
    /// `cache_control` was asked for.
    #[schema(value_type = Option<SystemBody>, nullable = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<Box<RawValue>>,
    /// System message (left out when empty; in the format `openai`), verbatim part of the tail, new user message.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Box<RawValue>>,
    cache: CacheBody,
    /// Tool calls and results in `messages` that are no part of the history: a result where none was recorded, a call
    /// where only its result is left. Providers refuse a list in which one stands without the other.
    inserted: usize,
    coverage: CoverageBody,
    summary: SummaryRef,
    memory: MemoryRef,
    consolidation: ConsolidationReport,
    tokens: TokenCounts,
}

/// A system prompt of Anthropic's.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the document needs its shape only")]
enum SystemBody {
    Text(String),
    Blocks(Vec<serde_json::Map<String, serde_json::Value>>),
}

/// What will be the same in the next context: a provider that caches prompts has it already. It is, as long as nothing is
/// summarised or restored, the memory document stays, no messages have to be left out soon (the notice of that is part of
/// the system message), and the request has the same `system_prompt`, `skills` and `include_memory_skill`.
#[derive(Serialize, ToSchema)]
struct CacheBody {
    /// The first messages, so many; the last may get further content blocks in the format `anthropic`.
    #[serde(rename = "stable_messages")]
    messages: usize,
    /// In the format `anthropic`: the first content blocks of the last of them, so many.
    #[serde(rename = "stable_blocks", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    blocks: Option<usize>,
    /// Tokens of all that, the system prompt included.
    #[serde(rename = "stable_tokens")]
    tokens: i64,
}

/// What covers which messages: the summary, the omitted ranges and the verbatim part cover 1 … `last_seq` exactly once.
#[derive(Serialize, ToSchema)]
struct CoverageBody {
    /// The newest message; 0 = none.
    last_seq: i64,
    /// The last message that the summary covers; 0 = none.
    summary_through: i64,
    /// The first message that is sent verbatim; `last_seq + 1` where none is.
    verbatim_from: i64,
    /// What is in neither part.
    omitted: Vec<OmittedRange>,
}

#[derive(Serialize, ToSchema)]
struct OmittedRange {
    from_seq: i64,
    to_seq: i64,
    /// `max_history_messages`, `on_failure` or `max_tokens`.
    reason: &'static str,
}

#[derive(Serialize, ToSchema)]
struct SummaryRef {
    /// 0 = there is no summary.
    revision: i64,
    words: i64,
}

#[derive(Serialize, ToSchema)]
struct MemoryRef {
    /// 0 = never written.
    version: i64,
    words: i64,
}

/// What became of consolidation in this request.
#[derive(Serialize, ToSchema)]
struct ConsolidationReport {
    /// `not_due`, `consolidated`, `scheduled`, `in_progress`, `failed` or `disabled`.
    outcome: &'static str,
    /// Messages that were summarised.
    messages: i64,
    /// Whether the summary was compressed.
    meta: bool,
    /// The model that did it.
    model: Option<String>,
    /// After a failure: before this time it isn't tried again.
    #[serde(with = "time::serde::rfc3339::option")]
    retry_at: Option<OffsetDateTime>,
    /// Why it failed; null where it did not.
    reason: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct TokenCounts {
    /// The sum. `max_tokens` leaves room for 3 more, which a provider adds to each list.
    total: i64,
    system: i64,
    history: i64,
    user_message: i64,
    /// What counted them.
    tokenizer: String,
}

/// The answer to a request for a context.
pub(super) fn respond(session_id: &str, context: Context) -> Result<ContextResponse, Error> {
    let Context { list, tokens, consolidation: report, .. } = context;
    let omitted = context.coverage.omitted.iter().map(|omitted| OmittedRange {
        from_seq: omitted.from_seq,
        to_seq: omitted.to_seq,
        reason: omitted.reason.as_str(),
    });
    Ok(ContextResponse {
        session_id: session_id.to_owned(),
        system: list.system.map(stored).transpose()?,
        messages: list.messages.into_iter().map(stored).collect::<Result<_, _>>()?,
        cache: CacheBody {
            messages: list.stable.messages,
            blocks: list.stable.blocks,
            tokens: tokens.stable,
        },
        inserted: list.inserted,
        coverage: CoverageBody {
            last_seq: context.coverage.last_seq,
            summary_through: context.coverage.summary_through,
            verbatim_from: context.coverage.verbatim_from,
            omitted: omitted.collect(),
        },
        summary: SummaryRef { revision: context.summary_revision, words: context.summary_words },
        memory: MemoryRef { version: context.memory_version, words: context.memory_words },
        consolidation: ConsolidationReport {
            outcome: report.outcome.as_str(),
            messages: report.messages,
            meta: report.meta,
            model: report.model,
            retry_at: report.retry_at,
            reason: report.reason,
        },
        tokens: TokenCounts {
            total: tokens.system + tokens.history + tokens.user_message,
            system: tokens.system,
            history: tokens.history,
            user_message: tokens.user_message,
            tokenizer: tokens.tokenizer.to_string(),
        },
    })
}
