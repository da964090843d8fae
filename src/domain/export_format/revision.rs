//! The line of a revision: all of it, so that how a summary came to be can be told after an import as before.

use super::super::revision::{MetaConsolidation, Provenance, Revision, RevisionKind};
use super::super::session::Summary;
use super::super::validation::FieldError;
use super::super::{summary, tokens};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RevisionLine {
    revision: i64,
    kind: String,
    from_seq: Option<i64>,
    to_seq: Option<i64>,
    cursor: i64,
    text: String,
    words: i64,
    tokens: i64,
    added: String,
    meta: Option<MetaPart>,
    source: Option<SourcePart>,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetaPart {
    text_before: String,
    source: SourcePart,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SourcePart {
    model: String,
    pool: String,
    prompt_version: String,
    input_tokens: Option<i64>,
    output_tokens: Option<i64>,
    duration_ms: i64,
    calls: Option<i64>,
    failures: Option<i64>,
    queued_ms: Option<i64>,
}

impl From<&Provenance> for SourcePart {
    fn from(source: &Provenance) -> Self {
        let source = source.clone();
        Self {
            model: source.model,
            pool: source.pool,
            prompt_version: source.prompt_version,
            input_tokens: source.input_tokens,
            output_tokens: source.output_tokens,
            duration_ms: source.duration_ms,
            calls: source.calls,
            failures: source.failures,
            queued_ms: source.queued_ms,
        }
    }
}

impl SourcePart {
    fn read(self, path: &str, wrong: &mut Vec<FieldError>) -> Provenance {
        let counts = [
            ("input_tokens", self.input_tokens),
            ("output_tokens", self.output_tokens),
            ("duration_ms", Some(self.duration_ms)),
            ("calls", self.calls),
            ("failures", self.failures),
            ("queued_ms", self.queued_ms),
        ];
        for (name, count) in counts {
            if count.is_some_and(|count| count < 0) {
                wrong.push(FieldError {
                    field: format!("{path}.{name}"),
                    detail: "must not be negative".into(),
                });
            }
        }
        Provenance {
            model: self.model,
            pool: self.pool,
            prompt_version: self.prompt_version,
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            duration_ms: self.duration_ms,
            calls: self.calls,
            failures: self.failures,
            queued_ms: self.queued_ms,
        }
    }
}

impl From<&Revision> for RevisionLine {
    fn from(revision: &Revision) -> Self {
        Self {
            revision: revision.revision,
            kind: revision.kind.as_str().to_owned(),
            from_seq: revision.range.map(|(from, _)| from),
            to_seq: revision.range.map(|(_, to)| to),
            cursor: revision.cursor,
            text: revision.summary.text.clone(),
            words: revision.summary.words,
            tokens: revision.summary.tokens,
            added: revision.added.clone(),
            meta: revision.meta.as_ref().map(|meta| MetaPart {
                text_before: meta.text_before.clone(),
                source: SourcePart::from(&meta.source),
            }),
            source: revision.source.as_ref().map(SourcePart::from),
            created_at: revision.created_at,
        }
    }
}

impl RevisionLine {
    /// The revision, with its own measures taken anew; what it must be among others is the checker's to say.
    pub(super) fn read(self) -> Result<Revision, Vec<FieldError>> {
        let mut wrong = Vec::new();
        let mut say =
            |field: &str, detail: &str| wrong.push(FieldError { field: field.into(), detail: detail.into() });
        let kind = RevisionKind::parse(&self.kind);
        if kind.is_none() {
            say("kind", "must be consolidation or restore");
        }
        for (field, text) in [("text", &self.text), ("added", &self.added)] {
            // Postgres has no text with one.
            if text.contains('\0') {
                say(field, "must not contain U+0000");
            }
        }
        let source = self.source.map(|source| source.read("source", &mut wrong));
        let meta = self.meta.map(|meta| MetaConsolidation {
            text_before: meta.text_before,
            source: meta.source.read("meta.source", &mut wrong),
        });
        match kind {
            Some(kind) if wrong.is_empty() => Ok(Revision {
                revision: self.revision,
                kind,
                range: self.from_seq.zip(self.to_seq),
                cursor: self.cursor,
                summary: Summary {
                    words: i64::try_from(summary::words(&self.text)).unwrap_or(i64::MAX),
                    tokens: tokens::count_text(&self.text),
                    text: self.text,
                },
                added: self.added,
                meta,
                source,
                created_at: self.created_at,
            }),
            _ => Err(wrong),
        }
    }
}
