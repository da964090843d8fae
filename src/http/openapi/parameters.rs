//! The schemas of path parameters. Handlers refer to them by their extractors: `params(SessionPath)`.

use crate::domain::id::MAX_BYTES;
use crate::domain::tool::Tool;
use crate::http::extract::{RevisionPath, SessionPath, ToolPath, UserPath};
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::SchemaType;
use utoipa::openapi::{ObjectBuilder, Ref, RefOr, Required, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

/// The schema of the id of a session or a user. Fields refer to it with `value_type = Option<Id>`.
pub(in crate::http) struct Id;

impl PartialSchema for Id {
    fn schema() -> RefOr<Schema> {
        let id = ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some("1 to 256 bytes of UTF-8 without control characters"))
            .min_length(Some(1))
            .max_length(Some(MAX_BYTES))
            .pattern(Some(r"^[^\u0000-\u001f\u007f-\u009f]+$"));
        id.build().into()
    }
}

impl ToSchema for Id {}

fn path_parameter(name: &str, description: &str, schema: impl Into<RefOr<Schema>>) -> Vec<Parameter> {
    let parameter = ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(description))
        .schema(Some(schema));
    vec![parameter.build()]
}

impl IntoParams for SessionPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let description = "The session, by the id that the client chose for it, percent-encoded";
        path_parameter("session_id", description, Ref::from_schema_name("Id"))
    }
}

impl IntoParams for UserPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        path_parameter("user_id", "The user, percent-encoded", Ref::from_schema_name("Id"))
    }
}

impl IntoParams for ToolPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let name =
            ObjectBuilder::new().schema_type(Type::String).enum_values(Some(Tool::ALL.map(Tool::name)));
        path_parameter("name", "The tool; the same as in the call", name.build())
    }
}

impl IntoParams for RevisionPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)).maximum(Some(i64::MAX));
        path_parameter("revision", "1, 2, 3 …; 0 is the session before its first revision", number.build())
    }
}

/// Removes null from the types of optional headers and parameters: utoipa adds it, but only JSON has null.
pub(super) fn remove_null(operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        if let RefOr::T(Parameter { schema: Some(RefOr::T(Schema::Object(value))), .. }) = parameter
            && let SchemaType::Array(types) = &value.schema_type
            && let [kind, Type::Null] = types.as_slice()
        {
            value.schema_type = SchemaType::Type(kind.clone());
        }
    }
}
