//! What a file of token ids holds: one pass over all of it, and how a later change is noticed.
//!
//! A header is only a claim. Every process reads each file whole once, before the first token is used: its hash is part of
//! what the run is, and an id that the model does not have would train as a vector of zeros.
//!
//! A file that was read may be told to other processes of the host ([`Known`]), which then need not read it again. The
//! file is recognised by its device, inode, length, time of modification and time of change: any write changes the last
//! of these, and no program can set it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::DataError;

/// Bytes that are hashed and searched at a time, so that they are read from memory once.
const BLOCK_BYTES: usize = 256 << 10;

/// What to do about ids below 0.
const NEGATIVE: &str = "an id is 0 or more: -1 and -100 often stand for padding or for labels that do not count; write the file again without them";

/// How a token is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// Bytes: 1, 2, 4 or 8, little-endian.
    pub width: usize,
    /// The highest bit is a sign.
    pub signed: bool,
}

/// A file as the file system describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// A file that was read whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    stamp: Stamp,
    /// BLAKE3 of what is hashed before the file.
    before: [u8; 32],
    /// BLAKE3 of both.
    hash: [u8; 32],
    /// The largest id, if there is one. None is negative.
    largest: Option<u64>,
}

/// Files of tokens that were read whole on this host, for processes that open them later.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known(Vec<Entry>);

impl Known {
    /// Adds a file.
    pub(crate) fn add(&mut self, file: &Mapped) {
        self.0.push(file.entry());
    }
}

/// How files of tokens are read.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// Files that need not be read again.
    pub known: &'a Known,
    /// Called with the number of bytes of each part that was read: a large file takes minutes.
    pub progress: &'a dyn Fn(usize),
}

impl Reading<'_> {
    /// Reads everything.
    pub const ALL: Reading<'static> = Reading { known: &Known(Vec::new()), progress: &|_| () };
}

impl std::fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading").field("known", self.known).finish_non_exhaustive()
    }
}

/// What is asked of the ids of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit<'a> {
    /// Ids are below this.
    pub(crate) ids: u64,
    /// Who says so.
    pub(crate) says: &'a str,
    /// What to do where one is not.
    pub(crate) remedy: &'a str,
    /// Tokens of each document.
    pub(crate) documents: &'a [usize],
}

/// A mapped file whose content is known.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: Mmap,
    word: Word,
    path: PathBuf,
    file: File,
    /// What was hashed before it.
    before: blake3::Hasher,
    hash: [u8; 32],
    largest: Option<u64>,
    /// As it was when it was found to hold that.
    stamp: Mutex<Stamp>,
    /// Something was read since it was looked at last.
    read: AtomicBool,
}

impl Mapped {
    /// Maps `path`, hashes it after `before`, and looks at every id. None: the file is empty, and cannot be mapped.
    ///
    /// # Errors
    /// A file that cannot be read, or is written to meanwhile; an id that is negative or not below the limit.
    pub(crate) fn open(
        path: &Path,
        word: Word,
        before: &[u8],
        limit: Limit,
        key: &'static str,
        reading: Reading,
    ) -> Result<Option<Self>, DataError> {
        let fail = |source| DataError::Read { path: path.to_owned(), key, source };
        let file = File::open(path).map_err(fail)?;
        let stamp = Stamp::of(&file).map_err(fail)?;
        if stamp.bytes == 0 {
            return Ok(None);
        }
        // SAFETY: the map is read only. Who writes to the file is found out before what was read is believed
        // (`unchanged`), and who truncates it ends this process, as any reader.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        let mut head = blake3::Hasher::new();
        head.update(before);
        let known = Entry::find(reading.known, stamp, &head, limit);
        let (hash, largest) = match known {
            Some(entry) => (entry.hash, entry.largest),
            None => {
                let (hash, ids) = scan(&map, word, head.clone(), limit.ids, reading.progress);
                if Stamp::of(&file).map_err(fail)? != stamp {
                    return Err(DataError::Busy { path: path.to_owned() });
                }
                ids.check(path, limit)?;
                (hash, ids.largest)
            }
        };
        let (path, stamp, read) = (path.to_owned(), Mutex::new(stamp), AtomicBool::new(false));
        Ok(Some(Self { map, word, path, file, before: head, hash, largest, stamp, read }))
    }

