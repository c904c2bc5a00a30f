//! Ranks on several hosts: agents call this controller, which goes on where an earlier one of the run was.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control::identity::Identity;
use control::journal::Entry;
use control::lease::{Holding, Lease};
use control::remote::handshake::{Key, TOKEN_MIN};
use control::remote::server::{Door, Remote};
use events::Event;
use events::wall::Wall;
use policy::{Action, Unchecked};
use spec::{Run, Transport};

use super::RunFolder;
use super::folder::Lock;
use super::resume::differences;
use crate::error::TrainError;

/// How often who waits for another controller's end looks.
const LOOK: Duration = Duration::from_millis(50);

/// How agents reach the controller of a run.
#[derive(Debug, Clone)]
pub struct Hosts {
    /// Where it listens; port 0: a free one.
    pub listen: SocketAddr,
    /// What agents must know; empty: nothing, on loopback.
    pub token: Vec<u8>,
    /// Agents that are waited for before ranks are started.
    pub count: usize,
    /// Waits while another controller of the run is at work, and takes over when it is dead.
    pub standby: bool,
}

/// What an earlier controller of the run left, which ranks may still be under.
pub(super) struct Earlier {
    /// When the run began, by this process's clock.
    pub began: Instant,
    /// The run at work.
    pub run: Run,
    /// What every process of it is, if it was begun by who knew that.
    pub identity: Option<Identity>,
    /// The checkpoint that it went on from.
    pub from: Option<(u64, PathBuf)>,
    /// That nobody has checked the last steps before it.
    pub unchecked: Option<Unchecked>,
    /// What has happened: seconds since the beginning, and what.
    pub events: Vec<(f64, Event)>,
}

impl Hosts {
    /// Whether ranks of `run` can be reached so, before anything is written.
    ///
    /// # Errors
    /// What cannot be; the remedy.
    pub(super) fn check(&self, run: &Run) -> Result<(), TrainError> {
        let bad = |text: String| Err(TrainError::BadInput(text));
        if run.layout.transport != Transport::Tcp {
            return bad(format!(
                "layout.transport = {}: ranks of several hosts reach each other by TCP; set layout.transport=tcp",
                run.layout.transport
            ));
        }
        if self.token.is_empty() && !self.listen.ip().is_loopback() {
            return bad(format!(
                "--listen {} can be reached from other machines: whoever calls would be obeyed; give --token-file, or listen on 127.0.0.1",
                self.listen
            ));
        }
        if !self.token.is_empty() && self.token.len() < TOKEN_MIN {
            return bad(format!(
                "the token has {} characters and could be guessed; write at least {TOKEN_MIN} random ones into the --token-file",
                self.token.len()
            ));
        }
        if self.count == 0 {
            return bad("--hosts 0: nobody would run a rank; give the number of agents to wait for".into());
        }
        Ok(())
    }

    /// The port, before anything is written.
    ///
    /// # Errors
    /// That it cannot be had.
    pub(super) fn bind(&self) -> Result<TcpListener, TrainError> {
        TcpListener::bind(self.listen)
            .map_err(|e| TrainError::BadInput(format!("cannot listen at {}: {e}; give another --listen", self.listen)))
    }

    /// Lets agents in.
    pub(super) fn open(
        &self,
        listener: TcpListener,
        epoch: u64,
        folder: &RunFolder,
        run: &Run,
        known: Vec<(String, u64, u64)>,
    ) -> Result<Remote, TrainError> {
        let guard = &run.guard;
        let door = Door {
            key: Key::new(&self.token),
            epoch,
            run: folder.path().display().to_string(),
            beat_ms: guard.beat_ms,
            // Before its ranks are taken for dead one by one.
            silence_ms: guard.heartbeat_timeout_ms * 3 / 4,
            known,
        };
        Remote::listen(listener, door).map_err(|e| TrainError::Internal(format!("agents cannot be let in: {e}")))
    }
}

