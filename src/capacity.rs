//! The capacity of this process, shared fairly between its clients: requests that run, threads for long computations, and
//! memory.
//!
//! A [`FairQueue`] grants parts of a capacity. A [`WorkPermit`] is the share of one request. It is [current] while
//! the request is served, so that no function needs it as a parameter: [`claim`] adds memory to it before data is loaded,
//! and `blocking` waits for a thread on behalf of its client. Work without a permit, such as that of the command line, is not
//! limited.

mod fair_queue;
mod work_permit;

pub use fair_queue::{Capacity, Claim, ClientId, FairQueue, Held, Load, QueueEnd, Turn};
pub use work_permit::{Overloaded, Thread, WorkPermit, claim, current, current_client, inherited, scope};
