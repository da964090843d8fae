//! Error responses: problem documents (RFC 9457). This is the one table that maps errors to status codes, and the one
//! place that logs them.
//!
//! Each error has two texts: `detail` tells the client what to do, and the log gets the cause. A `detail` states the
//! problem, the value, and the fix. To add a problem type, add a constructor here and a line in `docs/errors.md`.

use super::path::redact_path;
use super::response_body::Json;
use crate::capacity::{Level, Overloaded};
use crate::config::Limits;
use crate::domain::api_key::Scope;
use crate::domain::error_chain::ErrorChain;
use crate::domain::export_format::LineError;
use crate::domain::message::Role;
use crate::domain::shorten::shorten_middle;
use crate::domain::sync::Divergence;
use crate::domain::tokens::Tokenizer;
use crate::domain::tool::{Tool, ToolError};
use crate::domain::validation::FieldError;
use crate::proxy::ProxyError;
use crate::service::{Error, StoreError};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::any::Any;
use std::fmt::Write as _;
use std::time::Duration;
use utoipa::ToSchema;

const TYPE_PREFIX: &str = "urn:precis:problem:";
/// The largest number of fields that a response lists: a request can have a million invalid ones.
pub(super) const MAX_ERRORS: usize = 100;
/// Longest name of a field in an error.
const MAX_FIELD_CHARS: usize = 150;
/// Longest text of an error of a field, which may contain a value of the request.
const MAX_DETAIL_CHARS: usize = 600;
/// `Retry-After` while the store is unavailable or has another schema.
const RETRY_SECONDS: u32 = 2;
/// `Retry-After` under overload.
const OVERLOADED_SECONDS: u32 = 1;

/// A problem document.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Problem {
    /// Stable name of the problem type.
    #[serde(rename = "type")]
    #[schema(example = "urn:precis:problem:session-not-found")]
    kind: String,
    /// The problem type in words.
    title: String,
    /// The HTTP status.
    status: u16,
    /// The problem and how to solve it.
    detail: String,
    /// The invalid fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
    /// `seq` of the last message of the session, 0 = none; of `last-seq-mismatch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_seq: Option<i64>,
    /// The present revision of the session, 0 = none; of `revision-mismatch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<i64>,
    /// `seq` of the first message that is not the stored one; of `history-diverged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    diverged_at: Option<i64>,
    /// Role of the stored message; of `history-diverged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_role: Option<Role>,
    /// Role of the message in the list; of `history-diverged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    given_role: Option<Role>,
    #[serde(skip)]
    retry_after: Option<u32>,
    #[serde(skip)]
    exceeded_limit: Option<&'static ExceededLimit>,
    /// The response closes the connection, because the rest of the request body is not read.
    #[serde(skip)]
    is_closing: bool,
}

/// The limit that a request exceeded. Responses carry it in their extensions for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExceededLimit {
    /// The name of the setting.
    pub(crate) limit: &'static str,
    /// The service has too many requests; nothing is wrong with this one.
    pub(crate) is_overload: bool,
}

impl ExceededLimit {
    const BODY: Self = Self { limit: "limits.max_body_bytes", is_overload: false };
    const IMPORT: Self = Self { limit: "limits.max_import_bytes", is_overload: false };
    const READ_TIMEOUT: Self = Self { limit: "server.read_timeout", is_overload: false };
    const RATE: Self = Self { limit: "limits.requests_per_second", is_overload: false };
    const REQUEST_TIMEOUT: Self = Self { limit: "server.request_timeout", is_overload: false };
    const IN_FLIGHT: Self = Self { limit: "limits.max_requests_in_flight", is_overload: true };
    const CONCURRENT: Self = Self { limit: "limits.max_concurrent_requests", is_overload: true };
    const MEMORY: Self = Self { limit: "limits.max_bytes_in_flight", is_overload: true };
    const CONNECTIONS: Self = Self { limit: "database.max_connections", is_overload: true };
    const SHARE: Self = Self { limit: "limits.max_key_share", is_overload: true };
}

