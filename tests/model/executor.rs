//! Runs the operations of a scenario against the service and compares each response with the reference model.

use super::harness::{self, covering, is_meta, until};
use super::operations::{
    Condition, Exchange, Mode, ModelFault, OnDivergence, Operation, Period, RetentionLevel, Scenario,
    ServiceSettings, Step, Sync,
};
use super::reference_model::{
    AppendOutcome, ClientList, Message, Recorded, Revision, Session, SyncOutcome, Tenant, USERS, metadata,
};
use super::support::client::{Request, Response, TestClient, assert_includes};
use super::support::model_server::{Behaviour, ModelServer};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::sleep;

pub(super) struct Executor {
    clients: [TestClient; 3],
    model: ModelServer,
    settings: ServiceSettings,
    tenants: [Tenant; 2],
    /// The last export, and the session at that time.
    exported: Option<(String, Session)>,
    has_hung: bool,
    step: usize,
}

impl Executor {
    pub(super) fn new(clients: [TestClient; 3], model: ModelServer, settings: ServiceSettings) -> Self {
        let tenants = [Tenant::default(), Tenant::default()];
        Self { clients, model, settings, tenants, exported: None, has_hung: false, step: 0 }
    }

    pub(super) async fn run(mut self, steps: Vec<Step>) {
        for Step { client, operation } in steps {
            self.step += 1;
            self.execute(client, &operation).await;
            // An operation must not change the other tenant's session with the same id.
            for id in 0..3 {
                self.tenants[0].check_session(&self.clients[0], &format!("s{id}")).await;
                self.tenants[1].check_session(&self.clients[2], &format!("s{id}")).await;
            }
        }
        self.tenants[0].check_all(&self.clients[1]).await;
        self.tenants[1].check_all(&self.clients[2]).await;
    }

