//! The place of a client's list of messages in the history of its session, for clients that do not know the history: those of the proxy.
//!
//! Some clients send their complete list, some leave out its beginning or replace it by a summary of their own, some send only the
//! newest message. Messages are compared by meaning, as [`sync`](super::sync) compares them. Instructions within a list are ignored,
//! because clients add and remove reminders. The rules, in this order:
//!
//! 1. The end of the history is in the list: what follows it is new.
//! 2. The list begins as the history, or as a part of it, and goes on differently: an edited or regenerated message.
//! 3. The list has no message of an assistant: it is the newest message, unless it quotes the history, as requests for titles do.
//! 4. Everything else is no part of the conversation.

use super::message::object::Object;
use super::message::{Message, Role};
use super::sync::difference;

/// Length of the beginning of a message by which a quotation is recognised.
const QUOTED_CHARS: usize = 40;
/// Least length of the quoted beginnings of two messages: short ones occur in many texts.
const MIN_QUOTED_CHARS: usize = 16;

/// The member of the field `extra` of an answer that came by the proxy.
const MARK: &str = "precis";

/// A message of the history.
#[derive(Clone, Debug)]
pub struct HistoryMessage {
    pub seq: i64,
    pub is_redacted: bool,
    pub message: Message,
}

/// The place of a list: the history through `keep` precedes the messages of the list from `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// A `seq`; 0 = no message of the history.
    pub keep: i64,
    /// A position in the list.
    pub from: usize,
}

