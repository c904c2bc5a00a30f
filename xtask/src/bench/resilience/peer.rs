//! The peer: torchrun with PyTorch's distributed checkpoints (DCP).

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::machine::Machine;
use super::super::peer::Peer;
use super::super::process;
use super::watched::shape;

/// Longest run of the script.
const LIMIT: Duration = Duration::from_secs(120);

/// What stands in the peer's column.
pub struct Figures {
    /// Where they come from.
    pub origin: String,
    pub mirror: String,
    pub restart: String,
    pub exit: String,
    pub hang: String,
    pub wait: String,
    pub bandwidth: String,
}

impl Figures {
    /// As measured earlier on such a machine (two cores), with PyTorch 2.11.
    pub fn earlier() -> Self {
        Self {
            origin: "torchrun with DCP, PyTorch 2.11, as measured earlier on two cores; --peer measures it now".into(),
            mirror: "asynchronous DCP every step at L: 0.1 s blocked, the step 40 % longer".into(),
            restart: "5.5 s, two steps lost".into(),
            exit: "300 ms".into(),
            hang: "61 s with a timeout of 30 s (30 min unless set)".into(),
            wait: "DCP async 70 to 120 ms at L".into(),
            bandwidth: "-".into(),
        }
    }

    /// Measured now, by `bench/peer/restart.py`; what it does not measure is as earlier.
    ///
    /// # Errors
    /// No Python, no PyTorch, or the script failed.
    pub fn measure(root: &Path, folder: &Path) -> Result<Self, String> {
        let machine = Machine::look();
        let peer = Peer::make(root, &machine)?;
        let spec = json!({ "shape": shape("M", None).json()?, "folder": folder.join("peer"), "ranks": 2 });
        let mut command = Command::new(root.join("target/peer-env/bin/python"));
        command.arg("-B").arg(root.join("bench/peer/restart.py")).arg(spec.to_string());
        // It does not always come back after the kill: that is tried once more.
        let output = process::output(&mut command, LIMIT).or_else(|why| {
            println!("# peer: once more after: {}", why.lines().last().unwrap_or_default());
            process::output(&mut command, LIMIT)
        })?;
        let said: Value = output
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str(line).ok())
            .ok_or("bench/peer/restart.py printed no result")?;
        let number = |key: &str| said[key].as_f64().ok_or_else(|| format!("bench/peer/restart.py gave no {key}"));
        Ok(Self {
            origin: format!("torchrun with DCP, PyTorch {}, measured now at M", peer.versions.torch),
            restart: format!(
                "{:.1} s ({:.1} until ranks have their state), {} steps lost",
                number("restart_s")?,
                number("ready_s")?,
                number("steps_lost")?
            ),
            mirror: format!(
                "asynchronous DCP every step: {:.0} ms blocked, the step {:+.0} %",
                1000.0 * number("blocked_s")?,
                100.0 * (number("step_async_s")? / number("step_s")? - 1.0)
            ),
            wait: format!(
                "DCP async {:.0} ms, {:.0} % of a step",
                1000.0 * number("blocked_s")?,
                100.0 * number("blocked_s")? / number("step_s")?
            ),
            bandwidth: format!("DCP save {:.2} GB/s", number("save_bytes_per_s")? / 1e9),
            ..Self::earlier()
        })
    }
}
