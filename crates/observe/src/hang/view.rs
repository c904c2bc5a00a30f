//! What the record of one rank tells.

use std::collections::BTreeMap;

use serde::Serialize;

/// How far an exchange has come on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The process has handed it to its stream. Where [`RankView::timed`] holds, the stream has not reached it yet.
    Scheduled,
    /// The rank is inside it.
    #[default]
    Started,
    /// It is over.
    Completed,
}

/// A group as one rank knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupOf {
    /// What it is for.
    pub desc: String,
    /// Its members; empty: the record does not tell.
    pub ranks: Vec<u32>,
    /// The last collective that this rank has begun, counted from 1; 0: none. None: the record does not reach back far enough.
    pub begun: Option<u64>,
}

/// One exchange of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchange {
    /// The group's name.
    pub group: String,
    /// What it is.
    pub operation: String,
    /// Counted from 1.
    pub sequence: u64,
    /// A send or receive.
    pub point_to_point: bool,
    /// It is a send.
    pub sends: bool,
    /// The other side of a send or receive, if the record tells.
    pub peer: Option<u32>,
    /// Shapes of what goes in.
    pub inputs: Vec<Vec<u64>>,
    /// Shapes of what comes out.
    pub outputs: Vec<Vec<u64>>,
    /// Types of what goes in, then of what comes out.
    pub types: Vec<String>,
    /// How far it has come.
    pub state: State,
    /// Nanoseconds, on the rank's clock.
    pub began_ns: u64,
}

impl Exchange {
    /// It is not over.
    pub fn open(&self) -> bool {
        self.state != State::Completed
    }

    /// A collective that ends nowhere before all members have come to it.
    pub fn meets(&self) -> bool {
        let kind = self.operation.rsplit(':').next().unwrap_or_default().to_ascii_lowercase();
        let kind = kind.trim_start_matches('_').replace('_', "");
        let all = ["allreduce", "allgather", "reducescatter", "alltoall", "barrier"];
        !self.point_to_point && all.iter().any(|of| kind.starts_with(of))
    }

    /// The shape to show.
    pub fn size(&self) -> Vec<u64> {
        self.inputs.first().cloned().unwrap_or_default()
    }
}

/// What one rank's record tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankView {
    /// The rank.
    pub rank: u32,
    /// By name.
    pub groups: BTreeMap<String, GroupOf>,
    /// Oldest first.
    pub exchanges: Vec<Exchange>,
    /// The peer that the exchange under way waits for.
    pub waits_for: Option<u32>,
    /// Milliseconds for which it has looked for what it waits for, and nothing came or went.
    pub still_ms: u64,
    /// By peer: messages sent to it, and messages that came from it.
    pub links: BTreeMap<u32, (u64, u64)>,
    /// The record tells "scheduled" from "started". PyTorch knows it only with `TORCH_NCCL_ENABLE_TIMING`.
    pub timed: bool,
    /// The record reaches back to the rank's first exchange, so that sends and receives can be counted.
    pub whole: bool,
    /// All members must agree on shapes, and a send has its receive in the records: so it is with PyTorch's, not with ours.
    pub strict: bool,
}

impl RankView {
    /// Where the rank itself waits for its stream: the exchange is handed over, and not reached.
    pub fn queued(&self, exchange: &Exchange) -> bool {
        self.timed && exchange.state == State::Scheduled
    }
}
