//! The invariants of sessions and contexts that hold after every fault.

use crate::ack_log::{FIRST_OF_FORK, SessionAcks, SessionLog};
use crate::clients::{ReplicaSet, Request, is_plain_fork, record_ack};
use crate::message_ids::{MessageId, SummaryCoverage, are_complete_exchanges};
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn as_usize(value: &Value) -> usize {
    value.as_u64().and_then(|value| value.try_into().ok()).unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Checks a session while writers may continue. Then repeats the exchanges with an unknown outcome, with their keys or as lists.
/// Afterwards each of them must be stored once, at the position of the response.
pub(crate) async fn check_session(service: &ReplicaSet, session: &SessionLog) {
    let rewind = session.acks().rewind;
    if let Some(after) = rewind {
        service.send(&Request::rewind(session, after)).await;
        session.record_rewound();
    }
    let acks = session.acks().clone();
    if acks.acknowledged.is_empty() && acks.unknown.is_empty() {
        return;
    }
    // A session may not exist yet if the outcome of its first exchange is unknown.
    let ids = if acks.acknowledged.is_empty() { Vec::new() } else { check_history(service, session).await };
    for (exchange, messages) in &acks.unknown {
        let response = service.send(&Request::write(session, *exchange, *messages)).await;
        let first = record_ack(session, *exchange, *messages, &response);
        if let Some(index) = ids.iter().position(|id| id.exchange == *exchange) {
            assert_eq!(index + 1, first, "exchange {exchange} of {} was stored before", session.id());
        }
    }
    let ids = if acks.unknown.is_empty() { ids } else { check_history(service, session).await };
    check_branches(service, session, &ids).await;
    let forks = session.acks().forks.clone();
    for fork in forks {
        let ids = check_copy(service, session, &fork.id).await;
        assert_eq!(ids.len(), fork.acks.acknowledged_messages(), "{}", fork.id);
        check_exchanges(session, &fork.id, &ids, (&fork.acks, &fork.acks));
        let path = format!("/sessions/{}/context", fork.id);
        check_context(&service.send(&Request::post(path, json!({}))).await, session, &fork.acks);
    }
}

/// Checks that each exchange that a rewind has removed is in the session or in a branch.
async fn check_branches(service: &ReplicaSet, session: &SessionLog, ids: &[MessageId]) {
    let removed = session.acks().removed.clone();
    let mut found: BTreeSet<usize> = ids.iter().map(|message| message.exchange).collect();
    if removed.keys().all(|exchange| found.contains(exchange)) {
        return;
    }
    let mut cursor = String::new();
    loop {
        let page = service.send(&Request::get(format!("/sessions?limit=1000{cursor}"))).await;
        for item in page["items"].as_array().expect("a list") {
            let origin = &item["forked_from"];
            if origin["session_id"] == session.id() && origin["kind"] == "rewind" {
                let ids = check_copy(service, session, item["session_id"].as_str().expect("an id")).await;
                found.extend(ids.iter().map(|message| message.exchange));
            }
        }
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    for exchange in removed.keys() {
        assert!(found.contains(exchange), "{}: exchange {exchange} is lost", session.id());
    }
}

/// Checks every fork that a sync has created, also if no client got a response: it has the messages of its sync, and no other
/// fork has them. Returns the number of these forks.
pub(crate) async fn check_synced_forks(service: &ReplicaSet) -> usize {
    let (mut cursor, mut found) = (String::new(), BTreeSet::new());
    loop {
        let page = service.send(&Request::get(format!("/sessions?limit=1000{cursor}"))).await;
        for item in page["items"].as_array().expect("a list") {
            let id = item["session_id"].as_str().expect("an id");
            if item["forked_from"]["kind"] != "fork" || is_plain_fork(id) {
                continue;
            }
            let through = as_usize(&item["forked_from"]["through_seq"]);
            let (.., ids) = read_session(service, id).await;
            let appended = &ids[through..];
            assert!(are_complete_exchanges(&ids) && !appended.is_empty(), "{id}: {ids:?}");
            let first = appended[0];
            assert!(first.exchange >= FIRST_OF_FORK && first.exchange_len == appended.len(), "{id}: {ids:?}");
            assert!(found.insert((first.session, first.exchange)), "{id}: {first} is in two forks");
        }
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    found.len()
}

/// Checks history, revisions and summary of a fork or a branch, to which clients write nothing. Returns the ids of its messages.
async fn check_copy(service: &ReplicaSet, session: &SessionLog, id: &str) -> Vec<MessageId> {
    let (state, revisions, ids) = read_session(service, id).await;
    assert!(are_complete_exchanges(&ids), "{id}: an incomplete exchange: {ids:?}");
    assert!(ids.iter().all(|message| message.session == session.number), "{id}: {ids:?}");
    assert_eq!(as_usize(&state["last_seq"]), ids.len(), "{id}");
    check_revisions(id, &state, &revisions, &ids);
    ids
}

/// Returns the state, the revisions and the ids of the messages of a session.
async fn read_session(service: &ReplicaSet, id: &str) -> (Value, Value, Vec<MessageId>) {
    // The order matters: a later response may contain more than an earlier one, but not less.
    let state = service.send(&Request::get(format!("/sessions/{id}"))).await;
    let revisions = service.send(&Request::get(format!("/sessions/{id}/revisions?limit=1000"))).await;
    let page = service.send(&Request::get(format!("/sessions/{id}/messages?limit=1000"))).await;
    assert_eq!(page["next"], Value::Null, "sessions are short enough for one page");
    let items = page["items"].as_array().expect("a list");
    let mut ids = Vec::new();
    for (seq, item) in (1..).zip(items) {
        assert_eq!(as_usize(&item["seq"]), seq, "a gap in {id}");
        let message = MessageId::of_message(&item["message"]);
        assert_eq!(item["message"], message.message(), "{id}: a message was changed");
        ids.push(message);
    }
    (state, revisions, ids)
}

/// Checks history, search, revisions and summary of a session, and returns the ids of its messages.
async fn check_history(service: &ReplicaSet, session: &SessionLog) -> Vec<MessageId> {
    let id = session.id();
    let acks = session.acks().clone();
    let (state, revisions, ids) = read_session(service, &id).await;
    // Writers record an exchange before they send it, so this contains every stored exchange.
    let sent = session.acks().clone();
    check_exchanges(session, &id, &ids, (&acks, &sent));

    // The process that stored the exchange may have been killed before it was indexed.
    if let Some((exchange, ack)) = acks.acknowledged.last_key_value() {
        let first = session.message_ids(*exchange, ack.messages)[0];
        let path = format!("/search?session_id={id}&neighbours=0&q=%22{first}%22");
        let results = service.send(&Request::get(path)).await;
        let hits = results["items"].as_array().expect("a list").iter();
        let hits: Vec<usize> = hits.map(|hit| as_usize(&hit["seq"])).collect();
        assert_eq!(hits, [ack.first_seq], "{id}: {first}");
    }
    check_revisions(&id, &state, &revisions, &ids);
    ids
}

/// Checks that the history consists of complete exchanges, each once and in order, and contains all acknowledged ones.
fn check_exchanges(
    session: &SessionLog,
    id: &str,
    ids: &[MessageId],
    (acks, sent): (&SessionAcks, &SessionAcks),
) {
    assert!(are_complete_exchanges(ids), "{id}: an incomplete exchange: {ids:?}");
    let mut seen = BTreeSet::new();
    for first in ids.iter().filter(|message| message.position == 1) {
        let exchange = first.exchange;
        assert!(seen.insert(exchange), "{id}: exchange {exchange} is stored twice");
        let in_order = seen.last() == Some(&exchange) || !acks.in_order.contains(&exchange);
        assert!(in_order, "{id}: exchange {exchange} was acknowledged before a later one was sent");
        let acknowledged = sent.acknowledged.get(&exchange).map(|ack| ack.messages);
        let others = [&sent.unknown, &sent.removed, &sent.lost];
        let messages = acknowledged.or(others.into_iter().find_map(|known| known.get(&exchange).copied()));
        let expected = (session.number, Some(first.exchange_len));
        assert_eq!(
            (first.session, messages),
            expected,
            "{id}: no client sent {first}; stored: {ids:?}; known: {sent:?}"
        );
    }
    for (exchange, ack) in &acks.acknowledged {
        let stored = ids.get(ack.first_seq - 1..ack.first_seq - 1 + ack.messages);
        let expected = session.message_ids(*exchange, ack.messages);
        assert_eq!(
            stored,
            Some(&expected[..]),
            "{id}: exchange {exchange}, acknowledged at {}",
            ack.first_seq
        );
    }
}

/// Checks that revisions cover consecutive ranges, and that every summary covers the messages up to its cursor.
fn check_revisions(id: &str, state: &Value, revisions: &Value, ids: &[MessageId]) {
    let (cursor, last_seq) = (as_usize(&state["cursor"]), as_usize(&state["last_seq"]));
    assert!(cursor <= last_seq && last_seq <= ids.len(), "{state}");
    let assert_covers = |text: &Value, ids: &[MessageId]| {
        let coverage = SummaryCoverage::parse(text.as_str().expect("a text"));
        assert!(coverage.matches(ids), "{id}: {coverage:?} instead of {ids:?}");
    };
    let current = &state["summary"];
    assert_covers(&current["text"], &ids[..cursor]);
    let mut revisions = revisions["items"].as_array().expect("a list").clone();
    revisions.reverse();
    assert!(revisions.len() >= as_usize(&current["revision"]), "{id}: a revision is missing");
    let mut covered = 0;
    for (number, revision) in (1..).zip(&revisions) {
        assert_eq!(as_usize(&revision["revision"]), number, "{id}");
        assert_eq!(as_usize(&revision["from_seq"]), covered + 1, "{id}: a gap or an overlap: {revision}");
        let to = as_usize(&revision["to_seq"]);
        assert_eq!(as_usize(&revision["cursor"]), to, "{id}: {revision}");
        assert_covers(&revision["added"], &ids[covered..to]);
        assert_covers(&revision["text"], &ids[..to]);
        if number == as_usize(&current["revision"]) {
            assert_eq!((to, &revision["text"]), (cursor, &current["text"]), "{id}");
        }
        covered = to;
    }
}

/// Builds a context of a session without writers and checks it.
pub(crate) async fn check_final_context(service: &ReplicaSet, session: &SessionLog) {
    let acks = session.acks().clone();
    let path = format!("/sessions/{}/context", session.id());
    check_context(&service.send(&Request::post(path, json!({}))).await, session, &acks);
}

/// Checks that a context contains every exchange that was acknowledged before the request, once, in order and complete:
/// named by the summary or verbatim.
pub(crate) fn check_context(context: &Value, session: &SessionLog, acks: &SessionAcks) {
    let coverage = &context["coverage"];
    let (last_seq, through) = (as_usize(&coverage["last_seq"]), as_usize(&coverage["summary_through"]));
    assert_eq!(coverage["omitted"], json!([]), "{context}");
    assert_eq!(as_usize(&coverage["verbatim_from"]), through + 1, "a gap: {context}");

    let messages = context["messages"].as_array().expect("a list");
    let (system, verbatim): (Vec<&Value>, Vec<&Value>) =
        messages.iter().partition(|message| message["role"] == "system");
    let summary = system.first().and_then(|message| message["content"].as_str()).unwrap_or_default();
    let summary = SummaryCoverage::parse(summary);
    assert_eq!(summary.len(), through, "summary and cursor do not match: {context}");
    assert_eq!(through + verbatim.len(), last_seq, "{context}");

    let mut ids = summary.ids().to_vec();
    for message in verbatim {
        let id = MessageId::of_message(message);
        assert_eq!(*message, id.message(), "a message was changed");
        ids.push(id);
    }
    assert!(ids.iter().all(|id| id.session == session.number), "a message of another session: {context}");
    // The compressed part may end at a safe split point within an exchange.
    let begin = ids.iter().position(|id| id.position == 1).unwrap_or(ids.len());
    assert!(are_complete_exchanges(&ids[begin..]), "an incomplete exchange: {context}");
    let mut exchanges: Vec<usize> = ids[begin..].iter().map(|id| id.exchange).collect();
    exchanges.dedup();
    exchanges.sort_unstable();
    assert!(exchanges.windows(2).all(|pair| pair[0] != pair[1]), "a duplicate exchange: {context}");
    let compressed = summary.compressed_len();
    for (exchange, ack) in &acks.acknowledged {
        assert!(ack.first_seq + ack.messages - 1 <= last_seq, "exchange {exchange} is missing: {context}");
        if ack.first_seq > compressed {
            let stored = &ids[ack.first_seq - 1 - compressed..][..ack.messages];
            assert_eq!(
                stored,
                session.message_ids(*exchange, ack.messages),
                "another position than acknowledged"
            );
        }
    }
}
