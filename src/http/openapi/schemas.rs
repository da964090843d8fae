//! OpenAPI schemas that are written by hand, because no Rust type describes them.

use serde_json::Value;
use utoipa::openapi::{RefOr, Schema};

/// Returns the schema of a JSON literal.
pub(in crate::http) fn schema_from_json(json: Value) -> RefOr<Schema> {
    // Every test that builds the document reads all literals, so this cannot fail in production.
    let schema = serde_json::from_value(json.clone());
    let schema = schema.unwrap_or_else(|error| unreachable!("not a schema: {error}: {json}"));
    // utoipa drops keywords that it does not know.
    debug_assert_eq!(serde_json::to_value(&schema).ok(), Some(json));
    schema
}
