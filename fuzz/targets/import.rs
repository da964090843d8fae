//! Imports: any lines. What is taken, exported again is taken again and is the same; what is refused is refused without a
//! word of it; and where the body is cut into chunks changes nothing.
//!
//! The last line of an export has a checksum that no mutation would ever hit: where the input ends in `{"end`, the target
//! writes it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use precis::domain::export_format::{ImportedSession, ExportReader, Entry, LineError, ExportWriter, read_revision, write_revision};
use precis::domain::id::SessionId;
use precis::domain::limits::SizeLimits;
use precis::domain::message::Message;
use precis::domain::session::{ConsolidationState, Session};
use precis::service::import::{Limits, Upload};
use precis_fuzz::quoted;
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::fmt::Write as _;
use time::OffsetDateTime;

/// Small, so that they are reached.
const SIZES: SizeLimits = SizeLimits { max_message_bytes: 400, max_metadata_bytes: 60 };

type Checked = Result<(ImportedSession, Vec<Entry>), LineError>;

fuzz_target!(|data: &[u8]| {
    let data = with_end(data);
    let checked = check(&data);
    if let Ok((archive, entries)) = &checked {
        is_exported_again(archive, entries);
    }
    let whole = upload(&[&data]);
    assert_eq!(whole, checked.map(|(archive, _)| archive.last_seq).map_err(|error| error.to_string()));
    let cut = data.len() / 3 + usize::from(data.first().copied().unwrap_or_default());
    let (before, behind) = data.split_at(cut.min(data.len()));
    assert_eq!(upload(&[before, behind]), whole, "the borders of the chunks change the import");
});

/// The lines, with a true last one where one was begun.
fn with_end(data: &[u8]) -> Cow<'_, [u8]> {
    let Some(lines) = data.strip_suffix(b"{\"end") else {
        return data.into();
    };
    let (mut hash, mut messages, mut revisions) = (Sha256::new(), 0, 0);
    let mut checker = ExportReader::new(SIZES);
    for line in lines.split(|byte| *byte == b'\n') {
        match checker.line(line) {
            Ok(Entry::Message(_)) => messages += 1,
            Ok(Entry::Revision(_)) => revisions += 1,
            Ok(Entry::Nothing) => {}
            Err(_) => return data.into(),
        }
        if !line.trim_ascii().is_empty() {
            hash.update(line);
            hash.update(b"\n");
        }
    }
    let mut sha256 = String::new();
    hash.finalize().iter().for_each(|byte| write!(sha256, "{byte:02x}").expect("a String"));
    let end = format!(r#"{{"end":{{"messages":{messages},"revisions":{revisions},"sha256":"{sha256}"}}}}"#);
    [lines, end.as_bytes()].concat().into()
}

fn check(data: &[u8]) -> Checked {
    let (mut checker, mut entries) = (ExportReader::new(SIZES), Vec::new());
    let mut lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    // Behind the last line feed there is no line.
    lines.pop_if(|line| line.is_empty());
    for line in lines {
        let before = checker.clone();
        match checker.line(line) {
            Ok(entry) => entries.push(entry),
            Err(error) => {
                is_discreet(&before, line);
                return Err(error);
            }
        }
    }
    Ok((checker.finish()?, entries))
}

fn is_discreet(before: &ExportReader, line: &[u8]) {
    let complain = |line: &str| before.clone().line(line.as_bytes()).err().map(|error| error.to_string());
    if let Ok(line) = std::str::from_utf8(line) {
        assert_eq!(quoted(line, complain), Vec::<String>::new());
    }
}

fn upload(chunks: &[&[u8]]) -> Result<i64, String> {
    let mut upload = Upload::begin(Limits { sizes: SIZES, max_bytes: u64::MAX }).expect("a temporary file");
    for chunk in chunks {
        upload.feed(chunk).map_err(|error| error.to_string())?;
    }
    upload.finish().map(|received| received.messages()).map_err(|error| error.to_string())
}

/// As the store would have it, written by the exporter.
fn is_exported_again(archive: &ImportedSession, entries: &[Entry]) {
    let (created_at, updated_at) =
        archive.times.unwrap_or((OffsetDateTime::UNIX_EPOCH, OffsetDateTime::UNIX_EPOCH));
    let session = Session {
        session_id: SessionId::new("s").expect("valid"),
        user_id: archive.user_id.clone().unwrap_or_default(),
        metadata: archive.metadata.clone().unwrap_or_else(|| "{}".to_owned()),
        last_seq: archive.last_seq,
        tokens: archive.tokens,
        cursor: archive.cursor,
        cursor_tokens: 0,
        summary: archive.summary.clone(),
        revision: archive.revision,
        consolidation: ConsolidationState::default(),
        created_at,
        updated_at,
    };
    let mut writer = ExportWriter::default();
    let mut lines = writer.header(&session).expect("JSON");
    for entry in entries {
        match entry {
            Entry::Nothing => {}
            Entry::Message(message) => {
                let json = message.message.json();
                assert!(json.len() <= SIZES.max_message_bytes);
                assert_eq!(Message::from_stored(json.to_owned()).as_ref(), Ok(&message.message));
                let at = message.created_at.unwrap_or(created_at);
                lines += &writer.message(message.seq, at, json).expect("JSON");
            }
            Entry::Revision(revision) => {
                let line = write_revision(revision).expect("JSON");
                assert_eq!(read_revision(&line).as_ref(), Ok(&**revision));
                lines += &writer.revision(revision).expect("JSON");
            }
        }
    }
    lines += &writer.end().expect("JSON");
    let (again, entries_again) = check(lines.as_bytes()).expect("an export is taken");
    let kept = |entries: &[Entry]| -> Vec<Entry> {
        entries.iter().filter(|entry| !matches!(entry, Entry::Nothing)).cloned().collect()
    };
    if archive.bare {
        assert_eq!((again.last_seq, again.tokens, again.revision), (archive.last_seq, archive.tokens, 0));
    } else {
        assert_eq!((&again, kept(&entries_again)), (archive, kept(entries)));
    }
}
