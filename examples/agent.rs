//! An agent with a memory that exceeds its context window. [`Agent::turn`] contains all calls that it needs. `agent.py`
//! does the same with the official OpenAI client.
//!
//! ```text
//! cargo run --release                                            # precis, in another terminal
//! OPENAI_API_KEY=… cargo run --release --example agent -- demo   # then one line per user message
//! ```

use reqwest::{Client, Response, StatusCode, Url};
use serde_json::{Value, json};
use std::{env, error::Error, io::Write as _};

/// One session of an agent.
pub(crate) struct Agent {
    pub(crate) http: Client,
    /// For example `http://127.0.0.1:8080/sessions/demo`.
    pub(crate) session: Url,
    /// Base URL and API key of a server with a chat completions API, and the name of a model.
    pub(crate) model: (String, String, String),
    /// The tool definitions from `GET /tools`.
    pub(crate) tools: Value,
}

impl Agent {
    /// Returns the agent's reply. The turn is durable when this function returns.
    pub(crate) async fn turn(&self, text: &str) -> Result<String, Box<dyn Error>> {
        // The first request that names a user binds the session: its memory document is the one of this user.
        let request = json!({
            "system_prompt": "You are a helpful assistant.", "user_message": text, "include_memory_skill": true,
            "user_id": "me",
        });
        let context = read(self.precis(&["context"], &request).await?).await?;
        let mut messages = at(&context, "/messages").as_array().cloned().ok_or("no context")?;
        let before = messages.len().saturating_sub(1);
        let (base_url, key, model) = &self.model;
        let reply = loop {
            let chat = json!({"model": model, "messages": messages, "tools": at(&self.tools, "/tools")});
            let request = self.http.post(format!("{base_url}/chat/completions")).bearer_auth(key).json(&chat);
            let reply = at(&read(request.send().await?).await?, "/choices/0/message");
            messages.push(reply.clone());
            let calls = at(&reply, "/tool_calls").as_array().cloned().unwrap_or_default();
            if calls.is_empty() {
                break reply;
            }
            for call in calls {
                messages.push(self.execute_tool(&call).await?);
            }
        };
        let exchange = json!({"messages": messages.split_off(before)});
        read(self.precis(&["exchanges"], &exchange).await?).await?;
        let texts = ["/content", "/refusal"].map(|path| at(&reply, path));
        Ok(texts.iter().find_map(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Executes a tool call and returns its result message. If the tool is unknown, the message contains the error.
    async fn execute_tool(&self, call: &Value) -> Result<Value, Box<dyn Error>> {
        let name = at(call, "/function/name");
        let response = self.precis(&["tools", name.as_str().ok_or("a call without a name")?], call).await?;
        if response.status() == StatusCode::NOT_FOUND {
            let detail = at(&response.json().await?, "/detail");
            return Ok(json!({"role": "tool", "tool_call_id": at(call, "/id"), "content": detail}));
        }
        Ok(at(&read(response).await?, "/result"))
    }

    /// Each path segment is percent-encoded, because a model may use any text as the name of a tool.
    async fn precis(&self, path: &[&str], body: &Value) -> Result<Response, Box<dyn Error>> {
        let key = env::var("PRECIS_API_KEY").unwrap_or_else(|_| "none".to_owned());
        let mut url = self.session.clone();
        url.path_segments_mut().map_err(|()| "not the URL of a session")?.extend(path);
        Ok(self.http.post(url).bearer_auth(key).json(body).send().await?)
    }
}

fn at(value: &Value, path: &str) -> Value {
    value.pointer(path).cloned().unwrap_or_default()
}

async fn read(response: Response) -> Result<Value, Box<dyn Error>> {
    let (status, text) = (response.status(), response.text().await?);
    if status.is_success() {
        Ok(serde_json::from_str(&text)?)
    } else {
        Err(format!("{status}: {text}").into())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let variable = |name: &str, default: &str| env::var(name).unwrap_or_else(|_| default.to_owned());
    let session = env::args().nth(1).ok_or("usage: agent SESSION")?;
    // precis uses reqwest without a TLS provider, so each program has to choose one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (http, precis) = (Client::new(), Url::parse(&variable("PRECIS_URL", "http://127.0.0.1:8080"))?);
    let (mut path, key) = (precis.clone(), variable("PRECIS_API_KEY", "none"));
    path.path_segments_mut().map_err(|()| "PRECIS_URL is not a base URL")?.extend(["sessions", &session]);
    let agent = Agent {
        session: path,
        model: (
            variable("OPENAI_BASE_URL", "https://api.openai.com/v1"),
            variable("OPENAI_API_KEY", "none"),
            variable("MODEL", "gpt-5-mini"),
        ),
        tools: read(http.get(precis.join("tools")?).bearer_auth(key).send().await?).await?,
        http,
    };
    for line in std::io::stdin().lines() {
        writeln!(std::io::stdout(), "{}", agent.turn(&line?).await?)?;
    }
    Ok(())
}
