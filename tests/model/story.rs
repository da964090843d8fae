//! Stories: what clients do, made up at random, and as short in print as in mind.

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use std::fmt;

/// One client's next operation. Clients 0 and 1 have one tenant, client 2 has another.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) client: usize,
    pub(super) op: Op,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, also where the list is printed with one item a line; without what is not given.
        let mut op =
            format!("{:?}", self.op).replace("Exchange(Exchange {", "Exchange {").replace(" })", " }");
        for field in ["user", "metadata", "key"] {
            op = op.replace(&format!(", {field}: None"), "");
            op = (0..3)
                .fold(op, |op, id| op.replace(&format!("{field}: Some({id})"), &format!("{field}: {id}")));
        }
        write!(f, "client {}: {op}", self.client)
    }
}

/// Sessions, users, keys and revisions are small numbers, so that operations meet.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Exchange(Exchange),
    /// An exchange whose last message is wrong.
    Invalid {
        session: u8,
        key: Option<u8>,
    },
    Context {
        session: u8,
        inline: bool,
        user: Option<u8>,
    },
    Messages {
        session: u8,
        descending: bool,
        limit: usize,
        after: usize,
    },
    Sessions {
        user: Option<u8>,
        limit: usize,
    },
    Metadata {
        session: u8,
        metadata: u8,
    },
    WriteMemory {
        user: u8,
        condition: Condition,
    },
    ReadMemory {
        user: u8,
    },
    Consolidate {
        session: u8,
    },
    Revisions {
        session: u8,
        limit: usize,
    },
    Restore {
        session: u8,
        revision: usize,
    },
    EraseSession {
        session: u8,
    },
    EraseUser {
        user: u8,
    },
    /// Keeps what it gets for any client's next import.
    Export {
        session: u8,
    },
    Import {
        session: u8,
        user: Option<u8>,
    },
    ImportLines {
        session: u8,
        messages: u8,
    },
}

/// With a key, the same fields are the same request; without one, each has a text of its own.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exchange {
    pub(super) session: u8,
    pub(super) form: Form,
    pub(super) user: Option<u8>,
    pub(super) metadata: Option<u8>,
    pub(super) key: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    /// A question and its answer.
    Turn,
    /// Only what the user said.
    User,
    /// With a tool call and its result.
    Tool,
}

/// `If-Match` of a write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    None,
    Any,
    /// The version that it has.
    Current,
    /// The one before, or after.
    Before,
    After,
}

pub(super) fn stories() -> impl Strategy<Value = Vec<Step>> {
    vec((0..3_usize, op()).prop_map(|(client, op)| Step { client, op }), 1..=40)
}

fn session() -> impl Strategy<Value = u8> {
    prop_oneof![4 => Just(0_u8), 2 => Just(1_u8), 1 => Just(2_u8)]
}

fn user() -> impl Strategy<Value = Option<u8>> {
    weighted(0.2, 0..3_u8)
}

fn condition() -> impl Strategy<Value = Condition> {
    use Condition::{After, Any, Before, Current, None};
    proptest::sample::select(vec![None, Any, Current, Current, Before, After])
}

pub(super) fn exchange() -> impl Strategy<Value = Exchange> {
    let form = prop_oneof![4 => Just(Form::Turn), 1 => Just(Form::User), 2 => Just(Form::Tool)];
    (session(), form, user(), weighted(0.2, 0..3_u8), weighted(0.4, 0..2_u8))
        .prop_map(|(session, form, user, metadata, key)| Exchange { session, form, user, metadata, key })
}

fn op() -> impl Strategy<Value = Op> {
    let limit = || prop_oneof![1..=4_usize, Just(1000)];
    prop_oneof![
        16 => exchange().prop_map(Op::Exchange),
        1 => (session(), weighted(0.5, 0..2_u8)).prop_map(|(session, key)| Op::Invalid { session, key }),
        6 => (session(), proptest::bool::weighted(0.7), user())
            .prop_map(|(session, inline, user)| Op::Context { session, inline, user }),
        2 => (session(), any::<bool>(), limit(), 0..6_usize)
            .prop_map(|(session, descending, limit, after)| Op::Messages { session, descending, limit, after }),
        2 => (user(), limit()).prop_map(|(user, limit)| Op::Sessions { user, limit }),
        1 => (session(), 0..3_u8).prop_map(|(session, metadata)| Op::Metadata { session, metadata }),
        3 => (0..3_u8, condition()).prop_map(|(user, condition)| Op::WriteMemory { user, condition }),
        1 => (0..3_u8).prop_map(|user| Op::ReadMemory { user }),
        3 => session().prop_map(|session| Op::Consolidate { session }),
        1 => (session(), limit()).prop_map(|(session, limit)| Op::Revisions { session, limit }),
        3 => (session(), 0..4_usize).prop_map(|(session, revision)| Op::Restore { session, revision }),
        1 => session().prop_map(|session| Op::EraseSession { session }),
        1 => (0..3_u8).prop_map(|user| Op::EraseUser { user }),
        2 => session().prop_map(|session| Op::Export { session }),
        3 => (session(), user()).prop_map(|(session, user)| Op::Import { session, user }),
        1 => (session(), 1..=3_u8).prop_map(|(session, messages)| Op::ImportLines { session, messages }),
    ]
}