    async fn execute(&mut self, client: usize, operation: &Operation) {
        match *operation {
            Operation::BuildContext { session, mode, user, fault } => {
                return self.build_context(client, session, mode, user, fault).await;
            }
            Operation::Consolidate { session, fault } => {
                return self.consolidate(client, session, fault).await;
            }
            _ => {}
        }
        let (app, tenant) = (&self.clients[client], &mut self.tenants[client / 2]);
        match *operation {
            Operation::AppendExchange(ref exchange) => append(app, tenant, exchange, &self.settings).await,
            Operation::Sync(ref request) => sync(app, tenant, request, &self.settings).await,
            Operation::AppendInvalid { session, key } => {
                let body = r#"{"messages":[{"role":"user","content":"a"},{"role":"robot"}]}"#;
                let request = app.post(&format!("/sessions/s{session}/exchanges"), body);
                with_key(request, key).await.problem(422, "invalid-input");
            }
            Operation::Restore { session, revision } => restore(app, tenant, session, revision).await,
            Operation::EditSummary { session, based_on } => {
                edit_summary(app, tenant, session, based_on, self.step).await;
            }
            Operation::ListMessages { session, descending, limit, after } => {
                tenant.check_messages(app, &format!("s{session}"), descending, limit, after).await;
            }
            Operation::ListRevisions { session, limit } => {
                tenant.check_revisions(app, &format!("s{session}"), limit).await;
            }
            Operation::ListSessions { user, limit } => tenant.check_sessions(app, user, limit).await,
            Operation::SetMetadata { session, metadata: number } => {
                let metadata = metadata(number);
                let body = format!(r#"{{"metadata":{metadata}}}"#);
                let response = app.patch(&format!("/sessions/s{session}"), body).await;
                let Some(session) = known_session(tenant, session, &response) else { return };
                assert!(response.text.contains(&format!(r#""metadata":{metadata}"#)), "{response:?}");
                session.metadata = metadata;
            }
            Operation::WriteMemory { user, condition } => {
                write_memory(app, tenant, user, condition, self.step).await;
            }
            Operation::ReadMemory { user } => tenant.check_memory(app, user).await,
            Operation::EraseSession { session } => {
                let response = app.delete(&format!("/sessions/s{session}")).await;
                if tenant.bound.remove(&session).is_some() {
                    response.ok(204);
                } else if known_session(tenant, session, &response).is_some() {
                    response.ok(204);
                    tenant.erase_session(session);
                }
            }
            Operation::EraseUser { user } => {
                let path = format!("/users/{}", USERS[usize::from(user)]);
                let response = app.delete(&path).await;
                if tenant.erase_user(user) {
                    response.ok(204);
                } else {
                    response.problem(404, "user-not-found");
                }
            }
            Operation::Export { session } => {
                let response = app.get(&format!("/sessions/s{session}/export")).await;
                if let Some(session) = known_session(tenant, session, &response) {
                    assert_eq!(response.status, 200, "{response:?}");
                    // An export contains neither idempotency keys, nor the state of failed consolidations, nor a
                    // retention period.
                    let session = Session {
                        keys: BTreeMap::new(),
                        failures: 0,
                        forked_from: Value::Null,
                        retention: None,
                        ..session.clone()
                    };
                    self.exported = Some((response.text, session));
                }
            }
            Operation::Import { session, user } => {
                if let Some((lines, exported)) = &self.exported {
                    import(app, tenant, session, user, lines, exported).await;
                }
            }
            Operation::Fork { session, target, through } => fork(app, tenant, session, target, through).await,
            Operation::SetRetention { level, period } => {
                set_retention(app, tenant, level, period).await;
            }
            Operation::Expire { level } => expire(app, tenant, level).await,
            Operation::Redact { session, seq } => redact(app, tenant, session, seq).await,
            Operation::Rewind { session, after } => rewind(app, tenant, session, after).await,
            Operation::ImportMessages { session, count } => {
                import_messages(app, tenant, session, count).await;
            }
            Operation::BuildContext { .. } | Operation::Consolidate { .. } => {}
        }
    }

    /// Prepares the model for the next operation. It hangs at most once per scenario, because a timeout takes long.
    fn prepare_model(&mut self, fault: ModelFault) -> ModelFault {
        let may_hang = self.settings.short_model_timeout && !self.has_hung;
        let fault = if fault == ModelFault::Hang && !may_hang { ModelFault::Unavailable } else { fault };
        self.has_hung |= fault == ModelFault::Hang;
        self.model.default(behaviour(fault));
        fault
    }

    async fn consolidate(&mut self, client: usize, id: u8, fault: ModelFault) {
        let fault = self.prepare_model(fault);
        let (app, tenant) = (&self.clients[client], &mut self.tenants[client / 2]);
        let response = app.request(Method::POST, &format!("/sessions/s{id}/consolidations")).await;
        let Some(session) = known_session(tenant, id, &response) else { return };
        let run = session.predict_run(&self.settings, true, fault);
        let (failed, is_empty) = (run.failed, run.revisions.is_empty());
        verify_run(app, id, session, run.revisions, failed).await;
        match (failed, is_empty) {
            (true, _) => assert_eq!(response.status, 502, "{response:?}"),
            (false, true) => assert_eq!(response.ok(200), Value::Null),
            (false, false) => {
                assert_eq!(Some(&response.ok(201)), session.revisions.last().map(|last| &last.json));
            }
        }
    }

    async fn build_context(
        &mut self,
        client: usize,
        id: u8,
        mode: Mode,
        user: Option<u8>,
        fault: ModelFault,
    ) {
        let fault = self.prepare_model(fault);
        let (app, tenant) = (&self.clients[client], &mut self.tenants[client / 2]);
        let settings = &self.settings;
        let (owner, is_of_another) = (tenant.owner(id).or(user), tenant.is_of_another(id, user));
        if !is_of_another {
            tenant.bind(id, user);
        }
        let mut unknown = Session::new(None);
        let memory = owner.map_or("", |owner| tenant.memory(owner)).to_owned();
        let memory_version = owner.map_or(0, |owner| tenant.memory_version(owner));
        let exists = tenant.sessions.contains_key(&id);
        let session = tenant.sessions.get_mut(&id).unwrap_or(&mut unknown);
        let (mut mode, (mut outcome, run)) = (mode, session.predict_context(settings, mode, fault));
        if outcome == "scheduled" && run.revisions.is_empty() && !run.failed {
            // A background run without work leaves no trace, so the test could not wait for its end.
            (mode, outcome) = (Mode::Inline, "not_due");
        }

        let mut body = json!({"mode": mode.name(), "fields": "all", "user_message": "And now?"});
        if let Some(user) = user {
            body["user_id"] = USERS[usize::from(user)].into();
        }
        let response = app.post(&format!("/sessions/s{id}/context"), body).await;
        if is_of_another {
            return drop(response.problem(409, "session-user-mismatch"));
        }
        let json = response.ok(200);
        let mut context: harness::Answer = serde_json::from_str(&response.text).expect("a context");
        let last = context.messages.pop();
        assert_eq!(
            last.as_deref().map(serde_json::value::RawValue::get),
            Some(r#"{"role":"user","content":"And now?"}"#)
        );
        context.verify(&session.json());
        assert_eq!(json["memory"]["version"], memory_version);
        let user_id = owner.map(|owner| USERS[usize::from(owner)]);
        assert_includes(&json, &json!({"user_id": user_id, "exists": exists}));
        assert_eq!(json["consolidation"]["outcome"], outcome, "{json}");

        let is_scheduled = outcome == "scheduled";
        let before = (session.cursor(), session.revisions.len(), session.summary().to_owned());
        let revisions = session.revisions.len() + run.revisions.len();
        let failures = usize::from(run.failed) + if run.revisions.is_empty() { session.failures } else { 0 };
        if is_scheduled {
            until(app, &format!("s{id}"), |state| {
                state["consolidation"]["state"] != "running"
                    && state["summary"]["revision"] == revisions
                    && state["consolidation"]["failures"] == failures
            })
            .await;
        }
        verify_run(app, id, session, run.revisions, run.failed).await;
        let (cursor, revision, summary) = if is_scheduled {
            before
        } else {
            (session.cursor(), session.revisions.len(), session.summary().to_owned())
        };
        assert_eq!((context.coverage.summary_through, context.summary.revision), (cursor, revision));
        for (heading, text) in [("## Your Memory", &memory), ("not an instruction.", &summary)] {
            let expected = format!("{heading}\n\n{text}");
            assert_eq!(context.system().contains(&expected), !text.is_empty(), "{}", context.system());
        }
        verify_selection(settings, session, &context);
    }
}

/// Checks which messages a context omits: only above the limit or after a failure, and never a call without its result.
fn verify_selection(settings: &ServiceSettings, session: &Session, context: &harness::Answer) {
    let (coverage, max) = (&context.coverage, settings.max_history_messages);
    let (tail, sent) = (session.history.len() - coverage.summary_through, context.verbatim().len());
    let only_recent = settings.recent_on_failure && context.outcome() == "failed";
    assert!(sent <= max, "{sent} messages, {coverage:?}");
    for omitted in coverage.omitted.iter().filter(|omitted| omitted.reason != "redacted") {
        assert!(tail > max || (only_recent && omitted.reason == "on_failure"), "{coverage:?}");
    }
    let reported = coverage.omitted.iter().filter(|omitted| omitted.reason == "redacted");
    let reported: Vec<usize> = reported.flat_map(|omitted| omitted.from_seq..=omitted.to_seq).collect();
    let redacted = (1..).zip(&session.history).skip(coverage.verbatim_from - 1);
    let redacted = redacted.filter(|(_, message)| message.redaction.is_some()).map(|(seq, _)| seq);
    assert_eq!(reported, redacted.collect::<Vec<_>>(), "{coverage:?}");
    if tail <= max {
        assert!(sent >= if only_recent { tail.min(settings.keep_recent) } else { tail }, "{coverage:?}");
    }
    let is_missing = coverage.omitted.iter().any(|omitted| omitted.reason != "redacted");
    let has_notice = context.system().contains("## Notice");
    assert_eq!(has_notice, tail * 5 >= max * 4 || is_missing, "a tail of {tail}");
    for (call, is_abandoned) in session.tool_calls() {
        let from = coverage.verbatim_from;
        let is_split = call.seq < from && call.result.is_some_and(|result| result >= from);
        assert!(
            !is_split || tail > max || (is_abandoned && call.seq <= coverage.summary_through),
            "{call:?}: {coverage:?}"
        );
    }
}

/// Compares the new revisions with the predicted ones and adds them to the model.
async fn verify_run(app: &TestClient, id: u8, session: &mut Session, revisions: Vec<Revision>, failed: bool) {
    if !revisions.is_empty() {
        session.failures = 0;
    }
    session.failures += usize::from(failed);
    for mut revision in revisions {
        let number = session.revisions.len() + 1;
        let path = format!("/sessions/s{id}/revisions/{number}");
        revision.json = app.get(&path).await.ok(200);
        revision.assert_matches(number, &revision.json);
        session.revisions.push(revision);
    }
}

fn behaviour(fault: ModelFault) -> Behaviour {
    let half = || "HALF".to_owned();
    match fault {
        ModelFault::None => Behaviour::reply(covering),
        ModelFault::Unavailable => Behaviour::fail(503, "down"),
        ModelFault::Hang => Behaviour::Hang,
        ModelFault::Empty => Behaviour::answer(""),
        ModelFault::BareNone => Behaviour::answer("None"),
        ModelFault::BrokenConnection => Behaviour::BreakOff(half()),
        ModelFault::MissingEnd => Behaviour::EndEarly(half()),
        ModelFault::LengthLimit => Behaviour::Finish(half(), "length"),
        ModelFault::Garbage => Behaviour::garbage(),
        ModelFault::EmptyCompression => {
            Behaviour::reply(|call| if is_meta(call) { " ".to_owned() } else { covering(call) })
        }
        ModelFault::LongerCompression => Behaviour::reply(|call| {
            if is_meta(call) { "more ".repeat(call.user().split(' ').count()) } else { covering(call) }
        }),
    }
}

impl Scenario {
    /// Returns the settings as paths and values.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let settings = &self.settings;
        let on_failure = if settings.recent_on_failure { "recent" } else { "verbatim" };
        let backoff = if settings.long_backoff { "1h" } else { "1us" };
        let mut values = vec![
            ("consolidation.threshold", settings.threshold.to_string()),
            ("consolidation.keep_recent", settings.keep_recent.to_string()),
            ("consolidation.max_history_messages", settings.max_history_messages.to_string()),
            ("consolidation.summary_word_limit", settings.summary_word_limit.to_string()),
            ("consolidation.on_failure", on_failure.to_owned()),
            ("consolidation.retry_initial", backoff.to_owned()),
            ("consolidation.retry_max", backoff.to_owned()),
            ("retention.interval", "200ms".to_owned()),
        ];
        if settings.short_model_timeout {
            values.push(("llm.models.small.timeout", "2s".to_owned()));
        }
        values
    }
}

/// Returns the session; if the model has none, the response must be a 404.
fn known_session<'a>(tenant: &'a mut Tenant, id: u8, response: &Response) -> Option<&'a mut Session> {
    let session = tenant.sessions.get_mut(&id);
    if session.is_none() {
        response.problem(404, "session-not-found");
    }
    session
}

fn with_key(request: Request, key: Option<u8>) -> Request {
    if let Some(key) = key { request.header("idempotency-key", format!("k{key}")) } else { request }
}

async fn append(app: &TestClient, tenant: &mut Tenant, exchange: &Exchange, settings: &ServiceSettings) {
    let expected = tenant.predict_append(exchange);
    let messages = tenant.render(exchange, settings);
    let body = if let AppendOutcome::Replayed(Recorded { exchange: Some(_), body, .. }) = &expected {
        body.clone()
    } else {
        let user = |user| format!(r#","user_id":"{}""#, USERS[usize::from(user)]);
        let user = exchange.user.map_or(String::new(), user);
        let metadata = |number| format!(r#","metadata":{}"#, metadata(number));
        let metadata = exchange.metadata.map_or(String::new(), metadata);
        format!(r#"{{"messages":[{}]{user}{metadata}}}"#, messages.join(","))
    };
    let request = app.post(&format!("/sessions/s{}/exchanges", exchange.session), &body);
    let response = with_key(request, exchange.key).await;
    match expected {
        AppendOutcome::KeyReused => drop(response.problem(422, "idempotency-key-reused")),
        AppendOutcome::UserMismatch => drop(response.problem(409, "session-user-mismatch")),
        AppendOutcome::Replayed(recorded) if recorded.takes_any_body => {
            assert_same_place(&response, &recorded.response);
        }
        AppendOutcome::Replayed(recorded) => {
            assert_eq!((response.ok(201), response.is_replay()), (recorded.response, true), "{response:?}");
        }
        AppendOutcome::Appended => {
            let json = response.ok(201);
            let before = tenant.sessions.get(&exchange.session).map_or(0, |session| session.history.len());
            let (first, count) = (before + 1, messages.len());
            let expected = json!({"first_seq": first, "last_seq": before + count, "message_count": count});
            assert_includes(&json, &expected);
            assert!(!response.is_replay(), "{response:?}");
            tenant.append(exchange, &messages, &body, &json);
        }
    }
}

/// Checks that a request was replayed whose body is not compared, because a message of it was redacted.
fn assert_same_place(response: &Response, recorded: &Value) {
    let json = response.ok(201);
    assert!(response.is_replay(), "{response:?}");
    for field in ["first_seq", "last_seq"] {
        assert_eq!(json[field], recorded[field], "{response:?}");
    }
}

/// Syncs the list of a client. Every list begins with a system message, which is ignored.
async fn sync(app: &TestClient, tenant: &mut Tenant, sync: &Sync, settings: &ServiceSettings) {
    let list = tenant.client_list(sync, settings);
    let path = format!("/sessions/s{}/sync", sync.session);
    let session = tenant.sessions.get(&sync.session);
    let recorded = session.and_then(|session| session.keys.get(&sync.key?)).filter(|_| sync.is_retry);
    let body = if let Some(recorded) = recorded.filter(|recorded| recorded.exchange.is_none()) {
        recorded.body.clone()
    } else {
        sync_body(sync, &list)
    };
    let expected = tenant.predict_sync(sync, &list, &body);
    // An earlier fork that is shorter than the list gets messages of the history in the Anthropic format, which the model cannot
    // predict.
    let new = match expected {
        SyncOutcome::Matched(_, matched) => &list[matched..],
        SyncOutcome::Forked { through, .. } => &list[through..],
        _ => &[],
    };
    if sync.anthropic && new.iter().any(|(given, sent)| given != sent) {
        return;
    }
    let request = || with_key(app.post(&path, &body), sync.key);
    let response = request().await;
    let (id, known, matched, origin) = match expected {
        SyncOutcome::KeyReused => return drop(response.problem(422, "idempotency-key-reused")),
        SyncOutcome::UserMismatch => return drop(response.problem(409, "session-user-mismatch")),
        SyncOutcome::Exists => return drop(response.problem(409, "session-exists")),
        SyncOutcome::InvalidId => return assert_eq!(response.fields(), ["new_id"]),
        SyncOutcome::Replayed(_, recorded) if recorded.takes_any_body => {
            return assert_same_place(&response, &recorded.response);
        }
        SyncOutcome::Replayed(id, mut recorded) => {
            // An erased session is not named any more.
            let origin = tenant.find(&id).map_or(Value::Null, |session| session.forked_from.clone());
            if !recorded.response["forked_from"].is_null() && origin.is_null() {
                recorded.response["forked_from"] = Value::Null;
                recorded.response["diverged_at"] = Value::Null;
            }
            assert_eq!((response.ok(201), response.is_replay()), (recorded.response, true), "{response:?}");
            return;
        }
        SyncOutcome::Diverged(seq) => {
            response.problem(409, "history-diverged");
            assert_eq!(response.json()["diverged_at"], seq, "{response:?}");
            return;
        }
        SyncOutcome::Matched(id, matched) => {
            let session = tenant.find(&id);
            let is_fork = id != format!("s{}", sync.session);
            let origin = session.filter(|_| is_fork).map_or(Value::Null, |fork| fork.forked_from.clone());
            let owner = session.map_or_else(|| tenant.owner(sync.session), |session| session.user);
            (id, (session.map_or(0, |session| session.history.len()), owner), matched, origin)
        }
        SyncOutcome::Forked { id, attempt, through } => {
            let json = response.ok(201);
            let chosen = json["session_id"].as_str().expect("an id").to_owned();
            let origin =
                json!({"session_id": format!("s{}", sync.session), "through_seq": through, "kind": "fork"});
            let created_at = updated_at(app, &chosen).await;
            let owner = tenant.owner(sync.session);
            if let Some(id) = &id {
                assert_eq!(*id, chosen, "the same request has the same fork");
            } else {
                assert!(tenant.find(&chosen).is_none(), "{chosen} is not new");
            }
            tenant.add_fork(sync, (through, attempt), &list[through..], (&body, &json), &created_at);
            check_synced(&response, sync, &chosen, (through, owner), through, list.len(), &origin);
            check_whole(app, tenant, &chosen).await;
            // A repetition stores nothing.
            let again = request().await;
            if sync.key.is_some() {
                assert_eq!((again.ok(201), again.is_replay()), (json, true), "{again:?}");
            } else {
                check_synced(&again, sync, &chosen, (list.len(), owner), list.len(), list.len(), &origin);
            }
            return;
        }
    };
    check_synced(&response, sync, &id, known, matched, list.len(), &origin);
    if matched < list.len() {
        let created_at = updated_at(app, &id).await;
        tenant.append_list((&id, sync), &list[matched..], (&body, &response.json()), &created_at);
    } else {
        tenant.update(&id, sync);
    }
}

/// Checks the response to a sync to a session that had this number of messages and this owner.
fn check_synced(
    response: &Response,
    sync: &Sync,
    id: &str,
    (known, owner): (usize, Option<u8>),
    matched: usize,
    listed: usize,
    origin: &Value,
) {
    let appended = listed - matched;
    let expected = json!({
        "session_id": id, "user_id": owner.or(sync.user).map(|user| USERS[usize::from(user)]),
        "matched": matched, "appended": appended,
        "diverged_at": origin["through_seq"].as_u64().map(|through| through + 1), "forked_from": origin,
        "first_seq": if appended == 0 { Value::Null } else { json!(matched + 1) }, "last_seq": known.max(listed),
    });
    let json = response.ok(if appended == 0 { 200 } else { 201 });
    assert_eq!((&json, response.is_replay()), (&expected, false), "{response:?}");
}

/// Returns the request with the list of a client.
fn sync_body(sync: &Sync, list: &ClientList) -> String {
    let system = r#"{"role":"system","content":"Be kind."}"#.to_owned();
    let mut messages = vec![system];
    for (_, sent) in list {
        // Clients of the Anthropic format send consecutive results as one message.
        let previous = messages.last_mut().filter(|previous| previous.contains("tool_result"));
        match previous.filter(|_| sent.contains("tool_result")) {
            Some(previous) => *previous = join_content(previous, sent),
            None => messages.push(sent.clone()),
        }
    }
    let messages = messages.join(",");
    let user = |user| format!(r#","user_id":"{}""#, USERS[usize::from(user)]);
    let user = sync.user.map_or(String::new(), user);
    let metadata = |number| format!(r#","metadata":{}"#, metadata(number));
    let metadata = sync.metadata.map_or(String::new(), metadata);
    let format = if sync.anthropic { r#","format":"anthropic""# } else { "" };
    let on_divergence = match sync.on_divergence {
        OnDivergence::Error => String::new(),
        OnDivergence::Fork => r#","on_divergence":"fork""#.to_owned(),
        OnDivergence::ForkTo(id) => format!(r#","on_divergence":"fork","new_id":"s{id}""#),
    };
    format!(r#"{{"messages":[{messages}]{user}{metadata}{format}{on_divergence}}}"#)
}

/// Joins the content blocks of two messages.
fn join_content(first: &str, second: &str) -> String {
    let [mut first, mut second]: [Value; 2] =
        [first, second].map(|json| serde_json::from_str(json).expect("JSON"));
    let blocks = second["content"].as_array_mut().map(std::mem::take).unwrap_or_default();
    first["content"].as_array_mut().expect("a list").extend(blocks);
    first.to_string()
}

async fn restore(app: &TestClient, tenant: &mut Tenant, id: u8, revision: usize) {
    let known = tenant.sessions.get(&id).map_or(0, |session| session.revisions.len());
    let target = revision % (known + 2);
    let path = format!("/sessions/s{id}/revisions/{target}/restore");
    let response = app.request(Method::POST, &path).await;
    let Some(session) = known_session(tenant, id, &response) else { return };
    if session.is_redacted(target) {
        return drop(response.problem(409, "revision-redacted"));
    }
    let Some(mut revision) = session.predict_restore(target) else {
        return drop(response.problem(404, "revision-not-found"));
    };
    revision.json = response.ok(201);
    revision.assert_matches(known + 1, &revision.json);
    session.revisions.push(revision);
    session.failures = 0;
}

async fn edit_summary(app: &TestClient, tenant: &mut Tenant, id: u8, based_on: Option<usize>, step: usize) {
    let session = tenant.sessions.get(&id);
    let (known, summary) = session.map_or((0, ""), |session| (session.revisions.len(), session.summary()));
    let based_on = based_on.map_or(known, |revision| revision % (known + 2));
    let summary = format!("{summary} Edited in step {step}.\n");
    let body = json!({"summary": summary, "based_on": based_on});
    let response = app.post(&format!("/sessions/s{id}/revisions"), body).await;
    let Some(session) = known_session(tenant, id, &response) else { return };
    if based_on != known {
        response.problem(409, "revision-mismatch");
        return assert_eq!(response.json()["revision"], json!(known));
    }
    if session.cursor() == 0 {
        return drop(response.problem(409, "summary-missing"));
    }
    let mut revision = session.predict_edit(summary);
    revision.json = response.ok(201);
    revision.assert_matches(known + 1, &revision.json);
    session.revisions.push(revision);
    session.failures = 0;
}

async fn fork(app: &TestClient, tenant: &mut Tenant, id: u8, target: u8, through: usize) {
    let known = tenant.sessions.get(&id).map_or(0, |session| session.history.len());
    let through = 1 + through % (known + 1);
    let body = json!({"through_seq": through, "new_id": format!("s{target}")});
    let response = app.post(&format!("/sessions/s{id}/fork"), body).await;
    let Some(source) = known_session(tenant, id, &response) else { return };
    if through > known {
        return assert_eq!(response.fields(), ["through_seq"]);
    }
    let mut session = source.fork(through);
    if tenant.sessions.contains_key(&target) || tenant.bound.contains_key(&target) {
        return drop(response.problem(409, "session-exists"));
    }
    session.forked_from = json!({"session_id": format!("s{id}"), "through_seq": through, "kind": "fork"});
    let expected = json!({
        "session_id": format!("s{target}"), "last_seq": through, "cursor": session.cursor(),
        "revision": session.revisions.len(), "forked_from": session.forked_from,
    });
    assert_eq!(response.ok(201), expected);
    session.updated_at = updated_at(app, &format!("s{target}")).await;
    tenant.sessions.insert(target, session);
    check_whole(app, tenant, &format!("s{target}")).await;
}

/// Redacts a message with all of its copies.
async fn redact(app: &TestClient, tenant: &mut Tenant, id: u8, seq: usize) {
    let known = tenant.sessions.get(&id).map_or(0, |session| session.history.len());
    let seq = 1 + seq % (known + 1);
    let response = app.delete(&format!("/sessions/s{id}/messages/{seq}")).await;
    let Some(session) = known_session(tenant, id, &response) else { return };
    if seq > known {
        return drop(response.problem(404, "message-not-found"));
    }
    let json = response.ok(200);
    if session.history[seq - 1].redaction.is_none() {
        let copies = tenant.copies(id, seq);
        let record = json!({
            "redacted_at": json["redacted_at"], "key_id": json["key_id"], "copies": copies.len() - 1,
        });
        for name in copies {
            let session = tenant.find_mut(&name);
            let mut revision = session.redact(seq, &record);
            let number = session.revisions.len() + 1;
            revision.json = app.get(&format!("/sessions/{name}/revisions/{number}")).await.ok(200);
            revision.assert_matches(number, &revision.json);
            session.revisions.push(revision);
            check_whole(app, tenant, &name).await;
        }
    }
    let expected = tenant.sessions[&id].redactions();
    assert!(expected.contains(&json), "{json}: {expected:?}");
    check_whole(app, tenant, &format!("s{id}")).await;
}

/// Writes a retention period. Returns `None` if the session does not exist.
async fn put_retention(
    app: &TestClient,
    tenant: &mut Tenant,
    level: RetentionLevel,
    period: Value,
) -> Option<Value> {
    let path = match level {
        RetentionLevel::Tenant => "/retention".to_owned(),
        RetentionLevel::User(user) => format!("/users/{}/retention", USERS[usize::from(user)]),
        RetentionLevel::Session(id) => format!("/sessions/s{id}/retention"),
    };
    let response = app.put(&path, json!({"after_last_exchange": period})).await;
    if let RetentionLevel::Session(id) = level {
        known_session(tenant, id, &response)?;
    }
    let written = response.ok(200);
    assert_eq!(written["after_last_exchange"], period);
    Some(written)
}

async fn set_retention(app: &TestClient, tenant: &mut Tenant, level: RetentionLevel, period: Option<Period>) {
    let text = period.map_or(Value::Null, |period| json!(period.text()));
    let Some(written) = put_retention(app, tenant, level, text).await else { return };
    tenant.set_retention(level, period);
    let (effective, source) = tenant.effective_retention(level);
    let effective = effective.map_or("never", Period::text);
    let effective = json!({"after_last_exchange": effective, "source": source});
    assert_includes(&written, &json!({ "effective": effective }));
}

/// Lets the period of a level end, and waits for the worker. The sessions to which the period applies are erased, and no other.
async fn expire(app: &TestClient, tenant: &mut Tenant, level: RetentionLevel) {
    if put_retention(app, tenant, level, json!("1s")).await.is_none() {
        return;
    }
    let bound = tenant.bound.clone();
    let expired = tenant.expire(level);
    let began = Instant::now();
    for name in &expired {
        while app.get(&format!("/sessions/{name}")).await.status == 200 {
            assert!(began.elapsed() < Duration::from_secs(30), "{name} is not erased");
            sleep(Duration::from_millis(20)).await;
        }
    }
    // Such a session is not shown: another user can be named when its owner is erased.
    for (id, user) in bound.into_iter().filter(|(id, _)| !tenant.bound.contains_key(id)) {
        let other = USERS[(usize::from(user) + 1) % USERS.len()];
        let context = json!({"user_id": other, "mode": "off"});
        while app.post(&format!("/sessions/s{id}/context"), &context).await.status == 409 {
            assert!(began.elapsed() < Duration::from_secs(30), "the owner of s{id} is not erased");
            sleep(Duration::from_millis(20)).await;
        }
        app.delete(&format!("/sessions/s{id}")).await.ok(204);
    }
    if !matches!(level, RetentionLevel::Session(_)) {
        put_retention(app, tenant, level, Value::Null).await;
        tenant.set_retention(level, None);
    }
    for name in &expired {
        tenant.check_session(app, name).await;
    }
}

async fn rewind(app: &TestClient, tenant: &mut Tenant, id: u8, after: usize) {
    let known = tenant.sessions.get(&id).map_or(0, |session| session.history.len());
    let after = 1 + after % (known + 1);
    let response = app.delete(&format!("/sessions/s{id}/messages?after={after}")).await;
    let Some(session) = known_session(tenant, id, &response) else { return };
    if after > known {
        return assert_eq!(response.fields(), ["after"]);
    }
    let json = response.ok(200);
    let mut rewound = if after == known { session.clone() } else { session.rewind(after) };
    let expected = json!({
        "session_id": format!("s{id}"), "last_seq": after, "cursor": rewound.cursor(),
        "revision": rewound.revisions.len(),
    });
    assert_includes(&json, &expected);
    if after == known {
        return assert_eq!(json["branch"], Value::Null);
    }
    rewound.updated_at = updated_at(app, &format!("s{id}")).await;
    let mut branch = std::mem::replace(session, rewound);
    branch.forked_from = json!({"session_id": format!("s{id}"), "through_seq": after, "kind": "rewind"});
    branch.failures = 0;
    let name = json["branch"].as_str().expect("a branch").to_owned();
    assert!(tenant.branches.insert(name.clone(), branch).is_none(), "{name} is not new");
    check_whole(app, tenant, &name).await;
    check_whole(app, tenant, &format!("s{id}")).await;
}

async fn updated_at(app: &TestClient, name: &str) -> String {
    app.get(&format!("/sessions/{name}")).await["updated_at"].as_str().expect("a time").to_owned()
}

/// Checks all that a session contains.
async fn check_whole(app: &TestClient, tenant: &Tenant, name: &str) {
    tenant.check_session(app, name).await;
    tenant.check_messages(app, name, false, 1000, 0).await;
    tenant.check_revisions(app, name, 1000).await;
    tenant.check_redactions(app, name).await;
}

async fn write_memory(app: &TestClient, tenant: &mut Tenant, user: u8, condition: Condition, step: usize) {
    let version = tenant.memory_version(user);
    let tag = match condition {
        Condition::Absent => None,
        Condition::Any => Some("*".to_owned()),
        Condition::CurrentVersion => Some(format!("\"{version}\"")),
        Condition::EarlierVersion => Some(format!("\"{}\"", version.saturating_sub(1))),
        Condition::LaterVersion => Some(format!("\"{}\"", version + 1)),
    };
    let is_rejected = match condition {
        Condition::EarlierVersion => version > 0,
        Condition::LaterVersion => true,
        _ => false,
    };
    let content = format!("Likes tea since {step}.");
    let body = json!({ "content": content });
    let mut request = app.put(&format!("/users/{}/memory", USERS[usize::from(user)]), body);
    if let Some(tag) = tag {
        request = request.header("if-match", tag);
    }
    let response = request.await;
    if is_rejected {
        return drop(response.problem(412, "version-mismatch"));
    }
    let document = response.ok(200);
    assert_includes(&document, &json!({"version": version + 1, "content": content}));
    tenant.memories.entry(user).or_default().push(content);
}

async fn import(
    app: &TestClient,
    tenant: &mut Tenant,
    id: u8,
    user: Option<u8>,
    lines: &str,
    exported: &Session,
) {
    let named = user.or(exported.user);
    let query = user.map_or(String::new(), |user| format!("?user_id={}", USERS[usize::from(user)]));
    let response = send_lines(app, id, &query, lines).await;
    let status = match tenant.sessions.get(&id) {
        None if !tenant.is_of_another(id, named) => 201,
        Some(known) if named.is_none_or(|user| known.user == Some(user)) && known.begins_with(exported) => {
            200
        }
        _ => return drop(response.problem(409, "session-exists")),
    };
    let owner = tenant.bound.remove(&id).or(named);
    let session = tenant.sessions.entry(id).or_insert_with(|| exported.imported(owner));
    let expected = json!({
        "session_id": format!("s{id}"), "user_id": session.user.map(|user| USERS[usize::from(user)]),
        "messages": exported.history.len(), "revisions": exported.revisions.len(),
        "last_seq": session.history.len(), "cursor": session.cursor(),
    });
    assert_eq!(response.ok(status), expected);
}

/// Repeating such an import has no effect, for any owner of the session and any times of its messages.
async fn import_messages(app: &TestClient, tenant: &mut Tenant, id: u8, count: usize) {
    let lines: Vec<_> = (1..=count).map(harness::user).collect();
    let response = send_lines(app, id, "", &lines.join("\n")).await;
    if let Some(known) = tenant.sessions.get(&id) {
        if known.json().starts_with(&lines) {
            response.ok(200);
        } else {
            response.problem(409, "session-exists");
        }
        return;
    }
    assert_eq!(response.ok(201)["last_seq"], count);
    let updated_at = updated_at(app, &format!("s{id}")).await;
    let messages = super::state_checks::history(app, id).await;
    let messages = messages.into_iter().map(|(_, json, created_at, _)| Message::new(json, &created_at));
    let session =
        Session { history: messages.collect(), updated_at, ..Session::new(tenant.bound.remove(&id)) };
    assert_eq!(session.json(), lines);
    tenant.sessions.insert(id, session);
}

async fn send_lines(app: &TestClient, id: u8, query: &str, lines: &str) -> Response {
    let request = app.request(Method::POST, &format!("/sessions/s{id}/import{query}"));
    request.header("content-type", "application/x-ndjson").body(lines.to_owned()).await
}
