//! The law, in one process: every layout of a grid ends with the digest of one rank.

mod common;

use common::train;
use events::{Event, RankReport};
use program::Bucket;
use train::rank::Ended;

/// Digest, and loss of the last validation.
fn outcome(sets: &[&str]) -> (String, f64) {
    let told = train(sets);
    assert_eq!(told.ended, Ended::Finished);
    let loss = |e: &Event| match e {
        Event::Validation { loss, .. } => Some(*loss),
        _ => None,
    };
    (told.digest().to_owned(), told.events.iter().filter_map(loss).next_back().unwrap())
}

fn all_equal(extra: &[&str], layouts: &[&[&str]]) {
    let one = outcome(extra);
    assert_eq!(one.0.len(), 64);
    for layout in layouts {
        let sets: Vec<&str> = extra.iter().chain(layout.iter()).copied().collect();
        assert_eq!(outcome(&sets), one, "{layout:?} {extra:?}");
    }
}

const LAYOUTS: &[&[&str]] = &[
    &["layout.dp=2"],
    &["layout.dp=3"],
    &["layout.dp=2", "layout.cells=[1, 3]"],
    &["layout.dp=4", "layout.zero=1"],
    &["layout.tp=2"],
    &["layout.pp=2"],
    &["layout.pp=3", "layout.schedule=gpipe"],
    &["layout.pp=2", "layout.schedule=interleaved"],
    &["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"],
    &["layout.threads=2"],
    &["layout.pp=2", "layout.schedule=zb-h1"],
    &["layout.pp=3", "layout.dp=2", "layout.schedule=zb-h1", "layout.zero=1"],
    &["layout.pp=2", "layout.schedule=zbv"],
    &["layout.pp=2", "layout.dp=2", "layout.tp=2", "layout.schedule=dualpipe-v"],
    &["layout.pp=2", "layout.dp=3", "layout.schedule=dualpipe-v", "layout.zero=1"],
    &["layout.recompute=full"],
    &["layout.tp=2", "layout.recompute=selective"],
    &["layout.pp=2", "layout.schedule=zbv", "layout.recompute=full", "layout.recompute_layers=[1, 2]"],
];

#[test]
fn untied() {
    all_equal(&[], LAYOUTS);
}

#[test]
fn tied_with_qk_norm() {
    all_equal(&["model.tied=true", "model.qk_norm=true"], LAYOUTS);
}

#[test]
fn context_cells() {
    let layouts: &[&[&str]] = &[
        &["layout.cp=2"],
        &["layout.dp=2", "layout.cp=2", "layout.zero=1"],
        &["layout.cp=2", "layout.tp=2", "layout.pp=2"],
        &["layout.cp=2", "layout.pp=2", "layout.schedule=zb-h1"],
        &["layout.dp=3"],
    ];
    all_equal(&["grid.cp=2", "model.qk_norm=true"], layouts);
    all_equal(&["grid.cp=4", "model.tied=true"], &[&["layout.cp=4"], &["layout.cp=2", "layout.dp=2"]]);
}

#[test]
fn without_masks_and_with_larger_microbatches() {
    all_equal(&["data.masks=false", "grid.microbatch=2"], &LAYOUTS[..6]);
}

