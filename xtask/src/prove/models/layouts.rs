//! Layouts for a model that nobody thought of, over the whole of what a run file can ask for.

use kernels::Simd;
use spec::Run;

use super::super::random::Random;

/// Ranks of a layout.
pub const RANKS_MAX: usize = 8;
/// Ranks where each is a process.
const PROCESSES_MAX: usize = 4;

/// A layout as a user would write it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// Its keys, such as `layout.dp=2`.
    pub sets: Vec<String>,
    /// Instruction path of the kernels; `None`: the widest.
    pub simd: Option<Simd>,
    /// Through the binary.
    pub processes: bool,
}

impl Asked {
    /// The keys, short.
    pub fn label(&self) -> String {
        let short = |set: &String| set.strip_prefix("layout.").unwrap_or(set).to_owned();
        let simd = self.simd.map(|simd| format!("--simd {simd}"));
        self.sets.iter().map(short).chain(simd).collect::<Vec<_>>().join(" ")
    }

    /// As arguments of the command.
    pub fn args(&self) -> Vec<String> {
        let sets = self.sets.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
        let simd = self.simd.iter().flat_map(|simd| ["--simd".to_owned(), simd.to_string()]);
        sets.chain(simd).collect()
    }
}

/// Draws one for `whole`, the run on one rank; `processes`: ranks may be processes.
pub fn draw(random: &mut Random, whole: &Run, processes: bool) -> Asked {
    let processes = processes && random.chance(1, 8);
    let most = if processes { PROCESSES_MAX } else { RANKS_MAX };
    let mut out = ranks(random, whole, most);
    if random.chance(1, 10) {
        // What the law has to refuse, or to stand.
        out.push(random.one(&["layout.tp=3", "layout.cp=3", "layout.pp=5", "layout.vpp=2", "layout.dp=9"]).into());
        out.push(random.one(&["layout.zero=3", "layout.shard=2", "layout.ep=2", "layout.tp_pairs=true"]).into());
    }
    keeps(&mut out, random, whole.model.layers);
    // Its default is the number of cores where there is one rank.
    out.push(format!("layout.threads={}", random.one(&[1, 1, 1, 2, 3])));
    out.push(format!("layout.transport={}", if processes { random.one(&["shm", "tcp"]) } else { "threads" }));
    if processes && random.chance(1, 3) {
        out.push(format!("layout.mirror={}", random.chance(1, 2)));
    }
    let paths: Vec<Simd> = Simd::available().collect();
    let simd = random.chance(1, 4).then(|| random.one(&paths));
    Asked { sets: out, simd, processes }
}

/// The axes, schedule and shards.
fn ranks(random: &mut Random, whole: &Run, most: usize) -> Vec<String> {
    let grid = &whole.grid;
    let divisor = |random: &mut Random, of: usize| {
        let all: Vec<usize> = (1..=of).filter(|n| of.is_multiple_of(*n)).collect();
        random.one(&all)
    };
    let [dp, cp, tp, pp] = loop {
        // Groups of data cells are cut evenly.
        let dp = if grid.ep > 1 { divisor(random, grid.dp) } else { random.upto(grid.dp) };
        let axes = [dp, divisor(random, grid.cp), divisor(random, grid.tp), random.upto(whole.model.layers.min(4))];
        if axes.iter().product::<usize>() <= most {
            break axes;
        }
    };
    let mut out = vec![format!("layout.dp={dp}"), format!("layout.cp={cp}"), format!("layout.tp={tp}")];
    out.push(format!("layout.pp={pp}"));
    let schedule = random.one(&["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]);
    out.push(format!("layout.schedule={schedule}"));
    let vpp = match schedule {
        _ if pp == 1 => 1,
        "interleaved" => random.upto((whole.model.layers / pp).clamp(1, 3)),
        "zbv" | "dualpipe-v" => 2,
        _ => 1,
    };
    if schedule == "interleaved" && pp > 1 {
        out.push(format!("layout.vpp={vpp}"));
    }
    if random.chance(1, 2) && whole.model.layers >= pp * vpp {
        out.push(format!("layout.stages={:?}", random.split(pp * vpp, whole.model.layers)));
    }
    if random.chance(1, 2) && grid.ep == 1 {
        out.push(format!("layout.cells={:?}", random.split(dp, grid.dp)));
    }
    let holders = dp * cp;
    if random.chance(3, 5) {
        // Gradients are sharded where the order of the grid's sums lets them.
        let reduced = grid.accumulate == spec::Accumulate::Reduced || grid.microbatches == 1;
        out.push(format!("layout.zero={}", if reduced { random.upto(3) } else { 1 }));
        if random.chance(1, 2) {
            out.push(format!("layout.shard={}", divisor(random, holders)));
        }
        if random.chance(1, 3) {
            out.push("layout.reshard=after_backward".into());
        }
    }
    let world = holders * tp * pp;
    if random.chance(1, 6) {
        out.push(format!("cluster.ranks_per_host={}", divisor(random, world)));
    }
    out
}

/// What is kept, where, and what runs beside what.
fn keeps(out: &mut Vec<String>, random: &mut Random, layers: usize) {
    if random.chance(1, 2) {
        out.push(format!("layout.recompute={}", random.one(&["full", "selective"])));
        if random.chance(1, 3) {
            let chosen: Vec<usize> = (0..layers).filter(|_| random.chance(1, 2)).collect();
            out.push(format!("layout.recompute_layers={chosen:?}"));
        }
    }
    if random.chance(1, 5) {
        out.push(format!("layout.offload={}", random.one(&["optimizer", "activations", "optimizer+activations"])));
    }
    if random.chance(1, 5) {
        out.push("layout.keep_packed=true".into());
    }
    if random.chance(1, 5) {
        out.push("layout.tp_overlap=false".into());
    }
    if random.chance(1, 6) {
        out.push("layout.tp_pairs=true".into());
    }
}
