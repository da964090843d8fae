//! What types cannot say: references that lead somewhere, limits that leave room, settings that fit together.
//!
//! Every rule looks at the whole and adds what it finds; none stops the others. A finding names all keys that take
//! part, so that it is left out where one of them is known to be wrong already.

use super::keys::{Key, closest, entries};
use super::load::Problem;
use super::{ProviderKind, Settings};
use reqwest::Url;
use std::collections::BTreeMap;
use std::time::Duration;

/// So that "forever" can be said, and a point in time that far away still be computed.
const LONGEST: Duration = Duration::from_hours(365 * 24);

/// A rule that is broken.
#[derive(Debug)]
pub(super) struct Finding {
    /// The keys that take part; at least one.
    pub(super) keys: Vec<String>,
    /// What to do.
    pub(super) message: String,
}

impl Finding {
    /// Filed under the first of its keys that somebody has set.
    pub(super) fn into_problem(self, origins: &BTreeMap<String, String>) -> Problem {
        let set = self.keys.iter().find(|key| origins.contains_key(*key));
        let key = set.or(self.keys.first()).cloned().unwrap_or_default();
        Problem { origin: origins.get(&key).cloned(), key, message: self.message }
    }
}

/// All rules.
pub(super) fn validate(settings: &Settings) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    findings.amounts(settings);
    findings.durations(settings);
    findings.places(settings);
    findings.consolidation(settings);
    findings.providers(settings);
    findings.references(settings);
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, keys: &[&str], message: impl Into<String>) {
        self.0.push(Finding {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            message: message.into(),
        });
    }

    fn amounts(&mut self, settings: &Settings) {
        for (key, value) in entries(settings) {
            if value == 0 {
                let key = key.to_string();
                let way_out = if settings.consolidation.max_tail_tokens == Some(0)
                    && key.ends_with("max_tail_tokens")
                {
                    ": leave it out for no limit"
                } else {
                    ""
                };
                self.add(&[&key], format!("must be greater than 0{way_out}"));
            }
        }
    }

    fn durations(&mut self, settings: &Settings) {
        let Settings { server, database, consolidation, llm, .. } = settings;
        let mut durations = vec![
            ("server.shutdown_grace".to_owned(), server.shutdown_grace),
            ("database.acquire_timeout".to_owned(), database.acquire_timeout),
            ("consolidation.retry_initial".to_owned(), consolidation.retry_initial),
            ("consolidation.retry_max".to_owned(), consolidation.retry_max),
            ("consolidation.inline_wait".to_owned(), consolidation.inline_wait),
        ];
        for (name, model) in &llm.models {
            durations.push((path("models", name, "timeout"), model.timeout));
            durations.push((path("models", name, "connect_timeout"), model.connect_timeout));
        }
        for (name, pool) in &llm.pools {
            durations.push((path("pools", name, "deadline"), pool.deadline));
        }
        for (key, duration) in durations {
            if duration.is_zero() {
                self.add(&[&key], "must be longer than 0");
            } else if duration > LONGEST {
                self.add(&[&key], "must be at most 365days");
            }
        }
        if consolidation.retry_initial > consolidation.retry_max {
            self.add(
                &["consolidation.retry_initial", "consolidation.retry_max"],
                "consolidation.retry_initial must not be longer than consolidation.retry_max",
            );
        }
    }

    fn places(&mut self, settings: &Settings) {
        let bind = settings.server.bind;
        if !bind.ip().to_canonical().is_loopback() && !settings.server.allow_without_keys {
            self.add(
                &["server.bind", "server.allow_without_keys"],
                format!(
                    "{bind} is open to other machines, and no API key protects it: bind to 127.0.0.1, or set \
                     server.allow_without_keys = true where the network keeps strangers out"
                ),
            );
        }
        if !settings.database.url.is_valid() {
            self.add(
                &["database.url"],
                "must be a URL that begins with sqlite:, postgres:// or postgresql://; \
                 write special characters of a password as %40 and the like",
            );
        }
        if let Err(error) = tracing_subscriber::EnvFilter::builder().parse(&settings.log.filter) {
            self.add(
                &["log.filter"],
                format!("{error}: write a level or directives, such as \"info,precis=debug\""),
            );
        }
    }

    fn consolidation(&mut self, settings: &Settings) {
        let threshold = settings.consolidation.threshold;
        let keep = settings.consolidation.keep_recent;
        let most = settings.consolidation.max_history_messages;
        if threshold <= keep {
            self.add(
                &["consolidation.threshold", "consolidation.keep_recent"],
                format!("consolidation.threshold ({threshold}) must be greater than consolidation.keep_recent ({keep})"),
            );
        }
        if most <= threshold {
            self.add(
                &["consolidation.max_history_messages", "consolidation.threshold"],
                format!(
                    "consolidation.max_history_messages ({most}) must be greater than consolidation.threshold \
                     ({threshold}): messages would be dropped before they are summarised"
                ),
            );
        }
        let prompts = &settings.consolidation.prompts;
        for (key, prompt) in [
            ("consolidation.prompts.consolidate_system", &prompts.consolidate_system),
            ("consolidation.prompts.consolidate_user", &prompts.consolidate_user),
            ("consolidation.prompts.meta_system", &prompts.meta_system),
            ("consolidation.prompts.meta_user", &prompts.meta_user),
        ] {
            if prompt.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
                self.add(&[key], "must not be empty: leave it out for the built-in prompt");
            }
        }
    }

    fn providers(&mut self, settings: &Settings) {
        for (name, provider) in &settings.llm.providers {
            let kind = path("providers", name, "kind");
            let base_url = path("providers", name, "base_url");
            let api_key = path("providers", name, "api_key");
            match provider.kind {
                ProviderKind::Anthropic => self.add(
                    &[&kind],
                    "anthropic comes with a later version: use a provider of kind openai or extractive for now",
                ),
                ProviderKind::Extractive if provider.base_url.is_some() || provider.api_key.is_some() => self.add(
                    &[&kind, &base_url, &api_key],
                    "extractive is built in and takes neither base_url nor api_key: write kind = \"openai\" for a server",
                ),
                ProviderKind::Extractive | ProviderKind::OpenAi => {}
            }
            if let Some(problem) = provider.base_url.as_deref().and_then(unfit) {
                self.add(&[&base_url], problem);
            }
        }
    }

    fn references(&mut self, settings: &Settings) {
        let llm = &settings.llm;
        for (name, model) in &llm.models {
            let key = path("models", name, "provider");
            if model.provider.is_empty() {
                self.add(&[&key], format!("missing: set it to one of {}", listed(&llm.providers)));
            } else {
                self.reference(&key, "provider", &model.provider, &llm.providers);
            }
            if model.model.is_empty() {
                let key = path("models", name, "model");
                self.add(&[&key], "missing: set it to the provider's name for the model");
            }
        }
        for (name, pool) in &llm.pools {
            let key = path("pools", name, "models");
            if pool.models.is_empty() {
                self.add(&[&key], format!("has no model: list at least one of {}", listed(&llm.models)));
            }
            for model in &pool.models {
                self.reference(&key, "model", model, &llm.models);
            }
        }
        for (key, pool) in [
            ("llm.default_pool", &llm.default_pool),
            ("consolidation.pool", &settings.consolidation.pool),
            ("consolidation.meta_pool", &settings.consolidation.meta_pool),
        ] {
            if !pool.is_empty() {
                self.reference(key, "pool", pool, &llm.pools);
            }
        }
    }

    fn reference<T>(&mut self, key: &str, what: &str, name: &str, known: &BTreeMap<String, T>) {
        if !known.contains_key(name) {
            let hint = match closest(name, known.keys().cloned()) {
                Some(known) => format!("did you mean {known:?}?"),
                None => format!("there is {}", listed(known)),
            };
            self.add(&[key], format!("there is no {what} {name:?}: {hint}"));
        }
    }
}

