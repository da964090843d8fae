//! `precis export` and `precis import`, with and without a running service.

use crate::service::{Precis, messages};
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use test_case::test_case;

const CHAT: &str =
    "{\"role\":\"user\",\"content\":\"a\",\"n\":1.0}\n{\"role\":\"assistant\",\"content\":\"b\"}\n";

/// Creates a command for the database in a folder with these files.
fn precis(url: &str, files: &[(&str, &str)], args: &[&str]) -> Precis {
    let precis = Precis::new().env("DATABASE_URL", url).args(args.iter().copied());
    files.iter().fold(precis, |precis, (name, text)| precis.file(name, text))
}

async fn printed(url: &str, files: &[(&str, &str)], args: &[&str]) -> String {
    precis(url, files, args).run().await.stdout_of_success()
}

async fn rejected(url: &str, files: &[(&str, &str)], args: &[&str]) -> String {
    precis(url, files, args).run().await.stderr_of_failure()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_is_exported_and_imported_as_file(backend: Backend) {
    let url = backend.url();
    let chat = [("chat.jsonl", CHAT)];
    let output =
        printed(&url, &chat, &["import", "a/b", "chat.jsonl", "--tenant", "acme", "--user", "ada"]).await;
    assert_eq!(output, "imported 2 messages and 0 revisions");
    let again = printed(&url, &chat, &["import", "a/b", "chat.jsonl", "--tenant", "acme"]).await;
    assert_eq!(again, "nothing to do: 2 messages and 0 revisions of this file were imported before");
    let lines = printed(&url, &[], &["export", "a/b", "--tenant", "acme"]).await + "\n";
    assert!(
        lines.contains("\"user_id\":\"ada\"") && lines.contains(r#"{"role":"user","content":"a","n":1.0}"#)
    );

    let other = Backend::sqlite().await.url().replace("precis.db", "new.db");
    let folder = other.trim_start_matches("sqlite://").trim_end_matches("/new.db");
    std::fs::create_dir_all(folder).expect("a folder");
    let export = [("export.jsonl", lines.as_str())];
    assert!(printed(&other, &export, &["import", "moved", "export.jsonl"]).await.starts_with("imported 2"));
    let mut to_file = precis(&other, &[], &["export", "moved", "-o", "out.jsonl"]);
    assert_eq!(to_file.run().await.stdout_of_success(), "");
    let again = to_file.run().await.stderr_of_failure();
    assert!(again.ends_with("out.jsonl exists: choose another file, or replace it with --force"), "{again}");
    to_file = to_file.args(["--force"]);
    assert_eq!(to_file.run().await.stdout_of_success(), "");
    let moved = std::fs::read_to_string(to_file.folder().join("out.jsonl")).expect("written");
    assert_eq!(moved.lines().nth(1), lines.lines().nth(1));
    assert_eq!(std::fs::read_dir(to_file.folder()).expect("a folder").count(), 1);
    std::fs::remove_dir_all(folder).expect("removed");

    // Each error names the fix, and the database is unchanged.
    let output =
        rejected(&url, &chat, &["import", "a/b", "chat.jsonl", "--tenant", "acme", "--user", "bo"]).await;
    assert!(output.contains("there is another session \"a/b\": import under another id"), "{output}");
    let cut = lines.lines().take(2).collect::<Vec<_>>().join("\n");
    let wrong = CHAT.replace("assistant", "robot");
    for (text, hint) in [
        (cut.as_str(), "line 2: the export ends here without its last line"),
        (wrong.as_str(), "line 2: role: must be one of user, assistant"),
        ("", "line 1: the file is empty"),
    ] {
        let output = rejected(&url, &[("x.jsonl", text)], &["import", "new", "x.jsonl"]).await;
        assert!(output.contains("x.jsonl: nothing was imported") && output.contains(hint), "{output}");
    }
    // The size limits of messages apply, the limit of the request body does not.
    let limited =
        |setting, value| precis(&url, &chat, &["import", "large", "chat.jsonl"]).set(setting, value);
    let output = limited("limits.max_message_bytes", "34").run().await.stderr_of_failure();
    let hint = "nothing was imported: line 1: has 37 bytes, at most 34 are allowed (limits.max_message_bytes): shorten it";
    assert!(output.ends_with(hint) && output.matches("line 1").count() == 1, "{output}");
    let output = limited("limits.max_import_bytes", "1").run().await.stdout_of_success();
    assert_eq!(output, "imported 2 messages and 0 revisions");
    let output = rejected(&url, &[], &["import", "new", "absent.jsonl"]).await;
    assert!(output.contains("absent.jsonl: can't be read"), "{output}");
    for args in [&["import", "new"][..], &["import", "new", "-"]] {
        let output = rejected(&url, &[], args).await;
        assert!(output.contains("standard input: nothing was imported"), "{output}");
    }
    let one = [("one.jsonl", r#"{"role":"user","content":"a"}"#)];
    assert_eq!(
        printed(&url, &one, &["import", "one", "one.jsonl"]).await,
        "imported 1 message and 0 revisions"
    );
    assert!(rejected(&url, &[], &["import", "", "x"]).await.contains("must not be empty"));
    let mut absent = precis(&url, &[], &["export", "new", "--output", "out.jsonl"]);
    let output = absent.run().await.stderr_of_failure();
    assert!(output.contains("tenant default has no session \"new\" in the database"), "{output}");
    assert_eq!(std::fs::read_dir(absent.folder()).expect("a folder").count(), 0);
    let output = rejected(&url, &[], &["export", "a/b", "--tenant", "acme", "-o", "absent/out.jsonl"]).await;
    assert!(output.contains("there is no folder absent: create it, or choose another file"), "{output}");
    let output = precis(&url, &chat, &["import", "new", "chat.jsonl"])
        .env("TMPDIR", "/absent")
        .run()
        .await
        .stderr_of_failure();
    assert!(output.contains("set TMPDIR to a folder with room"), "{output}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_service_sees_imported_session(backend: Backend) {
    let url = backend.url();
    let service = Precis::new().env("DATABASE_URL", &url).start().await;
    service.record("before", &messages(4)).await;
    printed(&url, &[("chat.jsonl", CHAT)], &["import", "s", "chat.jsonl"]).await;
    assert_eq!(service.history("s").await.len(), 2);
    service.record("s", &messages(2)).await;
    assert_eq!(printed(&url, &[], &["export", "s"]).await.lines().count(), 6);
    assert!(printed(&url, &[], &["export", "before"]).await.contains("Question 2"));
}

#[tokio::test]
async fn export_requires_current_schema() {
    let database = TestDatabase::create("empty", async |_| {}).await;
    let output = rejected(&database.url(), &[], &["export", "s"]).await;
    assert!(output.contains("migration 0") && output.contains("precis migrate"), "{output}");
}
