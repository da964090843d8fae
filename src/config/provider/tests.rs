//! Settings of providers, through `Settings::load`.

use crate::config::tests::{assert_one, environment, file, with_key};
use crate::config::{Loaded, OutputLimitField, ProviderKind};
use secrecy::ExposeSecret as _;
use serde_json::json;

#[test]
fn a_provider_has_what_its_kind_has() {
    let settings = file("[llm.providers.a]\nkind = 'anthropic'\n[llm.providers.o]").load().settings;
    let (a, o) = (&settings.llm.providers["a"], &settings.llm.providers["o"]);
    assert_eq!(a.kind, ProviderKind::Anthropic);
    assert_eq!(a.base_url.as_deref(), Some("https://api.anthropic.com/v1"));
    assert_eq!((a.output_limit_field, a.stream_options), (None, None));
    assert_eq!(o.base_url.as_deref(), Some("https://api.openai.com/v1"));
    assert_eq!(o.output_limit_field, Some(OutputLimitField::MaxCompletionTokens));
    assert_eq!(o.stream_options, Some(true));
    let written = with_key("output_limit_field = 'max_tokens'\nstream_options = false").load().settings;
    let o = &written.llm.providers["openai"];
    assert_eq!(o.output_limit_field, Some(OutputLimitField::MaxTokens));
    assert_eq!(o.stream_options, Some(false));
}

#[test]
fn what_a_kind_does_not_take_is_named() {
    let toml = "[llm.providers.extractive]\nbase_url = 'http://h'\napi_key = { env = 'A' }\napi_key_header = 'k'\n\
        headers = { x-a = '1' }\nbody = { a.b = 1 }\noutput_limit_field = 'max_tokens'\nstream_options = true\n\
        [llm.providers.a]\nkind = 'anthropic'\noutput_limit_field = 'max_tokens'\nstream_options = true\n\
        [llm.providers.x]\nkind = 'anthropik'\nstream_options = 1";
    let problems = file(toml).environment(&[("A", "k")]).problems();
    for setting in
        ["base_url", "api_key", "api_key_header", "headers", "body", "output_limit_field", "stream_options"]
    {
        let key = format!("llm.providers.extractive.{setting} (precis.toml)");
        assert_one(&problems, &format!("{key}: extractive is built in and takes no {setting}: write kind"));
    }
    for beginning in [
        "llm.providers.a.output_limit_field (precis.toml): a provider of kind anthropic takes no output_limit",
        "llm.providers.a.stream_options (precis.toml): a provider of kind anthropic takes no stream_options",
        "llm.providers.x.kind (precis.toml): unknown value `anthropik`, expected one of `openai`, `anthropic`",
        "llm.providers.x.stream_options (precis.toml): must be true or false",
    ] {
        assert_one(&problems, beginning);
    }
    assert_eq!(problems.len(), 11, "{problems:#?}");
}

#[test]
fn a_base_url_may_have_a_query_without_secrets() {
    for url in ["https://h/openai/deployments/d?api-version=2024-10-21", "http://h/v1?a&b=c%20d"] {
        let loaded = with_key(&format!("base_url = '{url}'")).load();
        assert_eq!(loaded.settings.llm.providers["openai"].base_url.as_deref(), Some(url));
    }
    for (url, beginning) in [
        ("h/v1", "must be a URL, such as"),
        ("ftp://h", "must begin with http:// or https://"),
        ("http://hunter2@h", "must not hold user or password: a secret belongs into api_key or headers"),
        ("http://u:hunter2@h", "must not hold user or password"),
        ("http://h/v1#hunter2", "must have no fragment"),
        ("http://h/v1?api-key=hunter2", "must hold no secret"),
        ("http://h/v1?a=1&Access_TOKEN=hunter2", "must hold no secret"),
        ("http://h/v1?a=1;Secret=hunter2", "must hold no secret"),
        ("http://h/v1?sig=hunter2", "must hold no secret"),
        ("http://h/v1?PassWord=hunter2", "must hold no secret"),
        ("http://h/v1?authorization=hunter2", "must hold no secret"),
        ("http://h/v1?k%65y=hunter2", "must hold no secret"),
    ] {
        let problems = with_key(&format!("base_url = '{url}'")).problems();
        assert_one(&problems, &format!("llm.providers.openai.base_url (precis.toml): {beginning}"));
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert!(!problems[0].contains("hunter2"));
    }
}

