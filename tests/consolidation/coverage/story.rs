//! Stories: what clients, models and people do to a session, made up at random and cut short by proptest.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Clone, Debug)]
pub(super) struct Story {
    pub(super) setup: Setup,
    pub(super) ops: Vec<Op>,
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "four independent choices")]
pub(super) struct Setup {
    pub(super) keep_recent: usize,
    pub(super) threshold: usize,
    pub(super) most: usize,
    pub(super) max_tail_tokens: Option<i64>,
    pub(super) word_limit: usize,
    /// `on_failure = "recent"`
    pub(super) recent: bool,
    /// Whether a failure keeps the next attempt away for the rest of the story.
    pub(super) waits: bool,
    /// Whether the model's timeout is short.
    pub(super) impatient: bool,
    /// Whether the client gives the same few ids to its calls in each turn.
    pub(super) same_ids: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    /// One exchange.
    Write(Vec<Piece>),
    Context(Mode, Trouble),
    Consolidate(Trouble),
    /// To one of the revisions that there are, or to none.
    Restore(Index),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    User,
    Assistant,
    /// A message without any text.
    Blank,
    /// So many calls in one message.
    Calls(usize),
    /// The result of one of the calls that have none yet, in this exchange or an earlier one.
    Result(Index),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    No,
    Status,
    Hang,
    Empty,
    BareNone,
    BreakOff,
    EndEarly,
    Filtered,
    CutOff,
    Garbage,
    MetaEmpty,
    MetaLonger,
}

pub(super) fn stories() -> impl Strategy<Value = Story> {
    let ops = vec(op(), 1..=60).prop_map(|mut ops| {
        ops.insert(0, Op::Write(vec![Piece::User]));
        ops
    });
    (setup(), ops).prop_map(|(setup, ops)| Story { setup, ops })
}

fn setup() -> impl Strategy<Value = Setup> {
    let sizes = (1..=6_usize, 1..=8_usize, 1..=10_usize, 3..=60_usize);
    let tokens = proptest::option::weighted(0.3, 30..=300_i64);
    let flags = (any::<bool>(), any::<bool>(), proptest::bool::weighted(0.1), any::<bool>());
    (sizes, tokens, flags).prop_map(|((keep_recent, over, room, word_limit), max_tail_tokens, flags)| {
        let (recent, waits, impatient, same_ids) = flags;
        let threshold = keep_recent + over;
        let most = threshold + room;
        Setup {
            keep_recent,
            threshold,
            most,
            max_tail_tokens,
            word_limit,
            recent,
            waits,
            impatient,
            same_ids,
        }
    })
}

fn op() -> impl Strategy<Value = Op> {
    let mode = prop_oneof![4 => Just(Mode::Inline), 2 => Just(Mode::Background), 1 => Just(Mode::Off)];
    prop_oneof![
        6 => vec(piece(), 1..=6).prop_map(Op::Write),
        5 => (mode, trouble()).prop_map(|(mode, trouble)| Op::Context(mode, trouble)),
        1 => trouble().prop_map(Op::Consolidate),
        1 => any::<Index>().prop_map(Op::Restore),
    ]
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        4 => Just(Piece::User),
        4 => Just(Piece::Assistant),
        1 => Just(Piece::Blank),
        3 => (1..=3_usize).prop_map(Piece::Calls),
        5 => any::<Index>().prop_map(Piece::Result),
    ]
}

fn trouble() -> impl Strategy<Value = Trouble> {
    let kinds = [
        Trouble::Status,
        Trouble::Hang,
        Trouble::Empty,
        Trouble::BareNone,
        Trouble::BreakOff,
        Trouble::EndEarly,
        Trouble::Filtered,
        Trouble::CutOff,
        Trouble::Garbage,
        Trouble::MetaEmpty,
        Trouble::MetaLonger,
    ];
    prop_oneof![2 => Just(Trouble::No), 1 => proptest::sample::select(kinds.to_vec())]
}
