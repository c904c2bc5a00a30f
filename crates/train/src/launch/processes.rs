//! One process per rank: the parent's side and the rank's side.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use events::Event;
use fabric::{Endpoint, ShmWorld};
use spec::{Run, Transport};

use super::folder::complain;
use super::wire::{FabricSpec, FromRank, JobSpec, RANK_COMMAND, ToRank};
use super::{Failure, News, Ranks};
use crate::comm::fabric_options;
use crate::error::TrainError;
use crate::rank::{self, Ended};

pub struct ProcessRanks {
    count: usize,
    news: Receiver<News>,
    inputs: Vec<ChildStdin>,
    children: Vec<Arc<Mutex<Child>>>,
    // Ranks join through this process; kept until the end.
    _shared: Option<ShmWorld>,
}

fn io(what: &'static str, program: &Path) -> impl FnOnce(std::io::Error) -> TrainError {
    let path = program.to_owned();
    move |source| TrainError::Io { what, path, source }
}

/// Starts a process per rank and connects them.
pub fn start(program: &Path, run: &Run, job: &JobSpec) -> Result<ProcessRanks, TrainError> {
    let world = run.layout.world();
    let shared = match run.layout.transport {
        Transport::Tcp => None,
        _ => Some(ShmWorld::create(world as u32, &fabric_options(run))?),
    };
    let fabric = match &shared {
        Some(memory) => FabricSpec::Shm(memory.path()),
        None => FabricSpec::Tcp { token: token()? },
    };
    let (tell, news) = channel();
    let (tell_address, addresses) = channel();
    let mut ranks = ProcessRanks { count: world, news, inputs: Vec::new(), children: Vec::new(), _shared: shared };
    for rank in 0..world {
        let mut child = Command::new(program)
            .arg(RANK_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io("cannot start a rank with", program))?;
        let mut input = child.stdin.take().ok_or_else(|| TrainError::Internal("a rank without input".into()))?;
        let output = child.stdout.take().ok_or_else(|| TrainError::Internal("a rank without output".into()))?;
        let start = ToRank::Start {
            rank: rank as u32,
            world: world as u32,
            parent: std::process::id(),
            job: Box::new(job.clone()),
            fabric: fabric.clone(),
        };
        // A rank that dies at once is reported by its listener.
        let _ = say(&mut input, &start);
        let child = Arc::new(Mutex::new(child));
        ranks.inputs.push(input);
        ranks.children.push(child.clone());
        let (tell, tell_address) = (tell.clone(), tell_address.clone());
        std::thread::Builder::new()
            .name(format!("listen-{rank}"))
            .spawn(move || listen(rank, BufReader::new(output), &child, &tell, &tell_address))
            .map_err(io("cannot listen to a rank of", program))?;
    }
    drop(tell_address);
    if matches!(fabric, FabricSpec::Tcp { .. }) {
        let mut all = vec![String::new(); world];
        // Ends early when a rank dies: its listener then tells why.
        for (rank, address) in addresses.iter().take(world) {
            all[rank] = address;
        }
        for input in &mut ranks.inputs {
            let _ = say(input, &ToRank::Addresses(all.clone()));
        }
    }
    Ok(ranks)
}

/// 32 random bytes from the system.
fn token() -> Result<[u8; 32], TrainError> {
    let mut token = [0; 32];
    let path = Path::new("/dev/urandom");
    let mut file = std::fs::File::open(path).map_err(io("cannot read", path))?;
    std::io::Read::read_exact(&mut file, &mut token).map_err(io("cannot read", path))?;
    Ok(token)
}

fn say<T: serde::Serialize>(to: &mut impl Write, message: &T) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

fn listen(
    rank: usize,
    output: BufReader<impl std::io::Read>,
    child: &Mutex<Child>,
    tell: &Sender<News>,
    tell_address: &Sender<(usize, String)>,
) {
    let mut last = None;
    for line in output.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(FromRank::Listening(address)) => drop(tell_address.send((rank, address))),
            Ok(FromRank::Event(event)) => drop(tell.send(News::Event(event))),
            Ok(FromRank::Done(ended)) => last = Some(Ok(ended)),
            Ok(FromRank::Failed { code, reason }) => last = Some(Err(Failure { code, reason, silent: false })),
            Err(_) => complain(&format!("rank {rank}: {line}")),
        }
    }
    // The output is closed, so the process has ended or is about to.
    let status = child.lock().unwrap_or_else(|e| e.into_inner()).wait();
    let ended = last.unwrap_or_else(|| {
        let reason = match status {
            Ok(status) => match status.signal() {
                Some(signal) => format!("it was ended by signal {signal}{}", known(signal)),
                None => format!("it ended with {status}, its last words are above"),
            },
            Err(e) => format!("its exit status is unknown: {e}"),
        };
        Err(Failure { code: 70, reason, silent: true })
    });
    drop(tell.send(News::Ended(rank, ended)));
}

