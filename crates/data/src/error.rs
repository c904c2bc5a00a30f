//! Every way in which text cannot become a data set. All are the user's to mend (exit 2).

use std::path::PathBuf;

/// Why a data set cannot be opened. The text names the operands, then the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A path that is not there, or that the system does not let us read.
    #[error("cannot read {path} ({key}): {source}; check the spelling (relative paths start at the working directory) and the permissions", path = path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A socket, pipe or device.
    #[error("{path} ({key}) is neither a file nor a folder; name text files or folders of them", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
    },
    /// A file without a byte.
    #[error("{path} ({key}) is empty: 0 bytes found, at least 1 needed; remove it from {key} or write text to it", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
    },
    /// A file of zero bytes only, as a torn copy leaves it.
    #[error("{path} ({key}) holds {bytes} bytes and every one is NUL, as an interrupted copy leaves it; copy it again or remove it", path = path.display())]
    NulFilled {
        /// The file.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// A folder with nothing to read in it.
    #[error(
        "no text under the folder {path} ({key}): 0 bytes found in {seen} files that are not hidden; name a folder that \
         holds text (hidden files and links to folders are skipped)",
        path = path.display()
    )]
    NoText {
        /// The folder.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
        /// Files that were looked at, all empty.
        seen: u64,
    },
    /// A source that needs paths and has none.
    #[error("data.source = \"text\" but data.paths is empty; set it to text files or folders")]
    NoPaths,
    /// Every training file is also held out.
    #[error("data.validation_paths holds out all {documents} documents of data.paths ({path} among them); leave at least one to train on", path = path.display())]
    AllHeldOut {
        /// Documents of `data.paths`.
        documents: u64,
        /// The first of them.
        path: PathBuf,
    },
    /// Less training text than one sequence.
    #[error(
        "too little text to train on: {found} bytes found in {origin} after validation took its part, {needed} needed for \
         one sequence; add text, or lower train.seq"
    )]
    TooLittle {
        /// Where the text came from.
        origin: String,
        /// Bytes of the training split.
        found: u64,
        /// Bytes of one sequence.
        needed: u64,
    },
    /// A split was asked for, but none of its tokens has a target.
    #[error(
        "nothing to {split} on in {origin}: {found} bytes found, {needed} needed in one document for a target; add text, \
         or set data.validation to 0 with no data.validation_paths to do without validation"
    )]
    NoTarget {
        /// Where the text came from.
        origin: String,
        /// What the split is for.
        split: &'static str,
        /// Bytes of the split.
        found: u64,
        /// Bytes of a document that has a target.
        needed: u64,
    },
    /// A sequence length that cannot be cut.
    #[error("sequences of {seq} tokens cannot be cut; set train.seq to at least 1 and at most {max}")]
    SequenceLength {
        /// The length asked for, in tokens.
        seq: usize,
        /// The longest that positions can count.
        max: u32,
    },
}
