//! One call under way: the request, the response, and the answer that is read out of it.

use super::super::prompt::Prompt;
use super::super::provider::{Finish, Request};
use super::super::{ModelError, Usage};
use super::error_body::ErrorBody;
use super::redact::redact;
use super::response_body::{self, Kind};
use super::stream_timeouts::StreamTimeouts;
use super::{HttpProvider, ResponseBuilder, retry_after};
use crate::domain::error_chain::ErrorChain;
use crate::domain::tokens;
use futures_util::StreamExt as _;
use reqwest::Response;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName};
use secrecy::SecretString;
use std::error::Error as _;
use std::time::Duration;

/// One call under way: the question, and what must not show of it.
#[derive(Debug)]
pub struct ProviderCall<'a> {
    remote: &'a HttpProvider,
    request: &'a Request<'a>,
    prompt: &'a Prompt,
    secrets: &'a [SecretString],
    timeouts: StreamTimeouts,
}

impl<'a> ProviderCall<'a> {
    /// The call begins now. No error's text will have any of the secrets in it, or quote the prompt.
    #[must_use]
    pub fn begin(
        remote: &'a HttpProvider,
        request: &'a Request<'a>,
        prompt: &'a Prompt,
        secrets: &'a [SecretString],
    ) -> Self {
        let timeouts = StreamTimeouts::new(request.first_token_timeout, request.idle_timeout);
        Self { remote, request, prompt, secrets, timeouts }
    }

    /// The time from its beginning to the first piece of the answer; `None` where none has come yet.
    pub(super) fn first_token(&self) -> Option<Duration> {
        self.timeouts.first_token()
    }

    /// Asks, and waits until an answer begins.
    pub(super) async fn send(&mut self, headers: HeaderMap) -> Result<Response, ModelError> {
        let mut body = self.remote.dialect.body(self.request, self.prompt);
        body.extend(self.remote.body.clone());
        let call = self.remote.http.post(self.remote.endpoint.clone()).headers(headers).json(&body);
        let sent = self.timeouts.wait(call.send()).await?;
        let response = sent.map_err(|error| {
            let error = error.without_url();
            // The first line alone is only "error sending request".
            let causes = ErrorChain(error.source().unwrap_or(&error)).to_string();
            ModelError::Connection(self.redact(&causes))
        })?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(response).await) }
    }

    async fn refusal(&self, response: Response) -> ModelError {
        let status = response.status();
        let retry_after = retry_after::read(response.headers());
        // What was said before the connection broke, or fell silent, is still the best there is to say.
        let body = response_body::beginning(response, self.request.idle_timeout).await;
        let text = String::from_utf8_lossy(&body);
        let said = ErrorBody::read(&text).unwrap_or_else(|| ErrorBody::page(&text));
        let mut message = self.redact(&said.message);
        if message.is_empty() {
            status.canonical_reason().unwrap_or("no message").clone_into(&mut message);
        }
        said.in_place_of_answer(status.as_u16(), message, retry_after)
    }

    /// Reads the answer out of the response: its text, how it ended, what the provider says it cost.
    pub async fn answer(&mut self, response: Response) -> Result<(String, Finish, Usage), ModelError> {
        let mut builder = ResponseBuilder::default();
        match self.read(response, &mut builder).await {
            // What happens after the end of the answer takes nothing from it.
            Err(ModelError::StreamTruncated | ModelError::Timeout(..)) if builder.has_ended() => {}
            read => read?,
        }
        builder.finish()
    }

    /// Reads up to the end of the answer.
    async fn read(&mut self, response: Response, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
        let header = |name: HeaderName| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let (label, encoding) = (header(CONTENT_TYPE), header(CONTENT_ENCODING));
        if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
            let why = format!("compressed ({encoding}), though that was not asked for");
            return Err(ModelError::Protocol(self.redact(&why)));
        }
        let body = response_body::open(response, &self.timeouts).await?;
        match body.kind {
            Kind::Json => {
                let whole = body.whole(&self.timeouts).await?;
                self.take("message", &String::from_utf8_lossy(&whole), builder)?;
                builder.mark();
                return Ok(());
            }
            // A web page, most often: the base_url is wrong.
            Kind::Other => {
                return Err(ModelError::Protocol(self.redact(&format!("no event stream but \"{label}\""))));
            }
            Kind::Empty => return Err(ModelError::StreamTruncated),
            Kind::Events => {}
        }
        let mut events = body.events();
        while let Some(event) = self.timeouts.wait(events.next()).await? {
            let event = event?;
            // An empty one is none, and some send it as a sign of life.
            if event.data.is_empty() {
                continue;
            }
            if event.data.len() > response_body::OBJECT_BYTES {
                return Err(super::too_long());
            }
            let before = builder.pieces();
            self.take(&event.event, &event.data, builder)?;
            if builder.pieces() > before {
                self.timeouts.token();
            }
            if builder.is_marked() {
                break;
            }
        }
        Ok(())
    }

    fn take(&self, event: &str, data: &str, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
        match ErrorBody::read(data) {
            Some(said) => Err(said.within_answer(self.redact(&said.message))),
            None => self.remote.dialect.read(event, data, builder),
        }
    }

    fn redact(&self, message: &str) -> String {
        redact(message, self.prompt, self.secrets)
    }
}

/// What the call cost, by our own count. It may take milliseconds: not on a thread that serves requests.
pub(super) async fn count(prompt: &Prompt, text: &str) -> u64 {
    let (prompt, text) = (prompt.clone(), text.to_owned());
    let counted = tokio::task::spawn_blocking(move || prompt.tokens() + tokens::count(&text));
    counted.await.ok().and_then(|tokens| u64::try_from(tokens).ok()).unwrap_or_default()
}
