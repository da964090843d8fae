//! Attacks by imports: their data obeys the limits of data that precis creates itself.

use crate::service::{Bystander, Service, flood, status_after_body};
use crate::support::backend::Backend;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::time::Duration;
use test_case::test_case;

/// The largest summary of an import.
const MAX_SUMMARY: usize = 1 << 20;
/// The longest name of a model, a pool or a version of prompts.
const MAX_NAME: usize = 1024;
const CLIENTS: usize = 8;

/// Returns an export with one message and one revision, after a change of its first line and its revision.
fn export(change: impl FnOnce(&mut Value, &mut Value)) -> String {
    let time = "2026-01-01T00:00:00Z";
    let mut header = json!({
        "precis_export": 1, "messages": 1, "revisions": 1,
        "session": {"session_id": "x", "metadata": {}, "created_at": time, "updated_at": time},
    });
    let message = json!({"seq": 1, "created_at": time, "message": {"role": "user", "content": "a"}});
    let usage = json!({"input_tokens": 1, "output_tokens": 1, "calls": 1, "failures": 0, "queued_ms": 0});
    let provenance =
        json!({"model": "m", "pool": "p", "prompt_version": "1", "usage": usage, "duration_ms": 1});
    let mut revision = json!({
        "revision": 1, "kind": "consolidation", "from_seq": 1, "to_seq": 1, "cursor": 1, "added": "b",
        "summary": {"text": "b", "words": 1, "tokens": 1}, "meta": null, "provenance": provenance,
        "created_at": time,
    });
    change(&mut header, &mut revision);
    let mut lines = format!("{header}\n{message}\n{revision}\n");
    let sha256 = hex::encode(Sha256::digest(&lines));
    let end = json!({"end": {"messages": 1, "revisions": 1, "sha256": sha256}});
    let _ = writeln!(lines, "{end}");
    lines
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run"]
async fn imported_summaries_leave_other_tenants_their_share(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let attacker = service.tenant("attacker").await;
    let bystander = Bystander::new(&service, "bystander").await;
    let import = async |session: &str, lines: String| {
        let request = attacker.request(Method::POST, &format!("/sessions/{session}/import"));
        request.header("content-type", "application/x-ndjson").body(lines).await
    };
    let large = "a word and ".repeat(30 << 20 >> 3);
    let long = |bytes: usize| large[..bytes].to_owned();
    for (field, lines) in [
        ("summary.text", export(|_, revision| revision["summary"]["text"] = json!(long(30 << 20)))),
        ("summary.text", export(|_, revision| revision["summary"]["text"] = json!(long(MAX_SUMMARY + 1)))),
        ("added", export(|_, revision| revision["added"] = json!(long(MAX_SUMMARY + 1)))),
        (
            "meta.text_before",
            export(|_, revision| {
                let text_before = long(MAX_SUMMARY + 1);
                revision["meta"] = json!({"text_before": text_before, "provenance": revision["provenance"]});
            }),
        ),
        (
            "provenance.model",
            export(|_, revision| revision["provenance"]["model"] = json!(long(MAX_NAME + 1))),
        ),
        (
            "meta.provenance.pool",
            export(|_, revision| {
                let mut provenance = revision["provenance"].clone();
                provenance["pool"] = json!(long(30 << 20));
                revision["meta"] = json!({"text_before": "c", "provenance": provenance});
            }),
        ),
        (
            "session.metadata",
            export(|header, _| header["session"]["metadata"] = json!({"a": long(64 << 10)})),
        ),
    ] {
        let response = import("rejected", lines).await;
        assert!(response.text.len() < 2000, "the response quotes the import");
        assert!(response.fields().iter().any(|name| name.contains(field)), "{field}: {response}");
    }
    attacker.get("/sessions/rejected").await.problem(404, "session-not-found");

    // An accepted import leaves other clients their share.
    for client in 0..CLIENTS {
        let largest = export(|_, revision| {
            let text_before = long(MAX_SUMMARY);
            (revision["summary"]["text"], revision["added"]) = (json!(text_before), json!(text_before));
            revision["meta"] = json!({"text_before": text_before, "provenance": revision["provenance"]});
        });
        import(&format!("s{client}"), largest).await.ok(201);
    }
    let idle = bystander.measure(Duration::from_secs(1), async {}).await;
    println!("idle: {}", idle.figures());
    let contexts = async {
        let request = async move |client| {
            let request = attacker.post(&format!("/sessions/s{client}/context"), "");
            status_after_body(request).await
        };
        println!("contexts: {:?}", flood(CLIENTS, Duration::from_secs(1), request).await);
    };
    let served = bystander.measure(Duration::from_secs(1), contexts).await;
    println!("beside {CLIENTS} clients: {}; peak {} MB", served.figures(), service.peak_memory());
    assert!(served.has_its_share(), "{}", served.figures());
}