/// Both uses of a tied embedding on one rank, where router counts travel with the stream between its chunks.
#[test]
fn a_tied_embedding_with_a_pooled_auxiliary_loss_under_every_schedule() {
    let schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"];
    let schedules = schedules.map(|schedule| format!("layout.schedule={schedule}"));
    for scope in ["pooled", "layer"] {
        let scope = format!("model.aux_scope={scope}");
        let model = [&EXPERTS[..], &["model.tied=true", &scope]].concat();
        let split: &[&[&str]] = &[&[], &["layout.tp=2"], &["layout.dp=2", "layout.zero=1", "layout.recompute=full"]];
        let layouts: Vec<Vec<&str>> = (schedules.iter().enumerate())
            .map(|(i, schedule)| [&["layout.pp=2", schedule], split[i % split.len()]].concat())
            .collect();
        all_equal(&model, &layouts.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
}

/// The published order of a V, written by hand, over the 8 microbatches of one data position.
#[test]
fn a_schedule_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.csv");
    let there_and_back = |[there, back]: [usize; 2]| {
        let unit = |mb: usize| format!("{there}F{mb},{back}F{mb},{back}B{mb},{there}I{mb},{there}W{mb}");
        (0..8).map(unit).collect::<Vec<_>>().join(",")
    };
    std::fs::write(&path, format!("{}\n{}\n", there_and_back([0, 3]), there_and_back([1, 2]))).unwrap();
    let file = format!("layout.schedule_file={:?}", path.display().to_string());
    assert_eq!(outcome(&["layout.pp=2", "layout.schedule=csv", &file]), outcome(&[]));
}

/// Everything that is sharded over the data axis, with one microbatch in a cell or more.
const SHARDED: &[&[&str]] = &[
    &["layout.dp=2", "layout.zero=1"],
    &["layout.dp=2", "layout.zero=2"],
    &["layout.dp=2", "layout.zero=3"],
    &["layout.dp=4", "layout.zero=3", "layout.shard=2"],
    &["layout.dp=4", "layout.zero=2", "layout.shard=1"],
    &["layout.dp=4", "layout.zero=1", "layout.shard=2"],
    &["layout.dp=3", "layout.zero=2"],
    &["layout.dp=3", "layout.cells=[1, 2, 1]", "layout.zero=3", "layout.reshard=after_backward"],
    &["layout.dp=2", "layout.cells=[3, 1]", "layout.pp=2", "layout.schedule=interleaved", "layout.zero=3"],
    &["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=3"],
    &["layout.dp=2", "layout.pp=2", "layout.schedule=zbv", "layout.zero=3"],
    &["layout.dp=2", "layout.pp=4", "layout.schedule=zb-h1", "layout.zero=2", "layout.cells=[3, 1]"],
    &["layout.dp=2", "layout.recompute=full", "layout.zero=3"],
    &["layout.dp=2"],
    &["layout.dp=3", "layout.pp=3"],
    &["layout.tp=2", "layout.pp=2"],
];

#[test]
fn sums_of_single_microbatches() {
    for model in [&[][..], &["model.tied=true", "model.qk_norm=true"]] {
        all_equal(&[model, &["grid.accumulate=reduced"]].concat(), SHARDED);
    }
    let reduced = outcome(&["grid.accumulate=reduced"]).0;
    assert_ne!(reduced, outcome(&["grid.accumulate=local"]).0);
}

/// Whole experts are buckets of their own: their gradients are complete when the slices are summed.
#[test]
fn sharded_experts() {
    let experts = [
        "model.experts=4",
        "model.experts_per_token=2",
        "model.expert_ffn=24",
        "model.aux_loss=0.01",
        "grid.accumulate=reduced",
    ];
    let layouts: &[&[&str]] = &[
        &["layout.dp=2", "layout.zero=3"],
        &["layout.dp=2", "layout.tp=2", "layout.zero=3", "layout.reshard=after_backward"],
        &["layout.dp=3", "layout.pp=2", "layout.zero=2"],
    ];
    all_equal(&experts, layouts);
}

/// With one cell per rank a gradient is whole only in the bucket under way and the one before, which still travels; parameters
/// in two neighbouring ones.
#[test]
fn memory_of_sharded_ranks() {
    let sets = ["layout.dp=4", "layout.zero=3", "grid.accumulate=reduced"].map(String::from);
    let run = spec::Run::parse(common::BASE, "base", &sets, 1).unwrap();
    let plan = program::ChunkPlan::new(&run.model, &run.grid, &run.layout, 0, run.layout.coords(0));
    let len = |bucket| plan.buckets.iter().find(|b| b.bucket == bucket).unwrap().at.len() as u64;
    let (embed, layer, norms) = (len(Bucket::Embed), len(Bucket::Layer(0)), len(Bucket::Norms));
    let told = train(&["layout.dp=4", "layout.zero=3", "grid.accumulate=reduced"]);
    let reports = told.events.iter().filter_map(|e| match e {
        Event::RankFinished(report) => Some(report),
        _ => None,
    });
    let reports: Vec<_> = reports.collect();
    assert_eq!(reports.len(), 4);
    for report in &reports {
        // The norms' gradients are complete just before the embedding's.
        assert_eq!(report.leaves_bytes, 4 * (layer + layer.max(embed + norms)));
        assert_eq!(report.gathered_bytes, 4 * (norms + layer + embed.max(layer)));
    }
    assert_eq!(reports.iter().map(|r| r.state_bytes).sum::<u64>(), 16 * plan.parameters as u64);
}

/// The plan of memory tells the gradients of every rank to the byte.
#[test]
fn gradients_are_planned() {
    let experts = ["model.experts=4", "model.expert_ffn=32", "model.shared_ffn=16", "grid.ep=2"];
    let reduced = ["grid.accumulate=reduced"];
    let cases: [(&[&str], &[&str]); 9] = [
        (&[], &[]),
        (&[], &["layout.dp=3", "layout.zero=1"]),
        (&[], &["layout.tp=2", "layout.pp=2", "layout.schedule=interleaved"]),
        (&[], &["layout.pp=2", "layout.schedule=zb-h1"]),
        (&reduced, &["layout.dp=4", "layout.zero=3"]),
        (&reduced, &["layout.dp=2", "layout.pp=2", "layout.zero=2"]),
        (&experts, &["layout.dp=2"]),
        (&experts, &["layout.dp=4", "layout.zero=1"]),
        (&experts, &["layout.tp=2", "layout.dp=2"]),
    ];
    for (grid, layout) in cases {
        let sets: Vec<&str> = grid.iter().chain(layout).copied().collect();
        on_every_rank(&sets, |report, plan| {
            assert_eq!(report.leaves_bytes, plan.leaves, "{sets:?} rank {}", report.rank)
        });
    }
}

/// Trains, and shows `look` what every rank reports beside its plan of memory.
fn on_every_rank(sets: &[&str], look: impl Fn(&RankReport, &program::memory::Plan)) {
    let owned: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let run = spec::Run::parse(common::BASE, "base", &owned, 1).unwrap();
    let mut ranks = 0;
    for event in train(sets).events {
        let Event::RankFinished(report) = event else { continue };
        let program = program::lower(&run, report.rank, program::Mode::Train);
        look(&report, &program::memory::Plan::new(&run.model, &run.grid, &run.layout, run.train.seq, &program, 0));
        ranks += 1;
    }
    assert_eq!(ranks, run.layout.world());
}

/// The buffers of a step are what the program says, to the byte, whatever the layout.
#[test]
fn buffers_are_planned() {
    let cases: [&[&str]; 16] = [
        &[],
        &["layout.dp=3", "layout.zero=1"],
        &["layout.tp=2"],
        &["layout.tp=2", "layout.tp_overlap=false"],
        &["layout.tp=2", "layout.tp_pairs=true"],
        &["layout.tp=2", "layout.tp_pairs=true", "layout.offload=activations", "layout.recompute=selective"],
        &["layout.tp=2", "layout.dp=2", "layout.pp=2", "layout.zero=1"],
        &["layout.pp=2", "layout.schedule=gpipe"],
        &["layout.tp=2", "layout.pp=2", "layout.schedule=interleaved"],
        &["layout.pp=2", "layout.schedule=zb-h1"],
        &["layout.pp=2", "layout.schedule=zbv"],
        &["layout.recompute=full"],
        &["layout.tp=2", "layout.recompute=selective"],
        &["layout.offload=activations"],
        &["layout.pp=2", "layout.schedule=zb-h1", "layout.offload=activations"],
        &["layout.tp=2", "layout.pp=2", "layout.offload=activations", "layout.recompute=selective"],
    ];
    for tied in ["model.tied=true", "model.qk_norm=true"] {
        for layout in cases {
            let sets: Vec<&str> = layout.iter().copied().chain([tied]).collect();
            on_every_rank(&sets, |report, plan| {
                let planned = plan.activations + plan.in_flight;
                assert_eq!(report.buffers_bytes, planned, "{sets:?} rank {}", report.rank);
            });
        }
    }
}

const EXPERTS: [&str; 5] = [
    "model.experts=4",
    "model.experts_per_token=2",
    "model.expert_ffn=24",
    "model.shared_ffn=16",
    "model.aux_loss=0.01",
];

/// Of experts too, where their rows do not travel, and with context cells.
#[test]
fn buffers_of_experts_and_context_cells_are_planned() {
    let experts: [&[&str]; 7] = [
        &[],
        &["grid.ep=2"],
        &["grid.ep=2", "layout.dp=2", "layout.zero=1"],
        &["grid.cp=2", "layout.tp=2", "layout.pp=2"],
        &["layout.pp=2", "layout.schedule=zb-h1", "model.aux_scope=pooled"],
        &["layout.pp=2", "layout.schedule=interleaved", "layout.recompute=full", "model.aux_scope=pooled"],
        &["layout.offload=activations", "layout.recompute=selective"],
    ];
    let context: [&[&str]; 7] = [
        &["grid.cp=2"],
        &["grid.cp=2", "layout.cp=2"],
        &["grid.cp=4", "layout.cp=2", "layout.dp=2", "layout.zero=1"],
        &["grid.cp=2", "layout.cp=2", "layout.tp=2", "layout.pp=2", "layout.recompute=full"],
        &["grid.cp=2", "layout.cp=2", "layout.pp=2", "layout.schedule=zb-h1"],
        &["grid.cp=4", "layout.recompute=selective", "model.qk_norm=true"],
        &["grid.cp=2", "layout.pp=2", "layout.schedule=zbv", "layout.offload=activations", "model.qk_norm=true"],
    ];
    let experts = experts.iter().map(|sets| EXPERTS.iter().chain(*sets).copied().collect());
    for sets in experts.chain(context.iter().map(|sets| sets.to_vec())).collect::<Vec<Vec<&str>>>() {
        on_every_rank(&sets, |report, plan| {
            assert_eq!(report.buffers_bytes, plan.activations + plan.in_flight, "{sets:?} rank {}", report.rank);
        });
    }
}

/// Where rows travel between ranks the plan is that of routers in balance, and says how much more the worst ones take.
#[test]
fn buffers_of_rows_that_travel_lie_between_balance_and_the_worst() {
    let cases: [&[&str]; 4] = [
        &["grid.ep=2", "layout.dp=4"],
        &["grid.ep=2", "layout.dp=4", "layout.pp=2", "layout.recompute=full"],
        &["grid.ep=4", "layout.dp=4", "grid.dp=4", "layout.zero=1"],
        &["grid.ep=2", "layout.dp=4", "layout.tp=2", "layout.offload=activations"],
    ];
    for case in cases {
        let sets: Vec<&str> = EXPERTS.iter().chain(case).copied().collect();
        on_every_rank(&sets, |report, plan| {
            let (balanced, took) = (plan.activations + plan.in_flight, report.buffers_bytes);
            let worst = balanced + plan.uneven;
            assert!(
                plan.uneven > 0 && 20 * took < 21 * worst && 10 * took > 9 * balanced,
                "{sets:?} rank {}: {took}, planned {balanced} to {worst}",
                report.rank
            );
        });
    }
}

/// With one microbatch in a cell there is one order, and no need to choose.
#[test]
fn one_microbatch_is_sharded_either_way() {
    let one = ["grid.dp=8"];
    all_equal(&one, &SHARDED[1..7]);
    assert_eq!(outcome(&one), outcome(&["grid.dp=8", "grid.accumulate=reduced"]));
}

#[test]
fn the_grid_does_change_the_numbers() {
    let base = outcome(&[]).0;
    assert_ne!(outcome(&["grid.dp=2"]).0, base);
    assert_ne!(outcome(&["grid.tp=1"]).0, base);
    assert_ne!(outcome(&["grid.cp=2"]).0, base);
}
