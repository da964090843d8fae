//! The layers around every handler, from the outside in: [`observe`], CORS if it is configured, [`guard`].
//!
//! The steps of a layer are calls in one function. As separate layers of `axum`, each step would box its future and clone all
//! services inside it, for each request: ten of them took a quarter of the CPU time of a context.

use super::access::{Access, AccessTable, RouteKind};
use super::error::{self, Problem};
use super::headers::X_PRECIS_KEY;
use super::middleware::admission::Admission;
use super::middleware::auth::Auth;
use super::middleware::body_limits;
use super::middleware::metrics::HttpMetrics;
use super::middleware::request_id::AccessLog;
use super::middleware::security_headers::set_security_headers;
use super::routes::proxy::ClientHeaders;
use crate::capacity::{self, Held, Work};
use crate::config::Limits;
use crate::domain::api_key::Scope;
use crate::proxy::session::key_of_precis;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, HOST, TRANSFER_ENCODING};
use axum::http::{HeaderValue, Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tracing::Instrument as _;

/// Measures and logs every request, and adds the headers of every response.
pub(super) async fn observe(State(metrics): State<HttpMetrics>, request: Request, next: Next) -> Response {
    let log = AccessLog::start(&request);
    let measurement = HttpMetrics::start(&request);
    let mut response = next.run(request).instrument(log.span()).await;
    set_security_headers(&mut response);
    metrics.record(&measurement, &response);
    log.finish(&mut response);
    response
}

/// The parts of [`guard`].
pub(super) struct Guard {
    pub(super) access: Arc<AccessTable>,
    pub(super) auth: Auth,
    pub(super) admission: Arc<Admission>,
    pub(super) limits: Arc<Limits>,
    /// Longest time for a request of a [buffered](RouteKind::Buffered) route.
    pub(super) request_timeout: Duration,
}

/// Rejects requests that may not or cannot be served, and answers those whose handler panics.
pub(super) async fn guard(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    match AssertUnwindSafe(guard.serve(request, next)).catch_unwind().await {
        Ok(Ok(response)) => response,
        Ok(Err(problem)) => problem.into_response(),
        Err(panic) => error::panicked(panic.as_ref()),
    }
}

/// Serves the files of pages to everyone, within the share of requests without a key.
pub(super) async fn guard_page(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    guard.serve_page(request, next).await.unwrap_or_else(Problem::into_response)
}

impl Guard {
    /// Serves a file. As on all other paths, a client without a key does not learn which ones exist.
    async fn serve_page(&self, request: Request, next: Next) -> Result<Response, Problem> {
        let (head, body) = request.into_parts();
        let mut credentials = Request::from_parts(head.clone(), Body::empty());
        let work = self.admission.work(&credentials);
        let in_flight = self.admission.enter(&work)?;
        // The files are large, and are written as fast as their clients read them.
        let export = self.admission.start_export(&work).await?;
        let response = next.run(Request::from_parts(head, body)).await;
        if matches!(response.status(), StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) {
            self.auth.authenticate(&mut credentials, Access::Key(Scope::Read)).await?;
        }
        Ok(body_limits::hold_until_written((in_flight, export), response).await)
    }

    async fn serve(&self, mut request: Request, next: Next) -> Result<Response, Problem> {
        check_framing(&request).map_err(Problem::closing)?;
        let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        let (access, kind) = self.access.required(path, request.method());
        request.extensions_mut().insert(Arc::clone(&self.limits));
        if kind == RouteKind::Operational {
            self.auth.authenticate(&mut request, access).await?;
            return Ok(next.run(request).await);
        }
        if kind == RouteKind::Proxied {
            use_key_of_precis(&mut request);
        }
        let (in_flight, work) = match self.admit(&mut request, access).await {
            Ok(admitted) => admitted,
            Err(problem) => return Err(body_limits::discard_body(request, problem).boxed().await),
        };
        let response = match kind {
            RouteKind::Buffered => {
                let response = timeout(self.request_timeout, self.serve_buffered(work, request, next)).await;
                response.map_err(|_| Problem::timeout(self.request_timeout))??
            }
            RouteKind::Proxied => self.serve_buffered(work, request, next).boxed().await?,
            _ => self.serve_streaming(work, request, next).boxed().await?,
        };
        Ok(body_limits::hold_until_sent(in_flight, response))
    }

    /// Decides about a request before its body is read.
    async fn admit(&self, request: &mut Request, access: Access) -> Result<(Held, Work), Problem> {
        self.auth.authenticate(request, access).await?;
        self.admission.check_rate(request)?;
        let work = self.admission.work(request);
        Ok((self.admission.enter(&work)?, work))
    }

    /// Reads the body before the request competes for a permit, so that slow clients hold no permits. After
    /// `request_timeout`, the request is dropped: its open transactions roll back. Work that must not be interrupted runs
    /// in tasks of the service and continues.
    async fn serve_buffered(&self, work: Work, request: Request, next: Next) -> Result<Response, Problem> {
        let (request, _reservation, bytes) = body_limits::buffer(&self.admission, &work, request).await?;
        self.admission.start(&work, bytes).await?;
        let response = capacity::scope(work.clone(), next.run(request)).await;
        Ok(body_limits::finish(&work, response).await)
    }

    /// Serves an export or an import. It needs no permit to run, because it waits for its client most of the time.
    async fn serve_streaming(
        &self,
        work: Work,
        mut request: Request,
        next: Next,
    ) -> Result<Response, Problem> {
        let export = match *request.method() {
            Method::GET => Some(self.admission.start_export(&work).await?),
            _ => None,
        };
        request.extensions_mut().insert(Arc::clone(&self.admission));
        let response = capacity::scope(work, next.run(request)).await;
        Ok(body_limits::hold_until_sent(export, response))
    }
}

/// Puts the key of precis into `authorization`, in which a client of the proxy can have the key for the upstream. The handler gets the headers
/// of the client.
fn use_key_of_precis(request: &mut Request) {
    let mut headers = request.headers().clone();
    let own = headers.get(X_PRECIS_KEY).cloned();
    let key = || HeaderValue::try_from(format!("Bearer {}", key_of_precis(&headers)?)).ok();
    let key = own.map_or_else(key, |key| HeaderValue::try_from([b"Bearer ", key.as_bytes()].concat()).ok());
    let authorization = match key {
        Some(key) => request.headers_mut().insert(AUTHORIZATION, key),
        None => request.headers_mut().remove(AUTHORIZATION),
    };
    if let Some(authorization) = authorization {
        headers.insert(AUTHORIZATION, authorization);
    }
    request.extensions_mut().insert(ClientHeaders(headers));
}

/// Rejects messages that HTTP/1.1 does not permit, or whose body is encoded. A proxy in front of the service may read them in
/// another way, and could then mistake a part of a body for the next request.
fn check_framing(request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    if request.version() == Version::HTTP_11 && headers.get_all(HOST).iter().count() != 1 {
        return Err(Problem::bad_request("A request of HTTP/1.1 needs exactly one header Host. Send it."));
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = |coding: &HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"chunked");
    if codings.next().is_some_and(|coding| !is_chunked(coding)) || codings.next().is_some() {
        let detail = "The only supported value of the header Transfer-Encoding is chunked, once. Send the body without compression.";
        return Err(Problem::bad_request(detail));
    }
    Ok(())
}
