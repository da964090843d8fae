//! `precis llm check`: a table with the problem of each model, and an exit status for the pools.

use crate::service::{CommandResult, Precis};
use crate::support::model_server::{Behaviour, ModelServer, Protocol, refused_base_url};

/// The key of all providers in these tests. No output may contain it.
const KEY: &str = "sk-hunter2-key-0123456789";
const KINDS: [(&str, Protocol); 2] = [("openai", Protocol::OpenAi), ("anthropic", Protocol::Anthropic)];

/// Adds a model with its own provider of the same name.
fn model(precis: Precis, name: &str, kind: &str, base_url: &str) -> Precis {
    let provider = |setting: &str| format!("llm.providers.{name}.{setting}");
    precis
        .set(&provider("kind"), kind)
        .set(&provider("base_url"), base_url)
        .set(&provider("api_key"), KEY)
        .set(&format!("llm.models.{name}.provider"), name)
        .set(&format!("llm.models.{name}.model"), "scripted-1")
}

/// Runs the check. Returns the exit status and standard output; asserts that there is no other output.
async fn check(precis: Precis) -> (Option<i32>, String) {
    let ended = precis.args(["llm", "check"]).run().await;
    assert!(!format!("{ended:?}").contains("hunter2"), "{ended:?}");
    let CommandResult { code, stdout, stderr } = ended;
    assert_eq!(stderr, "", "{stdout}");
    (code, stdout)
}

/// Returns the cells in the row of a model.
fn row<'a>(table: &'a str, model: &str) -> [&'a str; 8] {
    const COLUMNS: [&str; 8] =
        ["MODEL", "REACHABLE", "KEY", "STREAMING", "USAGE", "FIRST TOKEN", "TOTAL", "RESULT"];
    let heading = table.lines().next().expect("headings");
    let line = table.lines().find(|line| line.starts_with(&format!("{model} "))).expect(table);
    let starts = COLUMNS.map(|column| heading.find(column).expect(table));
    let mut ends = starts.iter().skip(1).copied().chain([line.len()]);
    starts.map(|start| line[start..ends.next().expect("as many")].trim())
}

/// Returns `true` if the table has this line.
fn has_line(table: &str, line: &str) -> bool {
    table.lines().any(|output| output == line)
}

/// Returns `true` if the cell has the format of a duration.
fn is_time(cell: &str) -> bool {
    cell.strip_suffix(" s").is_some_and(|seconds| seconds.parse::<f64>().is_ok())
}

#[tokio::test]
async fn llm_check_shows_capabilities_of_working_model() {
    for (kind, protocol) in KINDS {
        let server = ModelServer::start().await;
        let precis = model(Precis::new(), "small", kind, &server.base_url());
        let (code, table) = check(precis.set("llm.pools.default.models", "small")).await;
        assert_eq!(code, Some(0), "{table}");
        let [name, reachable, key, streaming, usage, first_token, total, result] = row(&table, "small");
        assert_eq!((name, reachable, key, streaming, usage), ("small", "yes", "accepted", "yes", "yes"));
        assert!(is_time(first_token) && is_time(total), "{table}");
        assert_eq!(result, "works", "{table}");
        assert!(has_line(&table, "pool default: small can answer"), "{table}");
        let calls = server.calls();
        assert_eq!((calls.len(), calls[0].protocol), (1, protocol));
        let sent = if kind == "openai" {
            calls[0].header("authorization").trim_start_matches("Bearer ")
        } else {
            calls[0].header("x-api-key")
        };
        assert_eq!(sent, KEY);
    }
}

