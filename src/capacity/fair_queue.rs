//! A queue that divides a capacity between clients by the cost of their work: start-time fair queueing.
//!
//! A claim that can be granted at once is granted. Otherwise it gets a start tag: the virtual time, or the end of the last
//! claim of its client if that is later, which is its start tag plus its cost. The claim with the smallest start tag is
//! granted first, and the virtual time is the start tag of the last granted claim. So clients that wait get the same cost of
//! work per time, however many claims each of them makes, and a client that was idle waits for no backlog of another one.
//! While no claim waits, there is nothing to divide, and no client is charged.
//!
//! Libraries for this count permits: they know neither cost nor memory.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// A client on whose behalf work is done: an API key, or all requests without a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClientId(pub u64);

/// The capacity that a queue divides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capacity {
    pub slots: usize,
    /// Further slots, each for a client that holds none, so that it does not wait for long work of another one.
    pub further_slots: usize,
    /// In bytes. Claims of more than an eighth of it are large. They get at most three quarters of it, so that small ones do not wait for
    /// them, and while one waits, small ones get at most a quarter.
    pub memory: usize,
    /// The part of the memory that one client can hold, so that clients that do not read their responses leave memory for
    /// others. Larger claims are reduced to it.
    pub memory_of_client: usize,
}

impl Capacity {
    /// Returns the largest number of slots in use.
    #[must_use]
    pub const fn max_slots(&self) -> usize {
        self.slots + self.further_slots
    }
}

/// The load of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub slots: usize,
    /// In bytes.
    pub memory: usize,
    /// Number of waiting claims.
    pub waiting: usize,
}

/// The place of a claim among the waiting ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// After the earlier claims of its client.
    New,
    /// The next part of a computation that gave way to another client. Its cost was charged at its beginning.
    NextPart,
    /// Before all new work: work that was granted before and released its capacity while it waited.
    Continued,
}

/// The part of a capacity that a piece of work needs.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub client: ClientId,
    /// The work, in any unit that is the same for all claims of a queue.
    pub cost: u64,
    /// Needs one of the slots.
    pub slot: bool,
    /// In bytes.
    pub memory: usize,
    pub turn: Turn,
}

/// The end of the queue, as a new claim finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueEnd {
    /// Number of waiting claims that would probably be granted before the new one. It is 0 if a slot is free.
    pub claims_before: usize,
    /// Number of the present backlog: it changes when a slot becomes free and no claim takes it.
    pub backlog: u64,
    /// Number of slots that were granted so far.
    pub granted: u64,
}

/// A granted claim. Dropping it releases its capacity.
#[derive(Debug)]
pub struct Held {
    queue: Arc<FairQueue>,
    client: ClientId,
    slot: bool,
    memory: usize,
}

#[derive(Debug)]
pub struct FairQueue {
    capacity: Capacity,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    slots_in_use: usize,
    memory_in_use: usize,
    /// The part of the memory that large claims hold.
    large_memory_in_use: usize,
    /// The slots of each client that holds some. Not counted if there are no further slots.
    slots_of: HashMap<ClientId, usize>,
    /// The memory of each client that holds some.
    memory_of: HashMap<ClientId, usize>,
    /// The claims that wait, by start tag and arrival.
    waiting: BTreeMap<(u64, u64), Waiter>,
    /// The clients of the present backlog.
    clients: HashMap<ClientId, Backlog>,
    /// Number of waiting claims that need memory.
    waiting_for_memory: usize,
    /// Number of waiting claims that need memory and are not large.
    waiting_for_little_memory: usize,
    /// Number of waiting claims that need no slot.
    waiting_without_slot: usize,
    virtual_time: u64,
    arrivals: u64,
    /// See [`QueueEnd`].
    backlog: u64,
    granted: u64,
}

#[derive(Debug)]
struct Waiter {
    claim: Claim,
    is_large: bool,
    granted: oneshot::Sender<Held>,
}