    /// BLAKE3 of what came before the file and of the file.
    pub(crate) fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Tokens in it.
    pub(crate) fn len(&self) -> usize {
        self.map.len() / self.word.width
    }

    /// Appends the tokens of `range`. All ids were looked at: they fit, and none is negative.
    pub(crate) fn read(&self, range: Range<usize>, into: &mut Vec<u32>) {
        let words = &self.map[range.start * self.word.width..range.end * self.word.width];
        match self.word.width {
            1 => into.extend(words.iter().map(|&byte| u32::from(byte))),
            2 => into.extend(words.as_chunks::<2>().0.iter().map(|&w| u32::from(u16::from_le_bytes(w)))),
            4 => into.extend(words.as_chunks::<4>().0.iter().map(|&w| u32::from_le_bytes(w))),
            _ => into.extend(words.as_chunks::<8>().0.iter().map(|&w| u64::from_le_bytes(w) as u32)),
        }
        // Last: whoever looks at the file from now on does so after these tokens were taken.
        self.read.store(true, Ordering::Release);
    }

    /// That what was read of it since the last call is what the file held when it was opened. Where the system says that
    /// it was changed it is hashed again: a file that was renamed or unlinked is still what it was.
    ///
    /// # Errors
    /// [`DataError::Changed`].
    pub(crate) fn unchanged(&self) -> Result<(), DataError> {
        if !self.read.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let changed = || DataError::Changed { path: self.path.clone() };
        let mut stamp = self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Stamp::of(&self.file).map_err(|_| changed())?;
        if now == *stamp {
            return Ok(());
        }
        // What a shorter file has lost may not be touched.
        let holds = || *self.before.clone().update(&self.map).finalize().as_bytes() == self.hash;
        if now.bytes != stamp.bytes || !holds() || Stamp::of(&self.file).ok() != Some(now) {
            // Nor will it be believed the next time.
            self.read.store(true, Ordering::Release);
            return Err(changed());
        }
        *stamp = now;
        Ok(())
    }

    fn entry(&self) -> Entry {
        let stamp = *self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        Entry { stamp, before: *self.before.finalize().as_bytes(), hash: self.hash, largest: self.largest }
    }
}

impl Entry {
    /// What is known of the file of `stamp` behind `head`, if its ids are below the limit.
    fn find<'k>(known: &'k Known, stamp: Stamp, head: &blake3::Hasher, limit: Limit) -> Option<&'k Self> {
        let before = *head.finalize().as_bytes();
        let fits = |entry: &&Self| entry.largest.is_none_or(|id| id < limit.ids);
        known.0.iter().find(|entry| entry.stamp == stamp && entry.before == before).filter(fits)
    }
}

/// What the ids of a file are like.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ids {
    largest: Option<u64>,
    /// Those that are negative or not below the limit: how many, the first with its position, and whether one is negative.
    bad: u64,
    first: Option<(usize, i128)>,
    negative: bool,
}

impl Ids {
    fn check(&self, path: &Path, limit: Limit) -> Result<(), DataError> {
        let Some((token, id)) = self.first else { return Ok(()) };
        let mut before = 0;
        let document = limit.documents.iter().position(|&len| {
            before += len;
            before > token
        });
        let document = document.unwrap_or_default();
        let start: usize = limit.documents[..document].iter().sum();
        let (needed, remedy) = match (self.negative, self.largest) {
            (true, _) => (None, NEGATIVE),
            (false, largest) => (largest.map(|id| id + 1), limit.remedy),
        };
        let remedy: String = needed.map_or(remedy.into(), |ids| remedy.replace("{ids}", &ids.to_string()));
        Err(DataError::Id {
            path: path.to_owned(),
            id: i64::try_from(id).unwrap_or(i64::MAX),
            token,
            document,
            place: token - start,
            says: format!("by {} ids are below {}", limit.says, limit.ids).into(),
            bad: self.bad,
            remedy: remedy.into(),
        })
    }

