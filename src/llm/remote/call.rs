//! One call under way: the request, the response, and the answer that is read out of it.

use super::super::prompt::Prompt;
use super::super::provider::{Finish, Request};
use super::super::{Cause, Usage};
use super::body::{self, Kind};
use super::clean::clean;
use super::patience::Patience;
use super::said::Said;
use super::{Reading, Remote, retry_after};
use crate::domain::chain::Chain;
use crate::domain::tokens;
use futures_util::StreamExt as _;
use reqwest::Response;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName};
use secrecy::SecretString;
use std::error::Error as _;
use std::time::Duration;

/// One call under way: the question, and what must not show of it.
#[derive(Debug)]
pub struct Call<'a> {
    remote: &'a Remote,
    request: &'a Request<'a>,
    prompt: &'a Prompt,
    secrets: &'a [SecretString],
    patience: Patience,
}

impl<'a> Call<'a> {
    /// The call begins now. No error's text will have any of the secrets in it, or quote the prompt.
    #[must_use]
    pub fn begin(
        remote: &'a Remote,
        request: &'a Request<'a>,
        prompt: &'a Prompt,
        secrets: &'a [SecretString],
    ) -> Self {
        let patience = Patience::new(request.first_token_timeout, request.idle_timeout);
        Self { remote, request, prompt, secrets, patience }
    }

    /// The time from its beginning to the first piece of the answer; `None` where none has come yet.
    pub(super) fn first_token(&self) -> Option<Duration> {
        self.patience.first_token()
    }

    /// Asks, and waits until an answer begins.
    pub(super) async fn send(&mut self, headers: HeaderMap) -> Result<Response, Cause> {
        let mut body = self.remote.dialect.body(self.request, self.prompt);
        body.extend(self.remote.body.clone());
        let call = self.remote.http.post(self.remote.endpoint.clone()).headers(headers).json(&body);
        let sent = self.patience.wait(call.send()).await?;
        let response = sent.map_err(|error| {
            let error = error.without_url();
            // The first line alone is only "error sending request".
            let causes = Chain(error.source().unwrap_or(&error)).to_string();
            Cause::Connection(self.clean(&causes))
        })?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(response).await) }
    }

    async fn refusal(&self, response: Response) -> Cause {
        let status = response.status();
        let retry_after = retry_after::read(response.headers());
        // What was said before the connection broke, or fell silent, is still the best there is to say.
        let body = body::beginning(response, self.request.idle_timeout).await;
        let text = String::from_utf8_lossy(&body);
        let said = Said::read(&text).unwrap_or_else(|| Said::page(&text));
        let mut message = self.clean(&said.message);
        if message.is_empty() {
            status.canonical_reason().unwrap_or("no message").clone_into(&mut message);
        }
        said.in_place_of_answer(status.as_u16(), message, retry_after)
    }

    /// Reads the answer out of the response: its text, how it ended, what the provider says it cost.
    pub async fn answer(&mut self, response: Response) -> Result<(String, Finish, Usage), Cause> {
        let mut reading = Reading::default();
        match self.read(response, &mut reading).await {
            // What happens after the end of the answer takes nothing from it.
            Err(Cause::BrokenOff | Cause::Timeout(..)) if reading.has_ended() => {}
            read => read?,
        }
        reading.finish()
    }

    /// Reads up to the end of the answer.
    async fn read(&mut self, response: Response, reading: &mut Reading) -> Result<(), Cause> {
        let header = |name: HeaderName| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let (label, encoding) = (header(CONTENT_TYPE), header(CONTENT_ENCODING));
        if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
            let why = format!("compressed ({encoding}), though that was not asked for");
            return Err(Cause::Protocol(self.clean(&why)));
        }
        let body = body::open(response, &self.patience).await?;
        match body.kind {
            Kind::Json => {
                let whole = body.whole(&self.patience).await?;
                self.take("message", &String::from_utf8_lossy(&whole), reading)?;
                reading.mark();
                return Ok(());
            }
            // A web page, most often: the base_url is wrong.
            Kind::Other => {
                return Err(Cause::Protocol(self.clean(&format!("no event stream but \"{label}\""))));
            }
            Kind::Empty => return Err(Cause::BrokenOff),
            Kind::Events => {}
        }
        let mut events = body.events();
        while let Some(event) = self.patience.wait(events.next()).await? {
            let event = event?;
            // An empty one is none, and some send it as a sign of life.
            if event.data.is_empty() {
                continue;
            }
            if event.data.len() > body::OBJECT_BYTES {
                return Err(super::too_long());
            }
            let before = reading.pieces();
            self.take(&event.event, &event.data, reading)?;
            if reading.pieces() > before {
                self.patience.token();
            }
            if reading.is_marked() {
                break;
            }
        }
        Ok(())
    }

    fn take(&self, event: &str, data: &str, reading: &mut Reading) -> Result<(), Cause> {
        match Said::read(data) {
            Some(said) => Err(said.within_answer(self.clean(&said.message))),
            None => self.remote.dialect.read(event, data, reading),
        }
    }

    fn clean(&self, message: &str) -> String {
        clean(message, self.prompt, self.secrets)
    }
}

/// What the call cost, by our own count. It may take milliseconds: not on a thread that serves requests.
pub(super) async fn count(prompt: &Prompt, text: &str) -> u64 {
    let (prompt, text) = (prompt.clone(), text.to_owned());
    let counted = tokio::task::spawn_blocking(move || prompt.tokens() + tokens::count(&text));
    counted.await.ok().and_then(|tokens| u64::try_from(tokens).ok()).unwrap_or_default()
}