#[derive(Debug, Default)]
struct Backlog {
    /// The tag at which the last claim of the client ends.
    end: u64,
    waiting: usize,
}

/// The claims of a queue that were granted, with the channels to their tasks.
type Grants = Vec<(oneshot::Sender<Held>, Held)>;

impl FairQueue {
    #[must_use]
    pub fn new(capacity: Capacity) -> Arc<Self> {
        Arc::new(Self { capacity, state: Mutex::default() })
    }

    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Returns the claim if its capacity is free and no other claim waits for it.
    #[must_use]
    pub fn try_acquire(self: &Arc<Self>, claim: Claim) -> Option<Held> {
        let claim = self.reduced(claim);
        let mut state = self.lock();
        let is_free = (!claim.slot || self.has_slot(&state, claim.client))
            && (claim.memory == 0 || self.has_memory_at_once(&state, &claim));
        is_free.then(|| self.grant(&mut state, &claim))
    }

    /// Waits until the claim is granted. Dropping the future withdraws the claim.
    pub fn acquire(self: &Arc<Self>, claim: Claim) -> impl Future<Output = Held> + Send + use<> {
        let claim = self.reduced(claim);
        let (granted, grant) = oneshot::channel();
        let place = {
            let mut state = self.lock();
            let place = state.enqueue(claim, self.is_large(claim.memory), granted);
            let grants = self.grant_waiting(&mut state);
            drop(state);
            send(grants);
            place
        };
        let place = Place { queue: Arc::clone(self), place };
        async move {
            let held = grant.await;
            drop(place);
            // The channel is closed only if the claim is withdrawn.
            held.unwrap_or_else(|_| unreachable!("a waiting claim is granted"))
        }
    }

    /// Returns the end of the queue for a new claim of this client.
    #[must_use]
    pub fn end(&self, client: ClientId) -> QueueEnd {
        let state = self.lock();
        let claims_before = if self.has_slot(&state, client) {
            0
        } else {
            let own = state.clients.get(&client).map_or(0, |backlog| backlog.waiting);
            let others = state.clients.values().map(|backlog| backlog.waiting.min(own + 1)).sum::<usize>();
            others.min(state.waiting.len())
        };
        QueueEnd { claims_before, backlog: state.backlog, granted: state.granted }
    }

    /// Returns `true` if another client waits for a slot.
    #[must_use]
    pub fn is_wanted_by_others(&self, client: ClientId) -> bool {
        self.lock().waiting.values().any(|waiter| waiter.claim.slot && waiter.claim.client != client)
    }

    /// Returns the load of the queue.
    #[must_use]
    pub fn load(&self) -> Load {
        let state = self.lock();
        Load { slots: state.slots_in_use, memory: state.memory_in_use, waiting: state.waiting.len() }
    }

    fn reduced(&self, claim: Claim) -> Claim {
        let Capacity { memory, memory_of_client, .. } = self.capacity;
        Claim { memory: claim.memory.min(memory_of_client).min(memory / 4 * 3), ..claim }
    }

    /// Returns `true` for a large part of the memory.
    fn is_large(&self, memory: usize) -> bool {
        memory > self.capacity.memory / 8
    }

    /// Returns `true` if the memory of a new claim is free and no claim waits that precedes it.
    fn has_memory_at_once(&self, state: &State, claim: &Claim) -> bool {
        let State { waiting_for_memory, waiting_for_little_memory, .. } = *state;
        let before = if self.is_large(claim.memory) { waiting_for_memory } else { waiting_for_little_memory };
        before == 0 && self.has_memory(state, claim, waiting_for_memory > waiting_for_little_memory)
    }

    fn has_slot(&self, state: &State, client: ClientId) -> bool {
        state.slots_in_use < self.capacity.slots
            || state.slots_in_use < self.capacity.max_slots() && !state.slots_of.contains_key(&client)
    }