    /// Takes in words of which the first is token `at`.
    fn take(&mut self, words: &[u8], word: Word, limit: u64, at: usize) {
        match word.width {
            1 => self.of(words.iter().map(|&byte| u64::from(byte)), word, limit, at),
            2 => self.of(words.as_chunks::<2>().0.iter().map(|&w| u64::from(u16::from_le_bytes(w))), word, limit, at),
            4 => self.of(words.as_chunks::<4>().0.iter().map(|&w| u64::from(u32::from_le_bytes(w))), word, limit, at),
            _ => self.of(words.as_chunks::<8>().0.iter().map(|&w| u64::from_le_bytes(w)), word, limit, at),
        }
    }

    fn of(&mut self, ids: impl Iterator<Item = u64> + Clone, word: Word, limit: u64, at: usize) {
        let bits = 8 * word.width as u32;
        // A negative id is a large one without its sign.
        let sign = if word.signed { 1u64 << (bits - 1) } else { u64::MAX };
        let bound = limit.min(sign);
        let Some(largest) = ids.clone().max() else { return };
        if largest < bound {
            self.largest = self.largest.max(Some(largest));
            return;
        }
        for (place, id) in ids.enumerate() {
            let negative = word.signed && id >= sign;
            if !negative {
                self.largest = self.largest.max(Some(id));
            }
            if id >= bound {
                self.bad += 1;
                self.negative |= negative;
                let value = if negative { i128::from(id) - (1i128 << bits) } else { i128::from(id) };
                self.first.get_or_insert((at + place, value));
            }
        }
    }
}

