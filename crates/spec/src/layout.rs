//! The layout: which rank hosts which cells and layers. It says where numbers are computed, never what they are.
//!
//! [`Layout`] is the one type that owns this; [`Layout::resolve`] is the one way to it, and `law` the one place of its law.

mod holders;
mod law;
mod request;

pub use self::holders::{CLASSES, Class, Holders};

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use self::law::Law;
use crate::error::SpecError;
use crate::grid::Grid;
use crate::model::Model;
use crate::schedule::{Recompute, Schedule};
use crate::schedule_file::Orders;

/// How the bytes travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// One process per rank, shared memory.
    Shm,
    /// One process per rank, TCP sockets.
    Tcp,
    /// All ranks are threads of one process.
    Threads,
}

/// Whether ranks keep to cores of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pin {
    /// Each rank to its share of the allowed cores, where there is at least one for each.
    Auto,
    /// The system places them.
    Off,
}

/// When the gathered parameters of `zero = 3` are freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reshard {
    /// After each use: gathered for the forward and again for the backward of every microbatch.
    Always,
    /// After the last backward of a step: gathered once per step, whole in between.
    AfterBackward,
}

/// What lies in files and comes to memory for its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Offload {
    /// Nothing.
    None,
    /// The optimizer's moments.
    Optimizer,
    /// What a layer keeps for backward.
    Activations,
    /// Both.
    Both,
}

impl Offload {
    /// The moments lie in files.
    pub fn optimizer(self) -> bool {
        matches!(self, Self::Optimizer | Self::Both)
    }

    /// What layers keep for backward goes to a file.
    pub fn activations(self) -> bool {
        matches!(self, Self::Activations | Self::Both)
    }
}

macro_rules! words {
    ($type:ident: $($variant:ident = $word:literal),+) => {
        impl $type {
            /// Every value, as written in a run file.
            pub const WORDS: &'static [&'static str] = &[$($word),+];
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),+ })
            }
        }
        impl FromStr for $type {
            type Err = String;
            fn from_str(word: &str) -> Result<Self, String> {
                match word { $($word => Ok(Self::$variant),)+ _ => Err(format!("one of {}", Self::WORDS.join(", "))) }
            }
        }
    };
}
pub(crate) use words;

words!(Reshard: Always = "always", AfterBackward = "after_backward");
words!(Offload: None = "none", Optimizer = "optimizer", Activations = "activations", Both = "optimizer+activations");
words!(Transport: Shm = "shm", Tcp = "tcp", Threads = "threads");
words!(Pin: Auto = "auto", Off = "off");

/// What a run file asks for, before the law.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutRequest {
    /// `layout.dp`
    pub dp: usize,
    /// `layout.cp`
    pub cp: usize,
    /// `layout.ep`
    pub ep: Option<usize>,
    /// `layout.tp`
    pub tp: usize,
    /// `layout.pp`
    pub pp: usize,
    /// `layout.vpp`, chunks per rank.
    pub vpp: Option<usize>,
    /// `layout.schedule`
    pub schedule: Schedule,
    /// `layout.schedule_file`, read.
    pub orders: Option<Arc<Orders>>,
    /// `layout.recompute`
    pub recompute: Recompute,
    /// `layout.recompute_layers`: the layers that it is for; unset: all.
    pub recompute_layers: Option<Vec<usize>>,
    /// `layout.zero`
    pub zero: usize,
    /// `layout.shard`, ranks of a shard group.
    pub shard: Option<usize>,
    /// `layout.reshard`
    pub reshard: Reshard,
    /// `layout.mirror`
    pub mirror: Option<bool>,
    /// `layout.offload`
    pub offload: Offload,
    /// `layout.offload_folder`
    pub offload_folder: Option<PathBuf>,
    /// `layout.keep_packed`
    pub keep_packed: bool,
    /// `layout.tp_overlap`
    pub tp_overlap: bool,
    /// `layout.tp_pairs`
    pub tp_pairs: bool,
    /// `layout.threads`, threads per rank.
    pub threads: Option<usize>,
    /// `layout.transport`
    pub transport: Transport,
    /// `layout.pin`
    pub pin: Pin,
    /// `layout.exchange_timeout_ms`
    pub exchange_timeout_ms: usize,
    /// `layout.cells`: data cells of each dp rank.
    pub cells: Option<Vec<usize>>,
    /// `layout.stages`: layers of each chunk, `pp x vpp` numbers.
    pub stages: Option<Vec<usize>>,
    /// `cluster.ranks_per_host`
    pub ranks_per_host: Option<usize>,
}