/// Returns the answer with a mark that it came by the proxy, in its field `extra`, which no model receives. `is_partial`: the client
/// disconnected before the end of the answer.
pub fn mark_answer(json: &str, is_partial: bool) -> String {
    let mut answer = Object::parse(json);
    let mark = if is_partial { r#"{"proxy":true,"partial":true}"# } else { r#"{"proxy":true}"# };
    answer.set("extra", format!(r#"{{"{MARK}":{mark}}}"#));
    answer.to_json()
}

/// Returns `true` for the beginning of an answer whose client disconnected.
fn is_partial(message: &Message) -> bool {
    let message = Object::parse(message.json());
    message.object("extra").object(MARK).get("partial") == Some("true")
}

/// Returns the place of the list in a part of the history, by the first two rules. The messages of `history` are consecutive. `is_retry`:
/// the client says that it repeats a request.
pub fn place(history: &[HistoryMessage], list: &[Message], is_retry: bool) -> Option<Placement> {
    let keep = history.last().map_or(0, |stored| stored.seq);
    let stored: Vec<&HistoryMessage> =
        history.iter().filter(|stored| !stored.message.role().is_instruction()).collect();
    let given: Vec<(usize, &Message)> =
        list.iter().enumerate().filter(|(_, message)| !message.role().is_instruction()).collect();
    if stored.is_empty() {
        return Some(Placement { keep, from: 0 });
    }
    let is_same = |position: usize, other: usize| {
        stored.get(position).zip(given.get(other)).is_some_and(|(stored, (_, given))| is_same(stored, given))
    };
    let has_role = |position: usize, other: usize, role: Role| {
        let stored = stored.get(position).is_some_and(|stored| stored.message.role() == role);
        stored && given.get(other).is_some_and(|(_, given)| given.role() == role)
    };
    // Some clients add retrieved texts to the newest message, and leave them out of the next list. An equal answer after two messages of the
    // user shows that they are one message.
    let matches = |position: usize, other: usize| {
        is_same(position, other)
            || has_role(position, other, Role::User)
                && has_role(position + 1, other + 1, Role::Assistant)
                && is_same(position + 1, other + 1)
    };
    let (newest, most) = (stored.len() - 1, stored.len().min(given.len()));

    // The length of a run, and the number of its messages that are exactly the same. Of equal runs, the last one counts, because users
    // repeat themselves.
    let run = |pairs: &mut dyn Iterator<Item = (usize, usize)>| {
        let run: Vec<_> = pairs.take_while(|(position, other)| matches(*position, *other)).collect();
        (run.len(), run.iter().filter(|(position, other)| is_same(*position, *other)).count())
    };
    let run_before =
        |end: usize| (run(&mut (0..=end.min(newest)).map(|back| (newest - back, end - back))), end);
    let end = (0..given.len()).filter(|end| is_same(newest, *end)).map(run_before).max();
    let run_from = |start: usize| {
        let length = (stored.len() - start).min(given.len());
        (run(&mut (0..length).map(|next| (start + next, next))), start)
    };
    let is_complete = end.is_some_and(|((run, _), _)| run == most);
    let start = (0..stored.len()).filter(|_| !is_complete).map(run_from).max().unwrap_or_default();

    let after = |position: usize| given.get(position).map_or(0, |(index, _)| index + 1);
    // The match that leaves the fewest messages new.
    let ((run, same), start) = start;
    let is_end = |((of_end, exact), end): &((usize, usize), usize)| {
        (end + 1, *exact) >= (run, same) && (*of_end == end + 1 || *of_end >= 2)
    };
    if let Some((_, end)) = end.filter(is_end) {
        return Some(Placement { keep, from: after(end) });
    }
    let begun = stored.get(start..start + run).unwrap_or_default();
    let keep = begun.last()?.seq;
    let is_beginning = start == 0 && history.first().is_some_and(|first| first.seq == 1);
    let rest = stored.get(start + run..).unwrap_or_default();
    let is_accepted = match (run, given.len()) {
        // A single message can be the newest one, with the words of an earlier one.
        (1, 1) => {
            let is_answered = rest.iter().all(|stored| stored.message.role() != Role::User);
            let is_lost = is_retry || rest.iter().any(|stored| is_partial(&stored.message));
            is_answered && (is_lost || is_beginning)
        }
        (1, _) => is_beginning,
        _ => true,
    };
    is_accepted.then(|| Placement { keep, from: after(run - 1) })
}

/// Returns `true` if the list is the newest message of the user, or the newest results of tools, by the third rule.
pub fn is_newest(history: &[HistoryMessage], list: &[Message]) -> bool {
    let is_answer = |message: &Message| message.role() == Role::Assistant;
    !list.is_empty() && !list.iter().any(is_answer) && !list.iter().any(|message| quotes(history, message))
}

/// Returns `true` if the message contains the beginnings of a message of the user and of an answer.
fn quotes(history: &[HistoryMessage], message: &Message) -> bool {
    let text = message.content();
    let longest = |role: Role| {
        let of_role = history.iter().filter(|stored| stored.message.role() == role);
        let beginnings = of_role.map(|stored| beginning(stored.message.content()));
        let quoted =
            beginnings.filter(|beginning| !beginning.is_empty() && text.contains(beginning.as_str()));
        quoted.map(|beginning| beginning.chars().count()).max()
    };
    let lengths = longest(Role::User).zip(longest(Role::Assistant));
    lengths.is_some_and(|(user, assistant)| user + assistant >= MIN_QUOTED_CHARS)
}

/// Returns the beginning of the first line of a text, without what JSON would escape.
fn beginning(text: &str) -> String {
    let end = |c: &char| !matches!(c, '\n' | '\r' | '"' | '\\');
    text.trim_start().chars().take(QUOTED_CHARS).take_while(end).collect::<String>().trim_end().to_owned()
}

/// Returns `true` if the list contains the stored message. Clients strip answers, and rewrite the text beside calls. They can have received
/// more or less of a partial answer than is stored.
fn is_same(stored: &HistoryMessage, given: &Message) -> bool {
    let HistoryMessage { message, is_redacted, .. } = stored;
    if message.json() == given.json() {
        return true;
    }
    if *is_redacted {
        return difference(message, &given.redacted()).is_none();
    }
    if given.role() != Role::Assistant || message.role() != Role::Assistant {
        return difference(message, given).is_none();
    }
    let (text, given_text) = (answer_text(message), answer_text(given));
    if is_partial(message) && !text.is_empty() && !given_text.is_empty() {
        return text.starts_with(given_text) || given_text.starts_with(text);
    }
    let ids = |message: &Message| -> Vec<String> {
        message.tool_calls().iter().map(|call| call.id.clone()).filter(|id| !id.is_empty()).collect()
    };
    let (calls, is_text) = (ids(message), text == given_text && !text.is_empty());
    calls == ids(given) && (is_text || !calls.is_empty()) || difference(message, given).is_none()
}

/// Returns the text of an answer without white space around it, and without reasoning, which many clients hide.
fn answer_text(answer: &Message) -> &str {
    let text = answer.content();
    text.rsplit_once("</think>").map_or(text, |(_, text)| text).trim()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::format;
    use proptest::prelude::*;
    use test_case::test_case;

    /// Parses a conversation of words: `u…` of the user, `a…` of the assistant, `s…` a system message, `p…` a partial answer.
    fn messages(script: &str) -> Vec<Message> {
        let message = |word: &str| {
            let role = match word.get(..1) {
                Some("u") => Role::User,
                Some("s") => Role::System,
                _ => Role::Assistant,
            };
            let message = Message::text(role, word);
            let partial = || format::read(&mark_answer(message.json(), true)).expect("a message");
            if word.starts_with('p') { partial() } else { message.clone() }
        };
        script.split_whitespace().map(message).collect()
    }

    fn history(first_seq: i64, script: &str) -> Vec<HistoryMessage> {
        let stored = |(seq, message)| HistoryMessage { seq, is_redacted: false, message };
        (first_seq..).zip(messages(script)).map(stored).collect()
    }

    #[test_case("", "u1" => Some((0, 0)); "first request")]
    #[test_case("", "u1 a1 u2" => Some((0, 0)); "conversation that began elsewhere")]
    #[test_case("u1 a1", "u1 a1 u2" => Some((2, 2)); "complete list")]
    #[test_case("u1 a1 u2 a2 u3 a3", "u3 a3 u4" => Some((6, 2)); "list without its beginning")]
    #[test_case("u1 a1 u2 a2 u3 a3", "uSummary u3 a3 u4" => Some((6, 3)); "list with a summary of the client")]
    #[test_case("u1 a1 u2 a2 u3 a3", "u1 a1 u3 a3 u4" => Some((6, 4)); "list without its middle")]
    #[test_case("u1 a1 u2 a2 u3 a3 u4 a4", "u1 a1 u2 a2 u4 a4 u5" => Some((8, 6)); "list without a part of its middle")]
    #[test_case("u1 aOk u2 aOk", "u1 aOk u2Edited" => Some((2, 2)); "edited message after equal answers")]
    #[test_case("u1 a1 u2 a2", "a2 u3" => Some((4, 1)); "list that begins with the last answer")]
    #[test_case("u1 a1 u2 a2", "u1 a1 u2" => Some((3, 3)); "repeated or regenerated")]
    #[test_case("u1 a1", "u1" => Some((1, 1)); "first request repeated")]
    #[test_case("u1 a1 u2 a2", "u2" => None; "single message that equals the last one")]
    #[test_case("u1 a1 u2 a2", "u1" => None; "single message that equals an early one")]
    #[test_case("u1 a1 u2 p2", "u2" => Some((3, 1)); "single message whose answer was interrupted")]
    #[test_case("u1 a1 u2 a2 u3 a3", "u1 a1 uEdited" => Some((2, 2)); "edited message")]
    #[test_case("u1 a1 u2 a2", "u1 aEdited u2" => Some((1, 1)); "edited answer")]
    #[test_case("u1 a1 u2 a2 u3 a3 u4 a4", "u2 a2 uEdited" => Some((4, 2)); "edited message of a list without its beginning")]
    #[test_case("u1 a1 u1 a1", "u1 a1 u1" => Some((3, 3)); "regenerated in a conversation that repeats itself")]
    #[test_case("u1 a1 u1 a1", "u1 a1 u1 a1 u1" => Some((4, 4)); "complete list that repeats itself")]
    #[test_case("u1 s a1 u2 a2", "u1 a1 u2 a2 s u3" => Some((5, 4)); "instructions that come and go")]
    #[test_case("u1 p", "u1 partial u2" => Some((2, 2)); "client that received more of a partial answer")]
    #[test_case("u1 partial", "u1 p u2" => Some((2, 2)); "client that received less of a partial answer")]
    #[test_case("uContext_u1 a1", "u1 a1 uContext_u2" => Some((2, 2)); "newest message with additions that are left out later")]
    #[test_case("u1_at_9 a1 u2_at_9 a2", "u1_at_10 a1 u2_at_10 a2 u3_at_10" => Some((4, 4)); "additions to all messages")]
    #[test_case("u1 a1 u2 a2", "uOther aOther u2b" => None; "another conversation")]
    #[test_case("u1 a1 u2 a2", "u3" => None; "newest message alone")]
    fn list_is_placed(stored: &str, list: &str) -> Option<(i64, usize)> {
        place(&history(1, stored), &messages(list), false).map(|place| (place.keep, place.from))
    }

    #[test]
    fn rewritten_answers_are_the_stored_ones() {
        let read = |json: &str| format::read(json).expect("a message");
        let same = |stored: &str, given: &str| {
            is_same(&HistoryMessage { seq: 1, is_redacted: false, message: read(stored) }, &read(given))
        };
        let answer = |text: &str| Message::text(Role::Assistant, text).json().to_owned();
        assert!(same(&answer("\nIt is nine.\n"), &answer("It is nine.")));
        assert!(same(&answer("<think>The clock.</think>\n\nIt is nine."), &answer("It is nine.")));
        assert!(!same(&answer("It is nine."), &answer("It is ten.")));
        let call = |text: &str, id: &str| {
            format!(
                r#"{{"role":"assistant","content":{text},"tool_calls":[{{"id":"{id}","function":{{"name":"f"}}}}]}}"#
            )
        };
        assert!(same(&call("null", "c1"), &call("\"(empty)\"", "c1")));
        assert!(!same(&call("\"x\"", "c1"), &call("\"x\"", "c2")));
        assert!(!same(&call("\"x\"", "c1"), &answer("x")));
    }

    #[test]
    fn repeated_single_message_of_a_client_that_says_so_is_recognised() {
        let stored = history(1, "u1 a1 u2 a2");
        assert_eq!(place(&stored, &messages("u2"), true), Some(Placement { keep: 3, from: 1 }));
        assert_eq!(place(&stored, &messages("u1"), true), None, "other messages of the user follow");
    }

    #[test]
    fn list_is_placed_in_a_part_of_the_history() {
        let stored = history(41, "u1 a1 u2 a2");
        assert_eq!(place(&stored, &messages("u1 a1 u2 a2 u3"), false), Some(Placement { keep: 44, from: 4 }));
        assert_eq!(place(&stored, &messages("u1 x"), false), None, "one message of the middle");
    }

    #[test]
    fn request_about_the_conversation_is_not_its_newest_message() {
        let stored = history(1, "u-how-do-I-bake-bread a-mix-flour-with-water");
        let user = |text: &str| vec![Message::text(Role::User, text)];
        assert!(is_newest(&stored, &user("And how long?")));
        assert!(is_newest(&stored, &user("You said a-mix-flour-with-water, why?")), "only the answer");
        let title = user("Write a title.\nUSER: u-how-do-I-bake-bread\nASSISTANT: a-mix-flour-with-water");
        assert!(!is_newest(&stored, &title));
        let as_json =
            user(r#"Tags for [{"user":"u-how-do-I-bake-bread"},{"assistant":"a-mix-flour-with-water"}]"#);
        assert!(!is_newest(&stored, &as_json));
        assert!(!is_newest(&stored, &messages("u1 a1 u2")));
    }

    /// A request of a client that keeps the whole conversation.
    #[derive(Clone, Debug)]
    enum Step {
        Next {
            words: usize,
        },
        Regenerate,
        /// Replaces the message of this turn, counted from the end.
        Edit {
            back: usize,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, usize)>> {
        let step = prop_oneof![
            4 => (0usize..3).prop_map(|words| Step::Next { words }),
            1 => Just(Step::Regenerate),
            1 => (0usize..4).prop_map(|back| Step::Edit { back }),
        ];
        prop::collection::vec((step, 3usize..12), 1..30)
    }

    proptest! {
        /// Users repeat themselves, answers do not.
        #[test]
        fn history_is_the_conversation_of_the_client(steps in steps(), is_complete in any::<bool>()) {
            let (mut history, mut list): (Vec<Message>, Vec<Message>) = (Vec::new(), Vec::new());
            for (number, (step, window)) in steps.into_iter().enumerate() {
                match step {
                    Step::Next { words } => list.push(Message::text(Role::User, &format!("u{words}"))),
                    Step::Regenerate => drop(list.pop()),
                    Step::Edit { back } => {
                        list.truncate(list.len().saturating_sub(2 * back + 2));
                        list.push(Message::text(Role::User, &format!("u edited {number}")));
                    }
                }
                if list.is_empty() || list.len() == 1 && !history.is_empty() {
                    // A single message can be the newest one.
                    list = history.clone();
                    continue;
                }
                let sent = list[if is_complete { 0 } else { list.len().saturating_sub(window) }..].to_vec();
                let stored: Vec<HistoryMessage> = (1..).zip(&history).map(|(seq, message)| {
                    HistoryMessage { seq, is_redacted: false, message: message.clone() }
                }).collect();
                let place = place(&stored, &sent, false);
                prop_assert!(place.is_some(), "{history:?}\n{sent:?}");
                let Placement { keep, from } = place.expect("a place");
                let answer = Message::text(Role::Assistant, &format!("a{number}"));
                history.truncate(usize::try_from(keep).expect("a position"));
                history.extend(sent[from..].iter().cloned().chain([answer.clone()]));
                list.push(answer);
                prop_assert_eq!(&history, &list);
            }
        }
    }
}
