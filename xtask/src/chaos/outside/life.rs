//! One start of the binary: hears it, strikes it when its moments come, and sees how it ends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use events::Event;
use rustix::process::{Pid, Signal, kill_process};

use super::counts::Struck;
use super::plan::{How, Life, Moment, Strike, Whom};
use super::signs::{Folder, Sign, children, hear, lives, standing};

/// A start that has nothing more to suffer ends within this time, on a busy machine, too.
const PATIENCE: Duration = Duration::from_secs(90);
/// Processes of a run are gone so soon after it.
const LEAVE: Duration = Duration::from_secs(15);
/// How often folders are looked at while something in them is waited for.
const LOOK: Duration = Duration::from_micros(300);
/// How often else.
const POLL: Duration = Duration::from_millis(10);

/// How a start ended.
#[derive(Debug)]
pub enum End {
    /// With a digest of a last step.
    Done { step: u64, digest: String },
    /// On request.
    Stopped,
    /// By a signal of ours that ends at once.
    Killed,
    /// With a code and a reason.
    Failed { code: Option<i32>, reason: String },
    /// Not at all.
    Hung(String),
}

/// What was seen of a start.
pub struct Lived {
    /// How it ended.
    pub end: End,
    /// The step after which it went on.
    pub from: Option<u64>,
    /// The last step that it told.
    pub told: Option<u64>,
    /// The newest checkpoint that it told.
    pub saved: Option<u64>,
    /// The newest copy in the store that it told.
    pub copied: Option<u64>,
    /// It went back to before a checkpoint that it had told: that one, and the step that was computed again.
    pub went_back: Option<(u64, u64)>,
    /// Strikes that hit.
    pub struck: Vec<Struck>,
    /// Strikes that found nobody.
    pub missed: Vec<Strike>,
    /// All that was said and done, with seconds.
    pub log: Vec<String>,
    /// Its processes.
    pub pids: BTreeSet<u32>,
}

/// A start under way.
pub struct Living<'a> {
    life: &'a Life,
    last_step: u64,
    first: bool,
    child: Ours,
    signs: Receiver<Sign>,
    checkpoints: Folder,
    store: Option<Folder>,
    began: Instant,
    /// The last strike, or what followed from one.
    touched: Instant,
    /// Whom each rank of the world is.
    ranks: BTreeMap<usize, u32>,
    /// What is still to be sent: when, to whom, what.
    later: VecDeque<(Instant, Vec<u32>, Signal)>,
    asked: usize,
    killed: bool,
    steps: usize,
    finished: usize,
    worlds: usize,
    seen: Lived,
    digest: Option<(u64, String)>,
    last_words: Vec<String>,
    next: usize,
    due: Option<Instant>,
}

/// Killed when dropped.
struct Ours(Child);

/// Where a chain's folders are.
pub struct Places {
    /// The binary.
    pub binary: PathBuf,
    /// The run file.
    pub toml: PathBuf,
    /// The run's folder.
    pub run: PathBuf,
    /// Where copies go.
    pub store: Option<PathBuf>,
}

impl Places {
    /// The command of a start.
    pub fn command(&self, sets: &[String], args: &[&str], resume: bool) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("train").arg(&self.toml).arg("--run-dir").arg(&self.run).arg("--json").args(args);
        command.args(resume.then_some("--resume")).args(sets.iter().map(|set| format!("--set={set}")));
        command.args(self.store.iter().map(|at| format!("--set=checkpoint.store=\"file://{}\"", at.display())));
        command
    }

    /// The folder of its checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.run.join("checkpoints")
    }
}

