//! Times that clients give for messages: `created_at` of an exchange, of a line of an import, and of a message in a list.
//!
//! A session orders its messages by `seq` alone. So times need not increase: clocks of clients differ, and a client can store
//! a message of yesterday after one of today. A time in the future becomes the time of our clock.

use super::message::object::Object;
use serde_json::Value;
use serde_json::value::RawValue;
use time::format_description::well_known::{Iso8601, Rfc3339};
use time::{Duration, OffsetDateTime, PrimitiveDateTime, UtcOffset};

/// Numbers from here on are milliseconds: as seconds, they would be after the year 5000.
const FIRST_MILLISECONDS: f64 = 1e11;

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

/// Reads a time in RFC 3339, without a zone in UTC, or as a number of seconds or milliseconds since 1970, as clients write it.
pub fn given_time(value: &Value) -> Result<OffsetDateTime, String> {
    const FORMS: &str = "must be a time in RFC 3339, such as 2026-05-01T12:00:00Z, or a number of seconds or \
        milliseconds since 1970, up to the year 9999";
    let time = match value {
        Value::String(text) => parse(text.trim()),
        Value::Number(number) => number.as_f64().and_then(|number| {
            from_seconds(if number.abs() < FIRST_MILLISECONDS { number } else { number / 1000.0 })
        }),
        _ => None,
    };
    stored_time(time.ok_or(FORMS)?)
}

fn parse(text: &str) -> Option<OffsetDateTime> {
    let with_zone =
        OffsetDateTime::parse(text, &Rfc3339).or_else(|_| OffsetDateTime::parse(text, &Iso8601::DEFAULT));
    let without = || PrimitiveDateTime::parse(&text.replacen(' ', "T", 1), &Iso8601::DEFAULT).ok();
    with_zone.ok().or_else(|| without().map(PrimitiveDateTime::assume_utc))
}

/// Returns the time in the field `created_at` of a message. The field stays part of the message, so one that is no time is ignored.
/// `now` is the time of our clock; without it, a time can be in the future.
pub fn message_time(message: &RawValue, now: Option<OffsetDateTime>) -> Option<OffsetDateTime> {
    let message = Object::parse(message.get());
    let time = message.get("created_at").and_then(|json| serde_json::from_str(json).ok())?;
    let time = given_time(&time).ok()?;
    Some(now.map_or(time, |now| time.min(now)))
}

/// Converts seconds since 1970. A double has microseconds up to the year 2255.
fn from_seconds(seconds: f64) -> Option<OffsetDateTime> {
    let since_1970 = Duration::checked_seconds_f64(seconds)?;
    let micros = i64::try_from(since_1970.whole_microseconds()).ok()?;
    OffsetDateTime::UNIX_EPOCH.checked_add(Duration::microseconds(micros))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-05-01 12:00 UTC);

    #[test]
    fn times_are_read_as_clients_write_them() {
        let half_past = datetime!(2026-05-01 11:30 UTC);
        for (json, time) in [
            (r#""2026-05-01T13:30:00.1234567+02:00""#, datetime!(2026-05-01 11:30:00.123456 UTC)),
            (r#""2026-05-01T11:30:00""#, half_past),
            (r#""2026-05-01 11:30:00.5""#, datetime!(2026-05-01 11:30:00.5 UTC)),
            (r#""2026-05-01 11:30:00Z""#, half_past),
            ("1777635000", half_past),
            ("1777635000000", half_past),
            ("1777635000.25", datetime!(2026-05-01 11:30:00.25 UTC)),
            (r#""2026-05-01T12:10:00Z""#, NOW),
            (r#""2027-01-01T00:00:00Z""#, NOW),
        ] {
            let message = format!(r#"{{"role":"user","created_at":{json}}}"#);
            let read = message_time(serde_json::from_str(&message).expect("JSON"), Some(NOW)).expect(json);
            assert_eq!((read, read.offset()), (time, UtcOffset::UTC), "{json}");
        }
    }

    #[test]
    fn other_values_are_no_times() {
        for (json, part) in [
            (r#""now""#, "RFC 3339"),
            (r#""2026-05-01""#, "RFC 3339"),
            (r#""1969-12-31T23:59:59Z""#, "1970"),
            (r#""1970-01-01T00:00:00+00:01""#, "1970"),
            (r#""9999-12-31T23:59:59-00:01""#, "9999"),
            ("-1", "1970"),
            ("1e300", "9999"),
            ("true", "RFC 3339"),
            ("[]", "RFC 3339"),
        ] {
            let error = given_time(&serde_json::from_str(json).expect("JSON")).expect_err(json);
            assert!(error.contains(part), "{json}: {error}");
            let message = format!(r#"{{"role":"user","created_at":{json}}}"#);
            assert_eq!(message_time(serde_json::from_str(&message).expect("JSON"), Some(NOW)), None);
        }
        assert_eq!(message_time(serde_json::from_str("[7]").expect("JSON"), Some(NOW)), None);
    }
}
