//! `cargo xtask chaos --hosts`: random faults over three hosts in network namespaces, a controller on one and an agent on each.
//! Each run must end with the digest of the undisturbed one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use netns::Net;

use super::Args;
use super::injected::{REDUCED, RUN, needs_reduced, ranks_of, shown, undisturbed};
use super::process::{Process, send};
use crate::prove::launch::Launcher;
use crate::prove::random::Random;

const HOSTS: usize = 3;
/// Steps of a run: enough for a host to come back.
const STEPS: usize = 120;
/// Layouts over the run's grid; of some, a host that is lost takes state along that nobody else has.
const LAYOUTS: [&str; 10] = [
    "layout.dp=2",
    "layout.dp=3",
    "layout.pp=3",
    "layout.dp=3 layout.zero=1",
    "layout.dp=4 layout.zero=1",
    "layout.dp=2 layout.pp=2",
    "layout.tp=2 layout.pp=2",
    "layout.dp=2 layout.tp=2 layout.zero=1",
    "layout.dp=3 layout.zero=3",
    "layout.dp=2 layout.pp=2 layout.zero=2",
];
/// Short limits, so that a minute sees many faults; no host is evicted for what it is made to suffer.
const LIMITS: [&str; 8] = [
    "guard.beat_ms=50",
    "guard.heartbeat_timeout_ms=1200",
    "guard.stopped_timeout_ms=150",
    "guard.progress_floor_ms=3000",
    "layout.exchange_timeout_ms=4000",
    "guard.restarts_max=100",
    "guard.evict_after=100",
    "checkpoint.every=10",
];
/// What can happen. Two of it may happen at once.
const KINDS: [&str; 11] = [
    "cut",
    "cut",
    "blink",
    "slow link",
    "agent",
    "agent",
    "agent stopped",
    "controller",
    "controller stopped",
    "kill",
    "stop",
];
/// Shorter than any limit.
const BLINK: Duration = Duration::from_millis(250);
/// After so many steps, and so long, a fault that nobody noticed will not be noticed any more.
const UNNOTICED: (usize, Duration) = (8, Duration::from_millis(2500));
/// Rank processes end so soon after their run.
const LEAVE: Duration = Duration::from_secs(5);

/// What is to be done when a fault is over.
enum Undo {
    Nothing,
    Plug(usize),
    Shape(usize),
    Agent(usize),
    Continue(usize),
}

/// One run.
struct Trial<'a> {
    net: &'a Net,
    binary: &'a Path,
    folder: PathBuf,
    sets: Vec<String>,
    slots: usize,
    controller: Process,
    agents: Vec<Process>,
    /// By rank, as far as told.
    ranks: BTreeMap<usize, u32>,
    /// All there ever were.
    pids: BTreeSet<u32>,
}

/// See the module; true if every digest is equal.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let seed = args.seed();
    let net = Net::new(HOSTS)?;
    let binary = args.binary(root)?;
    let folder = tempfile::tempdir().map_err(|e| format!("cannot make a folder: {e}"))?;
    let launcher = Launcher { binary: binary.clone(), folder: folder.path().to_owned() };
    let path = root.join(RUN);
    let toml = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    launcher.write("chaos", &toml)?;
    fs::write(folder.path().join("token"), "for the namespaces of this machine alone\n").map_err(|e| e.to_string())?;
    let steps = format!("train.steps={STEPS}");
    println!("seed {seed}: random faults over {HOSTS} hosts in network namespaces, {STEPS} steps of {RUN}");
    let [local, reduced] = undisturbed(&launcher, std::slice::from_ref(&steps))?;
    let (began, limit) = (Instant::now(), Duration::from_secs_f64(60.0 * args.minutes));
    let mut random = Random::new(seed);
    let mut times = Times::default();
    let (mut runs, mut wrong) = (0, 0);
    while began.elapsed() < limit {
        runs += 1;
        let layout = random.one(&LAYOUTS);
        let mut sets: Vec<String> = layout.split(' ').map(str::to_owned).collect();
        let undisturbed = if needs_reduced(&sets) { &reduced } else { &local };
        // Sometimes there is room for the ranks of a lost host, sometimes fewer go on.
        let slots = ranks_of(&sets).div_ceil(HOSTS) + random.upto(2) - 1;
        if needs_reduced(&sets) {
            sets.push(REDUCED.into());
        }
        sets.extend(LIMITS.iter().map(ToString::to_string).chain([steps.clone()]));
        let faults: Vec<&str> = (0..random.upto(args.faults)).map(|_| random.one(&KINDS)).collect();
        let run_dir = launcher.run_dir(runs);
        let label = format!("{:<36} {slots} a host: {}", shown(&sets[..layout.split(' ').count()]), faults.join(", "));
        let result = Trial::start(&net, &binary, run_dir.clone(), slots, sets)
            .and_then(|trial| trial.run(&faults, &mut random, &mut times));
        (0..HOSTS).try_for_each(|host| net.plug(host, true).and_then(|()| net.shape(host, None)))?;
        let verdict = match result {
            Ok(digest) if digest == *undisturbed => "equal".to_owned(),
            Ok(digest) => format!("DIFFERS: {digest}"),
            Err(reason) => format!("FAILED: {reason}"),
        };
        println!("{runs:>3} {label:<90} | {verdict}");
        if verdict == "equal" {
            let _ = fs::remove_dir_all(&run_dir);
        } else {
            wrong += 1;
        }
    }
    times.print();
    println!("{runs} runs, {} faults, {wrong} wrong (seed {seed})", times.faults);
    if wrong > 0 {
        println!("their folders are kept in {}", folder.keep().display());
    }
    Ok(wrong == 0)
}

