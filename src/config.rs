//! The settings of precis and how they are loaded.
//!
//! A new setting needs a line in [`settings`] (name, type, default) and a line in `precis.example.toml`. Ranges and
//! rules that combine settings are in `validate`. The modules depend on each other in this order:
//! `error <- secret, settings <- schema <- environment, validate <- load`.

mod environment;
mod error;
mod load;
mod schema;
mod secret;
mod settings;
#[cfg(test)]
mod tests;
mod validate;

pub use error::{ConfigError, SettingError};
pub use load::{Flag, Loaded, Sources};
pub use secret::{DatabaseUrl, Secret, SecretSource};
pub use settings::{
    Consolidation, Database, EXTRACTIVE, Limits, Llm, Log, LogFormat, Memory, Model, OnFailure,
    OnUnavailable, OutputLimitField, Pool, Prompts, Provider, ProviderKind, Proxy, Search, Server, Settings,
    Strategy, Tokens, Upstream,
};
