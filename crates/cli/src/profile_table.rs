//! A profile as a table.

use events::{Profile, ProfileRow};

/// Ranks that get a column; of more, the fastest and the slowest are shown.
const COLUMNS_MAX: usize = 8;
/// Rows below this share of the step are told together, unless their group has no other.
const SMALL: f64 = 0.0005;

/// The lines of the table; times in milliseconds, means per step.
pub fn lines(profile: &Profile) -> Vec<String> {
    let ranks = profile.step_s.len();
    let mut out = vec![format!(
        "where a step's time goes: means over steps {} to {} | {} of {} | a rank's limits: {:.1} GFLOP/s, {:.1} GB/s",
        profile.first,
        profile.last,
        count(ranks, "rank"),
        count(profile.threads, "thread"),
        profile.peak_gflops,
        profile.bandwidth_gb_s
    )];
    let heads: Vec<String> = match ranks {
        1 => Vec::new(),
        2..=COLUMNS_MAX => (0..ranks).map(|rank| format!("rank {rank}")).collect(),
        _ => vec!["least".into(), "most".into()],
    };
    let step = profile.step_mean_s();
    let line = |name: &str, mean: f64, of_ranks: &[f64], remark: &str| {
        let columns: String = columns(of_ranks).iter().map(|s| format!(" {:>9.2}", 1e3 * s)).collect();
        let share = 100.0 * mean / step;
        format!("{name:<42} {:>9.2} {share:>6.1}%{columns}  {remark}", 1e3 * mean).trim_end().to_owned()
    };
    let columns: String = heads.iter().map(|head| format!(" {head:>9}")).collect();
    out.push(format!("{:<42} {:>9} {:>7}{columns}", "", "mean ms", "share"));
    for group in profile.rows.chunk_by(|a, b| a.group == b.group) {
        let (shown, small): (Vec<_>, Vec<_>) = group.iter().partition(|row| keeps(row, step));
        for row in shown {
            out.push(line(&format!("{} {}", row.group, row.name), row.mean_s(), &row.rank_s, &remark(row)));
        }
        if !small.is_empty() {
            let sum: Vec<f64> = (0..ranks).map(|rank| small.iter().map(|row| row.rank_s[rank]).sum()).collect();
            let mean = small.iter().map(|row| row.mean_s()).sum();
            let (name, remark) = match small[..] {
                [one] => (one.name.clone(), remark(one)),
                _ => (format!("{} small ones", small.len()), String::new()),
            };
            out.push(line(&format!("{} {name}", group[0].group), mean, &sum, &remark));
        }
    }
    out.push(line("step", step, &profile.step_s, ""));
    out
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn keeps(row: &ProfileRow, step: f64) -> bool {
    row.mean_s().max(row.hidden_mean_s()) >= SMALL * step
}

/// What goes in the columns of the ranks.
fn columns(of_ranks: &[f64]) -> Vec<f64> {
    match of_ranks.len() {
        1 => Vec::new(),
        2..=COLUMNS_MAX => of_ranks.to_vec(),
        _ => {
            [f64::min as fn(f64, f64) -> f64, f64::max].map(|f| of_ranks.iter().copied().fold(of_ranks[0], f)).to_vec()
        }
    }
}

/// What was achieved.
fn remark(row: &ProfileRow) -> String {
    let busy: f64 = row.rank_s.iter().sum();
    let mut parts = Vec::new();
    if let Some(fraction) = row.of_peak {
        parts.push(format!("{:.1} GFLOP/s, {:.0}% of peak", row.flops / busy / 1e9, 100.0 * fraction));
    }
    if let Some(fraction) = row.of_bandwidth {
        parts.push(format!("{:.1} GB/s, {:.0}% of memory", row.bytes / busy / 1e9, 100.0 * fraction));
    }
    if row.group == "exchange" {
        if row.bytes > 0.0 && busy > 0.0 {
            parts.push(format!("{:.2} GB/s", row.bytes / busy / 1e9));
        }
        parts.push(format!("hidden {:.2} ms", 1e3 * row.hidden_mean_s()));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(group: &str, name: &str, rank_s: &[f64]) -> ProfileRow {
        let hidden_s = vec![0.0; rank_s.len()];
        ProfileRow {
            group: group.into(),
            name: name.into(),
            rank_s: rank_s.to_vec(),
            hidden_s,
            ..ProfileRow::default()
        }
    }

    #[test]
    fn small_rows_of_a_group_are_told_together() {
        let peak = ProfileRow { of_peak: Some(0.5), flops: 1.5e9, ..row("forward", "mlp", &[0.010, 0.020]) };
        let rows = vec![
            peak,
            row("forward", "a", &[1e-6, 3e-6]),
            row("forward", "b", &[1e-6, 1e-6]),
            row("exchange", "send x (pp)", &[0.005, 0.005]),
            row("vote", "decision", &[1e-6, 0.0]),
        ];
        let step_s = vec![0.015002, 0.025004];
        let profile = Profile { first: 4, last: 5, steps: 2, threads: 1, step_s, rows, ..Profile::default() };
        let lines = lines(&profile);
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), ["mean", "ms", "share", "rank", "0", "rank", "1"]);
        let found = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(found(2), "forward mlp 15.00 75.0% 10.00 20.00 50.0 GFLOP/s, 50% of peak");
        assert_eq!(found(3), "forward 2 small ones 0.00 0.0% 0.00 0.00");
        assert_eq!(found(4), "exchange send x (pp) 5.00 25.0% 5.00 5.00 hidden 0.00 ms");
        assert_eq!(found(5), "vote decision 0.00 0.0% 0.00 0.00");
        assert_eq!(found(6), "step 20.00 100.0% 15.00 25.00");
        assert_eq!(lines.len(), 7);
    }

    #[test]
    fn many_ranks_are_the_least_and_the_most() {
        let of_ranks: Vec<f64> = (0..20).map(|r| f64::from(r) * 1e-3).collect();
        let profile =
            Profile { step_s: of_ranks.clone(), rows: vec![row("vote", "x", &of_ranks)], ..Profile::default() };
        let last = lines(&profile).pop().unwrap();
        assert_eq!(last.split_whitespace().collect::<Vec<_>>(), ["step", "9.50", "100.0%", "0.00", "19.00"]);
    }
}