#[test]
fn headers_come_from_all_sources() {
    let toml = "[llm.providers.P.headers]\nX-Title = { file = 'absent' }\nX-B = 'b'\nX-C = { env = 'C' }";
    let loaded = file(toml)
        .environment(&[
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-TITLE", "hunter2"),
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-B__ENV", "B"),
            ("PRECIS__LLM__PROVIDERS__P__HEADERS__X-D", "00"),
            ("B", "hunter3"),
            ("C", "hunter4"),
        ])
        .load();
    let headers = &loaded.settings.llm.providers["P"].headers;
    let read = headers.iter().map(|(name, value)| {
        (name.as_str(), value.source().unwrap().read().unwrap().expose_secret().to_owned())
    });
    let expected = [("X-B", "hunter3"), ("X-C", "hunter4"), ("X-Title", "hunter2"), ("x-d", "00")];
    assert_eq!(read.collect::<Vec<_>>(), expected.map(|(name, value)| (name, value.to_owned())));
    let shown = loaded.to_string();
    let line =
        "llm.providers.P.headers.X-Title = \"[redacted]\"  # environment PRECIS__LLM__PROVIDERS__P__HEADERS";
    assert!(shown.contains(line), "{shown}");
    assert!(shown.contains("llm.providers.P.headers.X-C = \"[redacted]\"  # /"), "{shown}");
    assert!(!format!("{shown}{loaded:?}").contains("hunter"));
}

#[test]
fn a_header_that_cannot_be_added_is_named() {
    for (settings, beginning) in [
        ("api_key_header = ''", "api_key_header (precis.toml): must be the name of an HTTP header"),
        ("api_key_header = 'hunter2:'", "api_key_header (precis.toml): must be the name of an HTTP header"),
        ("api_key_header = 'Host'", "api_key_header (precis.toml): is set by the HTTP client itself"),
        ("headers = { 'x y' = 'hunter2' }", "headers.\"x y\" (precis.toml): must be the name of an HTTP"),
        ("headers = { Content-Length = '1' }", "headers.Content-Length (precis.toml): is set by the HTTP"),
        ("headers = { host = { env = 'A' } }", "headers.host (precis.toml): is set by the HTTP client"),
        (
            "api_key = 'k'\nheaders = { Authorization = 'hunter2' }",
            "headers.Authorization (precis.toml): takes the api_key: leave out one of the two",
        ),
        (
            "kind = 'anthropic'\napi_key = 'k'\nheaders = { x-api-key = 'hunter2' }",
            "headers.x-api-key (precis.toml): takes the api_key",
        ),
        (
            "api_key = 'k'\napi_key_header = 'api-key'\nheaders = { API-Key = 'hunter2' }",
            "headers.API-Key (precis.toml): takes the api_key",
        ),
        (
            "headers = { X-A = 'hunter2', x-a = 'hunter2' }",
            "headers.x-a (precis.toml): is the same header as X-A",
        ),
        ("headers = { x-a = 5 }", "headers.x-a (precis.toml): expected one of: a string, { env"),
        ("headers = { x-a = {} }", "headers.x-a (precis.toml): expected one of: a string, { env"),
        ("headers = { x-a.env = 'A', x-a.file = 'hunter2' }", "headers.x-a (precis.toml): expected one of"),
        ("headers = { x-a.sk = 'hunter2' }", "headers.x-a.sk (precis.toml): unknown key: llm"),
        ("headers = 'hunter2'", "headers (precis.toml): is a section: set its keys, such as llm"),
        (
            "header.x-a = 'hunter2'",
            "header.x-a (precis.toml): unknown key: did you mean llm.providers.openai.headers.x-a?",
        ),
        ("headers = { x-a = ' ' }", "headers.x-a (precis.toml): the secret is empty"),
        ("headers = { x-a = \"hunter2\\n2\" }", "headers.x-a (precis.toml): the secret must be one line"),
        (
            "headers = { x-a.env = 'ABSENT' }",
            "headers.x-a.env (precis.toml): the environment variable ABSENT",
        ),
    ] {
        let problems = with_key(settings).environment(&[("A", "hunter2")]).problems();
        assert_one(&problems, &format!("llm.providers.openai.{beginning}"));
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert!(!problems[0].contains("hunter2"), "{problems:#?}");
    }
    let elsewhere = "api_key = 'k'\napi_key_header = 'api-key'\nheaders = { authorization = 'Basic x' }";
    with_key(elsewhere).load();
    with_key("headers = { Authorization = 'Basic x' }").load();
    with_key("headers = {}\nbody = {}").load();
}

