//! Schemas that no type of ours can be made into, written as they stand in the document.

use serde_json::Value;
use utoipa::openapi::{RefOr, Schema};

/// The schema that this JSON is.
pub(in crate::http) fn schema_from_json(json: Value) -> RefOr<Schema> {
    // Literals of ours, of which every test that asks for the document reads each.
    let schema = serde_json::from_value(json.clone());
    let schema = schema.unwrap_or_else(|error| unreachable!("no schema: {error}: {json}"));
    // utoipa drops keywords that it does not know.
    debug_assert_eq!(serde_json::to_value(&schema).ok(), Some(json));
    schema
}
