//! Ranks on several hosts: agents call this controller, which goes on where an earlier one of the run was.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use control::journal::{Entry, Journal};
use control::lease::Holding;
use control::remote::handshake::{Key, TOKEN_MIN};
use control::remote::server::{Door, Remote};
use events::Event;
use policy::Action;
use spec::{Run, Transport};

use super::RunFolder;
use super::resume::differences;
use crate::error::TrainError;

/// How agents reach the controller of a run.
#[derive(Debug, Clone)]
pub struct Hosts {
    /// Where it listens; port 0: a free one.
    pub listen: SocketAddr,
    /// What agents must know; empty: nothing, on loopback.
    pub token: Vec<u8>,
    /// Agents that are waited for before ranks are started.
    pub count: usize,
}

/// What an earlier controller of the run left, which ranks may still be under.
pub(super) struct Earlier {
    /// When the run began, by this process's clock.
    pub began: Instant,
    /// The run at work.
    pub run: Run,
    /// The checkpoint that it went on from.
    pub from: Option<(u64, PathBuf)>,
    /// What has happened: seconds since the beginning, and what.
    pub events: Vec<(f64, Event)>,
}

impl Hosts {
    /// The port, before anything is written.
    ///
    /// # Errors
    /// What cannot be; the remedy.
    pub(super) fn bind(&self, run: &Run) -> Result<TcpListener, TrainError> {
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
        TcpListener::bind(self.listen)
            .or_else(|e| bad(format!("cannot listen at {}: {e}; give another --listen", self.listen)))
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

/// The lease of the run in `folder`; waits for a controller of another machine to lose it.
pub(super) fn lease(
    folder: &RunFolder,
    at: SocketAddr,
    observe: &mut dyn FnMut(&Event),
) -> Result<Holding, TrainError> {
    let holder = format!("process {} at {at}", std::process::id());
    let mut told = false;
    let mut wait = |lease: &control::lease::Lease| {
        if !std::mem::replace(&mut told, true) {
            let text = format!(
                "the lease of {} is held by {} (epoch {}): waiting until it is not renewed for {} s",
                folder.path().display(),
                lease.holder,
                lease.epoch,
                control::lease::TERM.as_secs()
            );
            observe(&Event::Notice { text });
        }
        true
    };
    Holding::take(&folder.lease(), &holder, &mut wait).map_err(|source| TrainError::Io {
        what: "cannot take the lease",
        path: folder.lease(),
        source,
    })
}

/// The controller that was here before, if its run has not ended.
///
/// # Errors
/// A journal that cannot be read; a run that is not the one at work.
pub(super) fn earlier(folder: &RunFolder, asked: &Run, cores: usize) -> Result<Option<Earlier>, TrainError> {
    let path = folder.journal();
    if !path.is_file() {
        return Ok(None);
    }
    let io = |source| TrainError::Io { what: "cannot read", path: path.clone(), source };
    let entries = Journal::read(&path).map_err(io)?;
    let Some(Entry::Begin { run_toml, from, unix_ms, hosts, .. }) = entries.first().cloned() else { return Ok(None) };
    let over = |entry: &Entry| matches!(entry, Entry::Decision { decision, .. } if matches!(decision.action, Action::Stop { .. }));
    // Ranks that are children of their controller died with it.
    if hosts == 0 || entries.iter().any(over) {
        return Ok(None);
    }
    let run = Run::parse(&run_toml, "the run at work", &[], cores)?;
    let differ = differences(&plain(&run_toml), &plain(&asked.values.to_toml()));
    if !differ.is_empty() {
        return Err(TrainError::BadInput(format!(
            "the run at work in {} has other settings: {}; call the controller with its own, and change it with `lockstep reload`",
            folder.path().display(),
            differ.join("; ")
        )));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = control::journal::since_begin(&entries, unix_ms, now.as_millis() as u64);
    let began = Instant::now().checked_sub(Duration::from_millis(since)).unwrap_or_else(Instant::now);
    let events = folder.events_of_last_start();
    Ok(Some(Earlier { began, run, from, events }))
}

/// Without where values come from.
fn plain(toml: &str) -> String {
    toml.lines().map(|line| line.split_once("  # ").map_or(line, |(value, _)| value).to_owned() + "\n").collect()
}
