//! One operation under way, and the flag that ends it.

use crate::counters::Count;
use crate::error::FabricError;
use crate::frame::{BadHeader, Header, Operation};
use crate::link::LinkDown;
use crate::options::{Group, RankId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One operation of one rank: what it is for errors, and what it has done for counters.
pub(crate) struct Task<'g> {
    pub group: &'g Group,
    pub me: usize,
    pub operation: Operation,
    pub started: Instant,
    pub count: Count,
    /// It only posts: a later operation ends it.
    pub posts: bool,
}

impl Task<'_> {
    /// An error about the caller's arguments.
    pub fn argument(&self, problem: String) -> FabricError {
        FabricError::Argument { operation: self.operation, group: self.group.name.clone(), problem }
    }

    /// What to call a group that a message names.
    pub fn name(&self, group: u32) -> String {
        if group == self.group.id { self.group.name.clone() } else { format!("#{group}") }
    }

    /// The peer's stream has ended.
    pub fn gone(&self, rank: RankId, down: LinkDown) -> FabricError {
        let group = self.group.name.clone();
        FabricError::PeerGone { rank, operation: self.operation, group, detail: down.0 }
    }

    /// The message of `header` is not what was expected.
    pub fn mismatch(&self, header: &Header, what: &'static str, expected: String, got: String) -> FabricError {
        let (rank, sequence) = (header.source, header.sequence);
        FabricError::Mismatch { what, group: self.name(header.group), rank, sequence, expected, got }
    }

    /// An error unless `got` is `expected`.
    pub fn expect(&self, header: &Header, what: &'static str, expected: usize, got: usize) -> Result<(), FabricError> {
        if expected == got {
            return Ok(());
        }
        Err(self.mismatch(header, what, expected.to_string(), got.to_string()))
    }

    /// An error unless the message of `header` is of the kind and size for which there is a posted place.
    pub fn expect_posted(&self, header: &Header, wire: u8, bytes: usize) -> Result<(), FabricError> {
        if header.operation != wire {
            let (wanted, came) = (Operation::wire_name(wire), Operation::wire_name(header.operation));
            return Err(self.mismatch(header, "operation", wanted, came));
        }
        self.expect(header, "byte count", bytes, header.bytes as usize)
    }

    /// The peer is in another operation.
    pub fn wrong_operation(&self, header: &Header) -> FabricError {
        let wanted = Operation::wire_name(self.operation.wire());
        self.mismatch(header, "operation", wanted, Operation::wire_name(header.operation))
    }

    /// What `rank` sent is no header.
    pub fn unreadable(&self, rank: RankId, (what, expected, got): BadHeader) -> FabricError {
        let group = self.group.name.clone();
        FabricError::Mismatch { what, group, rank, sequence: 0, expected, got }
    }
}

/// Set once, by anyone; seen by every wait.
#[derive(Default)]
pub(crate) struct AbortState {
    on: AtomicBool,
    reason: Mutex<String>,
}

impl AbortState {
    /// The first reason stays.
    pub fn set(&self, reason: &str) {
        let mut kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.on.load(Ordering::Acquire) {
            *kept = reason.to_string();
            self.on.store(true, Ordering::Release);
        }
    }

    pub fn check(&self) -> Result<(), FabricError> {
        if !self.on.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Err(FabricError::Aborted { reason })
    }
}
