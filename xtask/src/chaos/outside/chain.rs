//! A chain: a run that is struck, ends, loses something, is resumed under another layout, and so on until it is done.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::counts::Counts;
use super::life::{End, Lived, Places, live};
use super::plan::{Life, Loss, Plan};
use super::signs::{lives, set_aside, steps};

/// A chain is done after so many starts without a strike.
const LAST_LIVES_MAX: usize = 4;
/// What an undisturbed run ends with: its step and its digest.
pub type Undisturbed = (u64, String);

/// What a chain is about to find out.
pub struct Chain<'a> {
    plan: &'a Plan,
    places: &'a Places,
    undisturbed: &'a Undisturbed,
    counts: &'a mut Counts,
    /// The newest checkpoint that was told, in the folder that is there now; in the store.
    told: Option<u64>,
    copied: Option<u64>,
    pids: BTreeSet<u32>,
    /// What is wrong.
    pub faults: Vec<String>,
    /// All that was said and done.
    pub log: Vec<String>,
}

/// What comes after a start.
enum Next {
    Resume,
    Over,
}

impl<'a> Chain<'a> {
    /// Nothing has happened yet.
    pub fn new(plan: &'a Plan, places: &'a Places, undisturbed: &'a Undisturbed, counts: &'a mut Counts) -> Self {
        let (faults, log) = (Vec::new(), Vec::new());
        Self { plan, places, undisturbed, counts, told: None, copied: None, pids: BTreeSet::new(), faults, log }
    }

