//! The composition root: how the parts are put together, started and stopped.

use crate::config::{self, DatabaseUrl, Settings};
use crate::domain::consolidation::Policy;
use crate::domain::tokens;
use crate::http::{self, server};
use crate::llm::check::{self, CheckReport};
use crate::service::keys::Keys;
use crate::service::keys::authenticator::Authenticator;
use crate::service::{MemoryService, PoolNames, ServiceConfig};
use crate::storage::{self, Store, StoreError};
use crate::telemetry::{self, Metrics};
use axum::Router;
use metrics_exporter_prometheus::PrometheusHandle;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub mod keys;
mod models;
pub mod reindex;
pub mod transfer;

/// How long an API key is taken for valid without a look into the store: a revocation is seen everywhere within it.
const KEYS_REMEMBERED: Duration = Duration::from_secs(2);

/// Why the service does not start, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The store can't be opened or brought up to date.
    #[error("can't work with the database {0} (database.url)")]
    Store(DatabaseUrl, #[source] StoreError),
    /// Models or prompts are set in a way that can't work.
    #[error("{0}")]
    Models(String),
    /// Nothing would keep strangers out.
    #[error(
        "{0} (server.bind) is open to other machines, and there is no API key yet: make one with \
         `precis keys create --tenant NAME`, or set server.allow_unauthenticated = true where the network keeps \
         strangers out, or bind to 127.0.0.1"
    )]
    NoKeys(SocketAddr),
    /// The address can't be listened on.
    #[error("can't listen on {0} (server.bind)")]
    Bind(SocketAddr, #[source] std::io::Error),
    /// The server ended by itself.
    #[error("the server failed")]
    Serve(#[source] std::io::Error),
}

/// The service with everything it needs, not yet listening.
#[derive(Debug)]
pub struct App {
    service: MemoryService,
    metrics: PrometheusHandle,
    router: Router,
    keys: Keys,
    allow_unauthenticated: bool,
    bind: SocketAddr,
    timeouts: server::Timeouts,
    grace: Duration,
}

impl App {
    /// Puts the parts together, and brings the schema up to date if `migrate`.
    ///
    /// # Errors
    /// A part can't be made.
    pub async fn new(settings: &Settings, migrate: bool) -> Result<Self, AppError> {
        // The tokenizer takes a moment to load; the database can be asked meanwhile.
        let tokenizer = tokio::task::spawn_blocking(tokens::warm_up);
        let metrics = Metrics::new().map_err(|error| AppError::Models(error.to_string()))?;
        let llm = Arc::new(metrics.measure(|| models::pools(settings)).map_err(AppError::Models)?);
        let store = store(settings, migrate).await?;
        reindex::warn_if_stale(&store, settings.analyzer()).await;
        let _ = tokenizer.await;
        let server = &settings.server;
        let allow_unauthenticated =
            server.allow_unauthenticated || server.bind.ip().to_canonical().is_loopback();
        let authenticator = Authenticator::new(Arc::clone(&store), allow_unauthenticated, KEYS_REMEMBERED);
        let keys = Keys::new(Arc::clone(&store));
        let service = MemoryService::new(store, llm, service_config(settings));
        let meters = http::HttpMetrics::new(metrics.recorder());
        let limits = Arc::new(settings.limits.clone());
        let router = http::router(service.clone(), authenticator, metrics.handle(), meters, &limits, server);
        let metrics = metrics.handle();
        Ok(Self {
            service,
            metrics,
            router,
            keys,
            allow_unauthenticated,
            bind: server.bind,
            timeouts: server::Timeouts { read: server.read_timeout, write: server.write_timeout },
            grace: server.shutdown_grace,
        })
    }

    /// The service behind the interface.
    #[must_use]
    pub fn service(&self) -> &MemoryService {
        &self.service
    }

    /// The interface, for a test that needs no socket.
    pub fn router(&self) -> Router {
        self.router.clone()
    }

    /// Listens where the settings say.
    ///
    /// # Errors
    /// The address is taken, or not this machine's; or other machines reach it, and there is no key.
    pub async fn listen(&self) -> Result<TcpListener, AppError> {
        // A store that can't tell is no reason not to start: without a key nobody is let in here.
        if !self.allow_unauthenticated && self.keys.any().await.is_ok_and(|any| !any) {
            return Err(AppError::NoKeys(self.bind));
        }
        TcpListener::bind(self.bind).await.map_err(|error| AppError::Bind(self.bind, error))
    }

    /// Serves until `stop` is done, and then for as long as requests need to end, but no longer than the grace;
    /// the same for the consolidations behind them.
    ///
    /// # Errors
    /// The server ended by itself.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) -> Result<(), AppError> {
        let stopping = CancellationToken::new();
        let upkeep = AbortOnDropHandle::new(tokio::spawn(telemetry::keep_up(self.metrics)));
        let index_worker = AbortOnDropHandle::new(tokio::spawn(self.service.index_worker().run()));
        let server = server::serve(listener, self.router, self.timeouts, stopping.clone());
        let mut server = tokio::spawn(server);
        let ended = tokio::select! {
            ended = &mut server => Some(ended),
            () = stop => None,
        };
        let began = tokio::time::Instant::now();
        // The last quarter of the grace is for the requests that wait for a consolidation: they answer without it.
        let patience = self.grace * 3 / 4;
        let ended = if let Some(ended) = ended {
            ended.map_err(std::io::Error::other)
        } else {
            tracing::info!(grace = ?self.grace, "stopping: requests under way are answered first");
            stopping.cancel();
            let drained = tokio::time::timeout(self.grace, &mut server);
            tokio::pin!(drained);
            let drained = tokio::select! {
                drained = &mut drained => drained,
                () = tokio::time::sleep(patience) => {
                    self.service.stop_consolidations();
                    drained.await
                }
            };
            if let Ok(ended) = drained {
                ended.map_err(std::io::Error::other)
            } else {
                tracing::warn!("requests did not end within the grace; their connections are closed");
                server.abort();
                Ok(())
            }
        };
        drop(index_worker);
        self.service.shut_down(patience.saturating_sub(began.elapsed())).await;
        drop(upkeep);
        tracing::info!(elapsed = ?began.elapsed(), "stopped");
        ended.map_err(AppError::Serve)
    }
}