impl Problem {
    fn new(status: StatusCode, name: &str, title: &str, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("{TYPE_PREFIX}{name}"),
            title: title.to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            last_seq: None,
            revision: None,
            diverged_at: None,
            stored_role: None,
            given_role: None,
            retry_after: None,
            exceeded_limit: None,
            is_closing: false,
        }
    }

    fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    fn exceeded_limit(self, limit: &'static ExceededLimit) -> Self {
        Self { exceeded_limit: Some(limit), ..self }
    }

    /// Makes the response close the connection.
    pub(crate) fn closing(self) -> Self {
        Self { is_closing: true, ..self }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }
}

/// Requests that cannot be read, or have invalid values.
impl Problem {
    pub(crate) fn invalid(errors: Vec<FieldError>) -> Self {
        let total = errors.len();
        Self::invalid_of(errors, total)
    }

    /// Reports errors that are the first ones of `total`.
    pub(super) fn invalid_of(mut errors: Vec<FieldError>, total: usize) -> Self {
        errors.truncate(MAX_ERRORS);
        let more = total.saturating_sub(errors.len());
        // Names and values of requests can be as long as their bodies.
        let ellipsis = |_| "…".to_owned();
        for error in &mut errors {
            error.field = shorten_middle(&error.field, MAX_FIELD_CHARS, ellipsis);
            error.detail = shorten_middle(&error.detail, MAX_DETAIL_CHARS, ellipsis);
        }
        let fields: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        let detail = format!("Correct these fields and send the request again: {}{more}.", fields.join(", "));
        Self {
            errors,
            ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-input", "Invalid input", detail)
        }
    }

    pub(crate) fn invalid_field(field: &str, detail: impl Into<String>) -> Self {
        Self::invalid(vec![FieldError::new(field, detail)])
    }

    fn message_not_found(seq: i64, last_seq: i64) -> Self {
        let detail = format!(
            "The session has no message {seq}; its last one is {last_seq}. A message that a rewind removed is in its branch."
        );
        Self::new(StatusCode::NOT_FOUND, "message-not-found", "Message not found", detail)
    }

    fn revision_redacted(redacted_seq: i64) -> Self {
        let detail = format!(
            "The revision has no summary any more, because message {redacted_seq} was redacted. Restore an earlier \
             revision, or consolidate the session."
        );
        Self::new(StatusCode::CONFLICT, "revision-redacted", "Revision redacted", detail)
    }

    fn revision_mismatch(based_on: i64, revision: i64) -> Self {
        let detail = format!(
            "The session is at revision {revision}, and based_on is {based_on}: its summary has changed. Nothing was written. \
             GET revision {revision}, and send the summary again if it still applies."
        );
        let title = "The summary has changed";
        let revision = Some(revision);
        Self { revision, ..Self::new(StatusCode::CONFLICT, "revision-mismatch", title, detail) }
    }

    /// Returns the error for a message that the session does not have.
    fn after_end(field: &str, seq: i64, last_seq: i64) -> Self {
        let detail = format!("is {seq}, and the last message of the session is {last_seq}: use at most that");
        Self::invalid_field(field, detail)
    }

    /// Returns the errors of one line of an import.
    fn invalid_line(error: LineError) -> Self {
        let line = error.line;
        let place = |field: &str| if field.is_empty() { String::new() } else { format!(", {field}") };
        let errors = error.errors.into_iter();
        let errors =
            errors.map(|error| FieldError::new(format!("line {line}{}", place(&error.field)), error.detail));
        Self::invalid(errors.collect())
    }

    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed-json", "Malformed JSON", detail)
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "Bad request", detail)
    }

    /// Returns the error for a body that ended early, because the client or its connection failed.
    pub(crate) fn incomplete_body() -> Self {
        Self::bad_request("The body is incomplete. Send the request again.")
    }

    pub(crate) fn unsupported_media_type() -> Self {
        Self::media_type("Send JSON with the header content-type: application/json.")
    }

    pub(crate) fn unsupported_media_type_for_document() -> Self {
        Self::media_type(
            "Send Markdown with the header content-type: text/markdown, or a JSON object with the field content and the header \
             content-type: application/json.",
        )
    }

    pub(crate) fn unsupported_media_type_for_lines() -> Self {
        Self::media_type("Send JSON lines with the header content-type: application/x-ndjson.")
    }

    fn media_type(detail: &str) -> Self {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "unsupported-media-type", "Unsupported media type", detail)
    }

    /// Returns the error for an unknown tool. Its text is for the model, which may have invented the name.
    pub(crate) fn tool_not_found(tools: impl Iterator<Item = Tool>) -> Self {
        let ToolError(detail) = ToolError::unknown_tool(tools);
        Self::new(StatusCode::NOT_FOUND, "tool-not-found", "Tool not found", detail)
    }
}

