//! Values as both databases store them.

use super::StoreError;
use crate::domain::id::UserId;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgTypeInfo, PgValueRef};
use sqlx::sqlite::{SqliteArgumentsBuffer, SqliteTypeInfo, SqliteValueRef};
use sqlx::{Decode, Encode, Type};
use time::OffsetDateTime;

/// Converts the length of a slice.
pub(super) fn to_i64(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}

/// A time as both databases store it: `timestamptz` on Postgres, microseconds since 1970 on SQLite.
#[derive(Clone, Copy, Debug)]
pub(super) struct DbTime(pub(super) OffsetDateTime);

impl DbTime {
    pub(super) fn from_micros(micros: i64) -> Result<Self, sqlx::Error> {
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }

    pub(super) fn micros(self) -> i64 {
        i64::try_from(self.0.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX)
    }
}

impl Type<sqlx::Postgres> for DbTime {
    fn type_info() -> PgTypeInfo {
        <OffsetDateTime as Type<sqlx::Postgres>>::type_info()
    }

    fn compatible(info: &PgTypeInfo) -> bool {
        <OffsetDateTime as Type<sqlx::Postgres>>::compatible(info)
    }
}

impl Encode<'_, sqlx::Postgres> for DbTime {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Encode::<sqlx::Postgres>::encode_by_ref(&self.0, buffer)
    }
}

impl<'r> Decode<'r, sqlx::Postgres> for DbTime {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        <OffsetDateTime as Decode<sqlx::Postgres>>::decode(value).map(Self)
    }
}

impl Type<sqlx::Sqlite> for DbTime {
    fn type_info() -> SqliteTypeInfo {
        <i64 as Type<sqlx::Sqlite>>::type_info()
    }

    fn compatible(info: &SqliteTypeInfo) -> bool {
        <i64 as Type<sqlx::Sqlite>>::compatible(info)
    }
}

impl Encode<'_, sqlx::Sqlite> for DbTime {
    fn encode_by_ref(&self, buffer: &mut SqliteArgumentsBuffer) -> Result<IsNull, BoxDynError> {
        Encode::<sqlx::Sqlite>::encode_by_ref(&self.micros(), buffer)
    }
}

impl<'r> Decode<'r, sqlx::Sqlite> for DbTime {
    fn decode(value: SqliteValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(Self::from_micros(<i64 as Decode<sqlx::Sqlite>>::decode(value)?)?)
    }
}

/// Decodes the column `user_id` of a session. It is empty if the session has no user.
pub(super) fn user_from_column(user: String) -> Result<Option<UserId>, StoreError> {
    if user.is_empty() {
        return Ok(None);
    }
    UserId::new(user).map(Some).map_err(StoreError::corrupt("a user id"))
}

/// Returns the column `user_id` of a session.
pub(super) fn user_column(user: Option<&UserId>) -> &str {
    user.map_or("", UserId::as_str)
}
