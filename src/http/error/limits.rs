//! Refusals of what goes beyond a limit: each names the setting and its value.

use super::Problem;
use crate::domain::tokens::Tokenizer;
use crate::domain::validation::FieldError;
use crate::http::limits::Limits;
use axum::http::StatusCode;

/// What a client waits before it comes back to a service that has too much to do.
const OVERLOADED_SECONDS: u32 = 1;

/// The limit that a request went beyond: an answer has it in its extensions, to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExceededLimit {
    /// The setting.
    pub(crate) limit: &'static str,
    /// Whether that says nothing about this request, only that there are too many.
    pub(crate) is_overload: bool,
}

const BODY: ExceededLimit = ExceededLimit::per_request("limits.max_body_bytes");
const READ: ExceededLimit = ExceededLimit::per_request("server.read_timeout");
const RATE: ExceededLimit = ExceededLimit::per_request("limits.requests_per_second");
const TIME: ExceededLimit = ExceededLimit::per_request("server.request_timeout");
const IN_FLIGHT: ExceededLimit = ExceededLimit::global("limits.max_requests_in_flight");
const AT_WORK: ExceededLimit = ExceededLimit::global("limits.max_concurrent_requests");
const MEMORY: ExceededLimit = ExceededLimit::global("limits.max_body_bytes_in_flight");

impl ExceededLimit {
    const fn per_request(limit: &'static str) -> Self {
        Self { limit, is_overload: false }
    }

    const fn global(limit: &'static str) -> Self {
        Self { limit, is_overload: true }
    }
}

impl Problem {
    fn with_exceeded_limit(self, exceeded_limit: &'static ExceededLimit) -> Self {
        Self { exceeded_limit: Some(exceeded_limit), ..self }
    }

    /// 413.
    pub(crate) fn body_too_large(limits: &Limits) -> Self {
        let most = limits.max_body_bytes;
        let detail =
            format!("The body may have at most {most} bytes (limits.max_body_bytes). Send less at once.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "Body too large", detail)
            .with_exceeded_limit(&BODY)
            .closing()
    }

    /// 413 for an import.
    pub(super) fn import_too_large(most: u64) -> Self {
        let detail = format!(
            "An import may have at most {most} bytes (limits.max_import_bytes), and nothing was imported. \
             `precis import`, beside the database, takes one of any size."
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "Body too large", detail)
    }

    /// 422: what no context goes without is more than the budget.
    pub(crate) fn budget_too_small(most: i64, needed: i64, tokenizer: Tokenizer) -> Self {
        let detail = format!(
            "System prompt, memory document, summary and new message take {needed} tokens ({tokenizer}), and max_tokens is \
             {most}: allow at least {needed}, or send less."
        );
        let field =
            FieldError { field: "max_tokens".to_owned(), detail: format!("must be at least {needed}") };
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Self { errors: vec![field], ..Self::new(status, "budget-too-small", "Budget too small", detail) }
    }

    /// 408: the body did not come.
    pub(crate) fn body_timeout(limits: &Limits) -> Self {
        let most = humantime::format_duration(limits.read_timeout);
        let detail = format!(
            "The body was not there within {most} (server.read_timeout), and nothing was done. Send it faster, or less \
             at once."
        );
        Self::new(StatusCode::REQUEST_TIMEOUT, "body-timeout", "Body too slow", detail)
            .with_exceeded_limit(&READ)
            .closing()
    }

    /// 429.
    pub(crate) fn rate_limited(limits: &Limits, seconds: u32) -> Self {
        let Limits { requests_per_second, request_burst, .. } = limits;
        let detail = format!(
            "These are more than {requests_per_second} requests a second (limits.requests_per_second) and more than \
             {request_burst} at once (limits.request_burst). Send the next one in {seconds} s."
        );
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", "Too many requests", detail)
            .retry_after(seconds)
            .with_exceeded_limit(&RATE)
    }

    /// 503: more requests than there may be.
    pub(crate) fn too_many_requests(limits: &Limits) -> Self {
        let most = limits.max_requests_in_flight;
        let limit = IN_FLIGHT.limit;
        Self::overloaded(
            &IN_FLIGHT,
            &format!("There are {most} requests under way, and no more are taken ({limit})"),
        )
    }

    /// 503: no memory for the body.
    pub(crate) fn no_body_memory(limits: &Limits) -> Self {
        let (most, limit) = (limits.max_body_bytes_in_flight, MEMORY.limit);
        let why = format!(
            "The bodies of all requests under way may have {most} bytes together ({limit}), and there is no room for this one"
        );
        Self::overloaded(&MEMORY, &why).closing()
    }

    /// 503: no turn to work came.
    pub(crate) fn no_permit(limits: &Limits) -> Self {
        let (most, wait) = (limits.max_concurrent_requests, humantime::format_duration(limits.queue_timeout));
        let limit = AT_WORK.limit;
        let why = format!(
            "There is more to do than can be done: {most} requests are at work ({limit}), and others wait that came \
             before. A wait may take {wait} (limits.queue_timeout), and far less while they never end"
        );
        Self::overloaded(&AT_WORK, &why)
    }

    fn overloaded(exceeded_limit: &'static ExceededLimit, why: &str) -> Self {
        let detail = format!("{why}. Nothing was done. Try again in {OVERLOADED_SECONDS} s.");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "Overloaded", detail)
            .retry_after(OVERLOADED_SECONDS)
            .with_exceeded_limit(exceeded_limit)
    }

    /// 504: no answer in time.
    pub(crate) fn timeout(limits: &Limits) -> Self {
        let most = humantime::format_duration(limits.request_timeout);
        let detail = format!(
            "There was no answer within {most} (server.request_timeout). A write was done whole or not at all, and a \
             consolidation goes on. Repeat the request, an exchange with its Idempotency-Key."
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", "Timeout", detail).with_exceeded_limit(&TIME)
    }
}