/// The store that the settings name, its schema brought up to date if `migrate`.
///
/// # Errors
/// It can't be opened, or not brought up to date.
pub async fn store(settings: &Settings, migrate: bool) -> Result<Arc<dyn Store>, AppError> {
    let database = &settings.database;
    let named = |error| AppError::Store(database.url.clone(), error);
    let options = storage::StoreOptions {
        max_connections: database.max_connections,
        acquire_timeout: database.acquire_timeout,
        statement_timeout: database.statement_timeout,
        search: settings.analyzer(),
    };
    let store = storage::connect(database.url.expose(), &options).await.map_err(named)?;
    if migrate {
        store.migrate().await.map_err(named)?;
    } else if let Err(error) = store.check_ready().await {
        tracing::warn!(%error, "the database is not ready; requests are answered as soon as it is");
    }
    Ok(store)
}

/// Asks every model of the settings once.
///
/// # Errors
/// A model can't be made.
pub async fn check_models(settings: &Settings) -> Result<CheckReport, AppError> {
    let models = models::models(settings).map_err(AppError::Models)?;
    let pools = settings.llm.pools.iter().map(|(name, pool)| (name.clone(), pool.models.clone()));
    Ok(check::check_models(&models, pools.collect()).await)
}

fn service_config(settings: &Settings) -> ServiceConfig {
    let set = &settings.consolidation;
    let pools = settings.consolidation_pool().zip(settings.meta_pool());
    ServiceConfig {
        policy: Policy {
            threshold: i64::try_from(set.threshold).unwrap_or(i64::MAX),
            // Policies are about what is stored.
            max_tail_tokens: set
                .max_tail_tokens
                .map(|most| settings.tokens.tokenizer.unscale(i64::try_from(most).unwrap_or(i64::MAX))),
            keep_recent: set.keep_recent,
            summary_word_limit: set.summary_word_limit,
            summary_sentences: set.summary_sentences,
            max_history_messages: set.max_history_messages,
            retry_initial: set.retry_initial,
            retry_max: set.retry_max,
        },
        mode: set.mode,
        recent_on_failure: set.on_failure == config::OnFailure::Recent,
        pools: pools.map(|(consolidation, meta)| PoolNames {
            consolidation: consolidation.to_owned(),
            meta: meta.to_owned(),
        }),
        inline_wait: set.inline_wait,
        daily_token_limit: set.daily_token_limit,
        memory_max_bytes: settings.memory.max_bytes,
        tokenizer: settings.tokens.tokenizer,
        search: settings.analyzer(),
    }
}
