//! What types cannot say: references that lead somewhere, limits that leave room, settings that fit together.
//!
//! Every rule looks at the whole and adds what it finds; none stops the others. A finding names all keys that take
//! part, so that it is left out where one of them is known to be wrong already.

use super::Settings;
use super::keys::{Key, closest, entries};
use super::load::Problem;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// So that "forever" can be said, and a point in time that far away still be computed.
pub(super) const LONGEST: Duration = Duration::from_hours(365 * 24);

/// So that "any number" can be said, and be counted with the counters there are.
const MOST_CALLS: usize = 1_000_000;

/// A rule that is broken.
#[derive(Debug)]
pub(super) struct Finding {
    /// The keys that take part; at least one.
    pub(super) keys: Vec<String>,
    /// What to do.
    pub(super) message: String,
}

impl Finding {
    /// Filed under the first of its keys that somebody has set, be it only in part.
    pub(super) fn into_problem(self, origins: &BTreeMap<String, String>) -> Problem {
        let origin = |key: &String| {
            let part = format!("{key}.");
            let mut set = origins.iter().filter(|(set, _)| *set == key || set.starts_with(&part));
            set.next().map(|(_, origin)| origin.clone())
        };
        let set = self.keys.iter().find_map(|key| Some((key, origin(key)?)));
        let (key, origin) = set.map(|(key, origin)| (Some(key), Some(origin))).unwrap_or_default();
        let key = key.or(self.keys.first()).cloned().unwrap_or_default();
        Problem { origin, key, message: self.message }
    }
}

/// All rules.
pub(super) fn validate(settings: &Settings) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    findings.amounts(settings);
    findings.durations(settings);
    findings.places(settings);
    findings.consolidation(settings);
    findings.limits(settings);
    for (name, provider) in &settings.llm.providers {
        findings.provider(name, provider);
    }
    findings.references(settings);
    findings.0
}