    /// Returns `true` if the memory of a claim is free. With `large_waits`, a large claim waits, and a small one gets only its part.
    fn has_memory(&self, state: &State, claim: &Claim, large_waits: bool) -> bool {
        let State { memory_in_use, large_memory_in_use, .. } = *state;
        let (memory, quarter) = (self.capacity.memory, self.capacity.memory / 4);
        let is_in_part = if self.is_large(claim.memory) {
            large_memory_in_use.saturating_add(claim.memory) <= 3 * quarter
        } else {
            !large_waits || memory_in_use - large_memory_in_use + claim.memory <= quarter
        };
        is_in_part
            && self.has_own_memory(state, claim)
            && memory_in_use.saturating_add(claim.memory) <= memory
    }

    fn has_own_memory(&self, state: &State, claim: &Claim) -> bool {
        let held = state.memory_of.get(&claim.client).copied().unwrap_or(0);
        held.saturating_add(claim.memory) <= self.capacity.memory_of_client
    }

    fn grant(self: &Arc<Self>, state: &mut State, claim: &Claim) -> Held {
        if claim.slot {
            state.slots_in_use += 1;
            state.granted += 1;
            if self.capacity.further_slots > 0 {
                *state.slots_of.entry(claim.client).or_default() += 1;
            }
        }
        self.add_memory(state, claim.client, claim.memory);
        let (client, slot, memory) = (claim.client, claim.slot, claim.memory);
        Held { queue: Arc::clone(self), client, slot, memory }
    }

    /// Grants waiting claims in the order of their tags. A claim that lacks memory of its client delays only that client; one
    /// that lacks memory of all clients delays all later claims of memory, because otherwise smaller ones could pass it for
    /// ever; but a large one delays small ones only beyond their part.
    fn grant_waiting(self: &Arc<Self>, state: &mut State) -> Grants {
        let (mut grants, mut after) = (Vec::new(), None);
        let (mut memory_is_short, mut large_memory_is_short) = (false, false);
        loop {
            if state.slots_in_use >= self.capacity.max_slots() && state.waiting_without_slot == 0 {
                break;
            }
            let range = after.map_or_else(|| state.waiting.range(..), |after| state.waiting.range(after..));
            let mut next = None;
            for (place, waiter) in range {
                let claim = &waiter.claim;
                let is_large = self.is_large(claim.memory);
                let is_delayed = memory_is_short || is_large && large_memory_is_short;
                if claim.slot && !self.has_slot(state, claim.client) || claim.memory > 0 && is_delayed {
                    continue;
                }
                if claim.memory > 0 && !self.has_memory(state, claim, large_memory_is_short) {
                    let is_short = self.has_own_memory(state, claim);
                    let flag = if is_large { &mut large_memory_is_short } else { &mut memory_is_short };
                    *flag |= is_short;
                    continue;
                }
                next = Some(*place);
                break;
            }
            let Some(place) = next else { break };
            if let Some(Waiter { claim, granted, .. }) = state.remove(place) {
                state.virtual_time = state.virtual_time.max(place.0);
                grants.push((granted, self.grant(state, &claim)));
            }
            after = Some(place);
        }
        if state.waiting.is_empty() {
            state.clients.clear();
            state.virtual_time = 0;
        }
        grants
    }

    /// Counts memory that one claim holds in total, because its size decides if it is large.
    fn add_memory(&self, state: &mut State, client: ClientId, memory: usize) {
        if memory > 0 {
            state.memory_in_use += memory;
            state.large_memory_in_use += if self.is_large(memory) { memory } else { 0 };
            *state.memory_of.entry(client).or_default() += memory;
        }
    }