    /// Lives it to its end.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn run(&mut self) -> Result<(), String> {
        let last = std::iter::repeat_n(&self.plan.last, LAST_LIVES_MAX);
        let mut over = false;
        for (at, life) in self.plan.lives.iter().chain(last).enumerate() {
            over = matches!(self.live(at, life)?, Next::Over);
            if over {
                break;
            }
        }
        if !over {
            self.fault(format!("ENDLESS: it is not done after {LAST_LIVES_MAX} undisturbed starts"));
        }
        self.look_back();
        Ok(())
    }

    fn fault(&mut self, text: String) {
        self.log.push(format!("FAULT: {text}"));
        self.faults.push(text);
    }

    fn live(&mut self, at: usize, life: &Life) -> Result<Next, String> {
        let resumes = at > 0;
        if resumes {
            self.lose(life.loss)?;
        }
        let saved = self.saved();
        if let Some(told) = self.told.filter(|told| saved.is_none_or(|saved| saved < *told)) {
            self.fault(format!("LOST: the checkpoint of step {told} was told, and the newest one there is {saved:?}"));
        }
        let sets = [&self.plan.sets[..], &life.sets].concat();
        let go = |chain: &mut Self, resume: bool| {
            let command = chain.places.command(&sets, &chain.plan.args, resume);
            let lived = live(chain.places, command, life, chain.undisturbed.0, saved)?;
            chain.take(&lived);
            Ok::<_, String>(lived)
        };
        let mut lived = go(self, resumes)?;
        if resumes && saved.is_none() && matches!(&lived.end, End::Failed { code: Some(2), .. }) {
            // There is nothing to go on from: it begins again.
            self.counts.end("begun again");
            lived = go(self, false)?;
            if let End::Failed { code: Some(2), reason } = &lived.end {
                self.fault(format!(
                    "STUCK: without a checkpoint it starts neither with nor without --resume: {reason}"
                ));
                fs::remove_dir_all(&self.places.run).map_err(|e| e.to_string())?;
                return Ok(Next::Resume);
            }
        } else if resumes {
            match (saved, lived.from) {
                (Some(saved), Some(from)) if from != saved => {
                    self.fault(format!(
                        "LOST: it goes on after step {from}, and there was a checkpoint of step {saved}"
                    ));
                }
                (Some(saved), None) if lived.told.is_some() => {
                    self.fault(format!("LOST: it begins anew, and there was a checkpoint of step {saved}"));
                }
                _ => {}
            }
        }
        self.judge(&lived)
    }

    /// The newest complete checkpoint that there is.
    fn saved(&self) -> Option<u64> {
        let near = steps(&self.places.checkpoints()).last().copied();
        near.max(self.places.store.as_ref().and_then(|store| steps(store).last().copied()))
    }

    fn take(&mut self, lived: &Lived) {
        self.log.extend(lived.log.iter().cloned());
        self.told = lived.saved.max(self.told);
        self.copied = lived.copied.max(self.copied);
        self.pids.extend(&lived.pids);
        lived.struck.iter().for_each(|struck| self.counts.hit(struck.clone()));
        self.counts.miss(lived.missed.len());
        if let Some((saved, again)) = lived.went_back {
            self.fault(format!("LOST: step {again} was computed again after the checkpoint of step {saved} was told"));
        }
    }

    fn judge(&mut self, lived: &Lived) -> Result<Next, String> {
        match &lived.end {
            End::Done { step, digest } => {
                self.counts.end("done");
                if (*step, digest) != (self.undisturbed.0, &self.undisturbed.1) {
                    let (end, right) = self.undisturbed;
                    self.fault(format!("WRONG: step {step}, digest {digest}; undisturbed: step {end}, {right}"));
                }
                Ok(Next::Over)
            }
            End::Stopped => {
                self.counts.end("stopped on request");
                let saved = self.saved();
                if saved < lived.told {
                    self.fault(format!(
                        "LOST: it stopped on request after step {:?}, and the newest checkpoint is {saved:?}",
                        lived.told
                    ));
                }
                Ok(Next::Resume)
            }
            End::Killed => {
                self.counts.end("killed");
                Ok(Next::Resume)
            }
            End::Failed { code: Some(5), reason } if !lived.struck.is_empty() => {
                self.counts.end("given up");
                self.log.push(format!("given up: {reason}"));
                Ok(Next::Resume)
            }
            End::Failed { code, reason } => {
                self.counts.end("failed");
                let code = code.map_or("a signal".into(), |code| format!("exit {code}"));
                self.fault(format!("FAILED ({code}): {reason}"));
                Ok(Next::Resume)
            }
            End::Hung(dump) => {
                self.counts.end("hung");
                self.fault(format!("HUNG: {dump}"));
                Ok(Next::Resume)
            }
        }
    }

    /// Takes something away between two starts.
    fn lose(&mut self, loss: Loss) -> Result<(), String> {
        let names: &[&str] = match loss {
            Loss::Nothing => return Ok(()),
            Loss::Events => &["events.jsonl"],
            Loss::Logs => &["events.jsonl", "journal.jsonl", "summary.json", "best.json"],
            Loss::Folder => {
                // Without a copy there would be nothing to go on from.
                if self.places.store.as_ref().is_none_or(|store| steps(store).is_empty()) {
                    return Ok(());
                }
                self.wait_for_processes();
                self.log.push("LOSS: the run's folder".into());
                self.counts.end("resumed from the store alone");
                self.told = self.copied;
                return fs::remove_dir_all(&self.places.run).map_err(|e| format!("cannot remove a folder: {e}"));
            }
        };
        self.log.push(format!("LOSS: {}", names.join(", ")));
        self.counts.end("resumed without logs");
        names.iter().for_each(|name| drop(fs::remove_file(self.places.run.join(name))));
        Ok(())
    }

    /// Nobody is left, and nothing good was put aside.
    fn look_back(&mut self) {
        let left = self.wait_for_processes();
        if !left.is_empty() {
            self.fault(format!("LEFT: processes {left:?} outlive their run"));
        }
        let folders = std::iter::once(self.places.checkpoints()).chain(self.places.store.clone());
        for folder in folders.collect::<Vec<_>>() {
            for name in set_aside(&folder) {
                self.fault(format!("PUT ASIDE: {} is complete, and nothing was damaged", folder.join(name).display()));
            }
        }
    }

    /// Waits until all processes that were seen are gone; those that are not.
    fn wait_for_processes(&self) -> Vec<u32> {
        let ours = |pid: &u32| {
            let exe = fs::read_link(Path::new("/proc").join(pid.to_string()).join("exe"));
            lives(*pid) && exe.is_ok_and(|exe| exe == self.places.binary)
        };
        let left = || self.pids.iter().copied().filter(ours).collect::<Vec<_>>();
        for _ in 0..1000 {
            if left().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        left()
    }
}
