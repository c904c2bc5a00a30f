//! How often to write a checkpoint: Young's and Daly's intervals. Pure; all times in one unit.

/// Work between two checkpoints by Young's first-order rule, √(2 `cost` `mtbf`).
pub fn young(cost: f64, mtbf: f64) -> f64 {
    (2.0 * cost * mtbf).sqrt()
}

/// Work between two checkpoints by Daly's higher-order rule (J. T. Daly, "A higher order estimate of the optimum
/// checkpoint interval for restart dumps", 2006). `cost`: what a checkpoint holds the run up for; `mtbf`: mean time
/// between failures. Where a checkpoint costs more than two of those, the rule gives `mtbf` itself.
pub fn daly(cost: f64, mtbf: f64) -> f64 {
    if cost >= 2.0 * mtbf {
        return mtbf;
    }
    let ratio = cost / (2.0 * mtbf);
    young(cost, mtbf) * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - cost
}

/// Share of the wall time that checkpoints every `work` and the work lost with failures take, to first order.
pub fn waste(work: f64, cost: f64, mtbf: f64) -> f64 {
    cost / (work + cost) + work / 2.0 / mtbf
}

/// What an interval is made of; seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// What a checkpoint holds the run up for.
    pub cost: f64,
    /// From its copy to its manifest: the next one cannot begin earlier.
    pub written: f64,
    /// A step.
    pub step: f64,
    /// Hosts of the run.
    pub hosts: f64,
    /// Failures of a host in a day.
    pub failures_per_host_day: f64,
}

/// Steps between checkpoints, at least 1, and the sentence that says why.
pub fn steps_between(measured: Measured) -> (u64, String) {
    let Measured { cost, written, step, hosts, failures_per_host_day } = measured;
    let mtbf = 86_400.0 / (hosts * failures_per_host_day);
    let work = daly(cost, mtbf);
    // A run without failures needs none of these; it still ends with one.
    let steps = (work.max(written) / step).ceil().clamp(1.0, 1e12) as u64;
    let bound = if written > work { ", which is less than writing one takes" } else { "" };
    let why = format!(
        "a checkpoint holds the run up for {} and is written in {}; {hosts} host(s) x {failures_per_host_day} failures a day = one in {}; \
         Daly's optimum is {} of work{bound} = {steps} steps of {}",
        time(cost),
        time(written),
        time(mtbf),
        time(work),
        time(step)
    );
    (steps, why)
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 600.0 => format!("{s:.1} s"),
        s if s < 48.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The worked cases of Daly's paper, in minutes: restart 10, cost 5, a failure in 24 h, 6 h, 15 min.
    #[test]
    fn dalys_worked_cases() {
        for (mtbf, want) in [(24.0 * 60.0, 116.69), (6.0 * 60.0, 56.71), (15.0, 9.14)] {
            let work = daly(5.0, mtbf);
            assert!((work - want).abs() < 0.005, "{mtbf}: {work}, not {want}");
        }
        assert_eq!(daly(30.0, 15.0), 15.0);
    }

    /// The paper's cost function, minimised numerically: the rule is within a third of a percent where a checkpoint costs
    /// little, and never worse than Young's.
    #[test]
    fn dalys_rule_is_the_minimum_of_the_exact_cost() {
        let wall = |work: f64, cost: f64, mtbf: f64| mtbf * (((work + cost) / mtbf).exp() - 1.0) / work;
        for mtbf in [24.0 * 60.0, 6.0 * 60.0, 15.0] {
            let best = (1..40_000)
                .map(|i| f64::from(i) * 0.01)
                .min_by(|a, b| wall(*a, 5.0, mtbf).total_cmp(&wall(*b, 5.0, mtbf)));
            let best = best.unwrap();
            assert!((daly(5.0, mtbf) / best - 1.0).abs() < 0.0035, "{mtbf}: {best}");
            assert!(wall(daly(5.0, mtbf), 5.0, mtbf) <= wall(young(5.0, mtbf), 5.0, mtbf));
        }
    }

    #[test]
    fn steps_follow_cost_and_never_outrun_the_disk() {
        let measured = Measured { cost: 0.01, written: 0.5, step: 0.5, hosts: 1.0, failures_per_host_day: 0.0012 };
        let (steps, why) = steps_between(measured);
        // √(2 x 0.01 s x 7.2e7 s) = 1200 s.
        assert_eq!(steps, 2400, "{why}");
        assert!(why.contains("833 days") && why.contains("10.0 ms"), "{why}");
        let (steps, why) = steps_between(Measured { written: 5000.0, ..measured });
        assert!(steps == 10_000 && why.contains("less than writing"), "{why}");
        let (steps, _) = steps_between(Measured { hosts: 16_384.0, ..measured });
        assert_eq!(steps, 19);
        assert_eq!(steps_between(Measured { failures_per_host_day: 0.0, ..measured }).0, 1_000_000_000_000);
        let share = waste(daly(60.0, 8280.0), 60.0, 8280.0);
        assert!((share - 0.12).abs() < 0.005, "{share}");
    }
}
