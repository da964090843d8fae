//! How single values are written: with messages that say what to write instead.

use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer};
use serde::{Deserialize as _, Serializer};
use std::net::SocketAddr;
use std::time::Duration;

/// An IP address and a port.
pub(super) fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        D::Error::custom(format!(
            "{text:?} is no address: write IP address and port, such as \"127.0.0.1:8080\""
        ))
    })
}

/// An enum, by way of a string: serde's own error lists the words, that of the `config` crate does not.
pub(super) fn word<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    let deserializer: serde::de::value::StringDeserializer<serde::de::value::Error> =
        text.into_deserializer();
    T::deserialize(deserializer)
        .map_err(|error| D::Error::custom(error.to_string().replace("unknown variant", "unknown value")))
}

/// [`word`] where the setting may be left out.
pub(super) fn optional_word<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    word(deserializer).map(Some)
}

/// What counts tokens, by its name.
pub(super) mod tokenizer {
    use super::{Deserializer, Serializer};
    use crate::domain::tokens::Tokenizer;
    use serde::Deserialize as _;
    use serde::de::Error as _;

    pub(in super::super) fn deserialize<'de, D>(deserializer: D) -> Result<Tokenizer, D::Error>
    where
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference to the field")]
    pub(in super::super) fn serialize<S>(tokenizer: &Tokenizer, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
    {
        serializer.collect_str(tokenizer)
    }
}

/// A duration with its unit: `"30s"`, `"10min"`. A bare number arrives here as text and is refused like any other
/// duration without a unit.
pub(super) mod duration {
    use super::{Deserializer, Duration, Serializer};
    use serde::Deserialize as _;
    use serde::de::Error as _;

    pub(in super::super) fn deserialize<'de, D>(deserializer: D) -> Result<Duration, D::Error>
    where
        D: Deserializer<'de>,
    {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text).map_err(|_| {
            D::Error::custom(format!(
                "{text:?} is no duration: write a number with its unit, such as \"30s\" or \"10min\""
            ))
        })
    }

    pub(in super::super) fn serialize<S>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
    {
        serializer.collect_str(&humantime::format_duration(*duration))
    }
}

/// [`duration`] where the setting may be left out.
pub(super) mod optional_duration {
    use super::{Deserializer, Duration, Serializer, duration};

    pub(in super::super) fn deserialize<'de, D>(deserializer: D) -> Result<Option<Duration>, D::Error>
    where
        D: Deserializer<'de>,
    {
        duration::deserialize(deserializer).map(Some)
    }

    #[expect(clippy::ref_option, reason = "serde hands over a reference to the field")]
    pub(in super::super) fn serialize<S>(
        duration: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
    {
        match duration {
            Some(duration) => duration::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }
}
