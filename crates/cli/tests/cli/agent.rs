//! Plays the agent and the controller of a run by hand: real rank processes, worlds formed out of what is left.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use control::fault::Fault;
use control::wire::{Assignment, Cause, Decided, FabricSpec, FromRank, Held, Origin, RANK_COMMAND, ToRank};
use events::Event;
use fabric::ShmWorld;
use rustix::process::Signal;
use spec::{Run, Transport};
use train::comm::fabric_options;
use train::launch::wire::JobSpec;

use crate::common::{Lab, NANO, send};

const PATIENCE: Duration = Duration::from_secs(180);

/// A rank process.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<FromRank>,
    /// All that it said.
    pub said: Vec<FromRank>,
}

impl Process {
    pub fn start(lab: &Lab) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lockstep"))
            .arg(RANK_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let read = |line: String| serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
            output.lines().map_while(Result::ok).map(read).for_each(|said| drop(tell.send(said)))
        });
        let job = JobSpec {
            name: "run.toml".into(),
            run_toml: NANO.into(),
            known: data::content::Known::default(),
            cores: 1,
            simd: kernels::Simd::detect().to_string(),
            checkpoints: lab.path("checkpoints"),
            digest_every: 0,
            peak_gflops: 1.0,
            profiling: None,
            mutant: None,
        };
        let input = child.stdin.take().unwrap();
        let mut process = Self { child, input, lines, said: Vec::new() };
        let job = serde_json::to_value(job).unwrap();
        process.tell(&ToRank::Hello { parent: std::process::id(), beat_ms: 50, job });
        process
    }

    pub fn tell(&mut self, word: &ToRank) {
        let mut line = serde_json::to_vec(word).unwrap();
        line.push(b'\n');
        // A dead one hears nothing; its silence is what is tested.
        let _ = self.input.write_all(&line);
    }

    /// Waits for something that `wanted` accepts.
    #[track_caller]
    pub fn wait_for<T>(&mut self, wanted: impl Fn(&FromRank) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let said = match self.lines.recv_timeout(left) {
                Ok(said) => said,
                Err(e) => panic!("it does not come ({e}); so far:\n{:#?}", self.without_beats()),
            };
            self.said.push(said);
            if let Some(found) = self.said.last().and_then(&wanted) {
                return found;
            }
        }
    }

    fn without_beats(&self) -> Vec<&FromRank> {
        self.said.iter().filter(|said| !matches!(said, FromRank::Beat { .. })).collect()
    }

    pub fn kill(&mut self) {
        send(self.child.id(), Signal::KILL);
        self.child.wait().unwrap();
    }

    #[track_caller]
    pub fn wait_for_step(&mut self, step: u64) {
        self.wait_for(|said| match said {
            FromRank::Event(Event::Step(s)) if s.step >= step => Some(()),
            _ => None,
        });
    }

    #[track_caller]
    pub fn interrupted(&mut self) -> (Held, Cause) {
        self.wait_for(|said| match said {
            FromRank::Interrupted { held, cause, .. } => Some((held.clone(), cause.clone())),
            FromRank::Done(_) | FromRank::Failed { .. } => panic!("{said:?}"),
            _ => None,
        })
    }

    /// Waits for the end; the digest, if this is the rank that speaks.
    #[track_caller]
    pub fn done(&mut self) -> Option<String> {
        self.wait_for(|said| match said {
            FromRank::Done(_) => Some(()),
            FromRank::Interrupted { .. } | FromRank::Failed { .. } => panic!("{said:?}"),
            _ => None,
        });
        let digest = |said: &FromRank| match said {
            FromRank::Event(Event::Digest { digest, .. }) => Some(digest.clone()),
            _ => None,
        };
        self.said.iter().rev().find_map(digest)
    }

    /// Waits until it has its state: how many bytes came, and in how many seconds.
    #[track_caller]
    pub fn loaded(&mut self) -> (u64, f64) {
        self.wait_for(|said| match said {
            FromRank::Loaded { bytes, seconds, .. } => Some((*bytes, *seconds)),
            _ => None,
        })
    }

    /// Where its time went, once it is done.
    pub fn times(&self) -> String {
        let report = |said: &FromRank| match said {
            FromRank::Event(Event::RankFinished(report)) => Some(report.clone()),
            _ => None,
        };
        let report = self.said.iter().find_map(report).unwrap();
        let of = |(class, seconds): &(String, f64)| format!("{class} {seconds:.3} s");
        report.time.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    /// Waits until it says that a fault strikes.
    #[track_caller]
    pub fn fired(&mut self) -> String {
        self.wait_for(|said| match said {
            FromRank::Event(Event::FaultFired { fault, .. }) => Some(fault.clone()),
            _ => None,
        })
    }

    /// Why steps were computed again.
    pub fn replayed(&self) -> Vec<String> {
        let why = |said: &FromRank| match said {
            FromRank::Event(Event::Replayed { reason, .. }) => Some(reason.clone()),
            _ => None,
        };
        self.said.iter().filter_map(why).collect()
    }

    #[track_caller]
    pub fn exit_code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A world: its run file, its number, and what keeps its memory.
pub struct World {
    pub toml: String,
    pub generation: u64,
    _memory: Option<ShmWorld>,
}

/// Gives every process of `ranks` its place; `faults` are of all ranks.
#[must_use = "its memory lives as long as it"]
pub fn form(ranks: &mut [&mut Process], generation: u64, sets: &[&str], origin: &Origin, faults: &[Fault]) -> World {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let run = Run::parse(NANO, "run.toml", &sets, 1).unwrap();
    assert_eq!(run.layout.world(), ranks.len());
    let world = ranks.len() as u32;
    let tcp = run.layout.transport == Transport::Tcp;
    let memory = (!tcp).then(|| ShmWorld::create(world, &fabric_options(&run, generation)).unwrap());
    let fabric = match &memory {
        Some(memory) => FabricSpec::Shm(memory.path()),
        None => FabricSpec::Tcp { token: [7; 32], bind: std::net::Ipv4Addr::LOCALHOST.into() },
    };
    let toml = run.values.to_toml();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let rank = rank as u32;
        process.tell(&ToRank::Assign(Box::new(Assignment {
            generation,
            rank,
            world,
            run_toml: toml.clone(),
            fabric: fabric.clone(),
            cores: Vec::new(),
            origin: origin.clone(),
            faults: faults.iter().filter(|f| f.rank == rank).copied().collect(),
            recheck: false,
            checked: None,
            unseen: None,
        })));
    }
    if tcp {
        let listens = |said: &FromRank| match said {
            FromRank::Listening { generation: of, address } if *of == generation => Some(address.clone()),
            _ => None,
        };
        let addresses: Vec<_> = ranks.iter_mut().map(|process| process.wait_for(listens)).collect();
        for process in ranks.iter_mut() {
            process.tell(&ToRank::Addresses { generation, addresses: addresses.clone() });
        }
    }
    World { toml, generation, _memory: memory }
}

/// What the survivors agree on; `held`: by rank of the old world, with the rank that the process has in the new one.
pub fn peers(before: &World, held: &[Option<(Held, u32)>]) -> Origin {
    let all = || held.iter().flatten().map(|(held, _)| held).filter(|held| held.corrupt.is_empty());
    let decided = || all().filter_map(|h| h.decided.clone());
    let step = all().filter_map(|h| h.step).chain(decided().map(|d: Decided| d.step)).max().unwrap();
    let forward = decided().find(|d| d.step == step);
    let comes = |h: &Held| h.step == Some(step) || (h.step == Some(step - 1) && h.prepared && forward.is_some());
    let holder =
        |h: &Option<(Held, u32)>| h.as_ref().filter(|(h, _)| h.corrupt.is_empty() && comes(h)).map(|(_, now)| *now);
    let (generation, holders) = (before.generation, held.iter().map(holder).collect());
    Origin::Peers { generation, before: before.toml.clone(), holders, step, forward }
}
