//! Arguments that several commands have.

use crate::config::{Flag, Loaded, Settings, Sources};
use crate::domain::id::{SessionId, TenantId};
use crate::telemetry;
use clap::Args;
use opentelemetry_sdk::trace::SdkTracer;
use std::error::Error;
use std::path::PathBuf;

/// The flags that select and override settings.
#[derive(Args)]
pub(super) struct SettingsArgs {
    /// Settings file; default: precis.toml in the working directory, if it exists
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on (server.bind)
    #[arg(long, global = true, value_name = "ADDRESS:PORT")]
    bind: Option<String>,
    /// Database to use (database.url). Prefer the environment variable `DATABASE_URL` for a URL with a password:
    /// other users of the machine can see the arguments of a process
    #[arg(long, global = true, value_name = "URL")]
    database_url: Option<String>,
    /// Log level or filter (log.filter), for example debug
    #[arg(long, global = true, value_name = "FILTER")]
    log_filter: Option<String>,
}

/// The arguments that name a session.
#[derive(Args)]
pub(super) struct SessionArgs {
    /// Session ID
    session: String,
    /// Tenant of the session
    #[arg(long, default_value = "default")]
    tenant: String,
}

impl SettingsArgs {
    pub(super) fn load(self) -> Result<Loaded, Box<dyn Error>> {
        let flags = [
            ("server.bind", self.bind, "--bind"),
            ("database.url", self.database_url, "--database-url"),
            ("log.filter", self.log_filter, "--log-filter"),
        ];
        let flags =
            flags.into_iter().filter_map(|(path, value, name)| Some(Flag { path, value: value?, name }));
        Ok(Settings::load(&Sources::of_process(self.config, flags.collect()))?)
    }

    /// Loads the settings and starts the log.
    pub(super) fn load_and_log(self) -> Result<Settings, Box<dyn Error>> {
        self.load_and_trace(None)
    }

    /// Starts logging, and with a tracer the export of spans.
    pub(super) fn load_and_trace(self, tracer: Option<SdkTracer>) -> Result<Settings, Box<dyn Error>> {
        let Loaded { settings, warnings, .. } = self.load()?;
        telemetry::init_logging(&settings.log, tracer)?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        Ok(settings)
    }
}

impl SessionArgs {
    pub(super) fn parse(self) -> Result<(TenantId, SessionId), String> {
        let tenant = TenantId::new(self.tenant).map_err(|error| format!("--tenant {error}"))?;
        let session = SessionId::new(self.session).map_err(|error| format!("the session ID {error}"))?;
        Ok((tenant, session))
    }
}