/// Checks all failures in one run, each with its own server.
#[tokio::test]
async fn llm_check_distinguishes_failures() {
    let refusal = |status, message: &str| Some(Behaviour::fail(status, message));
    let wrong_key = format!("Incorrect API key provided: {KEY}.");
    let options = "Unrecognized request argument supplied: stream_options";
    for (kind, _) in KINDS {
        let cases = [
            ("wrong-key", refusal(401, &wrong_key), "yes", "refused", "the provider rejects the API key"),
            ("forbidden", refusal(403, "no"), "yes", "refused", "status 403 ("),
            ("options", refusal(400, options), "yes", "-", "try stream_options = false for its provider"),
            ("absent", refusal(404, "no such model"), "yes", "-", "check model and base_url"),
            ("busy", refusal(503, "busy"), "yes", "-", "status 503 ("),
            ("garbage", Some(Behaviour::garbage()), "yes", "-", "invalid response"),
            (
                "broken",
                Some(Behaviour::BreakOff("Ada".to_owned())),
                "yes",
                "-",
                "the response stream was truncated",
            ),
            ("empty", Some(Behaviour::answer("")), "yes", "-", "response rejected: empty"),
            ("hanging", Some(Behaviour::Hang), "silent", "-", "no complete response within 2.0s"),
            ("nobody", None, "no", "-", "connection failed: "),
        ];
        let names = cases.each_ref().map(|case| case.0);
        let mut precis = Precis::new().set("llm.pools.default.models", &names.join(","));
        let mut servers = Vec::new();
        for (name, behaviour, ..) in &cases {
            let server = ModelServer::start().await;
            let base_url = if let Some(behaviour) = behaviour {
                server.default(behaviour.clone());
                server.base_url()
            } else {
                refused_base_url()
            };
            precis = model(precis, name, kind, &base_url);
            if *name == "hanging" {
                precis = precis.set("llm.models.hanging.timeout", "2s");
            }
            servers.push(server);
        }
        let (code, table) = check(precis).await;
        assert_eq!(code, Some(1), "{kind}: {table}");
        assert!(has_line(&table, "pool default: no working model"), "{table}");
        for ((name, behaviour, reachable, key, output), server) in cases.into_iter().zip(&servers) {
            let row = row(&table, name);
            assert_eq!(row[1..6], [reachable, key, "-", "-", "-"], "{kind}: {name}: {table}");
            assert!(is_time(row[6]) && row[7].contains(output), "{kind}: {name}: {table}");
            // The check does not retry.
            assert_eq!(server.calls().len(), usize::from(behaviour.is_some()), "{kind}: {name}");
        }
    }
}

#[tokio::test]
async fn llm_check_fails_if_a_model_of_a_pool_fails() {
    let (works, fails) = (ModelServer::start().await, ModelServer::start().await);
    fails.default(Behaviour::fail(500, "down"));
    let precis = || {
        let precis = model(Precis::new(), "good", "openai", &works.base_url());
        let precis = model(precis, "bad", "anthropic", &fails.base_url());
        precis.set("llm.pools.default.models", "bad,good")
    };
    let (code, table) = check(precis()).await;
    assert_eq!((code, row(&table, "good")[7]), (Some(1), "works"), "{table}");
    assert!(row(&table, "bad")[7].starts_with("status 500 (api_error): "), "{table}");
    assert!(row(&table, "bad")[7].ends_with(&format!(" (POST {}/messages)", fails.base_url())), "{table}");
    assert!(has_line(&table, "pool default: good can answer, bad can't"), "{table}");
    let (code, table) = check(precis().set("llm.pools.other.models", "bad")).await;
    assert_eq!(code, Some(1), "{table}");
    assert!(has_line(&table, "pool other: no working model"), "{table}");
    assert!(has_line(&table, "pool default: good can answer, bad can't"), "{table}");
    let (code, table) = check(precis().set("llm.pools.default.models", "good")).await;
    assert_eq!(code, Some(0), "{table}");
    assert!(has_line(&table, "pool default: good can answer"), "{table}");
    // The built-in model works without a server.
    let (code, table) = check(Precis::new()).await;
    assert_eq!((code, row(&table, "extractive")[7]), (Some(0), "works"), "{table}");
}

#[tokio::test]
async fn llm_check_reports_missing_key() {
    let server = ModelServer::start().await;
    let with_key = |precis: Precis, name: &str, form: &str, place: &str| {
        let provider = |setting: &str| format!("llm.providers.{name}.{setting}");
        precis
            .set(&provider("base_url"), &server.base_url())
            .set(&provider(&format!("api_key__{form}")), place)
            .set(&format!("llm.models.{name}.provider"), name)
            .set(&format!("llm.models.{name}.model"), "scripted-1")
    };
    // A missing key of a model in use is an error in the settings, as at the start of the service.
    let precis = with_key(Precis::new(), "small", "env", "ABSENT_KEY");
    let output = precis
        .set("llm.pools.default.models", "small")
        .args(["llm", "check"])
        .run()
        .await
        .stderr_of_failure();
    assert!(output.contains("llm.providers.small.api_key.env"), "{output}");
    assert!(output.contains("the environment variable ABSENT_KEY is not set"), "{output}");
    // A missing key of another model is reported in its row, and the model is not called.
    let precis = with_key(Precis::new(), "used", "env", "MODEL_KEY").env("MODEL_KEY", KEY);
    let precis = with_key(precis, "other", "env", "ABSENT_KEY");
    let precis = with_key(precis, "another", "file", "absent-key");
    let (code, table) = check(precis.set("llm.pools.default.models", "used")).await;
    assert_eq!((code, row(&table, "used")[7]), (Some(0), "works"), "{table}");
    for (name, why) in
        [("other", "the environment variable ABSENT_KEY is not set"), ("another", "cannot read the file")]
    {
        let row = row(&table, name);
        assert_eq!(row[1..3], ["-", "missing"], "{table}");
        assert!(row[7].contains("secret unavailable: ") && row[7].contains(why), "{table}");
    }
    assert_eq!(server.calls().len(), 1);
}
