//! Runs a program to its end, within a limit.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Pause between looks at a program: it must not take time from what is measured.
const PAUSE: Duration = Duration::from_millis(50);

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
}
