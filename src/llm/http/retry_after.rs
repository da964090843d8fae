//! How long a server wants to be left alone: `Retry-After` in seconds or as a date, and the finer `retry-after-ms`
//! that some send beside it.

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use std::time::{Duration, SystemTime};

/// The wait that the headers ask for; `None` where they don't, or not in a form that is known.
pub(super) fn read(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if let Some(milliseconds) = text("retry-after-ms").and_then(positive) {
        return Duration::try_from_secs_f64(milliseconds / 1000.0).ok();
    }
    let value = text(RETRY_AFTER.as_str())?;
    if let Some(seconds) = positive(value) {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // By the server's own clock, where it tells the time: it is its clock that the date was made with.
    let now = text(DATE.as_str()).and_then(|now| httpdate::parse_http_date(now).ok());
    Some(date.duration_since(now.unwrap_or_else(SystemTime::now)).unwrap_or_default())
}

fn positive(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(headers: &[(&'static str, &str)]) -> Option<Duration> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().expect("a valid value"));
        }
        read(&map)
    }

    #[test]
    fn every_form_is_read() {
        let now = ("date", "Sat, 21 Nov 2026 10:00:00 GMT");
        for (headers, seconds) in [
            (&[("retry-after", "7")][..], Some(7.0)),
            (&[("retry-after", " 0 ")], Some(0.0)),
            (&[("retry-after", "1.5")], Some(1.5)),
            (&[("retry-after", "9"), ("retry-after-ms", "250")], Some(0.25)),
            (&[now, ("retry-after", "Sat, 21 Nov 2026 10:00:30 GMT")], Some(30.0)),
            (&[now, ("retry-after", "Saturday, 21-Nov-26 10:00:30 GMT")], Some(30.0)),
            (&[now, ("retry-after", "Sat, 21 Nov 2026 09:00:00 GMT")], Some(0.0)),
            (&[], None),
            (&[("retry-after", "-1")], None),
            (&[("retry-after", "soon")], None),
            (&[("retry-after", "NaN")], None),
            (&[("retry-after", "1e300")], None),
        ] {
            assert_eq!(wait(headers), seconds.map(Duration::from_secs_f64), "{headers:?}");
        }
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_mins(10));
        let without_date = wait(&[("retry-after", &later)]).expect("a wait");
        assert!((Duration::from_mins(9)..=Duration::from_mins(10)).contains(&without_date));
    }
}