/// What the rules have found so far.
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, keys: &[&str], message: impl Into<String>) {
        self.0.push(Finding {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            message: message.into(),
        });
    }

    fn amounts(&mut self, settings: &Settings) {
        for (key, value) in entries(settings) {
            let way_out = match *key.parts() {
                ["llm", "models", _, "retries" | "max_queued_calls"]
                | ["llm", "providers", _, "body", ..]
                | ["limits", "requests_per_second"] => continue,
                ["consolidation", "max_tail_tokens" | "daily_token_limit"] => ": leave it out for no limit",
                _ => "",
            };
            if value == 0 {
                self.add(&[&key.to_string()], format!("must be greater than 0{way_out}"));
            }
        }
        for (name, model) in &settings.llm.models {
            if model.breaker_failure_percent > 100 {
                self.add(&[&path("models", name, "breaker_failure_percent")], "must be at most 100");
            }
            if model.max_concurrent_calls > MOST_CALLS {
                let key = path("models", name, "max_concurrent_calls");
                self.add(&[&key], format!("must be at most {MOST_CALLS}"));
            }
        }
    }

    fn durations(&mut self, settings: &Settings) {
        let Settings { server, limits, database, consolidation, llm, .. } = settings;
        let mut durations = vec![
            ("server.shutdown_grace".to_owned(), server.shutdown_grace),
            ("server.read_timeout".to_owned(), server.read_timeout),
            ("server.write_timeout".to_owned(), server.write_timeout),
            ("server.request_timeout".to_owned(), server.request_timeout),
            ("limits.queue_timeout".to_owned(), limits.queue_timeout),
            ("database.acquire_timeout".to_owned(), database.acquire_timeout),
            ("database.statement_timeout".to_owned(), database.statement_timeout),
            ("consolidation.retry_initial".to_owned(), consolidation.retry_initial),
            ("consolidation.retry_max".to_owned(), consolidation.retry_max),
            ("consolidation.inline_wait".to_owned(), consolidation.inline_wait),
        ];
        for (name, model) in &llm.models {
            let of_model = [
                ("timeout", Some(model.timeout)),
                ("connect_timeout", Some(model.connect_timeout)),
                ("first_token_timeout", model.first_token_timeout),
                ("idle_timeout", Some(model.idle_timeout)),
                ("retry_initial", Some(model.retry_initial)),
                ("retry_max", Some(model.retry_max)),
                ("queue_timeout", Some(model.queue_timeout)),
                ("breaker_window", Some(model.breaker_window)),
                ("breaker_open_for", Some(model.breaker_open_for)),
            ];
            let set = of_model
                .into_iter()
                .filter_map(|(key, duration)| Some((path("models", name, key), duration?)));
            durations.extend(set);
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
        let waits = &Key::dotted("consolidation");
        self.waits(waits, consolidation.retry_initial, consolidation.retry_max);
        for (name, model) in &llm.models {
            let waits = &Key::dotted("llm.models").child(name);
            self.waits(waits, model.retry_initial, model.retry_max);
        }
    }

    fn waits(&mut self, section: &Key, retry_initial: Duration, retry_max: Duration) {
        if retry_initial > retry_max {
            let [initial, most] = ["retry_initial", "retry_max"].map(|key| section.child(key).to_string());
            self.add(&[&initial, &most], format!("{initial} must not be longer than {most}"));
        }
    }

    fn places(&mut self, settings: &Settings) {
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
            let distinct: BTreeSet<&String> = pool.models.iter().collect();
            for model in distinct {
                self.reference(&key, "model", model, &llm.models);
                if pool.models.iter().filter(|other| *other == model).count() > 1 {
                    self.add(&[&key], format!("lists {model:?} twice: leave out one of them"));
                }
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
pub(super) fn path(section: &str, name: &str, setting: &str) -> String {
    Key::dotted("llm").child(section).child(name).child(setting).to_string()
}

fn listed<T>(named: &BTreeMap<String, T>) -> String {
    named.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::Strategy;
    use super::super::tests::{assert_one, environment, file};
    use std::time::Duration;

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
            (
                &[("PRECIS__LLM__PROVIDERS__EXTRACTIVE__API_KEY", "x")],
                "llm.providers.extractive.api_key (environment",
            ),
            (
                &[("PRECIS__LLM__PROVIDERS__X__BASE_URL", "http://x?key=1")],
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
        // Whether that needs a key is asked at the start: only the database knows if there is one.
        environment(&[("PRECIS__SERVER__BIND", "0.0.0.0:80")]).load();
    }

    #[test]
    fn the_limits_of_a_model_have_limits() {
        let key = |setting: &str| format!("PRECIS__LLM__MODELS__EXTRACTIVE__{}", setting.to_uppercase());
        for (setting, value, message) in [
            ("first_token_timeout", "0s", "must be longer than 0"),
            ("first_token_timeout", "", "\"\" is no duration"),
            ("idle_timeout", "0s", "must be longer than 0"),
            ("idle_timeout", "2years", "must be at most 365days"),
            ("retries", "-1", "must be a whole number, not negative"),
            ("retry_initial", "0s", "must be longer than 0"),
            (
                "retry_initial",
                "11s",
                "llm.models.extractive.retry_initial must not be longer than llm.models.extr",
            ),
            (
                "retry_max",
                "400ms",
                "llm.models.extractive.retry_initial must not be longer than llm.models.extr",
            ),
            ("max_concurrent_calls", "0", "must be greater than 0"),
            ("max_concurrent_calls", "1000001", "must be at most 1000000"),
            ("queue_timeout", "0s", "must be longer than 0"),
            ("breaker_failure_percent", "0", "must be greater than 0"),
            ("breaker_failure_percent", "101", "must be at most 100"),
            ("breaker_min_calls", "0", "must be greater than 0"),
            ("breaker_window", "0s", "must be longer than 0"),
            ("breaker_open_for", "0s", "must be longer than 0"),
        ] {
            let variable = key(setting);
            let problems = environment(&[(&variable, value)]).problems();
            let beginning = format!("llm.models.extractive.{setting} (environment {variable}): {message}");
            assert_one(&problems, &beginning);
            assert_eq!(problems.len(), 1, "{problems:#?}");
        }
        let variables = ["retries", "max_queued_calls"].map(key);
        let settings =
            environment(&variables.each_ref().map(|variable| (variable.as_str(), "0"))).load().settings;
        let model = &settings.llm.models["extractive"];
        assert_eq!((model.retries, model.max_queued_calls), (0, 0));
        let later = environment(&[(&key("first_token_timeout"), "9min")]).load().settings;
        assert_eq!(later.llm.models["extractive"].first_token_timeout, Some(Duration::from_mins(9)));
    }

    #[test]
    fn what_is_no_limit_is_left_out() {
        for setting in ["max_tail_tokens", "daily_token_limit"] {
            let problems = file(&format!("[consolidation]\n{setting} = 0")).problems();
            let key = format!("consolidation.{setting} (precis.toml)");
            assert_one(&problems, &format!("{key}: must be greater than 0: leave it out for no limit"));
        }
        let settings = file("[consolidation]\ndaily_token_limit = 5000000000").load().settings;
        assert_eq!(settings.consolidation.daily_token_limit, Some(5_000_000_000));
    }

    #[test]
    fn a_pool_tries_each_model_once() {
        let pool = |models: &str| {
            file(&format!("[llm.pools.default]\nmodels = [{models}]\nstrategy = 'round_robin'"))
        };
        assert_eq!(pool("'extractive'").load().settings.llm.pools["default"].strategy, Strategy::RoundRobin);
        let problems = pool("'extractive', 'extractive', 'extractive'").problems();
        assert_one(&problems, "llm.pools.default.models (precis.toml): lists \"extractive\" twice");
        assert_eq!(problems.len(), 1, "{problems:#?}");
        let problems = file("[llm.pools.default]\nstrategy = 'robin'").problems();
        assert_one(
            &problems,
            "llm.pools.default.strategy (precis.toml): unknown value `robin`, expected `fallback` or `round_robin`",
        );
    }
}
