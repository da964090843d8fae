//! Does what a story says, and compares each answer with the model's.

use super::answer::{Answer, send};
use super::contract::{self, MOST, Message, Session, Tenant, USERS, Verdict, metadata};
use super::story::{Condition, Exchange, Op, Step};
use super::support::app::TestApp;
use super::visible;
use reqwest::{Method, RequestBuilder};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(super) struct Teller {
    clients: [TestApp; 3],
    tenants: [Tenant; 2],
    /// The last export, and what the session was then.
    exported: Option<(String, Session)>,
    step: usize,
}

#[derive(Deserialize)]
struct Messages {
    messages: Vec<Box<RawValue>>,
}

impl Teller {
    pub(super) fn new(clients: [TestApp; 3]) -> Self {
        Self { clients, tenants: [Tenant::default(), Tenant::default()], exported: None, step: 0 }
    }

    pub(super) async fn tell(mut self, story: Vec<Step>) {
        for Step { client, op } in story {
            self.step += 1;
            self.tell_op(client, &op).await;
            // Of both tenants: what one does is nothing to the other.
            if let Some(id) = session_of(&op) {
                self.tenants[0].check_session(&self.clients[0], id).await;
                self.tenants[1].check_session(&self.clients[2], id).await;
            }
        }
        self.tenants[0].check(&self.clients[1]).await;
        self.tenants[1].check(&self.clients[2]).await;
    }

