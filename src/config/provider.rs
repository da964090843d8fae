//! What a provider may be told: its URL, its headers and the fields of its requests.
//!
//! A request is written by precis, and these settings add to it. They may not replace a part of it: the request
//! would then no longer say what the rest of the program believes.

use super::keys::Key;
use super::validate::{Findings, path};
use super::{Provider, ProviderKind};
use reqwest::Url;
use reqwest::header::HeaderName;
use serde_json::Value as Json;

#[cfg(test)]
mod tests;

/// Headers that belong to the connection, or to the form of the request.
const OWN_HEADERS: [&str; 11] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Fields of a request that hold what it is about, or decide how the answer is read.
const OWN_FIELDS: [&str; 5] = ["messages", "model", "stream", "stream_options", "system"];

/// What a parameter with a secret has in its name.
const SECRET_NAMES: [&str; 6] = ["auth", "key", "pass", "secret", "sig", "token"];

const NO_HEADER: &str = "must be the name of an HTTP header, such as \"x-title\"";
const OWN_HEADER: &str = "is set by the HTTP client itself: leave it out";

impl Findings {
    /// All rules for one provider.
    pub(super) fn provider(&mut self, name: &str, provider: &Provider) {
        self.kind(name, provider);
        if let Some(problem) = provider.base_url.as_deref().and_then(unfit) {
            self.add(&[&path("providers", name, "base_url")], problem);
        }
        self.headers(name, provider);
        self.body(name, provider);
    }

    /// What a kind does not take would be set without effect.
    fn kind(&mut self, name: &str, provider: &Provider) {
        let only_openai = [
            ("output_limit_field", provider.output_limit_field.is_some()),
            ("stream_options", provider.stream_options.is_some()),
        ];
        let only_servers = [
            ("base_url", provider.base_url.is_some()),
            ("api_key", provider.api_key.is_some()),
            ("api_key_header", provider.api_key_header.is_some()),
            ("headers", !provider.headers.is_empty()),
            ("body", !provider.body.is_empty()),
        ];
        let (refused, who, way_out) = match provider.kind {
            ProviderKind::OpenAi => return,
            ProviderKind::Anthropic => (only_openai.to_vec(), "a provider of kind anthropic", "leave it out"),
            ProviderKind::Extractive => (
                [&only_servers[..], &only_openai].concat(),
                "extractive is built in and",
                "write kind = \"openai\" for a server",
            ),
        };
        for (setting, _) in refused.into_iter().filter(|(_, set)| *set) {
            let keys = [setting, "kind"].map(|setting| path("providers", name, setting));
            self.add(&keys.each_ref().map(String::as_str), format!("{who} takes no {setting}: {way_out}"));
        }
    }

    fn headers(&mut self, name: &str, provider: &Provider) {
        if let Some(header) = &provider.api_key_header
            && let Err(problem) = addable(header)
        {
            self.add(&[&path("providers", name, "api_key_header")], problem);
        }
        let taken = header_of_key(provider);
        let mut before: Vec<&String> = Vec::new();
        for header in provider.headers.keys() {
            let same = |other: &str| other.eq_ignore_ascii_case(header);
            let problem = if let Err(problem) = addable(header) {
                problem.to_owned()
            } else if taken.is_some_and(same) {
                "takes the api_key: leave out one of the two".to_owned()
            } else if let Some(other) = before.iter().find(|other| same(other)) {
                format!("is the same header as {other}: leave out one of the two")
            } else {
                before.push(header);
                continue;
            };
            self.add(&[&below(name, "headers", header)], problem);
        }
    }

    fn body(&mut self, name: &str, provider: &Provider) {
        for (field, value) in &provider.body {
            // Some servers read the names of fields whatever their case.
            let lower = field.to_ascii_lowercase();
            let problem = if OWN_FIELDS.contains(&lower.as_str()) {
                "is set by precis itself: leave it out"
            } else if lower == "max_tokens" || lower == "max_completion_tokens" {
                match provider.kind {
                    ProviderKind::OpenAi => {
                        "is set by precis: write the model's output_limit, and the provider's output_limit_field \
                         for its name"
                    }
                    _ => "is set by precis: write the model's output_limit",
                }
            } else if has_null(value) {
                "holds nan or inf, which a request can't"
            } else {
                continue;
            };
            self.add(&[&below(name, "body", field)], problem);
        }
    }
}

fn below(provider: &str, setting: &str, name: &str) -> String {
    Key::dotted("llm.providers").child(provider).child(setting).child(name).to_string()
}

/// The header that the key goes into, where there is one.
fn header_of_key(provider: &Provider) -> Option<&str> {
    provider.api_key.as_ref()?;
    match (&provider.api_key_header, provider.kind) {
        (Some(header), _) => Some(header),
        (None, ProviderKind::OpenAi) => Some("authorization"),
        (None, ProviderKind::Anthropic) => Some("x-api-key"),
        (None, ProviderKind::Extractive) => None,
    }
}

/// Whether a request may get such a header from the settings.
fn addable(header: &str) -> Result<(), &'static str> {
    let name = HeaderName::from_bytes(header.as_bytes()).map_err(|_| NO_HEADER)?;
    if OWN_HEADERS.contains(&name.as_str()) { Err(OWN_HEADER) } else { Ok(()) }
}

/// TOML has no null: it is what becomes of a number that JSON has not.
fn has_null(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::Array(items) => items.iter().any(has_null),
        Json::Object(fields) => fields.values().any(has_null),
        Json::Bool(_) | Json::Number(_) | Json::String(_) => false,
    }
}

/// Why the URL is no base for the paths of a provider; without the URL, which may hold a key.
fn unfit(base_url: &str) -> Option<&'static str> {
    match Url::parse(base_url) {
        Err(_) => Some("must be a URL, such as \"http://127.0.0.1:11434/v1\""),
        Ok(url) if !["http", "https"].contains(&url.scheme()) => Some("must begin with http:// or https://"),
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("must not hold user or password: a secret belongs into api_key or headers")
        }
        Ok(url) if url.fragment().is_some() => Some("must have no fragment: leave out # and what follows"),
        Ok(url) if url.query().is_some_and(seems_secret) => Some(
            "must hold no secret, and a parameter of its query seems to be one: it belongs into api_key or headers",
        ),
        Ok(_) => None,
    }
}

/// Whether a parameter has the name of a secret, or one with an escape in it, which may be such a name as well.
fn seems_secret(query: &str) -> bool {
    query.split(['&', ';']).any(|parameter| {
        let name = parameter.split('=').next().unwrap_or_default().to_ascii_lowercase();
        name.contains('%') || SECRET_NAMES.iter().any(|secret| name.contains(secret))
    })
}
