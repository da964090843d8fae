//! API keys: their format and their scopes.
//!
//! A key is `precis_` followed by lower-case base 32: 8 characters for the public id, 40 for the secret (200 bits), and 7
//! for the CRC-32 of everything before. The prefix lets scanners find leaked keys (`precis_[0-9a-v]{55}`), and the checksum
//! detects mistyped keys without a database query.

use super::id::{KeyName, TenantId};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::fmt;
use subtle::ConstantTimeEq as _;
use time::OffsetDateTime;

/// The prefix of every key.
pub const PREFIX: &str = "precis_";
/// The number of random bytes in a key: 5 for its id, 25 for its secret.
pub const RANDOM_BYTES: usize = 30;

const ID: usize = 8;
const SECRET: usize = 40;
const CHECKSUM: u32 = 7;
/// Each digit has 5 bits.
const BASE: u32 = 32;
/// Up to this many digits after the prefix are not redacted: a UUID has as many, and they leave 80 bits of a key unknown.
const MIN_REDACTED_LEN: usize = 32;

/// The text does not have the format of a key, or its checksum is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an API key: incomplete or mistyped")]
pub struct InvalidKey;

/// A complete key. Only [`ApiKey::expose`] returns its text; `Debug` shows the id.
#[derive(Clone)]
pub struct ApiKey {
    text: SecretString,
    id: KeyId,
}

impl ApiKey {
    /// Creates the key of these random bytes.
    pub fn new(random: &[u8; RANDOM_BYTES]) -> Self {
        let digits: String = random.chunks(5).flat_map(|five| digits(number(five), 8)).collect();
        let id = KeyId(digits.chars().take(ID).collect());
        let body = format!("{PREFIX}{digits}");
        let text = format!("{body}{}", checksum(&body));
        Self { text: text.into(), id }
    }

    /// Parses a key. The key may not exist.
    pub fn parse(text: &str) -> Result<Self, InvalidKey> {
        let (body, sum) = text.split_at_checked(PREFIX.len() + ID + SECRET).ok_or(InvalidKey)?;
        let digits = body.strip_prefix(PREFIX).ok_or(InvalidKey)?;
        if !is_base32(digits) || checksum(body) != sum {
            return Err(InvalidKey);
        }
        Ok(Self { text: text.into(), id: KeyId(digits.chars().take(ID).collect()) })
    }

    /// Returns the public part of the key.
    pub fn id(&self) -> &KeyId {
        &self.id
    }

    /// Returns the text of the key, for its holder.
    pub fn expose(&self) -> &str {
        self.text.expose_secret()
    }

    /// Returns the hash that is stored. The secret is random, so a salt or a slow hash would add nothing.
    pub fn hash(&self) -> KeyHash {
        KeyHash(Sha256::digest(self.expose()).into())
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKey({})", self.id)
    }
}

/// The public id of a key, which is part of the key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(String);

impl KeyId {
    /// Parses an id. The error does not repeat the text, which may be a key.
    pub fn parse(text: &str) -> Result<Self, InvalidKey> {
        let is_valid = text.len() == ID && is_base32(text);
        is_valid.then(|| Self(text.to_owned())).ok_or(InvalidKey)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The SHA-256 of a key. [`KeyHash::matches`] compares two of them in constant time.
#[derive(Clone)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Reads a stored hash. Returns `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns `true` if the hashes are equal, in constant time.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

/// The permissions of a key. Each scope includes the scopes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Read all data of the tenant.
    Read,
    /// The operations of an agent: exchanges, contexts, memory, metadata, consolidations, imports.
    Write,
    /// Erasure, restores and edits of summaries, and metrics.
    Admin,
}

named_variants!(Scope { Read = "read", Write = "write", Admin = "admin" });

impl Scope {
    /// Returns `true` if a key of this scope suffices for the required scope.
    pub fn covers(self, needed: Self) -> bool {
        self >= needed
    }
}

/// The stored data of a key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    pub id: KeyId,
    pub tenant: TenantId,
    /// A description by its owner.
    pub name: Option<KeyName>,
    pub scope: Scope,
    pub created_at: OffsetDateTime,
    /// Time from which on the key is rejected.
    pub revoked_at: Option<OffsetDateTime>,
}

/// Redacts the secrets of all keys, and of large parts of keys, in a text, regardless of case. The ids of the keys stay.
pub fn redact_keys(text: &str) -> Cow<'_, str> {
    let lower = text.to_ascii_lowercase();
    let (mut shown, mut done) = (String::new(), 0);
    for (begin, prefix) in lower.match_indices(PREFIX) {
        let secret = begin + prefix.len();
        let rest = lower.get(secret..).unwrap_or_default();
        let digits = rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
        if digits > MIN_REDACTED_LEN {
            shown.extend([text.get(done..secret + ID).unwrap_or_default(), "…"]);
            done = secret + digits;
        }
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    shown.push_str(text.get(done..).unwrap_or_default());
    Cow::Owned(shown)
}

fn is_base32(text: &str) -> bool {
    text.chars().all(is_digit)
}

