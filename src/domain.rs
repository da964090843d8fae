//! Domain types and rules: plain functions over plain data, without I/O, clock or randomness.
//!
//! | rule | module |
//! | --- | --- |
//! | when consolidation is due, and when it is retried | [`consolidation`] |
//! | where a conversation can be split | [`split_points`] |
//! | how a transcript is divided among model calls | [`batching`] |
//! | what a summariser reads | [`transcript`] |
//! | the parts of the system message | [`context`] |
//! | reserved headings and their escaping | [`headings`] |
//! | skills in the system message | [`skill`] |
//! | which messages a context contains | [`coverage`] |
//! | what fits into a token budget | [`budget`] |
//! | how messages are rendered for a provider | [`format`](mod@format) |
//! | how search finds and ranks messages | [`search`] |
//! | the tools of the agent | [`tool`] |
//! | the export format of a session | [`export_format`] |
//! | the times that clients give | [`given_time`] |
//! | when two messages of a client's list and the history are the same | [`sync`] |
//! | size limits of stored values | [`limits`] |

/// Implements the names of the variants of an enum.
macro_rules! named_variants {
    ($type:ident { $($variant:ident = $name:literal),+ }) => {
        impl $type {
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|variant| variant.as_str() == name)
            }
        }

        /// For deserialization: a derived implementation would also accept an object such as `{"name": null}`.
        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(name: String) -> Result<Self, String> {
                Self::parse(&name).ok_or_else(|| format!("unknown value `{name}`, expected one of {}", [$($name),+].join(", ")))
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

pub mod api_key;
pub mod batching;
pub mod budget;
pub mod consolidation;
pub mod consolidation_record;
pub mod context;
pub mod coverage;
pub mod error_chain;
pub mod exchange;
pub mod export_format;
pub mod format;
pub mod given_time;
pub mod headings;
pub mod id;
pub mod invisible;
pub(crate) mod json;
pub(crate) mod json_validation;
pub mod limits;
pub mod memory;
pub mod message;
pub mod message_metadata;
pub mod recall;
pub mod recall_block;
pub mod reconcile;
pub mod redaction;
pub mod retention;
pub mod revision;
pub mod search;
pub mod sentence_bounds;
pub mod session;
pub mod shorten;
pub mod skill;
pub mod split_points;
pub mod summary;
pub mod summary_sources;
pub mod sync;
pub mod tail;
pub mod tokens;
pub mod tool;
pub mod transcript;
pub mod validation;
