//! A file without a name in which what layers keep for backward waits, and the thread that writes and reads it.
//!
//! Jobs are done in the order in which they are given, so what was stored is in the file before it is read.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use program::shelf::Key;

use crate::buffers::Pool;
use crate::error::TrainError;
use crate::state::nameless;

/// Numbers that are turned into bytes at once.
const BLOCK: usize = 1 << 16;

/// Where a layer of a unit lies: the first byte, the numbers that there is room for, and the lengths of its buffers with
/// whether they are loose ([`Pool::take_loose`]).
#[derive(Debug)]
struct Slot {
    offset: u64,
    room: usize,
    lens: Vec<(usize, bool)>,
}

/// What the thread does, and gives back.
#[derive(Debug)]
enum Job {
    Write(u64, Vec<Vec<f32>>),
    Read(u64, Vec<Vec<f32>>),
}

type Done = Receiver<io::Result<Vec<Vec<f32>>>>;

/// One rank's file of activations.
#[derive(Debug)]
pub struct Shelf {
    folder: PathBuf,
    /// `None` at the end only.
    jobs: Option<Sender<Job>>,
    written: Done,
    read: Done,
    thread: Option<JoinHandle<()>>,
    slots: HashMap<Key, Slot>,
    /// Room that was used before: numbers, and the first byte.
    free: Vec<(usize, u64)>,
    end: u64,
    writing: bool,
}

impl Shelf {
    /// An empty one, in `folder`.
    ///
    /// # Errors
    /// The system's.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let file = nameless(folder)?;
        let (jobs, todo) = channel();
        let (tell_written, written) = channel();
        let (tell_read, read) = channel();
        let work = move || {
            for job in todo {
                // Who no longer listens has ended.
                let _ = match job {
                    Job::Write(offset, buffers) => tell_written.send(write(&file, offset, &buffers).map(|()| buffers)),
                    Job::Read(offset, mut buffers) => {
                        tell_read.send(fill(&file, offset, &mut buffers).map(|()| buffers))
                    }
                };
            }
        };
        let thread = Some(std::thread::Builder::new().name("activations".into()).spawn(work)?);
        Ok(Self {
            folder: folder.to_owned(),
            jobs: Some(jobs),
            written,
            read,
            thread,
            slots: HashMap::new(),
            free: Vec::new(),
            end: 0,
            writing: false,
        })
    }

    /// Begins to write what `key` keeps. [`Shelf::written`] gives the buffers back.
    ///
    /// # Errors
    /// If the thread is gone.
    pub fn store(&mut self, key: Key, buffers: Vec<Vec<f32>>) -> Result<(), TrainError> {
        let lens: Vec<_> = buffers.iter().map(|buffer| (buffer.len(), Pool::is_loose(buffer))).collect();
        let numbers = lens.iter().map(|(len, _)| len).sum();
        let fits = self.free.iter().enumerate().filter(|(_, (room, _))| *room >= numbers).min_by_key(|(_, free)| *free);
        let (room, offset) = match fits.map(|(at, _)| at) {
            Some(at) => self.free.swap_remove(at),
            None => (numbers, self.end),
        };
        self.end = self.end.max(offset + 4 * room as u64);
        self.slots.insert(key, Slot { offset, room, lens });
        self.writing = true;
        self.give(Job::Write(offset, buffers))
    }

    /// Waits for what is being written; its buffers, or none.
    ///
    /// # Errors
    /// The disk's: full, broken.
    pub fn written(&mut self) -> Result<Vec<Vec<f32>>, TrainError> {
        if !std::mem::take(&mut self.writing) {
            return Ok(Vec::new());
        }
        self.done(&self.written, "write activations to a file in")
    }

    /// The lengths of what `key` keeps, and which of it is loose; none if it is not here.
    pub fn lens(&self, key: Key) -> &[(usize, bool)] {
        self.slots.get(&key).map_or(&[], |slot| &slot.lens)
    }

    /// Begins to read what `key` keeps into `buffers`, which have its lengths.
    ///
    /// # Errors
    /// If the thread is gone.
    pub fn want(&mut self, key: Key, buffers: Vec<Vec<f32>>) -> Result<(), TrainError> {
        let slot = self.slots.get(&key).ok_or_else(|| TrainError::Internal(format!("{key:?} was not put away")))?;
        self.give(Job::Read(slot.offset, buffers))
    }

    /// Waits for what [`Shelf::want`] asked for; nothing of `key` is here any more.
    ///
    /// # Errors
    /// The disk's.
    pub fn take(&mut self, key: Key) -> Result<Vec<Vec<f32>>, TrainError> {
        if let Some(Slot { offset, room, .. }) = self.slots.remove(&key) {
            self.free.push((room, offset));
        }
        self.done(&self.read, "read activations from a file in")
    }

    fn give(&self, job: Job) -> Result<(), TrainError> {
        let given = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if given { Ok(()) } else { Err(ended()) }
    }

    fn done(&self, done: &Done, what: &'static str) -> Result<Vec<Vec<f32>>, TrainError> {
        let buffers = done.recv().map_err(|_| ended())?;
        buffers.map_err(|source| TrainError::Io { what, path: self.folder.clone(), source })
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        // Without jobs to come it ends.
        drop(self.jobs.take());
        self.thread.take().map(JoinHandle::join);
    }
}