/// Where a rank stands on each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coords {
    /// Position on the data axis.
    pub dp: usize,
    /// Position on the context axis.
    pub cp: usize,
    /// Position on the pipeline axis.
    pub pp: usize,
    /// Position on the tensor axis.
    pub tp: usize,
}

/// A validated layout of one grid and model.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Ranks on the data axis.
    pub dp: usize,
    /// Ranks on the context axis.
    pub cp: usize,
    /// Data positions that host one group of data cells together, and share the work of its experts.
    pub group: usize,
    /// Ranks on the tensor axis.
    pub tp: usize,
    /// Ranks on the pipeline axis.
    pub pp: usize,
    /// Chunks of layers per rank.
    pub vpp: usize,
    /// Order of pipeline work.
    pub schedule: Schedule,
    /// The order itself, where a file gives it.
    pub orders: Option<Arc<Orders>>,
    /// The pipeline position of each chunk.
    pub placement: Vec<usize>,
    /// What is kept of each layer between forward and backward.
    pub recompute: Vec<Recompute>,
    /// Sharded inside a shard group: 1: optimizer state; 2: gradients too; 3: parameters too; 0: nothing.
    pub zero: usize,
    /// Neighbouring holders that share one set of shards: all, or fewer with replicas; 1 with `zero = 0`.
    pub shard: usize,
    /// When gathered parameters are freed.
    pub reshard: Reshard,
    /// State without a replica has a mirror, see [`Layout::mirrored`].
    pub mirror: bool,
    /// What lies in files.
    pub offload: Offload,
    /// Where; `None`: in the run's folder.
    pub offload_folder: Option<PathBuf>,
    /// Weights that are used again before the next update stay packed for the products.
    pub keep_packed: bool,
    /// Tensor-parallel exchanges of backward run beside weight gradients, see [`Layout::overlaps_tp`].
    pub tp_overlap: bool,
    /// Two microbatches at a time, see [`Layout::pairs_tp`].
    pub tp_pairs: bool,
    /// Threads per rank.
    pub threads: usize,
    /// How bytes travel.
    pub transport: Transport,
    /// Whether ranks keep to cores of their own.
    pub pin: Pin,
    /// The longest that one exchange between ranks may take.
    pub exchange_timeout_ms: usize,
    /// Data cells of each dp rank: contiguous, ascending, none empty.
    pub cells: Vec<Range<usize>>,
    /// Layers of each chunk; chunk `c` lives on pipeline position `placement[c]`.
    pub stages: Vec<Range<usize>>,
    /// Ranks of one host, contiguous; `None`: all on one.
    pub ranks_per_host: Option<usize>,
}

impl Layout {
    /// The layout that `request` asks for over `grid`, on a machine with `cores`.
    ///
    /// # Errors
    /// The broken law with every factor and the nearest possible values.
    pub fn resolve(request: &LayoutRequest, grid: &Grid, model: &Model, cores: usize) -> Result<Self, SpecError> {
        Law { request, grid, model }.resolve(cores)
    }

    /// Groups of holders that each have one whole set of shards.
    pub fn replicas(&self) -> usize {
        self.holders() / self.shard
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.dp * self.cp * self.tp * self.pp
    }

    /// Chunks of layers in the whole pipeline.
    pub fn chunks(&self) -> usize {
        self.pp * self.vpp
    }

    /// The rank at `at`: tensor innermost, then context, pipeline, data outermost.
    pub fn rank(&self, at: Coords) -> usize {
        ((at.dp * self.pp + at.pp) * self.cp + at.cp) * self.tp + at.tp
    }

    /// Where `rank` stands.
    pub fn coords(&self, rank: usize) -> Coords {
        let (line, tp) = (rank / self.tp, rank % self.tp);
        Coords { dp: line / self.cp / self.pp, cp: line % self.cp, pp: line / self.cp % self.pp, tp }
    }

    /// Ranks that hold the same parameters: all positions on the data and context axes.
    pub fn holders(&self) -> usize {
        self.dp * self.cp
    }

    /// The number of `at` among them: context fastest.
    pub fn holder(&self, at: Coords) -> usize {
        at.dp * self.cp + at.cp
    }

