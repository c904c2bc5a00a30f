//! One rank's end of the fabric.

use crate::bits;
use crate::counters::{Count, Counters};
use crate::error::FabricError;
use crate::flight::{Flight, Recorder};
use crate::frame::Operation;
use crate::link::Link;
use crate::mail::{Fault, Mail};
use crate::op::{AbortState, Task};
use crate::options::{FabricOptions, Group, RankId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// One rank's end of the fabric.
///
/// One thread at a time runs operations (others queue behind it); any thread may abort.
/// All members of a group must call its collectives in the same order with the same plan.
///
/// # Errors
/// Every operation may return: `Aborted`, `PeerGone`, `Deadline`, `Mismatch`, `Oversize`,
/// `MailboxFull`, `Argument`. After any but `Argument` (and `Oversize` found before sending)
/// the endpoint stays failed and repeats that error.
pub struct Endpoint {
    rank: RankId,
    world: u32,
    inner: Mutex<Inner>,
    link: Arc<dyn Link>,
    abort: Arc<AbortState>,
    counters: Mutex<Counters>,
    flight: Arc<Recorder>,
    /// Of nobody: what moves between operations is in its name.
    between: Group,
    in_flight: AtomicBool,
}

/// What an operation works with.
pub(crate) struct Inner {
    pub mail: Mail,
    /// Spare buffers, so that a collective of known size allocates once.
    pub spare: Vec<Vec<f32>>,
    failed: Option<FabricError>,
}

impl Inner {
    /// A buffer of `len` numbers of unknown value.
    pub fn take(&mut self, len: usize) -> Vec<f32> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(len, 0.0);
        buffer
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Vec<f32>) {
        self.spare.push(buffer);
    }
}

/// Aborts an [`Endpoint`] from any thread.
#[derive(Clone)]
pub struct Aborter {
    abort: Arc<AbortState>,
    /// Weak: a forgotten handle must not keep the streams open.
    link: Weak<dyn Link>,
}

impl Aborter {
    /// Ends the operation under way and all later ones with [`FabricError::Aborted`].
    pub fn abort(&self, reason: &str) {
        self.abort.set(reason);
        if let Some(link) = self.link.upgrade() {
            link.wake();
        }
    }
}

impl Endpoint {
    pub(crate) fn over(rank: RankId, world: u32, options: &FabricOptions, link: Arc<dyn Link>) -> Self {
        let abort = Arc::new(AbortState::default());
        let flight = Recorder::new(rank, world, options.generation, &options.wall);
        let mail = Mail::new(rank, world, options.clone(), link.clone(), abort.clone(), flight.clone());
        let inner = Mutex::new(Inner { mail, spare: Vec::new(), failed: None });
        let between = Group::new(u32::MAX, "posted", Vec::new());
        let (counters, in_flight) = (Mutex::default(), AtomicBool::new(false));
        Self { rank, world, inner, link, abort, counters, flight, between, in_flight }
    }

