//! One controller at a time: a file in the run's folder that its holder renews, and an epoch that ascends with every holder.
//!
//! Clocks of two machines are never compared: who wants the lease watches it, and takes it when it did not change for a whole term
//! of his own clock. A holder that could not renew for a term looks before it acts. On one machine the folder's lock says more:
//! who has it knows that an earlier holder on this machine is gone. Agents obey the highest epoch that they have seen.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use events::regular;
use serde::{Deserialize, Serialize};

use crate::agent::token;

/// How long a lease lives that is not renewed.
pub const TERM: Duration = Duration::from_secs(3);
/// How often who waits looks.
const LOOK: Duration = Duration::from_millis(50);

/// The file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Ascends with every holder.
    pub epoch: u64,
    /// For the person: process and address.
    pub holder: String,
    /// Of this holder alone.
    pub nonce: String,
    /// The machine since its start.
    pub boot: String,
    /// Renewals.
    pub count: u64,
    /// Its holder gave it back: nobody waits for it.
    #[serde(default)]
    pub free: bool,
}

/// What is to be done about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It can be taken, with this epoch.
    Take(u64),
    /// Its holder may be at work.
    Wait,
}

/// `seen`: the lease, unchanged for so long; `boot`: this machine, on which the folder's lock is held by who asks.
pub fn judge(seen: Option<&Lease>, unchanged: Duration, boot: &str) -> Verdict {
    match seen {
        None => Verdict::Take(1),
        Some(lease) if lease.free || lease.boot == boot || unchanged >= TERM => Verdict::Take(lease.epoch + 1),
        Some(_) => Verdict::Wait,
    }
}

/// A lease that is held.
#[derive(Debug)]
pub struct Holding {
    path: PathBuf,
    lease: Lease,
    renewed: Instant,
    /// That it cannot be written was told.
    told: bool,
}

impl Holding {
    /// Takes the lease at `path` for `holder`; waits for it where another machine's controller may be at work, while `go_on` says so.
    ///
    /// # Errors
    /// What the system refuses; that `go_on` did not want to wait longer.
    pub fn take(path: &Path, holder: &str, go_on: &mut dyn FnMut(&Lease) -> bool) -> io::Result<Self> {
        let boot = boot();
        let mut seen = read(path)?;
        let mut since = Instant::now();
        loop {
            if let Verdict::Take(epoch) = judge(seen.as_ref(), since.elapsed(), &boot) {
                let nonce = token()?[..8].iter().map(|byte| format!("{byte:02x}")).collect();
                let lease = Lease { epoch, holder: holder.into(), nonce, boot: boot.clone(), count: 0, free: false };
                let mut holding = Self { path: path.into(), lease, renewed: Instant::now(), told: false };
                holding.write()?;
                // Another one may have taken it in the same moment: the last one has it.
                if seen.as_ref().is_some_and(|lease| lease.boot != boot) {
                    std::thread::sleep(2 * LOOK);
                }
                if read(path)?.is_some_and(|now| now.nonce == holding.lease.nonce) {
                    return Ok(holding);
                }
            }
            if let Some(lease) = &seen
                && !go_on(lease)
            {
                return Err(io::Error::other(format!("the lease is held by {}", lease.holder)));
            }
            std::thread::sleep(LOOK);
            let now = read(path)?;
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
        }
    }

    /// Its epoch.
    pub fn epoch(&self) -> u64 {
        self.lease.epoch
    }

    /// Renews it when it is time; to be called before every act. Who cannot write it but reads it as its own goes on: whoever takes it
    /// meanwhile has a higher epoch, which agents obey, and is seen here at the next look. Returns what the person should know of
    /// that, once.
    ///
    /// # Errors
    /// Who has it now; what the system refuses for a whole term.
    pub fn keep(&mut self) -> Result<Option<String>, String> {
        if self.renewed.elapsed() < TERM / 3 {
            return Ok(None);
        }
        match read(&self.path) {
            Ok(Some(lease)) if lease.nonce != self.lease.nonce => {
                Err(format!("{} has taken over with epoch {}", lease.holder, lease.epoch))
            }
            Ok(None) => Err("the lease was removed".into()),
            Ok(Some(_)) => {
                self.lease.count += 1;
                match self.write() {
                    Ok(()) => {
                        self.told = false;
                        Ok(None)
                    }
                    Err(_) if std::mem::replace(&mut self.told, true) => Ok(None),
                    Err(e) => Ok(Some(format!(
                        "the lease cannot be renewed ({e}); the run goes on as long as no other controller takes it"
                    ))),
                }
            }
            Err(e) if self.renewed.elapsed() >= TERM => Err(format!("the lease cannot be read: {e}")),
            Err(_) => Ok(None),
        }
    }

