//! A disk that fills up, fails, or a process that dies at any point of a write: the older
//! checkpoint stays whole, and there is no half checkpoint.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use checkpoint::{
    Checkpoint, CheckpointError, Disk, FileEntry, MANIFEST, Storage, StorageFile, commit_to, newest, prune,
    write_pieces_to,
};
use common::State;

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// No space after so many bytes; the write that hits it is torn.
    Full(u64),
    /// The operation of this number fails, later ones work.
    Once(usize),
    /// The process dies at the operation of this number: nothing works from there on.
    Dies(usize),
}

struct Log {
    fault: Fault,
    bytes: Cell<u64>,
    operations: Cell<usize>,
    /// Files whose bytes, and folders whose names, are not on stable storage yet.
    unsynced: RefCell<HashSet<PathBuf>>,
}

impl Log {
    fn step(&self) -> io::Result<()> {
        let now = self.operations.replace(self.operations.get() + 1);
        match self.fault {
            Fault::Once(at) if now == at => Err(io::Error::other("injected")),
            Fault::Dies(at) if now >= at => Err(io::Error::other("dead")),
            _ => Ok(()),
        }
    }
}

/// The file system with a fault, which also checks that nothing is renamed before it is synced.
struct Faulty(Rc<Log>);

impl Faulty {
    fn new(fault: Fault) -> Self {
        let (bytes, operations, unsynced) = (Cell::default(), Cell::default(), RefCell::default());
        Self(Rc::new(Log { fault, bytes, operations, unsynced }))
    }
}

struct FaultyFile(Box<dyn StorageFile>, Rc<Log>, PathBuf);

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.unsynced.borrow_mut().insert(self.2.clone());
        if let Err(error) = self.1.step() {
            let _ = self.0.write(&bytes[..bytes.len() / 2]);
            return Err(error);
        }
        let room = match self.1.fault {
            Fault::Full(limit) => limit - self.1.bytes.get(),
            _ => u64::MAX,
        };
        let len = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        if len == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.1.bytes.set(self.1.bytes.get() + len as u64);
        self.0.write(&bytes[..len])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.step()?;
        self.1.unsynced.borrow_mut().remove(&self.2);
        Ok(())
    }
}