    /// This rank.
    pub fn rank(&self) -> RankId {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Sends numbers to a member. Returns when the transport has them all; while it has no
    /// room, arriving messages are taken in, so two senders never wait for each other.
    pub fn send(&self, group: &Group, to: usize, data: &[f32]) -> Result<(), FabricError> {
        self.send_bytes(group, to, bits::bytes(data))
    }

    /// Sends bytes to a member, like [`Endpoint::send`].
    pub fn send_bytes(&self, group: &Group, to: usize, data: &[u8]) -> Result<(), FabricError> {
        self.run_with(group, Operation::Send, Some(to), data.len(), |task, inner| {
            check_member(task, to)?;
            inner.mail.send(task, to, 0, &[data])
        })
    }

    /// Receives the next message of a member, which must be exactly `into.len()` numbers.
    pub fn recv(&self, group: &Group, from: usize, into: &mut [f32]) -> Result<(), FabricError> {
        self.run_with(group, Operation::Receive, Some(from), size_of_val(into), |task, inner| {
            check_member(task, from)?;
            inner.mail.recv_into(task, from, 0, bits::bytes_mut(into))
        })
    }

    /// Receives the next message of a member, of any size.
    pub fn recv_bytes(&self, group: &Group, from: usize) -> Result<Vec<u8>, FabricError> {
        self.run_with(group, Operation::Receive, Some(from), 0, |task, inner| {
            check_member(task, from)?;
            inner.mail.recv_vec(task, from, 0)
        })
    }

    /// Moves what was posted as far as it goes without waiting: call it between other work. Costs nothing when nothing is
    /// in flight.
    ///
    /// # Errors
    /// Those of [`Endpoint`], but for `Deadline`.
    pub fn progress(&self) -> Result<(), FabricError> {
        if !self.in_flight() {
            return Ok(());
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        self.abort.check()?;
        if let Some(failed) = &inner.failed {
            return Err(failed.clone());
        }
        let (operation, count) = (Operation::Send, Count::default());
        let task = Task { group: &self.between, me: 0, operation, started: Instant::now(), count, posts: true };
        let moved = inner.mail.progress(&task);
        self.in_flight.store(inner.mail.in_flight(), Ordering::Relaxed);
        inner.failed = moved.clone().err();
        moved
    }

    /// True if something that was posted has not left, or not come, as far as the last operation knows.
    pub fn in_flight(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Buffers of [`Endpoint::post_send`] whose numbers have left.
    pub fn spent(&self) -> Vec<Vec<f32>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).mail.spent()
    }

    /// Ends the operation under way and all later ones with [`FabricError::Aborted`]. This
    /// endpoint only: peers see nothing until it is dropped.
    pub fn abort(&self, reason: &str) {
        self.aborter().abort(reason);
    }

    /// A handle that aborts this endpoint from another thread.
    pub fn aborter(&self) -> Aborter {
        Aborter { abort: self.abort.clone(), link: Arc::downgrade(&self.link) }
    }

    /// What was done so far, per group name and operation.
    pub fn counters(&self) -> Counters {
        self.lock_counters().clone()
    }

    /// Nanoseconds spent waiting for peers so far; back at zero with the counters.
    pub fn waited_ns(&self) -> u64 {
        self.lock_counters().rows.values().map(|count| count.waited_ns).sum()
    }

    /// Nanoseconds of [`Endpoint::waited_ns`] in which this thread could have run and had no core.
    pub fn core_wait_ns(&self) -> u64 {
        self.lock_counters().rows.values().map(|count| count.core_wait_ns).sum()
    }

    /// The counters so far; they start again at zero.
    pub fn take_counters(&self) -> Counters {
        std::mem::take(&mut *self.lock_counters())
    }

    /// Puts a fault into the next message sent: a drill that the receiver must notice.
    pub fn inject(&self, fault: Fault) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).mail.inject(fault);
    }

    fn lock_counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The flight recorder: what was exchanged last, also while an operation is stuck.
    pub fn flight(&self) -> Flight {
        self.flight.handle()
    }

    /// From now on no message to or from `peer` gets through, without either side hearing of it: a drill.
    pub fn partition(&self, peer: RankId) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).mail.partition(peer);
    }

    /// Runs a collective in which this member sends or wants `bytes`.
    pub(crate) fn run<T>(
        &self,
        group: &Group,
        operation: Operation,
        bytes: usize,
        body: impl FnOnce(&mut Task, &mut Inner) -> Result<T, FabricError>,
    ) -> Result<T, FabricError> {
        self.run_with(group, operation, None, bytes, body)
    }

    /// Runs an operation with one other member.
    pub(crate) fn run_between<T>(
        &self,
        group: &Group,
        operation: Operation,
        peer: usize,
        bytes: usize,
        body: impl FnOnce(&mut Task, &mut Inner) -> Result<T, FabricError>,
    ) -> Result<T, FabricError> {
        self.run_with(group, operation, Some(peer), bytes, body)
    }

    /// Runs one operation: membership, earlier failure, flight recorder, counters, failure kept.
    fn run_with<T>(
        &self,
        group: &Group,
        operation: Operation,
        peer: Option<usize>,
        bytes: usize,
        body: impl FnOnce(&mut Task, &mut Inner) -> Result<T, FabricError>,
    ) -> Result<T, FabricError> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        self.abort.check()?;
        if let Some(failed) = &inner.failed {
            return Err(failed.clone());
        }
        let count = Count::default();
        let mut task = Task { group, me: 0, operation, started: Instant::now(), count, posts: false };
        self.check_group(&task)?;
        task.me = group
            .member(self.rank)
            .ok_or_else(|| task.argument(format!("rank {} is not among the members {:?}", self.rank, group.ranks)))?;
        let place = self.flight.begin(group, operation, peer, bytes, task.started);
        let result = body(&mut task, &mut inner);
        self.in_flight.store(inner.mail.in_flight(), Ordering::Relaxed);
        self.flight.end(place, result.is_ok());
        match &result {
            Ok(_) => task.count.calls = u64::from(!task.posts),
            Err(error) if error.is_final(operation) => inner.failed = Some(error.clone()),
            Err(_) => {}
        }
        self.lock_counters().record(&group.name, operation, &task.count);
        result
    }

    fn check_group(&self, task: &Task) -> Result<(), FabricError> {
        let ranks = &task.group.ranks;
        if !ranks.is_sorted_by(|a, b| a < b) || ranks.last().is_some_and(|&r| r >= self.world) {
            let world = self.world;
            return Err(task.argument(format!("members {ranks:?} must ascend and lie below {world}")));
        }
        match &task.group.hosts {
            Some(hosts) if hosts.len() != ranks.len() => {
                Err(task.argument(format!("{} hosts for {} members", hosts.len(), ranks.len())))
            }
            _ => Ok(()),
        }
    }
}

/// An error unless `member` is in the group.
pub(crate) fn check_member(task: &Task, member: usize) -> Result<(), FabricError> {
    if member < task.group.len() {
        return Ok(());
    }
    Err(task.argument(format!("member {member} of {}", task.group.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_cross_threads() {
        fn shared<T: Send + Sync>() {}
        fn handed<T: Send + Clone>() {}
        shared::<Endpoint>();
        handed::<Aborter>();
    }
}
