//! `precis config`, and the errors of invalid settings.

use crate::service::Precis;
use std::collections::BTreeMap;
use std::process::Command;

/// Parses the output of `precis config`: value and origin by key.
fn read(printed: &str) -> BTreeMap<String, (String, String)> {
    let parsed: toml::Value =
        toml::from_str(printed).unwrap_or_else(|error| panic!("not TOML: {error}\n{printed}"));
    let lines = printed.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let key = line.split(" = ").next().expect("a key");
            let origin = line.rsplit("  # ").next().expect("an origin");
            let value = match key.split('.').fold(&parsed, |table, part| &table[part]) {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(number) => number.to_string(),
                value => format!("{value:?}"),
            };
            (key.to_owned(), (value, origin.to_owned()))
        })
        .collect()
}

fn shown<'a>(settings: &'a BTreeMap<String, (String, String)>, key: &str) -> (&'a str, &'a str) {
    let (value, origin) = settings.get(key).unwrap_or_else(|| panic!("{key} is not there: {settings:#?}"));
    (value, origin)
}

#[tokio::test]
async fn config_prints_effective_settings_with_origins() {
    let file = "[server]\nbind = '127.0.0.1:1001'\nshutdown_grace = '7s'\n\
        [consolidation]\nthreshold = 50\nkeep_recent = 10\n[database]\nurl = 'sqlite://file.db'\n";
    let precis = || Precis::new().file("precis.toml", file);
    let settings = read(&precis().args(["config"]).run().await.stdout_of_success());
    assert_eq!(shown(&settings, "server.bind"), ("127.0.0.1:1001", "precis.toml"));
    assert_eq!(shown(&settings, "consolidation.threshold"), ("50", "precis.toml"));
    assert_eq!(shown(&settings, "consolidation.summary_word_limit"), ("600", "default"));
    assert_eq!(shown(&settings, "database.url"), ("sqlite://file.db", "precis.toml"));

    let over = |precis: Precis| {
        precis
            .set("server.bind", "127.0.0.1:1002")
            .set("consolidation.threshold", "60")
            .env("DATABASE_URL", "sqlite://environment.db")
    };
    let settings = read(&over(precis()).args(["config"]).run().await.stdout_of_success());
    assert_eq!(shown(&settings, "server.bind"), ("127.0.0.1:1002", "environment PRECIS__SERVER__BIND"));
    assert_eq!(
        shown(&settings, "consolidation.threshold"),
        ("60", "environment PRECIS__CONSOLIDATION__THRESHOLD")
    );
    assert_eq!(shown(&settings, "consolidation.keep_recent"), ("10", "precis.toml"));
    assert_eq!(shown(&settings, "database.url"), ("sqlite://environment.db", "environment DATABASE_URL"));

    let flags = ["config", "--bind", "127.0.0.1:1003", "--database-url", "sqlite://flag.db"];
    let printed =
        over(precis()).set("database.url", "sqlite://named.db").args(flags).run().await.stdout_of_success();
    let settings = read(&printed);
    assert_eq!(shown(&settings, "server.bind"), ("127.0.0.1:1003", "flag --bind"));
    assert_eq!(shown(&settings, "database.url"), ("sqlite://flag.db", "flag --database-url"));
    assert_eq!(shown(&settings, "server.shutdown_grace"), ("7s", "precis.toml"));

    // The output is a valid settings file with the same values.
    let again = Precis::new().file("other.toml", &printed).args(["config", "--config", "other.toml"]);
    let again = read(&{ again }.run().await.stdout_of_success());
    assert_eq!(again.len(), settings.len());
    for (key, (value, _)) in &settings {
        assert_eq!(shown(&again, key), (value.as_str(), "other.toml"), "{key}");
    }
}

#[tokio::test]
async fn secrets_are_not_printed() {
    let pools = "[llm.models.small]\nprovider = 'p'\nmodel = 'm'\n[llm.pools.default]\nmodels = ['small']\n";
    for (key, variable) in [
        ("'hunter2'", "UNUSED"),
        ("{ env = 'A_KEY' }", "A_KEY"),
        ("{ file = 'key' }", "UNUSED"),
        ("{ env = 'UNUSED' }", "PRECIS__LLM__PROVIDERS__P__API_KEY"),
    ] {
        let file = format!("[llm.providers.p]\napi_key = {key}\n{pools}");
        let mut precis = Precis::new()
            .file("precis.toml", &file)
            .file("key", "hunter2\n")
            .env(variable, "hunter2")
            .env("DATABASE_URL", "postgres://precis:hunter2@localhost/precis?sslpassword=hunter2")
            .args(["config"]);
        let ended = precis.run().await;
        assert!(!format!("{ended:?}").contains("hunter2"), "{ended:?}");
        let settings = read(&ended.stdout_of_success());
        assert_eq!(shown(&settings, "llm.providers.p.api_key").0, "[redacted]", "{key}");
        let url = shown(&settings, "database.url").0;
        assert_eq!(url, "postgres://precis:[redacted]@localhost/precis?sslpassword=[redacted]");
    }
}

