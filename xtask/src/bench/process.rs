//! Runs a program to its end, or in rounds, within a limit.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Pause between looks at a program: it must not take time from what is measured.
const PAUSE: Duration = Duration::from_millis(50);
/// Time that a program in rounds has to end by itself.
const GRACE: Duration = Duration::from_secs(10);

/// What `command` wrote to standard output.
///
/// # Errors
/// It cannot start, ends with another code than 0 (with its last words), or runs for longer than `limit`.
pub fn output(command: &mut Command, limit: Duration) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| format!("cannot start {name}: {e}"))?;
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let began = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|e| format!("cannot wait for {name}: {e}"))? {
            Some(status) => break status,
            None if began.elapsed() > limit => return Err(end(&mut child, &name, limit)),
            None => thread::sleep(PAUSE),
        }
    };
    let (stdout, stderr) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
    if status.success() {
        return Ok(stdout);
    }
    let words = last_words(&stderr);
    Err(format!("it ended with {status}: {words}"))
}

/// A program that answers each line of its input with an object on its output.
pub struct Session {
    child: Child,
    input: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    errors: Option<thread::JoinHandle<String>>,
}

impl Session {
    /// Starts `command`.
    ///
    /// # Errors
    /// It cannot start.
    pub fn start(command: &mut Command) -> Result<Self, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("cannot start {name}: {e}"))?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), reader(child.stderr.take()));
        let (said, lines) = mpsc::channel();
        thread::spawn(move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(Result::ok);
            lines.take_while(|line| said.send(line.clone()).is_ok()).for_each(drop);
        });
        Ok(Self { child, input, lines, errors: Some(errors) })
    }

    /// Asks for one more round.
    ///
    /// # Errors
    /// The program is gone: its last words.
    pub fn ask(&mut self, limit: Duration) -> Result<String, String> {
        let told =
            self.input.as_mut().is_some_and(|input| input.write_all(b"go\n").and_then(|()| input.flush()).is_ok());
        if told { self.object(limit) } else { Err(self.gone()) }
    }

    /// The next line of its output that is an object; libraries print lines of their own.
    ///
    /// # Errors
    /// The program ended, or `limit` is over.
    pub fn object(&mut self, limit: Duration) -> Result<String, String> {
        let until = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with('{') => return Ok(line),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => return Err(format!("no answer within {} s", limit.as_secs())),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(self.gone()),
            }
        }
    }

    fn gone(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let words = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        format!("it ended: {}", last_words(&words))
    }
}

impl Drop for Session {
    /// The end of its input tells a healthy program to end; one that does not is ended.
    fn drop(&mut self) {
        self.input = None;
        let began = Instant::now();
        while began.elapsed() < GRACE {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(PAUSE),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn end(child: &mut Child, name: &str, limit: Duration) -> String {
    // Its ranks die with it.
    let _ = child.kill();
    let _ = child.wait();
    format!("{name} was ended: it ran for longer than {} s", limit.as_secs())
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The last line that names an error, or else the last one that says something.
fn last_words(text: &str) -> &str {
    let lines = || text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    lines()
        .find(|line| line.contains("Error") || line.starts_with("error"))
        .or(lines().next())
        .unwrap_or("it said nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<String, String> {
        output(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn output_is_given_and_failures_say_why() {
        let limit = Duration::from_secs(20);
        assert_eq!(shell("echo a; echo b >&2", limit).unwrap(), "a\n");
        let failed = shell("echo first >&2; echo the cause >&2; echo; exit 3", limit).unwrap_err();
        assert!(failed.contains("the cause") && failed.contains('3'), "{failed}");
        let named = shell("echo KeyError: x >&2; echo bye >&2; exit 1", limit).unwrap_err();
        assert!(named.contains("KeyError: x"), "{named}");
        let absent = output(&mut Command::new("no-such-program-here"), limit).unwrap_err();
        assert!(absent.contains("cannot start no-such-program-here"), "{absent}");
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let began = Instant::now();
        let failed = shell("exec sleep 100", Duration::from_millis(200)).unwrap_err();
        assert!(failed.contains("longer than") && began.elapsed() < Duration::from_secs(50), "{failed}");
    }

    #[test]
    fn rounds_are_asked_for_one_by_one() {
        let limit = Duration::from_secs(20);
        let script = "echo noise; echo '{\"loss\": 1}'; while read _; do echo '{\"rate\": 2}'; done; echo bye >&2";
        let mut session = Session::start(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(session.object(limit).unwrap(), "{\"loss\": 1}");
        for _ in 0..2 {
            assert_eq!(session.ask(limit).unwrap(), "{\"rate\": 2}");
        }
        let mut broken = Session::start(Command::new("sh").args(["-c", "echo the cause >&2; exit 1"])).unwrap();
        let why = broken.object(limit).unwrap_err();
        assert!(why.contains("the cause"), "{why}");
        let mut silent = Session::start(Command::new("sh").args(["-c", "read _"])).unwrap();
        assert!(silent.object(Duration::from_millis(50)).unwrap_err().contains("no answer"));
    }
}
