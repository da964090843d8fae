//! Strictness of request bodies in the document: unknown fields and null for an optional body are rejected, as the
//! extractors do. utoipa would derive this from `deny_unknown_fields`, but with that attribute serde reports only the
//! first unknown field.

use std::collections::BTreeSet;
use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::{AdditionalProperties, ArrayItems};
use utoipa::openapi::{Components, Content, RefOr, Schema};

/// Sets `additionalProperties: false` in the schemas of an operation's body, recursively. Schemas that set it themselves
/// keep their value.
pub(super) fn deny_unknown_fields(operation: &mut Operation, components: &mut Components) {
    let Some(RefOr::T(body)) = &mut operation.request_body else { return };
    let mut open = Vec::new();
    for content in body.content.values_mut() {
        remove_null(content);
        if let RefOr::T(Content { schema: Some(schema), .. }) = content {
            close_schema(schema, &mut open);
        }
    }
    let mut closed = BTreeSet::new();
    while let Some(name) = open.pop() {
        if let Some(schema) = components.schemas.get_mut(&name)
            && closed.insert(name)
        {
            close_schema(schema, &mut open);
        }
    }
}

/// Removes null from the schema of an optional body: utoipa adds it, but the extractors reject it.
fn remove_null(content: &mut RefOr<Content>) {
    if let RefOr::T(content) = content
        && let Some(RefOr::T(Schema::OneOf(one_of))) = &content.schema
        && let Some(body) = one_of.items.iter().find(|item| matches!(item, RefOr::Ref(_)))
    {
        content.schema = Some(body.clone());
    }
}

/// Closes one schema and adds the names of the schemas that it refers to to `open`.
fn close_schema(schema: &mut RefOr<Schema>, open: &mut Vec<String>) {
    let inner = match schema {
        RefOr::Ref(reference) => {
            open.extend(reference.ref_location.rsplit('/').next().map(str::to_owned));
            return;
        }
        RefOr::T(Schema::Object(object)) => {
            if !object.properties.is_empty() && object.additional_properties.is_none() {
                object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
            }
            object.properties.values_mut().for_each(|field| close_schema(field, open));
            return;
        }
        RefOr::T(Schema::Array(array)) => {
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                close_schema(items, open);
            }
            return;
        }
        RefOr::T(Schema::OneOf(of)) => &mut of.items,
        RefOr::T(Schema::AllOf(of)) => &mut of.items,
        RefOr::T(Schema::AnyOf(of)) => &mut of.items,
        RefOr::T(_) => return,
    };
    for schema in inner {
        close_schema(schema, open);
    }
}
