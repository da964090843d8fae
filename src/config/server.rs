//! What a client may do: where the server listens, whom it lets in, how much it takes at once.

use super::Settings;
use super::parse::{address, duration};
use super::validate::{Findings, LONGEST};
use reqwest::Url;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// Answers have up to three levels around what was sent, and the parsers of some clients stop at 127.
const MOST_LEVELS: usize = 120;

/// So that "any number" can be said, and be counted with the counters there are.
const MOST_REQUESTS: usize = 1_000_000;

/// `[server]`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Where it listens.
    #[serde(deserialize_with = "address")]
    pub bind: SocketAddr,
    /// Lets `bind` be an address that other machines reach although there is no API key. That is looked at when the
    /// service starts: only the database knows.
    pub allow_unauthenticated: bool,
    /// How long requests may go on after the signal to stop.
    #[serde(with = "duration")]
    pub shutdown_grace: Duration,
    /// How long a client may take for the head of a request, and again for its body; a connection without a request
    /// ends after it, too.
    #[serde(with = "duration")]
    pub read_timeout: Duration,
    /// How long a client may take nothing of its answer; its connection is closed then.
    #[serde(with = "duration")]
    pub write_timeout: Duration,
    /// How long a request may take from its head to its answer; longer than `read_timeout` and
    /// [`Consolidation::inline_wait`].
    #[serde(with = "duration")]
    pub request_timeout: Duration,
    /// Origins of the web pages that may call.
    pub cors_origins: Vec<String>,
    /// Names under which it may be called while there is no API key, beside addresses and `localhost`; `*`: any.
    pub allowed_hosts: Vec<String>,
}

/// `[limits]`: whoever goes beyond one is told its name and value.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Largest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Largest body of an import, in bytes; `precis import` takes any.
    pub max_import_bytes: u64,
    /// Bytes of the bodies of all requests under way, but for those of up to 64 KiB; at least `max_body_bytes`.
    pub max_body_bytes_in_flight: usize,
    /// Levels of lists and objects in a body; at most 120.
    pub max_json_depth: usize,
    /// Largest message, in bytes of its JSON.
    pub max_message_bytes: usize,
    /// Most messages of an exchange.
    pub max_messages_per_exchange: usize,
    /// Largest metadata of a session, in bytes of their JSON.
    pub max_metadata_bytes: usize,
    /// Largest system prompt of a context request, in bytes; its skills may have as many.
    pub max_system_prompt_bytes: usize,
    /// Requests a second of one API key, or of all together where there are no keys; 0: no limit.
    pub requests_per_second: u32,
    /// Requests of it at once, before the rate counts.
    pub request_burst: u32,
    /// Requests under way, whatever they wait for.
    pub max_requests_in_flight: usize,
    /// Requests at work: not those whose body is still on its way, nor those that wait for a model.
    pub max_concurrent_requests: usize,
    /// How long a request waits for its turn to work, while there is not more to do than can be done.
    #[serde(with = "duration")]
    pub queue_timeout: Duration,
}

impl Findings {
    /// Limits that leave room for each other.
    pub(super) fn limits(&mut self, settings: &Settings) {
        let Settings { server, limits, consolidation, .. } = settings;
        for (key, value, most) in [
            ("limits.max_json_depth", limits.max_json_depth, MOST_LEVELS),
            ("limits.max_requests_in_flight", limits.max_requests_in_flight, MOST_REQUESTS),
            ("limits.max_concurrent_requests", limits.max_concurrent_requests, MOST_REQUESTS),
        ] {
            if value > most {
                self.add(&[key], format!("must be at most {most}"));
            }
        }
        let (one, all) = (limits.max_body_bytes, limits.max_body_bytes_in_flight);
        if all < one && all > 0 {
            self.add(
                &["limits.max_body_bytes_in_flight", "limits.max_body_bytes"],
                format!("limits.max_body_bytes_in_flight ({all}) must not be less than limits.max_body_bytes ({one})"),
            );
        }
        let whole = server.request_timeout;
        for (key, part) in [
            ("server.read_timeout", server.read_timeout),
            ("consolidation.inline_wait", consolidation.inline_wait),
        ] {
            // What is out of bounds by itself is said elsewhere.
            let bounded = !whole.is_zero() && !part.is_zero() && part <= LONGEST;
            if bounded && whole <= part {
                let (whole, part) = (humantime::format_duration(whole), humantime::format_duration(part));
                self.add(
                    &["server.request_timeout", key],
                    format!("server.request_timeout ({whole}) must be longer than {key} ({part}), which is a part of it"),
                );
            }
        }
        for host in &server.allowed_hosts {
            if host != "*" && !is_host(host) {
                self.add(
                    &["server.allowed_hosts"],
                    format!(
                        "{host:?} is no host: write a name without scheme and port, as in \"precis.internal\""
                    ),
                );
            }
        }
        for origin in &server.cors_origins {
            if !is_origin(origin) {
                self.add(
                    &["server.cors_origins"],
                    format!("{origin:?} is no origin: write scheme, host and port only, as in \"https://app.example.com\""),
                );
            }
        }
    }
}

