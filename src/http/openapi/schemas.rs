//! Corrections of the schemas that utoipa derives, so that they say what the service does, and so that generated clients have a
//! name for each type.

use std::collections::BTreeMap;
use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::{AdditionalProperties, AnyOfBuilder, ArrayItems, SchemaType};
use utoipa::openapi::{Ref, RefOr, Schema, Type};

/// Describes that the extractors reject unknown fields. utoipa would derive this from `deny_unknown_fields`, but with that
/// attribute serde reports only the first unknown field.
pub(super) fn deny_unknown_fields(schema: &mut RefOr<Schema>) {
    if let RefOr::T(Schema::Object(object)) = schema {
        object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    }
}

/// Describes that a value may match several forms of a union. utoipa derives unions whose values match exactly one.
pub(super) fn allow_several(schema: &mut RefOr<Schema>) {
    if let RefOr::T(Schema::OneOf(one_of)) = schema {
        let any_of = AnyOfBuilder::new().description(one_of.description.take());
        let any_of = std::mem::take(&mut one_of.items).into_iter().fold(any_of, AnyOfBuilder::item);
        *schema = Schema::AnyOf(any_of.build()).into();
    }
}

/// Describes that an object without declared fields has any fields, everywhere in a schema. Generators take it for an empty
/// object otherwise.
pub(super) fn open_objects_without_fields(schema: &mut RefOr<Schema>) {
    let RefOr::T(schema) = schema else { return };
    match schema {
        Schema::Object(object) => {
            let is_object = match &object.schema_type {
                SchemaType::Type(kind) => matches!(kind, Type::Object),
                SchemaType::Array(kinds) => kinds.contains(&Type::Object),
                SchemaType::AnyValue => false,
            };
            if is_object && object.properties.is_empty() && object.additional_properties.is_none() {
                object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(true)));
            }
            object.properties.values_mut().for_each(open_objects_without_fields);
        }
        Schema::Array(array) => {
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                open_objects_without_fields(items);
            }
        }
        Schema::OneOf(one_of) => one_of.items.iter_mut().for_each(open_objects_without_fields),
        Schema::AnyOf(any_of) => any_of.items.iter_mut().for_each(open_objects_without_fields),
        Schema::AllOf(all_of) => all_of.items.iter_mut().for_each(open_objects_without_fields),
        _ => {}
    }
}

/// The beginning of the names that utoipa gives to pages.
const PAGE: &str = "Page_";

/// Returns the name for the schema of a page.
fn page_name(item: &str) -> String {
    format!("{item}Page")
}

/// Names the schemas of pages after their items, and lets each refer to the schema of its items. utoipa inlines the
/// arguments of generic types.
pub(super) fn name_pages(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    let names: Vec<String> = schemas.keys().filter(|name| name.starts_with(PAGE)).cloned().collect();
    for name in names {
        let Some((item, mut page)) = name.strip_prefix(PAGE).zip(schemas.remove(&name)) else { continue };
        if let RefOr::T(Schema::Object(page)) = &mut page
            && let Some(RefOr::T(Schema::Array(items))) = page.properties.get_mut("items")
        {
            items.items = ArrayItems::RefOrSchema(Box::new(Ref::from_schema_name(item).into()));
        }
        schemas.insert(page_name(item), page);
    }
}

/// Applies the names of [`name_pages`] to the responses of an operation.
pub(super) fn rename_pages(operation: &mut Operation) {
    for response in operation.responses.responses.values_mut() {
        let RefOr::T(response) = response else { continue };
        for content in response.content.values_mut() {
            if let RefOr::T(content) = content
                && let Some(RefOr::Ref(page)) = &mut content.schema
                && let Some((_, item)) = page.ref_location.split_once(PAGE)
            {
                *page = Ref::from_schema_name(page_name(item));
            }
        }
    }
}

/// Removes null from the types of an optional body and of optional headers and parameters: utoipa adds it, but the
/// extractors reject a null as the body, and headers and parameters have no null.
pub(super) fn remove_null(operation: &mut Operation) {
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        for content in body.content.values_mut() {
            if let RefOr::T(content) = content
                && let Some(RefOr::T(Schema::OneOf(one_of))) = &content.schema
                && let Some(body) = one_of.items.iter().find(|item| matches!(item, RefOr::Ref(_)))
            {
                content.schema = Some(body.clone());
            }
        }
    }
    for parameter in operation.parameters.iter_mut().flatten() {
        if let RefOr::T(Parameter { schema: Some(RefOr::T(Schema::Object(value))), .. }) = parameter
            && let SchemaType::Array(types) = &value.schema_type
            && let [kind, Type::Null] = types.as_slice()
        {
            value.schema_type = SchemaType::Type(kind.clone());
        }
    }
}