/// `last_step`: after which an undisturbed run ends; `saved`: the newest checkpoint that is there.
pub fn live(
    places: &Places,
    mut command: Command,
    life: &Life,
    last_step: u64,
    saved: Option<u64>,
) -> Result<Lived, String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = Ours(child.map_err(|e| format!("cannot start {}: {e}", command.get_program().display()))?);
    let (tell, signs) = channel();
    hear(child.0.stdout.take().expect("piped"), tell.clone());
    hear(child.0.stderr.take().expect("piped"), tell);
    let now = Instant::now();
    let seen = Lived {
        end: End::Killed,
        from: None,
        told: None,
        saved,
        copied: None,
        went_back: None,
        struck: Vec::new(),
        missed: Vec::new(),
        log: vec![format!("$ {command:?}")],
        pids: BTreeSet::from([child.0.id()]),
    };
    let living = Living {
        life,
        last_step,
        first: saved.is_none(),
        child,
        signs,
        checkpoints: Folder::new(&places.checkpoints()),
        store: places.store.as_deref().map(Folder::new),
        began: now,
        touched: now,
        ranks: BTreeMap::new(),
        later: VecDeque::new(),
        asked: 0,
        killed: false,
        steps: 0,
        finished: 0,
        worlds: 0,
        seen,
        digest: None,
        last_words: Vec::new(),
        next: 0,
        due: None,
    };
    living.run_on(&places.run)
}

