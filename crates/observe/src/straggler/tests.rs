use super::*;

/// Pseudo-random in 0..1, from a counter.
fn noise(n: u64) -> f64 {
    let mut x = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Feeds `steps` steps of `work(step, rank)` seconds; all ranks wait for the slowest.
fn feed(groups: Vec<usize>, steps: u64, work: impl Fn(u64, usize) -> f64) -> Vec<Straggler> {
    let ranks = groups.len();
    let mut detector = Detector::new(groups);
    let mut found = Vec::new();
    for step in 1..=steps {
        let own: Vec<f64> = (0..ranks).map(|rank| work(step, rank)).collect();
        let whole = own.iter().fold(0.0f64, |a, b| a.max(*b)) * 1.1;
        // In any order.
        for i in 0..ranks {
            let rank = (i + step as usize) % ranks;
            found.extend(detector.take(step, rank, own[rank], whole));
        }
    }
    found
}

#[test]
fn a_slowed_rank_is_named_within_20_steps_with_its_cost() {
    for ranks in [2, 4, 8] {
        for factor in [1.25, 2.0, 4.0] {
            let slow = ranks - 1;
            let from = 10;
            let jitter = |step: u64, rank: usize| 1.0 + 0.1 * noise(step * 64 + rank as u64);
            let work = |step, rank| jitter(step, rank) * if rank == slow && step > from { factor } else { 1.0 };
            let found = feed(vec![0; ranks], 60, work);
            assert_eq!(found.len(), 1, "{ranks} ranks x {factor}: {found:?}");
            let named = &found[0];
            assert_eq!(named.rank, slow);
            assert!(named.step <= from + 20, "{named:?}");
            assert!((named.slowdown / factor - 1.0).abs() < 0.1, "{named:?}");
            let share = (factor - 1.0) / factor / 1.1;
            assert!((named.share - share).abs() < 0.06, "{named:?}, expected {share}");
        }
    }
}

#[test]
fn noise_names_nobody() {
    for (ranks, width) in [(2, 0.3), (4, 0.5), (8, 1.0), (16, 1.0)] {
        let found = feed(vec![0; ranks], 3_000, |step, rank| 1.0 + width * noise(step * 997 + rank as u64));
        assert!(found.is_empty(), "{ranks} ranks, {width}: {found:?}");
    }
}

#[test]
fn a_long_stage_is_no_straggler() {
    // Two pipeline stages, the last twice as long, for all its ranks alike.
    let found = feed(vec![0, 1, 0, 1], 100, |step, rank| {
        (1.0 + 0.05 * noise(step * 8 + rank as u64)) * if rank % 2 == 1 { 2.0 } else { 1.0 }
    });
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_gap_costs_a_step() {
    let mut detector = Detector::new(vec![0, 0]);
    for step in 1..=40 {
        let slow = if step % 2 == 0 { 0.0 } else { 2.0 };
        // Every second step rank 1 says nothing of use.
        let found = [detector.take(step, 0, 1.0, 2.0), detector.take(step, 1, slow, 2.0)].concat();
        assert_eq!(!found.is_empty(), step == 25, "step {step}");
    }
}

/// Jobs of a shared cluster: (worker, time) -> batch time, as dense rows of the times that all workers have.
fn job(name: &str) -> Option<Vec<Vec<f64>>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let path = std::env::var_os("LOCKSTEP_SHARED_DATA").map_or(root, Into::into).join("alibaba_minibatch").join(name);
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    };
    let mut times: BTreeMap<u64, BTreeMap<u64, f64>> = BTreeMap::new();
    for row in text.lines().skip(1) {
        let fields: Vec<&str> = row.split(',').collect();
        let number = |i: usize| fields[i].parse::<f64>().expect("a number");
        times.entry(number(3) as u64).or_default().insert(number(1) as u64, number(4));
    }
    let workers = times.values().map(BTreeMap::len).max().unwrap_or(0);
    Some(times.into_values().filter(|row| row.len() == workers).map(|row| row.into_values().collect()).collect())
}

fn of_job(rows: &[Vec<f64>]) -> Vec<Straggler> {
    let steps = rows.len() as u64;
    feed(vec![0; rows[0].len()], steps, |step, rank| rows[step as usize - 1][rank])
}

#[test]
fn recorded_jobs_are_told_apart() {
    // Job 1: one worker (6) becomes a straggler in the middle; nobody else is named, and it is not before.
    let Some(rows) = job("job_1_norm.csv") else { return };
    let found = of_job(&rows);
    println!("job 1: {found:?}");
    assert!(!found.is_empty() && found.iter().all(|s| s.rank == 6), "{found:?}");
    // Job 2: workers differ a little, steadily, without a straggler.
    let rows = job("job_2_norm.csv").expect("the same folder");
    let found = of_job(&rows);
    println!("job 2: {found:?}");
    assert!(found.is_empty(), "{found:?}");
    for name in ["job_3_norm.csv", "job_4_norm.csv"] {
        // Said to have several.
        println!("{name}: {:?}", of_job(&job(name).expect("the same folder")));
    }
}
