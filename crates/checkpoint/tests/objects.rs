//! Checkpoints in a store of objects: whole or none at every point of failure, for whatever speaks to the store.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use checkpoint::store::{Objects, Store};
use checkpoint::{Checkpoint, CheckpointError, MANIFEST, Meta, Retention, step_dir};
use common::State;

/// Objects in memory, of which the operation of a number fails.
#[derive(Default)]
struct Memory {
    all: Mutex<BTreeMap<String, Vec<u8>>>,
    left: Mutex<Option<usize>>,
}

impl Memory {
    fn step(&self) -> io::Result<()> {
        match &mut *self.left.lock().unwrap() {
            Some(0) => Err(io::Error::other("away")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// From the operation of this number on all fail; `None`: none does.
    fn fails_after(&self, left: Option<usize>) {
        *self.left.lock().unwrap() = left;
    }

    fn of(&self, name: &str) -> io::Result<Vec<u8>> {
        self.all.lock().unwrap().get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Objects for Memory {
    fn put(&self, name: &str, from: &Path) -> io::Result<()> {
        self.step()?;
        self.all.lock().unwrap().insert(name.into(), fs::read(from)?);
        Ok(())
    }

    fn get(&self, name: &str, to: &mut dyn Write) -> io::Result<()> {
        self.step()?;
        to.write_all(&self.of(name)?)
    }

    fn size(&self, name: &str) -> io::Result<Option<u64>> {
        self.step()?;
        Ok(self.of(name).ok().map(|bytes| bytes.len() as u64))
    }

    fn list(&self) -> io::Result<BTreeMap<String, u64>> {
        self.step()?;
        Ok(self.all.lock().unwrap().iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64)).collect())
    }

    fn copy(&self, from: &str, to: &str) -> io::Result<()> {
        self.step()?;
        let bytes = self.of(from)?;
        self.all.lock().unwrap().insert(to.into(), bytes);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.step()?;
        self.all.lock().unwrap().remove(name);
        Ok(())
    }
}

fn store() -> (Arc<Memory>, Store) {
    let memory = Arc::<Memory>::default();
    (memory.clone(), Store::objects(memory, "s3://bucket/run".into()))
}

/// The meta of the fetched checkpoint of a step, if one comes.
fn fetched(store: &Store, step: u64) -> Result<Meta, CheckpointError> {
    let root = tempfile::tempdir().unwrap();
    let path = store.fetch(step, root.path());
    let left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), usize::from(path.is_ok()), "nothing half fetched stays: {left:?}");
    let found = Checkpoint::open(&path?).unwrap();
    assert!(found.verify().good());
    Ok(found.meta().clone())
}

#[test]
fn a_copy_goes_there_and_back() {
    let (state, root) = (State::new(2, 1), tempfile::tempdir().unwrap());
    let (memory, store) = store();
    assert!(store.steps().unwrap().is_empty());
    let from = Checkpoint::open(&state.save(root.path(), 3)).unwrap();
    assert!(store.put(&from).unwrap() > 0);
    assert_eq!(store.steps().unwrap(), [3]);
    assert_eq!(store.put(&from).unwrap(), 0, "the same is not copied again");
    assert_eq!(fetched(&store, 3).unwrap(), *from.meta());
    // What is in its place is kept, under another name.
    let place = store.fetch(3, root.path()).unwrap();
    assert_eq!(place, step_dir(root.path(), 3));
    assert!(
        place.with_extension("damaged").join(MANIFEST).exists() && Checkpoint::open(&place).unwrap().verify().good()
    );
    // A bit of the copy rots: nothing comes, and it is named.
    let name = memory.all.lock().unwrap().keys().find(|name| name.contains("layer")).unwrap().clone();
    *memory.all.lock().unwrap().get_mut(&name).unwrap().last_mut().unwrap() ^= 1;
    assert!(matches!(fetched(&store, 3).unwrap_err(), CheckpointError::Corrupt { .. }));
    // A file of it is gone: it is set aside, and copied again.
    memory.all.lock().unwrap().remove(&name);
    assert!(store.put(&from).unwrap() > 0);
    assert_eq!(fetched(&store, 3).unwrap(), *from.meta());
    assert!(memory.all.lock().unwrap().contains_key("step-00000003.damaged-1/manifest.json"));
    assert_eq!(store.steps().unwrap(), [3]);
    assert_eq!((store.distrust(2).unwrap(), store.steps().unwrap()), (vec![3], vec![]));
    assert!(memory.all.lock().unwrap().contains_key("step-00000003.damaged-2/manifest.json"));
}

/// The store goes away at any operation of a copy: there is then none, or a whole one; the next try makes one.
#[test]
fn a_copy_that_was_cut_off_is_none() {
    let (state, root) = (State::new(2, 1), tempfile::tempdir().unwrap());
    let from = Checkpoint::open(&state.save(root.path(), 3)).unwrap();
    let mut cut = 0;
    for left in 0.. {
        let (memory, store) = store();
        memory.fails_after(Some(left));
        let sent = store.put(&from);
        memory.fails_after(None);
        if sent.is_ok() {
            break;
        }
        cut += 1;
        assert!(matches!(sent.unwrap_err(), CheckpointError::Io { .. }), "worth another try");
        match store.steps().unwrap().as_slice() {
            [] => assert!(fetched(&store, 3).is_err()),
            steps => assert_eq!((steps, fetched(&store, 3).unwrap()), (&[3][..], from.meta().clone())),
        }
        store.put(&from).unwrap();
        assert_eq!(fetched(&store, 3).unwrap(), *from.meta());
    }
    assert!(cut > from.files().len(), "{cut}");
}

#[test]
fn room_is_made_and_the_newest_whole_ones_stay() {
    let (state, root) = (State::new(1, 1), tempfile::tempdir().unwrap());
    let (memory, store) = store();
    for step in [10, 20, 30, 40] {
        store.put(&Checkpoint::open(&state.save(root.path(), step)).unwrap()).unwrap();
    }
    // A part of step 15 that never became one, and of one that is under way; the newest lacks a file.
    for name in ["step-00000015/x.safetensors", "step-00000050/x.safetensors", "other"] {
        memory.all.lock().unwrap().insert(name.into(), vec![1]);
    }
    let name = memory.all.lock().unwrap().keys().find(|name| name.starts_with("step-00000040/layer")).unwrap().clone();
    memory.all.lock().unwrap().remove(&name);
    let retention = Retention { keep: 1, keep_every: 20, also: Vec::new() };
    store.retain(&retention).unwrap();
    assert_eq!(store.steps().unwrap(), [20, 30, 40], "30 is the newest whole one, 20 is kept for good");
    let all = memory.all.lock().unwrap();
    assert!(!all.keys().any(|name| name.starts_with("step-00000010/") || name.starts_with("step-00000015/")));
    assert!(all.contains_key("step-00000050/x.safetensors") && all.contains_key("other"));
}
