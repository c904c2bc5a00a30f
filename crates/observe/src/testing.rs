//! Small runs with made-up times.

use std::collections::HashMap;

use program::{Mode, Program, lower_all_parts};
use spec::{Grid, Layout, Model, Run};

use crate::Observed;
use crate::flows::{Flow, flows};
use crate::record::{RankRecord, StepRecord};

/// A run of four small layers.
pub struct World {
    pub model: Model,
    pub grid: Grid,
    pub layout: Layout,
    pub seq: usize,
    pub programs: Vec<Program>,
}

impl World {
    /// On `[dp, tp, pp]` ranks.
    pub fn new([dp, tp, pp]: [usize; 3]) -> Self {
        let text = "[model]\npreset = \"nano\"\ntied = true\n[data]\nsource = \"synthetic\"\n\
                    [train]\nsteps = 1\nbatch = 8\nseq = 16\n[grid]\ndp = 2\ntp = 2\n";
        let sets = [format!("layout.dp={dp}"), format!("layout.tp={tp}"), format!("layout.pp={pp}")];
        let run = Run::parse(text, "small", &sets, 1).unwrap();
        let (model, grid, layout, seq) = (run.model, run.grid, run.layout, run.train.seq);
        let programs = lower_all_parts(&model, &grid, &layout, seq, Mode::Train);
        Self { model, grid, layout, seq, programs }
    }

    pub fn observed(&self) -> Observed<'_> {
        let Self { model, grid, layout, seq, programs } = self;
        Observed { model, grid, layout, seq: *seq, programs, peak_gflops: 50.0, bandwidth_gb_s: 10.0 }
    }
}

/// Records of `steps` steps from the fourth on, in which instruction `i` takes 100 + i ns, on rank r that many times
/// r + 1, and everybody waits for whom it depends on.
pub fn record(world: &World, steps: u64) -> Vec<RankRecord> {
    let times = run(world);
    let rank = |(rank, marks): (usize, &Vec<(u64, u64)>)| {
        let step = |nth: u64| {
            let began_ns = 1_000 + nth * 100_000_000;
            let marks: Vec<_> = marks.iter().map(|(end, waited)| (began_ns + 10 + end, *waited)).collect();
            let ended_ns = marks.last().map_or(began_ns, |mark| mark.0) + 5;
            StepRecord {
                step: 4 + nth,
                began_ns,
                ran_ns: began_ns + 10,
                ended_ns,
                marks,
                flights: Vec::new(),
                moved: Vec::new(),
                late: Vec::new(),
            }
        };
        RankRecord { rank, steps: (0..steps).map(step).collect() }
    };
    times.iter().enumerate().map(rank).collect()
}

/// By rank and instruction: when it was over, and how long it waited.
fn run(world: &World) -> Vec<Vec<(u64, u64)>> {
    let mut needs: HashMap<(usize, usize), Vec<(usize, usize)>> = HashMap::new();
    for flow in flows(&world.programs, &world.layout) {
        match flow {
            Flow::Message { from, to } => drop(needs.insert(to, vec![from, to])),
            Flow::Together(members) => members.iter().for_each(|m| drop(needs.insert(*m, members.clone()))),
        }
    }
    let mut marks: Vec<Vec<(u64, u64)>> = vec![Vec::new(); world.programs.len()];
    let begins = |marks: &[Vec<(u64, u64)>], (rank, at): (usize, usize)| match at {
        0 => Some(0),
        _ => marks[rank].get(at - 1).map(|mark| mark.0),
    };
    loop {
        let before: usize = marks.iter().map(Vec::len).sum();
        for program in &world.programs {
            let here = (program.rank, marks[program.rank].len());
            if here.1 == program.instrs.len() {
                continue;
            }
            let Some(begin) = begins(&marks, here) else { continue };
            let alone = vec![here];
            let all = needs.get(&here).unwrap_or(&alone);
            let Some(last) = all.iter().map(|end| begins(&marks, *end)).collect::<Option<Vec<_>>>() else { continue };
            let last = last.into_iter().max().unwrap_or(begin);
            let takes = (program.rank as u64 + 1) * (100 + here.1 as u64);
            marks[program.rank].push((last + takes, last - begin));
        }
        let after: usize = marks.iter().map(Vec::len).sum();
        if after == before {
            assert!(marks.iter().zip(&world.programs).all(|(m, p)| m.len() == p.instrs.len()), "a deadlock");
            return marks;
        }
    }
}
