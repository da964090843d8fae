//! The command line: settings, and what to do with them.
#![expect(clippy::print_stdout, reason = "what a command prints is its result")]

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use precis::app::keys::KeysError;
use precis::app::{self, App, reindex, transfer};
use precis::config::{Flag, Loaded, Settings, Sources};
use precis::domain::api_key::Scope;
use precis::domain::error_chain::ErrorChain;
use precis::domain::id::{KeyName, SessionId, TenantId, UserId};
use precis::{http, telemetry};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A memory for LLM agents that fits their context window.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    serve: ServeArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Where settings come from, beside the environment.
#[derive(Args)]
struct SettingsArgs {
    /// Settings file; precis.toml in the working directory, if it is there, where this is left out
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on (server.bind)
    #[arg(long, global = true, value_name = "ADDRESS:PORT")]
    bind: Option<String>,
    /// Database to use (database.url). A password in it shows in the list of processes; in the environment variable
    /// `DATABASE_URL` it does not
    #[arg(long, global = true, value_name = "URL")]
    database_url: Option<String>,
    /// What is logged (log.filter), for example debug
    #[arg(long, global = true, value_name = "FILTER")]
    log_filter: Option<String>,
}

#[derive(Args)]
struct ServeArgs {
    /// Leave the schema as it is; bring it up to date with `precis migrate`
    #[arg(long)]
    no_migrate: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Run the service; what happens without a command too
    Serve(ServeArgs),
    /// Bring the schema of the database up to date
    Migrate,
    /// Write a session to a file, or to standard output: its messages and its revisions, as JSON lines
    Export(ExportArgs),
    /// Make a session of an export, or of JSON lines with role and content; all of it or nothing
    Import(ImportArgs),
    /// Index messages for search: those from before there was an index, and all of them when search.language has changed
    Reindex,
    /// Print the settings in force, with where each comes from
    Config,
    /// Print the OpenAPI document
    Openapi,
    /// About the models of the settings
    #[command(subcommand)]
    Llm(LlmCommand),
    /// The API keys of the database: who may do what
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Ask the service at server.bind whether it is ready: exit status 0 or 1
    Health,
}

#[derive(Subcommand)]
enum LlmCommand {
    /// Ask every model one short question: exit status 0 if each pool has a model that works, else 1
    Check,
}

#[derive(Subcommand)]
enum KeysCommand {
    /// Make a key and print it: once, for only its hash is stored
    Create {
        /// Whose data the key opens
        #[arg(long, value_parser = |text: &str| TenantId::new(text))]
        tenant: TenantId,
        /// What the list calls it
        #[arg(long, value_parser = |text: &str| KeyName::new(text))]
        name: Option<KeyName>,
        /// read: look at everything; write: what an agent does, too; admin: erasure, restore and metrics, too
        #[arg(long, default_value = "write", value_parser = scopes())]
        scope: Scope,
    },
    /// List the keys, revoked ones too; never the keys themselves
    List {
        /// Only those of this tenant
        #[arg(long, value_parser = |text: &str| TenantId::new(text))]
        tenant: Option<TenantId>,
    },
    /// Revoke a key: every service over the database refuses it within seconds
    Revoke {
        /// Its id, as `precis keys list` shows it
        id: String,
    },
}

fn scopes() -> impl TypedValueParser<Value = Scope> {
    let names = PossibleValuesParser::new(Scope::ALL.map(Scope::as_str));
    names.try_map(|name| Scope::parse(&name).ok_or("no such scope"))
}

/// Which session.
#[derive(Args)]
struct SessionArgs {
    /// The session
    session: String,
    /// The tenant whose session it is
    #[arg(long, default_value = "default")]
    tenant: String,
}