    fn subtract_memory(&self, state: &mut State, client: ClientId, memory: usize) {
        if memory == 0 {
            return;
        }
        state.memory_in_use -= memory;
        state.large_memory_in_use -= if self.is_large(memory) { memory } else { 0 };
        subtract(&mut state.memory_of, client, memory);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn in_use(&self) -> (usize, usize) {
        let state = self.lock();
        assert_eq!(state.memory_of.values().sum::<usize>(), state.memory_in_use);
        let slots = if self.capacity.further_slots > 0 { state.slots_in_use } else { 0 };
        assert_eq!(state.slots_of.values().sum::<usize>(), slots);
        (state.slots_in_use, state.memory_in_use)
    }
}

/// Sends grants without the lock: if a task has gone, its grant is dropped, which takes the lock.
fn send(grants: Grants) {
    for (granted, held) in grants {
        drop(granted.send(held));
    }
}

/// Subtracts from the part of a client, which is removed at zero.
fn subtract(parts: &mut HashMap<ClientId, usize>, client: ClientId, amount: usize) {
    if let Some(part) = parts.get_mut(&client) {
        *part -= amount;
        if *part == 0 {
            parts.remove(&client);
        }
    }
}

impl State {
    fn enqueue(&mut self, claim: Claim, is_large: bool, granted: oneshot::Sender<Held>) -> (u64, u64) {
        let backlog = self.clients.entry(claim.client).or_default();
        let start = match claim.turn {
            Turn::Continued => 0,
            // Smaller tags are those of continued work.
            Turn::NextPart => self.virtual_time.max(1),
            Turn::New => {
                let start = self.virtual_time.max(backlog.end).max(1);
                backlog.end = start.saturating_add(claim.cost.max(1));
                start
            }
        };
        backlog.waiting += 1;
        self.waiting_for_memory += usize::from(claim.memory > 0);
        self.waiting_for_little_memory += usize::from(claim.memory > 0 && !is_large);
        self.waiting_without_slot += usize::from(!claim.slot);
        self.arrivals += 1;
        let place = (start, self.arrivals);
        self.waiting.insert(place, Waiter { claim, is_large, granted });
        place
    }

    fn remove(&mut self, place: (u64, u64)) -> Option<Waiter> {
        let waiter = self.waiting.remove(&place)?;
        let claim = &waiter.claim;
        if let Some(backlog) = self.clients.get_mut(&claim.client) {
            backlog.waiting -= 1;
        }
        self.waiting_for_memory -= usize::from(claim.memory > 0);
        self.waiting_for_little_memory -= usize::from(claim.memory > 0 && !waiter.is_large);
        self.waiting_without_slot -= usize::from(!claim.slot);
        Some(waiter)
    }
}

impl Held {
    /// Returns the memory that is held, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// Adds memory if it is free and no other claim waits for memory. Returns `false`, and adds nothing, if it is not.
    pub fn try_add_memory(&mut self, bytes: usize) -> bool {
        let claim = Claim { client: self.client, cost: 0, slot: false, memory: bytes, turn: Turn::New };
        let mut state = self.queue.lock();
        let is_free = bytes == 0 || self.queue.has_memory_at_once(&state, &claim);
        if is_free {
            self.queue.subtract_memory(&mut state, self.client, self.memory);
            self.memory += bytes;
            self.queue.add_memory(&mut state, self.client, self.memory);
        }
        is_free
    }

    /// Releases the slot. Returns `false` if there was none.
    pub fn release_slot(&mut self) -> bool {
        let had_slot = self.slot;
        self.keep_memory_only(self.memory);
        had_slot
    }

    /// Takes over the slot of another claim of the same queue.
    pub fn take_slot(&mut self, mut other: Self) {
        // A claim has at most one slot; a second one is released with `other`.
        std::mem::swap(&mut self.slot, &mut other.slot);
    }