impl Living<'_> {
    fn run_on(mut self, run: &Path) -> Result<Lived, String> {
        let status = loop {
            self.arm(Moment::Begun);
            self.look();
            self.strike()?;
            self.send_later();
            match self.signs.recv_timeout(self.pause()) {
                Ok(sign) => self.take(sign),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(POLL),
            }
            if let Some(status) = self.child.0.try_wait().map_err(|e| e.to_string())? {
                break Some(status);
            }
            if self.touched.elapsed() > PATIENCE {
                break None;
            }
        };
        let Some(status) = status else {
            let dump = self.dump(run);
            self.end_all();
            self.seen.end = End::Hung(dump);
            return Ok(self.over());
        };
        // Who is stopped hears nothing of the end.
        self.seen.pids.extend(self.ranks.values());
        let deadline = Instant::now() + LEAVE;
        if !self.life.at_once || status.success() {
            while self.seen.pids.iter().any(|pid| lives(*pid)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        while let Ok(sign) = self.signs.recv_timeout(POLL) {
            self.take(sign);
        }
        self.seen.end = self.end(status);
        Ok(self.over())
    }

    fn over(mut self) -> Lived {
        self.seen.missed.extend(&self.life.strikes[self.next..]);
        let end = format!("{:?}", self.seen.end);
        self.log(end.lines().next().unwrap_or_default());
        self.seen
    }

    fn log(&mut self, text: &str) {
        self.seen.log.push(format!("{:9.4} {text}", self.began.elapsed().as_secs_f64()));
    }

    /// The next strike's moment has come, if it is this one.
    fn arm(&mut self, moment: Moment) {
        let Some(strike) = self.life.strikes.get(self.next).filter(|_| self.due.is_none()) else { return };
        let here = match (strike.at, moment) {
            (Moment::Steps(n), Moment::Steps(now)) => now >= n,
            (Moment::Finished(n), Moment::Finished(now)) => now >= n,
            (at, moment) => at == moment,
        };
        if here {
            self.due = Some(Instant::now() + Duration::from_micros(strike.delay_us));
        }
    }

    fn look(&mut self) {
        let Some(at) = self.life.strikes.get(self.next).filter(|_| self.due.is_none()).map(|strike| strike.at) else {
            return;
        };
        let came = match at {
            Moment::Writing => self.checkpoints.new_names("writing-"),
            Moment::Committed => self.checkpoints.new_names("step-"),
            Moment::Copying => self.store.as_mut().is_some_and(|store| store.new_names("")),
            _ => return,
        };
        if came {
            self.arm(at);
        }
    }

    fn pause(&self) -> Duration {
        let now = Instant::now();
        let next = self.later.front().map(|(at, ..)| *at).into_iter().chain(self.due).min();
        let waits = self.due.is_none().then(|| self.life.strikes.get(self.next)).flatten();
        let folder = waits.is_some_and(|s| matches!(s.at, Moment::Writing | Moment::Committed | Moment::Copying));
        let most = if folder { LOOK } else { POLL };
        next.map_or(most, |at| at.saturating_duration_since(now).min(most))
    }

    fn take(&mut self, sign: Sign) {
        let event = match sign {
            Sign::Line(line) => {
                self.log(&line);
                self.last_words.push(line);
                return;
            }
            Sign::Event(event) => *event,
        };
        if !matches!(event, Event::TensorHashes { .. } | Event::Work(_)) {
            let line = event.to_line(0.0);
            self.log(&line);
        }
        match event {
            Event::Notice { text } => {
                self.seen.from = self.seen.from.or_else(|| number_after(&text, "going on after step "));
                if text.contains(" copied to ") {
                    self.seen.copied = self.seen.copied.max(number_after(&text, "checkpoint of step "));
                }
            }
            Event::RankStarted { rank, pid } => {
                self.ranks.insert(rank, pid);
                self.seen.pids.insert(pid);
                if self.worlds == 0 && self.ranks.len() == self.life.ranks {
                    self.arm(Moment::Placed);
                }
            }
            Event::World(_) => {
                self.worlds += 1;
                self.ranks.clear();
                self.finished = 0;
                self.arm(Moment::Formed);
            }
            Event::Trouble(_) => self.arm(Moment::Noticed),
            Event::Step(step) => {
                self.steps += 1;
                if let Some(saved) = self.seen.saved.filter(|saved| step.step <= *saved) {
                    self.seen.went_back.get_or_insert((saved, step.step));
                }
                self.seen.told = Some(step.step);
                self.arm(Moment::Steps(self.steps));
                if step.step == self.last_step {
                    self.arm(Moment::LastStep);
                }
            }
            Event::Checkpoint { step, .. } => self.seen.saved = self.seen.saved.max(Some(step)),
            Event::Digest { step, digest, .. } => {
                self.digest = Some((step, digest));
                self.arm(Moment::Digest);
            }
            Event::RankFinished(report) => {
                self.finished += 1;
                self.ranks.remove(&report.rank);
                self.arm(Moment::Finished(self.finished));
            }
            _ => {}
        }
    }

    fn strike(&mut self) -> Result<(), String> {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        let strike = self.life.strikes[self.next];
        (self.due, self.next, self.touched) = (None, self.next + 1, Instant::now());
        let phase = self.phase(strike.at);
        let parent = self.child.0.id();
        let mut ranks = children(parent);
        self.seen.pids.extend(&ranks);
        if !ranks.is_empty() {
            let turn = strike.draw % ranks.len();
            ranks.rotate_left(turn);
        }
        let (with_parent, count) = match strike.whom {
            Whom::One => (false, 1),
            Whom::Two => (false, 2),
            Whom::All => (false, usize::MAX),
            Whom::Parent => (true, 0),
            Whom::ParentAndOne => (true, 1),
            Whom::ParentAndAll => (true, usize::MAX),
        };
        ranks.truncate(count);
        let hit = !ranks.is_empty() || count == 0;
        if with_parent {
            // Before the ranks, or after them.
            let at = if (strike.draw >> 8).is_multiple_of(2) { 0 } else { ranks.len() };
            ranks.insert(at, parent);
        }
        if !hit && !with_parent {
            self.seen.missed.push(strike);
            return Ok(());
        }
        let (signal, after) = match strike.how {
            How::Kill => (Signal::KILL, None),
            How::Stop => (Signal::STOP, None),
            How::StopKill(ms) => (Signal::STOP, Some((ms, Signal::KILL))),
            How::StopContinue(ms) => (Signal::STOP, Some((ms, Signal::CONT))),
            How::Ask("INT") => (Signal::INT, None),
            How::Ask("HUP") => (Signal::HUP, None),
            How::Ask(_) => (Signal::TERM, None),
        };
        ranks.iter().for_each(|pid| send(*pid, signal));
        self.asked += usize::from(matches!(strike.how, How::Ask(_)) && with_parent);
        self.killed |= with_parent && strike.how == How::Kill;
        if let Some((ms, signal)) = after {
            let at = Instant::now() + Duration::from_millis(ms);
            self.later.push_back((at, ranks.clone(), signal));
            self.later.make_contiguous().sort_by_key(|(at, ..)| *at);
        }
        let named: Vec<String> = ranks.iter().map(|pid| self.named(*pid)).collect();
        self.log(&format!("STRIKE: {strike}: {}", named.join(", ")));
        self.seen.struck.push(Struck { how: strike.how.kind(), whom: strike.whom.name(), phase });
        Ok(())
    }

    fn named(&self, pid: u32) -> String {
        match self.ranks.iter().find(|(_, known)| **known == pid) {
            _ if pid == self.child.0.id() => format!("parent {pid}"),
            Some((rank, _)) => format!("rank {rank} {pid}"),
            None => format!("process {pid}"),
        }
    }

    fn phase(&self, at: Moment) -> &'static str {
        match at {
            Moment::Writing => "writing a checkpoint",
            Moment::Committed => "checkpoint just there",
            Moment::Copying => "copying to the store",
            Moment::Noticed | Moment::Formed => "recovering",
            Moment::LastStep => "end, before the digest",
            Moment::Digest => "end, digest told",
            Moment::Finished(_) => "end, some ranks done",
            Moment::Begun | Moment::Placed if self.first => "starting",
            Moment::Begun | Moment::Placed => "resuming",
            Moment::Steps(_) if self.seen.saved.is_none() => "before any checkpoint",
            Moment::Steps(_) => "between checkpoints",
        }
    }

    fn send_later(&mut self) {
        while self.later.front().is_some_and(|(at, ..)| *at <= Instant::now()) {
            let Some((_, pids, signal)) = self.later.pop_front() else { return };
            self.touched = Instant::now();
            let parent = self.child.0.id();
            let there = children(parent);
            for pid in pids.iter().filter(|pid| **pid == parent || there.contains(pid)) {
                send(*pid, signal);
            }
            self.killed |= signal == Signal::KILL && pids.contains(&parent);
            self.log(&format!("then {signal:?} to {pids:?}"));
        }
    }

    fn end(&self, status: ExitStatus) -> End {
        use std::os::unix::process::ExitStatusExt;
        let reason = self.last_words.iter().rev().find(|line| line.starts_with("error: ")).or(self.last_words.last());
        let reason = reason.cloned().unwrap_or_else(|| "it said nothing".into());
        match (status.code(), status.signal()) {
            (Some(0), _) => match &self.digest {
                Some((step, digest)) => End::Done { step: *step, digest: digest.clone() },
                None => End::Failed { code: Some(0), reason: "it told no digest".into() },
            },
            (Some(3), _) if self.asked > 0 => End::Stopped,
            // The second request ends it at once.
            (Some(code), _) if self.asked > 1 && code > 128 => End::Killed,
            (None, Some(9)) if self.killed => End::Killed,
            // Before it could say what it does about a request.
            (None, Some(1 | 2 | 15)) if self.asked > 0 && self.seen.told.is_none() && self.ranks.is_empty() => {
                End::Killed
            }
            (None, Some(signal)) => End::Failed { code: None, reason: format!("ended by signal {signal}; {reason}") },
            (code, _) => End::Failed { code, reason },
        }
    }

    /// What there is to see of a start that does not end.
    fn dump(&mut self, run: &Path) -> String {
        let parent = self.child.0.id();
        let mut pids: BTreeSet<u32> = self.seen.pids.iter().copied().filter(|pid| lives(*pid)).collect();
        pids.extend(children(parent));
        let mut text = format!("nothing ended it within {} s\n", PATIENCE.as_secs());
        pids.iter().for_each(|pid| text += &(standing(*pid) + "\n"));
        for name in ["journal.jsonl", "events.jsonl"] {
            let all = std::fs::read_to_string(run.join(name)).unwrap_or_default();
            let lines: Vec<_> = all.lines().collect();
            text += &format!("end of {name}:\n  {}\n", lines[lines.len().saturating_sub(30)..].join("\n  "));
        }
        text
    }

    fn end_all(&mut self) {
        let all = children(self.child.0.id());
        let _ = self.child.0.kill();
        let _ = self.child.0.wait();
        all.into_iter().for_each(|pid| send(pid, Signal::KILL));
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = kill_process(pid, signal);
    }
}

fn number_after(text: &str, words: &str) -> Option<u64> {
    let rest = &text[text.find(words)? + words.len()..];
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