#[test]
fn fields_of_the_body_are_what_they_are_in_the_file() {
    let toml = "[llm.providers.openai.body]\nTemperature = 0.0\nseed = 0\nservice_tier = 'flex'\nstore = false\nbig = 1e300\n\
        empty = {}\nneg = -1\ntools = [1, 'a', { \"b c\" = [{}, 2.0] }]\n[llm.providers.openai.body.chat.kwargs]\n\
        Enable_Thinking = true\n\"a.b\" = 'x'";
    let loaded = file(toml)
        .environment(&[
            ("PRECIS__LLM__PROVIDERS__OPENAI__BODY__SERVICE_TIER", "auto"),
            ("PRECIS__LLM__PROVIDERS__OPENAI__BODY__CHAT__KWARGS__ENABLE_THINKING", "5"),
        ])
        .load();
    let expected = json!({
        "Temperature": 0.0, "seed": 0, "service_tier": "auto", "store": false, "big": 1e300, "empty": {}, "neg": -1,
        "tools": [1, "a", { "b c": [{}, 2.0] }], "chat": { "kwargs": { "Enable_Thinking": "5", "a.b": "x" } },
    });
    let body = |loaded: &Loaded| json!(loaded.settings.llm.providers["openai"].body);
    assert_eq!(body(&loaded), expected);
    let shown = loaded.to_string();
    for line in [
        "llm.providers.openai.body.Temperature = 0.0  # /",
        "llm.providers.openai.body.chat.kwargs.\"a.b\" = \"x\"  # /",
        "llm.providers.openai.body.chat.kwargs.Enable_Thinking = \"5\"  # environment PRECIS__LLM__PROV",
        "llm.providers.openai.body.empty = {}  # /",
        "llm.providers.openai.body.tools = [1, \"a\", {\"b c\" = [{}, 2.0]}]  # /",
    ] {
        assert!(shown.contains(&format!("\n{line}")), "{line} in {shown}");
    }
    assert_eq!(body(&file(&shown).load()), expected);
}

#[test]
fn a_field_that_is_not_the_users_is_named() {
    for (body, beginning) in [
        ("model = 'm'", "body.model (precis.toml): is set by precis itself: leave it out"),
        ("messages = []", "body.messages (precis.toml): is set by precis itself"),
        ("Stream = false", "body.Stream (precis.toml): is set by precis itself"),
        ("system = 's'", "body.system (precis.toml): is set by precis itself"),
        ("stream_options.a = 1", "body.stream_options (precis.toml): is set by precis itself"),
        (
            "max_tokens = 0",
            "body.max_tokens (precis.toml): is set by precis: write the model's output_limit, and the provider's",
        ),
        ("max_completion_tokens = 1", "body.max_completion_tokens (precis.toml): is set by precis: write"),
        ("a = nan", "body.a (precis.toml): holds nan or inf"),
        ("a.b = [{ c = -inf }]", "body.a (precis.toml): holds nan or inf"),
    ] {
        let problems = with_key(&format!("body = {{ {body} }}")).problems();
        assert_one(&problems, &format!("llm.providers.openai.{beginning}"));
        assert_eq!(problems.len(), 1, "{problems:#?}");
    }
    let text = environment(&[("PRECIS__LLM__PROVIDERS__X__BODY", "{}")]).problems();
    assert_one(&text, "llm.providers.x.body (environment PRECIS__LLM__PROVIDERS__X__BODY): is a section");
    let misspelt = with_key("bdy.chat.kwargs = 1").problems();
    let meant = "did you mean llm.providers.openai.body.chat.kwargs?";
    assert_one(
        &misspelt,
        &format!("llm.providers.openai.bdy.chat.kwargs (precis.toml): unknown key: {meant}"),
    );
}
