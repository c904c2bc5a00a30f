//! Hosts, a token, a controller: on loopback or in network namespaces.

use std::fs;

use netns::Net;

use crate::common::{Lab, Running};

pub const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tiny.toml");
/// Of `configs/tiny.toml`, under any layout.
pub const DIGEST: &str = "27154c6ff5cd844e37221fe2c69d902c11b3cd0cdf23b89314984b1e9099d5a4";
/// Short limits: a cut is noticed within a second. Only where links are cut: a machine that others keep busy is silent for as long.
const LIMITS: [&str; 4] =
    ["guard.beat_ms=50", "guard.heartbeat_timeout_ms=1200", "layout.exchange_timeout_ms=4000", "guard.restarts_max=50"];

pub struct Cluster {
    pub lab: Lab,
    pub net: Option<Net>,
    sets: Vec<String>,
    hosts: usize,
    /// Where controllers are, as an agent is told; on loopback found when one listens.
    pub at: String,
}

impl Cluster {
    pub fn new(net: Option<Net>, hosts: usize, sets: &[&str]) -> Self {
        let lab = Lab::new();
        lab.write("token", "0123456789abcdef0123\n");
        lab.write("wrong", "fedcba98765432100000\n");
        let limits = if net.is_some() { &LIMITS[..] } else { &LIMITS[3..] };
        let sets = limits.iter().chain(sets).map(|set| format!("--set={set}")).collect();
        let at = net.as_ref().map_or("127.0.0.1:0".into(), |net| format!("{}:7070", net.address(0)));
        Self { lab, net, sets, hosts, at }
    }

    /// The binary on `host`, or on this machine.
    fn on(&self, host: usize, args: &[&str]) -> Running {
        let command = self.net.as_ref().map(|net| net.command(host, env!("CARGO_BIN_EXE_lockstep").as_ref()));
        match command {
            None => self.lab.start(args),
            Some(mut command) => {
                command.args(args);
                self.lab.start_command(command)
            }
        }
    }

    /// What a controller at `at` is told.
    pub fn controller_args(&self, at: &str, more: &[&str]) -> Vec<String> {
        let hosts = self.hosts.to_string();
        let own = ["controller", TINY, "--run-dir", "run", "--token-file", "token", "--hosts", &hosts, "--listen", at];
        let words = own.iter().chain(more).map(ToString::to_string);
        words.chain(self.sets.iter().cloned()).collect()
    }

    /// A controller that listens, on the first host.
    pub fn controller(&mut self) -> Running {
        self.controller_with(&[])
    }

    pub fn controller_with(&mut self, more: &[&str]) -> Running {
        let args = self.controller_args(&self.at, more);
        let mut controller = self.on(0, &args.iter().map(String::as_str).collect::<Vec<_>>());
        let line = controller.wait_for(|line| line.contains("agents call "));
        self.at = line.rsplit(' ').next().unwrap().to_owned();
        controller
    }

    /// Another one, on `host`.
    pub fn another(&self, host: usize, more: &[&str]) -> Running {
        let at = self.address(host);
        let args = self.controller_args(&at, more);
        self.on(host, &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Where a controller of `host` listens.
    pub fn address(&self, host: usize) -> String {
        format!("{}:7070", self.net.as_ref().unwrap().address(host))
    }

    pub fn agent(&self, host: usize, ranks: usize, args: &[&str]) -> Running {
        let (name, ranks) = (format!("h{host}"), ranks.to_string());
        let own = ["agent", "--controller", &self.at, "--token-file", "token", "--host", &name, "--ranks", &ranks];
        self.on(host, &own.into_iter().chain(args.iter().copied()).collect::<Vec<_>>())
    }

    /// Pulls the plug of `host`, or puts it in again.
    pub fn plug(&self, host: usize, in_: bool) {
        self.net.as_ref().unwrap().plug(host, in_).unwrap();
    }

    fn steps_told(&self) -> Vec<(usize, f64)> {
        let log = fs::read_to_string(self.lab.path("run/events.jsonl")).unwrap();
        let of = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            (value["kind"] == "step")
                .then(|| (value["step"].as_u64().unwrap() as usize, value["seconds"].as_f64().unwrap()))
        };
        log.lines().filter_map(of).collect()
    }

    /// How often each of 24 steps was told.
    pub fn steps(&self) -> Vec<usize> {
        let mut steps = vec![0; 24];
        self.steps_told().iter().for_each(|(step, _)| steps[step - 1] += 1);
        steps
    }

    /// Seconds that steps took, by the ranks' own records.
    pub fn step_seconds(&self) -> f64 {
        self.steps_told().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// A net, or a line that says why not.
pub fn net(hosts: usize) -> Option<Net> {
    match Net::new(hosts) {
        Ok(net) => Some(net),
        Err(e) => {
            eprintln!("SKIPPED: network namespaces cannot be made here: {e}");
            None
        }
    }
}
