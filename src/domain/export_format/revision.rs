//! Validation of revisions in an import.

use super::super::revision::{Provenance, Revision};
use super::super::session::Summary;
use super::super::validation::FieldError;

/// Returns the revision with newly computed sizes of its summary. Its place among other revisions is checked by the reader.
pub(super) fn validate(mut revision: Revision) -> Result<Revision, Vec<FieldError>> {
    let mut errors = Vec::new();
    for (field, text) in [("summary.text", &revision.summary.text), ("added", &revision.added)] {
        // Postgres cannot store this character.
        if text.contains('\0') {
            errors.push(FieldError::new(field, "must not contain U+0000"));
        }
    }
    let meta = revision.meta.as_ref().map(|meta| ("meta.provenance", &meta.provenance));
    for (path, provenance) in
        revision.provenance.as_ref().map(|provenance| ("provenance", provenance)).into_iter().chain(meta)
    {
        errors.extend(negative_counts(path, provenance));
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    revision.summary = Summary::new(revision.summary.text);
    Ok(revision)
}

fn negative_counts(path: &str, provenance: &Provenance) -> impl Iterator<Item = FieldError> {
    let usage = &provenance.usage;
    [
        ("usage.input_tokens", usage.input_tokens),
        ("usage.output_tokens", usage.output_tokens),
        ("usage.calls", usage.calls),
        ("usage.failures", usage.failures),
        ("usage.queued_ms", usage.queued_ms),
        ("duration_ms", Some(provenance.duration_ms)),
    ]
    .into_iter()
    .filter(|(_, count)| count.is_some_and(|count| count < 0))
    .map(move |(name, _)| FieldError::new(format!("{path}.{name}"), "must not be negative"))
}
