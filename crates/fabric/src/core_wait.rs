//! How long a thread could have run and had no core: the system counts it (`/proc/thread-self/schedstat`, second number).
//!
//! On a busy machine that time is no work of the thread, and no sign that its host is slow.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::ThreadId;

/// Reads it, for the thread that asks.
#[derive(Debug, Default)]
pub struct CoreWait {
    open: Option<(ThreadId, Option<File>)>,
}

impl CoreWait {
    /// Nanoseconds so far; 0 where the system does not count them.
    pub fn ns(&mut self) -> u64 {
        let thread = std::thread::current().id();
        if self.open.as_ref().is_none_or(|(of, _)| *of != thread) {
            self.open = Some((thread, File::open("/proc/thread-self/schedstat").ok()));
        }
        let file = self.open.as_ref().and_then(|(_, file)| file.as_ref());
        let mut line = [0; 80];
        let read = file.and_then(|file| file.read_at(&mut line, 0).ok()).unwrap_or(0);
        parse(&line[..read])
    }
}

fn parse(line: &[u8]) -> u64 {
    let text = std::str::from_utf8(line).unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_number_counts() {
        assert_eq!(parse(b"307461657 342053191 202\n"), 342_053_191);
        assert_eq!((parse(b""), parse(b"12"), parse(b"a b c")), (0, 0, 0));
        let mut wait = CoreWait::default();
        let before = wait.ns();
        assert!(wait.ns() >= before);
    }
}
