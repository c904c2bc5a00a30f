//! Where the time of a step goes.

use std::collections::BTreeMap;

use events::{Profile, ProfileRow};
use program::{Costs, Work};

use crate::Observed;
use crate::label::{GROUPS, Label, label, waiting};
use crate::record::{Flight, RankRecord, Span, StepRecord, Unreadable, check};

/// Mean times per step over the recorded steps, by what they were spent on.
///
/// Instructions follow each other without a gap, so the rows of a rank and `other` (from the begin of the step to its
/// first instruction, and from its last one to the end) are its wall time. What an exchange waits for other ranks is a
/// row of its own; what runs beside other instructions ([`Flight`]) is told but is no part of the sum.
///
/// # Errors
/// Records that are not those of the programs.
pub fn profile(of: &Observed, records: &[RankRecord]) -> Result<Profile, Unreadable> {
    check(records, of.programs)?;
    let costs = Costs::new(of.model, of.grid, of.layout, of.seq);
    let mut rows = Rows::new(records.len());
    for (rank, (record, program)) in records.iter().zip(of.programs).enumerate() {
        let known: Vec<_> = program.instrs.iter().map(|i| (label(i), waiting(i), costs.of(rank, i))).collect();
        for step in &record.steps {
            rows.step(rank, step, &known);
        }
    }
    let steps = &records[0].steps;
    let wall = |record: &RankRecord| record.steps.iter().map(|s| s.ended_ns - s.began_ns).sum::<u64>();
    let count = steps.len() as f64;
    Ok(Profile {
        first: steps[0].step,
        last: steps[steps.len() - 1].step,
        steps: steps.len() as u64,
        threads: of.layout.threads,
        peak_gflops: of.peak_gflops,
        bandwidth_gb_s: of.bandwidth_gb_s,
        step_s: records.iter().map(|r| wall(r) as f64 / 1e9 / count).collect(),
        rows: rows.finish(of, count),
    })
}

/// What one label came to.
#[derive(Debug, Clone, Default)]
struct Sum {
    ns: Vec<u64>,
    hidden_ns: Vec<u64>,
    calls: u64,
    flops: f64,
    touched: f64,
    sent: f64,
}

/// Sums by label, in order of appearance.
struct Rows {
    ranks: usize,
    order: Vec<Label>,
    at: BTreeMap<Label, usize>,
    sums: Vec<Sum>,
}

impl Rows {
    fn new(ranks: usize) -> Self {
        Self { ranks, order: Vec::new(), at: BTreeMap::new(), sums: Vec::new() }
    }

    fn sum(&mut self, label: &Label) -> &mut Sum {
        let at = *self.at.entry(label.clone()).or_insert_with(|| {
            let zero = vec![0; self.ranks];
            self.order.push(label.clone());
            self.sums.push(Sum { ns: zero.clone(), hidden_ns: zero, ..Sum::default() });
            self.sums.len() - 1
        });
        &mut self.sums[at]
    }

    fn step(&mut self, rank: usize, step: &StepRecord, known: &[(Label, Label, Work)]) {
        let mut spent = 0;
        for (span, (label, waiting, work)) in step.spans().zip(known) {
            spent += span.len_ns();
            let sum = self.sum(label);
            sum.ns[rank] += span.len_ns() - span.waited_ns;
            sum.calls += 1;
            match work {
                Work::Flops(flops) => sum.flops += flops,
                Work::Bytes(bytes) => sum.touched += bytes,
                Work::Sent(bytes) => sum.sent += bytes,
                Work::Unknown => {}
            }
            if span.waited_ns > 0 {
                let sum = self.sum(waiting);
                sum.ns[rank] += span.waited_ns;
                sum.calls += 1;
            }
        }
        // What instructions did beside what they are there for.
        let moved = Label { group: "exchange", name: "moving what was posted".into() };
        let late = Label { group: "optimizer", name: "update of mirrors while others are waited for".into() };
        for (beside, times) in [(moved, &step.moved), (late, &step.late)] {
            for (instr, ns) in times {
                let Some((label, _, _)) = known.get(*instr) else { continue };
                let from = &mut self.sum(label).ns[rank];
                let ns = (*ns).min(*from);
                *from -= ns;
                let sum = self.sum(&beside);
                sum.ns[rank] += ns;
                sum.calls += 1;
            }
        }
        for flight in &step.flights {
            let hidden = hidden_ns(flight, step.spans().zip(known.iter().map(|(label, _, _)| label)));
            if let Some((label, _, _)) = known.get(flight.instr) {
                self.sum(label).hidden_ns[rank] += hidden;
            }
        }
        let other = (step.ended_ns - step.began_ns).saturating_sub(spent);
        self.sum(&Label { group: "other", name: "between instructions and steps".into() }).ns[rank] += other;
    }

    fn finish(self, of: &Observed, steps: f64) -> Vec<ProfileRow> {
        let seconds = |ns: &[u64]| ns.iter().map(|ns| *ns as f64 / 1e9 / steps).collect::<Vec<_>>();
        let row = |(label, sum): (Label, Sum)| {
            // Rank-seconds of one step: rates are those of the mean rank.
            let busy = sum.ns.iter().sum::<u64>() as f64 / 1e9 / steps;
            let (flops, touched) = (sum.flops / steps, sum.touched / steps);
            let share = |amount: f64, limit: f64| (amount > 0.0 && busy > 0.0).then(|| amount / busy / 1e9 / limit);
            ProfileRow {
                group: label.group.into(),
                name: label.name,
                rank_s: seconds(&sum.ns),
                hidden_s: seconds(&sum.hidden_ns),
                calls: sum.calls as f64 / steps,
                flops,
                bytes: touched + sum.sent / steps,
                of_peak: share(flops, of.peak_gflops),
                of_bandwidth: share(touched, of.bandwidth_gb_s),
            }
        };
        let mut rows: Vec<_> = self.order.into_iter().zip(self.sums).map(row).collect();
        let place = |row: &ProfileRow| GROUPS.iter().position(|group| *group == row.group);
        rows.sort_by_key(place);
        rows
    }
}

