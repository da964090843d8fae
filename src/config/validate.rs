//! Rules for values that types cannot express: ranges, references, and settings that depend on each other.

use super::error::{SettingError, SettingPath, origin_of};
use super::schema::{closest, entries};
use super::settings::{Provider, ProviderKind, Settings};
use crate::domain::id::UserId;
use crate::domain::json_validation::MAX_JSON_DEPTH;
use reqwest::Url;
use reqwest::header::HeaderName;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Large enough for "no limit", and small enough for every counter.
const MAX_COUNT: u64 = 1_000_000;

/// A violated rule.
#[derive(Debug)]
pub(super) struct Violation {
    /// The settings that the rule compares; at least one. The error is dropped if one of them is known to be invalid.
    pub(super) paths: Vec<String>,
    pub(super) message: String,
}

impl Violation {
    /// Reports the violation for the first of its settings that does not have its default.
    pub(super) fn into_error(self, origins: &BTreeMap<String, String>) -> SettingError {
        let origin = |path: &String| origin_of(path, origins).cloned();
        let changed = self.paths.iter().find(|path| origin(path).is_some());
        let path = changed.or(self.paths.first()).cloned().unwrap_or_default();
        SettingError { origin: origin(&path), path, message: self.message }
    }
}

/// Checks all rules.
pub(super) fn validate(settings: &Settings) -> Vec<Violation> {
    let mut violations = Violations(Vec::new());
    violations.check_numbers(settings);
    violations.check_server(settings);
    violations.check_consolidation(settings);
    violations.check_retry_delays(settings);
    for (name, provider) in &settings.llm.providers {
        violations.check_kind(name, provider);
        violations.check_headers(name, provider);
        violations.check_body(name, provider);
        if let Some(problem) = provider.base_url.as_deref().and_then(base_url_error) {
            violations.add([SettingPath::llm("providers", name, "base_url")], problem);
        }
    }
    for (name, upstream) in settings.proxy.upstreams() {
        let path = SettingPath::from("proxy").child(name);
        if let Some(problem) = upstream.base_url.as_deref().and_then(upstream_error) {
            violations.add([path.child("base_url")], problem);
        }
        if upstream.api_key.is_some() && upstream.base_url.is_none() {
            violations
                .add([path.child("api_key")], "has no effect without base_url: set it, or leave out the key");
        }
    }
    if !settings.memory.default_user.is_empty()
        && let Err(error) = UserId::new(&*settings.memory.default_user)
    {
        violations.add(["memory.default_user"], error.to_string());
    }
    violations.check_references(settings);
    violations.0
}

struct Violations(Vec<Violation>);

impl Violations {
    fn add<P: ToString>(&mut self, paths: impl IntoIterator<Item = P>, message: impl Into<String>) {
        let paths = paths.into_iter().map(|path| path.to_string()).collect();
        self.0.push(Violation { paths, message: message.into() });
    }

    /// Checks the range of every number. A number must be positive unless it is listed here.
    fn check_numbers(&mut self, settings: &Settings) {
        for (path, value) in entries(settings) {
            let (min, max, hint) = match *path.parts() {
                ["llm", "providers", _, "body", ..] => continue,
                ["llm", "models", _, "retries" | "max_queued_calls"]
                | ["consolidation" | "proxy", "context_window"]
                | ["proxy", "models", _, "context_window"]
                | ["recall", "max_tokens"]
                | ["limits", "requests_per_second" | "request_burst" | "max_context_cache_bytes"] => {
                    (0, u64::MAX, "")
                }
                ["limits", "max_concurrent_requests"] => (0, MAX_COUNT, ""),
                ["consolidation", "max_tail_tokens" | "daily_token_limit"] => {
                    (1, u64::MAX, ": leave it out for no limit")
                }
                ["llm", "models", _, "breaker_failure_percent"] => (1, 100, ""),
                ["llm", "models", _, "max_concurrent_calls"]
                | ["limits", "max_requests_in_flight"]
                | ["server", "max_connections"]
                | ["retention", "max_sessions_per_second"] => (1, MAX_COUNT, ""),
                ["limits", "max_json_depth"] => (1, MAX_JSON_DEPTH as u64, ""),
                _ => (1, u64::MAX, ""),
            };
            let Some(number) = value.as_u64() else { continue };
            if number < min {
                self.add([path], format!("must be greater than 0{hint}"));
            } else if number > max {
                self.add([path], format!("must be at most {max}"));
            }
        }
    }