/// The lock and the lease of the run in `folder`, if a run has been there. A lease of another machine is watched; who finds it
/// renewed, or the folder locked, waits for that controller's death where `hosts.standby` says so.
///
/// # Errors
/// That another controller is at work; what the system refuses.
pub(super) fn seize(
    hosts: &Hosts,
    folder: &RunFolder,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(&Event),
) -> Result<Option<(Lock, Holding)>, TrainError> {
    if !folder.journal().is_file() && !hosts.standby {
        return Ok(None);
    }
    let at_work = |holder: &str| {
        TrainError::BadInput(format!(
            "a controller is at work in {} ({holder}); wait for its end, or give --standby to take over when it is dead",
            folder.path().display()
        ))
    };
    let mut told = false;
    let mut wait = |holder: &str| {
        if !hosts.standby {
            return Err(at_work(holder));
        }
        if stop.load(Ordering::Relaxed) {
            return Err(TrainError::Stopped(format!("stopped on request while {holder} was at work")));
        }
        if !std::mem::replace(&mut told, true) {
            let text =
                format!("standby: {holder} is at work in {}; takes over when it is dead", folder.path().display());
            observe(&Event::Notice { text });
        }
        Ok(())
    };
    let lock = loop {
        // A run that does not exist yet is not waited for: its first controller is this one.
        match folder.lock_if_there() {
            Ok(Some(lock)) => break lock,
            Ok(None) => return Ok(None),
            Err(_) => wait(&control::lease::holder(&folder.lease()))?,
        }
        std::thread::sleep(LOOK);
    };
    let mut first = None;
    let mut refused = None;
    let mut go_on = |lease: &Lease| {
        let renewed = *first.get_or_insert_with(|| lease.clone()) != *lease;
        refused = if renewed || hosts.standby { wait(&lease.holder).err() } else { None };
        refused.is_none()
    };
    let lease = Holding::take(&folder.lease(), &holder(hosts.listen), &mut go_on);
    match (lease, refused) {
        (Ok(lease), _) if told && is_over(&folder.read_journal()?) => {
            lease.give_back();
            Err(TrainError::Over(format!(
                "the run in {} has ended, there is nothing to take over",
                folder.path().display()
            )))
        }
        (Ok(lease), _) => Ok(Some((lock, lease))),
        (Err(_), Some(refused)) => Err(refused),
        (Err(source), None) => Err(no_lease(folder, source)),
    }
}

/// The lease of a run that this controller begins; its folder is locked.
pub(super) fn lease(folder: &RunFolder, at: SocketAddr) -> Result<Holding, TrainError> {
    Holding::take(&folder.lease(), &holder(at), &mut |_| true).map_err(|source| no_lease(folder, source))
}

fn holder(at: SocketAddr) -> String {
    format!("process {} at {at}", std::process::id())
}

fn no_lease(folder: &RunFolder, source: std::io::Error) -> TrainError {
    TrainError::Io { what: "cannot take the lease", path: folder.lease(), source }
}

/// The controller that was here before, if its run has not ended.
///
/// # Errors
/// A journal that cannot be read; a run that is not the one at work.
pub(super) fn earlier(folder: &RunFolder, asked: &Run, cores: usize) -> Result<Option<Earlier>, TrainError> {
    if !folder.journal().is_file() {
        return Ok(None);
    }
    let entries = folder.read_journal()?;
    let Some(Entry::Begin { run_toml, from, unchecked, unix_ms, hosts, identity, .. }) = entries.first().cloned()
    else {
        return Ok(None);
    };
    // Ranks that are children of their controller died with it.
    if hosts == 0 || is_over(&entries) {
        return Ok(None);
    }
    let run = Run::parse(&run_toml, "the run at work", &[], cores)?;
    // What was changed in the run since belongs to it, whether the one who calls has it in the run file or not.
    let first = |toml: &str| spec::definition_until(&plain(toml), 0);
    let differ = differences(&first(&run_toml), &first(&asked.values.to_toml()));
    if !differ.is_empty() {
        return Err(TrainError::BadInput(format!(
            "the run at work in {} has other settings: {}; call the controller with its own, and change it with `lockstep reload`",
            folder.path().display(),
            differ.join("; ")
        )));
    }
    let now = Wall::default().since_1970();
    let since = control::journal::since_begin(&entries, unix_ms, now.as_millis() as u64);
    let began = Instant::now().checked_sub(Duration::from_millis(since)).unwrap_or_else(Instant::now);
    let events = folder.events_of_last_start();
    Ok(Some(Earlier { began, run, identity, from, unchecked, events }))
}

/// The run of this journal has ended.
fn is_over(entries: &[Entry]) -> bool {
    let stop = |entry: &Entry| matches!(entry, Entry::Decision { decision, .. } if matches!(decision.action, Action::Stop { .. }));
    entries.iter().any(stop)
}

/// Without where values come from.
fn plain(toml: &str) -> String {
    toml.lines().map(|line| line.split_once("  # ").map_or(line, |(value, _)| value).to_owned() + "\n").collect()
}
