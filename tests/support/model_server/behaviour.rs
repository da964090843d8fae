//! What the server does with a call. A new way to misbehave is a variant here, and a case in the server's own test.

use super::answer::{Answer, Then};
use super::form::Form;
use super::wire::Response;
use super::{Call, Flight};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::tcp::WriteHalf;
use tokio::sync::Semaphore;

type Headers = Vec<(&'static str, String)>;

/// What the server does with a call. A text is streamed if the call asks for a stream, else it is one JSON object.
#[derive(Clone)]
pub(crate) enum Behaviour {
    /// Sends the text and ends it properly; the finish reason with it, in the words of chat completions.
    Finish(String, &'static str),
    /// Sends what the function makes of the call.
    Reply(Arc<dyn Fn(&Call) -> String + Send + Sync>),
    /// Sends the text as soon as the semaphore has a permit, which it takes.
    Held(Arc<Semaphore>, String),
    /// Sends the text after a time.
    Delayed(Duration, String),
    /// The text as one JSON object, whatever was asked for.
    Whole(String),
    /// Sends thoughts, where the protocol has a place for them, and then the text.
    Thinking(String, String),
    /// Sends these pieces of a text, each after a pause, and ends it properly.
    Trickle(Duration, Vec<String>),
    /// Sends a comment after each pause, without end.
    CommentsOnly(Duration),
    /// Sends an event without content after each pause, without end: a ping, or a chunk whose delta is empty.
    PingsOnly(Duration),
    /// Any other response: status, headers, body.
    Raw(u16, Headers, String),
    /// An error object with a status, a message and headers.
    Fail(u16, String, Headers),
    /// Sends the text, unless the user prompt has more bytes than this: that is too long for it.
    AtMost(usize, String),
    /// Hangs up as soon as the client has connected. That is no call, so the record has none of it but a connection.
    CloseOnAccept,
    /// Takes the call and hangs up.
    Close,
    /// Takes the call and says nothing, not even a status.
    Hang,
    /// Sends the text, and then nothing more.
    HangAfter(String),
    /// Sends the text and breaks the connection.
    BreakOff(String),
    /// Sends the text and ends the response in good order, but without finish reason and end mark.
    EndEarly(String),
    /// Sends the text and the end mark, but no finish reason.
    MarkOnly(String),
    /// Sends the text and the finish reason, but no end mark.
    ReasonOnly(String),
    /// Sends the text and then an error object.
    ErrorAfter(String, &'static str),
    /// The same in another form.
    Formed(Box<Behaviour>, Form),
}

impl Behaviour {
    /// Sends the text and ends it properly.
    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self::Finish(text.into(), "stop")
    }

    /// Sends what `reply` makes of the call.
    pub(crate) fn reply(reply: impl Fn(&Call) -> String + Send + Sync + 'static) -> Self {
        Self::Reply(Arc::new(reply))
    }

    /// Calls tools, in chat completions and as one JSON object: id, name and arguments of each.
    pub(crate) fn tool_calls(calls: &[(&str, &str, &str)]) -> Self {
        let call = |&(id, name, arguments): &(&str, &str, &str)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls: Vec<Value> = calls.iter().map(call).collect();
        let message = json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": calls});
        let body = json!({
            "id": "chatcmpl-test",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": null}],
        });
        Self::Raw(200, vec![("content-type", "application/json".to_owned())], body.to_string())
    }

    /// The prompt and more: an answer that is longer than what it should compress.
    pub(crate) fn echo_longer() -> Self {
        Self::reply(|call| format!("{} And so on.", call.user()))
    }

    /// Thoughts as a model sends them whose server has no place for them: within the text.
    pub(crate) fn thinking_aloud(thoughts: &str, text: &str) -> Self {
        Self::answer(format!("<think>\n{thoughts}\n</think>\n\n{text}"))
    }

    /// An error status with an error object.
    pub(crate) fn fail(status: u16, message: &str) -> Self {
        Self::fail_with(status, message, &[])
    }

    /// The same with headers, such as `retry-after`.
    pub(crate) fn fail_with(status: u16, message: &str, headers: &[(&'static str, &str)]) -> Self {
        let headers = headers.iter().map(|&(name, value)| (name, value.to_owned()));
        Self::Fail(status, message.to_owned(), headers.collect())
    }

    /// The page of a proxy whose server is away.
    pub(crate) fn web_page(status: u16) -> Self {
        let mut page = format!("<html>\r\n<head><title>{status}</title></head>\r\n<body>\r\n");
        write!(page, "<center><h1>{status}</h1></center>\r\n</body>\r\n</html>\r\n").expect("a String");
        Self::Raw(status, vec![("content-type", "text/html".to_owned())], page)
    }

    /// Sends the client elsewhere.
    pub(crate) fn redirect(status: u16, location: impl Into<String>) -> Self {
        Self::Raw(status, vec![("location", location.into())], String::new())
    }

    /// A response that is no event stream, though it says so.
    pub(crate) fn garbage() -> Self {
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        Self::Raw(200, headers, "data: {\"choices\": oops\n\ndata: [DONE]\n\n".to_owned())
    }

    /// The same in another form. Several add up, and their order doesn't matter.
    pub(crate) fn with(self, form: Form) -> Self {
        Self::Formed(Box::new(self), form)
    }

    /// Does it. The flight ends when this does, or sooner.
    pub(super) async fn act(mut self, call: &Call, flight: Flight, writer: &mut WriteHalf<'_>) {
        let mut forms = Vec::new();
        while let Self::Formed(behaviour, form) = self {
            forms.push(form);
            self = *behaviour;
        }
        if let Some(response) = self.response(call, &forms).await {
            response.in_form(&forms).send(writer, flight).await;
        }
    }

    /// None where there is no answer to be had.
    async fn response(self, call: &Call, forms: &[Form]) -> Option<Response> {
        let mut whole = !call.wants_stream();
        let answer = match self {
            Self::Finish(text, reason) => Answer { reason: Some(reason), ..Answer::proper(&text) },
            Self::Reply(reply) => Answer::proper(&reply(call)),
            Self::Held(semaphore, text) => {
                semaphore.acquire().await.expect("never closed").forget();
                Answer::proper(&text)
            }
            Self::Delayed(time, text) => {
                tokio::time::sleep(time).await;
                Answer::proper(&text)
            }
            Self::Whole(text) => {
                whole = true;
                Answer::proper(&text)
            }
            Self::Thinking(thoughts, text) => Answer { thoughts, ..Answer::proper(&text) },
            Self::Trickle(pause, pieces) => Answer { pieces, pause, ..Answer::proper("") },
            Self::CommentsOnly(pause) => Answer { then: Then::Comments(pause), ..Answer::cut("") },
            Self::PingsOnly(pause) => Answer { then: Then::Pings(pause), ..Answer::cut("") },
            Self::HangAfter(text) => Answer { then: Then::Silence, ..Answer::cut(&text) },
            Self::BreakOff(text) => Answer { then: Then::Break, ..Answer::cut(&text) },
            Self::EndEarly(text) => Answer::cut(&text),
            Self::MarkOnly(text) => Answer { reason: None, ..Answer::proper(&text) },
            Self::ReasonOnly(text) => Answer { marked: false, ..Answer::proper(&text) },
            Self::ErrorAfter(text, error) => Answer { error: Some(error), ..Answer::cut(&text) },
            Self::Raw(status, headers, body) => return Some(Response::whole(status, headers, body)),
            Self::Fail(status, message, mut headers) => {
                headers.push(("content-type", "application/json".to_owned()));
                let error = call.protocol.error(status, &message);
                return Some(Response::whole(status, headers, error.to_string()));
            }
            Self::AtMost(bytes, text) => {
                if call.user().len() > bytes {
                    let message = format!("prompt is too long: more than {bytes} bytes");
                    let error = call.protocol.error(400, &message);
                    let headers = vec![("content-type", "application/json".to_owned())];
                    return Some(Response::whole(400, headers, error.to_string()));
                }
                Answer::proper(&text)
            }
            Self::Close | Self::CloseOnAccept => return None,
            Self::Hang => future::pending().await,
            Self::Formed(..) => unreachable!("its form has been taken off"),
        };
        Some(if whole { answer.whole(call, forms) } else { answer.streamed(call, forms) })
    }
}
