//! A run on several hosts: agents and a controller over TCP, on loopback and between network namespaces.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{Lab, Running, gone_within, runs};
use crate::netns::Net;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tiny.toml");
/// Of `configs/tiny.toml`, under any layout.
const DIGEST: &str = "27154c6ff5cd844e37221fe2c69d902c11b3cd0cdf23b89314984b1e9099d5a4";
/// Short limits: a cut is noticed within a second.
const LIMITS: [&str; 4] =
    ["guard.beat_ms=50", "guard.heartbeat_timeout_ms=1200", "layout.exchange_timeout_ms=4000", "guard.restarts_max=50"];

/// Hosts, a token, a controller.
struct Cluster {
    lab: Lab,
    net: Option<Net>,
    sets: Vec<String>,
    hosts: usize,
    /// Where the controller is; loopback: found when it listens.
    at: String,
}

impl Cluster {
    fn new(net: Option<Net>, hosts: usize, sets: &[&str]) -> Self {
        let lab = Lab::new();
        lab.write("token", "0123456789abcdef0123\n");
        lab.write("wrong", "fedcba98765432100000\n");
        let sets = LIMITS.iter().chain(sets).map(|set| format!("--set={set}")).collect();
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

    /// A controller that listens, on the first host.
    fn controller(&mut self) -> Running {
        let (at, hosts) = (self.at.clone(), self.hosts.to_string());
        let mut args = vec!["controller", TINY, "--run-dir", "run", "--token-file", "token", "--hosts", &hosts];
        args.extend(["--listen", &at]);
        args.extend(self.sets.iter().map(String::as_str));
        let mut controller = self.on(0, &args);
        let line = controller.wait_for(|line| line.contains("agents call "));
        self.at = line.rsplit(' ').next().unwrap().to_owned();
        controller
    }

    fn agent(&self, host: usize, ranks: usize, args: &[&str]) -> Running {
        let (name, ranks) = (format!("h{host}"), ranks.to_string());
        let own = ["agent", "--controller", &self.at, "--token-file", "token", "--host", &name, "--ranks", &ranks];
        self.on(host, &own.into_iter().chain(args.iter().copied()).collect::<Vec<_>>())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.lab.path("run/events.jsonl")).unwrap()
    }

    /// How often each step was told.
    fn steps(&self) -> Vec<usize> {
        let log = self.log();
        let of = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            (value["kind"] == "step").then(|| value["step"].as_u64().unwrap() as usize)
        };
        let mut steps = vec![0; 24];
        log.lines().filter_map(of).for_each(|step| steps[step - 1] += 1);
        steps
    }
}

/// A net, or a line that says why not.
fn net(hosts: usize) -> Option<Net> {
    match Net::new(hosts) {
        Ok(net) => Some(net),
        Err(e) => {
            eprintln!("SKIPPED: network namespaces cannot be made here: {e}");
            None
        }
    }
}

#[test]
fn a_controller_that_is_killed_goes_on_where_it_was_and_no_rank_notices() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2", "layout.pp=2", "checkpoint.every=6"]);
    let mut first = cluster.controller();
    let agents = [cluster.agent(1, 2, &[]), cluster.agent(2, 2, &[])];
    let pids = first.ranks(4);
    first.wait_for_step(4);
    first.signal(Signal::KILL);
    drop(first.end());
    assert!(pids.iter().all(|pid| runs(*pid)), "ranks step on");
    let second = cluster.controller().end().expect(0);
    assert_eq!(second.digest(), DIGEST, "{second}");
    assert!(second.stdout.contains("restarts 0") && second.stdout.contains("epoch 2"), "{second}");
    assert_eq!(cluster.steps().iter().filter(|n| **n == 0).count(), 0, "{:?}", cluster.steps());
    for agent in agents {
        let out = agent.end().expect(0);
        assert!(out.stdout.contains("of epoch 2 is heard"), "{out}");
    }
    gone_within(Duration::from_secs(2), &pids);
    // What has ended is not gone on with.
    let out = cluster.lab.lockstep(&["controller", TINY, "--run-dir", "run", "--listen", "127.0.0.1:0"]);
    out.expect(2).says(&["--resume"]);
}