/// What is known of a signal that ends a process.
fn known(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL: an instruction that this CPU does not have)",
        6 => " (SIGABRT: it gave up, its last words are above)",
        7 => " (SIGBUS: shared memory is used up, or a file became shorter)",
        9 => " (SIGKILL: somebody killed it, or the system did because memory ran out)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

impl Ranks for ProcessRanks {
    fn count(&self) -> usize {
        self.count
    }

    fn news(&self) -> &Receiver<News> {
        &self.news
    }

    fn stop(&mut self) {
        for input in &mut self.inputs {
            let _ = say(input, &ToRank::Stop);
        }
    }

    fn end(&mut self) {
        // A closed input ends a rank that runs; one that stands still must be killed.
        self.inputs.clear();
        for child in &self.children {
            // The listener may hold the lock: then the process is ending by itself.
            if let Ok(mut child) = child.try_lock() {
                let _ = child.kill();
            }
        }
    }
}

impl Drop for ProcessRanks {
    fn drop(&mut self) {
        self.end();
        for child in &self.children {
            // The listener may hold the lock: then the process is ending by itself.
            if let Ok(mut child) = child.try_lock() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// The whole life of a rank process; the exit code.
pub fn rank_main() -> i32 {
    let mut first = String::new();
    let mut input = BufReader::new(std::io::stdin());
    if input.read_line(&mut first).is_err() {
        return 70;
    }
    let output = Arc::new(Mutex::new(std::io::stdout()));
    let report = {
        let output = output.clone();
        move |message: &FromRank| {
            // A closed output: the parent is gone, and with it soon this process.
            let _ = say(&mut *output.lock().unwrap_or_else(|e| e.into_inner()), message);
        }
    };
    match rank_body(&first, input, &report) {
        Ok(ended) => {
            report(&FromRank::Done(ended));
            0
        }
        Err(e) => {
            report(&FromRank::Failed { code: e.exit_code(), reason: e.to_string() });
            e.exit_code()
        }
    }
}

fn rank_body(
    first: &str,
    mut input: BufReader<std::io::Stdin>,
    report: &dyn Fn(&FromRank),
) -> Result<Ended, TrainError> {
    let internal = |e: &dyn std::fmt::Display| TrainError::Internal(format!("the parent's words are unclear: {e}"));
    let ToRank::Start { rank, world, parent, job, fabric } = serde_json::from_str(first).map_err(|e| internal(&e))?
    else {
        return Err(internal(&"expected the start"));
    };
    die_with_parent(parent)?;
    let stop = Arc::new(AtomicBool::new(false));
    let job = job.job(None, stop.clone())?;
    let options = fabric_options(&job.run);
    let endpoint: Endpoint = match fabric {
        FabricSpec::Shm(path) => ShmWorld::attach_path(&path, rank, world, &options)?,
        FabricSpec::Tcp { token } => {
            let (handle, address) = fabric::TcpListenerHandle::bind(std::net::Ipv4Addr::LOCALHOST.into())?;
            report(&FromRank::Listening(address.to_string()));
            let mut line = String::new();
            input.read_line(&mut line).map_err(|e| internal(&e))?;
            let Ok(ToRank::Addresses(all)) = serde_json::from_str(&line) else {
                return Err(internal(&"expected the addresses"));
            };
            let all = all.iter().map(|a| a.parse()).collect::<Result<Vec<_>, _>>().map_err(|e| internal(&e))?;
            handle.connect(rank, &all, &token, &options)?
        }
    };
    let asked = stop.clone();
    std::thread::spawn(move || {
        for line in input.lines().map_while(Result::ok) {
            if matches!(serde_json::from_str(&line), Ok(ToRank::Stop)) {
                asked.store(true, Ordering::Relaxed);
            }
        }
        // The parent closed our input: it is gone, or wants us gone.
        std::process::exit(70);
    });
    rank::run(&job, endpoint, &|event: Event| report(&FromRank::Event(event)))
}

/// The kernel ends this process when the parent dies, however it dies.
fn die_with_parent(parent: u32) -> Result<(), TrainError> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| TrainError::Internal(format!("cannot bind this process to its parent: {e}")))?;
    // It may have died before that.
    let alive = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent);
    if alive { Ok(()) } else { Err(TrainError::Internal("the parent is gone".into())) }
}
