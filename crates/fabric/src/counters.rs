//! What the fabric did, per group name and operation.

use crate::frame::Operation;
use std::collections::BTreeMap;

/// One row of [`Counters`]. Bytes are payload bytes, without headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Operations that ended well.
    pub calls: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Sent to members on this member's host, or to anyone in a group without `hosts`.
    pub intra_bytes_sent: u64,
    /// Received from the same.
    pub intra_bytes_received: u64,
    /// Sent to members on other hosts.
    pub inter_bytes_sent: u64,
    /// Received from the same.
    pub inter_bytes_received: u64,
    /// Time spent waiting for peers, in nanoseconds; of failed operations only up to a deadline.
    pub waited_ns: u64,
    /// The part of it in which this thread could have run and had no core.
    pub core_wait_ns: u64,
}

impl Count {
    /// All payload bytes sent.
    pub fn bytes_sent(&self) -> u64 {
        self.intra_bytes_sent + self.inter_bytes_sent
    }

    /// All payload bytes received.
    pub fn bytes_received(&self) -> u64 {
        self.intra_bytes_received + self.inter_bytes_received
    }

    /// Adds `other` to this row.
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.messages_sent += other.messages_sent;
        self.intra_bytes_sent += other.intra_bytes_sent;
        self.intra_bytes_received += other.intra_bytes_received;
        self.inter_bytes_sent += other.inter_bytes_sent;
        self.inter_bytes_received += other.inter_bytes_received;
        self.waited_ns += other.waited_ns;
        self.core_wait_ns += other.core_wait_ns;
    }
}

/// A snapshot, by (group name, operation). Groups of one name share a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The rows.
    pub rows: BTreeMap<(String, Operation), Count>,
}

impl Counters {
    /// The row of `operation` in groups named `group`; zeros if it never ran.
    pub fn get(&self, group: &str, operation: Operation) -> Count {
        self.rows.get(&(group.to_string(), operation)).copied().unwrap_or_default()
    }

    /// The sum over all rows.
    pub fn total(&self) -> Count {
        self.rows.values().fold(Count::default(), |mut sum, row| {
            sum.add(row);
            sum
        })
    }

    pub(crate) fn record(&mut self, group: &str, operation: Operation, count: &Count) {
        self.rows.entry((group.to_string(), operation)).or_default().add(count);
    }
}