    /// The context cells of context position `cp`, of the grid's `cells`.
    pub fn context_cells(&self, cp: usize, cells: usize) -> Range<usize> {
        let each = cells / self.cp;
        cp * each..(cp + 1) * each
    }

    /// The leaves of the tree over the cells (d, c) that each holder has, ascending.
    pub fn leaves(&self, grid: &Grid) -> Vec<Vec<Range<usize>>> {
        let of = |holder: usize| {
            let contexts = self.context_cells(holder % self.cp, grid.cp);
            let cells = self.cells[holder / self.cp].clone();
            cells.map(move |d| d * grid.cp + contexts.start..d * grid.cp + contexts.end).collect()
        };
        (0..self.holders()).map(of).collect()
    }

    /// The tensor cells of tensor position `tp`, of the grid's `cells`.
    pub fn tensor_cells(&self, tp: usize, cells: usize) -> Range<usize> {
        let each = cells / self.tp;
        tp * each..(tp + 1) * each
    }

    /// The pipeline position of a chunk.
    pub fn chunk_pp(&self, chunk: usize) -> usize {
        self.placement[chunk]
    }

    /// The chunks of pipeline position `pp`, ascending.
    pub fn chunks_of(&self, pp: usize) -> impl Iterator<Item = usize> + '_ {
        self.placement.iter().enumerate().filter(move |(_, at)| **at == pp).map(|(chunk, _)| chunk)
    }

    /// The chunk that holds `layer`.
    pub fn chunk_of_layer(&self, layer: usize) -> usize {
        self.stages.iter().position(|s| s.contains(&layer)).expect("stages cover every layer")
    }

    /// True if exchanges over the tensor axis are posted before work that does not need them. Where members of a tensor
    /// group stand for others of their host, gathers have two rounds, which need all members.
    pub fn overlaps_tp(&self) -> bool {
        let one_level = |first: usize| {
            let last = first + self.tp - 1;
            let hosts = self.host(last) - self.host(first) + 1;
            hosts == 1 || hosts == self.tp
        };
        let groups = || (0..self.world()).step_by(self.tp);
        self.tp_overlap && self.tp > 1 && (self.ranks_per_host.is_none() || groups().all(one_level))
    }

    /// True if the backward of a microbatch and the forward of the next one go on in turns, so that exchanges of each over the
    /// tensor axis run beside the work of the other. Stages of a pipeline wait for each other, and gathered parameters
    /// come and go in the order of the work on them: there it is not done.
    pub fn pairs_tp(&self) -> bool {
        self.tp_pairs && self.overlaps_tp() && self.chunks() == 1 && self.zero < 3
    }

    /// The host of `rank`.
    pub fn host(&self, rank: usize) -> usize {
        self.ranks_per_host.map_or(0, |n| rank / n)
    }
}

impl fmt::Display for Layout {
    /// One line, such as `dp2 x tp2 x pp2 1f1b zero1 shm`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dp{} x ", self.dp)?;
        if self.group > 1 {
            write!(f, "ep{} x ", self.group)?;
        }
        if self.cp > 1 {
            write!(f, "cp{} x ", self.cp)?;
        }
        write!(f, "tp{} x pp{}", self.tp, self.pp)?;
        if self.pp > 1 {
            write!(f, " {}", self.schedule)?;
            if self.vpp > 1 {
                write!(f, " vpp{}", self.vpp)?;
            }
        }
        let again = |mode| self.recompute.iter().filter(|m| **m == mode).count();
        for mode in [Recompute::Selective, Recompute::Full] {
            match again(mode) {
                0 => {}
                n if n == self.recompute.len() => write!(f, " recompute-{mode}")?,
                n => write!(f, " recompute-{mode}({n} of {} layers)", self.recompute.len())?,
            }
        }
        write!(f, " zero{}", self.zero)?;
        if self.zero > 0 && self.shard < self.holders() {
            write!(f, " shard{}", self.shard)?;
        }
        if self.zero > 2 && self.reshard != Reshard::Always {
            write!(f, " reshard {}", self.reshard)?;
        }
        if self.offload != Offload::None {
            write!(f, " offload-{}", self.offload)?;
        }
        if self.keep_packed {
            write!(f, " keeps-packed")?;
        }
        if self.tp > 1 && !self.tp_overlap {
            write!(f, " no-tp-overlap")?;
        }
        if self.pairs_tp() {
            write!(f, " tp-pairs")?;
        }
        write!(f, " {} threads{}", self.transport, self.threads)
    }
}
