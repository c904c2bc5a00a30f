//! Programs and reports as text.

use std::fmt::Write as _;

use spec::{Grid, Layout};

use crate::check::{AXES, RankReport, Report, Span, TICKS_PER_LAYER};
use crate::instr::{Pass, Program};
use crate::placement::{PLACEMENTS, Row};

/// How much a text shows before it says what it leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Ranks, or instructions of a listing.
    pub rows_max: usize,
    /// Columns of time.
    pub columns_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { rows_max: 32, columns_max: 160 }
    }
}

/// Forward of the rank's units, by number modulo 10.
const FORWARD: &[u8; 10] = b"0123456789";
/// Backward, likewise: whole, or its input part.
const BACKWARD: &[u8; 10] = b"abcdefghij";
/// The weight part of backward, likewise.
const WEIGHTS: &[u8; 10] = b"ABCDEFGHIJ";

/// When each rank works, under unit costs: one row per rank.
///
/// A digit is the forward of the unit of that number, counted from 0 on the rank; the letter
/// with the same place in the alphabet is its backward, where it is in parts small for the input part and large for the
/// weight part; `.` is idle. Context and tensor positions do the
/// same at the same time: only the first is shown. A column is the longest time that divides
/// all others.
pub fn gantt(report: &Report, grid: &Grid, layout: &Layout, limits: Limits) -> String {
    let rows: Vec<&RankReport> = report.ranks.iter().step_by(layout.cp * layout.tp).collect();
    let times = rows.iter().flat_map(|r| &r.spans).flat_map(|s| [s.start, s.end]);
    let tick = times.fold(0, gcd).max(1);
    let columns = (report.ticks / tick) as usize;
    let shown = columns.min(limits.columns_max);
    let width = report.ranks.len().saturating_sub(1).to_string().len();
    let mut text = format!(
        "forward 0-9, backward a-j, weight part A-J (number of the unit modulo 10), recomputed +; a column is {} layer forwards\n",
        layers(tick)
    );
    for row in rows.iter().take(limits.rows_max) {
        let first_cell = layout.cells[layout.coords(row.rank).dp].start;
        let mut line = vec![b'.'; shown];
        for span in &row.spans {
            let mark = mark(span, first_cell, grid);
            let (from, to) = ((span.start / tick) as usize, (span.end / tick) as usize);
            line[from.min(shown)..to.min(shown)].fill(mark);
        }
        let line = String::from_utf8(line).expect("marks are ASCII");
        let _ = writeln!(text, "rank {:>width$} |{line}|", row.rank);
    }
    let left = rows.len().saturating_sub(limits.rows_max);
    if left > 0 {
        let _ = writeln!(text, "{left} more pipeline positions are left out");
    }
    if layout.tp > 1 {
        let _ = writeln!(text, "each row stands for its {} tensor positions", layout.tp);
    }
    if layout.cp > 1 {
        let _ = writeln!(text, "each row stands for its {} context positions", layout.cp);
    }
    if columns > shown {
        let _ = writeln!(text, "{} more columns are left out", columns - shown);
    }
    text
}

