//! Messages over byte streams: framing, checks, order, and the mailbox.
//!
//! Any wait, also one for room to send, takes in whatever arrives from anyone and keeps it
//! for later receives. So two ranks that send to each other at once never block for ever.
//! What was posted (`posted`) leaves meanwhile, too.

mod posted;
mod receive;
mod send;

use crate::core_wait::CoreWait;
use crate::error::FabricError;
use crate::flight::Recorder;
use crate::frame::Header;
use crate::link::Link;
use crate::op::{AbortState, Task};
use crate::options::{FabricOptions, RankId};
use posted::Posts;
pub(crate) use posted::{Letter, Stage};
use receive::Inbound;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest sleep before abort and deadline are looked at again.
const NAP: Duration = Duration::from_millis(2);

/// A deliberate fault in the next message sent, to prove that the receiver notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Flips this bit (modulo the size) of the next payload that is not empty, after its
    /// checksum was taken.
    FlipPayloadBit(u64),
    /// Flips this bit (modulo the size) of the next header.
    FlipHeaderBit(u64),
    /// Loses the next message: it is counted and never sent.
    Lose,
}

/// (peer, group, lane): messages of one stream keep their order.
type Stream = (RankId, u32, u8);

/// Since when nothing has happened, and how long the thread had waited for a core by then.
#[derive(Default)]
struct Idle {
    since: Option<(Instant, u64)>,
}

/// What a wait is for, for the error that may end it.
struct Reason {
    peer: RankId,
    direction: &'static str,
    sequence: u64,
    full: Option<RankId>,
}

/// One rank's streams, mailbox and sequence numbers.
pub(crate) struct Mail {
    rank: RankId,
    options: FabricOptions,
    link: Arc<dyn Link>,
    abort: Arc<AbortState>,
    inbound: Vec<Inbound>,
    waiting: HashMap<Stream, VecDeque<(Header, Vec<u8>)>>,
    waiting_bytes: u64,
    sent: HashMap<Stream, u64>,
    seen: HashMap<Stream, u64>,
    outbox: Posts,
    fault: Option<Fault>,
    /// Peers from and to which nothing gets through: a drill.
    cut: Vec<bool>,
    flight: Arc<Recorder>,
    core_wait: CoreWait,
    /// Room for numbers that arrive unaligned.
    unaligned: Vec<f32>,
}

impl Mail {
    pub fn new(
        rank: RankId,
        world: u32,
        options: FabricOptions,
        link: Arc<dyn Link>,
        abort: Arc<AbortState>,
        flight: Arc<Recorder>,
    ) -> Self {
        Self {
            rank,
            options,
            link,
            abort,
            inbound: (0..world).map(|_| Inbound::default()).collect(),
            waiting: HashMap::new(),
            waiting_bytes: 0,
            sent: HashMap::new(),
            seen: HashMap::new(),
            outbox: Posts::new(world),
            fault: None,
            cut: vec![false; world as usize],
            flight,
            core_wait: CoreWait::default(),
            unaligned: Vec::new(),
        }
    }

    pub fn partition(&mut self, peer: RankId) {
        if let Some(cut) = self.cut.get_mut(peer as usize) {
            *cut = true;
        }
    }

    pub fn inject(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    /// The block size for messages of `pieces` blocks: `wish` numbers, less if the limit on
    /// messages asks for it. All members compute the same.
    pub fn block(&self, wish: usize, pieces: usize) -> usize {
        let fits = self.options.message_bytes_max / (4 * pieces.max(1) as u64);
        wish.min(usize::try_from(fits).unwrap_or(wish)).max(1)
    }

    /// Something has happened.
    fn over(&mut self, task: &mut Task, idle: &mut Idle) {
        if let Some((since, core_wait_ns)) = idle.since.take() {
            self.flight.moves();
            task.count.waited_ns += since.elapsed().as_nanos() as u64;
            task.count.core_wait_ns += self.core_wait.ns().saturating_sub(core_wait_ns);
        }
    }

    /// Looks at the deadline, then sleeps a little.
    fn pause(&mut self, task: &mut Task, idle: &mut Idle, ticket: u32, why: &Reason) -> Result<(), FabricError> {
        if idle.since.is_none() {
            self.flight.waits(why.peer);
        }
        let (since, _) = *idle.since.get_or_insert_with(|| (Instant::now(), self.core_wait.ns()));
        self.flight.looks(since);
        let waited = task.started.elapsed();
        let deadline = Duration::from_millis(self.options.deadline_ms);
        if waited >= deadline {
            self.over(task, idle);
            return Err(FabricError::Deadline {
                operation: task.operation,
                group: task.group.name.clone(),
                rank: why.peer,
                direction: why.direction,
                sequence: why.sequence,
                waited_ms: waited.as_millis() as u64,
            });
        }
        self.link.wait(ticket, why.full.or(self.outbox.full()), NAP.min(deadline - waited));
        Ok(())
    }

    /// Counts `bytes` more from `peer` into the mailbox.
    fn keep_room(&mut self, peer: RankId, bytes: u64) -> Result<(), FabricError> {
        self.waiting_bytes += bytes;
        let bytes_max = self.options.mailbox_bytes_max;
        if self.waiting_bytes > bytes_max {
            return Err(FabricError::MailboxFull { rank: peer, bytes: self.waiting_bytes, bytes_max });
        }
        Ok(())
    }

    fn oversize(&self, direction: &'static str, group: String, rank: RankId, bytes: u64) -> FabricError {
        let bytes_max = self.options.message_bytes_max;
        FabricError::Oversize { direction, rank, group, bytes, bytes_max }
    }
}
