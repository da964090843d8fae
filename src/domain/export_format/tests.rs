//! Tests of the export format: the exact lines, and all reasons for which an import is rejected.

use super::*;
use crate::domain::id::{SessionId, UserId};
use crate::domain::revision::{MetaConsolidation, ModelUsage, RevisionKind};
use crate::domain::session::ConsolidationState;
use crate::domain::summary::MAX_BYTES;
use test_case::test_case;
use time::macros::datetime;

const BEGAN: OffsetDateTime = datetime!(2026-02-03 10:15:00.000001 UTC);

fn provenance() -> Provenance {
    Provenance {
        model: "small".to_owned(),
        pool: "default".to_owned(),
        prompt_version: "1".to_owned(),
        usage: ModelUsage {
            input_tokens: Some(7),
            calls: Some(1),
            failures: Some(0),
            ..ModelUsage::default()
        },
        duration_ms: 12,
    }
}

fn revisions() -> Vec<Revision> {
    let revision = |revision, kind, range: Option<(i64, i64)>, cursor, text: &str| Revision {
        revision,
        kind,
        from_seq: range.map(|(from, _)| from),
        to_seq: range.map(|(_, to)| to),
        cursor,
        summary: Summary::new(text.to_owned()),
        added: if range.is_some() { "added".to_owned() } else { String::new() },
        meta: None,
        provenance: range.map(|_| provenance()),
        redacted_seq: None,
        created_at: BEGAN,
    };
    let meta = MetaConsolidation { text_before: "long".to_owned(), provenance: provenance() };
    vec![
        revision(1, RevisionKind::Consolidation, Some((1, 1)), 1, "one"),
        Revision {
            meta: Some(meta),
            ..revision(2, RevisionKind::Consolidation, Some((2, 3)), 3, "one, two")
        },
        revision(3, RevisionKind::Restore, None, 1, "one"),
        revision(4, RevisionKind::Restore, None, 0, ""),
        revision(5, RevisionKind::Consolidation, Some((1, 2)), 2, "anew"),
        revision(6, RevisionKind::Edit, None, 2, "edited"),
    ]
}

fn session() -> Session {
    Session {
        session_id: SessionId::new("s").expect("valid"),
        user_id: Some(UserId::new("ada").expect("valid")),
        metadata: r#"{"z":1.0}"#.to_owned(),
        last_seq: 3,
        tokens: 0,
        cursor: 2,
        stored_bytes: 0,
        cursor_tokens: 0,
        summary: Summary::new("edited".to_owned()),
        revision: 6,
        consolidation: ConsolidationState::default(),
        window: None,
        language: None,
        forked_from: None,
        incarnation: uuid::Uuid::nil(),
        created_at: BEGAN,
        updated_at: BEGAN + time::Duration::HOUR,
    }
}

const MESSAGES: [&str; 3] = [
    r#"{"x":1.0,"role":"user","content":"\u0000 \" é"}"#,
    r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}]}"#,
    r#"{"role":"tool","tool_call_id":"a","content":"done"}"#,
];

fn stored(
    seq: i64,
    created_at: OffsetDateTime,
    redacted_at: Option<OffsetDateTime>,
    json: &str,
) -> StoredMessage {
    StoredMessage { seq, created_at, redacted_at, json: json.to_owned() }
}

