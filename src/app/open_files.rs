//! The limit of open files of the process. Without files for its databases and models, the service could not serve its connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of open files in addition to the connections of clients: databases, calls of models, imports.
const OTHER_FILES: u64 = 256;

/// Returns the number of connections that the process can have open, at most `max_connections`. Raises the limit of open files for
/// them, as far as the system permits it.
pub(super) fn connections_that_fit(max_connections: usize) -> usize {
    let needed = u64::try_from(max_connections).unwrap_or(u64::MAX).saturating_add(OTHER_FILES);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let mut limit = current.unwrap_or(u64::MAX);
    let raised = maximum.map_or(needed, |maximum| maximum.min(needed));
    if limit < raised && setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum }).is_ok() {
        limit = raised;
    }
    if limit >= needed {
        return max_connections;
    }
    let fitting = usize::try_from(limit.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX).max(1);
    tracing::warn!(
        max_connections,
        fitting,
        open_files = limit,
        "the system permits fewer open files than server.max_connections needs, so fewer connections are open at a time: \
         raise the hard limit of open files (ulimit -Hn, LimitNOFILE=) or lower the setting"
    );
    fitting
}
