//! An agent whose memory outlasts its context window: what it takes is in [`Agent::turn`]. `agent.py` is the same with the
//! official OpenAI client.
//!
//! ```text
//! cargo run --release                                            # precis, in another terminal
//! OPENAI_API_KEY=… cargo run --release --example agent -- demo   # then a line for each thing to say
//! ```

use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use std::{env, error::Error, io::Write as _};

/// One session of an agent.
pub(crate) struct Agent {
    /// Any client.
    pub(crate) http: Client,
    /// `http://127.0.0.1:8080/sessions/demo`; the id of the session is percent-encoded.
    pub(crate) session: String,
    /// The base URL of a server that speaks chat completions, its key, and the name of a model.
    pub(crate) model: (String, String, String),
    /// The definitions of the tools: `GET /tools`.
    pub(crate) tools: Value,
}

impl Agent {
    /// What the agent replies. When this returns, the turn is durable.
    pub(crate) async fn turn(&self, text: &str) -> Result<String, Box<dyn Error>> {
        let asked = json!({
            "system_prompt": "You are a helpful assistant.", "user_message": text, "include_memory_skill": true,
        });
        let context = self.precis("context", &asked).await?;
        let mut messages = at(&context, "/messages").as_array().cloned().ok_or("no context")?;
        let mut said = vec![json!({"role": "user", "content": text})];
        let reply = loop {
            let (base_url, key, model) = &self.model;
            let request = json!({"model": model, "messages": messages, "tools": at(&self.tools, "/tools")});
            let request =
                self.http.post(format!("{base_url}/chat/completions")).bearer_auth(key).json(&request);
            let reply = at(&answer(request).await?, "/choices/0/message");
            said.push(reply.clone());
            messages.push(reply.clone());
            let calls = at(&reply, "/tool_calls").as_array().cloned().unwrap_or_default();
            if calls.is_empty() {
                break reply;
            }
            for call in calls {
                let name = at(&call, "/function/name");
                let path = format!("tools/{}", name.as_str().ok_or("a call without a name")?);
                let result = at(&self.precis(&path, &call).await?, "/result");
                said.push(result.clone());
                messages.push(result);
            }
        };
        self.precis("exchanges", &json!({ "messages": said })).await?;
        Ok(at(&reply, "/content").as_str().unwrap_or_default().to_owned())
    }

    async fn precis(&self, what: &str, body: &Value) -> Result<Value, Box<dyn Error>> {
        let key = env::var("PRECIS_API_KEY").unwrap_or_else(|_| "none".to_owned());
        answer(self.http.post(format!("{}/{what}", self.session)).bearer_auth(key).json(body)).await
    }
}

fn at(value: &Value, path: &str) -> Value {
    value.pointer(path).cloned().unwrap_or_default()
}

async fn answer(request: RequestBuilder) -> Result<Value, Box<dyn Error>> {
    let answer = request.send().await?;
    let (status, text) = (answer.status(), answer.text().await?);
    if status.is_success() {
        Ok(serde_json::from_str(&text)?)
    } else {
        Err(format!("{status}: {text}").into())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let set = |name: &str, default: &str| env::var(name).unwrap_or_else(|_| default.to_owned());
    let session = env::args().nth(1).ok_or("usage: agent SESSION")?;
    // precis builds reqwest without a choice of TLS provider, so that a program makes its own.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (http, precis) = (Client::new(), set("PRECIS_URL", "http://127.0.0.1:8080"));
    let key = set("PRECIS_API_KEY", "none");
    let agent = Agent {
        session: format!("{precis}/sessions/{session}"),
        model: (
            set("OPENAI_BASE_URL", "https://api.openai.com/v1"),
            set("OPENAI_API_KEY", "none"),
            set("MODEL", "gpt-5-mini"),
        ),
        tools: answer(http.get(format!("{precis}/tools")).bearer_auth(key)).await?,
        http,
    };
    for line in std::io::stdin().lines() {
        writeln!(std::io::stdout(), "{}", agent.turn(&line?).await?)?;
    }
    Ok(())
}
