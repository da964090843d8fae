//! The composition root: creates the parts of the service from the settings, runs it and stops it.

use crate::config::{self, DatabaseUrl, Settings};
use crate::domain::consolidation::Policy;
use crate::domain::error_chain::ErrorChain;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::tokens;
use crate::http::{self, server};
use crate::llm::check::{self, CheckReport};
use crate::proxy::Proxy;
use crate::service::keys::authenticator::Authenticator;
use crate::service::{MemoryService, PoolNames, ServiceConfig};
use crate::service::{RerankConfig, RetentionConfig};
use crate::storage::{self, DefaultRetention, IndexState, Store, StoreError};
use crate::telemetry::{self, Metrics};
use axum::Router;
use metrics_exporter_prometheus::PrometheusHandle;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub mod doctor;
mod models;
mod open_files;
pub mod traces;

/// The time for which the state of an API key is cached, and so the longest delay of a revocation while the store is
/// available.
const API_KEY_TTL: Duration = Duration::from_secs(2);

/// Connections that may wait until they are accepted. The client of a further one repeats its request for a connection after a second. Linux
/// permits `net.core.somaxconn` at most, which is 4,096 unless it is changed.
const BACKLOG: u32 = 4096;

/// An error that prevents the start of the service or ends it.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    #[error("can't work with the database {0} (database.url)")]
    Store(DatabaseUrl, #[source] StoreError),
    /// The text explains the problem and its fix.
    #[error("can't work with the database {0} (database.url): {1}")]
    ExplainedStore(DatabaseUrl, String),
    /// Invalid models or prompts, or metrics that can't be created.
    #[error("{0}")]
    Setup(String),
    #[error(
        "{0} (server.bind) is reachable from other machines, and there is no API key yet: create one with \
         `precis keys create --tenant NAME`, or set server.allow_unauthenticated = true if the network protects the \
         service, or bind to 127.0.0.1"
    )]
    NoApiKeys(SocketAddr),
    #[error("can't listen on {0} (server.bind)")]
    Bind(SocketAddr, #[source] std::io::Error),
    #[error(
        "can't listen on {0} (server.bind): another process does, perhaps another precis; stop it, or choose another \
         address with --bind"
    )]
    AddressInUse(SocketAddr),
    #[error("the server failed")]
    Serve(#[source] std::io::Error),
    /// HTTP and TLS can't express such a time.
    #[error(
        "the clock of this machine is {0} seconds before 1970, which the responses can't state: set the clock, for example \
         with `date --set`"
    )]
    Clock(u64),
}

/// The service with all its parts, before it listens.
#[derive(Debug)]
pub struct App {
    service: MemoryService,
    metrics: PrometheusHandle,
    router: Router,
    store: Arc<Store>,
    allow_unauthenticated: bool,
    bind: SocketAddr,
    connection_limits: server::ConnectionLimits,
    shutdown_grace: Duration,
}

