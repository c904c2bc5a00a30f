//! The memory that a rank takes beside what was planned from its program.

use crate::common::{Lab, Out};

/// State and values large enough that code and stacks do not hide them.
const RUN: &str = "[model]\npreset = \"M\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 2\nbatch = 8\nseq = 128\n\
    eval_sequences = 0\n[grid]\ndp = 2\ntp = 2\nmicrobatch = 2\n[layout]\nthreads = 1\n";
/// Bytes of the parameters of that model.
const PARAMETERS_MB: f64 = 20.2;
/// How far the resident memory may be from its plan, percent.
const TOLERANCE: f64 = 5.0;
/// The same where rows travel to the ranks of their experts: what is planned is for routers in balance, and these are not.
const TOLERANCE_ROUTED: f64 = 10.0;

/// Megabytes that the largest rank had, and how much more than planned, percent.
fn memory(out: &Out) -> (f64, f64) {
    let line = out.stdout.lines().find(|line| line.starts_with("memory: ")).unwrap_or_else(|| panic!("{out}"));
    let number = |text: &str| text.trim().parse::<f64>().unwrap_or_else(|e| panic!("{text}: {e}"));
    let (_, more) = line.rsplit_once('(').unwrap();
    let (peak, _) = line.split_once(" at most ").unwrap().1.split_once(" MB").unwrap();
    (number(peak), number(more.trim_end_matches("%)")))
}

/// Trains under `layouts`; the first one's digest and every plan must hold. The megabytes.
fn planned(layouts: &[&str]) -> Vec<f64> {
    planned_of(RUN, layouts, TOLERANCE)
}

/// [`planned`] of another run, within `tolerance` percent.
fn planned_of(run: &str, layouts: &[&str], tolerance: f64) -> Vec<f64> {
    let lab = Lab::new();
    lab.write("run.toml", run);
    let (mut peaks, mut digest) = (Vec::new(), None);
    for (i, layout) in layouts.iter().enumerate() {
        let sets: Vec<String> = layout.split_whitespace().map(|key| format!("layout.{key}")).collect();
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let out = lab.train(&format!("out-{i}"), &[], &sets).expect(0);
        let (peak, more) = memory(&out);
        assert!(more.abs() <= tolerance, "{layout:?} had {more} % more than planned: {out}");
        assert_eq!(out.digest(), *digest.get_or_insert_with(|| out.digest()), "{layout:?}");
        peaks.push(peak);
    }
    peaks
}

#[test]
fn one_rank_takes_what_is_planned_and_less_when_state_is_in_files() {
    let peaks = planned(&["", "offload=optimizer", "offload=activations", "offload=optimizer+activations"]);
    let [all, optimizer, activations, both] = peaks[..] else { panic!("four runs") };
    // One bucket of moments stays: the embedding's, a fifth.
    assert!(all - optimizer > 0.7 * 2.0 * PARAMETERS_MB, "{peaks:?}");
    // Two of four layers stay, of 9.5 MB that are kept.
    assert!(all - activations > 4.0 && optimizer - both > 4.0, "{peaks:?}");
}

#[test]
fn ranks_of_every_axis_take_what_is_planned() {
    let peaks = planned(&[
        "dp=2",
        "dp=2 zero=1",
        "dp=2 zero=1 offload=optimizer+activations",
        "tp=2",
        "pp=2",
        "pp=2 offload=activations recompute=selective",
    ]);
    assert!(peaks[2] < 0.8 * peaks[1], "{peaks:?}");
}

/// Rows stay, or travel to the ranks of their experts.
#[test]
fn experts_take_what_is_planned() {
    let run = RUN
        .replace("preset = \"M\"", "preset = \"M\"\nexperts = 8\nexperts_per_token = 2\nexpert_ffn = 352")
        .replace("tp = 2", "ep = 2");
    planned_of(&run, &["", "pp=2 recompute=full"], TOLERANCE);
    planned_of(&run, &["dp=2", "dp=2 zero=1", "dp=2 offload=optimizer+activations"], TOLERANCE_ROUTED);
}

/// Keys and values of all context cells are gathered layer by layer.
#[test]
fn context_cells_take_what_is_planned() {
    let run = RUN.replace("tp = 2", "cp = 2").replace("seq = 128", "seq = 256");
    planned_of(&run, &["", "cp=2", "cp=2 dp=2 zero=1", "cp=2 recompute=selective offload=activations"], TOLERANCE);
}

/// What a process has when it comes to a second world is of the first one: a plan is not measured by that.
#[test]
fn a_run_that_changed_its_layout_tells_its_memory_without_a_percentage() {
    let lab = Lab::new();
    lab.write("run.toml", RUN.replace("steps = 2", "steps = 40"));
    let mut run = lab.start_train("out", &[], &["layout.dp=2"]);
    run.wait_for_step(2);
    lab.lockstep(&["reload", "out", "--set", "layout.dp=1", "layout.pp=2"]).expect(0);
    let out = run.end().expect(0);
    let line = out.stdout.lines().find(|line| line.starts_with("memory: ")).unwrap_or_else(|| panic!("{out}"));
    assert!(line.contains("in 2 worlds, of which the largest was planned to take") && !line.contains('%'), "{line}");
}
