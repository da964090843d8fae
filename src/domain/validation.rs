//! The validation error of all input: request bodies, tool calls, import lines.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One invalid value and how to correct it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// Path of the value, for example `messages[2].role`, or the name of a parameter or header.
    pub field: String,
    /// Description of the problem and how to correct it.
    pub detail: String,
}

impl FieldError {
    /// An error of the field at `path`; an empty path stands for the value as a whole.
    pub fn new(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { field: path.into(), detail: detail.into() }
    }

    /// Prepends the path of the value that contains the field: `role` in `messages[2]` becomes `messages[2].role`.
    #[must_use]
    pub fn in_value(self, path: &str) -> Self {
        let is_joined = path.is_empty() || self.field.is_empty() || self.field.starts_with('[');
        let separator = if is_joined { "" } else { "." };
        Self { field: format!("{path}{separator}{}", self.field), detail: self.detail }
    }
}