/// Requests without sufficient credentials.
impl Problem {
    /// Returns the same text for all invalid keys, so that it does not help to guess one.
    pub(crate) fn unauthorized() -> Self {
        let detail = "This request needs a valid API key: send it as `Authorization: Bearer precis_…`. \
            Create one with `precis keys create --tenant NAME`.";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "No valid API key", detail)
    }

    /// Returns the error for an `authorization` header that is not one bearer token.
    pub(crate) fn malformed_authorization() -> Self {
        let detail = "Send the header authorization once, in the form `Bearer precis_…`.";
        Self { detail: detail.to_owned(), ..Self::unauthorized() }
    }

    pub(crate) fn forbidden(actual: Scope, required: Scope) -> Self {
        let detail =
            format!("This request needs a key of the scope {required}; the key sent has the scope {actual}.");
        Self::new(StatusCode::FORBIDDEN, "forbidden", "Insufficient scope", detail)
    }

    /// Returns the error for a request without a key under a host name that an attacker may control.
    pub(crate) fn host_not_allowed(name: &str) -> Self {
        let detail = format!(
            "Without API keys, precis is served only at IP addresses, at localhost, and at the names in \
             server.allowed_hosts, which protects it against web pages. {name:?} is not allowed. Add it to \
             server.allowed_hosts, or create a key."
        );
        Self::new(StatusCode::FORBIDDEN, "host-not-allowed", "Host not allowed", detail)
    }

    fn rewind_forbidden() -> Self {
        let detail = "Messages cannot be removed, because sessions.allow_rewind is false. \
            Fork the session and continue in the fork.";
        Self::new(StatusCode::FORBIDDEN, "rewind-forbidden", "Rewinding is forbidden", detail)
    }

    /// Returns the error for a request without a key from a web page of another origin.
    pub(crate) fn origin_not_allowed(pages: &str) -> Self {
        let detail = format!(
            "Without API keys, {pages} may call only if server.cors_origins lists their origin. Add the origin there."
        );
        Self::new(StatusCode::FORBIDDEN, "origin-not-allowed", "Origin not allowed", detail)
    }
}

/// Requests that exceed a limit. Each text names the setting and its value.
impl Problem {
    pub(crate) fn body_too_large(limits: &Limits) -> Self {
        let max = limits.max_body_bytes;
        let detail =
            format!("The body may have at most {max} bytes (limits.max_body_bytes). Send less at once.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "Body too large", detail)
            .exceeded_limit(&ExceededLimit::BODY)
            .closing()
    }

    fn import_too_large(max: u64) -> Self {
        let detail = format!(
            "An import may have at most {max} bytes (limits.max_import_bytes). Nothing was imported. Run \
             `precis import` on the host of the database instead; it has no limit."
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "Body too large", detail)
            .exceeded_limit(&ExceededLimit::IMPORT)
    }

    /// Returns the error for a budget that the parts that cannot be omitted exceed.
    fn budget_too_small(max: i64, reserved: i64, needed: i64, tokenizer: Tokenizer) -> Self {
        let of_reserved =
            if reserved == 0 { String::new() } else { format!(", of which {reserved} are reserved") };
        let least = needed.saturating_add(reserved);
        let detail = format!(
            "System prompt, memory document, summary and newest turn have {needed} tokens ({tokenizer}) although results of \
             tools were shortened, and max_tokens is {max}{of_reserved}: allow at least {least}, or send less."
        );
        let field = FieldError::new("max_tokens", format!("must be at least {least}"));
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Self { errors: vec![field], ..Self::new(status, "budget-too-small", "Budget too small", detail) }
    }

    fn copy_too_large(messages: i64, max: usize) -> Self {
        let detail = format!(
            "{messages} messages would be copied, at most {max} are allowed (limits.max_fork_messages). Nothing was done. \
             Export the session and import the messages that you need."
        );
        let title = "The session is too large to copy";
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "copy-too-large", title, detail)
    }