impl App {
    /// Creates all parts. Brings the database schema up to date if `migrate` is set. Fails if a newer release has changed it so that
    /// this release does not work with it.
    pub async fn new(settings: &Settings, migrate: bool) -> Result<Self, AppError> {
        if let Err(error) = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
            return Err(AppError::Clock(error.duration().as_secs()));
        }
        let metrics =
            Metrics::new(http::REQUEST_DURATION).map_err(|error| AppError::Setup(error.to_string()))?;
        let llm = Arc::new(metrics.with_recorder(|| models::pools(settings)).map_err(AppError::Setup)?);
        let store = open_store(settings, migrate).await?;
        prepare_index(&store).await;
        let server = &settings.server;
        let allow_unauthenticated =
            server.allow_unauthenticated || server.bind.ip().to_canonical().is_loopback();
        let authenticator = Authenticator::new(Arc::clone(&store), allow_unauthenticated, API_KEY_TTL);
        let config = service_config(settings);
        let service = metrics.with_recorder(|| MemoryService::new(Arc::clone(&store), llm, config));
        let http_metrics = http::HttpMetrics::new(metrics.recorder());
        let limits = Arc::new(settings.limits.clone());
        let proxy = metrics.with_recorder(|| Proxy::new(settings)).map_err(AppError::Setup)?;
        let handle = metrics.handle();
        let router =
            http::router(service.clone(), authenticator, handle, http_metrics, &limits, server, proxy);
        Ok(Self {
            service,
            metrics: metrics.handle(),
            router,
            store,
            allow_unauthenticated,
            bind: server.bind,
            connection_limits: server::ConnectionLimits {
                max_connections: open_files::connections_that_fit(server.max_connections),
                read_timeout: server.read_timeout,
                write_timeout: server.write_timeout,
            },
            shutdown_grace: server.shutdown_grace,
        })
    }

    #[must_use]
    pub fn service(&self) -> &MemoryService {
        &self.service
    }

    /// Returns the router, for tests without a socket.
    pub fn router(&self) -> Router {
        self.router.clone()
    }

    /// Binds the address of the settings. Fails if other machines can reach it and there is no API key.
    pub async fn listen(&self) -> Result<TcpListener, AppError> {
        // If the database can't tell, the service starts anyway: it rejects requests without a key here.
        if !self.allow_unauthenticated && self.store.any_api_key().await.is_ok_and(|any| !any) {
            return Err(AppError::NoApiKeys(self.bind));
        }
        bind(self.bind).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => AppError::AddressInUse(self.bind),
            _ => AppError::Bind(self.bind, error),
        })
    }

    /// Serves until `stop` completes. Then waits for running requests and consolidations, at most for
    /// `server.shutdown_grace`.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) -> Result<(), AppError> {
        // Takes about 90 ms. The service is ready without it, and the first request that counts tokens waits for it.
        drop(tokio::task::spawn_blocking(tokens::warm_up));
        let stopping = CancellationToken::new();
        let upkeep = AbortOnDropHandle::new(tokio::spawn(telemetry::run_upkeep(self.metrics)));
        let service = self.service.clone();
        let imports = tokio::spawn(async move { service.remove_abandoned_imports().await });
        let imports = AbortOnDropHandle::new(imports);
        let service = self.service.clone();
        let index_merge = AbortOnDropHandle::new(tokio::spawn(async move { service.merge_index().await }));
        let retention_stop = stopping.clone().drop_guard();
        let retention_worker = tokio::spawn(self.service.retention_worker().run(stopping.clone()));
        let server = server::serve(listener, self.router, self.connection_limits, stopping.clone());
        let mut server = tokio::spawn(server);
        let early_result = tokio::select! {
            result = &mut server => Some(result),
            () = stop => None,
        };
        let stopped_at = tokio::time::Instant::now();
        // Consolidations are cancelled after three quarters of the grace period, so that requests that wait for one can
        // still respond without it.
        let consolidation_grace = self.shutdown_grace * 3 / 4;
        let result = if let Some(result) = early_result {
            result.map_err(std::io::Error::other)
        } else {
            tracing::info!(grace = ?self.shutdown_grace, "stopping: waiting for running requests");
            stopping.cancel();
            let drain = tokio::time::timeout(self.shutdown_grace, &mut server);
            tokio::pin!(drain);
            let drain_result = tokio::select! {
                result = &mut drain => result,
                () = tokio::time::sleep(consolidation_grace) => {
                    self.service.stop_consolidations();
                    drain.await
                }
            };
            if let Ok(result) = drain_result {
                result.map_err(std::io::Error::other)
            } else {
                tracing::warn!("requests did not end within the grace period; closing their connections");
                server.abort();
                Ok(())
            }
        };
        drop((index_merge, imports));
        drop(retention_stop);
        if retention_worker.await.is_err() {
            tracing::error!("the retention worker has failed");
        }
        self.service.shut_down(consolidation_grace.saturating_sub(stopped_at.elapsed())).await;
        drop(upkeep);
        tracing::info!(elapsed = ?stopped_at.elapsed(), "stopped");
        result.map_err(AppError::Serve)
    }
}