impl<'a> Trial<'a> {
    fn start(net: &'a Net, binary: &'a Path, folder: PathBuf, slots: usize, sets: Vec<String>) -> Result<Self, String> {
        let controller = controller(net, binary, &folder, &sets)?;
        let (agents, ranks, pids) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        let mut trial = Self { net, binary, folder, sets, slots, controller, agents, ranks, pids };
        for host in 0..HOSTS {
            let agent = trial.agent(host)?;
            trial.agents.push(agent);
        }
        while let Some(line) = trial.controller.line()? {
            trial.note(&line);
            if line.starts_with("step ") {
                return Ok(trial);
            }
        }
        Err(trial.controller.last_words("the first step does not come"))
    }

    fn agent(&self, host: usize) -> Result<Process, String> {
        let mut command = self.net.command(host, self.binary);
        command.args(["agent", "--controller", &format!("{}:7070", self.net.address(0)), "--token-file"]);
        command.arg(self.folder.with_file_name("token"));
        command.args(["--host", &format!("h{host}"), "--ranks", &self.slots.to_string()]);
        Process::start(command)
    }

    /// Remembers which process a rank is.
    fn note(&mut self, line: &str) {
        let Some((rank, pid)) = line.strip_prefix("rank ").and_then(|rest| rest.split_once(" is process ")) else {
            return;
        };
        if let (Ok(rank), Ok(pid)) = (rank.parse(), pid.parse()) {
            self.ranks.insert(rank, pid);
            self.pids.insert(pid);
        }
    }

    /// Suffers all faults and goes on to the end; the digest.
    fn run(mut self, faults: &[&str], random: &mut Random, times: &mut Times) -> Result<String, String> {
        let mut faults = faults.iter().copied().peekable();
        while let Some(kind) = faults.next() {
            std::thread::sleep(Duration::from_millis(100 * random.upto(8) as u64));
            self.controller.said().iter().for_each(|line| self.note(line));
            let began = Instant::now();
            let mut undo = vec![self.fire(kind, random)?];
            let mut name = kind.to_owned();
            if faults.peek().is_some() && random.upto(3) == 1 {
                let second = faults.next().unwrap_or(kind);
                std::thread::sleep(Duration::from_millis(50 * random.upto(6) as u64 - 50));
                undo.push(self.fire(second, random)?);
                name = "two at once".into();
            }
            let silent = matches!(name.as_str(), "controller" | "controller stopped" | "blink" | "slow link");
            let over = self.goes_on(began, !silent)?;
            for undo in undo {
                match undo {
                    Undo::Nothing => {}
                    Undo::Plug(host) => self.net.plug(host, true)?,
                    Undo::Shape(host) => self.net.shape(host, None)?,
                    Undo::Agent(host) => self.agents[host] = self.agent(host)?,
                    Undo::Continue(host) => self.agents[host].signal("CONT")?,
                }
            }
            let Some(seconds) = over else { break };
            times.add(name, seconds);
        }
        self.end()
    }

