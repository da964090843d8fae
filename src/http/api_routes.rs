//! A builder of routes that keeps handler, required access and documentation together.

use super::access::{Access, AccessTable, RouteKind};
use super::openapi::operations::operations;
use super::openapi::responses::complete;
use crate::service::MemoryService;
use axum::Router;
use axum::http::Method;
use axum::routing::MethodRouter;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

/// Routes of one kind: they have the same layers around them.
pub(super) struct ApiRoutes {
    kind: RouteKind,
    router: OpenApiRouter<MemoryService>,
    access: AccessTable,
}

impl ApiRoutes {
    pub(super) fn new(kind: RouteKind) -> Self {
        Self { kind, router: OpenApiRouter::new(), access: AccessTable::default() }
    }

    /// Adds a route. Its documentation gets the security requirement and the error responses of the layers around it.
    pub(super) fn route(
        mut self,
        access: Access,
        (schemas, mut paths, methods): UtoipaMethodRouter<MemoryService>,
    ) -> Self {
        for (path, item) in &mut paths.paths {
            for (method, operation) in operations(item) {
                complete(operation, self.kind, access.scope());
                self.access.insert(path, method, access, self.kind);
            }
        }
        self.router = self.router.routes((schemas, paths, methods));
        self
    }

    /// Adds a route of another protocol for these methods. It is not part of the document.
    pub(super) fn undocumented_route(
        mut self,
        access: Access,
        path: &str,
        methods: &[Method],
        handler: MethodRouter<MemoryService>,
    ) -> Self {
        for method in methods {
            self.access.insert(path, method.clone(), access, self.kind);
        }
        self.router = self.router.route(path, handler);
        self
    }

    pub(super) fn access_table<'a>(all: impl IntoIterator<Item = &'a Self>) -> AccessTable {
        all.into_iter().fold(AccessTable::default(), |mut table, routes| {
            table.extend(&routes.access);
            table
        })
    }

    pub(super) fn into_router(self) -> Router<MemoryService> {
        self.router.into()
    }

    pub(super) fn into_openapi(self) -> OpenApi {
        self.router.into_openapi()
    }
}