/// Nanoseconds of a flight in which its rank did something else than exchange.
fn hidden_ns<'a>(flight: &Flight, spans: impl Iterator<Item = (Span, &'a Label)>) -> u64 {
    let other = spans.filter(|(_, label)| label.group != "exchange");
    let overlap = |(span, _): (Span, &Label)| {
        span.ended_ns.min(flight.ended_ns).saturating_sub(span.began_ns.max(flight.began_ns))
    };
    other.map(overlap).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{World, record};

    fn row<'a>(profile: &'a Profile, group: &str, name: &str) -> &'a ProfileRow {
        let found = profile.rows.iter().find(|r| r.group == group && r.name == name);
        found.unwrap_or_else(|| panic!("no {group} {name} in {:#?}", profile.rows))
    }

    #[test]
    fn rows_add_up_to_the_wall_time_of_every_rank() {
        for ranks in [[1, 1, 1], [2, 1, 1], [1, 2, 2], [2, 2, 2]] {
            let world = World::new(ranks);
            let records = record(&world, 3);
            let profile = profile(&world.observed(), &records).unwrap();
            assert_eq!((profile.first, profile.last, profile.steps), (4, 6, 3));
            for rank in 0..world.programs.len() {
                let sum: f64 = profile.rows.iter().map(|r| r.rank_s[rank]).sum();
                assert!((sum - profile.step_s[rank]).abs() < 1e-12, "{ranks:?}: {sum} {:?}", profile.step_s);
            }
        }
    }

    #[test]
    fn work_is_that_of_one_step_and_fractions_are_of_a_ranks_limits() {
        let world = World::new([2, 1, 1]);
        let of = world.observed();
        let profile = profile(&of, &record(&world, 2)).unwrap();
        let flops: f64 = profile.rows.iter().map(|r| r.flops).sum();
        let tokens = (world.grid.batch() * world.seq) as f64;
        assert!((flops - tokens * world.model.flops_per_token(world.seq)).abs() < 1.0);
        let mlp = row(&profile, "backward", "mlp");
        let want = mlp.flops / mlp.rank_s.iter().sum::<f64>() / 1e9 / of.peak_gflops;
        assert!((mlp.of_peak.unwrap() - want).abs() < 1e-12 && mlp.of_bandwidth.is_none());
        let update = row(&profile, "optimizer", "update of parameters and moments");
        assert!(update.of_peak.is_none() && update.of_bandwidth.unwrap() > 0.0);
    }

    #[test]
    fn waiting_is_apart_and_hidden_time_is_no_part_of_the_sum() {
        let world = World::new([2, 1, 1]);
        let mut records = record(&world, 1);
        let is_grads = |i: &program::Instr| label(i).name == "all-reduce grads (dp)";
        let at = world.programs[0].instrs.iter().position(is_grads).unwrap();
        let before = profile(&world.observed(), &records).unwrap();
        let spans: Vec<_> = records[0].steps[0].spans().collect();
        records[0].steps[0].marks[at].1 += 40;
        // Beside the three instructions before its own end: those that are no exchange hide it.
        let flight = Flight { instr: at, began_ns: spans[at - 3].began_ns, ended_ns: spans[at].ended_ns };
        records[0].steps[0].flights.push(flight);
        let after = profile(&world.observed(), &records).unwrap();
        let ns = |profile: &Profile, group, name| (row(profile, group, name).rank_s[0] * 1e9).round();
        let names = [("exchange", "all-reduce grads (dp)"), ("waiting", "for the ranks of dp")];
        for ((group, name), more) in names.into_iter().zip([-40.0, 40.0]) {
            assert_eq!(ns(&after, group, name) - ns(&before, group, name), more, "{group}");
        }
        let hidden = (row(&after, "exchange", "all-reduce grads (dp)").hidden_s[0] * 1e9).round() as u64;
        let before_it: Vec<_> =
            (at - 3..at).filter(|i| label(&world.programs[0].instrs[*i]).group != "exchange").collect();
        assert_eq!(hidden, before_it.iter().map(|i| spans[*i].len_ns()).sum::<u64>());
        assert!(hidden > 0);
        let sum: f64 = after.rows.iter().map(|r| r.rank_s[0]).sum();
        assert!((sum - after.step_s[0]).abs() < 1e-12);
    }

    #[test]
    fn records_of_other_programs_are_refused() {
        let world = World::new([2, 1, 1]);
        let refused = |change: fn(&mut Vec<RankRecord>)| {
            let mut records = record(&world, 2);
            change(&mut records);
            profile(&world.observed(), &records).unwrap_err().to_string()
        };
        assert!(refused(|r| drop(r.pop())).contains("records of ranks [0], programs of 2"));
        assert!(refused(|r| drop(r[1].steps.pop())).contains("rank 1 recorded the steps [4], rank 0 [4, 5]"));
        assert!(refused(|r| r[0].steps[1].marks.truncate(1)).contains("step 5 of rank 0"));
        assert!(refused(|r| r.iter_mut().for_each(|r| r.steps.clear())).contains("[]"));
    }
}
