//! One operation under way, and the flag that ends it.

use crate::counters::Count;
use crate::error::FabricError;
use crate::frame::Operation;
use crate::options::Group;
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
}

impl Task<'_> {
    /// An error about the caller's arguments.
    pub fn argument(&self, problem: String) -> FabricError {
        FabricError::Argument { operation: self.operation, group: self.group.name.clone(), problem }
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
