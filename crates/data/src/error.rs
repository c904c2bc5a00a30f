//! Every way in which text cannot become a data set. All are the user's to mend (exit 2).

use std::path::PathBuf;

/// What to do about documents of one token, to train on.
const JOIN: &str = "join short documents, or set data.masks to false, so that each token is followed by one to predict";

/// The same to validate on.
const OTHERS: &str =
    "hold out other documents, or set data.validation to 0 with no data.validation_paths to do without validation";

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
    /// A tokenizer that cannot be used.
    #[error("the tokenizer {path} cannot be used: {what}", path = path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A folder with nothing to read in it.
    #[error(
        "no text under the folder {path} ({key}): 0 bytes found in {seen} files that are not hidden; name a folder that \
         holds text (hidden files, links to folders, and README or LICENSE files are skipped)",
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
    /// A file of tokens that is not as it was written.
    #[error("{path} is damaged: {what}; write it again, or copy it again", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the numbers.
        what: String,
    },
    /// A file that was written to while it was opened.
    #[error("{path} is being written to; begin when it is complete, and let nobody write to the data of a run", path = path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A file that was written to after it was opened.
    #[error(
        "{path} was written to after this run had opened it: what it holds now is not what the run trains on; bring back the file \
         as it was, then go on with --resume",
        path = path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A token id that does not exist.
    #[error(
        "{path} has id {id} at token {token} (token {place} of document {document}), but {says}; {bad} such {ids} in the \
         file; {remedy}",
        path = path.display(), ids = if *bad == 1 { "id is" } else { "ids are" }
    )]
    Id {
        /// The file.
        path: PathBuf,
        /// The first such id.
        id: i64,
        /// Where it stands in the file, from 0.
        token: usize,
        /// In which document, from 0.
        document: usize,
        /// Where in that, from 0.
        place: usize,
        /// What ids there are, and by whom.
        says: Box<str>,
        /// How many such ids there are.
        bad: u64,
        /// What to do.
        remedy: Box<str>,
    },
    /// A path of `data.source = "tokens"` that holds none.
    #[error(
        "{path} ({key}) is neither a folder of tokens (it has no header.json) nor the prefix of Megatron files (there is \
         no {path}.idx); write one with `lockstep data tokenize --tokenizer tokenizer.json --out DIR INPUT...`",
        path = path.display()
    )]
    NotTokens {
        /// The path.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
    },
    /// More token ids than the model has.
    #[error(
        "{path} has {ids} token ids (its tokenizer), but model.vocab is {vocab}; set model.vocab to at least {ids}, or use data of a \
         smaller tokenizer",
        path = path.display()
    )]
    Vocabulary {
        /// The folder.
        path: PathBuf,
        /// The largest id of its tokenizer plus one.
        ids: u64,
        /// The model's.
        vocab: usize,
    },
    /// Token files of different tokenizers in one run.
    #[error(
        "{path} was written with another tokenizer ({tokenizer}) than {first} ({expected}): their ids mean different \
         text; tokenize one of them again",
        path = path.display(), first = first.display()
    )]
    Tokenizers {
        /// The folder that differs.
        path: PathBuf,
        /// The start of its tokenizer's hash, or its end-of-document token.
        tokenizer: String,
        /// The first folder.
        first: PathBuf,
        /// The same of the first.
        expected: String,
    },
    /// A tokenizer for samples that is not the data's.
    #[error(
        "data.tokenizer = {path} ({tokenizer}) is not the tokenizer that {folder} was written with ({expected}): samples \
         would be noise; name that one",
        path = path.display(), folder = folder.display()
    )]
    Speech {
        /// The tokenizer.
        path: PathBuf,
        /// The start of its hash.
        tokenizer: String,
        /// The token folder.
        folder: PathBuf,
        /// The start of the hash of its tokenizer.
        expected: String,
    },
    /// A file whose content is not text.
    #[error("{path} ({key}) is {what}: {remedy}", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
        /// What it is.
        what: String,
        /// How to make text of it.
        remedy: String,
    },
    /// A line of JSON without a text.
    #[error(
        "{path}, line {line} ({key}): {what}; mend the line, or name the field that holds the text with data.field \
         (`lockstep data tokenize` leaves a few broken lines out)",
        path = path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// The key of the run file that led to it.
        key: &'static str,
        /// From 1.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
    /// End-of-document tokens are asked for, and the tokenizer has none.
    #[error("{path} names no end-of-document token, but data.eod = true; tokenize with `--eod TOKEN`, or set data.eod to false", path = path.display())]
    NoEod {
        /// The folder.
        path: PathBuf,
    },
    /// A pattern of files that matches none, or is none.
    #[error("the pattern {pattern} names no file: {what}; check it, and quote it so that the shell leaves it alone")]
    Glob {
        /// The pattern.
        pattern: String,
        /// What is wrong.
        what: String,
    },
    /// A folder of tokens that cannot be written.
    #[error("cannot write {path}: {source}; check the permissions and the space", path = path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder to write that holds something.
    #[error("{path} is not empty; name another folder with --out, or remove it", path = path.display())]
    OutTaken {
        /// The folder.
        path: PathBuf,
    },
    /// More broken JSON lines than allowed.
    #[error(
        "more than {limit} broken lines (--bad-lines-max); nothing was written. The first ones:\n  {first}\nmend them, or \
         raise --bad-lines-max to leave them out; the field with the text is named by --field"
    )]
    BadLines {
        /// The limit.
        limit: u64,
        /// File, line and what is wrong, one a line.
        first: String,
    },
    /// Every document was left out.
    #[error(
        "no document is left of {inputs}: {left_out} were filtered out and {bad_lines} lines are broken; nothing was written"
    )]
    NothingLeft {
        /// The inputs as given.
        inputs: String,
        /// Documents left out.
        left_out: u64,
        /// Broken lines.
        bad_lines: u64,
    },
    /// The sources of crates that `data.source = "cargo"` reads are not all there.
    #[error("data.source = \"cargo\" cannot be read: {what}; data.source = \"austen\" is text that is always there")]
    Cargo {
        /// What is not there or not as listed, and how to get it.
        what: String,
    },
    /// A source that needs paths and has none.
    #[error("data.paths is empty; set it to files or folders")]
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
        "too little text to train on: {found} {unit} found in {origin} after validation took its part, {needed} needed for \
         one sequence; add text, or lower train.seq"
    )]
    TooLittle {
        /// Where the text came from.
        origin: String,
        /// Bytes or tokens.
        unit: &'static str,
        /// Of the training split.
        found: u64,
        /// Of one sequence.
        needed: u64,
    },
    /// A split was asked for, but none of its tokens has a target.
    #[error(
        "nothing to {split} on in {origin}: {found} {unit} found, and no document of {needed}, which a target needs; {remedy}",
        remedy = if *split == "train" { JOIN } else { OTHERS }
    )]
    NoTarget {
        /// Where the text came from.
        origin: String,
        /// What the split is for.
        split: &'static str,
        /// Bytes or tokens.
        unit: &'static str,
        /// Of the split.
        found: u64,
        /// Of a document that has a target.
        needed: u64,
    },
    /// The sequences that validation would score have no token with a target.
    #[error(
        "validation would score nothing: no token of the first {sequences} of {held_out} held-out sequences (train.eval_sequences) \
         has a target; raise train.eval_sequences, or hold out longer documents"
    )]
    NothingScored {
        /// Those that would be scored.
        sequences: u64,
        /// All that there are.
        held_out: u64,
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
