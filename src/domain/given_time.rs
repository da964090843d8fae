//! Times that clients give for messages: `created_at` of an exchange, of a line of an import, and of a message in a list.
//!
//! A session orders its messages by `seq` alone. So times need not increase: clocks of clients differ, and a client can store
//! a message of yesterday after one of today.

use super::json::{self, MapOnly};
use super::validation::FieldError;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime, UtcOffset};

/// The clock of a client may be ahead of ours by this much.
pub const CLOCK_TOLERANCE: Duration = Duration::minutes(5);

/// Converts a time to the form in which it is stored: UTC, whole microseconds, from 1970 to 9999.
pub fn stored_time(time: OffsetDateTime) -> Result<OffsetDateTime, String> {
    let Some(time) = time.checked_to_offset(UtcOffset::UTC) else {
        return Err("must not be after the year 9999 in UTC".to_owned());
    };
    if time < OffsetDateTime::UNIX_EPOCH {
        return Err("must not be before 1970".to_owned());
    }
    Ok(time.replace_nanosecond(time.microsecond() * 1000).unwrap_or(time))
}

/// Parses the time of an exchange, in RFC 3339, and converts it to the form in which it is stored. `now` is the time of our
/// clock.
pub fn given_time(text: &str, now: OffsetDateTime) -> Result<OffsetDateTime, String> {
    reject_future(parse(text)?, Some(now))
}

fn parse(text: &str) -> Result<OffsetDateTime, String> {
    let time = OffsetDateTime::parse(text, &Rfc3339);
    stored_time(time.map_err(|_| "must be a time in RFC 3339, such as 2026-05-01T12:00:00Z".to_owned())?)
}

/// Returns the time in the field `created_at` of a message, in RFC 3339 or as a number of seconds since 1970, as many clients
/// write it. The field stays part of the message. Without a clock, a time can be in the future.
pub fn message_time(
    message: &RawValue,
    now: Option<OffsetDateTime>,
) -> Result<Option<OffsetDateTime>, FieldError> {
    #[derive(Deserialize)]
    struct Timed {
        created_at: Option<Value>,
    }
    const FORMS: &str =
        "must be a time in RFC 3339, such as 2026-05-01T12:00:00Z, or a number of seconds since 1970";
    // Another error belongs to the message, not to its time.
    let time = match json::read::<MapOnly<Timed>>(message.get()) {
        Ok(MapOnly(Timed { created_at })) => created_at,
        Err(error) if error.field == "created_at" => return Err(error),
        Err(_) => None,
    };
    let time = match time {
        None => return Ok(None),
        Some(Value::String(text)) => parse(&text).and_then(|time| reject_future(time, now)),
        Some(Value::Number(seconds)) => seconds
            .as_f64()
            .and_then(from_seconds)
            .ok_or_else(|| format!("{FORMS}, up to the year 9999"))
            .and_then(|time| reject_future(stored_time(time)?, now)),
        Some(_) => Err(FORMS.to_owned()),
    };
    time.map(Some).map_err(|detail| FieldError::new("created_at", detail))
}

/// Converts seconds since 1970. A double has microseconds up to the year 2255.
fn from_seconds(seconds: f64) -> Option<OffsetDateTime> {
    let since_1970 = Duration::checked_seconds_f64(seconds)?;
    let micros = i64::try_from(since_1970.whole_microseconds()).ok()?;
    OffsetDateTime::UNIX_EPOCH.checked_add(Duration::microseconds(micros))
}

fn reject_future(time: OffsetDateTime, now: Option<OffsetDateTime>) -> Result<OffsetDateTime, String> {
    let Some(now) = now.filter(|now| time > *now + CLOCK_TOLERANCE) else { return Ok(time) };
    let text = |time: OffsetDateTime| time.format(&Rfc3339).unwrap_or_default();
    let minutes = CLOCK_TOLERANCE.whole_minutes();
    Err(format!(
        "{} is in the future: the clock of the service shows {}, and at most {minutes} minutes more are allowed",
        text(time),
        text(now)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-05-01 12:00 UTC);

    #[test]
    fn time_of_exchange_is_stored_in_utc_with_microseconds() {
        let time = given_time("2026-05-01T13:30:00.1234567+02:00", NOW).expect("valid");
        assert_eq!(time, datetime!(2026-05-01 11:30:00.123456 UTC));
        assert_eq!(time.offset(), UtcOffset::UTC);
    }

    #[test]
    fn time_out_of_range_is_rejected() {
        for (text, part) in [
            ("2026-05-01", "RFC 3339"),
            ("1714564800", "RFC 3339"),
            ("1969-12-31T23:59:59Z", "1970"),
            ("1970-01-01T00:00:00+00:01", "1970"),
            ("9999-12-31T23:59:59-00:01", "9999"),
            ("2026-05-01T12:05:00.000001Z", "2026-05-01T12:00:00Z"),
        ] {
            let error = given_time(text, NOW).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
        for text in ["1970-01-01T00:00:00Z", "2026-05-01T12:05:00Z"] {
            given_time(text, NOW).expect(text);
        }
    }

    #[test]
    fn time_of_message_is_read_from_text_or_seconds() {
        let read = |json: &str| message_time(serde_json::from_str(json).expect("JSON"), Some(NOW));
        for (json, time) in [
            (r#"{"role":"user"}"#, None),
            (r#"{"created_at":null}"#, None),
            (r#"{"created_at":"2026-04-30T12:00:00Z"}"#, Some(datetime!(2026-04-30 12:00 UTC))),
            (r#"{"created_at":1777550400}"#, Some(datetime!(2026-04-30 12:00 UTC))),
            (r#"{"created_at":1777550400.25}"#, Some(datetime!(2026-04-30 12:00:00.25 UTC))),
            ("[7]", None),
        ] {
            assert_eq!(read(json), Ok(time), "{json}");
        }
        for value in ["true", "-1", "1e300", "1777550400000", "\"now\"", "[]", "2000000000"] {
            let error = read(&format!(r#"{{"created_at":{value}}}"#)).expect_err(value);
            assert_eq!(error.field, "created_at", "{value}: {error:?}");
        }
    }
}