    fn check_server(&mut self, settings: &Settings) {
        let Settings { server, limits, consolidation, .. } = settings;
        let (one, all) = (limits.max_body_bytes, limits.max_bytes_in_flight);
        let share = limits.max_key_share;
        if !(0.01..=1.0).contains(&share) {
            self.add(
                ["limits.max_key_share"],
                format!("limits.max_key_share ({share}) must be a part of all capacity: from 0.01 to 1.0"),
            );
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52 bytes")]
        if (all / 2) as f64 * share < one as f64 && all > 0 {
            let paths = ["limits.max_bytes_in_flight", "limits.max_body_bytes"];
            let rule =
                format!("half of {} ({all}) must be at least {} ({one}) divided by", paths[0], paths[1]);
            self.add(
                paths,
                format!(
                    "{rule} limits.max_key_share ({share}): a key gets this part of the memory for bodies"
                ),
            );
        }
        let (one, all) = (limits.max_message_bytes, limits.max_context_bytes);
        if all < one && all > 0 {
            let paths = ["limits.max_context_bytes", "limits.max_message_bytes"];
            let rule = format!("{} ({all}) must not be less than {} ({one})", paths[0], paths[1]);
            self.add(paths, format!("{rule}: otherwise a context could lack the newest message"));
        }
        let total = server.request_timeout;
        let mut parts = vec![
            ("server.read_timeout", server.read_timeout),
            ("consolidation.inline_wait", consolidation.inline_wait),
        ];
        if !settings.search.rerank_pool.is_empty() {
            parts.push(("search.rerank_timeout", settings.search.rerank_timeout));
        }
        for (path, part) in parts {
            if total <= part {
                let [total, part] = [total, part].map(humantime::format_duration);
                let rule = format!("must be longer than {path} ({part}), which it includes");
                let message = format!("server.request_timeout ({total}) {rule}");
                self.add(["server.request_timeout", path], message);
            }
        }
        for host in server.allowed_hosts.iter().filter(|host| *host != "*" && !is_host(host)) {
            let fix = "write a name without scheme and port, such as \"precis.internal\"";
            self.add(["server.allowed_hosts"], format!("{host:?} is not a host: {fix}"));
        }
        for origin in server.cors_origins.iter().filter(|origin| !is_origin(origin)) {
            let fix = "write scheme, host and port only, such as \"https://app.example.com\"";
            self.add(["server.cors_origins"], format!("{origin:?} is not an origin: {fix}"));
        }
        if !settings.database.url.is_valid() {
            self.add(
                ["database.url"],
                "must be a URL that begins with sqlite:, postgres:// or postgresql://; \
                 escape special characters of a password, such as @ as %40",
            );
        }
        if let Err(error) = tracing_subscriber::EnvFilter::builder().parse(&settings.log.filter) {
            let fix = "write a level or directives, such as \"info,precis=debug\"";
            self.add(["log.filter"], format!("{error}: {fix}"));
        }
    }

    fn check_consolidation(&mut self, settings: &Settings) {
        let set = &settings.consolidation;
        let (threshold, keep, max) = (settings.threshold(), set.keep_recent, set.max_history_messages);
        if threshold <= keep {
            let paths = ["consolidation.threshold", "consolidation.keep_recent"];
            self.add(paths, format!("{} ({threshold}) must be greater than {} ({keep})", paths[0], paths[1]));
        }
        if max <= threshold {
            let paths = ["consolidation.max_history_messages", "consolidation.threshold"];
            let rule = format!("{} ({max}) must be greater than {} ({threshold})", paths[0], paths[1]);
            self.add(paths, format!("{rule}: otherwise messages are omitted before they are summarised"));
        }
        let shares = [
            ("consolidation.trigger_share", set.trigger_share),
            ("consolidation.keep_share", set.keep_share),
            ("consolidation.summary_share", set.summary_share),
        ];
        for (path, share) in shares.into_iter().filter(|(_, share)| !(0.01..=1.0).contains(share)) {
            self.add([path], format!("{path} ({share}) must be a share of the window: from 0.01 to 1.0"));
        }
        let [(trigger, most), (_, keep), (_, summary)] = shares;
        if most - keep - summary < 0.2 - f64::EPSILON * 4.0 {
            let rule = "must exceed consolidation.keep_share and consolidation.summary_share together by at least 0.2";
            let fix = "otherwise almost every exchange is followed by a consolidation";
            self.add(shares.map(|(path, _)| path), format!("{trigger} ({most}) {rule}: {fix}"));
        }
        for (path, value) in entries(settings) {
            let is_prompt = matches!(*path.parts(), ["consolidation", "prompts", _]);
            if is_prompt && value.as_str().is_some_and(|prompt| prompt.trim().is_empty()) {
                self.add([path], "must not be empty: leave it out for the built-in prompt");
            }
        }
    }

    fn check_retry_delays(&mut self, settings: &Settings) {
        let mut check = |section: &SettingPath, initial: Duration, max: Duration| {
            if initial > max {
                let [initial, max] =
                    ["retry_initial", "retry_max"].map(|name| section.child(name).to_string());
                self.add([&initial, &max], format!("{initial} must not be longer than {max}"));
            }
        };
        let set = &settings.consolidation;
        check(&SettingPath::from("consolidation"), set.retry_initial, set.retry_max);
        for (name, model) in &settings.llm.models {
            let section = SettingPath::from("llm.models").child(name);
            check(&section, model.retry_initial, model.retry_max);
        }
    }

    /// Rejects settings that have no effect for the kind of the provider.
    fn check_kind(&mut self, name: &str, provider: &Provider) {
        let (kind, fix) = match provider.kind {
            ProviderKind::OpenAi => return,
            ProviderKind::Anthropic => ("a provider of kind anthropic", "leave it out"),
            ProviderKind::Extractive => {
                ("extractive is built in and", "write kind = \"openai\" for a server")
            }
        };
        let is_built_in = provider.kind == ProviderKind::Extractive;
        for (setting, is_rejected) in [
            ("output_limit_field", provider.output_limit_field.is_some()),
            ("stream_options", provider.stream_options.is_some()),
            ("base_url", is_built_in && provider.base_url.is_some()),
            ("api_key", is_built_in && provider.api_key.is_some()),
            ("api_key_header", is_built_in && provider.api_key_header.is_some()),
            ("headers", is_built_in && !provider.headers.is_empty()),
            ("body", is_built_in && !provider.body.is_empty()),
        ] {
            if is_rejected {
                let paths = [setting, "kind"].map(|setting| SettingPath::llm("providers", name, setting));
                self.add(paths, format!("{kind} takes no {setting}: {fix}"));
            }
        }
    }

    fn check_headers(&mut self, name: &str, provider: &Provider) {
        if let Some(header) = &provider.api_key_header
            && let Err(problem) = check_header_name(header)
        {
            self.add([SettingPath::llm("providers", name, "api_key_header")], problem);
        }
        let key_header = header_of_api_key(provider);
        let mut earlier: Vec<&String> = Vec::new();
        for header in provider.headers.keys() {
            let same = |other: &str| other.eq_ignore_ascii_case(header);
            let problem = if let Err(problem) = check_header_name(header) {
                problem.to_owned()
            } else if key_header.is_some_and(same) {
                "takes the api_key: leave out one of the two".to_owned()
            } else if let Some(other) = earlier.iter().find(|other| same(other)) {
                format!("is the same header as {other}: leave out one of the two")
            } else {
                earlier.push(header);
                continue;
            };
            self.add([SettingPath::llm("providers", name, "headers").child(header)], problem);
        }
    }

    /// Rejects fields of the body that precis sets: replacing them would break its own assumptions about the request.
    fn check_body(&mut self, name: &str, provider: &Provider) {
        const RESERVED: [&str; 5] = ["messages", "model", "stream", "stream_options", "system"];
        for (field, value) in &provider.body {
            // Some servers ignore the case of field names.
            let lower = field.to_ascii_lowercase();
            let problem = if RESERVED.contains(&lower.as_str()) {
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
                "contains nan or inf, which JSON does not support"
            } else {
                continue;
            };
            self.add([SettingPath::llm("providers", name, "body").child(field)], problem);
        }
    }

    fn check_references(&mut self, settings: &Settings) {
        let llm_settings = &settings.llm;
        for (name, model) in &llm_settings.models {
            let path = SettingPath::llm("models", name, "provider");
            if model.provider.is_empty() {
                let names = list_names(&llm_settings.providers);
                self.add([&path], format!("missing: set it to one of {names}"));
            } else {
                self.check_reference(&path, "provider", &model.provider, &llm_settings.providers);
            }
            if model.model.is_empty() {
                let path = SettingPath::llm("models", name, "model");
                self.add([&path], "missing: set it to the provider's name for the model");
            }
            if model.input_price.is_some() != model.output_price.is_some() {
                let paths =
                    ["input_price", "output_price"].map(|price| SettingPath::llm("models", name, price));
                self.add(paths, "one price is missing, so that costs stay unknown: set both, to 0 if these tokens are free");
            }
        }
        for (name, pool) in &llm_settings.pools {
            let path = SettingPath::llm("pools", name, "models");
            if pool.models.is_empty() {
                let names = list_names(&llm_settings.models);
                self.add([&path], format!("has no model: list at least one of {names}"));
            }
            let distinct: BTreeSet<&String> = pool.models.iter().collect();
            for model in distinct {
                self.check_reference(&path, "model", model, &llm_settings.models);
                if pool.models.iter().filter(|other| *other == model).count() > 1 {
                    self.add([&path], format!("lists {model:?} twice: leave out one of them"));
                }
            }
        }
        for (path, pool) in [
            ("llm.default_pool", &llm_settings.default_pool),
            ("consolidation.pool", &settings.consolidation.pool),
            ("consolidation.meta_pool", &settings.consolidation.meta_pool),
            ("search.rerank_pool", &settings.search.rerank_pool),
        ] {
            if !pool.is_empty() {
                self.check_reference(&SettingPath::from(path), "pool", pool, &llm_settings.pools);
            }
        }
        let pool = &settings.search.rerank_pool;
        let mut providers = settings.providers_of(pool).peekable();
        if providers.peek().is_some()
            && providers.all(|(_, provider)| provider.kind == ProviderKind::Extractive)
        {
            let problem = "has only the built-in model, which writes summaries and can't order hits";
            let fix = "name a pool with a model of a server, or leave it empty";
            self.add(["search.rerank_pool"], format!("the pool {pool:?} {problem}: {fix}"));
        }
    }

    fn check_reference<T>(
        &mut self,
        path: &SettingPath,
        kind: &str,
        name: &str,
        known: &BTreeMap<String, T>,
    ) {
        if !known.contains_key(name) {
            let hint = match closest(name, known.keys().cloned()) {
                Some(known) => format!("did you mean {known:?}?"),
                None => format!("write one of {}", list_names(known)),
            };
            self.add([path], format!("there is no {kind} {name:?}: {hint}"));
        }
    }
}

fn list_names<T>(named: &BTreeMap<String, T>) -> String {
    named.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Returns `true` if the text is a host name as in a URL.
fn is_host(text: &str) -> bool {
    let url = Url::parse(&format!("http://{text}/")).ok();
    url.is_some_and(|url| url.host_str() == Some(&text.to_lowercase()))
}

/// Returns `true` if the text is an origin as browsers send it. `*` is rejected: with it any page that the user opens
/// could read the data of a service without keys.
pub(super) fn is_origin(text: &str) -> bool {
    let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    url.is_some_and(|url| url.origin().ascii_serialization() == text)
}

/// Returns the problem of a provider's base URL, without the URL: it may contain a key.
fn base_url_error(base_url: &str) -> Option<&'static str> {
    match Url::parse(base_url) {
        Err(_) => Some("must be a URL, such as \"http://127.0.0.1:11434/v1\""),
        Ok(url) if !["http", "https"].contains(&url.scheme()) => Some("must begin with http:// or https://"),
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("must not contain user or password: set api_key or headers instead")
        }
        Ok(url) if url.fragment().is_some() => Some("must have no fragment: leave out # and what follows"),
        Ok(url) if url.query().is_some_and(has_secret_parameter) => Some(
            "must contain no secret, and a parameter of its query looks like one: set api_key or headers instead",
        ),
        Ok(_) => None,
    }
}

