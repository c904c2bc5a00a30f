//! The agent of this machine, in this process.

use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use fabric::{FabricOptions, ShmWorld};
use policy::Process;
use rustix::process::Signal;

use crate::agent::{Agents, News, token};
use crate::processes::Processes;
use crate::wire::{FabricSpec, ToRank};

/// Name of the host of a [`LocalAgent`].
pub const HOST: &str = "local";

/// Starts the processes of this machine. Ends them when it is dropped.
pub struct LocalAgent {
    processes: Processes,
    tell: Sender<News>,
    news: Receiver<News>,
    /// Ranks join through this process: the memory of the newest worlds is kept.
    memory: Vec<ShmWorld>,
}

impl LocalAgent {
    /// Runs `program` as ranks, at most `slots` at once; they listen on loopback.
    pub fn new(program: PathBuf, slots: usize) -> Self {
        let (tell, news) = channel();
        drop(tell.send(News::Joined { host: HOST.into(), slots }));
        Self { processes: Processes::new(program, tell.clone()), tell, news, memory: Vec::new() }
    }
}

impl Agents for LocalAgent {
    fn news(&self) -> &Receiver<News> {
        &self.news
    }

    fn slots(&mut self, slots: usize) {
        drop(self.tell.send(News::Joined { host: HOST.into(), slots }));
    }

    fn program(&mut self) -> Option<&mut PathBuf> {
        Some(&mut self.processes.program)
    }

    fn spawn(&mut self, _host: &str, process: Process, beat_ms: u64, job: &serde_json::Value) {
        self.processes.spawn(process, beat_ms, job);
    }

    fn say(&mut self, process: Process, word: &ToRank) {
        self.processes.say(process, word);
    }

    fn kill(&mut self, process: Process) {
        self.processes.kill(process);
    }

    fn stop(&mut self, process: Process) {
        self.processes.signal(process, Signal::STOP);
    }

    fn strike(&mut self, process: Process) {
        self.processes.signal(process, Signal::KILL);
    }

    fn fabric(
        &mut self,
        processes: &[Process],
        shared_memory: bool,
        options: &FabricOptions,
    ) -> io::Result<Vec<FabricSpec>> {
        let spec = if shared_memory {
            let world = ShmWorld::create(processes.len() as u32, options).map_err(io::Error::other)?;
            let spec = FabricSpec::Shm(world.path());
            // Ranks of the world before may still be attaching; of older ones none.
            self.memory.truncate(1);
            self.memory.insert(0, world);
            spec
        } else {
            FabricSpec::Tcp { token: token()?, bind: Ipv4Addr::LOCALHOST.into() }
        };
        Ok(vec![spec; processes.len()])
    }
}
