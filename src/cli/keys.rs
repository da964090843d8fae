//! `precis keys`: creates, lists and revokes API keys.
//!
//! Standard output contains only the result, so that it can be piped. Explanations go to standard error.

use super::output::{error, error_with_cause, print};
use crate::app::open_store;
use crate::config::{DatabaseUrl, Settings};
use crate::domain::api_key::{ApiKey, KeyId, KeyRecord, Scope};
use crate::domain::id::{KeyName, TenantId};
use crate::domain::invisible::is_invisible;
use crate::service::keys::create_key;
use crate::storage::{self, Store};
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::error::Error;
use time::OffsetDateTime;
use time::macros::format_description;

const EXAMPLES: &str = "\
Examples:
  precis keys create --tenant acme > key        for an agent, which reads and writes
  precis keys create --tenant acme --name prometheus --scope admin";

#[derive(Subcommand)]
pub(super) enum KeysCommand {
    /// Create a key and print it once; only its hash is stored
    #[command(after_help = EXAMPLES)]
    Create {
        /// Tenant whose data the key opens
        #[arg(long, value_parser = tenant)]
        tenant: TenantId,
        /// Name of the key in the list
        #[arg(long, value_parser = |text: &str| KeyName::new(text))]
        name: Option<KeyName>,
        /// read: all GET requests; write: also everything an agent does; admin: also erasure, restore, edits of summaries and metrics
        #[arg(long, default_value = "write", value_parser = scopes())]
        scope: Scope,
    },
    /// List all keys, including revoked ones; the secret parts are never shown
    List {
        /// List only the keys of this tenant
        #[arg(long, value_parser = |text: &str| TenantId::new(text))]
        tenant: Option<TenantId>,
    },
    /// Revoke a key; every service that uses the database rejects it within seconds
    Revoke {
        /// ID of the key, as shown by `precis keys list`
        id: String,
    },
}

/// Reads the tenant of a new key. In lists and logs, ` acme` and `acme` would look like the same tenant, and so would names
/// with invisible characters.
fn tenant(text: &str) -> Result<TenantId, String> {
    if text.trim() != text {
        return Err("must not begin or end with white space".to_owned());
    }
    if let Some(invisible) = text.chars().find(|c| is_invisible(*c)) {
        return Err(format!("must not contain the invisible character U+{:04X}", u32::from(invisible)));
    }
    TenantId::new(text).map_err(|error| error.to_string())
}

fn scopes() -> impl TypedValueParser<Value = Scope> {
    let names = PossibleValuesParser::new(Scope::ALL.map(Scope::as_str));
    names.try_map(|name| Scope::parse(&name).ok_or("unknown scope"))
}

pub(super) async fn run(
    settings: &Settings,
    command: KeysCommand,
    migrate: bool,
) -> Result<(), Box<dyn Error>> {
    let database = &settings.database.url;
    let new_file = storage::missing_file(database.expose());
    let store = open_store(settings, migrate).await?;
    if let Some(file) = new_file {
        eprintln!(
            "Created the database {}, which is empty. If the service uses another one, name that with --database-url.",
            file.display()
        );
    }
    match command {
        KeysCommand::Create { tenant, name, scope } => {
            create(&store, &tenant, name.as_ref(), scope, database).await?;
        }
        KeysCommand::List { tenant } => print(&format_table(&store.api_keys(tenant.as_ref()).await?))?,
        KeysCommand::Revoke { id } => revoke(&store, &id, database).await?,
    }
    store.close().await;
    Ok(())
}

async fn create(
    store: &Store,
    tenant: &TenantId,
    name: Option<&KeyName>,
    scope: Scope,
    database: &DatabaseUrl,
) -> Result<(), Box<dyn Error>> {
    let is_first = !store.any_api_key().await?;
    let created = create_key(store, tenant, name, scope).await;
    let key = created.map_err(|cause| error_with_cause("no key was created", cause))?;
    let id = key.id();
    eprintln!(
        "Key {id} of tenant {tenant}, scope {scope}, in {database}. It is shown this once; only its hash is stored. \
         Send it as `Authorization: Bearer …`. `precis keys revoke {id}` revokes it."
    );
    if is_first {
        eprintln!(
            "This is the first key: within seconds every request to the services that use this database needs a key. \
             Data stored without a key belongs to the tenant `default`."
        );
    }
    print(&format!("{}\n", key.expose()))
}

/// Revokes a key by its ID. Also accepts the whole key, because that is what users have if a key leaks.
async fn revoke(store: &Store, id_or_key: &str, database: &DatabaseUrl) -> Result<(), Box<dyn Error>> {
    // The error does not repeat the argument: it may be a key with a typing error.
    let id = KeyId::parse(id_or_key)
        .or_else(|_| ApiKey::parse(id_or_key).map(|key| key.id().clone()))
        .map_err(|_| {
            error("this is not the ID of a key, which has 8 characters; `precis keys list` shows all IDs")
        })?;
    if !store.revoke_api_key(&id).await? {
        return Err(error(format!("there is no key {id} in {database}; `precis keys list` shows all keys")));
    }
    eprintln!("Key {id} is revoked: services reject it within seconds.");
    Ok(())
}

fn format_table(keys: &[KeyRecord]) -> String {
    const COLUMNS: [&str; 6] = ["ID", "TENANT", "NAME", "SCOPE", "CREATED", "REVOKED"];
    let rows: Vec<[String; 6]> =
        [COLUMNS.map(str::to_owned)].into_iter().chain(keys.iter().map(format_row)).collect();
    let mut widths = [0; 6];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    });
    lines.collect()
}

fn format_row(key: &KeyRecord) -> [String; 6] {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
    let time =
        |time: OffsetDateTime| time.to_offset(time::UtcOffset::UTC).format(&format).unwrap_or_default();
    [
        key.id.to_string(),
        key.tenant.to_string(),
        key.name.as_ref().map_or("-".to_owned(), ToString::to_string),
        key.scope.to_string(),
        time(key.created_at),
        key.revoked_at.map_or("-".to_owned(), time),
    ]
}
