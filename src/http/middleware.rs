//! The layers around the routes. `router` in `http.rs` shows their order.

pub(super) mod admission;
pub(super) mod auth;
pub(super) mod body_limits;
pub(super) mod metrics;
pub(super) mod origin_guard;
pub(super) mod request_id;
pub(super) mod security_headers;
