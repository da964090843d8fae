//! The command line: its arguments, and one module per command.
#![expect(clippy::print_stderr, reason = "commands explain their results")]

mod args;
mod backup;
mod export;
mod health;
mod import;
mod keys;
mod output;
mod reindex;
mod serve;

use crate::app::doctor::{self, Examination, Severity};
use crate::app::{self, open_store};
use crate::config::{ConfigError, Loaded};
use crate::domain::error_chain::ErrorChain;
use crate::{blocking, http};
use args::SettingsArgs;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use output::{error, print};
use std::error::Error;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  precis                                        run the service
  precis --bind 0.0.0.0:8080                    run it for other machines, which need a key
  precis keys create --tenant acme              create a key
  precis llm check                              call every model of the settings once
  precis export demo -o demo.jsonl              write a session to a file
  precis import copy demo.jsonl                 create a session from a file
  DATABASE_URL=postgres://… precis migrate      prepare a database";

const EXPORT_EXAMPLES: &str = "\
Examples:
  precis export demo -o demo.jsonl              write a file; --force replaces it
  precis export demo | gzip > demo.jsonl.gz     write to another program";

const IMPORT_EXAMPLES: &str = "\
Examples:
  precis import copy demo.jsonl                 read an export
  precis export demo | precis import copy       copy a session
  echo '{\"role\": \"user\", \"content\": \"Hello\"}' | precis import chat -";

/// A memory for LLM agents that fits their context window.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    serve: serve::ServeArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run the service; this is the default command
    Serve(serve::ServeArgs),
    /// Bring the database schema up to date
    Migrate,
    /// Copy an SQLite database to a new file, while the service runs or without it; for Postgres see docs/backup.md
    Backup(backup::BackupArgs),
    /// Write a session with its messages and revisions as JSON lines to a file or to standard output
    #[command(after_help = EXPORT_EXAMPLES)]
    Export(export::ExportArgs),
    /// Create a session from an export, or from JSON lines with role and content, completely or not at all
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(import::ImportArgs),
    /// Index the messages that are not in the search index, or all messages after a change of search.language
    Reindex,
    /// Print the effective settings with their origins
    Config,
    /// Print the OpenAPI document
    Openapi,
    /// Examine settings, clock, disk, database, address and models; exit status 1 if there is a problem
    Doctor,
    /// Commands for the configured models
    #[command(subcommand)]
    Llm(LlmCommand),
    /// Manage the API keys of the database
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Print the completions of the command line for a shell
    Completions {
        /// The shell, for example: source <(precis completions bash)
        shell: Shell,
    },
    /// Print the manual page of precis or of a command: precis man | man -l -
    Man {
        /// The command, for example: keys create
        command: Vec<String>,
    },
    /// Ask the service at server.bind if it is ready; exit status 0 if it is, otherwise 1
    Health,
}

#[derive(Subcommand)]
enum LlmCommand {
    /// Send a short request to every model; exit status 0 if all models of all pools work, otherwise 1
    Check,
}

/// Parses the arguments of the process, runs the command and prints its error.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = blocking::main_runtime().map_err(Into::into).and_then(|runtime| {
        let result = runtime.block_on(run(cli));
        // DNS look-ups run on threads that cannot be cancelled. The process does not wait for them.
        runtime.shutdown_background();
        result
    });
    result.unwrap_or_else(|error| {
        eprintln!("precis: {}", ErrorChain(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// Returns the manual page of precis, or of the command with this name.
fn manual_page(names: &[String]) -> Result<String, Box<dyn Error>> {
    let mut command = Cli::command();
    // Commands get the flags that all commands have, and their whole names.
    command.build();
    for name in names {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| {
            error(format!("there is no command {:?}: `precis --help` lists the commands", names.join(" ")))
        })?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(String::from_utf8(page)?)
}

async fn run(cli: Cli) -> Result<ExitCode, Box<dyn Error>> {
    // Clap accepts the flag of the default command before the name of any command.
    let migrate = !cli.serve.no_migrate;
    match cli.command {
        None => serve::serve(cli.settings, migrate).await?,
        Some(Command::Serve(args)) => serve::serve(cli.settings, migrate && !args.no_migrate).await?,
        Some(Command::Migrate) => {
            let settings = cli.settings.load_and_log()?;
            let store = open_store(&settings, true).await?;
            let version = store.migrate().await;
            store.close().await;
            eprintln!("the database {} is at migration {}", settings.database.url, version?);
        }
        Some(Command::Backup(args)) => backup::backup(&cli.settings.load_and_log()?, args).await?,
        Some(Command::Export(args)) => export::export(cli.settings, args).await?,
        Some(Command::Import(args)) => import::import(cli.settings, args, migrate).await?,
        Some(Command::Reindex) => reindex::reindex(&cli.settings.load_and_log()?, migrate).await?,
        Some(Command::Config) => {
            let loaded = cli.settings.load()?;
            for warning in &loaded.warnings {
                eprintln!("warning: {warning}");
            }
            print(&loaded.to_string())?;
        }
        Some(Command::Openapi) => print(&(http::openapi().to_pretty_json()? + "\n"))?,
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "precis", &mut script);
            print(&String::from_utf8(script)?)?;
        }
        Some(Command::Man { command }) => print(&manual_page(&command)?)?,
        Some(Command::Doctor) => {
            let mut examination = Examination::default();
            match cli.settings.load() {
                Ok(Loaded { settings, warnings, .. }) => {
                    for warning in warnings {
                        examination.add(Severity::Warning, "settings", warning);
                    }
                    doctor::examine(&settings, &mut examination).await;
                }
                Err(error) => match error.downcast::<ConfigError>() {
                    Ok(invalid) => {
                        for error in invalid.errors {
                            examination.add(Severity::Problem, "settings", error.to_string());
                        }
                    }
                    Err(error) => return Err(error),
                },
            }
            print(&examination.to_string())?;
            return Ok(if examination.has_problem() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        Some(Command::Llm(LlmCommand::Check)) => {
            let report = app::check_models(&cli.settings.load()?.settings).await?;
            print(&report.to_string())?;
            return Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Some(Command::Keys(command)) => keys::run(&cli.settings.load()?.settings, command, migrate).await?,
        Some(Command::Health) => health::check(&cli.settings.load()?.settings).await?,
    }
    Ok(ExitCode::SUCCESS)
}
