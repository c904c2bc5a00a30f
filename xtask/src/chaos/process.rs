//! A process of a run on several hosts, and what it says.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Nothing here is silent for so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Killed when dropped.
pub struct Process {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Process {
    /// Starts it.
    pub fn start(mut command: Command) -> Result<Self, String> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("cannot start {command:?}: {e}"))?;
        let (tell, lines) = channel();
        hear(child.stdout.take().expect("piped"), tell.clone());
        hear(child.stderr.take().expect("piped"), tell);
        Ok(Self { child, lines, seen: Vec::new() })
    }

    /// The next line; none: it has ended.
    pub fn line(&mut self) -> Result<Option<String>, String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                self.seen.push(line.clone());
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(self.last_words("it stands still")),
        }
    }

    /// Lines that were said and not read yet.
    pub fn said(&mut self) -> Vec<String> {
        let said: Vec<_> = self.lines.try_iter().collect();
        self.seen.extend(said.iter().cloned());
        said
    }

    /// Waits for a line that `wanted` accepts.
    pub fn wait(&mut self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<(), String> {
        while let Some(line) = self.line()? {
            if wanted(&line) {
                return Ok(());
            }
        }
        Err(self.last_words(&format!("{what} does not come")))
    }

    /// What it said last that `of` finds something in.
    pub fn last<T>(&self, of: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.seen.iter().rev().find_map(|line| of(line))
    }

    /// Sends it a signal, such as `STOP`.
    pub fn signal(&self, signal: &str) -> Result<(), String> {
        send(self.child.id(), signal)
    }

    /// Ends it with SIGKILL; what it still had said is read.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.seen.extend(self.lines.iter());
    }

    /// Waits for its end, at most `limit`.
    pub fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                _ if Instant::now() > deadline => return None,
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// `what`, and what it said last.
    pub fn last_words(&self, what: &str) -> String {
        let from = self.seen.len().saturating_sub(16);
        format!("{what}; its last words:\n    {}", self.seen[from..].join("\n    "))
    }
}

/// Sends `signal` to process `pid`; that it is gone is no error.
pub fn send(pid: u32, signal: &str) -> Result<(), String> {
    let sent = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).stderr(Stdio::null()).status();
    sent.map(drop).map_err(|e| format!("cannot send a signal: {e}"))
}

fn hear(output: impl std::io::Read + Send + 'static, tell: Sender<String>) {
    std::thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).all(|line| tell.send(line).is_ok())
    });
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
