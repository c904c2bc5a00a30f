//! Which files are read, and as what.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use crate::DataError;
use crate::text::kinds::Kinds;
use crate::text::list;
use crate::text::look::{Form, Look, MARK, look};
use crate::text::unpack::{self, Wrapping};

/// Where the paths are from, for messages.
pub(super) const KEY: &str = "INPUT";

/// One file.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    /// Its length on the disk.
    pub(super) bytes: u64,
    look: Look,
}

impl File {
    fn new(path: PathBuf, kinds: &mut Kinds) -> Result<Self, DataError> {
        let empty = Look { wrapping: Wrapping::None, form: Form::Text, mark: false };
        let look = look(&path, KEY)?.unwrap_or(empty);
        kinds.file(&path, &look);
        let bytes = std::fs::metadata(&path).map_err(|source| Wrapping::None.fail(&path, KEY, source))?.len();
        Ok(Self { path, bytes, look })
    }

    /// True if a document is a line of it.
    pub(super) fn lines(&self) -> bool {
        self.look.form == Form::Lines
    }

    /// The error of reading it.
    pub(super) fn fail(&self, source: std::io::Error) -> DataError {
        self.look.wrapping.fail(&self.path, KEY, source)
    }

    /// The content; `read` counts the bytes taken from the disk.
    pub(super) fn open<'a>(&self, read: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>, DataError> {
        let mut content = unpack::open(&self.path, self.look.wrapping, read).map_err(|e| self.fail(e))?;
        if self.look.mark {
            content.read_exact(&mut [0; MARK.len()]).map_err(|e| self.fail(e))?;
        }
        Ok(content)
    }
}

/// Every file of `inputs` in order, with what it is read as: as listed, globs and folders in the order of names.
pub(super) fn list(inputs: &[String]) -> Result<(Vec<File>, Kinds), DataError> {
    let (mut paths, mut kinds) = (Vec::new(), Kinds::default());
    for input in inputs {
        let path = Path::new(input);
        if path.exists() || !input.contains(['*', '?', '[']) {
            paths.extend(list::files(path, KEY, &mut kinds)?);
            continue;
        }
        let found = glob::glob(input).map_err(|e| DataError::Glob { pattern: input.clone(), what: e.to_string() })?;
        let before = paths.len();
        for path in found {
            let path = path.map_err(|e| {
                let path = e.path().to_path_buf();
                Wrapping::None.fail(&path, KEY, e.into())
            })?;
            paths.extend(list::files(&path, KEY, &mut kinds)?);
        }
        if paths.len() == before {
            return Err(DataError::Glob { pattern: input.clone(), what: "no file matches".into() });
        }
    }
    let files = paths.into_iter().map(|file| File::new(file.path, &mut kinds)).collect::<Result<_, _>>()?;
    Ok((files, kinds))
}
