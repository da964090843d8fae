//! The access that a route requires and its kind, and the table in which the layers look them up.

use crate::domain::api_key::Scope;
use axum::http::Method;
use std::collections::HashMap;

/// The credentials that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// No credentials.
    Open,
    /// A key with at least this scope.
    Key(Scope),
    /// A key with at least this scope. While the store is unavailable, a key that was valid before stays valid.
    KeyOrStale(Scope),
}

impl Access {
    /// Returns the scope that the key must have.
    pub(super) fn scope(self) -> Option<Scope> {
        match self {
            Self::Open => None,
            Self::Key(scope) | Self::KeyOrStale(scope) => Some(scope),
        }
    }
}

/// The layers around a route, which determine its error responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteKind {
    /// Admission control, buffered body, limited time.
    Buffered,
    /// Admission control only: the bodies are streams.
    Streaming,
    /// Admission control and buffered body. The response is that of a model, which takes its time.
    Proxied,
    /// Authentication only.
    Operational,
}

/// The access that each route requires, and its kind, by path template and method.
#[derive(Debug, Default)]
pub(super) struct AccessTable(HashMap<String, Vec<(Method, Access, RouteKind)>>);

impl AccessTable {
    pub(super) fn insert(&mut self, path: &str, method: Method, access: Access, kind: RouteKind) {
        self.0.entry(path.to_owned()).or_default().push((method, access, kind));
    }

    pub(super) fn extend(&mut self, other: &Self) {
        for (path, routes) in &other.0 {
            self.0.entry(path.clone()).or_default().extend(routes.iter().cloned());
        }
    }

    /// Returns the methods of a path. A path that is not in the table is a page, which can only be read.
    pub(super) fn methods(&self, path: Option<&str>) -> Vec<&str> {
        let routes = path.and_then(|path| self.0.get(path)).into_iter().flatten();
        let methods = routes.flat_map(|(method, ..)| {
            let head = (*method == Method::GET).then_some(Method::HEAD.as_str());
            std::iter::once(method.as_str()).chain(head)
        });
        let methods: Vec<&str> = methods.collect();
        if methods.is_empty() { vec!["GET", "HEAD"] } else { methods }
    }

    /// Returns `true` if the path of a request is one of the table.
    pub(super) fn has(&self, path: &str) -> bool {
        let matches = |template: &str| {
            let segments = || template.split('/').zip(path.split('/'));
            template.split('/').count() == path.split('/').count()
                && segments()
                    .all(|(known, given)| known == given || known.starts_with('{') && !given.is_empty())
        };
        self.0.keys().any(|template| matches(template))
    }

    /// Returns the access that a request requires, and the kind of its route. Requests without a route need any valid key,
    /// so that a route that is missing in the table is closed. Their response needs no work, so they are not limited.
    pub(super) fn required(&self, path: Option<&str>, method: &Method) -> (Access, RouteKind) {
        // axum serves HEAD with the handler of GET.
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        let routes = path.and_then(|path| self.0.get(path)).into_iter().flatten();
        let mut routes = routes.filter(|(known, ..)| known == method);
        let of_route = routes.next().map(|(_, access, kind)| (*access, *kind));
        of_route.unwrap_or((Access::Key(Scope::Read), RouteKind::Operational))
    }
}