    async fn tell_op(&mut self, client: usize, op: &Op) {
        let (app, tenant) = (&self.clients[client], &mut self.tenants[client / 2]);
        match *op {
            Op::Exchange(ref exchange) => exchange_with(app, tenant, exchange, self.step).await,
            Op::Invalid { session, key } => {
                let body = r#"{"messages":[{"role":"user","content":"a"},{"role":"user"}]}"#;
                let request =
                    keyed(app.request(Method::POST, &format!("/sessions/s{session}/exchanges")), key);
                send(with_json(request, body)).await.problem(422, "invalid-input");
            }
            Op::Context { session, inline, user } => context(app, tenant, session, inline, user).await,
            Op::Messages { session, descending, limit, after } => {
                tenant.check_messages(app, session, descending, limit, after).await;
            }
            Op::Sessions { user, limit } => tenant.check_sessions(app, user, limit).await,
            Op::Metadata { session, metadata: given } => {
                let given = metadata(given);
                let request = app.request(Method::PATCH, &format!("/sessions/s{session}"));
                let answer = send(with_json(request, &format!(r#"{{"metadata":{given}}}"#))).await;
                let Some(session) = known(tenant, session, &answer) else { return };
                assert!(answer.text.contains(&format!(r#""metadata":{given}"#)), "{answer:?}");
                session.metadata = given;
            }
            Op::WriteMemory { user, condition } => {
                write_memory(app, tenant, user, condition, self.step).await;
            }
            Op::ReadMemory { user } => tenant.check_memory(app, user).await,
            Op::Consolidate { session: id } => {
                let answer =
                    send(app.request(Method::POST, &format!("/sessions/s{id}/consolidations"))).await;
                let Some(session) = known(tenant, id, &answer) else { return };
                let ends = session.run(true);
                assert_eq!(answer.status, if ends.is_empty() { 200 } else { 201 }, "{answer:?}");
                consolidated(app, id, session, &ends).await;
                let newest = if ends.is_empty() { None } else { session.revisions.last() };
                assert_eq!(Some(&answer.ok(answer.status)), newest.or(Some(&Value::Null)));
            }
            Op::Revisions { session, limit } => tenant.check_revisions(app, session, limit).await,
            Op::Restore { session, revision } => restore(app, tenant, session, revision).await,
            Op::EraseSession { session } => {
                let answer = send(app.request(Method::DELETE, &format!("/sessions/s{session}"))).await;
                if known(tenant, session, &answer).is_some() {
                    answer.ok(204);
                    tenant.sessions.remove(&session);
                }
            }
            Op::EraseUser { user } => {
                let path = format!("/users/{}", USERS[usize::from(user)]);
                let answer = send(app.request(Method::DELETE, &path)).await;
                if tenant.erase_user(user) {
                    answer.ok(204);
                } else {
                    answer.problem(404, "user-not-found");
                }
                for id in 0..3 {
                    tenant.check_session(app, id).await;
                }
            }
            Op::Export { session } => {
                let answer = send(app.request(Method::GET, &format!("/sessions/s{session}/export"))).await;
                if let Some(session) = known(tenant, session, &answer) {
                    assert_eq!(answer.status, 200, "{answer:?}");
                    // Keys stay where they were given.
                    self.exported = Some((answer.text, Session { keys: BTreeMap::new(), ..session.clone() }));
                }
            }
            Op::Import { session, user } => {
                if let Some((lines, exported)) = &self.exported {
                    import(app, tenant, session, user, lines, exported).await;
                }
            }
            Op::ImportLines { session, messages } => import_lines(app, tenant, session, messages).await,
        }
    }
}

fn session_of(op: &Op) -> Option<u8> {
    match op {
        Op::Exchange(exchange) => Some(exchange.session),
        Op::Invalid { session, .. }
        | Op::Context { session, .. }
        | Op::Metadata { session, .. }
        | Op::Consolidate { session }
        | Op::Restore { session, .. }
        | Op::EraseSession { session }
        | Op::Import { session, .. }
        | Op::ImportLines { session, .. } => Some(*session),
        _ => None,
    }
}

/// The session; where there is none, the answer has to say so.
fn known<'a>(tenant: &'a mut Tenant, id: u8, answer: &Answer) -> Option<&'a mut Session> {
    let session = tenant.sessions.get_mut(&id);
    if session.is_none() {
        answer.problem(404, "session-not-found");
    }
    session
}

fn with_json(request: RequestBuilder, body: &str) -> RequestBuilder {
    request.header("content-type", "application/json").body(body.to_owned())
}

fn keyed(request: RequestBuilder, key: Option<u8>) -> RequestBuilder {
    if let Some(key) = key { request.header("idempotency-key", format!("k{key}")) } else { request }
}

async fn exchange_with(app: &TestApp, tenant: &mut Tenant, exchange: &Exchange, step: usize) {
    let mark = exchange.key.map_or_else(|| format!("m{step}"), |key| format!("k{key}"));
    let messages = contract::messages(exchange.form, &mark);
    let named = |user| format!(r#","user_id":"{}""#, USERS[usize::from(user)]);
    let user = exchange.user.map_or(String::new(), named);
    let given =
        exchange.metadata.map_or(String::new(), |given| format!(r#","metadata":{}"#, metadata(given)));
    let body = format!(r#"{{"messages":[{}]{user}{given}}}"#, messages.join(","));
    let request = app.request(Method::POST, &format!("/sessions/s{}/exchanges", exchange.session));
    let answer = send(with_json(keyed(request, exchange.key), &body)).await;
    match tenant.judge(exchange) {
        Verdict::KeyReused => answer.problem(422, "idempotency-key-reused"),
        Verdict::OtherUser => answer.problem(409, "other-user"),
        Verdict::Replayed(expected) => {
            assert_eq!((answer.ok(201), answer.replayed), (expected, true), "{answer:?}");
        }
        Verdict::Appended => {
            let given = answer.ok(201);
            let before = tenant.sessions.get(&exchange.session).map_or(0, |session| session.history.len());
            let last = before + messages.len();
            let seqs = (&given["first_seq"], &given["last_seq"], &given["message_count"], answer.replayed);
            assert_eq!(seqs, (&json!(before + 1), &json!(last), &json!(messages.len()), false), "{answer:?}");
            tenant.append(exchange, &messages, &given);
        }
    }
}

async fn context(app: &TestApp, tenant: &mut Tenant, id: u8, inline: bool, user: Option<u8>) {
    let mode = if inline { "inline" } else { "off" };
    let mut body = json!({"mode": mode, "user_message": "And now?"});
    if let Some(user) = user {
        body["user_id"] = USERS[usize::from(user)].into();
    }
    let request = app.request(Method::POST, &format!("/sessions/s{id}/context"));
    let answer = send(with_json(request, &body.to_string())).await;
    let owner = tenant.sessions.get(&id).map(|session| session.user);
    if owner.is_some_and(|owner| user.is_some_and(|user| user != owner)) {
        return answer.problem(409, "other-user");
    }
    let given = answer.ok(200);
    let mut run = Vec::new();
    if let Some(session) = tenant.sessions.get_mut(&id) {
        let before = session.cursor();
        if inline {
            run = session.run(false);
            consolidated(app, id, session, &run).await;
        }
        assert_eq!(given["consolidation"]["messages"], session.cursor() - before);
    }
    let session = tenant.sessions.get(&id);
    let history = session.map_or(&[][..], |session| &session.history);
    let cursor = session.map_or(0, Session::cursor);
    let summary = session.map_or("", Session::summary);
    let revision = session.map_or(0, |session| session.revisions.len());
    let outcome = match (inline, run.is_empty()) {
        (false, _) => "disabled",
        (true, true) => "not_due",
        (true, false) => "consolidated",
    };
    assert_eq!(given["consolidation"]["outcome"], outcome, "{given}");
    assert_eq!(given["summary"]["revision"], revision);
    let reader = owner.or(user).unwrap_or(0);
    assert_eq!(given["memory"]["version"], tenant.version(reader));
    // Summary, omitted ranges and verbatim part cover 1 … last_seq, each message once.
    let coverage = &given["coverage"];
    assert_eq!(
        (&coverage["last_seq"], &coverage["summary_through"]),
        (&json!(history.len()), &json!(cursor))
    );
    let mut next = cursor + 1;
    for omitted in coverage["omitted"].as_array().expect("ranges") {
        assert!(history.len() - cursor > MOST && omitted["reason"] == "max_history_messages", "{coverage}");
        assert_eq!(omitted["from_seq"], next, "{coverage}");
        next = usize::try_from(omitted["to_seq"].as_u64().expect("a seq")).expect("small") + 1;
    }
    assert_eq!(coverage["verbatim_from"], next, "{coverage}");
    let verbatim = &history[next - 1..];
    assert!(
        verbatim.len() <= MOST && !verbatim.first().is_some_and(|first| first.json.contains("tool_call_id"))
    );
    let parts: Messages = serde_json::from_str(&answer.text).expect("messages");
    let mut parts: Vec<_> = parts.messages.iter().map(|message| message.get()).collect();
    let system: Value = serde_json::from_str(parts[0]).expect("JSON");
    let system = if system["role"] == "system" { system["content"].as_str().expect("text") } else { "" };
    if !system.is_empty() {
        parts.remove(0);
    }
    for (heading, text) in [("## Your Memory", tenant.memory(reader)), ("## Session Summary", summary)] {
        assert_eq!(system.contains(&format!("{heading}\n\n{text}")), !text.is_empty(), "{system}");
    }
    assert_eq!(parts.pop(), Some(r#"{"role":"user","content":"And now?"}"#));
    assert_eq!(parts, verbatim.iter().map(|message| message.json.as_str()).collect::<Vec<_>>());
}

/// Takes the revisions of a run into the model, if they are what they have to be. What they say is the summariser's.
async fn consolidated(app: &TestApp, id: u8, session: &mut Session, ends: &[usize]) {
    for end in ends {
        let number = session.revisions.len() + 1;
        let made =
            send(app.request(Method::GET, &format!("/sessions/s{id}/revisions/{number}"))).await.ok(200);
        let range = (&made["kind"], &made["from_seq"], &made["to_seq"], &made["cursor"]);
        let expected = (&json!("consolidation"), &json!(session.cursor() + 1), &json!(end), &json!(end));
        assert_eq!((&made["revision"], range), (&json!(number), expected), "{made}");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let added = text(&made["added"]);
        assert!(!added.is_empty());
        let whole = match session.summary() {
            "" => added,
            before => format!("{before}\n\n{added}"),
        };
        let compressed = made["meta"].is_object();
        assert_eq!(text(if compressed { &made["meta"]["text_before"] } else { &made["text"] }), whole);
        session.revisions.push(made);
    }
}

async fn restore(app: &TestApp, tenant: &mut Tenant, id: u8, revision: usize) {
    let path = format!("/sessions/s{id}/revisions/{revision}/restore");
    let answer = send(app.request(Method::POST, &path)).await;
    let Some(session) = known(tenant, id, &answer) else { return };
    let (cursor, text) = match revision.checked_sub(1).map(|index| session.revisions.get(index)) {
        None => (json!(0), json!("")),
        Some(Some(target)) => (target["cursor"].clone(), target["text"].clone()),
        Some(None) => return answer.problem(404, "revision-not-found"),
    };
    let made = answer.ok(201);
    let shown = (&made["kind"], &made["revision"], &made["cursor"], &made["text"], &made["from_seq"]);
    let number = session.revisions.len() + 1;
    assert_eq!(shown, (&json!("restore"), &json!(number), &cursor, &text, &Value::Null), "{made}");
    session.revisions.push(made);
}

async fn write_memory(app: &TestApp, tenant: &mut Tenant, user: u8, condition: Condition, step: usize) {
    let version = tenant.version(user);
    let tag = match condition {
        Condition::None => None,
        Condition::Any => Some("*".to_owned()),
        Condition::Current => Some(format!("\"{version}\"")),
        Condition::Before => Some(format!("\"{}\"", version.saturating_sub(1))),
        Condition::After => Some(format!("\"{}\"", version + 1)),
    };
    let refused = match condition {
        Condition::Before => version > 0,
        Condition::After => true,
        _ => false,
    };
    let content = format!("Likes tea since {step}.");
    let mut request = app.request(Method::PUT, &format!("/users/{}/memory", USERS[usize::from(user)]));
    if let Some(tag) = tag {
        request = request.header("if-match", tag);
    }
    let answer = send(with_json(request, &json!({ "content": content }).to_string())).await;
    if refused {
        return answer.problem(412, "other-version");
    }
    let written = answer.ok(200);
    assert_eq!((&written["version"], &written["content"]), (&json!(version + 1), &json!(content)));
    tenant.memories.entry(user).or_default().push(content);
}

async fn import(
    app: &TestApp,
    tenant: &mut Tenant,
    id: u8,
    user: Option<u8>,
    lines: &str,
    exported: &Session,
) {
    let owner = user.unwrap_or(exported.user);
    let query = user.map_or(String::new(), |user| format!("?user_id={}", USERS[usize::from(user)]));
    let answer = send_lines(app, id, &query, lines).await;
    let status = match tenant.sessions.get(&id) {
        None => 201,
        Some(known) if known.user == owner && known.begins_with(exported) => 200,
        Some(_) => return answer.problem(409, "session-exists"),
    };
    let session = tenant.sessions.entry(id).or_insert_with(|| Session { user: owner, ..exported.clone() });
    let expected = json!({
        "session_id": format!("s{id}"), "user_id": USERS[usize::from(owner)],
        "messages": exported.history.len(), "revisions": exported.revisions.len(),
        "last_seq": session.history.len(), "cursor": session.cursor(),
    });
    assert_eq!(answer.ok(status), expected);
}

/// Lines of messages alone: the same lines are the same import, whoever's the session is and whenever it was made.
async fn import_lines(app: &TestApp, tenant: &mut Tenant, id: u8, count: u8) {
    let lines: Vec<_> = (0..count)
        .flat_map(|line| contract::messages(super::story::Form::User, &format!("l{line}")))
        .collect();
    let answer = send_lines(app, id, "", &lines.join("\n")).await;
    let Some(known) = tenant.sessions.get(&id) else {
        assert_eq!(answer.ok(201)["last_seq"], lines.len());
        let state = app.get(&format!("/sessions/s{id}")).await;
        let history: Vec<Message> =
            visible::history(app, id).await.into_iter().map(|(_, message)| message).collect();
        assert!(history.iter().map(|message| &message.json).eq(&lines));
        let updated_at = state["updated_at"].as_str().expect("a time").to_owned();
        let (keys, revisions, metadata) = (BTreeMap::new(), Vec::new(), "{}".to_owned());
        tenant.sessions.insert(id, Session { user: 0, metadata, history, revisions, keys, updated_at });
        return;
    };
    let begins = known.history.len() >= lines.len()
        && known.history.iter().zip(&lines).all(|(has, line)| has.json == *line);
    if begins {
        answer.ok(200);
    } else {
        answer.problem(409, "session-exists");
    }
}

async fn send_lines(app: &TestApp, id: u8, query: &str, lines: &str) -> Answer {
    let request = app.request(Method::POST, &format!("/sessions/s{id}/import{query}"));
    send(request.header("content-type", "application/x-ndjson").body(lines.to_owned())).await
}
