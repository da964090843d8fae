//! Fuzzes the import with any lines. An accepted import is exported and imported again without a difference. The error of
//! a rejected import quotes nothing of the input. Splitting the body into chunks does not change the result.
//!
//! No mutation would ever find the checksum in the last line of an export, so the target completes an input that ends in
//! `{"end`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use precis::domain::exchange::{MessageFacts, StoredMessage};
use precis::domain::export_format::{
    ExportReader, ExportWriter, ImportRow, ImportedSession, LineError, max_line_bytes, parse_revision,
};
use precis::domain::format;
use precis::domain::id::SessionId;
use precis::domain::limits::SizeLimits;
use precis::domain::session::{ConsolidationState, Session};
use precis::service::import::{ImportLimits, Upload};
use precis_fuzz::quoted;
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use time::OffsetDateTime;

/// Small enough for inputs of the fuzzer to exceed them.
const SIZES: SizeLimits = SizeLimits { max_message_bytes: 400, max_metadata_bytes: 60 };

type ImportCheck = Result<(ImportedSession, Vec<ImportRow>), LineError>;

fuzz_target!(|data: &[u8]| {
    let data = with_end(data);
    let checked = check(&data);
    if let Ok((session, rows)) = &checked {
        assert_export_round_trip(session, rows);
    }
    let whole = upload(&[&data]);
    // Only an upload has a clock, and its error contains the time.
    if whole.as_ref().is_err_and(|error| error.contains("in the future")) {
        return;
    }
    assert_eq!(whole, checked.map(|(session, _)| session.last_seq).map_err(|error| error.to_string()));
    let cut = data.len() / 3 + usize::from(data.first().copied().unwrap_or_default());
    let (first, second) = data.split_at(cut.min(data.len()));
    assert_eq!(upload(&[first, second]), whole, "the chunk boundary changes the import");
});

/// Completes the last line of an export if the input ends with its beginning.
fn with_end(data: &[u8]) -> Cow<'_, [u8]> {
    let Some(lines) = data.strip_suffix(b"{\"end") else {
        return data.into();
    };
    let (mut hash, mut messages, mut revisions) = (Sha256::new(), 0, 0);
    let mut reader = ExportReader::new(SIZES);
    for line in lines.split(|byte| *byte == b'\n') {
        let Ok(rows) = reader.line(line) else {
            return data.into();
        };
        let new_messages = rows.iter().filter(|row| matches!(row, ImportRow::Message(_))).count();
        (messages, revisions) = (messages + new_messages, revisions + rows.len() - new_messages);
        if !line.trim_ascii().is_empty() {
            hash.update(line);
            hash.update(b"\n");
        }
    }
    let sha256: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let end = format!(r#"{{"end":{{"messages":{messages},"revisions":{revisions},"sha256":"{sha256}"}}}}"#);
    [lines, end.as_bytes()].concat().into()
}

fn check(data: &[u8]) -> ImportCheck {
    let (mut reader, mut rows) = (ExportReader::new(SIZES), Vec::new());
    let mut lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    // No line follows the last line feed.
    lines.pop_if(|line| line.is_empty());
    for line in lines {
        let before = reader.clone();
        match reader.line(line) {
            Ok(found) => rows.extend(found),
            Err(error) => {
                assert_error_quotes_nothing(&before, line);
                return Err(error);
            }
        }
    }
    Ok((reader.finish()?, rows))
}

fn assert_error_quotes_nothing(before: &ExportReader, line: &[u8]) {
    let error_text = |line: &str| before.clone().line(line.as_bytes()).err().map(|error| error.to_string());
    if let Ok(line) = std::str::from_utf8(line) {
        assert_eq!(quoted(line, error_text), Vec::<String>::new());
    }
}

fn upload(chunks: &[&[u8]]) -> Result<i64, String> {
    let limits = ImportLimits { sizes: SIZES, max_bytes: u64::MAX, max_line_bytes: max_line_bytes(SIZES) };
    let mut upload = Upload::begin(limits).expect("a temporary file");
    for chunk in chunks {
        upload.feed(chunk).map_err(|error| error.to_string())?;
    }
    upload.finish().map(|staged| staged.messages()).map_err(|error| error.to_string())
}

/// Exports the session as the store would return it, and imports that export.
fn assert_export_round_trip(imported: &ImportedSession, rows: &[ImportRow]) {
    let (created_at, updated_at) =
        imported.times.unwrap_or((OffsetDateTime::UNIX_EPOCH, OffsetDateTime::UNIX_EPOCH));
    let session = Session {
        session_id: SessionId::new("s").expect("valid"),
        user_id: imported.user_id.clone(),
        metadata: imported.metadata.clone().unwrap_or_else(|| "{}".to_owned()),
        last_seq: imported.last_seq,
        tokens: imported.tokens,
        cursor: imported.cursor,
        stored_bytes: 0,
        cursor_tokens: 0,
        summary: imported.summary.clone(),
        revision: imported.revision,
        consolidation: ConsolidationState::default(),
        window: None,
        language: None,
        forked_from: None,
        incarnation: Default::default(),
        created_at,
        updated_at,
    };
    let mut writer = ExportWriter::default();
    let mut lines = writer.header(&session).expect("JSON");
    for row in rows {
        match row {
            ImportRow::Message(message) => {
                let json = message.message.json();
                assert!(json.len() <= SIZES.max_message_bytes);
                assert_eq!(format::read(json).as_ref(), Ok(&message.message));
                let MessageFacts { created_at: at, redacted_at } = message.facts;
                let (created_at, json) = (at.unwrap_or(created_at), json.to_owned());
                let stored = StoredMessage { seq: message.seq, created_at, redacted_at, json };
                lines += &writer.message(&stored).expect("JSON");
            }
            ImportRow::Revision(revision) => {
                let line = serde_json::to_string(revision).expect("JSON");
                assert_eq!(parse_revision(&line).as_ref(), Ok(&**revision));
                lines += &writer.revision(revision).expect("JSON");
            }
        }
    }
    lines += &writer.end().expect("JSON");
    let (again, rows_again) = check(lines.as_bytes()).expect("an export is accepted");
    if imported.messages_only {
        assert_eq!((again.last_seq, again.tokens, again.revision), (imported.last_seq, imported.tokens, 0));
    } else {
        assert_eq!((&again, rows_again.as_slice()), (imported, rows));
    }
}
