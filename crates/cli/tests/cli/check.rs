//! `lockstep check`: a verdict and a picture, without running or writing anything.

use crate::common::{Lab, Out, same_tree};

/// Checks `run.toml` with `sets` (`args` first); nothing may be written.
fn check(args: &[&str], sets: &[&str]) -> Out {
    let lab = Lab::new();
    let before = lab.tree();
    let sets: Vec<_> = sets.iter().map(|set| format!("--set={set}")).collect();
    let words = ["check", "run.toml"].into_iter().chain(args.iter().copied()).chain(sets.iter().map(String::as_str));
    let out = lab.lockstep(&words.collect::<Vec<_>>());
    same_tree(&before, &lab.tree());
    out
}

/// The verdict as an object.
fn verdict(sets: &[&str]) -> serde_json::Value {
    let out = check(&["--json"], sets).expect(0);
    let value: serde_json::Value = serde_json::from_str(out.stdout.lines().next().unwrap()).unwrap();
    assert_eq!((&value["kind"], &value["schema"], &value["verdict"]), (&"check".into(), &1.into(), &"sound".into()));
    value
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn the_bubble_of_1f1b_is_the_closed_form() {
    for (stages, microbatches) in [(2, 8), (4, 8), (2, 2), (4, 4), (3, 8)] {
        let batch = format!("train.batch={microbatches}");
        // As many layers as make even stages.
        let layers = format!("model.layers={}", stages * 2);
        let value = verdict(&[&batch, &layers, "grid.dp=1", &format!("layout.pp={stages}")]);
        let want = f64::from(stages - 1) / f64::from(microbatches + stages - 1);
        let bubble = value["bubble"].as_f64().unwrap();
        assert!(near(bubble, want), "pp {stages}, {microbatches} microbatches: {bubble} is not {want}");
    }
    assert!(near(verdict(&[])["bubble"].as_f64().unwrap(), 0.0));
    let interleaved = verdict(&["layout.pp=2", "layout.schedule=interleaved"])["bubble"].as_f64().unwrap();
    assert!(interleaved < 1.0 / 9.0, "two chunks a rank have a smaller bubble: {interleaved}");
}

#[test]
fn the_text_shows_the_bubble_and_a_row_per_rank() {
    let out = check(&[], &["layout.pp=4", "layout.dp=2"]).expect(0);
    assert!(out.stdout.starts_with("sound: dp2 x tp1 x pp4 1f1b"), "{out}");
    // 4 microbatches a rank, 4 stages: 3 / 7.
    assert!(out.stdout.contains("bubble 42.9%"), "{out}");
    let rows: Vec<_> = out.stdout.lines().filter(|line| line.starts_with("rank ") && line.ends_with('|')).collect();
    assert_eq!(rows.len(), 8, "{out}");
    for (rank, row) in rows.iter().enumerate() {
        assert_eq!(row.split_whitespace().nth(1), Some(rank.to_string().as_str()), "{row}");
        // Every rank passes its 4 units forward (0-3) and backward (a-d).
        let work = row.split_once('|').unwrap().1;
        assert!("0123abcd".chars().all(|unit| work.contains(unit)), "{row}: {out}");
    }
}

#[test]
fn the_program_is_listed() {
    let sets = ["layout.pp=2", "layout.tp=2"];
    let plain = check(&[], &sets).expect(0);
    assert!(!plain.stdout.contains("| cell 0 mb 0"), "{plain}");
    let out = check(&["--program"], &sets).expect(0);
    for rank in 0..4 {
        assert!(out.stdout.contains(&format!("\nrank {rank}: ")), "{out}");
    }
    for word in ["forward Embed", "backward", "ReduceScatter", "AllGather", "send Activation", "recv Activation"] {
        assert!(out.stdout.contains(word), "{word}");
    }
    let one = check(&["--program", "--rank", "3"], &sets).expect(0);
    assert!(one.stdout.contains("\nrank 3: ") && !one.stdout.contains("\nrank 2: "), "{one}");
    // The same lists as objects, numbered from 0 on each rank.
    let json = check(&["--program", "--json"], &sets).expect(0);
    let mut next = [0u64; 4];
    for line in json.stdout.lines().skip(1) {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&value["kind"], &value["schema"]), (&"instruction".into(), &1.into()));
        let rank = value["rank"].as_u64().unwrap() as usize;
        assert_eq!(value["index"].as_u64(), Some(next[rank]));
        next[rank] += 1;
    }
    assert!(next.iter().all(|count| *count > 100), "{next:?}");
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    let out = check(&[], &["layout.pp=9"]).expect(2);
    out.says(&["layout.pp = 9", "4 layers", "at most 4"]);
    assert!(out.stdout.is_empty(), "{out}");
    // An object, as everything is with --json.
    let out = check(&["--json"], &["layout.dp=3", "layout.cells=[4]"]).expect(2);
    assert!(out.stdout.contains("\"kind\":\"error\"") && out.stdout.contains("layout.cells"), "{out}");
    assert!(out.stdout.contains("3 numbers") && out.stderr.is_empty(), "{out}");
}

