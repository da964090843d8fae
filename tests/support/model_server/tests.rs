//! The server itself, as a plain client meets it, in both protocols: also what keeps all of it in use in every binary
//! that includes it.

use super::{Behaviour, Form, ModelServer, Protocol, USAGE, gzip, refused_base_url};
use client::{Client, PROTOCOLS, Seen, request};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;

#[path = "tests/client.rs"]
mod client;

/// Long enough for several chunks, with characters that a cut can part.
const TEXT: &str = "Ada flies to Zürich on 3 May; Bo wants the 東京 numbers by Friday.";
const SOON: Duration = Duration::from_millis(1);

async fn seen(server: &ModelServer, protocol: Protocol, stream: bool) -> Seen {
    Client::call(server, protocol, &request(stream)).await.rest().await
}

/// What is sent in a stream, and in the one object of a call that asks for none: the parts that make the difference,
/// and whether the response ends in good order, and whether the client got everything.
#[tokio::test]
async fn every_behaviour_that_ends_in_both_protocols() {
    let released = Arc::new(Semaphore::new(100));
    let half = || "Ada".to_owned();
    let proper = [
        Behaviour::answer(TEXT),
        Behaviour::reply(|_| TEXT.to_owned()),
        Behaviour::Held(released, TEXT.to_owned()),
        Behaviour::Delayed(SOON, TEXT.to_owned()),
        Behaviour::Whole(TEXT.to_owned()),
        Behaviour::AtMost(1, TEXT.to_owned()),
        Behaviour::Thinking("Hm, 東京…".to_owned(), TEXT.to_owned()),
        Behaviour::Trickle(SOON, TEXT.split_inclusive(' ').map(str::to_owned).collect()),
    ];
    let server = ModelServer::start().await;
    for protocol in PROTOCOLS {
        for (behaviour, stream) in proper.iter().flat_map(|behaviour| [(behaviour, true), (behaviour, false)])
        {
            server.push(behaviour.clone());
            let seen = seen(&server, protocol, stream).await;
            let (finish, mark) = match protocol {
                Protocol::OpenAi => ("stop", "[DONE]"),
                Protocol::Anthropic => ("end_turn", "message_stop"),
            };
            assert_eq!((seen.status, seen.complete, seen.text().as_str()), (200, true, TEXT));
            assert_eq!(seen.finish().as_deref(), Some(finish));
            assert_eq!(seen.usage(), (Some(USAGE.0), Some(USAGE.1)));
            let streamed = stream && !matches!(behaviour, Behaviour::Whole(_));
            assert_eq!(seen.ends_with(mark), streamed, "{}", seen.body());
            assert_eq!(seen.header("content-type").contains("event-stream"), streamed);
            assert_eq!(seen.thoughts().is_empty(), !matches!(behaviour, Behaviour::Thinking(..)));
        }
        server.push(Behaviour::AtMost(0, half()));
        let refused = seen(&server, protocol, true).await;
        assert_eq!((refused.status, refused.body().contains("prompt is too long")), (400, true));
        for (reason, said) in
            [("length", ["length", "max_tokens"]), ("content_filter", ["content_filter", "refusal"])]
        {
            server.push(Behaviour::Finish(half(), reason));
            assert_eq!(
                seen(&server, protocol, true).await.finish().as_deref(),
                Some(said[protocol as usize])
            );
        }
        // The behaviour; is the response complete, is there a finish reason, is there an end mark.
        for (behaviour, complete, reason, mark) in [
            (Behaviour::BreakOff(half()), false, false, false),
            (Behaviour::EndEarly(half()), true, false, false),
            (Behaviour::MarkOnly(half()), true, false, true),
            (Behaviour::ReasonOnly(half()), true, true, false),
            (Behaviour::ErrorAfter(half(), "overloaded"), true, false, false),
        ] {
            server.push(behaviour.clone());
            let streamed = seen(&server, protocol, true).await;
            assert_eq!(streamed.text(), "Ada");
            assert_eq!((streamed.complete, streamed.finish().is_some()), (complete, reason));
            assert_eq!(streamed.ends_with(["[DONE]", "message_stop"][protocol as usize]), mark);
            assert_eq!(server.calls().last().expect("a call").answered, complete);
            let error = matches!(behaviour, Behaviour::ErrorAfter(..));
            server.push(behaviour);
            let whole = seen(&server, protocol, false).await;
            assert_eq!((whole.complete, whole.finish().is_some()), (complete, reason));
            for seen in [streamed, whole] {
                assert_eq!(seen.body().contains(r#""message":"overloaded""#), error, "{}", seen.body());
            }
        }
    }
    server.until_idle().await;
    assert_eq!(server.most_in_flight(), 1);
}

#[tokio::test]
async fn thoughts_have_their_place_in_each_protocol() {
    let server = ModelServer::start().await;
    server.default(Behaviour::Thinking("Hm, 東京…".to_owned(), TEXT.to_owned()));
    for protocol in PROTOCOLS {
        for stream in [true, false] {
            let seen = seen(&server, protocol, stream).await;
            assert_eq!((seen.thoughts().as_str(), seen.text().as_str()), ("Hm, 東京…", TEXT));
            let signed = protocol == Protocol::Anthropic;
            assert_eq!(seen.body().contains(r#""signature":"c2lnbmVk""#), signed);
        }
    }
    server.default(Behaviour::thinking_aloud("Hm.", TEXT));
    assert_eq!(
        seen(&server, Protocol::OpenAi, true).await.text(),
        format!("<think>\nHm.\n</think>\n\n{TEXT}")
    );
}

/// That it takes long enough: how much longer is up to the machine.
#[tokio::test]
async fn what_is_slow_takes_its_time() {
    let server = ModelServer::start().await;
    let pause = Duration::from_millis(10);
    for (protocol, stream) in PROTOCOLS.into_iter().flat_map(|protocol| [(protocol, true), (protocol, false)])
    {
        for (behaviour, least, chunks) in [
            (Behaviour::Trickle(pause, vec!["Ada ".to_owned(); 5]), pause * 5, 6),
            (Behaviour::Delayed(pause, TEXT.to_owned()), pause, 1),
        ] {
            server.push(behaviour);
            let started = Instant::now();
            let seen = seen(&server, protocol, stream).await;
            assert!(started.elapsed() >= least && (seen.chunks >= chunks || !stream));
        }
    }
}

/// Each is left by the client as soon as it has seen what comes, and the server notices.
#[tokio::test]
async fn what_has_no_end_ends_with_its_client() {
    let server = ModelServer::start().await;
    let text = || "Ada".to_owned();
    let nobody = Arc::new(Semaphore::new(0));
    let mut calls = 0;
    for (protocol, stream) in PROTOCOLS.into_iter().flat_map(|protocol| [(protocol, true), (protocol, false)])
    {
        let (ping, half) = match protocol {
            Protocol::OpenAi => (r#""delta":{"content":""}"#, r#""choices":"#),
            Protocol::Anthropic => ("event: ping\n", r#""content":"#),
        };
        // A chunk with a line feed.
        let space = "1\r\n\n\r\n";
        for (behaviour, streamed, whole, times) in [
            (Behaviour::Hang, "", "", 0),
            (Behaviour::Held(Arc::clone(&nobody), text()), "", "", 0),
            (Behaviour::Delayed(Duration::from_hours(1), text()), "", "", 0),
            (Behaviour::HangAfter(text()), "Ada", half, 1),
            (Behaviour::CommentsOnly(SOON), ": still here\n\n", space, 4),
            (Behaviour::PingsOnly(SOON), ping, space, 4),
        ] {
            server.push(behaviour);
            calls += 1;
            let mut client = Client::call(&server, protocol, &request(stream)).await;
            server.until_calls(calls).await;
            client.until(if stream { streamed } else { whole }, times).await;
            drop(client);
            server.until_idle().await;
        }
    }
    assert!(server.calls().iter().all(|call| !call.answered));
}

#[tokio::test]
async fn every_form_leaves_the_text_as_it_is() {
    let server = ModelServer::start().await;
    let forms = [
        Form::EveryByte,
        Form::Crlf,
        Form::Cr,
        Form::Bom,
        Form::Comments,
        Form::UnknownEvents,
        Form::UnknownFields,
        Form::HugeComment(300_000),
        Form::HugeEvent(300_000),
        Form::NoUsage,
        Form::Labelled("text/plain"),
    ];
    for protocol in PROTOCOLS {
        for (form, stream) in forms.iter().flat_map(|&form| [(form, true), (form, false)]) {
            server.push(Behaviour::answer(TEXT).with(form));
            let seen = seen(&server, protocol, stream).await;
            assert_eq!((seen.complete, seen.text().as_str()), (true, TEXT), "{form:?}");
            assert_eq!(seen.usage() == (None, None), form == Form::NoUsage, "{form:?}");
            let body = seen.body();
            let shown = match form {
                Form::EveryByte => seen.chunks == body.len(),
                Form::Crlf => body.matches('\n').count() == body.matches("\r\n").count(),
                Form::Cr => body.contains("\r\r") && !body.contains('\n'),
                Form::Bom => body.starts_with('\u{feff}'),
                Form::Comments => body.contains(": within an event\ndata"),
                Form::UnknownEvents => body.contains("event: whatever\n"),
                Form::UnknownFields => body.contains("x-unknown: 1\n") && body.contains("\"x_unknown\""),
                Form::HugeComment(bytes) | Form::HugeEvent(bytes) => body.len() > bytes,
                _ => true,
            };
            assert!(shown || !stream, "{form:?}: {body}");
            let label = match (form, stream) {
                (Form::Labelled(label), _) => label,
                (_, true) => "text/event-stream",
                (_, false) => "application/json",
            };
            assert_eq!(seen.header("content-type"), label);
        }
        server.push(Behaviour::answer(TEXT).with(Form::Crlf).with(Form::EveryByte).with(Form::Bom));
        let seen = seen(&server, protocol, true).await;
        assert!(seen.chunks == seen.body().len() && seen.body().contains("\r\n\r\n"));
        assert_eq!(seen.text(), TEXT);
    }
}

#[tokio::test]
async fn some_forms_hide_the_text() {
    let server = ModelServer::start().await;
    for (protocol, stream) in PROTOCOLS.into_iter().flat_map(|protocol| [(protocol, true), (protocol, false)])
    {
        server.push(Behaviour::answer(TEXT));
        let plain = seen(&server, protocol, stream).await.bytes;
        server.push(Behaviour::answer(TEXT).with(Form::Gzip));
        let compressed = seen(&server, protocol, stream).await;
        assert_eq!((compressed.complete, compressed.header("content-encoding")), (true, "gzip"));
        assert_eq!(compressed.bytes, gzip::compress(&plain));
        server.push(Behaviour::answer(TEXT).with(Form::LengthOver(10)));
        let over = seen(&server, protocol, stream).await;
        assert_eq!((over.complete, &over.bytes), (false, &plain));
        server.push(Behaviour::answer(TEXT).with(Form::LengthUnder(10)));
        let under = seen(&server, protocol, stream).await;
        assert_eq!((under.complete, &under.bytes[..]), (true, &plain[..plain.len() - 10]));
    }
    // What zlib makes of it when it is told to use the fixed code (Python: zlib.compressobj(strategy=zlib.Z_FIXED)).
    let by_zlib = [
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0x73, 0x4c, 0x49, 0xd4, 0x51, 0x88, 0x3a,
        0xbc, 0xa7, 0x28, 0x33, 0x39, 0x43, 0x0f, 0x00, 0xf7, 0x5a, 0xb5, 0xa8, 0x0d, 0x00, 0x00, 0x00,
    ];
    let made = gzip::compress("Ada, Zürich.".as_bytes());
    assert_eq!(made, by_zlib);
}

#[tokio::test]
async fn errors_have_the_shape_of_their_protocol() {
    let server = ModelServer::start().await;
    for (status, openai, anthropic) in [
        (200, "server_error", "api_error"),
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "invalid_request_error", "authentication_error"),
        (402, "invalid_request_error", "billing_error"),
        (403, "invalid_request_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (504, "server_error", "timeout_error"),
        (529, "server_error", "overloaded_error"),
    ] {
        for (protocol, kind) in PROTOCOLS.into_iter().zip([openai, anthropic]) {
            server.push(Behaviour::fail_with(
                status,
                "no",
                &[("retry-after", "3"), ("retry-after-ms", "2500")],
            ));
            let seen = seen(&server, protocol, true).await;
            assert_eq!((seen.status, seen.complete), (status, true));
            assert_eq!((seen.header("retry-after"), seen.header("retry-after-ms")), ("3", "2500"));
            let body: Value = serde_json::from_slice(&seen.bytes).expect("JSON");
            assert_eq!((&body["error"]["message"], &body["error"]["type"]), (&json!("no"), &json!(kind)));
            assert_eq!(body["type"] == "error", protocol == Protocol::Anthropic);
        }
    }
    for (behaviour, status, header, part) in [
        (Behaviour::fail(429, "slow down"), 429, ("content-type", "application/json"), "slow down"),
        (Behaviour::web_page(502), 502, ("content-type", "text/html"), "<h1>502</h1>"),
        (Behaviour::redirect(307, "http://example.org/"), 307, ("location", "http://example.org/"), ""),
        (
            Behaviour::tool_calls(&[("a", "f", "{}")]),
            200,
            ("content-type", "application/json"),
            "\"tool_calls\"",
        ),
        (Behaviour::garbage(), 200, ("content-type", "text/event-stream"), "oops"),
        (Behaviour::Raw(529, Vec::new(), "ouch".to_owned()), 529, ("content-length", "4"), "ouch"),
    ] {
        server.push(behaviour);
        let seen = seen(&server, Protocol::OpenAi, true).await;
        assert_eq!((seen.status, seen.header(header.0)), (status, header.1));
        assert!(seen.complete && seen.body().contains(part));
    }
}

#[tokio::test]
async fn some_do_not_answer_at_all() {
    let server = ModelServer::start().await;
    for behaviour in [Behaviour::Close, Behaviour::CloseOnAccept] {
        server.push(behaviour);
        assert_eq!(seen(&server, Protocol::OpenAi, true).await.status, 0);
    }
    assert_eq!((server.calls().len(), server.connections()), (1, 2));
    assert!(!server.calls()[0].answered);
    let refused = refused_base_url();
    let address = refused.trim_start_matches("http://").trim_end_matches("/v1");
    let error = TcpStream::connect(address).await.expect_err("nobody listens");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    let elsewhere = Client::post(&server, "/v2/messages", "{}").await.rest().await;
    assert_eq!((elsewhere.status, server.calls().len()), (404, 1));
    // It takes those with it that are being served.
    server.push(Behaviour::Hang);
    let client = Client::call(&server, Protocol::OpenAi, "{}").await;
    server.until_calls(2).await;
    drop(server);
    assert_eq!(client.rest().await.status, 0);
}

#[tokio::test]
async fn calls_are_recorded_as_they_came() {
    let server = ModelServer::start().await;
    server.default(Behaviour::echo_longer());
    let texts = r#"[{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]"#;
    let user = format!(r#"{{"role": "user", "content": {texts}}}"#);
    let openai =
        format!(r#"{{"stream": true, "messages": [{{"role": "system", "content": "S"}}, {user}, {user}]}}"#);
    let anthropic = format!(r#"{{"stream": true, "system": {texts}, "messages": [{user}]}}"#);
    for (protocol, path, body, system) in [
        (Protocol::OpenAi, "/v1/chat/completions?key=1", openai, "S"),
        (Protocol::Anthropic, "/v1/messages", anthropic, "UV"),
    ] {
        let seen = Client::post(&server, path, &body).await.rest().await;
        // Nobody asked OpenAI for it.
        assert_eq!(seen.usage().0.is_some(), protocol == Protocol::Anthropic);
        assert_eq!(seen.text(), "UV And so on.");
        let call = server.calls().pop().expect("a call");
        assert_eq!((call.protocol, call.path.as_str()), (protocol, path));
        assert_eq!((call.system(), call.user(), call.header("x-test")), (system, "UV", "1"));
        assert_eq!((call.header("x-none"), call.body["stream"] == true), ("", true));
    }
    Client::post(&server, "/v1/messages", "no JSON").await.rest().await;
    let calls = server.calls();
    assert!(calls.is_sorted_by_key(|call| call.at) && calls.iter().all(|call| call.answered));
    assert_eq!((calls[2].body.is_null(), calls[2].user()), (true, ""));
}

#[tokio::test]
async fn those_that_are_too_many_at_once_are_turned_away() {
    let server = ModelServer::start().await;
    server.allow_at_once(2);
    let released = Arc::new(Semaphore::new(0));
    server.default(Behaviour::Held(Arc::clone(&released), TEXT.to_owned()));
    let first = Client::call(&server, Protocol::OpenAi, &request(true)).await;
    let second = Client::call(&server, Protocol::Anthropic, &request(true)).await;
    server.until_calls(2).await;
    server.push(Behaviour::answer("the next"));
    for protocol in PROTOCOLS {
        assert_eq!(seen(&server, protocol, true).await.status, 429);
    }
    released.add_permits(2);
    assert_eq!((first.rest().await.text(), second.rest().await.text()), (TEXT.to_owned(), TEXT.to_owned()));
    assert_eq!(seen(&server, Protocol::OpenAi, true).await.text(), "the next");
    let turned_away: Vec<bool> = server.calls().iter().map(|call| call.turned_away).collect();
    assert_eq!(turned_away, [false, false, true, true, false]);
    assert_eq!(server.most_in_flight(), 2);
}
