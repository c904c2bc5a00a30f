//! Rank processes of this machine: started, told, watched and ended. They are children of this process and die with it.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use policy::Process;
use rustix::process::{Pid, Signal, kill_process};

use crate::agent::{Heard, News};
use crate::wire::{RANK_COMMAND, ToRank};

/// How often the agent looks whether a process stands still.
const LOOK: Duration = Duration::from_millis(100);

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

struct Running {
    /// What it is told goes through a thread of its own: one that stands still reads nothing, and nobody waits for it.
    words: Sender<Vec<u8>>,
    child: Arc<Mutex<Child>>,
    pid: u32,
}

/// See the module. They die, too, when the thread that started them ends.
pub struct Processes {
    /// What new ones are started from.
    pub(crate) program: PathBuf,
    running: Arc<Mutex<HashMap<Process, Running>>>,
    tell: Sender<News>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Processes {
    /// Runs `program` with [`RANK_COMMAND`]; what becomes of them goes to `tell`.
    pub fn new(program: PathBuf, tell: Sender<News>) -> Self {
        let running: Arc<Mutex<HashMap<Process, Running>>> = Arc::default();
        watch(Arc::downgrade(&running), tell.clone());
        Self { program, running, tell }
    }

    /// Starts a process and says hello.
    pub fn spawn(&mut self, process: Process, beat_ms: u64, job: &serde_json::Value) {
        if let Err(e) = self.start(process, beat_ms, job) {
            // It may be there, and hear nothing: a thread that speaks to it could not be started.
            self.kill(process);
            let reason = format!("{}: {e}", self.program.display());
            drop(self.tell.send(News::Process(process, Heard::NotStarted(reason))));
        }
    }

    /// Says something to a process; one that is gone hears nothing.
    pub fn say(&mut self, process: Process, word: &ToRank) {
        let Ok(mut line) = serde_json::to_vec(word) else { return };
        line.push(b'\n');
        if let Some(running) = lock(&self.running).get(&process) {
            drop(running.words.send(line));
        }
    }

    /// Ends a process at once, also one that stands still.
    pub fn kill(&mut self, process: Process) {
        self.signal(process, Signal::KILL);
        // It hears nothing more, and is not looked at.
        lock(&self.running).remove(&process);
    }

    fn start(&mut self, process: Process, beat_ms: u64, job: &serde_json::Value) -> io::Result<()> {
        let mut child = Command::new(&self.program)
            .arg(RANK_COMMAND)
            .env(TUNABLES, tunables(std::env::var(TUNABLES).ok()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().ok_or_else(|| io::Error::other("a rank without input"))?;
        let output = child.stdout.take().ok_or_else(|| io::Error::other("a rank without output"))?;
        let pid = child.id();
        let child = Arc::new(Mutex::new(child));
        let (words, to_say) = channel::<Vec<u8>>();
        lock(&self.running).insert(process, Running { words, child: child.clone(), pid });
        let named = |what: &str| std::thread::Builder::new().name(format!("{what}-{}", process.0));
        // A closed input is the order to end; a rank that is gone hears nothing.
        named("tell").spawn(move || to_say.iter().try_for_each(|line| input.write_all(&line)))?;
        let tell = self.tell.clone();
        named("hear").spawn(move || hear(process, BufReader::new(output), &child, &tell))?;
        let hello = ToRank::Hello { parent: std::process::id(), beat_ms, job: job.clone() };
        self.say(process, &hello);
        self.say(process, &ToRank::Wait);
        Ok(())
    }

    /// Sends a signal to a process that runs.
    pub fn signal(&mut self, process: Process, signal: Signal) {
        if let Some(running) = lock(&self.running).get(&process) {
            // While the lock is free nobody has collected it, so the number is still its own.
            if let Ok(mut child) = running.child.try_lock()
                && matches!(child.try_wait(), Ok(None))
                && let Some(pid) = Pid::from_raw(running.pid as i32)
            {
                let _ = kill_process(pid, signal);
            }
        }
    }
}

/// Reports processes that stand still, while the agent lives.
fn watch(running: std::sync::Weak<Mutex<HashMap<Process, Running>>>, tell: Sender<News>) {
    let mut since: HashMap<Process, Instant> = HashMap::new();
    let look = move || {
        while let Some(running) = running.upgrade() {
            let pids: Vec<_> = lock(&running).iter().map(|(process, r)| (*process, r.pid)).collect();
            drop(running);
            for (process, pid) in pids {
                if stands_still(pid) {
                    let ms = since.entry(process).or_insert_with(Instant::now).elapsed().as_millis() as u64;
                    if ms > 0 && tell.send(News::Process(process, Heard::Stopped(ms))).is_err() {
                        return;
                    }
                } else {
                    since.remove(&process);
                }
            }
            std::thread::sleep(LOOK);
        }
    };
    // Without a thread to spare, who stands still is noticed by its silence.
    drop(std::thread::Builder::new().name("stopped".into()).spawn(look));
}

/// Stopped by a signal, as `/proc` shows it (`T`; a debugger's `t` is no fault).
fn stands_still(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

fn hear(process: Process, output: BufReader<impl io::Read>, child: &Mutex<Child>, tell: &Sender<News>) {
    for line in output.lines().map_while(Result::ok) {
        let heard = match serde_json::from_str(&line) {
            Ok(word) => Heard::Said(word),
            Err(_) => Heard::Line(line),
        };
        if tell.send(News::Process(process, heard)).is_err() {
            break;
        }
    }
    // The output is closed, so the process has ended or is about to. Looking again and again leaves the lock free for who
    // must kill one that closed its output and goes on.
    let (how, by_itself) = loop {
        match lock(child).try_wait() {
            Ok(Some(status)) => break (ended(status), status.code().is_some()),
            Ok(None) => {}
            Err(e) => break (format!("its exit status is unknown: {e}"), false),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    drop(tell.send(News::Process(process, Heard::Exited { how, by_itself })));
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("it was ended by signal {signal}{}", known(signal)),
        None => format!("it ended with {status}, its last words are above"),
    }
}

/// What is known of a signal that ends a process.
fn known(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        4 => " (SIGILL: an instruction that this CPU does not have)",
        6 => " (SIGABRT: it gave up, its last words are above)",
        7 => " (SIGBUS: shared memory is used up, or a file became shorter)",
        9 => " (SIGKILL: somebody killed it, or the system did because memory ran out)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let running = std::mem::take(&mut *lock(&self.running));
        // A closed input ends a rank that runs; one that stands still must be killed.
        let mut children = Vec::new();
        for Running { words, child, .. } in running.into_values() {
            drop(words);
            children.push(child);
        }
        for child in children {
            let mut child = lock(&child);
            let _ = child.kill();
            let _ = child.wait();
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
