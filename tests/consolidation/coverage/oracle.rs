//! What has to come out, by the contract: the slow and plain way, message by message.

use super::story::{Mode, Piece, Setup, Trouble};
use crate::harness::{COMPRESSED, assistant, user};
use precis::domain::message::Message;
use precis::domain::{summary, tokens};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The conversation, as the client gave it.
#[derive(Default)]
pub(super) struct History {
    messages: Vec<Told>,
    texts: Vec<String>,
    same_ids: bool,
    ids: usize,
}

struct Told {
    user: bool,
    blank: bool,
    opens: Vec<String>,
    answers: Option<String>,
    tokens: i64,
}

impl History {
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(super) fn texts(&self) -> &[String] {
        &self.texts
    }

    pub(super) fn push(&mut self, piece: Piece) {
        let seq = self.len() + 1;
        let open: Vec<String> = self.open_ids();
        let (text, opens, answers) = match piece {
            Piece::User => (user(seq), Vec::new(), None),
            Piece::Blank => (r#"{"role":"user","content":" "}"#.to_owned(), Vec::new(), None),
            Piece::Calls(calls) => {
                let ids: Vec<String> = (0..calls).map(|call| self.id(call)).collect();
                let call =
                    |id| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
                let calls: Vec<Value> = ids.iter().map(call).collect();
                let text =
                    json!({"role": "assistant", "content": format!("m{seq} calls"), "tool_calls": calls});
                (text.to_string(), ids, None)
            }
            Piece::Result(which) if !open.is_empty() => {
                let id = &open[which.index(open.len())];
                let text = json!({"role": "tool", "tool_call_id": id, "content": format!("m{seq} a result")});
                (text.to_string(), Vec::new(), Some(id.clone()))
            }
            Piece::Assistant | Piece::Result(_) => (assistant(seq), Vec::new(), None),
        };
        let message = Message::parse(serde_json::from_str(&text).unwrap()).unwrap();
        self.messages.push(Told {
            user: matches!(piece, Piece::User | Piece::Blank),
            blank: matches!(piece, Piece::Blank),
            opens,
            answers,
            tokens: tokens::of_message(&message),
        });
        self.texts.push(text);
    }

    fn id(&mut self, call: usize) -> String {
        self.ids += 1;
        if self.same_ids { format!("call_{call}") } else { format!("c{}", self.ids) }
    }

    fn open_ids(&self) -> Vec<String> {
        self.calls().into_iter().filter(|call| call.result.is_none()).map(|call| call.id).collect()
    }

    /// All calls. Where an id comes back, a result belongs to the latest call that has none.
    pub(super) fn calls(&self) -> Vec<Called> {
        let mut calls: Vec<Called> = Vec::new();
        for (seq, told) in (1..).zip(&self.messages) {
            if let Some(id) = &told.answers {
                let call = calls.iter_mut().rfind(|call| call.id == *id && call.result.is_none());
                call.expect("only what is open is answered").result = Some(seq);
            }
            calls.extend(told.opens.iter().map(|id| Called { seq, id: id.clone(), result: None }));
        }
        calls
    }

    /// Whether a cut behind message `seq` parts a call that was made after `cursor` from its result, or from the
    /// one that may still come and that is waited for.
    fn parts(&self, cursor: usize, seq: usize, wait: Wait) -> bool {
        let is_user = |seq: usize| self.messages.get(seq - 1).is_some_and(|told| told.user);
        let mut calls = self.calls().into_iter().filter(|call| call.seq > cursor && call.seq <= seq);
        calls.any(|call| match call.result {
            Some(result) => result > seq,
            None => match wait {
                Wait::ForAll => true,
                Wait::UnlessUserWentOn => !(call.seq + 1..=seq + 1).any(is_user),
                Wait::ForNone => false,
            },
        })
    }
}

/// Which results are waited for.
#[derive(Clone, Copy)]
enum Wait {
    ForAll,
    UnlessUserWentOn,
    ForNone,
}

/// A tool call, with the places of its message and of its result.
#[derive(Debug)]
pub(super) struct Called {
    pub(super) seq: usize,
    id: String,
    pub(super) result: Option<usize>,
}

/// A revision, as it has to be.
pub(super) struct Made {
    range: Option<(usize, usize)>,
    cursor: usize,
    text: String,
    added: String,
    before_meta: Option<String>,
    given_up: BTreeSet<usize>,
}

impl Made {
    pub(super) fn assert_is(&self, revision: &Value) {
        let kind = if self.range.is_some() { "consolidation" } else { "restore" };
        assert_eq!(revision["kind"], kind);
        let range = self.range.unzip();
        assert_eq!((&revision["from_seq"], &revision["to_seq"]), (&json!(range.0), &json!(range.1)));
        assert_eq!((&revision["cursor"], &revision["added"]), (&json!(self.cursor), &json!(self.added)));
        assert_eq!(revision["text"], self.text);
        assert_eq!(revision["words"], summary::words(&self.text));
        assert_eq!(revision["meta"]["text_before"], json!(self.before_meta));
    }
}

/// What a run has to bring.
pub(super) struct Run {
    pub(super) revisions: Vec<Made>,
    pub(super) failed: bool,
}

/// The session, as it has to be.
pub(super) struct Oracle {
    pub(super) setup: Setup,
    pub(super) history: History,
    pub(super) cursor: usize,
    pub(super) summary: String,
    pub(super) revisions: Vec<Made>,
    /// How many of them the service was asked for.
    pub(super) checked: usize,
    pub(super) failures: usize,
    /// The calls, by their places among all, that were summarised while they had no result.
    pub(super) given_up: BTreeSet<usize>,
}

impl Oracle {
    pub(super) fn new(setup: Setup) -> Self {
        let history = History { same_ids: setup.same_ids, ..History::default() };
        let (revisions, given_up) = (Vec::new(), BTreeSet::new());
        Self {
            setup,
            history,
            cursor: 0,
            summary: String::new(),
            revisions,
            checked: 0,
            failures: 0,
            given_up,
        }
    }

