//! Layouts that nobody thought of.

use super::grids::{GRIDS, parse};
use super::rows::{Course, Row};

/// Ranks of a random layout.
const RANKS_MAX: usize = 8;

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
pub struct Random(u64);

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `1..=max`.
    pub fn upto(&mut self, max: usize) -> usize {
        1 + (self.next() % max as u64) as usize
    }

    /// True in `n` of `of` cases.
    pub fn chance(&mut self, n: usize, of: usize) -> bool {
        self.upto(of) <= n
    }

    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.upto(of.len()) - 1]
    }

    /// `parts` numbers of at least 1 that add up to `total`.
    pub fn split(&mut self, parts: usize, total: usize) -> Vec<usize> {
        let mut counts = vec![1; parts];
        (parts..total).for_each(|_| counts[self.upto(parts) - 1] += 1);
        counts
    }
}

/// `count` layouts of at least two ranks, all sound.
pub fn rows(count: usize, random: &mut Random) -> Vec<Row> {
    let mut rows = Vec::new();
    while rows.len() < count {
        rows.extend(row(random));
    }
    rows
}

/// One try.
fn row(random: &mut Random) -> Option<Row> {
    let grid = random.upto(GRIDS.len()) - 1;
    let whole = parse(grid, &[]).ok()?;
    let (dp, tp, pp) = (random.upto(whole.grid.dp), random.upto(whole.grid.tp), random.upto(4));
    let cp = random.upto(whole.grid.cp);
    let world = dp * cp * tp * pp;
    if !(2..=RANKS_MAX).contains(&world) {
        return None;
    }
    let schedule = random.one(&["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]);
    let vpp = match schedule {
        _ if pp == 1 => 1,
        "interleaved" => random.upto(3),
        "zbv" | "dualpipe-v" => 2,
        _ => 1,
    };
    let mut words = vec![format!("layout.dp={dp}"), format!("layout.tp={tp}"), format!("layout.pp={pp}")];
    words.push(format!("layout.cp={cp}"));
    words.push(format!("layout.schedule={schedule}"));
    if vpp > 1 || schedule == "interleaved" {
        words.push(format!("layout.vpp={vpp}"));
    }
    if random.upto(2) == 1 && whole.model.layers >= pp * vpp {
        words.push(format!("layout.stages={:?}", random.split(pp * vpp, whole.model.layers)));
    }
    if random.upto(2) == 1 {
        words.push(format!("layout.cells={:?}", random.split(dp, whole.grid.dp)));
    }
    let holders = dp * cp;
    if holders > 1 && random.upto(2) == 1 {
        // Gradients are sharded where the order of the grid's sums lets them.
        let reduced = whole.grid.accumulate == spec::Accumulate::Reduced || whole.grid.microbatches == 1;
        words.push(format!("layout.zero={}", if reduced { random.upto(3) } else { 1 }));
        let shards: Vec<usize> = (1..=holders).filter(|n| holders.is_multiple_of(*n)).collect();
        words.push(format!("layout.shard={}", random.one(&shards)));
    }
    if random.upto(3) == 1 {
        words.push(format!("layout.recompute={}", random.one(&["full", "selective"])));
    }
    words.push(format!("layout.transport={}", random.one(&["shm", "shm", "tcp", "threads"])));
    if random.upto(4) == 1 {
        words.push("layout.threads=2".into());
    }
    if random.upto(4) == 1 {
        words.push(format!("cluster.ranks_per_host={}", random.upto(world - 1)));
    }
    parse(grid, &words).ok()?;
    Some(Row { grid, sets: words, simd: None, course: Course::Straight })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_its_layouts_and_all_are_sound() {
        let made = rows(40, &mut Random::new(7));
        assert_eq!(made, rows(40, &mut Random::new(7)));
        assert_ne!(made, rows(40, &mut Random::new(8)));
        for row in &made {
            let run = parse(row.grid, &row.sets).unwrap();
            assert!(run.layout.world() >= 2);
            train::launch::prove(&run).unwrap_or_else(|e| panic!("{}: {e}", row.label()));
        }
    }
}
