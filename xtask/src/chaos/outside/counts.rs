//! How often what was struck, when.

use std::collections::{BTreeMap, BTreeSet};

/// A strike that hit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Struck {
    /// With what.
    pub how: String,
    /// Whom.
    pub whom: &'static str,
    /// When.
    pub phase: &'static str,
}

/// All strikes of all chains.
#[derive(Default)]
pub struct Counts {
    strikes: BTreeMap<Struck, usize>,
    ends: BTreeMap<&'static str, usize>,
    faults: BTreeMap<String, usize>,
    missed: usize,
}

impl Counts {
    /// One more strike.
    pub fn hit(&mut self, struck: Struck) {
        *self.strikes.entry(struck).or_default() += 1;
    }

    /// Strikes that found the run over, or nobody.
    pub fn miss(&mut self, count: usize) {
        self.missed += count;
    }

    /// One more start that ended so, or resume of this kind.
    pub fn end(&mut self, how: &'static str) {
        *self.ends.entry(how).or_default() += 1;
    }

    /// One more fault, a sentence whose beginning says of which kind.
    pub fn fault(&mut self, text: &str) {
        let kind = text.split([':', ',']).next().unwrap_or(text);
        *self.faults.entry(kind.into()).or_default() += 1;
    }

    /// Strikes that hit.
    pub fn total(&self) -> usize {
        self.strikes.values().sum()
    }

    /// Two tables (by phase: who was struck; with what), and how starts ended.
    pub fn print(&self) {
        self.table("who", |struck| struck.whom.to_owned());
        self.table("what", |struck| struck.how.clone());
        let ends: Vec<_> = self.ends.iter().map(|(how, n)| format!("{n} {how}")).collect();
        println!("\nstarts: {}; {} strikes came too late", ends.join(", "), self.missed);
        let faults: Vec<_> = self.faults.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        if !faults.is_empty() {
            println!("faults: {}", faults.join("; "));
        }
    }

    fn table(&self, title: &str, column: impl Fn(&Struck) -> String) {
        let columns: BTreeSet<String> = self.strikes.keys().map(&column).collect();
        let phases: BTreeSet<&str> = self.strikes.keys().map(|struck| struck.phase).collect();
        let cell = |phase: Option<&str>, of: Option<&String>| -> usize {
            let all = self.strikes.iter().filter(|(struck, _)| phase.is_none_or(|phase| phase == struck.phase));
            all.filter(|(struck, _)| of.is_none_or(|of| *of == column(struck))).map(|(_, n)| n).sum()
        };
        let row = |name: &str, phase: Option<&str>| {
            let cells = columns.iter().map(|of| format!("{:>w$}", cell(phase, Some(of)), w = of.len().max(6) + 2));
            println!("{name:<24}{}{:>8}", cells.collect::<String>(), cell(phase, None));
        };
        let heads = columns.iter().map(|of| format!("{of:>w$}", w = of.len().max(6) + 2));
        println!("\n{title:<24}{}{:>8}", heads.collect::<String>(), "all");
        phases.iter().for_each(|phase| row(phase, Some(phase)));
        row("all", None);
    }
}
