//! What a caller chooses: limits, generation, groups.

/// A process in the run, counted from 0.
pub type RankId = u32;

/// Who talks: a set of ranks. The position in `ranks` is the member index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Unique in the run; every message carries it.
    pub id: u32,
    /// The members, strictly ascending.
    pub ranks: Vec<RankId>,
    /// `tp`, `dp`, `pp`, `world`, ...: the name that counters and errors show.
    pub name: String,
    /// The host of each member. `Some` means two-level exchanges: inside a host first,
    /// then across hosts.
    pub hosts: Option<Vec<u32>>,
}

impl Group {
    /// A group with one-level exchanges.
    pub fn new(id: u32, name: impl Into<String>, ranks: Vec<RankId>) -> Self {
        Self { id, ranks, name: name.into(), hosts: None }
    }

    /// The same group with two-level exchanges; `hosts[i]` is the host of member `i`.
    pub fn on_hosts(mut self, hosts: Vec<u32>) -> Self {
        self.hosts = Some(hosts);
        self
    }

    /// True if no member can stand for others of its host: without hosts, all on one, or each alone on its own.
    pub fn one_level(&self) -> bool {
        let Some(hosts) = &self.hosts else { return true };
        let distinct: std::collections::BTreeSet<_> = hosts.iter().collect();
        distinct.len() == 1 || distinct.len() == hosts.len()
    }

    /// The number of members.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// True if nobody is in it.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// The member index of `rank`, if it is in the group.
    pub fn member(&self, rank: RankId) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }

    /// True if members `a` and `b` lie on different hosts (never, without `hosts`).
    pub fn crosses(&self, a: usize, b: usize) -> bool {
        self.hosts.as_ref().is_some_and(|hosts| hosts[a] != hosts[b])
    }
}

/// Limits and switches of one endpoint.
#[derive(Clone, Debug)]
pub struct FabricOptions {
    /// The run's generation; messages of any other generation are refused.
    pub generation: u32,
    /// The longest time that one operation (a whole collective) may take.
    pub deadline_ms: u64,
    /// Checksum every payload (headers always carry one).
    pub checksum: bool,
    /// The largest payload of one message. Collectives cut their parts into blocks far
    /// below it.
    pub message_bytes_max: u64,
    /// The most that may wait in the mailbox for a later receive.
    pub mailbox_bytes_max: u64,
    /// Size of the ring from one rank to another (threads and shared memory). Rounded up
    /// to a power of two, at least 4096. Larger messages stream through; a sender returns
    /// early only from what fits, so give pipelines room for some messages.
    pub ring_bytes: usize,
    /// Dates flight records.
    pub wall: events::wall::Wall,
}

impl Default for FabricOptions {
    fn default() -> Self {
        Self {
            generation: 0,
            deadline_ms: 30_000,
            checksum: true,
            message_bytes_max: 1 << 30,
            mailbox_bytes_max: 8 << 30,
            ring_bytes: 2 << 20,
            wall: events::wall::Wall::default(),
        }
    }
}
