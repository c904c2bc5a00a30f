//! Pipeline schedules by name, where they place the chunks of layers, and what they are made of.

use std::fmt;
use std::str::FromStr;

use crate::layout::words;

/// The order of forward and backward work on a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward, one backward, once the pipeline is full.
    OneFOneB,
    /// 1F1B over several chunks of layers per rank.
    Interleaved,
    /// 1F1B with the weight part of backward put off into the bubble.
    ZbH1,
    /// Two chunks per rank, there and back along the pipeline, backward in two parts.
    ZbV,
    /// The same placement in the order of DualPipe cut in half.
    DualPipeV,
    /// The order is that of a file, see [`crate::schedule_file`].
    Csv,
}

words!(Schedule: GPipe = "gpipe", OneFOneB = "1f1b", Interleaved = "interleaved", ZbH1 = "zb-h1", ZbV = "zbv", DualPipeV = "dualpipe-v", Csv = "csv");

impl Schedule {
    /// Chunks per position if the run file does not say; and whether it may say otherwise.
    pub fn chunks(self) -> (usize, bool) {
        match self {
            Self::Interleaved => (2, true),
            Self::ZbV | Self::DualPipeV => (2, false),
            Self::GPipe | Self::OneFOneB | Self::ZbH1 | Self::Csv => (1, false),
        }
    }

    /// The pipeline position of each of `pp x vpp` chunks: round and round, or (V) there and back,
    /// so that the first and the last chunk meet on position 0.
    pub fn placement(self, pp: usize, vpp: usize) -> Vec<usize> {
        let v = matches!(self, Self::ZbV | Self::DualPipeV);
        let position = |chunk: usize| if v && chunk / pp % 2 == 1 { pp - 1 - chunk % pp } else { chunk % pp };
        (0..pp * vpp).map(position).collect()
    }
}

/// A kind of pipeline work: what a unit does on a chunk in one go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Turn {
    /// A unit through the layers of a chunk.
    Forward,
    /// The way back, whole.
    Backward,
    /// The way back without the weight gradients of the layers' matrices.
    BackwardInput,
    /// Those weight gradients.
    BackwardWeight,
}

/// What is kept of a layer between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// All that backward reads.
    None,
    /// All but what attention keeps, which is computed again.
    Selective,
    /// The layer's input: its forward is run again before its backward.
    Full,
}

words!(Recompute: None = "none", Selective = "selective", Full = "full");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_go_round_or_there_and_back() {
        assert_eq!(Schedule::Interleaved.placement(3, 2), [0, 1, 2, 0, 1, 2]);
        assert_eq!(Schedule::ZbV.placement(3, 2), [0, 1, 2, 2, 1, 0]);
        assert_eq!(Schedule::ZbV.placement(1, 1), [0]);
    }
}
