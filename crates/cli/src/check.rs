//! `lockstep check`.

use std::collections::BTreeMap;

use program::print::{self, Limits};
use program::{Mode, balance, lower, placement};
use train::against::{Comparison, STEPS};
use train::{TrainError, launch};

use crate::RunArgs;
use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// Print each rank's instructions.
    #[arg(long)]
    program: bool,
    /// With --program: only this rank's.
    #[arg(long, value_name = "RANK", requires = "program")]
    rank: Option<usize>,
    /// Also run two steps at reduced size under the layout and on one rank, and compare every tensor's bits.
    #[arg(long, value_enum, value_name = "WHAT")]
    against: Option<Against>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

/// A split of the layers is proposed where its busiest position has less than this share of the work of the present one's.
const WORTH_SAYING: f64 = 0.98;

/// What a layout is compared with.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Against {
    /// One rank.
    Single,
}

/// Exit code if a tensor differs.
const DIFFERS: u8 = 70;

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let run = args.run.load()?;
    let world = run.layout.world();
    if let Some(rank) = args.rank
        && rank >= world
    {
        return Err(TrainError::BadInput(format!("--rank {rank}: the layout has ranks 0 to {}", world - 1)));
    }
    let report = launch::prove(&run)?;
    let ranks: Vec<usize> = args.rank.map_or_else(|| (0..world).collect(), |rank| vec![rank]);
    let table = placement::table(&run.model, &run.grid, &run.layout, &report);
    if args.json {
        let placed = |row: &placement::Row| {
            let placed: BTreeMap<_, _> = placement::PLACEMENTS.into_iter().zip(row.placed.clone()).collect();
            let state = format!("{:?}", row.state).to_lowercase();
            serde_json::json!({ "state": state, "placed": placed, "bytes": row.bytes, "sent": row.sent })
        };
        let verdict = serde_json::json!({
            "kind": "check", "schema": events::SCHEMA, "verdict": "sound", "layout": run.layout.to_string(), "ranks": world,
            "bubble": report.bubble, "peak_activations": report.peak_activations, "bytes_by_axis": report.bytes(),
            "stages": run.layout.stages.iter().map(|stage| stage.len()).collect::<Vec<_>>(),
            "position_shares": balance::shares(&run.model, &run.layout, run.train.seq),
            "stages_even": balance::best(&run.model, &run.layout, run.train.seq).0,
            "states": table.iter().map(placed).collect::<Vec<_>>(),
        });
        line(&verdict.to_string());
        if args.program {
            for rank in ranks {
                for (index, instr) in lower(&run, rank, Mode::Train).instrs.iter().enumerate() {
                    let object = serde_json::json!({
                        "kind": "instruction", "schema": events::SCHEMA, "rank": rank, "index": index, "text": instr.to_string(),
                    });
                    line(&object.to_string());
                }
            }
        }
        return against(args, &run);
    }
    line(&format!("sound: {} on {world} rank{}", run.layout, if world == 1 { "" } else { "s" }));
    line("  no rank waits for ever; every microbatch passes every layer once each way;");
    line("  weight gradients are first in, first out; nothing is applied before the vote");
    line(&format!(
        "bubble {:.1}% | peak activations {} layer-microbatches",
        100.0 * report.bubble,
        report.peak_activations
    ));
    if run.layout.pp > 1 {
        line(&stages(&run));
    }
    line(&print::placements(&table));
    line(&memory(&run));
    line(&print::table(&report, Limits::default()));
    line(&print::gantt(&report, &run.grid, &run.layout, Limits::default()));
    if args.program {
        let limits = Limits { rows_max: usize::MAX, ..Limits::default() };
        for rank in ranks {
            line(&print::listing(&lower(&run, rank, Mode::Train), limits));
        }
    }
    against(args, &run)
}

/// How evenly pipeline positions share the work, and which split of the layers would do better.
fn stages(run: &spec::Run) -> String {
    let layers: Vec<_> = run.layout.stages.iter().map(|stage| stage.len()).collect();
    let busiest = balance::largest(&balance::shares(&run.model, &run.layout, run.train.seq));
    let (best, least) = balance::best(&run.model, &run.layout, run.train.seq);
    let better = if least < busiest * WORTH_SAYING {
        format!("; with layout.stages={best:?} {least:.2}")
    } else {
        String::new()
    };
    format!("stages {layers:?}: the busiest position has {busiest:.2} times the mean of the products{better}")
}

/// What the rank of the first pipeline that takes most memory is planned to take.
fn memory(run: &spec::Run) -> String {
    let ranks = 0..run.layout.world() / run.layout.dp;
    let plan = |rank| (train::rank::plan(run, &lower(run, rank, Mode::Train)), rank);
    let most = ranks.map(plan).max_by_key(|(plan, _)| plan.total());
    let (plan, rank) = most.expect("a layout has a rank");
    let parts = [
        ("parameters", plan.parameters),
        ("optimizer", plan.optimizer),
        ("gradients and gathered", plan.gradients),
        ("mirrors", plan.mirrors),
        ("activations", plan.activations),
        ("copy for checkpoints", plan.copy),
        ("in flight", plan.in_flight),
        ("products", plan.scratch),
        ("packed weights", plan.packed),
        ("messages", plan.messages),
        ("code and stacks", plan.at_work),
    ];
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let parts =
        parts.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| format!("{what} {:.1}", mb(bytes)));
    let parts = parts.collect::<Vec<_>>().join(" + ");
    let (buffers, at_once) = (mb(plan.activations + plan.in_flight), mb(plan.at_once));
    let uneven = match plan.uneven {
        0 => String::new(),
        bytes => format!(
            " | with the experts in balance; {:.1} MB if all rows of a group chose those of this rank",
            mb(plan.total() + bytes)
        ),
    };
    format!(
        "memory: rank {rank} takes {:.1} MB = {parts}, and the process itself | of {buffers:.1} MB of buffers {at_once:.1} MB are in use at once{uneven}",
        mb(plan.total())
    )
}

/// The comparison that was asked for, if any.
fn against(args: &Args, run: &spec::Run) -> Result<u8, TrainError> {
    if args.against.is_none() {
        return Ok(0);
    }
    let comparison = train::against::single(run)?;
    let Comparison { reduced, tensors, difference, digest } = &comparison;
    if args.json {
        let (step, tensor) = difference.clone().unzip();
        let object = serde_json::json!({
            "kind": "against", "schema": events::SCHEMA, "with": "single", "equal": difference.is_none(), "steps": STEPS,
            "tensors": tensors, "reduced": reduced, "digest": digest, "first_step": step, "first_tensor": tensor,
        });
        line(&object.to_string());
    } else {
        line(&format!("against one rank, reduced to {reduced}"));
        line(&match difference {
            None => format!(
                "  equal: {tensors} tensors and the digest, bit for bit, after each of {STEPS} steps ({digest:.12})"
            ),
            Some((step, tensor)) => format!("  DIFFERENT: after step {step}, first in {tensor}"),
        });
    }
    Ok(if difference.is_none() { 0 } else { DIFFERS })
}
