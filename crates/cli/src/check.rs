//! `lockstep check`.

use program::print::{self, Limits};
use program::{Mode, lower};
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
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

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
    if args.json {
        let verdict = serde_json::json!({
            "kind": "check", "schema": events::SCHEMA, "verdict": "sound", "layout": run.layout.to_string(), "ranks": world,
            "bubble": report.bubble, "peak_activations": report.peak_activations, "bytes_by_axis": report.bytes(),
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
        return Ok(0);
    }
    line(&format!("sound: {} on {world} rank{}", run.layout, if world == 1 { "" } else { "s" }));
    line("  no rank waits for ever; every microbatch passes every layer once each way;");
    line("  weight gradients are first in, first out; nothing is applied before the vote");
    line(&format!(
        "bubble {:.1}% | peak activations {} layer-microbatches",
        100.0 * report.bubble,
        report.peak_activations
    ));
    line(&print::table(&report, Limits::default()));
    line(&print::gantt(&report, &run.grid, &run.layout, Limits::default()));
    if args.program {
        let limits = Limits { rows_max: usize::MAX, ..Limits::default() };
        for rank in ranks {
            line(&print::listing(&lower(&run, rank, Mode::Train), limits));
        }
    }
    Ok(0)
}