/// Whether a URL can have just that as its host.
fn is_host(text: &str) -> bool {
    let url = Url::parse(&format!("http://{text}/")).ok();
    url.is_some_and(|url| url.host_str() == Some(&text.to_lowercase()))
}

/// Whether a browser would call a page's origin just that. `*` is none: any page that its user looks at could then read
/// what a service without keys has.
fn is_origin(text: &str) -> bool {
    let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    url.is_some_and(|url| url.origin().ascii_serialization() == text)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_one, environment, file};
    use super::is_origin;

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        for good in ["https://app.example.com", "http://localhost:3000", "http://[::1]:8000"] {
            assert!(is_origin(good), "{good}");
        }
        for wrong in [
            "",
            "*",
            "null",
            "app.example.com",
            "https://app.example.com/",
            "https://App.example.com",
            "https://a.example:443",
            "https://u@a.example",
            "ftp://a.example",
        ] {
            assert!(!is_origin(wrong), "{wrong}");
            let problems =
                file(&format!("[server]\ncors_origins = ['https://a.example', '{wrong}']")).problems();
            assert_one(&problems, &format!("server.cors_origins (precis.toml): {wrong:?} is no origin"));
        }
        let variable = ("PRECIS__SERVER__CORS_ORIGINS", "https://a.example, http://b.example:81");
        let settings = environment(&[variable]).load().settings;
        assert_eq!(settings.server.cors_origins, ["https://a.example", "http://b.example:81"]);
    }

    #[test]
    fn a_host_is_a_name() {
        let variable = ("PRECIS__SERVER__ALLOWED_HOSTS", "precis, Memory.example");
        let settings = environment(&[variable]).load().settings;
        assert_eq!(settings.server.allowed_hosts, ["precis", "Memory.example"]);
        assert_eq!(file("[server]\nallowed_hosts = ['*']").load().settings.server.allowed_hosts, ["*"]);
        for wrong in ["", "http://precis", "precis:8080", "precis/", "u@precis", "a b"] {
            let problems = file(&format!("[server]\nallowed_hosts = ['precis', '{wrong}']")).problems();
            assert_one(&problems, &format!("server.allowed_hosts (precis.toml): {wrong:?} is no host"));
        }
    }

    #[test]
    fn the_limits_have_limits() {
        for (key, value, message) in [
            ("limits.max_json_depth", "121", "must be at most 120"),
            ("limits.max_json_depth", "0", "must be greater than 0"),
            ("limits.max_requests_in_flight", "1000001", "must be at most 1000000"),
            ("limits.max_concurrent_requests", "0", "must be greater than 0"),
            ("limits.request_burst", "0", "must be greater than 0"),
            (
                "limits.max_body_bytes_in_flight",
                "33554431",
                "limits.max_body_bytes_in_flight (33554431) must not be less than limits.max_body_bytes (33554432)",
            ),
            ("limits.queue_timeout", "0s", "must be longer than 0"),
            ("server.read_timeout", "0s", "must be longer than 0"),
            ("server.write_timeout", "0s", "must be longer than 0"),
            (
                "server.read_timeout",
                "3min",
                "server.request_timeout (3m) must be longer than server.read_timeout (3m)",
            ),
            (
                "server.request_timeout",
                "2min",
                "server.request_timeout (2m) must be longer than consolidation.inline_wait (2m)",
            ),
            (
                "consolidation.inline_wait",
                "1h",
                "server.request_timeout (3m) must be longer than consolidation.inline_wait (1h)",
            ),
        ] {
            let variable = format!("PRECIS__{}", key.replace('.', "__").to_uppercase());
            let problems = environment(&[(&variable, value)]).problems();
            assert_one(&problems, &format!("{key} (environment {variable}): {message}"));
            assert_eq!(problems.len(), 1, "{problems:#?}");
        }
        let unlimited = environment(&[("PRECIS__LIMITS__REQUESTS_PER_SECOND", "0")]).load().settings;
        assert_eq!(unlimited.limits.requests_per_second, 0);
    }
}