    pub(crate) fn body_timeout(read_timeout: Duration) -> Self {
        let max = humantime::format_duration(read_timeout);
        let detail = format!(
            "The body did not arrive within {max} (server.read_timeout). Nothing was done. Send it faster, or send less at \
             once."
        );
        Self::new(StatusCode::REQUEST_TIMEOUT, "body-timeout", "Body too slow", detail)
            .exceeded_limit(&ExceededLimit::READ_TIMEOUT)
            .closing()
    }

    pub(crate) fn rate_limited(limits: &Limits, seconds: u32) -> Self {
        let Limits { requests_per_second, request_burst, .. } = limits;
        let detail = format!(
            "The key exceeds {requests_per_second} requests per second (limits.requests_per_second) with bursts of \
             {request_burst} (limits.request_burst). Send the next request in {seconds} s."
        );
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", "Too many requests", detail)
            .retry_after(seconds)
            .exceeded_limit(&ExceededLimit::RATE)
    }

    /// Returns the error for a request that did not get its part of a resource in time.
    pub(crate) fn overloaded(overloaded: Overloaded) -> Self {
        let (what, exceeded) = match overloaded.0 {
            Level::InFlight => ("requests in flight", &ExceededLimit::IN_FLIGHT),
            Level::Running => ("running requests", &ExceededLimit::CONCURRENT),
            Level::Body | Level::Memory => ("memory for requests and responses", &ExceededLimit::MEMORY),
            Level::Connection => ("connections of the database", &ExceededLimit::CONNECTIONS),
            Level::Export => ("exports", &ExceededLimit::SHARE),
            _ => ("capacity for this work", &ExceededLimit::SHARE),
        };
        let wait = if overloaded.0 == Level::InFlight {
            ""
        } else {
            ", for longer than the permitted wait (limits.queue_timeout)"
        };
        let detail = format!(
            "The {what} of this key, or of all keys together, are used up ({}, limits.max_key_share){wait}. Nothing was done. Retry in \
             {OVERLOADED_SECONDS} s.",
            exceeded.limit
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "Overloaded", detail)
            .retry_after(OVERLOADED_SECONDS)
            .exceeded_limit(exceeded)
    }

    pub(crate) fn timeout(request_timeout: Duration) -> Self {
        let max = humantime::format_duration(request_timeout);
        let detail = format!(
            "The request took longer than {max} (server.request_timeout). A write was applied completely or not at all, and \
             a consolidation continues. Retry the request; send an exchange with the same Idempotency-Key."
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", "Timeout", detail)
            .exceeded_limit(&ExceededLimit::REQUEST_TIMEOUT)
    }
}

/// Lists of messages that can't be synced.
impl Problem {
    fn history_diverged(divergence: Divergence) -> Self {
        let detail = format!(
            "The list is not a continuation of the history: {divergence}. Nothing was written. Send the messages as they are \
             stored, or send the list with \"on_divergence\": \"fork\" to store it in a fork of the session."
        );
        Self {
            diverged_at: Some(divergence.seq),
            stored_role: Some(divergence.stored_role),
            given_role: Some(divergence.given_role),
            ..Self::new(StatusCode::CONFLICT, "history-diverged", "The history has diverged", detail)
        }
    }

