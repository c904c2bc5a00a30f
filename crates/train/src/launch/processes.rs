//! One process per rank: the parent's side.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use control::wire::{Assignment, Cause, FabricSpec, FromRank, Origin, RANK_COMMAND, ToRank};
use fabric::ShmWorld;
use spec::{Run, Transport};

use super::folder::complain;
use super::wire::{JobSpec, Part};
use super::{Failure, News, Ranks};
use crate::comm::fabric_options;
use crate::error::TrainError;

/// The one world of a run.
const GENERATION: u64 = 1;
/// Between two signs of life.
const BEAT_MS: u64 = 500;

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
pub fn start(
    program: &Path,
    run: &Run,
    job: &JobSpec,
    part: &dyn Fn(usize) -> Part,
    resume: Option<PathBuf>,
) -> Result<ProcessRanks, TrainError> {
    let world = run.layout.world();
    let shared = match run.layout.transport {
        Transport::Tcp => None,
        _ => Some(ShmWorld::create(world as u32, &fabric_options(run, GENERATION))?),
    };
    let fabric = match &shared {
        Some(memory) => FabricSpec::Shm(memory.path()),
        None => FabricSpec::Tcp { token: token()?, bind: std::net::Ipv4Addr::LOCALHOST.into() },
    };
    let (tell, news) = channel();
    let (tell_address, addresses) = channel();
    let mut ranks = ProcessRanks { count: world, news, inputs: Vec::new(), children: Vec::new(), _shared: shared };
    for rank in 0..world {
        let mut child = Command::new(program)
            .arg(RANK_COMMAND)
            .env(TUNABLES, tunables(std::env::var(TUNABLES).ok()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io("cannot start a rank with", program))?;
        let mut input = child.stdin.take().ok_or_else(|| TrainError::Internal("a rank without input".into()))?;
        let output = child.stdout.take().ok_or_else(|| TrainError::Internal("a rank without output".into()))?;
        let job = serde_json::to_value(job).map_err(|e| TrainError::Internal(e.to_string()))?;
        let Part { run_toml, cores, faults } = part(rank);
        let assignment = Assignment {
            generation: GENERATION,
            rank: rank as u32,
            world: world as u32,
            run_toml,
            fabric: fabric.clone(),
            cores,
            origin: resume.clone().map_or(Origin::Fresh, Origin::Disk),
            faults,
        };
        // A rank that dies at once is reported by its listener.
        let _ = say(&mut input, &ToRank::Hello { parent: std::process::id(), beat_ms: BEAT_MS, job });
        let _ = say(&mut input, &ToRank::Assign(Box::new(assignment)));
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
            let _ = say(input, &ToRank::Addresses { generation: GENERATION, addresses: all.clone() });
        }
    }
    Ok(ranks)
}

/// Where glibc reads how its memory allocator shall work; nothing to other libraries.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// What a rank's allocator is told: large pages for large buffers. A step walks through more memory than the tables of
/// small pages reach at once; it costs a third of the speed of a model of 30 million parameters. What the person has set
/// stays.
fn tunables(set: Option<String>) -> String {
    const LARGE_PAGES: &str = "glibc.malloc.hugetlb";
    match set {
        Some(set) if set.contains(LARGE_PAGES) => set,
        Some(set) if !set.is_empty() => format!("{set}:{LARGE_PAGES}=1"),
        _ => format!("{LARGE_PAGES}=1"),
    }
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
            Ok(FromRank::Listening { address, .. }) => drop(tell_address.send((rank, address))),
            Ok(FromRank::Event(event)) => drop(tell.send(News::Event(event))),
            Ok(FromRank::Done(ended)) => last = serde_json::from_value(ended).ok().map(Ok),
            // It would live on in another world; here it has had its last.
            Ok(FromRank::Interrupted { cause, .. }) => {
                let failure = Failure { code: 70, reason: words(cause), silent: false };
                return drop(tell.send(News::Ended(rank, Err(failure))));
            }
            Ok(FromRank::Failed { code, reason }) => last = Some(Err(Failure { code, reason, silent: false })),
            Ok(_) => {}
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

/// Why a world ended, in the words of who was in it.
fn words(cause: Cause) -> String {
    match cause {
        Cause::Aborted => "it was told to leave".into(),
        Cause::Corrupt { ranks } => format!("state of ranks {ranks:?} is not what they wrote"),
        Cause::PeerGone { reason, .. }
        | Cause::NotConnected { reason }
        | Cause::Deadline { reason, .. }
        | Cause::BadMessage { reason, .. }
        | Cause::NotFinite { reason, .. }
        | Cause::Disagree { reason }
        | Cause::Lost { reason } => reason,
    }
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

#[cfg(test)]
mod tests {
    use super::tunables;

    #[test]
    fn ranks_get_large_pages_unless_the_person_said_otherwise() {
        assert_eq!(tunables(None), "glibc.malloc.hugetlb=1");
        assert_eq!(tunables(Some("glibc.malloc.check=3".into())), "glibc.malloc.check=3:glibc.malloc.hugetlb=1");
        assert_eq!(tunables(Some("glibc.malloc.hugetlb=0".into())), "glibc.malloc.hugetlb=0");
    }
}