#[derive(Args)]
struct ExportArgs {
    #[command(flatten)]
    of: SessionArgs,
    /// File to write; it is there only when the export is whole
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct ImportArgs {
    #[command(flatten)]
    into: SessionArgs,
    /// File to read; standard input where it is left out
    file: Option<PathBuf>,
    /// Whose session it becomes; the export's own user where this is left out
    #[arg(long)]
    user: Option<String>,
}

impl SettingsArgs {
    fn load(self) -> Result<Loaded, Box<dyn Error>> {
        let flags = [
            ("server.bind", self.bind, "--bind"),
            ("database.url", self.database_url, "--database-url"),
            ("log.filter", self.log_filter, "--log-filter"),
        ];
        let flags =
            flags.into_iter().filter_map(|(path, value, name)| Some(Flag { path, value: value?, name }));
        Ok(Settings::load(&Sources::of_process(self.config, flags.collect()))?)
    }
}

impl SessionArgs {
    fn ids(self) -> Result<(TenantId, SessionId), String> {
        let tenant = TenantId::new(self.tenant).map_err(|error| format!("--tenant {error}"))?;
        let session = SessionId::new(self.session).map_err(|error| format!("the session's id {error}"))?;
        Ok((tenant, session))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = tokio::runtime::Runtime::new().map_err(Into::into).and_then(|runtime| {
        let ended = runtime.block_on(run(cli));
        // The look-up of a model's host name has a thread of its own that nobody can stop: it must not hold the end.
        runtime.shutdown_background();
        ended
    });
    ended.unwrap_or_else(|error| {
        eprintln!("precis: {}", ErrorChain(error.as_ref()));
        ExitCode::FAILURE
    })
}

async fn run(cli: Cli) -> Result<ExitCode, Box<dyn Error>> {
    match cli.command {
        None => serve(&cli.settings.load()?.settings, &cli.serve).await?,
        Some(Command::Serve(args)) => {
            // The flag may stand before the command as well as after it.
            let args = ServeArgs { no_migrate: cli.serve.no_migrate || args.no_migrate };
            serve(&cli.settings.load()?.settings, &args).await?;
        }
        Some(Command::Migrate) => {
            let settings = cli.settings.load()?.settings;
            telemetry::start(&settings.log)?;
            app::store(&settings, true).await?.close().await;
        }
        Some(Command::Export(args)) => {
            let (tenant, session) = args.of.ids()?;
            let settings = cli.settings.load()?.settings;
            telemetry::start(&settings.log)?;
            transfer::export(&settings, &tenant, &session, args.output.as_deref()).await?;
        }
        Some(Command::Import(args)) => {
            let (tenant, session) = args.into.ids()?;
            let user = args.user.map(UserId::new).transpose().map_err(|error| format!("--user {error}"))?;
            let settings = cli.settings.load()?.settings;
            telemetry::start(&settings.log)?;
            let done = transfer::import(&settings, &tenant, &session, user, args.file.as_deref()).await?;
            println!("{done}");
        }
        Some(Command::Reindex) => {
            let settings = cli.settings.load()?.settings;
            telemetry::start(&settings.log)?;
            println!("{}", reindex::reindex(&settings).await?);
        }
        Some(Command::Config) => print!("{}", cli.settings.load()?),
        Some(Command::Openapi) => print!("{}", http::openapi::json()?),
        Some(Command::Llm(LlmCommand::Check)) => return check(&cli.settings.load()?.settings).await,
        Some(Command::Keys(command)) => {
            let settings = cli.settings.load()?.settings;
            let opened = app::keys::Command::open(&settings, !cli.serve.no_migrate).await?;
            let done = keys(&opened, command).await;
            opened.close().await;
            done?;
        }
        Some(Command::Health) => return health(&cli.settings.load()?.settings).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn serve(settings: &Settings, args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    telemetry::start(&settings.log)?;
    // Before anything else, so that a signal during the start is not lost.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let app = App::new(settings, !args.no_migrate).await?;
    let listener = app.listen().await?;
    if settings.uses_only_extractive() {
        tracing::info!(
            "summaries are made by the built-in extractive summariser; a real model writes better ones: \
             set one in [llm], see precis.example.toml"
        );
    }
    tracing::info!(database = %settings.database.url, "listening on http://{}", listener.local_addr()?);
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(app.serve(listener, stop).await?)
}

async fn check(settings: &Settings) -> Result<ExitCode, Box<dyn Error>> {
    let report = app::check_models(settings).await?;
    print!("{report}");
    Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The result goes to standard output, alone, so that it can be piped; what else there is to say goes beside it.
async fn keys(keys: &app::keys::Command, command: KeysCommand) -> Result<(), KeysError> {
    match command {
        KeysCommand::Create { tenant, name, scope } => {
            let created = keys.create(&tenant, name.as_ref(), scope).await?;
            eprintln!("{}", created.explanation);
            println!("{}", created.key.expose());
        }
        KeysCommand::List { tenant } => print!("{}", keys.list(tenant.as_ref()).await?),
        KeysCommand::Revoke { id } => eprintln!("{}", keys.revoke(&id).await?),
    }
    Ok(())
}

/// For a container's health check: images have no curl.
async fn health(settings: &Settings) -> Result<ExitCode, Box<dyn Error>> {
    let mut address = settings.server.bind;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    let http = precis::llm::http::build_http_client(Duration::from_secs(1))?;
    let request = http.get(format!("http://{address}/readyz")).timeout(Duration::from_secs(3));
    let response = request.send().await?;
    if response.status().is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(format!("not ready: {}", response.text().await?).into())
}