    /// Releases the slot, and holds this much memory: less than before, or more, if that memory is in use already.
    pub fn keep_memory_only(&mut self, bytes: usize) {
        if !self.slot && self.memory == bytes {
            return;
        }
        let mut state = self.queue.lock();
        if self.slot {
            state.slots_in_use -= 1;
            subtract(&mut state.slots_of, self.client, 1);
        }
        self.queue.subtract_memory(&mut state, self.client, self.memory);
        self.queue.add_memory(&mut state, self.client, bytes);
        (self.slot, self.memory) = (false, bytes);
        let grants = if state.waiting.is_empty() { Vec::new() } else { self.queue.grant_waiting(&mut state) };
        state.backlog += u64::from(state.slots_in_use < self.queue.capacity.slots);
        drop(state);
        send(grants);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.keep_memory_only(0);
    }
}

/// The place of a waiting claim, which is withdrawn if its task stops waiting.
struct Place {
    queue: Arc<FairQueue>,
    place: (u64, u64),
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        if state.remove(self.place).is_none() {
            return;
        }
        // It may have delayed others.
        let grants = self.queue.grant_waiting(&mut state);
        drop(state);
        send(grants);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Waiting = Pin<Box<dyn Future<Output = Held> + Send>>;

    fn queue(slots: usize, memory: usize) -> Arc<FairQueue> {
        FairQueue::new(Capacity { slots, memory, memory_of_client: memory / 2, ..Capacity::default() })
    }

    fn claim(client: u64, cost: u64) -> Claim {
        Claim { client: ClientId(client), cost, slot: true, memory: 0, turn: Turn::New }
    }

    fn poll(waiting: &mut Waiting) -> Option<Held> {
        match waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(held) => Some(held),
            Poll::Pending => None,
        }
    }

    /// Serves the claims of clients, one at a time, and returns the cost that each of them got.
    fn serve(queue: &Arc<FairQueue>, claims: &[(u64, u64)], grants: usize) -> HashMap<u64, u64> {
        let mut held = Some(queue.try_acquire(claim(99, 1)).expect("free"));
        let mut waiting: Vec<(u64, u64, Waiting)> = claims
            .iter()
            .map(|(client, cost)| (*client, *cost, Box::pin(queue.acquire(claim(*client, *cost))) as Waiting))
            .collect();
        let mut served: HashMap<u64, u64> = HashMap::new();
        for _ in 0..grants {
            drop(held.take());
            let position = waiting.iter_mut().position(|(.., waiting)| {
                held = poll(waiting);
                held.is_some()
            });
            let Some(position) = position else { break };
            let (client, cost, _) = waiting.remove(position);
            *served.entry(client).or_default() += cost;
        }
        served
    }

    #[test]
    fn clients_that_wait_share_by_cost() {
        // A client with many cheap claims, one with few expensive ones, and one with few cheap ones.
        let claims: Vec<(u64, u64)> = (0..600)
            .map(|_| (1, 10))
            .chain((0..60).map(|_| (2, 100)))
            .chain((0..20).map(|_| (3, 10)))
            .collect();
        let served = serve(&queue(1, 0), &claims, 130);
        assert_eq!(served[&3], 200, "{served:?}: the client that needs less than its share gets all");
        assert!(served[&1].abs_diff(served[&2]) <= 100, "{served:?}");
    }

    #[test]
    fn new_client_waits_for_no_backlog() {
        let queue = queue(1, 0);
        let held = queue.try_acquire(claim(1, 1)).expect("free");
        let mut backlog: Vec<Waiting> =
            (0..100).map(|_| Box::pin(queue.acquire(claim(1, 10))) as Waiting).collect();
        drop(held);
        let held = poll(&mut backlog[0]).expect("the first one");
        let mut new: Waiting = Box::pin(queue.acquire(claim(2, 1000)));
        let claims_before = [1, 2, 3].map(|client| queue.end(ClientId(client)).claims_before);
        assert_eq!(claims_before, [100, 3, 2]);
        drop(held);
        assert!(poll(&mut new).is_some());
    }