impl Storage for Faulty {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.step()?;
        Disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.0.step()?;
        Ok(Box::new(FaultyFile(Disk.create(path)?, self.0.clone(), path.into())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.step()?;
        let mut unsynced = self.0.unsynced.borrow_mut();
        assert!(!unsynced.contains(from), "{} renamed before it was synced", from.display());
        let folder = to.parent().unwrap().to_path_buf();
        if to.ends_with(MANIFEST) {
            assert!(!unsynced.contains(&folder), "the manifest came before the names of the shards were synced");
        }
        unsynced.insert(folder);
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.step()?;
        Disk.remove(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.step()?;
        self.0.unsynced.borrow_mut().remove(path);
        Ok(())
    }
}

/// No fault; like all of these, it does not wait for the disk.
fn sound() -> Faulty {
    Faulty::new(Fault::Once(usize::MAX))
}

fn small() -> State {
    let model = spec::Model { layers: 1, hidden: 16, ffn: 32, vocab: 2100, head_dim: 4, ..common::model() };
    State::of(&model, 2, 3)
}

/// Two ranks write, one commits.
fn save(storage: &dyn Storage, state: &State, root: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let pieces = state.pieces();
    let (left, right) = pieces.split_at(pieces.len() / 2);
    let mut files: Vec<FileEntry> = write_pieces_to(storage, root, step, &state.tensors, state.tp, left)?;
    files.extend(write_pieces_to(storage, root, step, &state.tensors, state.tp, right)?);
    commit_to(storage, root, &state.tensors, &state.meta(step), files)
}

/// The checkpoint of step 1 is whole.
fn first_is_whole(root: &Path) {
    let first = Checkpoint::open(&checkpoint::step_dir(root, 1)).unwrap();
    let report = first.verify();
    assert!(report.good(), "{:?}", report.problems);
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_full_disk_leaves_the_older_checkpoint_and_no_debris() {
    let state = small();
    let root = tempfile::tempdir().unwrap();
    save(&sound(), &state, root.path(), 1).unwrap();
    let all = Faulty::new(Fault::Full(u64::MAX));
    save(&all, &state, root.path(), 2).unwrap();
    let total = all.0.bytes.get();
    checkpoint::discard(root.path(), 2).unwrap();

    let limits = (0..total).step_by(total as usize / 40).chain([total - 1]);
    for limit in limits {
        let error = save(&Faulty::new(Fault::Full(limit)), &state, root.path(), 2).unwrap_err();
        let CheckpointError::Io { action: "write", cause, .. } = &error else { panic!("{error}") };
        assert_eq!(cause.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().contains("free some space"), "{error}");
        let folder = checkpoint::step_dir(root.path(), 2);
        assert!(!folder.join(MANIFEST).exists());
        assert!(names(&folder).iter().all(|name| !name.ends_with(".tmp")), "{:?}", names(&folder));
        assert_eq!(newest(root.path()).unwrap().checkpoint.unwrap().meta().step, 1);
        first_is_whole(root.path());
    }
    // With space again the same step is written over what was left.
    let folder = save(&sound(), &state, root.path(), 2).unwrap();
    assert!(Checkpoint::open(&folder).unwrap().verify().good());
}

/// Every operation in turn fails once, or is the last thing the process ever did.
#[test]
fn a_fault_at_any_operation_leaves_a_whole_checkpoint_or_none() {
    let state = small();
    let root = tempfile::tempdir().unwrap();
    let all = sound();
    save(&all, &state, root.path(), 1).unwrap();
    let operations = all.0.operations.get();
    assert!(operations > 30);
    for at in 0..operations {
        for fault in [Fault::Once(at), Fault::Dies(at)] {
            let saved = save(&Faulty::new(fault), &state, root.path(), 2);
            first_is_whole(root.path());
            let second = checkpoint::step_dir(root.path(), 2);
            if second.join(MANIFEST).exists() {
                // A dead process may have got as far as the rename; then all is there.
                assert!(saved.is_ok() || matches!(fault, Fault::Dies(_)), "{fault:?}");
                assert!(Checkpoint::open(&second).unwrap().verify().good(), "{fault:?}");
            } else {
                assert!(saved.is_err(), "{fault:?}");
                assert_eq!(newest(root.path()).unwrap().checkpoint.unwrap().meta().step, 1);
            }
            // What is left is in nobody's way.
            if !second.join(MANIFEST).exists() {
                save(&sound(), &state, root.path(), 2).unwrap();
            }
            let checkpoint = Checkpoint::open(&second).unwrap();
            assert_eq!(names(&second).len(), checkpoint.files().len() + 1, "{fault:?}: {:?}", names(&second));
            checkpoint::discard(root.path(), 2).unwrap();
        }
    }
}

#[test]
fn prune_keeps_the_last_good_one() {
    let state = small();
    let root = tempfile::tempdir().unwrap();
    let steps = || {
        let mut names = names(root.path());
        names.sort();
        names.iter().map(|name| name.trim_start_matches("step-0000000").to_string()).collect::<Vec<_>>().join(" ")
    };
    for step in [1, 2, 3, 5] {
        save(&sound(), &state, root.path(), step).unwrap();
    }
    fs::create_dir(root.path().join("notes")).unwrap();
    // A newer one is being written, an older one was interrupted, the newest is damaged.
    for step in [4, 6] {
        write_pieces_to(&sound(), root.path(), step, &state.tensors, 2, &state.pieces()[..3]).unwrap();
    }
    let damaged = Checkpoint::open(&checkpoint::step_dir(root.path(), 5)).unwrap();
    fs::remove_file(damaged.path().join(&damaged.files()[0].name)).unwrap();

    prune(root.path(), 9).unwrap();
    assert_eq!(steps(), "notes 1 2 3 4 5 6");
    prune(root.path(), 2).unwrap();
    assert_eq!(steps(), "notes 2 3 4 5 6");
    let removed = prune(root.path(), 0).unwrap();
    assert_eq!(removed, [checkpoint::step_dir(root.path(), 2)]);
    assert_eq!(steps(), "notes 3 4 5 6");
    first_good(root.path(), 3);
    save(&sound(), &state, root.path(), 7).unwrap();
    prune(root.path(), 2).unwrap();
    assert_eq!(steps(), "notes 3 5 7");
    prune(root.path(), 1).unwrap();
    assert_eq!(steps(), "notes 7");
    first_good(root.path(), 7);
    // The only one is damaged: nothing is good, so nothing goes.
    fs::remove_file(checkpoint::step_dir(root.path(), 7).join(MANIFEST)).unwrap();
    assert!(prune(root.path(), 1).unwrap().is_empty());
    assert!(newest(root.path()).unwrap().checkpoint.is_none());
    assert!(prune(&root.path().join("nowhere"), 1).unwrap().is_empty());
}

fn first_good(root: &Path, step: u64) {
    let checkpoint = newest(root).unwrap().checkpoint.unwrap();
    assert_eq!(checkpoint.meta().step, step);
    assert!(checkpoint.verify().good());
}

/// A rank whose third file does not fit gives back the first two.
#[test]
fn a_failed_rank_gives_back_its_space() {
    let state = small();
    let root = tempfile::tempdir().unwrap();
    let files = write_pieces_to(&sound(), root.path(), 1, &state.tensors, 2, &state.pieces()).unwrap();
    let limit = files[..2].iter().map(|file| file.bytes).sum::<u64>() + 10;
    let full = Faulty::new(Fault::Full(limit));
    write_pieces_to(&full, root.path(), 2, &state.tensors, 2, &state.pieces()).unwrap_err();
    assert!(full.0.operations.get() > 8);
    assert!(names(&checkpoint::step_dir(root.path(), 2)).is_empty());
}
