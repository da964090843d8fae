//! Random operations of clients, with the settings and model faults under which they run. All values are small, so
//! that operations meet the same sessions, users and keys, and so that a counterexample is short.

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use std::fmt;

/// One test case: the settings of the service and the operations of its clients.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) settings: ServiceSettings,
    pub(super) steps: Vec<Step>,
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "four independent choices")]
pub(super) struct ServiceSettings {
    pub(super) keep_recent: usize,
    pub(super) threshold: usize,
    pub(super) max_history_messages: usize,
    pub(super) summary_word_limit: usize,
    /// Sets `consolidation.on_failure` to `recent`.
    pub(super) recent_on_failure: bool,
    /// After a failed consolidation, the next attempt waits longer than the scenario lasts.
    pub(super) long_backoff: bool,
    pub(super) short_model_timeout: bool,
    /// Clients use the same few tool call ids in every message.
    pub(super) repeated_call_ids: bool,
}

/// One operation of one client. Clients 0 and 1 belong to one tenant, client 2 to another.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) client: usize,
    pub(super) operation: Operation,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line per step, also in the alternate form that proptest prints.
        write!(f, "client {}: {:?}", self.client, self.operation)
    }
}

#[derive(Clone, Debug)]
pub(super) enum Operation {
    AppendExchange(Exchange),
    Sync(Sync),
    /// An exchange whose last message is invalid.
    AppendInvalid {
        session: u8,
        key: Option<u8>,
    },
    BuildContext {
        session: u8,
        mode: Mode,
        user: Option<u8>,
        fault: ModelFault,
    },
    Consolidate {
        session: u8,
        fault: ModelFault,
    },
    /// The revision is taken modulo the number of known revisions plus two: 0 is the empty summary, and the largest
    /// value is an unknown revision.
    Restore {
        session: u8,
        revision: usize,
    },
    /// The revision on which the edit is based: the present one, or one that is taken as for a restore.
    EditSummary {
        session: u8,
        based_on: Option<usize>,
    },
    ListMessages {
        session: u8,
        descending: bool,
        limit: usize,
        after: usize,
    },
    ListRevisions {
        session: u8,
        limit: usize,
    },
    ListSessions {
        user: Option<u8>,
        limit: usize,
    },
    SetMetadata {
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
    EraseSession {
        session: u8,
    },
    EraseUser {
        user: u8,
    },
    /// Keeps the export for the next import, by any client.
    Export {
        session: u8,
    },
    Import {
        session: u8,
        user: Option<u8>,
    },
    /// The message is taken modulo the length of the history plus one: the largest value is an unknown message.
    Fork {
        session: u8,
        target: u8,
        through: usize,
    },
    /// The message is taken as for a fork.
    Rewind {
        session: u8,
        after: usize,
    },
    /// The message is taken as for a fork.
    Redact {
        session: u8,
        seq: usize,
    },
    /// Sets a retention period that outlasts the scenario, or removes it.
    SetRetention {
        level: RetentionLevel,
        period: Option<Period>,
    },
    /// Sets a retention period of a second, waits until it has erased what it applies to, and removes it.
    Expire {
        level: RetentionLevel,
    },
    /// An import of lines that contain only messages.
    ImportMessages {
        session: u8,
        count: usize,
    },
}

/// The owner of a retention period.
#[derive(Clone, Copy, Debug)]
pub(super) enum RetentionLevel {
    Tenant,
    User(u8),
    Session(u8),
}

/// A retention period that erases nothing during a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Period {
    Never,
    Long,
}

impl Period {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Long => "90d",
        }
    }
}

/// Two exchanges with the same key and the same fields are the same request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exchange {
    pub(super) session: u8,
    pub(super) messages: Vec<MessageKind>,
    pub(super) user: Option<u8>,
    pub(super) metadata: Option<u8>,
    pub(super) key: Option<u8>,
}