/// BLAKE3 of `bytes` after what `hasher` has seen, and what their ids are like.
fn scan(bytes: &[u8], word: Word, mut hasher: blake3::Hasher, limit: u64, progress: &dyn Fn(usize)) -> ([u8; 32], Ids) {
    let mut ids = Ids::default();
    for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        hasher.update(block);
        ids.take(block, word, limit, number * BLOCK_BYTES / word.width);
        progress(block.len());
    }
    (hasher.finalize().into(), ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const LIMIT: Limit<'static> =
        Limit { ids: 100, says: "the test", remedy: "raise it to {ids}", documents: &[3, 0, 4] };

    fn open(path: &str, width: usize, signed: bool, reading: Reading) -> Result<Mapped, String> {
        let word = Word { width, signed };
        let opened = Mapped::open(Path::new(path), word, b"head", LIMIT, "data.paths", reading);
        opened.map(|file| file.expect("not empty")).map_err(|e| e.to_string())
    }

    fn words<const N: usize>(ids: &[i64]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()[..N].to_vec()).collect()
    }

    #[test]
    fn every_id_is_looked_at_in_every_width() {
        let scratch = Scratch::new();
        let write = |ids: &[i64], width| {
            let bytes = match width {
                1 => words::<1>(ids),
                2 => words::<2>(ids),
                4 => words::<4>(ids),
                _ => words::<8>(ids),
            };
            scratch.write("ids", bytes)
        };
        for (width, signed) in [(1, false), (1, true), (2, false), (2, true), (4, false), (4, true), (8, true)] {
            let good = open(&write(&[1, 2, 3, 99, 0, 5, 6], width), width, signed, Reading::ALL).unwrap();
            let mut read = Vec::new();
            good.read(2..5, &mut read);
            assert_eq!((good.len(), read, good.largest), (7, vec![3, 99, 0], Some(99)));
            let said = open(&write(&[1, 2, 3, 4, 100, 101, 6], width), width, signed, Reading::ALL).unwrap_err();
            for part in ["id 100", "token 4", "token 1 of document 2", "below 100", "2 such", "raise it to 102"] {
                assert!(said.contains(part), "{part}: {said}");
            }
            if signed {
                let said = open(&write(&[1, -100, 3, 4, 5, 6, 127], width), width, signed, Reading::ALL).unwrap_err();
                assert!(said.contains("id -100") && said.contains("token 1 of document 0"), "{said}");
                assert!(said.contains("0 or more") && !said.contains("raise"), "{said}");
            }
        }
        // Behind the first block, in a file without documents.
        let mut many = vec![7i64; BLOCK_BYTES];
        many[BLOCK_BYTES - 2] = 65_535;
        let said = open(&write(&many, 2), 2, false, Reading::ALL).unwrap_err();
        assert!(said.contains(&format!("token {} ", BLOCK_BYTES - 2)) && said.contains("id 65535"), "{said}");
    }

    #[test]
    fn a_file_that_is_known_is_not_read_again_unless_it_was_touched() {
        let scratch = Scratch::new();
        let path = scratch.write("ids", words::<2>(&[1, 2, 3, 4, 5, 6, 7]));
        let read = std::cell::Cell::new(0);
        let progress = |bytes| read.set(read.get() + bytes);
        let nothing = Known::default();
        let first = open(&path, 2, false, Reading { known: &nothing, progress: &progress }).unwrap();
        assert_eq!(
            (read.get(), first.hash()),
            (14, *blake3::hash(b"head\x01\0\x02\0\x03\0\x04\0\x05\0\x06\0\x07\0").as_bytes())
        );
        let mut known = Known::default();
        known.add(&first);
        let again = open(&path, 2, false, Reading { known: &known, progress: &progress }).unwrap();
        assert_eq!((read.get(), again.hash()), (14, first.hash()));
        // Behind another head, or with a lower limit, it is not the same.
        let low = Limit { ids: 7, ..LIMIT };
        let word = Word { width: 2, signed: false };
        let reading = Reading { known: &known, progress: &progress };
        assert!(Mapped::open(Path::new(&path), word, b"head", low, "data.paths", reading).is_err());
        assert!(Mapped::open(Path::new(&path), word, b"tail", LIMIT, "data.paths", reading).is_ok());
        assert_eq!(read.get(), 42);
        std::fs::write(&path, words::<2>(&[1, 2, 3, 4, 5, 6, 8])).unwrap();
        let other = open(&path, 2, false, reading).unwrap();
        assert!(read.get() == 56 && other.hash() != first.hash());
    }

    #[test]
    fn what_is_written_over_is_noticed_and_what_is_moved_is_not_blamed() {
        use std::os::unix::fs::FileExt;
        let scratch = Scratch::new();
        let path = scratch.write("ids", words::<2>(&[1, 2, 3, 4, 5, 6, 7]));
        let file = open(&path, 2, false, Reading::ALL).unwrap();
        let mut into = Vec::new();
        file.read(0..2, &mut into);
        file.unchanged().unwrap();
        // Renamed, replaced and unlinked: the map still shows what it showed.
        std::fs::rename(&path, format!("{path}.old")).unwrap();
        scratch.write("ids", words::<2>(&[9; 7]));
        file.read(0..2, &mut into);
        file.unchanged().unwrap();
        std::fs::File::options().write(true).open(format!("{path}.old")).unwrap().write_all_at(&[8], 12).unwrap();
        // Nothing was read since, so nothing is wrong yet.
        file.unchanged().unwrap();
        file.read(0..2, &mut into);
        let said = file.unchanged().unwrap_err().to_string();
        assert!(said.contains("ids") && said.contains("was written to"), "{said}");
        assert!(file.unchanged().is_err(), "it is not believed the next time either");
        assert_eq!(into, [1, 2, 1, 2, 1, 2]);
    }
}
