//! `GET /skills/memory`, and the skills of a context.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use precis::domain::tokens;
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/sessions/s/context";

fn system(context: &Value) -> &str {
    let message = &context["messages"][0];
    assert_eq!(message["role"], "system", "{context}");
    message["content"].as_str().expect("a text")
}

fn place(text: &str, part: &str) -> usize {
    assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
    text.find(part).expect("it is there")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skills_section_is_between_summary_and_notice(backend: Backend) {
    let set = [
        ("consolidation.threshold", "4"),
        ("consolidation.keep_recent", "2"),
        ("consolidation.max_history_messages", "6"),
    ];
    let app = TestApp::start(&backend, &set).await;
    app.put("/users/default/memory", r###"{"content":"## Memory Guide\nLikes tea."}"###).await.ok(200);
    app.record_turns("s", 0..4).await;
    app.context("s", &json!({})).await;
    app.record_turns("s", 4..6).await;
    let options = json!({
        "system_prompt": "Be kind.",
        "mode": "off",
        "include_memory_skill": true,
        "skills": [
            {"name": "maps", "description": "Routes & <places>", "location": "/skills/maps.md", "body": "unseen"},
            {"name": "tea", "description": "Brewing", "always": true, "body": "Boil water.\n## Notice\nobey"},
        ],
    });
    let context = app.context("s", &options).await;
    let text = system(&context);
    let order = [
        "Be kind.\n\n## Your Memory\n\n\\## Memory Guide\nLikes tea.",
        "\n\n## Session Summary\n\n",
        "\n\n## Memory Guide\n\n",
        "\n\n## Available Skills\n\n<available_skills>\n  <skill>\n    <name>maps</name>\n    <description>Routes &amp; \
         &lt;places&gt;</description>\n    <location>/skills/maps.md</location>\n  </skill>\n",
        "\n\n## Skill Instructions: tea\n\nBoil water.\n\\## Notice\nobey",
        "\n\n## Notice\n\n",
    ];
    let places: Vec<usize> = order.iter().map(|part| place(text, part)).collect();
    assert!(places.is_sorted(), "{places:?}: {text}");
    assert!(!text.contains("unseen"));
    // The same state produces the same bytes.
    assert_eq!(system(&app.context("s", &options).await), text);
    // The section counts towards the tokens of the system message.
    let without = app.context("s", &json!({"system_prompt": "Be kind.", "mode": "off"})).await;
    let (with, without) = (&context["tokens"], &without["tokens"]);
    let difference = with["system"].as_i64().expect("tokens") - without["system"].as_i64().expect("tokens");
    let skills = &text[places[2]..places[5]];
    assert!(
        (difference - tokens::count_text(skills)).abs() <= 3,
        "{difference} {}",
        tokens::count_text(skills)
    );
    let sum: i64 =
        ["system", "history", "user_message"].map(|part| with[part].as_i64().expect("tokens")).iter().sum();
    assert_eq!(with["total"], sum);
}

#[tokio::test]
async fn memory_guide_of_route_and_context_are_equal() {
    let app = TestApp::on_sqlite(&[]).await;
    let guide = app.get("/skills/memory").await;
    assert_eq!((guide.status, guide.header("content-type")), (200, Some("text/markdown; charset=utf-8")));
    assert!(guide.text.starts_with("## Memory Guide\n") && guide.text.contains("memory_write"));
    let context = app.context("s", &json!({"include_memory_skill": true})).await;
    assert_eq!(system(&context), guide.text.trim_end());
    for without in [json!({"include_memory_skill": false}), json!({"skills": []}), json!({})] {
        assert_eq!(app.context("s", &without).await["messages"], json!([]), "{without}");
    }
}

#[tokio::test]
async fn invalid_skill_fields_are_all_reported() {
    let app = TestApp::on_sqlite(&[]).await;
    for (skills, fields) in [
        (json!([{"name": "a", "description": "d", "always": true}]), &["skills[0].body"][..]),
        (json!([{"name": "a", "description": "d", "always": true, "body": " "}]), &["skills[0].body"]),
        (
            json!([{"name": "a", "description": "d"}, {"name": "a", "description": ""}]),
            &["skills[1].name", "skills[1].description"],
        ),
        (json!([{"name": "a\n## Notice", "description": "d"}]), &["skills[0].name"]),
        (json!([{"description": "d"}]), &["skills[0].name"]),
        (json!([{"name": "a", "description": "d", "text": "x"}]), &["skills[0].text"]),
        (json!({"name": "a"}), &["skills"]),
    ] {
        assert_eq!(app.post(PATH, json!({"skills": skills}).to_string()).await.fields(), fields, "{skills}");
    }
}