#[test]
fn who_does_not_belong_here_is_turned_away_and_the_run_goes_on() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2", "train.steps=24"]);
    let mut controller = cluster.controller();
    let at = cluster.at.clone();
    let stranger = |said: &[u8]| {
        let mut stream = TcpStream::connect(&at).unwrap();
        let _ = stream.write_all(said);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    };
    stranger(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody who took this for a web server\r\n\r\n");
    stranger(&[0xff; 1 << 16]);
    stranger(b"");
    // A good answer's beginning, then a frame that claims four gigabytes.
    stranger(&[b"lockagnt".as_slice(), &1u32.to_le_bytes(), &[7; 64], &[0xff; 64]].concat());
    for word in ["does not speak this protocol", "hung up", "wrong token"] {
        controller.wait_for(|line| line.contains("turned away") && line.contains(word));
    }
    let wrong = cluster.lab.lockstep(&["agent", "--controller", &at, "--token-file", "wrong", "--host", "x"]);
    wrong.expect(2).says(&["wrong token", "--token-file"]);
    let first = cluster.agent(1, 1, &[]);
    controller.wait_for(|line| line.contains("host h1 is here"));
    // Of the same name.
    let second = cluster.agent(1, 1, &[]);
    controller.wait_for(|line| line.contains("turned away") && line.contains("h1 is here already"));
    drop(second);
    // Two controllers of one run.
    let args = ["controller", TINY, "--run-dir", "run", "--listen", "127.0.0.1:0", "--token-file", "token"];
    cluster.lab.lockstep(&args).expect(2).says(&["another run is at work"]);
    let third = cluster.agent(2, 1, &[]);
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), DIGEST);
    assert!(out.stdout.contains("restarts 0"), "{out}");
    first.end().expect(0);
    third.end().expect(0);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_written() {
    let lab = Lab::new();
    lab.write("short", "secret\n");
    let before = lab.tree();
    let refused = |args: &[&str], words: &[&str]| {
        let all: Vec<_> = ["controller", TINY, "--run-dir", "run"].iter().chain(args).copied().collect();
        lab.lockstep(&all).expect(2).says(words);
        crate::common::same_tree(&before, &lab.tree());
    };
    refused(&["--listen", "0.0.0.0:0"], &["--token-file", "127.0.0.1"]);
    refused(&["--listen", "127.0.0.1:0", "--token-file", "short"], &["could be guessed"]);
    refused(&["--listen", "127.0.0.1:0", "--token-file", "none"], &["make one with"]);
    refused(&["--listen", "127.0.0.1:0", "--set=layout.transport=shm"], &["layout.transport=tcp"]);
    refused(&["--listen", "127.0.0.1:0", "--hosts", "0"], &["--hosts 0"]);
    lab.lockstep(&["controller", TINY]).expect(2).says(&["--run-dir"]);
    lab.lockstep(&["agent", "--controller", "127.0.0.1:1", "--ranks", "0"]).expect(2).says(&["--ranks 0"]);
    for nowhere in ["nowhere", "10.0.0.1", ":7070", "host:0", "host:99999"] {
        lab.lockstep(&["agent", "--controller", nowhere]).expect(2).says(&["--controller", nowhere, "10.0.0.1:7070"]);
    }
}

#[test]
fn a_host_is_cut_off_and_comes_back_another_dies_with_its_ranks() {
    let Some(net) = net(4) else { return };
    // Long enough for hosts to come back.
    let steps = "train.steps=120";
    let undisturbed = Lab::new().lockstep(&["train", TINY, "--run-dir", "run", "--set", steps]).expect(0).digest();
    let mut cluster = Cluster::new(Some(net), 3, &["layout.dp=3", "layout.zero=1", steps]);
    let mut controller = cluster.controller();
    let agents: Vec<_> = (1..4).map(|host| cluster.agent(host, 1, &[])).collect();
    let pids = controller.ranks(3);
    controller.wait_for_step(3);
    let net = cluster.net.as_ref().unwrap();
    // Cut off: two go on. A rank there is fenced, and ended when its host is back.
    let cut = Instant::now();
    net.plug(1, false);
    controller.wait_for(|line| line.contains("host h1 is gone"));
    let noticed = cut.elapsed();
    controller.wait_for(|line| line.starts_with("step "));
    let went_on = cut.elapsed();
    net.plug(1, true);
    controller.wait_for(|line| line.contains("host h1 is here"));
    controller.wait_for(|line| line.contains("form world 3"));
    // Killed, with its ranks.
    let killed = Instant::now();
    let mut agents = agents.into_iter();
    let (first, second, third) = (agents.next().unwrap(), agents.next().unwrap(), agents.next().unwrap());
    second.signal(Signal::KILL);
    drop(second);
    controller.wait_for(|line| line.contains("host h2 is gone"));
    controller.wait_for(|line| line.starts_with("step "));
    println!(
        "cut noticed after {noticed:?}, next step after {went_on:?}; killed agent: next step after {:?}",
        killed.elapsed()
    );
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), undisturbed, "{out}");
    first.end().expect(0);
    third.end().expect(0);
    gone_within(Duration::from_secs(5), &pids);
}

#[test]
fn three_hosts_end_with_the_digest_of_one() {
    let Some(net) = net(4) else { return };
    let mut cluster = Cluster::new(Some(net), 3, &["layout.dp=3"]);
    let controller = cluster.controller();
    let agents: Vec<_> = (1..4).map(|host| cluster.agent(host, 1, &[])).collect();
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), DIGEST, "{out}");
    assert!(out.stdout.contains("restarts 0"), "{out}");
    for agent in agents {
        agent.end().expect(0);
    }
}

#[test]
fn ranks_die_with_their_agent() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2", "train.steps=100000"]);
    let mut controller = cluster.controller();
    let agent = cluster.agent(1, 2, &[]);
    let pids = controller.ranks(2);
    controller.wait_for_step(2);
    agent.signal(Signal::KILL);
    gone_within(Duration::from_secs(2), &pids);
    drop(agent);
}