/// Returns the lines of a complete export.
fn lines() -> Vec<String> {
    let mut writer = ExportWriter::default();
    let mut lines = vec![writer.header(&session()).expect("JSON")];
    for (seq, message) in (1..).zip(MESSAGES) {
        lines.push(writer.message(&stored(seq, BEGAN, None, message)).expect("JSON"));
    }
    lines.extend(revisions().iter().map(|revision| writer.revision(revision).expect("JSON")));
    lines.push(writer.end().expect("JSON"));
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

const SIZES: SizeLimits = SizeLimits { max_message_bytes: 1000, max_metadata_bytes: 100 };

fn check<T: AsRef<[u8]>>(
    lines: impl IntoIterator<Item = T>,
) -> Result<(ImportedSession, Vec<ImportRow>), LineError> {
    let mut reader = ExportReader::new(SIZES);
    let mut rows = Vec::new();
    for line in lines {
        rows.extend(reader.line(line.as_ref())?);
    }
    Ok((reader.finish()?, rows))
}

#[test]
fn written_export_is_read_back_unchanged() {
    let lines = lines();
    let header = r#"{"precis_export":1,"session":{"session_id":"s","user_id":"ada","metadata":{"z":1.0},"created_at":"2026-02-03T10:15:00.000001Z","updated_at":"2026-02-03T11:15:00.000001Z"},"messages":3,"revisions":6}"#;
    assert_eq!(lines[0], header);
    let first = r#"{"seq":1,"created_at":"2026-02-03T10:15:00.000001Z","message":{"x":1.0,"role":"user","content":"\u0000 \" é"}}"#;
    assert_eq!(lines[1], first);
    let (session, rows) = check(&lines).expect("valid");
    assert_eq!((session.last_seq, session.revision, session.cursor), (3, 6, 2));
    assert_eq!((session.summary, session.messages_only), (Summary::new("edited".to_owned()), false));
    assert_eq!(session.metadata.as_deref(), Some(r#"{"z":1.0}"#));
    assert_eq!(session.times, Some((BEGAN, BEGAN + time::Duration::HOUR)));
    let (mut messages, mut read) = (Vec::new(), Vec::new());
    for row in rows {
        match row {
            ImportRow::Message(message) => messages.push(message),
            ImportRow::Revision(revision) => read.push(*revision),
        }
    }
    assert!(messages.iter().map(|message| message.message.json()).eq(MESSAGES));
    assert!(messages.iter().all(|message| message.facts.created_at == Some(BEGAN) && message.tokens > 4));
    assert_eq!(read, revisions());
    for revision in &read {
        let line = serde_json::to_string(revision).expect("JSON");
        assert_eq!(parse_revision(&line).as_ref(), Ok(revision));
    }
}

#[test]
fn truncated_export_is_rejected_at_every_position() {
    let lines = lines();
    for kept in 0..lines.len() {
        let error = check(&lines[..kept]).expect_err("cut off");
        assert_eq!(error.line, u64::try_from(kept.max(1)).expect("small"), "{error}");
    }
    for removed in 0..lines.len() {
        let mut less = lines.clone();
        less.remove(removed);
        check(&less).expect_err("a line is missing");
    }
    for byte in 0..lines[3].len() {
        check(lines.iter().map(|line| &line.as_bytes()[..byte.min(line.len())])).expect_err("cut lines");
    }
}

#[test]
fn invalid_line_is_reported_with_line_number_and_field() {
    let lines = lines();
    let cases: &[(usize, &str, &str, &str)] = &[
        (0, r#""precis_export":1"#, r#""precis_export":2"#, "precis_export"),
        (0, r#""user_id":"ada""#, r#""user_id":"""#, "session.user_id"),
        (0, r#""session_id":"s""#, r#""session_id":"a\u0000""#, "session.session_id"),
        (0, r#"{"z":1.0}"#, "[]", "session.metadata"),
        (0, "2026-02-03T11", "2026-02-03T09", "session.updated_at"),
        (0, "2026-02-03T10:15", "1969-02-03T10:15", "session.created_at"),
        (0, "2026-02-03T11:15:00.000001Z", "9999-12-31T23:59:59-23:59", "session.updated_at"),
        (0, r#""messages":3"#, r#""messages":0"#, "messages"),
        (0, r#""messages":3"#, r#""messages":3,"x":1"#, "x"),
        (1, r#""seq":1"#, r#""seq":2"#, "seq"),
        (1, r#""role":"user""#, r#""role":"robot""#, "message.role"),
        (1, r#""seq":1"#, r#""seq":1,"y":1"#, "y"),
        (1, "2026", "1969", "created_at"),
        (1, "2026-02-03T10:15:00.000001Z", "9999-12-31T23:59:59-23:59", "created_at"),
        (4, r#""to_seq":1"#, r#""to_seq":2"#, "from_seq"),
        (4, r#""revision":1"#, r#""revision":2"#, "revision"),
        (4, r#""cursor":1"#, r#""cursor":4"#, "cursor"),
        (4, r#""kind":"consolidation""#, r#""kind":"guess""#, "kind"),
        (4, r#""text":"one""#, r#""text":"o\u0000e""#, "summary.text"),
        (4, r#""calls":1"#, r#""calls":-1"#, "provenance.usage.calls"),
        (5, r#""from_seq":2"#, r#""from_seq":1"#, "from_seq"),
        (6, r#""text":"one""#, r#""text":"never""#, "cursor"),
        (6, r#""added":"""#, r#""added":"x""#, "kind"),
        (9, r#""text":"edited""#, r#""text":" ""#, "summary.text"),
        (9, r#""cursor":2"#, r#""cursor":1"#, "cursor"),
        (9, r#""added":"""#, r#""added":"x""#, "kind"),
        (9, r#""to_seq":null"#, r#""to_seq":2"#, "kind"),
        (10, r#""messages":3"#, r#""messages":2"#, "end.messages"),
        (10, r#""sha256":""#, r#""sha256":"0"#, "end.sha256"),
    ];
    for (line, from, to, field) in cases {
        let mut changed = lines.clone();
        changed[*line] = changed[*line].replacen(from, to, 1);
        assert_ne!(changed, lines, "{from}");
        let error = check(&changed).expect_err(to);
        assert_eq!((error.line, error.errors[0].field.as_str()), (*line as u64 + 1, *field), "{to}: {error}");
    }
    for (line, from, field) in
        [(4, "one", "summary.text"), (4, "added", "added"), (5, "long", "meta.text_before")]
    {
        let mut changed = lines.clone();
        let text = |text: &str| format!(":\"{text}\"");
        changed[line] = changed[line].replacen(&text(from), &text(&"x".repeat(MAX_BYTES + 1)), 1);
        let error = check(&changed).expect_err("too long");
        assert_eq!(error.errors[0].field, field, "{error}");
    }
    let after_end = lines.iter().map(String::as_str).chain([MESSAGES[0]]);
    assert_eq!(check(after_end).expect_err("line after the end").line, 12);
    let mut changed = lines.clone();
    changed[1] = changed[1].replace("é", "e");
    assert_eq!(check(&changed).expect_err("changed").errors[0].field, "end.sha256");
}

#[test]
fn file_of_messages_only_is_imported() {
    let (session, rows) = check(MESSAGES.iter().chain(&["", "  "])).expect("valid");
    assert_eq!((session.last_seq, session.revision, session.messages_only), (3, 0, true));
    assert_eq!((session.user_id, session.metadata, session.times), (None, None, None));
    assert_eq!(rows.len(), 3);
    for (line, hint) in [
        (r#"{"role":"robot","content":"x"}"#, "role"),
        (&lines()[0], "no message"),
        (&lines()[1], "no message"),
        ("[]", "JSON object"),
        (r#"{"role":"user","content":"x""#, "not JSON"),
        (r#"{"content":"x"}"#, "neither"),
        (r#"{"role":"user","content":"\ud80"}"#, "not JSON"),
    ] {
        let error = check([MESSAGES[0], line]).expect_err(line);
        assert_eq!(error.line, 2);
        assert!(error.to_string().contains(hint), "{error}");
    }
    assert!(check([&b"\xff"[..]]).expect_err("no UTF-8").to_string().contains("UTF-8"));
}

#[test]
fn each_result_of_a_plain_line_is_a_row() {
    let line = r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"},{"type":"tool_result","tool_use_id":"b"},{"type":"text","text":"x"}],"created_at":1000000000}"#;
    let (session, rows) = check([MESSAGES[0], line, MESSAGES[2]]).expect("valid");
    let messages = rows.iter().map(|row| match row {
        ImportRow::Message(row) => (row.seq, row.facts.created_at, row.message.tool_call_id()),
        ImportRow::Revision(_) => panic!("no revision"),
    });
    let time = Some(datetime!(2001-09-09 01:46:40 UTC));
    let expected =
        [(1, None, None), (2, time, Some("a")), (3, time, Some("b")), (4, time, None), (5, None, Some("a"))];
    assert!(messages.eq(expected), "{rows:?}");
    assert_eq!(session.last_seq, 5);
}

#[test]
fn times_of_messages_are_read_in_any_order() {
    let at = |time: &str| format!(r#"{{"role":"user","content":"x","created_at":{time}}}"#);
    let lines = [at("\"2026-02-03T11:15:00+01:00\""), at("1000000000"), at("null"), MESSAGES[0].to_owned()];
    let (imported, rows) = check(&lines).expect("valid");
    let times = rows.iter().map(|row| match row {
        ImportRow::Message(message) => message.facts.created_at,
        ImportRow::Revision(_) => panic!("no revision"),
    });
    let second = datetime!(2001-09-09 01:46:40 UTC);
    assert!(times.eq([Some(datetime!(2026-02-03 10:15 UTC)), Some(second), None, None]));
    assert_eq!(imported.times, None, "activity is the time of the import");
    let time_of = |mut reader: ExportReader, line: &str| {
        let rows = reader.line(line.as_bytes()).expect("valid");
        let [ImportRow::Message(message)] = rows.as_slice() else { panic!("{rows:?}") };
        message.facts.created_at
    };
    for time in ["\"yesterday\"", "\"1969-01-01T00:00:00Z\"", "[]", "1e18"] {
        assert_eq!(time_of(ExportReader::new(SIZES), &at(time)), None, "{time}");
    }
    let reader = ExportReader::new(SIZES).with_clock(second);
    assert_eq!(time_of(reader, &lines[0]), Some(second), "a time in the future becomes now");
    // The messages of an export may be older than the session, and in any order.
    let mut writer = ExportWriter::default();
    let header = writer.header(&Session { last_seq: 2, revision: 0, ..session() }).expect("JSON");
    let message = |writer: &mut ExportWriter, seq, time| {
        writer.message(&stored(seq, time, None, MESSAGES[0])).expect("JSON")
    };
    let messages = [message(&mut writer, 1, BEGAN), message(&mut writer, 2, second)];
    let lines = [header, messages.concat(), writer.end().expect("JSON")].concat();
    check(lines.lines()).expect("valid");
}

const REDACTED: &str = r#"{"role":"user","content":"[redacted]"}"#;

/// Returns an export in which message 2 is redacted. Its first revision still has its summary, its second one has not, and the
/// third one is that of the redaction.
fn redacted_export(change: impl Fn(&mut Vec<Revision>), redacted_at: Option<OffsetDateTime>) -> Vec<String> {
    let empty = Revision {
        summary: Summary::default(),
        added: String::new(),
        redacted_seq: Some(2),
        meta: Some(MetaConsolidation { text_before: String::new(), provenance: provenance() }),
        ..revisions()[1].clone()
    };
    let redaction = Revision {
        kind: RevisionKind::Redaction,
        from_seq: Some(2),
        to_seq: Some(2),
        revision: 3,
        ..revisions()[2].clone()
    };
    let mut revisions = vec![revisions()[0].clone(), empty, redaction];
    change(&mut revisions);
    let mut writer = ExportWriter::default();
    let revision = i64::try_from(revisions.len()).expect("small");
    let mut lines = vec![writer.header(&Session { revision, ..session() }).expect("JSON")];
    for (seq, message) in (1..).zip([MESSAGES[0], REDACTED, MESSAGES[0]]) {
        let redacted_at = redacted_at.filter(|_| seq == 2);
        lines.push(writer.message(&stored(seq, BEGAN, redacted_at, message)).expect("JSON"));
    }
    lines.extend(revisions.iter().map(|revision| writer.revision(revision).expect("JSON")));
    lines.push(writer.end().expect("JSON"));
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

#[test]
fn redactions_are_read_back_unchanged() {
    let (session, rows) = check(redacted_export(|_| {}, Some(BEGAN))).expect("valid");
    assert_eq!((session.cursor, session.summary.text.as_str(), session.revision), (1, "one", 3));
    let redacted = rows.iter().filter_map(|row| match row {
        ImportRow::Message(message) => message.facts.redacted_at.map(|time| (message.seq, time)),
        ImportRow::Revision(_) => None,
    });
    assert_eq!(redacted.collect::<Vec<_>>(), [(2, BEGAN)]);
    // A fork may have left out the message that a redaction names.
    let beyond = |revisions: &mut Vec<Revision>| {
        revisions[2].from_seq = Some(2);
        let other = Revision { revision: 4, from_seq: Some(9), to_seq: Some(9), ..revisions[2].clone() };
        revisions.push(other);
    };
    check(redacted_export(beyond, Some(BEGAN))).expect("valid");
}

#[test_case(|_| {}, None => "redacted_seq"; "message is not redacted")]
#[test_case(|all| all[1].summary.text = "a secret".to_owned(), Some(BEGAN) => "summary.text"; "summary")]
#[test_case(|all| all[1].added = "a secret".to_owned(), Some(BEGAN) => "summary.text"; "added text")]
#[test_case(|all| all[1].meta.as_mut().expect("meta").text_before = "a secret".to_owned(), Some(BEGAN) => "summary.text"; "text before compression")]
#[test_case(|all| all[1].redacted_seq = Some(3), Some(BEGAN) => "redacted_seq"; "another message")]
#[test_case(|all| all[2].to_seq = None, Some(BEGAN) => "from_seq"; "no message")]
#[test_case(|all| (all[2].from_seq, all[2].to_seq) = (Some(1), Some(1)), Some(BEGAN) => "from_seq"; "message before the cursor")]
#[test_case(|all| all[2].added = "x".to_owned(), Some(BEGAN) => "kind"; "redaction with text")]
#[test_case(|all| all[2].summary.text = "x".to_owned(), Some(BEGAN) => "cursor"; "unknown state")]
#[test_case(|all| drop(all.pop()), Some(BEGAN) => "end.revisions"; "no redaction")]
#[test_case(|all| (all[2].from_seq, all[2].to_seq) = (Some(3), Some(3)), Some(BEGAN) => "end.revisions"; "redaction of another message")]
fn inconsistent_redactions_are_rejected(
    change: impl Fn(&mut Vec<Revision>),
    redacted_at: Option<OffsetDateTime>,
) -> String {
    check(redacted_export(change, redacted_at)).expect_err("invalid").errors[0].field.clone()
}

#[test]
fn summary_of_a_session_cannot_be_redacted() {
    let restored = |all: &mut Vec<Revision>| {
        let lost = Revision {
            revision: 4,
            kind: RevisionKind::Restore,
            from_seq: None,
            to_seq: None,
            cursor: 2,
            meta: None,
            provenance: None,
            ..all[1].clone()
        };
        all.push(lost);
    };
    let error = check(redacted_export(restored, Some(BEGAN))).expect_err("invalid");
    assert_eq!(error.errors[0].field, "end.revisions", "{error}");
    let text = |message: &str| {
        format!(
            r#"{{"seq":1,"created_at":"2026-02-03T10:15:00Z","redacted_at":"2026-02-03T10:15:00Z","message":{message}}}"#
        )
    };
    let header = redacted_export(|_| {}, Some(BEGAN)).remove(0);
    let error = check([&header, &text(MESSAGES[0])]).expect_err("not redacted");
    assert_eq!(error.errors[0].field, "message", "{error}");
}

#[test]
fn message_depth_limit_is_the_same_as_in_an_exchange() {
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!(r#"{{"role":"user","content":"x","deep":{open}{close}}}"#)
    };
    check([deep(118)]).expect_err("deeper than in an exchange");
    check([deep(117)]).expect("as in an exchange");
    let line =
        |message: &str| ExportWriter::default().message(&stored(1, BEGAN, None, message)).expect("JSON");
    let mut header = ExportWriter::default().header(&session()).expect("JSON");
    header.truncate(header.len() - 1);
    check([header.clone(), line(&deep(118))]).expect_err("too deep");
    let error = check([header, line(&deep(117))]).expect_err("cut off");
    assert!(error.to_string().contains("cut off"), "{error}");
}