    pub(super) fn tail_tokens(&self, cursor: usize) -> i64 {
        self.history.messages[cursor..].iter().map(|told| told.tokens).sum()
    }

    fn is_due(&self, cursor: usize) -> bool {
        let tokens = self.setup.max_tail_tokens.is_some_and(|most| self.tail_tokens(cursor) > most);
        self.history.len() - cursor > self.setup.threshold || tokens
    }

    /// Where a summary of what follows the cursor has to end.
    ///
    /// A call without a result holds it back, but only until messages would be left out of contexts: from then on
    /// one that the user has gone on from is given up, or if there is none, any. Its result, should it still come,
    /// stands alone.
    fn cut(&self, cursor: usize) -> Option<usize> {
        let last = self.history.len();
        let too_long = last - cursor > self.setup.most;
        let waits = [Wait::ForAll, Wait::UnlessUserWentOn, Wait::ForNone];
        waits.into_iter().take(if too_long { 3 } else { 1 }).find_map(|wait| {
            let safe = |seq: &usize| !self.history.parts(cursor, *seq, wait);
            let cuts: Vec<usize> =
                (cursor + 1..=last.saturating_sub(self.setup.keep_recent)).filter(safe).collect();
            let before_user = cuts.iter().rfind(|seq| self.history.messages[**seq].user);
            before_user.or(cuts.last()).copied()
        })
    }

    /// What a context has to say of consolidation, and what has to come of it.
    pub(super) fn context(&self, mode: Mode, trouble: Trouble) -> (&'static str, Option<Run>) {
        match mode {
            Mode::Off => ("disabled", None),
            _ if !self.is_due(self.cursor) => ("not_due", None),
            _ if self.setup.waits && self.failures > 0 => ("failed", None),
            Mode::Background => ("scheduled", Some(self.run(false, trouble))),
            Mode::Inline => {
                let run = self.run(false, trouble);
                let outcome = match (run.failed, run.revisions.is_empty()) {
                    (true, _) => "failed",
                    (false, false) => "consolidated",
                    (false, true) => "not_due",
                };
                (outcome, Some(run))
            }
        }
    }

    /// Consolidates until nothing is due; at least once if `asked`.
    pub(super) fn run(&self, mut asked: bool, trouble: Trouble) -> Run {
        let (mut cursor, mut text) = (self.cursor, self.summary.clone());
        let mut given_up = self.given_up.clone();
        let mut run = Run { revisions: Vec::new(), failed: false };
        while asked || self.is_due(cursor) {
            asked = false;
            let Some(to) = self.cut(cursor) else {
                break;
            };
            let told = (cursor + 1..).zip(&self.history.messages[cursor..to]);
            let seqs: Vec<String> =
                told.filter(|(_, told)| !told.blank).map(|(seq, _)| format!("m{seq}")).collect();
            let meta_only = matches!(trouble, Trouble::No | Trouble::MetaEmpty | Trouble::MetaLonger);
            if !seqs.is_empty() && !meta_only {
                run.failed = true;
                break;
            }
            let added =
                if seqs.is_empty() { String::new() } else { format!("It covers {} .", seqs.join(" ")) };
            let whole = [&text[..], &added].into_iter().filter(|part| !part.is_empty());
            let whole = whole.collect::<Vec<_>>().join("\n\n");
            let too_long = !added.is_empty() && summary::words(&whole) > self.setup.word_limit;
            let before_meta = (too_long && trouble == Trouble::No).then(|| whole.clone());
            text = if before_meta.is_some() { COMPRESSED.to_owned() } else { whole };
            let calls = self.history.calls().into_iter().enumerate();
            let lost = calls.filter(|(_, call)| call.seq <= to && call.result.is_none());
            given_up.extend(lost.map(|(index, _)| index));
            run.revisions.push(Made {
                range: Some((cursor + 1, to)),
                cursor: to,
                text: text.clone(),
                added,
                before_meta,
                given_up: given_up.clone(),
            });
            cursor = to;
        }
        run
    }

    /// What was expected has come.
    pub(super) fn carry(&mut self, run: Run) {
        if !run.revisions.is_empty() {
            self.failures = 0;
        }
        self.failures += usize::from(run.failed);
        for made in run.revisions {
            self.become_as(&made);
            self.revisions.push(made);
        }
    }

    fn become_as(&mut self, made: &Made) {
        (self.cursor, self.summary) = (made.cursor, made.text.clone());
        self.given_up.clone_from(&made.given_up);
    }

    /// Sets back to a revision, as a new revision.
    pub(super) fn restore(&mut self, revision: usize) {
        let to = revision.checked_sub(1).and_then(|index| self.revisions.get(index));
        let made = Made {
            range: None,
            cursor: to.map_or(0, |to| to.cursor),
            text: to.map_or(String::new(), |to| to.text.clone()),
            added: String::new(),
            before_meta: None,
            given_up: to.map_or(BTreeSet::new(), |to| to.given_up.clone()),
        };
        self.failures = 0;
        self.become_as(&made);
        self.revisions.push(made);
    }
}
