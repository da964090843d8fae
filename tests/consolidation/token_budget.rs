//! Tokens of models are added to the usage of the tenant, and no model is called beyond the daily limit.

use crate::harness::{PATIENCE, config, sent};
use crate::support::backend::Backend;
use precis::domain::consolidation::Policy;
use precis::domain::exchange::Exchange;
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::domain::transcript::MAX_TIME_TOKENS;
use precis::llm::{Attempt, Cost, Llm, LlmError, LlmStatus, ModelError, PoolResponse, Prompt, Task, Usage};
use precis::service::consolidation::Outcome;
use precis::service::contexts::{Context, ContextOptions};
use precis::service::{Error, MemoryService, ServiceConfig};
use precis::storage::Store;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;

/// Cost of each request, [`Cost::tokens`].
const TOKENS: u64 = 100;
/// The capacity of these models: a long message and the line that states its time.
const CAPACITY: usize = 60 + MAX_TIME_TOKENS;

/// Models that respond when permitted, or fail.
#[derive(Debug)]
struct Models {
    fail: bool,
    asked: AtomicUsize,
    allowed: Semaphore,
}

impl Models {
    fn new() -> Arc<Self> {
        let (asked, allowed) = (AtomicUsize::new(0), Semaphore::new(1000));
        Arc::new(Self { fail: false, asked, allowed })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

#[async_trait::async_trait]
impl Llm for Models {
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, LlmError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.allowed.acquire().await.unwrap().forget();
        let cost = Cost {
            usage: Usage { input_tokens: Some(70), output_tokens: None },
            tokens: TOKENS,
            price: Some(0.5),
            calls: 3,
            failures: 2,
            queued: Duration::from_millis(40),
            duration: Duration::from_millis(500),
        };
        if self.fail {
            let attempt = Attempt {
                model: "small".to_owned(),
                error: ModelError::StreamTruncated,
                duration: cost.duration,
            };
            return Err(LlmError { pool: pool.to_owned(), attempts: vec![attempt], cost });
        }
        let text = match task {
            Task::Consolidate { .. } => "They greeted each other at length.",
            Task::MetaConsolidate { .. } => "Greetings.",
            Task::Rerank { .. } => unreachable!("these tests do not search"),
        };
        let (model, prompt_version) = ("small".to_owned(), "1".to_owned());
        Ok(PoolResponse { text: text.to_owned(), model, prompt_version, attempts: Vec::new(), cost })
    }

    fn capacity(&self, _: &str) -> usize {
        CAPACITY
    }

    fn prompt(&self, _: &str, _: Task<'_>) -> Option<Prompt> {
        None
    }

    fn status(&self) -> LlmStatus {
        LlmStatus::default()
    }
}

/// A service over these models, with one session.
struct Scene {
    store: Arc<Store>,
    service: MemoryService,
    tenant: TenantId,
    session: SessionId,
}

impl Scene {
    async fn new(backend: &Backend, models: &Arc<Models>, config: ServiceConfig) -> Self {
        let store = backend.store().await;
        let service = MemoryService::new(Arc::clone(&store), Arc::clone(models) as Arc<dyn Llm>, config);
        Self { store, service, tenant: TenantId::default(), session: SessionId::new("s").unwrap() }
    }

    async fn say(&self, texts: &[&str]) {
        let messages = texts.iter().map(|text| Message::text(Role::User, text)).collect();
        let exchange = Exchange::new(messages, None, None);
        self.service.append_exchange(&self.tenant, &self.session, exchange, None, None).await.unwrap();
    }

    async fn context(&self) -> Context {
        self.service.build_context(&self.tenant, &self.session, ContextOptions::default()).await.unwrap()
    }