    fn too_many_messages(new: usize, max_new: usize) -> Self {
        let detail = format!(
            "has {new} new messages, at most {max_new} are allowed (limits.max_messages_per_exchange): sync the beginning of \
             the list first"
        );
        Self::invalid_field("messages", detail)
    }
}

impl From<FieldError> for Problem {
    fn from(error: FieldError) -> Self {
        Self::invalid(vec![error])
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        use StatusCode as S;
        match error {
            Error::SessionNotFound => {
                let detail = "There is no session with this id. Create it with its first exchange.";
                Self::new(S::NOT_FOUND, "session-not-found", "Session not found", detail)
            }
            Error::RevisionNotFound => {
                let detail = "The session has no such revision. GET its revisions for their numbers.";
                Self::new(S::NOT_FOUND, "revision-not-found", "Revision not found", detail)
            }
            Error::MessageNotFound { seq, last_seq } => Self::message_not_found(seq, last_seq),
            Error::RevisionRedacted { redacted_seq } => Self::revision_redacted(redacted_seq),
            Error::RevisionMismatch { based_on, revision } => Self::revision_mismatch(based_on, revision),
            Error::SummaryMissing => {
                let detail = "The session has no summary that could be edited. Consolidate it first.";
                Self::new(S::CONFLICT, "summary-missing", "No summary", detail)
            }
            Error::UserNotFound => {
                let detail = "The user has no memory document and no session.";
                Self::new(S::NOT_FOUND, "user-not-found", "User not found", detail)
            }
            Error::SessionUserMismatch => {
                let detail = "The session belongs to another user, which cannot be changed. \
                    Leave user_id out, or use another session.";
                let title = "The session belongs to another user";
                Self::new(S::CONFLICT, "session-user-mismatch", title, detail)
            }
            Error::IdempotencyKeyReused => {
                let detail =
                    "This Idempotency-Key was used with another body. Create a new key for each exchange.";
                Self::new(S::UNPROCESSABLE_ENTITY, "idempotency-key-reused", "Idempotency key reused", detail)
            }
            Error::LastSeqMismatch { expected, last_seq } => {
                let expected = expected.unwrap_or(last_seq);
                let detail = format!(
                    "The last message of the session is {last_seq}, and expected_last_seq is {expected}: another exchange came \
                     first. Nothing was written. Read the messages after {}, and send the exchange again if it still applies.",
                    expected.min(last_seq)
                );
                let title = "The session has another last message";
                let last_seq = Some(last_seq);
                Self { last_seq, ..Self::new(S::CONFLICT, "last-seq-mismatch", title, detail) }
            }
            Error::HistoryDiverged(divergence) => Self::history_diverged(divergence),
            Error::TooManyMessages { new, max_new } => Self::too_many_messages(new, max_new),
            Error::VersionMismatch => {
                let detail = "The memory document has changed since the version in If-Match. \
                    GET it, merge your changes, and PUT it with its new ETag.";
                let title = "The memory document has changed";
                Self::new(S::PRECONDITION_FAILED, "version-mismatch", title, detail)
            }
            Error::MemoryTooLarge { bytes, max_bytes: max } => {
                let detail =
                    format!("has {bytes} bytes, at most {max} are allowed (memory.max_bytes): shorten it");
                Self::invalid_field("content", detail)
            }
            Error::BudgetTooSmall { max_tokens: max, reserved, needed, tokenizer } => {
                Self::budget_too_small(max, reserved, needed, tokenizer)
            }
            Error::InvalidQuery(error) => Self::invalid_field("q", error.to_string()),
            Error::SearchDisabled => {
                let detail = "Messages are not indexed, because search.enabled is false.";
                Self::new(S::CONFLICT, "search-disabled", "Search is disabled", detail)
            }
            Error::ConsolidationDisabled => {
                let detail = "No pool of models is configured. Set consolidation.pool or llm.default_pool.";
                Self::new(S::CONFLICT, "consolidation-disabled", "Consolidation is disabled", detail)
            }
            Error::ConsolidationInProgress => {
                let detail = "Another consolidation runs, or a change of the session or a shutdown ended this one. Retry.";
                Self::new(S::CONFLICT, "consolidation-in-progress", "Consolidation in progress", detail)
                    .retry_after(RETRY_SECONDS)
            }
            Error::ConsolidationFailed(reason) => {
                let detail = format!(
                    "Reason: {reason}. The history and earlier summaries are unchanged. Retry when the cause is removed."
                );
                Self::new(S::BAD_GATEWAY, "consolidation-failed", "Consolidation failed", detail)
            }
            Error::Import(error) => Self::invalid_line(error),
            Error::ImportTooLarge { max_bytes: max } => Self::import_too_large(max),
            Error::SessionExists => {
                let detail = "Another session has this id, and this request creates a new session. \
                    Use another id, or erase that session first.";
                Self::new(S::CONFLICT, "session-exists", "The session exists", detail)
            }
            Error::AfterEnd { field, seq, last_seq } => Self::after_end(field, seq, last_seq),
            Error::CopyTooLarge { messages, max_messages } => Self::copy_too_large(messages, max_messages),
            Error::RewindForbidden => Self::rewind_forbidden(),
            Error::StagingFile(error) => {
                tracing::error!(error = %ErrorChain(&error), "failed to write a temporary file of an import (TMPDIR)");
                let detail =
                    "The server cannot store the temporary file of an import. Its log has the reason.";
                let title = "Insufficient storage for the import";
                Self::new(S::INSUFFICIENT_STORAGE, "insufficient-storage", title, detail)
            }
            Error::Overloaded(overloaded) => Self::overloaded(overloaded),
            Error::Store(error) => Self::from_store(&error),
        }
    }
}

/// Errors of the proxy; those of upstreams are relayed.
impl From<ProxyError> for Problem {
    fn from(error: ProxyError) -> Self {
        use StatusCode as S;
        let title = "The upstream cannot be used";
        match error {
            ProxyError::Off(upstream) => {
                let detail = format!(
                    "This service forwards no requests of this kind: proxy.{upstream}.base_url is not set. Set it, or send the \
                     request to the provider."
                );
                Self::new(S::NOT_FOUND, "upstream-not-configured", "No upstream", detail)
            }
            ProxyError::KeyOfPrecis(upstream) => {
                let detail = format!(
                    "The request has an API key of precis where the upstream expects one of its own. Nothing was forwarded. Send \
                     the key of the provider there and that of precis in x-precis-key, or set proxy.{upstream}.api_key."
                );
                Self::new(S::UNAUTHORIZED, "unauthorized", "Unauthorized", detail)
            }
            ProxyError::Path => Self::bad_request(
                "The path leads out of the API of the upstream. Leave out `..` and its encoded forms.",
            ),
            ProxyError::InvalidId(name, invalid) => Self::invalid_field(name, invalid.to_string()),
            ProxyError::SecretUnavailable(reason) => {
                tracing::error!(reason, "failed to read the API key of an upstream");
                let detail = "The API key of the upstream is unavailable. The log has the reason.";
                Self::new(S::BAD_GATEWAY, "upstream-unavailable", title, detail)
            }
            ProxyError::Unreachable(why) => {
                tracing::warn!(why, "failed to call an upstream");
                let detail = format!(
                    "The upstream is unreachable: {why}. Nothing was stored. Check its base_url with `precis doctor`."
                );
                Self::new(S::BAD_GATEWAY, "upstream-unavailable", title, detail)
            }
            ProxyError::Redirect => {
                let detail = "The upstream redirects, and a request may only go to the configured server. Nothing was stored. Correct \
                    its base_url.";
                Self::new(S::BAD_GATEWAY, "upstream-unavailable", title, detail)
            }
            ProxyError::Timeout => {
                let detail = "The upstream did not begin to answer in time. Nothing was stored. Retry.";
                Self::new(S::GATEWAY_TIMEOUT, "upstream-timeout", title, detail)
            }
            ProxyError::Slow(limit) => Self::timeout(limit),
            ProxyError::Service(error) => error.into(),
        }
    }
}

/// Errors of the service itself. They are logged here.
impl Problem {
    pub(crate) fn from_store(error: &StoreError) -> Self {
        let causes = ErrorChain(error);
        match error {
            StoreError::SchemaVersion { .. } | StoreError::SchemaIncomplete(_) => {
                tracing::warn!(error = %causes, "the database schema has another version");
                let fix = match error {
                    StoreError::SchemaVersion { found, expected } if found > expected => {
                        "It is newer, and does not work with this release: run the newer release."
                    }
                    StoreError::SchemaVersion { .. } => "It is older: run `precis migrate`.",
                    _ => "Run `precis migrate`, or the newer release that has changed it.",
                };
                let detail = format!("The database schema does not match this release of precis. {fix}");
                Self::unavailable("schema-mismatch", "Schema mismatch", detail)
            }
            StoreError::Unavailable(_) => {
                tracing::warn!(error = %causes, "the database is unavailable");
                let detail = "The database is unavailable or read-only. A write may or may not have been applied. Retry; \
                    send an exchange with the same Idempotency-Key.";
                Self::unavailable("store-unavailable", "Store unavailable", detail)
            }
            StoreError::SessionImporting => {
                let detail =
                    "The session is being imported. Send the request again when the import has ended.";
                Self::new(StatusCode::CONFLICT, "session-importing", "The session is being imported", detail)
            }
            _ => {
                tracing::error!(error = %causes, "a database operation failed");
                Self::internal()
            }
        }
    }