/// `llm.<section>.<name>.<setting>`
fn path(section: &str, name: &str, setting: &str) -> String {
    Key::dotted("llm").child(section).child(name).child(setting).to_string()
}

fn listed<T>(named: &BTreeMap<String, T>) -> String {
    named.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Why the URL is no base for the paths of a provider; without the URL, which may hold a key.
fn unfit(base_url: &str) -> Option<&'static str> {
    match Url::parse(base_url) {
        Err(_) => Some("must be a URL, such as \"http://127.0.0.1:11434/v1\""),
        Ok(url) if !["http", "https"].contains(&url.scheme()) => Some("must begin with http:// or https://"),
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("must not hold user or password: the key belongs into api_key")
        }
        Ok(url) if url.query().is_some() || url.fragment().is_some() => {
            Some("must end with its path: leave out what follows ? or #")
        }
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::environment;

    #[test]
    fn what_does_not_fit_together_is_named() {
        let problem = |variables: &[(&str, &str)]| {
            let problems = environment(variables).problems();
            assert_eq!(problems.len(), 1, "{problems:#?}");
            problems[0].clone()
        };
        for (variables, beginning) in [
            (&[("PRECIS__CONSOLIDATION__THRESHOLD", "20")][..], "consolidation.threshold (environment"),
            (&[("PRECIS__CONSOLIDATION__KEEP_RECENT", "100")], "consolidation.keep_recent (environment"),
            (&[("PRECIS__CONSOLIDATION__KEEP_RECENT", "0")], "consolidation.keep_recent (environment"),
            (&[("PRECIS__CONSOLIDATION__THRESHOLD", "200")], "consolidation.threshold (environment"),
            (
                &[("PRECIS__CONSOLIDATION__MAX_TAIL_TOKENS", "0")],
                "consolidation.max_tail_tokens (environment",
            ),
            (&[("PRECIS__CONSOLIDATION__RETRY_MAX", "1s")], "consolidation.retry_max (environment"),
            (&[("PRECIS__CONSOLIDATION__INLINE_WAIT", "0s")], "consolidation.inline_wait (environment"),
            (&[("PRECIS__CONSOLIDATION__INLINE_WAIT", "2years")], "consolidation.inline_wait (environment"),
            (
                &[("PRECIS__CONSOLIDATION__PROMPTS__META_USER", " ")],
                "consolidation.prompts.meta_user (environment",
            ),
            (&[("PRECIS__DATABASE__MAX_CONNECTIONS", "5000000000")], "database.max_connections (environment"),
            (&[("PRECIS__LOG__FILTER", "precis=loud")], "log.filter (environment"),
            (&[("PRECIS__SERVER__BIND", "0.0.0.0:80")], "server.bind (environment"),
            (&[("PRECIS__LLM__PROVIDERS__X__KIND", "anthropic")], "llm.providers.x.kind (environment"),
            (
                &[("PRECIS__LLM__PROVIDERS__EXTRACTIVE__API_KEY", "x")],
                "llm.providers.extractive.api_key (environment",
            ),
            (&[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "x")], "llm.providers.x.base_url (environment"),
            (&[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "ftp://x")], "llm.providers.x.base_url (environment"),
            (
                &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "http://k@x")],
                "llm.providers.x.base_url (environment",
            ),
            (
                &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "http://x?k=1")],
                "llm.providers.x.base_url (environment",
            ),
            (
                &[("PRECIS__LLM__MODELS__EXTRACTIVE__TIMEOUT", "0s")],
                "llm.models.extractive.timeout (environment",
            ),
            (&[("PRECIS__LLM__POOLS__DEFAULT__MODELS", "")], "llm.pools.default.models (environment"),
        ] {
            assert!(problem(variables).starts_with(beginning), "{}", problem(variables));
        }
        let open = [("PRECIS__SERVER__BIND", "0.0.0.0:80"), ("PRECIS__SERVER__ALLOW_WITHOUT_KEYS", "true")];
        environment(&open).load();
        environment(&[("PRECIS__SERVER__BIND", "[::1]:80")]).load();
    }
}
