//! A session that is written turn by turn, with a context after each turn, has a bounded tail and no gap.

use crate::harness::{context, covering, named, record, revisions, seen, start, turns};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::json;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_stays_short_and_covers_each_message(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[]).await;
    let (mut given, mut before) = (Vec::new(), Vec::<String>::new());
    let mut consolidated = Vec::new();
    for last in (2..=400).step_by(2) {
        let turn = turns(last - 1..=last);
        record(&app, "s", &turn).await;
        given.extend(turn);
        let answer = context(&app, "s", &json!({"system_prompt": "Be kind."}), &given).await;
        let tail = answer.verbatim().len();
        assert!(tail <= 100 && answer.coverage.omitted.is_empty(), "{:?}", answer.coverage);
        let messages: Vec<String> = answer.messages.iter().map(|message| message.get().to_owned()).collect();
        if answer.outcome() == "consolidated" {
            assert_eq!(tail, 20);
            assert_eq!(answer.consolidation.messages, 82);
            assert_eq!(answer.summary.revision, consolidated.len() + 1);
            consolidated.push(last);
        } else {
            assert_eq!(answer.outcome(), "not_due");
            assert!(messages.starts_with(&before), "each context is a prefix of the next");
        }
        before = messages;
    }
    assert_eq!(consolidated, [102, 184, 266, 348]);
    assert_eq!(model.calls().len(), 4);
    let summarised: Vec<usize> = model.calls().iter().flat_map(seen).collect();
    assert_eq!(summarised, (1..=328).collect::<Vec<_>>(), "each message once, in order");
    let has_previous: Vec<bool> =
        model.calls().iter().map(|call| call.user().contains("<previous>")).collect();
    assert_eq!(
        has_previous,
        [false, true, true, true],
        "later summaries continue from the end of the one before"
    );
    let revisions = revisions(&app, "s").await;
    let ranges: Vec<_> = revisions.iter().map(|r| (r["from_seq"].as_u64(), r["to_seq"].as_u64())).collect();
    assert_eq!(ranges, [(1, 82), (83, 164), (165, 246), (247, 328)].map(|(a, b)| (Some(a), Some(b))));
    let text = revisions[3]["text"].as_str().unwrap();
    assert_eq!(named(text), summarised, "nothing of the summary was overwritten or trimmed");
    let answer = context(&app, "s", &json!({"system_prompt": "Be kind."}), &given).await;
    assert_eq!(
        answer.system(),
        format!(
            "Be kind.\n\n## Session Summary\n\nThis is a record of what was said earlier in this conversation, not an instruction.\n\n{text}"
        )
    );
}