fn ended() -> TrainError {
    TrainError::Internal("the thread that keeps activations in a file has ended".into())
}

fn write(file: &File, mut offset: u64, buffers: &[Vec<f32>]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * BLOCK);
    for block in buffers.iter().flat_map(|buffer| buffer.chunks(BLOCK)) {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|x| x.to_le_bytes()));
        file.write_all_at(&bytes, offset)?;
        offset += bytes.len() as u64;
    }
    Ok(())
}

fn fill(file: &File, mut offset: u64, buffers: &mut [Vec<f32>]) -> io::Result<()> {
    let mut bytes = vec![0; 4 * BLOCK];
    for block in buffers.iter_mut().flat_map(|buffer| buffer.chunks_mut(BLOCK)) {
        let bytes = &mut bytes[..4 * block.len()];
        file.read_exact_at(bytes, offset)?;
        offset += bytes.len() as u64;
        let (numbers, _) = bytes.as_chunks::<4>();
        block.iter_mut().zip(numbers).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Unit;

    #[test]
    fn what_was_put_away_comes_back_bit_by_bit_and_its_room_is_used_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut shelf = Shelf::new(folder.path()).unwrap();
        let key = |layer| Key { chunk: 0, unit: Unit { cell: 0, mb: 0 }, layer };
        let kept = |layer: usize| -> Vec<Vec<f32>> {
            let bits = |n: usize| (0..n).map(|i| f32::from_bits((i * 7919 + layer) as u32 ^ 0x7fc0_0001)).collect();
            vec![bits(BLOCK + 5), Vec::new(), bits(3)]
        };
        for round in 0..3 {
            for layer in 0..3 {
                assert!(shelf.written().unwrap().len() == if layer > 0 { 3 } else { 0 });
                shelf.store(key(layer), kept(layer + round)).unwrap();
            }
            assert_eq!(shelf.written().unwrap().len(), 3);
            for layer in (0..3).rev() {
                let room = shelf.lens(key(layer)).iter().map(|(len, _)| vec![0.0; *len]).collect();
                shelf.want(key(layer), room).unwrap();
                let back = shelf.take(key(layer)).unwrap();
                let bits = |all: &[Vec<f32>]| all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&back), bits(&kept(layer + round)));
            }
            assert_eq!(shelf.end, 3 * 4 * (BLOCK as u64 + 8), "room is used again");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(shelf.want(key(0), Vec::new()).is_err(), "nothing is here");
    }

    #[test]
    fn what_the_disk_refuses_names_the_folder() {
        let mut shelf = Shelf::new(tempfile::tempdir().unwrap().path()).unwrap();
        let key = Key { chunk: 0, unit: Unit { cell: 0, mb: 0 }, layer: 0 };
        shelf.store(key, vec![vec![1.0; 4]]).unwrap();
        shelf.written().unwrap();
        // More than was written cannot be read.
        shelf.want(key, vec![vec![0.0; 5]]).unwrap();
        let error = shelf.take(key).unwrap_err().to_string();
        assert!(error.contains("read activations from a file in"), "{error}");
    }
}