fn mark(span: &Span, first_cell: usize, grid: &Grid) -> u8 {
    let number = span.unit.map_or(0, |u| (u.cell - first_cell) / grid.ep * grid.microbatches + u.mb);
    let marks = match span.pass {
        Pass::Forward => FORWARD,
        Pass::Backward | Pass::BackwardInput => BACKWARD,
        Pass::BackwardWeight => WEIGHTS,
        Pass::Recompute | Pass::RecomputeKept => return b'+',
    };
    marks[number % 10]
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Ticks in forwards of a layer.
fn layers(ticks: u64) -> f64 {
    ticks as f64 / TICKS_PER_LAYER as f64
}

/// The instructions of a rank, one a line with its index.
pub fn listing(program: &Program, limits: Limits) -> String {
    let width = program.instrs.len().saturating_sub(1).to_string().len();
    let mut text = format!("rank {}: {} instructions\n", program.rank, program.instrs.len());
    for (at, instr) in program.instrs.iter().enumerate().take(limits.rows_max) {
        let _ = writeln!(text, "{at:>width$}  {instr}");
    }
    let left = program.instrs.len().saturating_sub(limits.rows_max);
    if left > 0 {
        let _ = writeln!(text, "{left} more instructions are left out");
    }
    text
}

/// Counts, bytes, idle time and activations of each rank, and of all.
pub fn table(report: &Report, limits: Limits) -> String {
    let mut text = format!("{:>6} {:>8}", "rank", "instrs");
    for axis in AXES {
        let name = format!("{axis:?}").to_lowercase();
        let _ = write!(text, " {:>8} {:>10}", format!("{name} ops"), format!("{name} sent"));
    }
    let _ = writeln!(text, " {:>7} {:>12} {:>10}", "idle", "activations", "kept");
    for r in report.ranks.iter().take(limits.rows_max) {
        let _ = write!(text, "{:>6} {:>8}", r.rank, r.instructions);
        for (count, bytes) in r.exchanges.iter().zip(r.bytes) {
            let _ = write!(text, " {count:>8} {:>10}", size(bytes));
        }
        let kept = size(r.peak_kept);
        let _ = writeln!(text, " {:>6.1}% {:>12} {kept:>10}", 100.0 * r.idle(), r.peak_activations);
    }
    let left = report.ranks.len().saturating_sub(limits.rows_max);
    if left > 0 {
        let _ = writeln!(text, "{left} more ranks are left out");
    }
    let sent: Vec<String> = AXES
        .iter()
        .zip(report.bytes())
        .map(|(axis, b)| format!("{} {}", format!("{axis:?}").to_lowercase(), size(b)))
        .collect();
    let _ = writeln!(
        text,
        "all {} ranks: sent {}; {} layer forwards long, {:.1}% idle; at most {} layers x microbatches of activations",
        report.ranks.len(),
        sent.join(", "),
        layers(report.ticks),
        100.0 * report.bubble,
        report.peak_activations
    );
    text
}

/// The states of training by placement.
pub fn placements(rows: &[Row]) -> String {
    let cell = |text: &String| if text.is_empty() { "-".to_owned() } else { text.clone() };
    let head = ["state"].into_iter().chain(PLACEMENTS).chain(["bytes/rank", "sent/step"]).map(str::to_owned);
    let mut lines: Vec<Vec<String>> = vec![head.collect()];
    for row in rows {
        let state = format!("{:?}", row.state).to_lowercase();
        let numbers = [size(row.bytes), size(row.sent)];
        lines.push(std::iter::once(state).chain(row.placed.iter().map(cell)).chain(numbers).collect());
    }
    let width = |i: usize| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text + "largest rank; gradients are accumulators, sums and buffers in flight apart\n"
}

/// Bytes with a decimal suffix.
fn size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instr::Mode;
    use crate::lower::lower_all_parts;
    use crate::testing;
    use spec::Schedule;

    fn gantt_of(schedule: Schedule, vpp: Option<usize>, m: usize, limits: Limits) -> String {
        let model = testing::model(4);
        let grid = Grid::new(&model, m, 32, 1, Some(1), 1).unwrap();
        let layout = testing::layout(&model, &grid, [1, 1, 4 / vpp.unwrap_or(1)], schedule, vpp);
        let programs = lower_all_parts(&model, &grid, &layout, 32, Mode::Train);
        let report = crate::check(&programs, &model, &grid, &layout, 32, Mode::Train).unwrap();
        gantt(&report, &grid, &layout, limits)
    }

    #[test]
    fn the_known_pictures() {
        let rows = |text: String| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            rows(gantt_of(Schedule::GPipe, None, 2, Limits::default())),
            [
                "rank 0 |01.........aabb|",
                "rank 1 |.01......aabb..|",
                "rank 2 |..01...aabb....|",
                "rank 3 |...01aabb......|",
            ]
        );
        assert_eq!(
            rows(gantt_of(Schedule::OneFOneB, None, 4, Limits::default())),
            [
                "rank 0 |0123......aa.bb.cc.dd|",
                "rank 1 |.012....aa3bb.cc.dd..|",
                "rank 2 |..01..aa2bb3cc.dd....|",
                "rank 3 |...0aa1bb2cc3dd......|",
            ]
        );
        assert_eq!(
            rows(gantt_of(Schedule::Interleaved, Some(2), 2, Limits::default())),
            ["rank 0 |0101..aa.bbaabb|", "rank 1 |.010aa1bbaabb..|"],
        );
    }

    #[test]
    fn what_is_left_out_is_said() {
        let text = gantt_of(Schedule::GPipe, None, 2, Limits { rows_max: 1, columns_max: 4 });
        let rows: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(rows, ["rank 0 |01..|", "3 more pipeline positions are left out", "11 more columns are left out"]);
    }

    #[test]
    fn listing_and_table_read_well() {
        let model = testing::model(2);
        let grid = Grid::new(&model, 2, 32, 1, Some(2), 1).unwrap();
        let layout = testing::layout(&model, &grid, [2, 1, 1], Schedule::GPipe, None);
        let programs = lower_all_parts(&model, &grid, &layout, 32, Mode::Train);
        let limits = Limits { rows_max: 1, ..Limits::default() };
        let text = listing(&programs[1], Limits { rows_max: 2, ..limits });
        let unit = "chunk 0 | cell 1 mb 0";
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            [
                format!(" 0  load | {unit}"),
                format!(" 1  forward Embed | {unit}"),
                format!("{} more instructions are left out", programs[1].instrs.len() - 2)
            ]
        );
        let report = crate::check(&programs, &model, &grid, &layout, 32, Mode::Train).unwrap();
        let text = table(&report, limits);
        assert!(text.contains("1 more ranks are left out"), "{text}");
        assert!(text.contains("all 2 ranks: sent tp 0 B, cp 0 B, pp 0 B, dp "), "{text}");
        assert_eq!([size(0), size(999), size(1_000), size(2_500_000)], ["0 B", "999 B", "1.0 kB", "2.5 MB"]);
    }
}
