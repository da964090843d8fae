//! `/v1/…` and `/proxy/{session_id}/v1/…`: the routes of model providers, with a memory.

use crate::domain::id::SessionId;
use crate::http::error::Problem;
use crate::http::extract::{Caller, body_bytes, ids_from_headers};
use crate::http::path::percent_decode;
use crate::proxy::{Proxy, ProxyRequest};
use crate::service::MemoryService;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use std::sync::Arc;

/// The headers with keys, as the client sent them: `authorization` has the key of precis now.
#[derive(Clone)]
pub(crate) struct ClientHeaders(pub(crate) HeaderMap);

/// Forwards a request to its upstream.
pub(crate) async fn serve(
    State(service): State<MemoryService>,
    Extension(proxy): Extension<Arc<Proxy>>,
    Extension(ClientHeaders(headers)): Extension<ClientHeaders>,
    Caller { tenant, default_user }: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let (session_of_header, user) = ids_from_headers(&headers)?;
    let path = request.uri().path();
    let (session, path) = match path.strip_prefix("/proxy/").and_then(|path| path.split_once("/v1/")) {
        Some((session, path)) => (Some(session_of_path(session)?), path),
        None => (session_of_header, path.strip_prefix("/v1/").unwrap_or_default()),
    };
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let (method, path) = (request.method().clone(), format!("{path}{query}"));
    let body = body_bytes(request).await?;
    let request = ProxyRequest { tenant, default_user, session, user, method, path, headers, body };
    Ok(proxy.serve(&service, request).await?)
}

fn session_of_path(segment: &str) -> Result<SessionId, Problem> {
    let session = percent_decode(segment).ok_or("must be percent-encoded UTF-8".to_owned());
    let session = session.and_then(|session| SessionId::new(session).map_err(|error| error.to_string()));
    session.map_err(|detail| Problem::invalid_field("session_id", detail))
}
