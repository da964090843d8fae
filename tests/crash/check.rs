//! What must hold of every session after a fault, and at the end.

use crate::ledger::Book;
use crate::load::{Request, Service, acknowledge, check_context};
use crate::names::{Covered, Name, are_whole};
use serde_json::Value;
use std::collections::BTreeSet;

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("a number: {value}"))).expect("small")
}

/// Checks a session; writers may go on meanwhile. Then repeats what was not acknowledged, with its key: there must be
/// one copy of it afterwards, where the answer says.
pub(crate) async fn check(service: &Service, book: &Book) {
    let known = book.known().clone();
    if known.acknowledged.is_empty() && known.unknown.is_empty() {
        return;
    }
    let unknown = known.unknown.clone();
    // A session whose first exchange is unknown may not be there yet.
    let names = if known.acknowledged.is_empty() { Vec::new() } else { history(service, book).await };
    for (exchange, of) in &unknown {
        let request = Request::exchange(book, *exchange, *of);
        let answer = service.surely(&request).await;
        acknowledge(book, *exchange, *of, &answer);
        let first = number(&answer["first_seq"]);
        let there = names.iter().position(|name| name.exchange == *exchange);
        if let Some(index) = there {
            assert_eq!(index + 1, first, "exchange {exchange} of {} was there already", book.id());
        }
    }
    if !unknown.is_empty() {
        history(service, book).await;
    }
}

/// The names of a session's history, after checking all that hangs together with it.
async fn history(service: &Service, book: &Book) -> Vec<Name> {
    let id = book.id();
    let known = book.known().clone();
    // In this order: what comes later has grown at most.
    let state = service.surely(&Request::get(format!("/sessions/{id}"))).await;
    let revisions = service.surely(&Request::get(format!("/sessions/{id}/revisions?limit=1000"))).await;
    let page = service.surely(&Request::get(format!("/sessions/{id}/messages?limit=1000"))).await;
    assert_eq!(page["next"], Value::Null, "sessions are short enough for one page");
    // Noted before it is sent: so whatever is there is known of now.
    let sent = book.known().clone();

    let items = page["items"].as_array().expect("a list");
    let mut names = Vec::new();
    for (seq, item) in (1..).zip(items) {
        assert_eq!(number(&item["seq"]), seq, "a hole in {id}");
        let name = Name::of_message(&item["message"]);
        assert_eq!(item["message"], name.message(), "{id}: not as it was given");
        names.push(name);
    }
    assert!(are_whole(&names), "{id}: half an exchange: {names:?}");
    let mut seen = BTreeSet::new();
    for name in names.iter().filter(|name| name.place == 1) {
        assert!(seen.insert(name.exchange), "{id}: exchange {} is there twice", name.exchange);
        let in_order = seen.last() == Some(&name.exchange) || !known.in_turn.contains(&name.exchange);
        assert!(in_order, "{id}: exchange {} was acknowledged before a later one was sent", name.exchange);
        let of = sent.acknowledged.get(&name.exchange).map(|(of, _)| of).or(sent.unknown.get(&name.exchange));
        assert_eq!((name.session, of), (book.number, Some(&name.of)), "{id}: nobody sent {name}");
    }
    for (exchange, (of, first_seq)) in &known.acknowledged {
        let there = names.get(first_seq - 1..first_seq - 1 + of);
        let expected = book.names(*exchange, *of);
        assert_eq!(there, Some(&expected[..]), "{id}: exchange {exchange} was acknowledged at {first_seq}");
    }

    // Whoever stored it may have been killed before it was indexed.
    if let Some((exchange, (of, first_seq))) = known.acknowledged.last_key_value() {
        let name = book.names(*exchange, *of)[0];
        let query = format!("/search?session_id={id}&neighbours=0&q=%22{name}%22");
        let found = service.surely(&Request::get(query)).await;
        let hits: Vec<usize> =
            found["items"].as_array().expect("a list").iter().map(|hit| number(&hit["seq"])).collect();
        assert_eq!(hits, [*first_seq], "{id}: {name}");
    }

    let cursor = number(&state["cursor"]);
    assert!(cursor <= number(&state["last_seq"]) && number(&state["last_seq"]) <= names.len(), "{state}");
    let belongs = |text: &Value, through: usize| {
        let covered = Covered::read(text.as_str().expect("a text"));
        assert!(covered.is(&names[..through]), "{id}: not the first {through} messages: {covered:?}");
    };
    belongs(&state["summary"]["text"], cursor);
    let mut revisions = revisions["items"].as_array().expect("a list").clone();
    revisions.reverse();
    assert!(revisions.len() >= number(&state["summary"]["revision"]), "{id}: a revision is lost");
    let mut covered = 0;
    for (index, revision) in (1..).zip(&revisions) {
        assert_eq!(number(&revision["revision"]), index, "{id}");
        assert_eq!(number(&revision["from_seq"]), covered + 1, "{id}: a hole or a double: {revision}");
        let to = number(&revision["to_seq"]);
        assert_eq!(number(&revision["cursor"]), to, "{id}: {revision}");
        let added = Covered::read(revision["added"].as_str().expect("a text"));
        assert!(added.is(&names[covered..to]), "{id}: {revision}");
        belongs(&revision["text"], to);
        if index == number(&state["summary"]["revision"]) {
            assert_eq!((to, &revision["text"]), (cursor, &state["summary"]["text"]), "{id}");
        }
        covered = to;
    }
    names
}

/// Asks for a context of a session that nobody writes to any more.
pub(crate) async fn context(service: &Service, book: &Book) {
    let known = book.known().clone();
    let path = format!("/sessions/{}/context", book.id());
    check_context(&service.surely(&Request::post(path, serde_json::json!({}))).await, book, &known);
}
