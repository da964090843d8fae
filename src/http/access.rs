//! The access that a route requires, and the table that the authentication layer reads it from.

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

/// The access that each route requires, by path template and method.
#[derive(Debug, Default)]
pub(super) struct AccessTable(HashMap<String, Vec<(Method, Access)>>);

impl AccessTable {
    pub(super) fn insert(&mut self, path: &str, method: Method, access: Access) {
        self.0.entry(path.to_owned()).or_default().push((method, access));
    }

    pub(super) fn extend(&mut self, other: &Self) {
        for (path, routes) in &other.0 {
            self.0.entry(path.clone()).or_default().extend(routes.iter().cloned());
        }
    }

    /// Returns the access that a request requires. Requests without a route need any valid key, so that a route
    /// that is missing in the table is closed.
    pub(super) fn required(&self, path: Option<&str>, method: &Method) -> Access {
        // axum serves HEAD with the handler of GET.
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        let routes = path.and_then(|path| self.0.get(path)).into_iter().flatten();
        let mut routes = routes.filter(|(known, _)| known == method);
        routes.next().map_or(Access::Key(Scope::Read), |(_, access)| *access)
    }
}