    /// Gives it back: the next controller need not wait.
    pub fn give_back(mut self) {
        if read(&self.path).is_ok_and(|lease| lease.is_some_and(|lease| lease.nonce == self.lease.nonce)) {
            self.lease.free = true;
            let _ = self.write();
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let draft = self.path.with_extension(&self.lease.nonce);
        fs::write(&draft, text(&self.lease))?;
        fs::rename(&draft, &self.path)?;
        self.renewed = Instant::now();
        Ok(())
    }
}

/// Who has, or had, the lease at `path`, for the person.
pub fn holder(path: &Path) -> String {
    match read(path) {
        Ok(Some(lease)) => lease.holder,
        _ => "another run".into(),
    }
}

fn text(lease: &Lease) -> String {
    serde_json::to_string(lease).unwrap_or_default() + "\n"
}

fn read(path: &Path) -> io::Result<Option<Lease>> {
    match regular::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|e| {
            io::Error::other(format!("{} is no lease ({e}); remove it if no controller runs", path.display()))
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// This machine, since its start.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(boot: &str) -> Lease {
        Lease { epoch: 4, holder: "h".into(), nonce: "n".into(), boot: boot.into(), count: 9, free: false }
    }

    #[test]
    fn a_lease_that_lives_is_waited_for_and_epochs_ascend() {
        assert_eq!(judge(None, Duration::ZERO, "here"), Verdict::Take(1));
        assert_eq!(judge(Some(&lease("there")), TERM - Duration::from_millis(1), "here"), Verdict::Wait);
        assert_eq!(judge(Some(&lease("there")), TERM, "here"), Verdict::Take(5));
        // The folder's lock is held: its holder on this machine is gone.
        assert_eq!(judge(Some(&lease("here")), Duration::ZERO, "here"), Verdict::Take(5));
        let free = Lease { free: true, ..lease("there") };
        assert_eq!(judge(Some(&free), Duration::ZERO, "here"), Verdict::Take(5));
    }

    #[test]
    fn who_lost_it_is_told_and_who_gave_it_back_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lease");
        let mut first = Holding::take(&path, "one", &mut |_| panic!("nothing to wait for")).unwrap();
        assert_eq!((first.epoch(), first.keep()), (1, Ok(None)));
        let second = Holding::take(&path, "two", &mut |_| panic!("nothing to wait for")).unwrap();
        assert_eq!(second.epoch(), 2);
        first.renewed = Instant::now().checked_sub(TERM).unwrap();
        assert_eq!(first.keep(), Err("two has taken over with epoch 2".into()));
        // It does not write into what is another's.
        first.give_back();
        assert_eq!(read(&path).unwrap().unwrap().holder, "two");
        second.give_back();
        let given = read(&path).unwrap().unwrap();
        assert!(given.free);
        // As another machine's controller finds it.
        fs::write(&path, text(&Lease { boot: "there".into(), ..given })).unwrap();
        assert_eq!(Holding::take(&path, "three", &mut |_| false).unwrap().epoch(), 3);
    }

    #[test]
    fn who_cannot_write_it_goes_on_until_another_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lease");
        let mut holding = Holding::take(&path, "one", &mut |_| true).unwrap();
        // What it would write first is in the way: as good as a folder that became read-only.
        let draft = path.with_extension(&holding.lease.nonce);
        fs::create_dir(&draft).unwrap();
        holding.renewed = Instant::now().checked_sub(2 * TERM).unwrap();
        assert!(holding.keep().unwrap().unwrap().contains("cannot be renewed"));
        assert_eq!(holding.keep(), Ok(None), "it is said once");
        let second = Holding::take(&path, "two", &mut |_| true).unwrap();
        assert_eq!(holding.keep(), Err("two has taken over with epoch 2".into()));
        second.give_back();
    }

    #[test]
    fn a_living_holder_of_another_machine_keeps_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lease");
        fs::write(&path, text(&lease("there"))).unwrap();
        let mut looks = 0;
        let error = Holding::take(&path, "me", &mut |lease| {
            assert_eq!(lease.holder, "h");
            looks += 1;
            looks < 3
        });
        assert!(error.unwrap_err().to_string().contains("held by h"));
        assert_eq!(read(&path).unwrap(), Some(lease("there")));
        fs::write(&path, "{").unwrap();
        assert!(Holding::take(&path, "me", &mut |_| true).unwrap_err().to_string().contains("no lease"));
    }
}