#[tokio::test]
async fn all_setting_errors_are_reported_at_once() {
    let file = "[server]\nbnd = '127.0.0.1:1'\n[consolidation]\nthreshold = 'many'\nmode = 'sometimes'\n\
        [llm]\ndefault_pool = 'absent'\n[llm.providers.p]\napi_key = { env = 'ABSENT' }\n\
        [llm.models.m]\nprovider = 'nobody'\nmodel = 'm'\n";
    let wrong = [
        "server.bnd (precis.toml)",
        "consolidation.threshold (precis.toml)",
        "consolidation.mode (precis.toml)",
        "llm.default_pool (precis.toml)",
        "llm.models.m.provider (precis.toml)",
        "consolidation.keep_recent (environment PRECIS__CONSOLIDATION__KEEP_RECENT)",
        "log.level (environment PRECIS__LOG__LEVEL)",
        "database.url (flag --database-url)",
    ];
    // All commands report the same errors.
    for command in [&["config"][..], &["migrate"], &["health"], &["serve"], &[]] {
        let mut precis = Precis::new()
            .file("precis.toml", file)
            .set("consolidation.keep_recent", "-1")
            .set("log.level", "debug")
            .args(["--database-url", "mysql://u:hunter2@h/d"])
            .args(command.iter().copied());
        let output = precis.run().await.stderr_of_failure();
        for wrong in wrong {
            assert_eq!(output.matches(wrong).count(), 1, "{wrong} in {command:?}:\n{output}");
        }
        assert_eq!(output.lines().count(), 1 + wrong.len(), "{output}");
        assert!(!output.contains("hunter2"), "{output}");
        assert!(!precis.folder().join("precis.db").exists());
    }
}

#[tokio::test]
async fn named_settings_file_must_exist() {
    let output = Precis::new().args(["config", "--config", "absent.toml"]).run().await.stderr_of_failure();
    assert!(output.contains("absent.toml: cannot read this file"), "{output}");
    let output =
        Precis::new().file("precis.toml", "[server").args(["config"]).run().await.stderr_of_failure();
    assert!(output.contains("precis.toml: invalid TOML in line 1"), "{output}");
}

#[tokio::test]
async fn completions_and_manual_page_name_every_command() {
    let help = Precis::new().args(["--help"]).run().await.stdout_of_success();
    let (_, commands) = help.split_once("Commands:").expect("a list");
    let (commands, _) = commands.split_once("Options:").expect("an end");
    let names = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<_> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.len() > 10, "{help}");
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    for args in [&["completions", "bash"][..], &["completions", "zsh"], &["completions", "fish"], &["man"]] {
        let printed = Precis::new().args(args.iter().copied()).run().await.stdout_of_success();
        for name in &names {
            assert!(printed.contains(name), "{args:?}: {name}");
        }
    }
    for (command, example) in [
        (&["import"][..], "precis export demo | precis import copy"),
        (&["export"], "precis export demo -o demo.jsonl"),
        (&["keys", "create"], "precis keys create --tenant acme > key"),
    ] {
        let help =
            Precis::new().args(command.iter().copied()).args(["--help"]).run().await.stdout_of_success();
        assert!(help.contains(example), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
        let page = Precis::new().args(["man"]).args(command.iter().copied()).run().await.stdout_of_success();
        assert!(page.contains(&format!("precis {}", command.join(" "))), "{page}");
        assert!(page.contains("tenant") && page.contains("database"), "{page}");
    }
    let unknown = Precis::new().args(["man", "exprot"]).run().await.stderr_of_failure();
    assert!(
        unknown.contains("there is no command \"exprot\": `precis --help` lists the commands"),
        "{unknown}"
    );
}

#[tokio::test]
async fn reader_may_close_the_output_early() {
    let precis = env!("CARGO_BIN_EXE_precis");
    let mut shell = Command::new("bash");
    shell.args(["-c", "set -o pipefail; \"$0\" openapi | head -c 1", precis]);
    let output = shell.output().expect("bash runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(output.stdout, b"{");
}

#[tokio::test]
async fn openapi_command_prints_the_committed_document() {
    let printed = Precis::new().args(["openapi"]).run().await.stdout_of_success();
    // Not `assert_eq!`, which would print thousands of lines.
    assert!(
        printed == include_str!("../../openapi/openapi.json").trim_end(),
        "run: cargo run -- openapi > openapi/openapi.json"
    );
}