/// Connects to the database of the settings. Brings its schema up to date if `migrate` is set. Fails if a newer release has changed
/// it.
pub async fn open_store(settings: &Settings, migrate: bool) -> Result<Arc<Store>, AppError> {
    let database = &settings.database;
    let with_url = |error| match storage::explain(database.url.expose(), &error) {
        Some(explanation) => AppError::ExplainedStore(database.url.clone(), explanation),
        None => AppError::Store(database.url.clone(), error),
    };
    let new_file = storage::missing_file(database.url.expose());
    let store = storage::connect(database.url.expose(), &store_options(settings)).await.map_err(with_url)?;
    if let Some(file) = new_file {
        let file = file.display();
        tracing::info!("created the database {file}, which is empty; database.url can name an existing one");
    }
    let schema = if migrate { store.migrate().await.map(drop) } else { store.check_ready().await };
    match schema {
        Ok(()) => {}
        // Requests could store what the newer release does not expect.
        Err(error @ StoreError::SchemaVersion { found, expected }) if found > expected => {
            return Err(with_url(error));
        }
        Err(error) if migrate => return Err(with_url(error)),
        Err(error) => tracing::warn!(%error, "the database is not ready; requests fail until it is"),
    }
    Ok(store)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted service can bind while connections of the last one are closing.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn store_options(settings: &Settings) -> storage::StoreOptions {
    let database = &settings.database;
    storage::StoreOptions {
        max_connections: database.max_connections,
        acquire_timeout: database.acquire_timeout,
        statement_timeout: database.statement_timeout,
        search: settings.analyzer(),
        key_share: settings.limits.max_key_share,
    }
}

/// Sends a short request to every model of the settings.
pub async fn check_models(settings: &Settings) -> Result<CheckReport, AppError> {
    let models = models::models(settings).map_err(AppError::Setup)?;
    let pools = settings.llm.pools.iter().map(|(name, pool)| (name.clone(), pool.models.clone()));
    Ok(check::check_models(&models, pools.collect()).await)
}

/// Prepares the search index for the service. Logs a warning if it lacks messages, or has another analyzer than the settings.
pub async fn prepare_index(store: &Store) {
    let own = store.analyzer().map(Analyzer::version);
    match store.prepare_index().await {
        Ok(IndexState::OtherAnalyzer(version)) => tracing::warn!(
            index_version = version,
            expected_version = own,
            "the search index has another analyzer than the settings, and is searched with its own: run `precis reindex` to \
             change it"
        ),
        Ok(IndexState::Incomplete) if store.analyzer().is_some() => tracing::warn!(
            "the search index may lack messages, because the service has run without search: run `precis reindex`"
        ),
        Ok(_) => {}
        // Requests log the errors of the database, too.
        Err(error) => {
            tracing::debug!(error = %ErrorChain(&error), "failed to read the state of the search index");
        }
    }
}

fn service_config(settings: &Settings) -> ServiceConfig {
    let set = &settings.consolidation;
    let pools = settings.consolidation_pool().zip(settings.meta_pool());
    ServiceConfig {
        policy: Policy {
            threshold: i64::try_from(settings.threshold()).unwrap_or(i64::MAX),
            is_threshold_set: set.threshold.is_some(),
            // Stored token counts do not include the factor of the tokenizer.
            max_tail_tokens: set
                .max_tail_tokens
                .map(|max| settings.tokens.tokenizer.unscale(i64::try_from(max).unwrap_or(i64::MAX))),
            keep_recent: set.keep_recent,
            summary_word_limit: set.summary_word_limit,
            summary_sentences: set.summary_sentences,
            max_history_messages: set.max_history_messages,
            max_context_bytes: settings.limits.max_context_bytes,
            context_window: i64::try_from(set.context_window).ok().filter(|window| *window > 0),
            trigger_share: set.trigger_share,
            keep_share: set.keep_share,
            summary_share: set.summary_share,
            summary_max_tokens: settings
                .tokens
                .tokenizer
                .unscale(i64::try_from(set.summary_max_tokens).unwrap_or(i64::MAX)),
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
        default_user: settings.memory.default_user(),
        max_fork_messages: settings.limits.max_fork_messages,
        allow_rewind: settings.sessions.allow_rewind,
        retention: RetentionConfig {
            default: DefaultRetention {
                after_last_exchange: settings.retention.after_last_exchange,
                branches_after: settings.retention.branches_after,
            },
            interval: settings.retention.interval,
            max_sessions_per_second: settings.retention.max_sessions_per_second,
        },
        key_share: settings.limits.max_key_share,
        context_cache_bytes: settings.limits.max_context_cache_bytes,
        tokenizer: settings.tokens.tokenizer,
        search: settings.analyzer(),
        recall: settings.recall(),
        rerank: rerank_config(settings),
    }
}

/// Returns the configuration of reranking, which uses at most half of the simultaneous calls of its pool, so that searches leave
/// the others to consolidations.
fn rerank_config(settings: &Settings) -> Option<RerankConfig> {
    let pool = &settings.search.rerank_pool;
    let models =
        settings.llm.pools.get(pool)?.models.iter().filter_map(|model| settings.llm.models.get(model));
    let calls: usize = models.map(|model| model.max_concurrent_calls).sum();
    let timeout = settings.search.rerank_timeout;
    Some(RerankConfig { pool: pool.clone(), timeout, max_concurrent_calls: (calls / 2).max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    /// Linux drops the request for a connection if the queue is full, so the client would wait until another one is accepted.
    #[tokio::test]
    async fn connections_are_queued_until_they_are_accepted() {
        let permitted = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("a setting of Linux");
        let connections = permitted.trim().parse::<u32>().expect("a number").min(BACKLOG);
        let connections = usize::try_from(connections).expect("a small number");
        assert_eq!(open_files::connections_that_fit(connections), connections, "open files of this test");
        let listener = bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = listener.local_addr().expect("the address of the listener");
        let mut queued = Vec::new();
        for _ in 0..connections {
            let connection = timeout(Duration::from_secs(30), TcpStream::connect(address)).await;
            queued.push(connection.expect("a place in the queue").expect("a connection"));
        }
    }
}