/// The complete list of a client: its view of the history, and new messages.
#[derive(Clone, Debug)]
pub(super) struct Sync {
    pub(super) session: u8,
    pub(super) view: View,
    /// The client writes the messages of the history as a framework does, with other bytes and the same meaning.
    pub(super) rewritten: bool,
    pub(super) new: Vec<MessageKind>,
    pub(super) user: Option<u8>,
    pub(super) metadata: Option<u8>,
    pub(super) key: Option<u8>,
    /// Sends the body that was recorded under the key, if there is one.
    pub(super) is_retry: bool,
    /// The client writes the history in the Anthropic format. Its new messages are texts, which are the same in both formats.
    pub(super) anthropic: bool,
    pub(super) on_divergence: OnDivergence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnDivergence {
    Error,
    Fork,
    /// The fork gets the id of this session.
    ForkTo(u8),
}

/// The history as a client knows it. Numbers are taken modulo the length of the history, or that plus one.
#[derive(Clone, Copy, Debug)]
pub(super) enum View {
    Complete,
    /// The client knows only the first messages, and has no new ones.
    Beginning(usize),
    /// The client has another message at this position.
    Changed(usize),
    /// The client has forgotten the history.
    Empty,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MessageKind {
    User,
    Assistant,
    /// A user message without text.
    Blank,
    /// A message with this number of tool calls.
    ToolCalls(usize),
    /// The result of an open tool call: the number is taken modulo the number of open calls.
    ToolResult(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Inline,
    Background,
    Off,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Background => "background",
            Self::Off => "off",
        }
    }
}

/// The behaviour of the model during one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelFault {
    None,
    Unavailable,
    Hang,
    Empty,
    BareNone,
    /// The connection breaks within the answer.
    BrokenConnection,
    /// The stream ends without its final event.
    MissingEnd,
    LengthLimit,
    Garbage,
    /// Only the compression of a summary that is too long fails, by an empty answer.
    EmptyCompression,
    /// Only the compression fails, by an answer that is longer than the summary.
    LongerCompression,
}

/// The `If-Match` header of a write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    Absent,
    Any,
    CurrentVersion,
    EarlierVersion,
    LaterVersion,
}

pub(super) fn scenarios() -> impl Strategy<Value = Scenario> {
    (settings(), vec(step(), 1..=90)).prop_map(|(settings, steps)| Scenario { settings, steps })
}

