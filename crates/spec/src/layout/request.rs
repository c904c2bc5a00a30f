//! The part of the law of layouts that needs neither grid nor model.

use super::{LayoutRequest, Offload, Transport};
use crate::error::SpecError;
use crate::faults::Faults;
use crate::schedule::{Recompute, Schedule};

/// Most threads of a rank: beyond any host's cores, and few enough to start.
const THREADS_MAX: usize = 1024;

impl LayoutRequest {
    /// The counts of which each is at least 1, by key.
    fn counts(&self) -> [(&'static str, Option<usize>); 9] {
        [
            ("layout.dp", Some(self.dp)),
            ("layout.cp", Some(self.cp)),
            ("layout.tp", Some(self.tp)),
            ("layout.pp", Some(self.pp)),
            ("layout.vpp", self.vpp),
            ("layout.shard", self.shard),
            ("layout.threads", self.threads),
            ("layout.exchange_timeout_ms", Some(self.exchange_timeout_ms)),
            ("cluster.ranks_per_host", self.ranks_per_host),
        ]
    }

    /// True if one of them is 0, so that nothing can be divided by it.
    pub(super) fn has_zero(&self) -> bool {
        self.counts().iter().any(|(_, count)| *count == Some(0))
    }

    /// Refuses what no grid and no model would allow.
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let mut faults = Faults::default();
        for (key, _) in self.counts().into_iter().filter(|(_, value)| *value == Some(0)) {
            faults.law(format!("{key} = 0"), self.sizes(), format!("set {key} to at least 1"));
        }
        faults.take(crate::guard::at_most_a_year("layout.exchange_timeout_ms", self.exchange_timeout_ms as u64));
        if let Some(threads) = self.threads.filter(|n| *n > THREADS_MAX) {
            faults.law(
                format!("layout.threads = {threads} is more than {THREADS_MAX}"),
                self.sizes(),
                "set layout.threads to the cores that a rank has, or leave it unset",
            );
        }
        let zero = self.zero;
        if zero > 3 {
            faults.law(
                format!("layout.zero = {zero}, there are 0 to 3"),
                self.sizes(),
                "set layout.zero to 0 (replicated), 1 (sharded optimizer), 2 (gradients too) or 3 (parameters too)",
            );
        }
        if let (0, Some(n)) = (zero, self.shard) {
            faults.law(
                format!("layout.shard = {n} with layout.zero = 0, which shards nothing"),
                self.sizes(),
                "set layout.zero to 1, 2 or 3, or leave layout.shard unset",
            );
        }
        if self.schedule == Schedule::Csv && self.orders.is_none() {
            faults.law(
                "layout.schedule = csv without layout.schedule_file",
                self.sizes(),
                "set layout.schedule_file to the path of the schedule",
            );
        }
        self.modes(&mut faults);
        faults.end(())
    }

    fn modes(&self, faults: &mut Faults) {
        let many = [self.dp, self.cp, self.tp, self.pp].iter().any(|n| *n > 1);
        if self.mirror == Some(true) && self.transport == Transport::Threads && many {
            faults.law(
                "layout.mirror = true asks for a second process to keep state, but layout.transport = threads runs all ranks in one",
                self.sizes(),
                "set layout.transport to shm or tcp, or leave layout.mirror unset",
            );
        }
        if self.tp_pairs && (self.tp == 1 || self.pp > 1 || self.zero == 3) {
            faults.law(
                "layout.tp_pairs = true pairs microbatches of one stage whose parameters stay: it needs layout.tp > 1, layout.pp = 1 and layout.zero < 3",
                self.sizes(),
                "set layout.tp_pairs = false, or change these",
            );
        }
        if let (Offload::None, Some(folder)) = (self.offload, &self.offload_folder) {
            faults.law(
                format!(
                    "layout.offload_folder = {:?}, but layout.offload = none puts nothing there",
                    folder.display().to_string()
                ),
                format!("layout.offload {}", self.offload),
                "set layout.offload to optimizer, activations or both, or leave layout.offload_folder unset",
            );
        }
        if let (Recompute::None, Some(layers)) = (self.recompute, &self.recompute_layers) {
            faults.law(
                format!("layout.recompute_layers = {layers:?}, but layout.recompute = none"),
                format!("layout.recompute {}", self.recompute),
                "set layout.recompute to full or selective, or leave layout.recompute_layers unset",
            );
        }
    }

    /// The sizes that were asked for.
    fn sizes(&self) -> String {
        let vpp = self.vpp.map_or("unset".into(), |vpp| vpp.to_string());
        format!(
            "layout.dp {} x layout.cp {} x layout.tp {} x layout.pp {}, layout.vpp {vpp}, schedule {}, zero {}, transport {}",
            self.dp, self.cp, self.tp, self.pp, self.schedule, self.zero, self.transport
        )
    }
}
