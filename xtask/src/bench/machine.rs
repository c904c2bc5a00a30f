//! The machine: its name, its load, and which cores a side may use.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The cores that this process may use.
pub struct Machine {
    cores: Vec<usize>,
    /// Whether `taskset` is there to hold a side on its cores.
    pins: bool,
    /// Programs that wanted a core in the last minute, before anything was started here.
    load: f64,
}

impl Machine {
    /// Looks at the machine.
    pub fn look() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|l| l.parse().ok()).unwrap_or(0.0);
        Self { cores: cores(list), pins: has("taskset"), load }
    }

    /// `program`, held on the first `cores` cores: the same for both sides.
    pub fn command(&self, cores: usize, program: &Path) -> Command {
        self.command_at(0, cores, program)
    }

    /// `program` as `rank`, held on one core: ranks take the cores in turn.
    pub fn rank_command(&self, rank: usize, program: &Path) -> Command {
        self.command_at(rank, 1, program)
    }

    /// `program` at `place` of those that run at once, each held on `cores` cores; places take the cores in turn.
    pub fn command_at(&self, place: usize, cores: usize, program: &Path) -> Command {
        if !self.pins || self.cores.is_empty() {
            return Command::new(program);
        }
        let mut command = Command::new("taskset");
        let all = self.cores.len();
        let list: Vec<_> = (place * cores..(place + 1) * cores).map(|i| self.cores[i % all].to_string()).collect();
        command.arg("-c").arg(list.join(",")).arg(program);
        command
    }

    /// The cores that this process may use.
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }

    /// What the person should know before the numbers.
    pub fn notes(&self, cores_wanted: usize) -> Vec<String> {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model =
            info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": ")).map_or("unknown", |m| m.1);
        let load = self.load;
        let mut notes = vec![format!("{model}, {} cores allowed, load {load:.1} at start", self.cores.len())];
        if load > 0.5 {
            notes.push("the machine is not idle: these numbers are rough".into());
        }
        if self.cores.len() < cores_wanted {
            notes.push(format!("modes on {cores_wanted} cores share {}", self.cores.len()));
        }
        if !self.pins {
            notes.push("taskset is not there: sides are not held on cores".into());
        }
        notes
    }
}

/// Whether `program --version` runs.
pub fn has(program: &str) -> bool {
    let quiet = || Stdio::null();
    Command::new(program).arg("--version").stdout(quiet()).stderr(quiet()).status().is_ok_and(|s| s.success())
}

/// The numbers of a list such as `0-2,5`.
fn cores(list: &str) -> Vec<usize> {
    let part = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.split(',').filter_map(part).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_read() {
        assert_eq!(cores("\t0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(cores("3"), [3]);
        assert!(cores("").is_empty());
    }

    #[test]
    fn a_side_is_held_on_the_first_cores() {
        let machine = Machine { cores: vec![2, 3, 5], pins: true, load: 0.0 };
        let command = machine.command(2, Path::new("x"));
        let args: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
        assert_eq!(args, ["-c", "2,3", "x"]);
        let rank = machine.rank_command(4, Path::new("x"));
        assert_eq!(rank.get_args().map(|a| a.to_string_lossy()).collect::<Vec<_>>(), ["-c", "3", "x"]);
        let free = Machine { cores: vec![0], pins: false, load: 0.0 };
        assert_eq!(free.command(1, Path::new("x")).get_program(), "x");
    }
}