    #[test]
    fn client_without_slot_gets_a_further_one() {
        let capacity = Capacity { slots: 2, further_slots: 1, ..Capacity::default() };
        let queue = FairQueue::new(capacity);
        let own = [1, 1].map(|client| queue.try_acquire(claim(client, 1)).expect("free"));
        assert!(queue.try_acquire(claim(1, 1)).is_none());
        let mut waiting: Waiting = Box::pin(queue.acquire(claim(1, 1)));
        let claims_before = [1, 2].map(|client| queue.end(ClientId(client)).claims_before);
        assert_eq!(claims_before, [1, 0]);
        let other = queue.try_acquire(claim(2, 1)).expect("the client holds none");
        assert!(queue.try_acquire(claim(2, 1)).is_none() && queue.try_acquire(claim(3, 1)).is_none());
        let mut third: Waiting = Box::pin(queue.acquire(claim(3, 1)));
        assert!(poll(&mut waiting).is_none() && poll(&mut third).is_none());
        drop(own);
        assert!(poll(&mut waiting).is_some() && poll(&mut third).is_some());
        drop(other);
        assert_eq!(queue.in_use(), (0, 0));
    }

    #[test]
    fn backlog_ends_when_a_slot_stays_free() {
        let queue = queue(1, 0);
        let first = queue.try_acquire(claim(1, 1)).expect("free");
        let mut second: Waiting = Box::pin(queue.acquire(claim(1, 1)));
        let start = queue.end(ClientId(1));
        drop(first);
        let second = poll(&mut second).expect("granted");
        let next = queue.end(ClientId(1));
        assert_eq!((next.backlog, next.granted), (start.backlog, start.granted + 1));
        drop(second);
        assert_ne!(queue.end(ClientId(1)).backlog, start.backlog);
    }

    #[test]
    fn continued_work_precedes_waiting_work() {
        let queue = queue(1, 0);
        let held = queue.try_acquire(claim(1, 1)).expect("free");
        let mut other: Waiting = Box::pin(queue.acquire(claim(2, 1)));
        let mut continued: Waiting = Box::pin(queue.acquire(Claim { turn: Turn::Continued, ..claim(1, 1) }));
        drop(held);
        assert!(poll(&mut other).is_none());
        assert!(poll(&mut continued).is_some());
        assert!(poll(&mut other).is_some());
    }

    #[test]
    fn next_part_follows_claims_that_wait_and_precedes_new_work_of_its_client() {
        let queue = queue(1, 0);
        let held = queue.try_acquire(claim(1, 100)).expect("free");
        let mut own: Vec<Waiting> =
            (0..2).map(|_| Box::pin(queue.acquire(claim(1, 100))) as Waiting).collect();
        assert!(!queue.is_wanted_by_others(ClientId(1)));
        drop(held);
        let held = poll(&mut own[0]).expect("granted");
        let mut other: Waiting = Box::pin(queue.acquire(claim(2, 100)));
        assert!(queue.is_wanted_by_others(ClientId(1)));
        drop(held);
        let mut next_part: Waiting = Box::pin(queue.acquire(Claim { turn: Turn::NextPart, ..claim(1, 0) }));
        let held = poll(&mut other).expect("granted");
        assert!(queue.is_wanted_by_others(ClientId(2)));
        drop(held);
        assert!(poll(&mut own[1]).is_none());
        drop(poll(&mut next_part).expect("granted"));
        assert!(poll(&mut own[1]).is_some());
    }

    #[test]
    fn client_without_memory_delays_no_other_client() {
        let queue = queue(10, 200);
        let memory = |client, memory| Claim { memory, ..claim(client, 1) };
        let mut first = queue.try_acquire(memory(1, 80)).expect("free");
        assert!(!first.try_add_memory(21), "a client has half of the memory");
        let mut own: Waiting = Box::pin(queue.acquire(memory(1, 40)));
        let mut other: Waiting = Box::pin(queue.acquire(memory(2, 30)));
        assert!(poll(&mut own).is_none());
        let other = poll(&mut other).expect("granted");
        let mut third: Waiting = Box::pin(queue.acquire(memory(3, 60)));
        let mut fourth: Waiting = Box::pin(queue.acquire(memory(4, 30)));
        assert!(poll(&mut third).is_none(), "a quarter is for small claims");
        assert!(poll(&mut fourth).is_none(), "it does not pass the claim that lacks memory");
        assert!(queue.try_acquire(memory(4, 26)).is_none());
        let mut small: Waiting = Box::pin(queue.acquire(memory(4, 20)));
        let mut without: Waiting = Box::pin(queue.acquire(memory(4, 0)));
        assert!(poll(&mut small).is_some(), "large claims do not delay small ones");
        assert!(queue.try_acquire(memory(4, 20)).is_some());
        assert!(poll(&mut without).is_some(), "claims without memory do not wait");
        drop(third);
        assert!(poll(&mut fourth).is_some(), "a withdrawn claim delays no other");
        first.keep_memory_only(60);
        assert!(poll(&mut own).is_some());
        drop((first, other));
        assert_eq!(queue.in_use(), (0, 0));
        assert_eq!(queue.try_acquire(memory(1, 1000)).expect("reduced").memory(), 100);
    }