    fn fire(&mut self, kind: &str, random: &mut Random) -> Result<Undo, String> {
        let host = random.upto(HOSTS) - 1;
        Ok(match kind {
            "cut" => {
                self.net.plug(host, false)?;
                Undo::Plug(host)
            }
            "blink" => {
                self.net.plug(host, false)?;
                std::thread::sleep(BLINK);
                self.net.plug(host, true)?;
                Undo::Nothing
            }
            "slow link" => {
                self.net.shape(
                    host,
                    Some(random.one(&[
                        "tbf rate 5mbit burst 32kbit latency 100ms",
                        "tbf rate 20mbit burst 64kbit latency 50ms",
                        "tbf rate 100mbit burst 64kbit latency 20ms",
                    ])),
                )?;
                Undo::Shape(host)
            }
            "agent" => {
                self.agents[host].kill();
                if random.upto(2) == 1 {
                    self.agents[host] = self.agent(host)?;
                    Undo::Nothing
                } else {
                    Undo::Agent(host)
                }
            }
            "agent stopped" => {
                self.agents[host].signal("STOP")?;
                Undo::Continue(host)
            }
            "controller stopped" => {
                self.controller.signal("STOP")?;
                std::thread::sleep(Duration::from_millis(250 * random.upto(8) as u64));
                self.controller.signal("CONT")?;
                Undo::Nothing
            }
            "controller" => {
                self.controller.kill();
                std::thread::sleep(Duration::from_millis(100 * random.upto(10) as u64 - 100));
                if self.controller.last(digest_of).is_none() {
                    self.controller = controller(self.net, self.binary, &self.folder, &self.sets)?;
                }
                Undo::Nothing
            }
            _ => {
                let all: Vec<u32> = self.ranks.values().copied().filter(|pid| lives(*pid)).collect();
                if !all.is_empty() {
                    send(random.one(&all), if kind == "kill" { "KILL" } else { "STOP" })?;
                }
                Undo::Nothing
            }
        })
    }

    /// Waits for the step after the world that follows from a fault, or for a few steps where nobody need notice anything. Seconds
    /// since `began`; none: the run was over before.
    fn goes_on(&mut self, began: Instant, shows: bool) -> Result<Option<f64>, String> {
        let (mut troubled, mut formed, mut steps, mut first) = (false, false, 0, None);
        while let Some(line) = self.controller.line()? {
            self.note(&line);
            let seconds = began.elapsed().as_secs_f64();
            if line.starts_with("trouble ") {
                (troubled, formed) = (true, false);
            } else if line.starts_with("world ") {
                formed = true;
            } else if line.starts_with("step ") {
                steps += 1;
                first.get_or_insert(seconds);
                let enough = if shows { steps >= UNNOTICED.0 && began.elapsed() > UNNOTICED.1 } else { steps >= 3 };
                if troubled && formed {
                    return Ok(Some(seconds));
                }
                if !troubled && enough {
                    return Ok(first);
                }
            }
        }
        Ok(None)
    }

    /// Waits for the end of the run and of its processes; the digest.
    fn end(mut self) -> Result<String, String> {
        while let Some(line) = self.controller.line()? {
            self.note(&line);
        }
        let code = self.controller.ended(LEAVE).and_then(|status| status.code());
        let digest = self.controller.last(digest_of);
        let Some(digest) = digest.filter(|_| code.is_none_or(|code| code == 0)) else {
            return Err(self.controller.last_words(&format!("it ended with {code:?} and no digest")));
        };
        // Who was cut off at the end has not heard of it.
        for agent in &mut self.agents {
            if agent.ended(Duration::from_secs(1)).is_none() {
                agent.kill();
            }
        }
        let deadline = Instant::now() + LEAVE;
        while self.pids.iter().any(|pid| lives(*pid)) {
            if Instant::now() > deadline {
                let left: Vec<_> = self.pids.iter().filter(|pid| lives(**pid)).collect();
                return Err(format!("rank processes {left:?} outlive their run"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(digest)
    }
}

fn controller(net: &Net, binary: &Path, folder: &Path, sets: &[String]) -> Result<Process, String> {
    let mut command = net.command(0, binary);
    command.arg("controller").arg(folder.with_file_name("chaos.toml")).arg("--run-dir").arg(folder);
    command.arg("--token-file").arg(folder.with_file_name("token"));
    command.args(["--listen", &format!("{}:7070", net.address(0)), "--hosts", &HOSTS.to_string()]);
    command.args(sets.iter().map(|set| format!("--set={set}")));
    let mut controller = Process::start(command)?;
    controller.wait("the controller", |line| line.contains("agents call"))?;
    Ok(controller)
}

fn digest_of(line: &str) -> Option<String> {
    line.strip_prefix("digest ").map(str::to_owned)
}

fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// From a fault to the next step, by an outside clock.
#[derive(Default)]
struct Times {
    seconds: BTreeMap<String, Vec<f64>>,
    faults: usize,
}

impl Times {
    fn add(&mut self, kind: String, seconds: f64) {
        self.faults += if kind == "two at once" { 2 } else { 1 };
        self.seconds.entry(kind).or_default().push(seconds);
    }

    fn print(&mut self) {
        println!("\n{:<18} {:>5} {:>23} {:>10}", "fault", "n", "to next step, median ms", "worst ms");
        for (kind, all) in &mut self.seconds {
            all.sort_by(f64::total_cmp);
            let ms = |s: Option<&f64>| 1000.0 * s.copied().unwrap_or(0.0);
            let (median, worst) = (ms(all.get(all.len() / 2)), ms(all.last()));
            println!("{kind:<18} {:>5} {median:>23.0} {worst:>10.0}", all.len());
        }
    }
}