fn is_digit(c: char) -> bool {
    matches!(c, '0'..='9' | 'a'..='v')
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Returns the lowest `count` digits of the number, the highest first.
fn digits(number: u64, count: u32) -> impl Iterator<Item = char> {
    let digit = move |place: u32| u32::try_from(number >> (5 * place) & u64::from(BASE - 1)).ok();
    (0..count).rev().filter_map(move |place| char::from_digit(digit(place)?, BASE))
}

fn checksum(body: &str) -> String {
    digits(crc32fast::hash(body.as_bytes()).into(), CHECKSUM).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The format must never change: keys outlive versions.
    const KEY: &str = "precis_000g40o40k30e209185go38e1s8124gj2gahc5oo34d1m70t19vue2a";

    fn counted() -> [u8; RANDOM_BYTES] {
        std::array::from_fn(|index| u8::try_from(index).expect("small"))
    }

    #[test]
    fn key_format_is_stable() {
        let key = ApiKey::new(&counted());
        assert_eq!(key.expose(), KEY);
        assert_eq!(key.id().as_str(), &KEY[7..15]);
        assert_eq!(KEY.len(), 62);
    }

    proptest! {
        #[test]
        fn created_key_parses_to_itself(random: [u8; RANDOM_BYTES]) {
            let key = ApiKey::new(&random);
            let read = ApiKey::parse(key.expose()).expect("a key");
            prop_assert_eq!(read.expose(), key.expose());
            prop_assert_eq!(read.id(), key.id());
            prop_assert!(read.hash().matches(&key.hash()));
            prop_assert_eq!(&KeyId::parse(key.id().as_str()).expect("an id"), key.id());
            let shown = format!("{key:?} {:?}", key.hash());
            prop_assert!(!shown.contains(&key.expose()[15..]));
        }

        #[test]
        fn key_with_a_changed_character_is_rejected(random: [u8; RANDOM_BYTES], at in 0..62_usize, by in "[0-9a-zA-Z_é -]") {
            let key = ApiKey::new(&random).expose().to_owned();
            let (before, rest) = key.split_at(at);
            let wrong = format!("{before}{by}{}", &rest[1..]);
            prop_assert_eq!(ApiKey::parse(&wrong).is_ok(), wrong == key);
            let characters: Vec<char> = key.chars().collect();
            if let Some(&[one, two]) = characters.get(at..at + 2) && one != two {
                let swapped = format!("{}{two}{one}{}", &key[..at], &key[at + 2..]);
                prop_assert!(ApiKey::parse(&swapped).is_err());
            }
        }

        #[test]
        fn arbitrary_text_is_rejected(text in "\\PC{0,70}") {
            prop_assert!(ApiKey::parse(&text).is_err());
            let prefixed = format!("{PREFIX}{text}");
            prop_assert!(ApiKey::parse(&prefixed).is_err());
        }
    }

    #[test]
    fn part_of_a_key_is_rejected() {
        for wrong in ["", "precis_", &KEY[7..], &KEY[..61], &format!("{KEY}0"), &KEY.to_uppercase()] {
            assert_eq!(ApiKey::parse(wrong).err(), Some(InvalidKey), "{wrong}");
        }
        for wrong in ["", "precis_0", "000G40o4", "000g40o", "000g40o40", "000g40é", KEY] {
            assert_eq!(KeyId::parse(wrong), Err(InvalidKey), "{wrong}");
        }
    }

    #[test]
    fn redact_keys_removes_secrets_and_keeps_ids() {
        let id = &KEY[..15];
        for (text, shown) in [
            (format!("/sessions/{KEY}/context"), format!("/sessions/{id}…/context")),
            (format!("{KEY} é {KEY}"), format!("{id}… é {id}…")),
            (format!("precis_{KEY}"), format!("precis_{id}…")),
            (KEY.to_uppercase(), format!("{}…", id.to_uppercase())),
            // Mistyped, truncated, or followed by more digits.
            (format!("{KEY}00"), format!("{id}…")),
            (KEY[..45].to_owned(), format!("{id}…")),
        ] {
            assert_eq!(redact_keys(&text), shown);
        }
        for harmless in
            ["", "precis_", "/sessions/precis_demo", "precis_é", "precis_0123456789abcdef0123456789abcdef"]
        {
            assert_eq!(redact_keys(harmless), harmless);
        }
    }

    #[test]
    fn hash_matches_only_the_same_key() {
        let (key, mut other) = (ApiKey::new(&counted()), counted());
        other[29] ^= 1;
        assert!(!key.hash().matches(&ApiKey::new(&other).hash()));
        assert!(KeyHash::from_bytes(key.hash().as_bytes()).expect("a hash").matches(&key.hash()));
        assert!(KeyHash::from_bytes(&[0; 31]).is_none() && KeyHash::from_bytes(&[]).is_none());
    }

    #[test]
    fn scope_covers_itself_and_lower_scopes() {
        for (index, scope) in Scope::ALL.into_iter().enumerate() {
            assert_eq!(Scope::parse(scope.as_str()), Some(scope));
            let covered = Scope::ALL.into_iter().filter(|needed| scope.covers(*needed)).count();
            assert_eq!(covered, index + 1);
        }
        assert_eq!(Scope::parse("Admin"), None);
    }
}
