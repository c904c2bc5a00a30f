//! Text in files to a folder of tokens, in parallel and in one order.
//!
//! One thread reads batches (a document of text, or about a megabyte of JSON lines), several encode them, and one
//! writes them in the order in which they were read: the folder is the same for any number of threads.

mod batch;
mod filter;
mod input;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use crate::DataError;
use crate::folder::Header;
use batch::{Batch, Done};
pub use filter::{Limits, Reason};
use write::Writer;

/// Batches that may be under way for each thread.
const BATCHES_PER_JOB: usize = 4;
/// Named of each kind of what was left out.
const EXAMPLES_MAX: usize = 5;

/// Turns text into ids, on one thread.
pub trait Encode {
    /// Appends the ids of `text`.
    ///
    /// # Errors
    /// A text that has no ids.
    fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), DataError>;
}

#[cfg(feature = "tokenizers")]
impl Encode for crate::tokenizer::Encoder<'_> {
    fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), DataError> {
        self.encode(text, into)
    }
}

/// What the header says of the tokenizer.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    /// The largest id plus one.
    pub ids: usize,
    /// The token that ends a document, with its name.
    pub eod: Option<(u32, String)>,
    /// BLAKE3 of the file.
    pub hash: [u8; 32],
    /// Files of the tokenizer that go into the folder as they are, each with its name there: an exported model needs them.
    pub files: Vec<(&'static str, PathBuf)>,
}

/// What to do.
#[derive(Debug, Clone)]
pub struct Options {
    /// Files, folders and globs. Files that hold JSON objects, one per line, have a document per line, others are one
    /// document; both may be compressed with gzip, xz or zstd. What is not text is refused.
    pub inputs: Vec<String>,
    /// The field of a JSON line that holds the text.
    pub field: String,
    /// The folder to write; not there yet, or empty.
    pub out: PathBuf,
    /// Threads that encode.
    pub jobs: usize,
    /// Which documents are left out.
    pub limits: Limits,
    /// Most broken JSON lines.
    pub bad_lines_max: u64,
}

/// Documents or lines of one kind that were left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// How many.
    pub count: u64,
    /// The first ones: file, line or offset, and why.
    pub first: Vec<String>,
}

impl LeftOut {
    fn add(&mut self, example: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < EXAMPLES_MAX {
            self.first.push(example());
        }
    }
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Report {
    /// The header of the folder.
    pub header: Header,
    /// Files read.
    pub files: usize,
    /// Documents left out, by reason.
    pub left_out: BTreeMap<Reason, LeftOut>,
    /// Broken lines.
    pub bad_lines: LeftOut,
}

/// What is going on.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// The files are known: what they are read as, a line for each kind.
    Begin(&'a [String]),
    /// A batch is done.
    Read {
        /// Bytes of the files read so far, as they lie on the disk.
        read: u64,
        /// Bytes of all files.
        total: u64,
    },
}

/// Writes the folder. `encoders` makes an encoder per thread; `progress` is called before the first
/// batch and after each.
///
/// # Errors
/// Inputs that cannot be read, too many broken lines, no document left, a folder that cannot be written; then nothing is
/// left behind.
pub fn run<'e>(
    options: &Options,
    vocabulary: &Vocabulary,
    encoders: &(dyn Fn() -> Box<dyn Encode + 'e> + Sync),
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, DataError> {
    let (files, kinds) = input::list(&options.inputs)?;
    let writer = Writer::create(&options.out, vocabulary)?;
    progress(Progress::Begin(&kinds.describe(&options.field)));
    let total = files.iter().map(|file| file.bytes).sum();
    let jobs = options.jobs.max(1);
    let read = AtomicU64::new(0);
    let (work, works) = sync_channel(jobs * BATCHES_PER_JOB);
    let works = Mutex::new(works);
    let (done, dones) = channel();
    let (credit, credits) = sync_channel(jobs * BATCHES_PER_JOB);
    std::thread::scope(|scope| {
        let (files, read, works) = (&files, &read, &works);
        scope.spawn(move || reader(files, options, read, &work, &credit));
        for _ in 0..jobs {
            let done = done.clone();
            scope.spawn(move || worker(options, works, &done, encoders()));
        }
        drop(done);
        let mut collect = Collect { options, files, writer, left_out: BTreeMap::new(), bad_lines: LeftOut::default() };
        let mut waiting = HashMap::new();
        for next in 0.. {
            while !waiting.contains_key(&next) {
                let Ok((number, done)) = dones.recv() else { break };
                waiting.insert(number, done);
            }
            let Some(done) = waiting.remove(&next) else { break };
            // On an error everything ends: the channels close one after another.
            let result: Result<(), DataError> = Result::and_then(done, |done| collect.add(done));
            if let Err(error) = result {
                drop((dones, credits));
                return Err(error);
            }
            let _ = credits.recv();
            progress(Progress::Read { read: read.load(Ordering::Relaxed), total });
        }
        let Collect { writer, left_out, bad_lines, .. } = collect;
        if writer.documents() == 0 {
            return Err(DataError::NothingLeft {
                inputs: options.inputs.join(" "),
                left_out: left_out.values().map(|kind: &LeftOut| kind.count).sum(),
                bad_lines: bad_lines.count,
            });
        }
        let header = writer.finish()?;
        Ok(Report { header, files: files.len(), left_out, bad_lines })
    })
}

/// A batch with its number, or why there are no more.
type Numbered<T> = (u64, Result<T, DataError>);

fn reader(
    files: &[input::File],
    options: &Options,
    read: &AtomicU64,
    work: &SyncSender<Numbered<Batch>>,
    credit: &SyncSender<()>,
) {
    let mut number = 0;
    for (index, file) in files.iter().enumerate() {
        let mut open = true;
        let mut send = |batch: Result<Batch, DataError>| {
            open = batch.is_ok() && credit.send(()).is_ok() && work.send((number, batch)).is_ok();
            number += 1;
            open
        };
        if let Err(error) = batch::read(index, file, options, read, &mut send) {
            let _ = credit.send(()).is_ok() && work.send((number, Err(error))).is_ok();
            return;
        }
        if !open {
            return;
        }
    }
}

fn worker(
    options: &Options,
    works: &Mutex<Receiver<Numbered<Batch>>>,
    done: &Sender<Numbered<Done>>,
    mut encoder: Box<dyn Encode + '_>,
) {
    loop {
        let Ok((number, batch)) = works.lock().unwrap_or_else(std::sync::PoisonError::into_inner).recv() else {
            return;
        };
        let result = batch.and_then(|batch| batch::encode(batch, options, &mut *encoder));
        if done.send((number, result)).is_err() {
            return;
        }
    }
}

/// What the writing thread knows.
struct Collect<'a> {
    options: &'a Options,
    files: &'a [input::File],
    writer: Writer,
    left_out: BTreeMap<Reason, LeftOut>,
    bad_lines: LeftOut,
}

impl Collect<'_> {
    fn add(&mut self, done: Done) -> Result<(), DataError> {
        let path = self.files[done.file].path.display();
        for (reason, place) in done.left_out {
            self.left_out.entry(reason).or_default().add(|| format!("{path}{place}"));
        }
        for (line, what) in done.bad_lines {
            self.bad_lines.add(|| format!("{path}:{line}: {what}"));
            if self.bad_lines.count > self.options.bad_lines_max {
                return Err(DataError::BadLines {
                    limit: self.options.bad_lines_max,
                    first: self.bad_lines.first.join("\n  "),
                });
            }
        }
        self.writer.add(&done.tokens, &done.documents)
    }
}