    #[test]
    fn small_claims_do_not_starve_a_large_one() {
        let queue = queue(0, 160);
        let memory = |client, memory| Claim { slot: false, memory, ..claim(client, 1) };
        let mut searches: Vec<Held> =
            (0..8).map(|client| queue.try_acquire(memory(client % 2, 18)).expect("free")).collect();
        let mut large: Waiting = Box::pin(queue.acquire(memory(3, 24)));
        assert!(poll(&mut large).is_none() && queue.try_acquire(memory(4, 9)).is_none());
        drop(searches.split_off(7));
        assert!(poll(&mut large).is_some(), "the memory does not go to the next small claim");
        assert!(queue.try_acquire(memory(4, 18)).is_some());
    }

    proptest! {
        /// Whatever clients do, the capacity is never exceeded, nothing leaks, and no claim waits while it could be granted.
        #[test]
        fn capacity_is_never_exceeded(
            steps in prop::collection::vec((0u64..4, 1u64..50, any::<bool>(), 0usize..30, 0u8..4), 1..120)
        ) {
            let capacity = Capacity { slots: 2, further_slots: 1, memory: 40, memory_of_client: 20 };
            let queue = FairQueue::new(capacity);
            let (mut waiting, mut held): (Vec<Waiting>, Vec<Held>) = (Vec::new(), Vec::new());
            for (client, cost, slot, memory, action) in steps {
                match action {
                    0 | 1 => waiting.push(Box::pin(queue.acquire(Claim { slot, memory, ..claim(client, cost) }))),
                    2 if !held.is_empty() => drop(held.remove(memory % held.len())),
                    _ if !waiting.is_empty() => drop(waiting.remove(memory % waiting.len())),
                    _ => {}
                }
                waiting.retain_mut(|waiting| match poll(waiting) {
                    Some(granted) => { held.push(granted); false }
                    None => true,
                });
                let (slots, memory) = queue.in_use();
                prop_assert!(slots <= 3 && memory <= 40);
                let has_slot = |client: u64| held.iter().any(|held| held.slot && held.client == ClientId(client));
                prop_assert!(slots < 3 || (0..4).filter(|client| has_slot(*client)).count() >= 2);
                prop_assert_eq!(slots, held.iter().filter(|held| held.slot).count());
                prop_assert_eq!(memory, held.iter().map(|held| held.memory).sum::<usize>());
            }
            drop(held);
            while !waiting.is_empty() {
                let before = waiting.len();
                waiting.retain_mut(|waiting| poll(waiting).is_none());
                prop_assert!(waiting.len() < before, "a claim waits for free capacity");
            }
            prop_assert_eq!(queue.in_use(), (0, 0));
        }
    }

    #[test]
    fn grant_for_a_task_that_has_gone_is_released() {
        let queue = queue(1, 0);
        let held = queue.try_acquire(claim(1, 1)).expect("free");
        let gone = queue.acquire(claim(2, 1));
        let mut next: Waiting = Box::pin(queue.acquire(claim(3, 1)));
        drop(held);
        // It was granted, but its task never learns of it.
        drop(gone);
        assert!(poll(&mut next).is_some());
    }
}