    async fn spent(&self) -> u64 {
        self.store.tokens_used_today(&self.tenant).await.unwrap().try_into().unwrap()
    }
}

/// A message that nearly fills the capacity, so that each message is its own batch.
fn long() -> String {
    "hi ".repeat(40)
}

fn limited(limit: u64) -> ServiceConfig {
    ServiceConfig { daily_token_limit: Some(limit), ..config() }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_each_call_are_recorded(backend: Backend) {
    let models = Models::new();
    let scene = Scene::new(&backend, &models, config()).await;
    scene.say(&["hi"; 5]).await;
    assert_eq!(scene.context().await.consolidation.outcome, Outcome::Consolidated);
    assert_eq!((models.asked(), scene.spent().await), (1, TOKENS));
    scene.say(&[long().as_str(); 5]).await;
    assert_eq!(scene.context().await.consolidation.outcome, Outcome::Consolidated);
    assert!(models.asked() > 3, "in parts");
    assert_eq!(scene.spent().await, models.asked() as u64 * TOKENS);
    let other = TenantId::new("other").unwrap();
    assert_eq!(scene.store.tokens_used_today(&other).await.unwrap(), 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_failed_calls_are_recorded(backend: Backend) {
    let models = Arc::new(Models { fail: true, ..Arc::into_inner(Models::new()).unwrap() });
    let scene = Scene::new(&backend, &models, config()).await;
    scene.say(&["hi"; 5]).await;
    assert_eq!(scene.context().await.consolidation.outcome, Outcome::Failed);
    assert_eq!((models.asked(), scene.spent().await), (1, TOKENS));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_discarded_summaries_are_recorded(backend: Backend) {
    let models = Arc::new(Models { allowed: Semaphore::new(0), ..Arc::into_inner(Models::new()).unwrap() });
    let scene = Scene::new(&backend, &models, config()).await;
    scene.say(&["hi"; 5]).await;
    let restore = async {
        while models.asked() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scene.service.restore(&scene.tenant, &scene.session, 0).await.unwrap();
        models.allowed.add_permits(1);
    };
    let run = scene.service.consolidate_session(&scene.tenant, &scene.session);
    let both = async { tokio::join!(run, restore).0 };
    let ended = Box::pin(tokio::time::timeout(PATIENCE, both)).await.unwrap();
    assert!(matches!(ended, Err(Error::ConsolidationInProgress)), "{ended:?}");
    let session = scene.service.session(&scene.tenant, &scene.session).await.unwrap();
    assert_eq!((session.cursor, session.revision), (0, 1), "the restore alone");
    assert_eq!((models.asked(), scene.spent().await), (1, TOKENS));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_to_record_tokens_does_not_fail_consolidation(backend: Backend) {
    let scene = Scene::new(&backend, &Models::new(), config()).await;
    scene.say(&["hi"; 5]).await;
    crate::commit_failures::run(&backend, "DROP TABLE token_usage", &["DROP TABLE token_usage"]).await;
    assert_eq!(scene.context().await.consolidation.outcome, Outcome::Consolidated);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_model_is_called_beyond_daily_token_limit(backend: Backend) {
    let models = Models::new();
    let scene = Scene::new(&backend, &models, limited(TOKENS)).await;
    scene.store.add_token_usage(&scene.tenant, TOKENS - 1).await.unwrap();
    scene.say(&["hi"; 5]).await;
    assert_eq!(scene.context().await.consolidation.outcome, Outcome::Consolidated, "up to the limit");
    scene.say(&["hi"; 5]).await;
    let used = 2 * TOKENS - 1;
    let reason = format!(
        "the tenant's daily token limit is reached: {used} tokens are used, the limit is {TOKENS} \
         (consolidation.daily_token_limit); a new day begins at midnight UTC"
    );
    // At the failure itself, and during the backoff.
    for _ in 0..2 {
        let context = scene.context().await;
        let report = &context.consolidation;
        assert_eq!((report.outcome, report.messages), (Outcome::Failed, 0));
        assert_eq!(report.reason.as_ref(), Some(&reason));
        assert!(report.retry_at.is_some());
        assert_eq!((context.coverage.verbatim_from, sent(&context)), (4, 7), "nothing is lost");
    }
    let asked = scene.service.consolidate_session(&scene.tenant, &scene.session).await;
    assert!(matches!(&asked, Err(Error::ConsolidationFailed(why)) if *why == reason), "{asked:?}");
    let state = scene.service.session(&scene.tenant, &scene.session).await.unwrap().consolidation;
    assert_eq!((state.failures, state.lease_until), (2, None), "the lease is given back");
    assert_eq!((models.asked(), scene.spent().await), (1, used));
    // Other tenants have their own usage, and a new day starts at 0.
    let other =
        Scene { tenant: TenantId::new("other").unwrap(), ..Scene::new(&backend, &models, limited(1)).await };
    other.say(&["hi"; 5]).await;
    assert_eq!(other.context().await.consolidation.outcome, Outcome::Consolidated);
    let next_day = "UPDATE token_usage SET day = day - 1";
    crate::commit_failures::run(&backend, next_day, &[next_day]).await;
    assert!(scene.service.consolidate_session(&scene.tenant, &scene.session).await.unwrap().is_some());
    assert_eq!(scene.spent().await, TOKENS);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_committed_before_token_limit_stay(backend: Backend) {
    let models = Models::new();
    let scene = Scene::new(&backend, &models, limited(2 * TOKENS)).await;
    scene.say(&[long().as_str(); 6]).await;
    let context = scene.context().await;
    let report = &context.consolidation;
    assert_eq!((report.outcome, report.messages), (Outcome::Failed, 2));
    assert_eq!((context.coverage.summary_through, sent(&context)), (2, 4));
    assert_eq!((models.asked(), context.summary.revision), (2, 2));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn meta_consolidation_beyond_token_limit_keeps_uncompressed_summary(backend: Backend) {
    for (limit, meta) in [(TOKENS + 1, true), (TOKENS, false)] {
        let models = Models::new();
        let config = limited(limit);
        // The summary has more words, but not twice as many.
        let policy = Policy { summary_word_limit: 3, ..config.policy };
        let scene = Scene::new(&backend, &models, ServiceConfig { policy, ..config }).await;
        let scene = Scene { tenant: TenantId::new(limit.to_string()).unwrap(), ..scene };
        scene.say(&["hi"; 5]).await;
        let report = scene.context().await.consolidation;
        assert_eq!((report.outcome, report.meta, report.reason), (Outcome::Consolidated, meta, None));
        assert_eq!(models.asked(), 1 + usize::from(meta));
        let session = scene.service.session(&scene.tenant, &scene.session).await.unwrap();
        assert_eq!(session.summary.text == "Greetings.", meta);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_usage_is_sum_of_its_calls(backend: Backend) {
    let models = Models::new();
    let config = config();
    let policy = Policy { summary_word_limit: 1, ..config.policy };
    let scene = Scene::new(&backend, &models, ServiceConfig { policy, ..config }).await;
    let larger_than_a_model = long().repeat(4);
    scene.say(&[&larger_than_a_model, "hi", "hi"]).await;
    let revision = scene.service.consolidate_session(&scene.tenant, &scene.session).await.unwrap().unwrap();
    let pieces = i64::try_from(models.asked()).unwrap() - 1;
    assert!(pieces > 1, "{pieces}");
    for (provenance, times) in
        [(revision.provenance.unwrap(), pieces), (revision.meta.unwrap().provenance, 1)]
    {
        assert_eq!((provenance.usage.calls, provenance.usage.failures), (Some(3 * times), Some(2 * times)));
        assert_eq!((provenance.usage.queued_ms, provenance.duration_ms), (Some(40 * times), 500 * times));
        assert_eq!((provenance.usage.input_tokens, provenance.usage.output_tokens), (Some(70 * times), None));
    }
}