/// Returns the problem of the base URL of an upstream. Requests bring queries of their own.
fn upstream_error(base_url: &str) -> Option<&'static str> {
    let query = || Url::parse(base_url).is_ok_and(|url| url.query().is_some());
    base_url_error(base_url).or_else(|| query().then_some("must have no query: leave out ? and what follows"))
}

/// Returns `true` if a parameter has a name that is typical of secrets, or a name with an escape, which may spell one.
fn has_secret_parameter(query: &str) -> bool {
    const TYPICAL: [&str; 6] = ["auth", "key", "pass", "secret", "sig", "token"];
    query.split(['&', ';']).any(|parameter| {
        let name = parameter.split('=').next().unwrap_or_default().to_ascii_lowercase();
        name.contains('%') || TYPICAL.iter().any(|secret| name.contains(secret))
    })
}

/// Returns the header for the API key, if there is a key.
fn header_of_api_key(provider: &Provider) -> Option<&str> {
    provider.api_key.as_ref()?;
    match (&provider.api_key_header, provider.kind) {
        (Some(header), _) => Some(header),
        (None, ProviderKind::OpenAi) => Some("authorization"),
        (None, ProviderKind::Anthropic) => Some("x-api-key"),
        (None, ProviderKind::Extractive) => None,
    }
}

/// Rejects invalid names and the headers that belong to the connection or to the format of the request.
fn check_header_name(header: &str) -> Result<(), &'static str> {
    const RESERVED: [&str; 11] = [
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
    match HeaderName::from_bytes(header.as_bytes()) {
        Err(_) => Err("must be the name of an HTTP header, such as \"x-title\""),
        Ok(name) if RESERVED.contains(&name.as_str()) => {
            Err("is set by the HTTP client itself: leave it out")
        }
        Ok(_) => Ok(()),
    }
}

fn has_null(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::Array(items) => items.iter().any(has_null),
        Json::Object(fields) => fields.values().any(has_null),
        Json::Bool(_) | Json::Number(_) | Json::String(_) => false,
    }
}