fn settings() -> impl Strategy<Value = ServiceSettings> {
    let sizes = (1..=6_usize, 1..=8_usize, 1..=10_usize, 3..=60_usize);
    let flags = (any::<bool>(), any::<bool>(), proptest::bool::weighted(0.1), any::<bool>());
    (sizes, flags).prop_map(|((keep_recent, above_recent, above_threshold, word_limit), flags)| {
        let threshold = keep_recent + above_recent;
        ServiceSettings {
            keep_recent,
            threshold,
            max_history_messages: threshold + above_threshold,
            summary_word_limit: word_limit,
            recent_on_failure: flags.0,
            long_backoff: flags.1,
            short_model_timeout: flags.2,
            repeated_call_ids: flags.3,
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    let client = prop_oneof![4 => Just(0_usize), 3 => Just(1), 1 => Just(2)];
    (client, operation()).prop_map(|(client, operation)| Step { client, operation })
}

fn operation() -> impl Strategy<Value = Operation> {
    // Most operations meet one session, so that its history becomes long enough for several consolidations.
    let session = || prop_oneof![12 => Just(0_u8), 2 => Just(1), 1 => Just(2)];
    let user = || weighted(0.1, 0..3_u8);
    let limit = || prop_oneof![1..=4_usize, Just(1000)];
    let exchange =
        (session(), vec(message_kind(), 1..=6), user(), weighted(0.2, 0..3_u8), weighted(0.3, 0..2_u8));
    let view = prop_oneof![
        10 => Just(View::Complete),
        3 => (0..40_usize).prop_map(View::Beginning),
        2 => (0..40_usize).prop_map(View::Changed),
        1 => Just(View::Empty),
    ];
    let new = vec(message_kind(), 0..=4);
    let fields = (user(), weighted(0.2, 0..3_u8), weighted(0.3, 0..2_u8), any::<bool>());
    let on_divergence = prop_oneof![
        2 => Just(OnDivergence::Error),
        1 => Just(OnDivergence::Fork),
        2 => (0..3_u8).prop_map(OnDivergence::ForkTo),
    ];
    let level = || {
        prop_oneof![
            1 => Just(RetentionLevel::Tenant),
            2 => (0..3_u8).prop_map(RetentionLevel::User),
            3 => session().prop_map(RetentionLevel::Session),
        ]
    };
    let period = weighted(0.7, select(vec![Period::Never, Period::Long]));
    let form = (any::<bool>(), proptest::bool::weighted(0.3), on_divergence);
    let sync = (session(), view, form, new, fields);
    let mode = prop_oneof![4 => Just(Mode::Inline), 2 => Just(Mode::Background), 1 => Just(Mode::Off)];
    let condition = select(vec![
        Condition::Absent,
        Condition::Any,
        Condition::CurrentVersion,
        Condition::CurrentVersion,
        Condition::EarlierVersion,
        Condition::LaterVersion,
    ]);
    prop_oneof![
        32 => exchange.prop_map(|(session, messages, user, metadata, key)| {
            Operation::AppendExchange(Exchange { session, messages, user, metadata, key })
        }),
        16 => sync.prop_map(|(session, view, form, new, (user, metadata, key, is_retry))| {
            let (rewritten, anthropic, on_divergence) = form;
            let sync = Sync {
                session, view, rewritten, new, user, metadata, key, is_retry, anthropic, on_divergence,
            };
            Operation::Sync(sync)
        }),
        1 => (session(), weighted(0.5, 0..2_u8))
            .prop_map(|(session, key)| Operation::AppendInvalid { session, key }),
        24 => (session(), mode, user(), fault())
            .prop_map(|(session, mode, user, fault)| Operation::BuildContext { session, mode, user, fault }),
        5 => (session(), fault()).prop_map(|(session, fault)| Operation::Consolidate { session, fault }),
        3 => (session(), 0..20_usize).prop_map(|(session, revision)| Operation::Restore { session, revision }),
        3 => (session(), weighted(0.3, 0..20_usize))
            .prop_map(|(session, based_on)| Operation::EditSummary { session, based_on }),
        2 => (session(), any::<bool>(), limit(), 0..6_usize).prop_map(|(session, descending, limit, after)| {
            Operation::ListMessages { session, descending, limit, after }
        }),
        1 => (session(), limit()).prop_map(|(session, limit)| Operation::ListRevisions { session, limit }),
        2 => (user(), limit()).prop_map(|(user, limit)| Operation::ListSessions { user, limit }),
        1 => (session(), 0..3_u8).prop_map(|(session, metadata)| Operation::SetMetadata { session, metadata }),
        3 => (0..3_u8, condition).prop_map(|(user, condition)| Operation::WriteMemory { user, condition }),
        1 => (0..3_u8).prop_map(|user| Operation::ReadMemory { user }),
        1 => session().prop_map(|session| Operation::EraseSession { session }),
        1 => (0..3_u8).prop_map(|user| Operation::EraseUser { user }),
        2 => session().prop_map(|session| Operation::Export { session }),
        3 => (session(), user()).prop_map(|(session, user)| Operation::Import { session, user }),
        2 => (session(), 0..3_u8, 0..40_usize)
            .prop_map(|(session, target, through)| Operation::Fork { session, target, through }),
        4 => (session(), 0..40_usize).prop_map(|(session, after)| Operation::Rewind { session, after }),
        4 => (session(), 0..40_usize).prop_map(|(session, seq)| Operation::Redact { session, seq }),
        3 => (level(), period).prop_map(|(level, period)| Operation::SetRetention { level, period }),
        // Takes more than a second.
        1 => level().prop_map(|level| Operation::Expire { level }),
        1 => (session(), 1..=3_usize).prop_map(|(session, count)| Operation::ImportMessages { session, count }),
    ]
}

fn message_kind() -> impl Strategy<Value = MessageKind> {
    prop_oneof![
        4 => Just(MessageKind::User),
        4 => Just(MessageKind::Assistant),
        1 => Just(MessageKind::Blank),
        3 => (1..=3_usize).prop_map(MessageKind::ToolCalls),
        5 => (0..12_usize).prop_map(MessageKind::ToolResult),
    ]
}

fn fault() -> impl Strategy<Value = ModelFault> {
    let faults = vec![
        ModelFault::Unavailable,
        ModelFault::Hang,
        ModelFault::Empty,
        ModelFault::BareNone,
        ModelFault::BrokenConnection,
        ModelFault::MissingEnd,
        ModelFault::LengthLimit,
        ModelFault::Garbage,
        ModelFault::EmptyCompression,
        ModelFault::LongerCompression,
    ];
    prop_oneof![2 => Just(ModelFault::None), 1 => select(faults)]
}