    fn unavailable(name: &str, title: &str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, name, title, detail).retry_after(RETRY_SECONDS)
    }

    pub(crate) fn internal() -> Self {
        let detail =
            "An internal error occurred. The log has the cause under the x-request-id of this response.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal error", detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (retry_after, exceeded_limit, is_closing) =
            (self.retry_after, self.exceeded_limit, self.is_closing);
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if is_closing {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(exceeded_limit) = exceeded_limit {
            response.extensions_mut().insert(*exceeded_limit);
        }
        response
    }
}

/// Shortens a part of a request for an error text.
fn shorten(text: &str) -> String {
    shorten_middle(text, MAX_DETAIL_CHARS / 2, |_| "…".to_owned())
}

/// Answers requests for unknown paths. `is_route` tells if a path is known.
pub(super) fn route_not_found(method: &Method, uri: &Uri, is_route: impl Fn(&str) -> bool) -> Problem {
    let path = redact_path(uri.path());
    let mut detail = format!("There is no route {} {}.", shorten(method.as_str()), shorten(&path));
    let without_slash = path.trim_end_matches('/');
    if without_slash.len() < path.len() {
        if is_route(without_slash) {
            // Writing to a String cannot fail.
            let _ = write!(detail, " Leave out the slash at the end: {}.", shorten(without_slash));
        }
    } else if path.starts_with("/sessions/") || path.starts_with("/users/") {
        detail.push_str(" Write a slash inside an id as %2F.");
    }
    detail.push_str(" GET /docs shows all routes, and GET /openapi.json lists them for programs.");
    Problem::new(StatusCode::NOT_FOUND, "route-not-found", "Route not found", detail)
}

/// Answers requests with a method that the path does not have.
pub(super) fn method_not_allowed(method: &Method, uri: &Uri, allowed: &[&str]) -> Problem {
    let (path, method) = (shorten(&redact_path(uri.path())), shorten(method.as_str()));
    let detail = format!("{path} does not support {method}. Use {}.", allowed.join(" or "));
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "Method not allowed", detail)
}

/// Answers requests whose handler panicked. Only the log gets the text of the panic.
pub(super) fn panicked(panic: &(dyn Any + Send)) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("not a text");
    tracing::error!(panic = text, "a handler panicked");
    Problem::internal().into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::to_bytes;

    #[test]
    fn long_path_is_shortened() {
        let uri: Uri = format!("/{}", "z".repeat(60_000)).parse().expect("a path");
        let missing = route_not_found(&Method::GET, &uri, |_| false);
        let wrong_method = method_not_allowed(&Method::PUT, &uri, &["GET"]);
        for problem in [missing, wrong_method] {
            assert!(problem.detail().len() < 600, "{}", problem.detail());
        }
    }

    #[tokio::test]
    async fn panic_becomes_internal_problem_without_its_text() {
        let response = panicked(&"secret inner state");
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
        let body = to_bytes(response.into_body(), 10_000).await.expect("a body");
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains("urn:precis:problem:internal") && !body.contains("secret"), "{body}");
    }
}
