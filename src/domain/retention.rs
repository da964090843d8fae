//! Retention: sessions are erased a while after their last exchange.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use time::OffsetDateTime;
use utoipa::ToSchema;

const SECONDS_PER_HOUR: i64 = 3600;

/// The time from the last exchange of a session to its erasure: `"90d"`, `"12h"`, or `"never"`, which keeps the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RetentionPeriod {
    Never,
    /// A whole number of seconds, at least 1.
    Seconds(i64),
}

impl RetentionPeriod {
    /// Short enough to be added to any time.
    const MAX: Duration = Duration::from_hours(24 * 36_500);

    /// Returns the period that the store represents by a number of seconds, where 0 is [`Self::Never`].
    #[must_use]
    pub fn from_seconds(seconds: i64) -> Self {
        if seconds > 0 { Self::Seconds(seconds) } else { Self::Never }
    }

    #[must_use]
    pub fn seconds(self) -> i64 {
        match self {
            Self::Never => 0,
            Self::Seconds(seconds) => seconds,
        }
    }

    /// Returns the end of the period that begins at `start`; `None` if it never ends.
    #[must_use]
    pub fn end(self, start: OffsetDateTime) -> Option<OffsetDateTime> {
        match self {
            Self::Never => None,
            Self::Seconds(seconds) => start.checked_add(time::Duration::seconds(seconds)),
        }
    }

    /// Returns the last hour since 1970 in which a period can have begun that has ended `now`; `None` if it never ends.
    #[must_use]
    pub fn last_expired_hour(self, now: OffsetDateTime) -> Option<i64> {
        match self {
            Self::Never => None,
            Self::Seconds(seconds) => Some(hour(now) - seconds / SECONDS_PER_HOUR),
        }
    }
}

/// Returns the hour since 1970.
#[must_use]
pub fn hour(time: OffsetDateTime) -> i64 {
    time.unix_timestamp().div_euclid(SECONDS_PER_HOUR)
}

impl FromStr for RetentionPeriod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self::Never);
        }
        let Ok(duration) = humantime::parse_duration(text) else {
            return Err("must be a number with its unit, such as \"90d\" or \"12h\", or \"never\"".to_owned());
        };
        if duration.is_zero() || duration.subsec_nanos() > 0 {
            return Err("must be a whole number of seconds, at least 1; \"never\" keeps sessions".to_owned());
        }
        if duration > Self::MAX {
            return Err("must be at most 36500d; \"never\" keeps sessions".to_owned());
        }
        i64::try_from(duration.as_secs()).map(Self::Seconds).map_err(|error| error.to_string())
    }
}

impl TryFrom<String> for RetentionPeriod {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RetentionPeriod> for String {
    fn from(period: RetentionPeriod) -> Self {
        period.to_string()
    }
}

impl fmt::Display for RetentionPeriod {
    /// Writes the period in the largest unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Never => f.write_str("never"),
            Self::Seconds(seconds) => {
                let units = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")];
                let (size, unit) =
                    units.into_iter().find(|(size, _)| seconds % size == 0).unwrap_or((1, "s"));
                write!(f, "{}{unit}", seconds / size)
            }
        }
    }
}

/// The part of the configuration that a period comes from; the most specific one that has a period wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetentionSource {
    Session,
    User,
    Tenant,
    /// The setting `retention.after_last_exchange`.
    Setting,
}

/// The periods that apply to a session, a user or a tenant. `None` if there is none of that kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionPeriods {
    pub session: Option<RetentionPeriod>,
    pub user: Option<RetentionPeriod>,
    pub tenant: Option<RetentionPeriod>,
}

impl RetentionPeriods {
    /// Returns the most specific period with its source.
    #[must_use]
    pub fn effective(&self, setting: Option<RetentionPeriod>) -> (RetentionPeriod, RetentionSource) {
        let periods = [
            (self.session, RetentionSource::Session),
            (self.user, RetentionSource::User),
            (self.tenant, RetentionSource::Tenant),
        ];
        let specific = periods.into_iter().find_map(|(period, source)| Some((period?, source)));
        specific.unwrap_or((setting.unwrap_or(RetentionPeriod::Never), RetentionSource::Setting))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn periods_are_read_and_written_in_their_largest_unit() {
        for (text, seconds, written) in [
            ("90d", 90 * 86_400, "90d"),
            ("36h", 36 * 3600, "36h"),
            ("48 hours", 48 * 3600, "2d"),
            ("90s", 90, "90s"),
            ("1h 30m", 90 * 60, "90m"),
            ("never", 0, "never"),
        ] {
            let period: RetentionPeriod = text.parse().expect(text);
            assert_eq!((period.seconds(), period.to_string()), (seconds, written.to_owned()), "{text}");
            assert_eq!(RetentionPeriod::from_seconds(seconds), period);
        }
    }

    #[test]
    fn periods_of_no_or_endless_length_are_rejected() {
        for text in ["", "0s", "90", "d", "-1d", "1500ms", "36501d", "99999999999999y", "Never"] {
            text.parse::<RetentionPeriod>().expect_err(text);
        }
        assert!("36500d".parse::<RetentionPeriod>().is_ok());
    }

    #[test]
    fn most_specific_period_wins() {
        let [session, user, tenant, setting] = [1, 2, 3, 4].map(|n| Some(RetentionPeriod::Seconds(n)));
        let all = RetentionPeriods { session, user, tenant };
        let source = |periods: RetentionPeriods, setting| periods.effective(setting);
        assert_eq!(source(all, setting), (RetentionPeriod::Seconds(1), RetentionSource::Session));
        let all = RetentionPeriods { session: None, ..all };
        assert_eq!(source(all, setting), (RetentionPeriod::Seconds(2), RetentionSource::User));
        let never = RetentionPeriods { user: Some(RetentionPeriod::Never), ..all };
        assert_eq!(source(never, setting), (RetentionPeriod::Never, RetentionSource::User));
        let all = RetentionPeriods { user: None, ..all };
        assert_eq!(source(all, setting), (RetentionPeriod::Seconds(3), RetentionSource::Tenant));
        let none = RetentionPeriods::default();
        assert_eq!(source(none, setting), (RetentionPeriod::Seconds(4), RetentionSource::Setting));
        assert_eq!(source(none, None), (RetentionPeriod::Never, RetentionSource::Setting));
    }

    #[test]
    fn candidates_include_every_session_that_has_expired() {
        let now = datetime!(2026-05-01 12:30 UTC);
        for seconds in [1, 1800, 3599, 3600, 3601, 86_400] {
            let period = RetentionPeriod::Seconds(seconds);
            let expired = now - time::Duration::seconds(seconds);
            assert!(hour(expired) <= period.last_expired_hour(now).expect("it ends"), "{seconds}");
            assert_eq!(period.end(expired), Some(now));
        }
        assert_eq!(RetentionPeriod::Never.last_expired_hour(now), None);
    }
}