#[test]
fn the_states_and_their_placements_are_told() {
    let value = verdict(&["layout.dp=2", "layout.pp=2", "layout.zero=1", "layout.recompute=full"]);
    let states = value["states"].as_array().unwrap();
    let names: Vec<_> = states.iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(names, ["parameters", "optimizer", "gradients", "activations"]);
    assert_eq!(states[0]["placed"]["replicated"], "dp");
    assert_eq!(states[1]["placed"]["sharded"], "pp (layers), dp");
    assert_eq!(states[3]["placed"]["materialized"], "4 layers");
    assert!(states.iter().all(|row| row["bytes"].as_u64().unwrap() > 0));
    let out = check(&[], &["layout.dp=2"]).expect(0);
    assert!(out.stdout.contains("sharded-with-gather  materialized  offloaded"), "{out}");
}

#[test]
fn a_layout_is_compared_with_one_rank() {
    let out = check(&["--against", "single"], &["layout.pp=2", "layout.schedule=zb-h1"]).expect(0);
    assert!(out.stdout.contains("against one rank, reduced to 4 layers"), "{out}");
    assert!(out.stdout.contains("equal: ") && out.stdout.contains("bit for bit, after each of 2 steps"), "{out}");
    for sharded in [
        &["layout.zero=1"][..],
        &["layout.zero=2", "grid.accumulate=reduced"],
        &["layout.zero=3", "grid.accumulate=reduced"],
    ] {
        let out = check(&["--against", "single"], &[&["layout.dp=2"], sharded].concat()).expect(0);
        assert!(out.stdout.contains("equal: "), "{sharded:?}: {out}");
    }
    let json = check(&["--against", "single", "--json"], &["layout.tp=2"]).expect(0);
    let value: serde_json::Value = serde_json::from_str(json.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&value["kind"], &value["equal"]), (&"against".into(), &true.into()));
}

/// A head as wide as that of shape M: the split of layers that `check` proposes is one that it then has nothing better for.
#[test]
fn a_better_split_of_the_layers_is_proposed() {
    let wide = ["layout.pp=2", "model.vocab=4096"];
    let value = verdict(&wide);
    let shares: Vec<f64> = value["position_shares"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    assert!(shares[1] > 1.2 && near(shares[0] + shares[1], 2.0), "{value}");
    assert_eq!((&value["stages"], &value["stages_even"]), (&serde_json::json!([2, 2]), &serde_json::json!([3, 1])));
    let told = check(&[], &wide).expect(0);
    assert!(told.stdout.contains("; with layout.stages=[3, 1] "), "{told}");
    let even = check(&[], &[&wide[..], &["layout.stages=[3, 1]"]].concat()).expect(0);
    assert!(even.stdout.contains("stages [3, 1]: ") && !even.stdout.contains("; with layout.stages"), "{even}");
}

#[test]
fn chunks_on_one_position_are_refused() {
    let out = check(&[], &["layout.vpp=2"]).expect(2);
    out.says(&["layout.vpp = 2", "layout.pp = 1", "plain accumulation", "leave layout.vpp unset"]);
}

#[test]
fn a_schedule_file_that_waits_for_ever_names_its_cycle() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "0F0,0B0\n1F0,1B0,1X0\n").unwrap();
    let path = format!("layout.schedule_file={:?}", file.path().display().to_string());
    let sets = ["layout.pp=2", "layout.schedule=csv", path.as_str()];
    check(&[], &sets).expect(2).says(&["line 2 column 9", "`1X0` is no operation"]);
    std::fs::write(file.path(), "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").unwrap();
    check(&[], &sets).expect(2).says(&["waits for ever, in a cycle", "line 1 waits at column 5 `0B0`"]);
}
