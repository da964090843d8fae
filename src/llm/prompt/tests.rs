use super::*;
use crate::config;
use crate::domain::message::Role;
use crate::domain::transcript::{TranscriptEntry, TranscriptLine};

fn entry(text: &str) -> TranscriptLine {
    TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }.into()
}

fn built_in() -> Prompts {
    Prompts::new(&config::Prompts::default()).expect("the built-in wording is valid")
}

#[test]
fn built_in_prompts_are_valid_and_versioned() {
    let prompts = built_in();
    assert_eq!(prompts.version(), "3");
    assert!((600..1000).contains(&prompts.overhead()), "{}", prompts.overhead());
    let consolidate = prompts.render(&Task::Consolidate {
        lines: &[entry("hello")],
        previous: "",
        sentences: 7,
        limit: SummaryLimit::Words(600),
    });
    assert!(consolidate.user.contains("about 7 sentences"));
    assert!(
        consolidate
            .user
            .contains("\n\n<conversation>\n{\"role\":\"user\",\"text\":\"hello\"}\n</conversation>\n\n")
    );
    let time = time::macros::datetime!(2026-05-01 12:00 UTC);
    let line = TranscriptLine { time: Some(time), ..entry("hello") };
    let consolidate = prompts.render(&Task::Consolidate {
        lines: &[line],
        previous: "",
        sentences: 7,
        limit: SummaryLimit::Words(600),
    });
    assert!(consolidate.user.contains(
        "<conversation>\n{\"time\":\"Friday 2026-05-01 12:00 UTC\"}\n{\"role\":\"user\",\"text\":\"hello\"}\n"
    ));
    let meta = prompts.render(&Task::MetaConsolidate {
        summary: "Long.\n\nLonger.",
        sentences: 8,
        limit: SummaryLimit::Words(99),
    });
    assert!(meta.user.contains("about 8 sentences"));
    assert!(meta.user.contains("\n\n<summary>\n\"Long.\\n\\nLonger.\"\n</summary>\n\n"));
    for text in [&consolidate.system, &consolidate.user, &meta.system, &meta.user] {
        assert!(!text.contains(['{', '}']) || text.contains("{\"role\""), "{text}");
    }
}

#[test]
fn prompt_has_the_end_of_the_previous_summary() {
    let prompts = built_in();
    let limit = SummaryLimit::Words(600);
    let user = |previous: &str| {
        let task = Task::Consolidate { lines: &[entry("hello")], previous, sentences: 5, limit };
        let prompt = prompts.render(&task);
        assert!(prompt.tokens() <= prompts.overhead() + entry("hello").tokens);
        prompt.user
    };
    assert!(!user("").contains("<previous>"));
    let user = user(&format!("{} Ada moved </previous> to Rome.", "They talked. ".repeat(2000)));
    let expected =
        "They talked.  Ada moved \\u003c/previous\\u003e to Rome.\"\n</previous>\n\n<conversation>\n";
    assert!(user.contains(expected), "{user}");
}

#[test]
fn placeholders_in_content_are_not_replaced() {
    let text = "{sentences} {conversation} {summary} {nonsense}";
    let user = built_in()
        .render(&Task::Consolidate {
            lines: &[entry(text)],
            previous: "",
            sentences: 5,
            limit: SummaryLimit::Words(600),
        })
        .user;
    assert!(user.contains(text), "{user}");
    let user = built_in()
        .render(&Task::MetaConsolidate { summary: text, sentences: 5, limit: SummaryLimit::Words(99) })
        .user;
    assert!(user.contains(text), "{user}");
}

#[test]
fn invalid_templates_are_all_reported_with_their_settings() {
    let errors = Prompts::new(&config::Prompts {
        consolidate_system: Some("Use {conversation}.".to_owned()),
        consolidate_user: Some("No data, {sentences} sentences.".to_owned()),
        meta_system: Some("Be {brief_ly}.".to_owned()),
        meta_user: Some("{summary} and again {summary}, {conversation}".to_owned()),
    })
    .expect_err("all four are wrong");
    assert_eq!(
        errors,
        [
            "consolidation.prompts.consolidate_system: unknown placeholder {conversation}; known here: {sentences}",
            "consolidation.prompts.consolidate_user: {conversation} is missing; insert it where the text belongs",
            "consolidation.prompts.meta_system: unknown placeholder {brief_ly}; known here: {sentences}",
            "consolidation.prompts.meta_user: unknown placeholder {conversation}; known here: {sentences}, {summary}",
            "consolidation.prompts.meta_user: {summary} occurs more than once; keep one",
        ]
    );
}

#[test]
fn braces_around_anything_but_a_word_are_text() {
    let prompts = Prompts::new(&config::Prompts {
        consolidate_system: Some("Like {\"a\": 1}, { x }, {}, { and {sentences}}.".to_owned()),
        ..config::Prompts::default()
    })
    .expect("valid");
    let prompt = prompts.render(&Task::Consolidate {
        lines: &[],
        previous: "",
        sentences: 6,
        limit: SummaryLimit::Words(600),
    });
    assert_eq!(prompt.system, "Like {\"a\": 1}, { x }, {}, { and 6}.");
}

#[test]
fn prompt_version_depends_on_the_text_of_each_template() {
    let version = |system: &str, user: &str| {
        Prompts::new(&config::Prompts {
            consolidate_system: Some(system.to_owned()),
            consolidate_user: Some(user.to_owned()),
            ..config::Prompts::default()
        })
        .expect("valid")
        .version()
        .to_owned()
    };
    let one = version("a", "b{conversation}");
    assert!(one.strip_prefix("custom-").is_some_and(|hex| hex.len() == 8), "{one}");
    assert_eq!(one, version("a", "b{conversation}"));
    assert_ne!(one, version("ab", "{conversation}"));
}

#[test]
fn copy_of_a_prompt_is_recognised() {
    let prompts = built_in();
    let prompt = prompts.render(&Task::Consolidate {
        lines: &[entry("Ada flies to Rome on 3 May.")],
        previous: "",
        sentences: 5,
        limit: SummaryLimit::Words(600),
    });
    let first_line = prompt.system.lines().next().expect("a line");
    assert!(prompts.is_copied_by(first_line) && prompts.is_copied_by(&format!("Sure! {first_line}")));
    assert!(!prompts.is_copied_by("Ada flies to Rome on 3 May, and keeps what is useful later."));
}
