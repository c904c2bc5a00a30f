//! What can be wrong with a folder. The text names the operands, then the remedy.

use std::{fmt, io, path::PathBuf};

use thiserror::Error;

/// Faults that one error prints.
const FAULTS_SHOWN: usize = 12;

/// Why a folder cannot be read or written.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum HfError {
    /// The file system refused.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io { action: &'static str, path: PathBuf, cause: io::Error },
    /// No weights that can be read.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json{found}; save the model with transformers' save_pretrained, which writes them",
        folder.display()
    )]
    NoWeights { folder: PathBuf, found: String },
    /// Two sets of weights.
    #[error("{} has both model.safetensors and model.safetensors.index.json; remove the one that is not meant", folder.display())]
    Ambiguous { folder: PathBuf },
    /// The index is not one.
    #[error("{}: {reason}; copy the folder again", path.display())]
    Index { path: PathBuf, reason: String },
    /// A file of weights that is missing, cut off or not safetensors.
    #[error("{}: {reason}; copy the file again", path.display())]
    File { path: PathBuf, reason: String },
    /// Tensors that do not fit the model; all of them.
    #[error(
        "the tensors in {} are not those of its config.json:{}\n  remedy: use the config.json that belongs to these files, or copy the folder again",
        folder.display(), Faults(faults)
    )]
    Tensors { folder: PathBuf, faults: Vec<Fault> },
    /// A weight that is NaN or infinite.
    #[error(
        "{tensor}[{row}, {col}] is {value} in {place}; a model with such a weight cannot be used: take one from before it diverged"
    )]
    NotFinite { tensor: String, row: usize, col: usize, value: f32, place: String },
    /// A weight too large for the type of the export.
    #[error("{tensor}[{row}, {col}] = {value} would be infinite in {dtype}; export float32")]
    TooLarge { tensor: String, row: usize, col: usize, value: f32, dtype: &'static str },
    /// The text for `config.json` does not describe the model that is exported.
    #[error("the config.json to write does not describe the model: {reason}; write it with spec::hf::Export")]
    Config { reason: String },
    /// Asked for a part that the model does not have.
    #[error("no such part of the model: {0}")]
    NoSuchPart(String),
    /// The folder to write has something in it.
    #[error("{} is not empty; name a new folder, or empty it first", folder.display())]
    NotEmpty { folder: PathBuf },
    /// The source of the export failed.
    #[error("cannot get {tensor} for the export: {cause}")]
    Source { tensor: String, cause: Box<dyn std::error::Error + Send + Sync> },
    /// The checkpoint is of another model.
    #[error("{} holds another model: {tensor} is {theirs} there, {ours} in the config; use the run file that wrote it", path.display())]
    OtherModel { path: PathBuf, tensor: String, theirs: String, ours: String },
}

impl HfError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause }
    }
}

/// One tensor that does not fit the model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fault {
    /// In the model, in no file.
    Missing { tensor: String },
    /// `lm_head.weight` is in no file, and the config does not tie it to the embedding.
    HeadMissing,
    /// In a file, not in the model.
    Extra { tensor: String, file: String },
    /// In two files.
    Twice { tensor: String, files: [String; 2] },
    /// The index places it in a file that does not have it.
    NotInShard { tensor: String, file: String },
    /// In a file of the index, but the index does not say so.
    Unlisted { tensor: String, file: String },
    /// Another shape.
    Shape { tensor: String, file: String, found: Vec<usize>, want: Vec<usize> },
    /// A type that is not read.
    Dtype { tensor: String, file: String, found: String },
    /// The config ties the embedding and the output, but the files hold two different ones.
    HeadDiffers,
    /// Stored rotary frequencies are not those of the config.
    Frequencies { tensor: String, file: String },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { tensor } => write!(f, "{tensor} is missing"),
            Self::HeadMissing => write!(
                f,
                "lm_head.weight is missing, and the config does not tie it to the embedding (tie_word_embeddings is false or not set)"
            ),
            Self::Extra { tensor, file } => write!(f, "{tensor} in {file} is not a tensor of the model"),
            Self::Twice { tensor, files: [a, b] } => write!(f, "{tensor} is in two files, {a} and {b}"),
            Self::NotInShard { tensor, file } => write!(f, "{tensor} should be in {file} by the index, but is not"),
            Self::Unlisted { tensor, file } => write!(f, "{tensor} in {file} is not in the index"),
            Self::Shape { tensor, file, found, want } => {
                write!(f, "{tensor} in {file} has shape {found:?}, the config gives {want:?}")
            }
            Self::Dtype { tensor, file, found } => {
                write!(f, "{tensor} in {file} has type {found}; F32, BF16 and F16 are read")
            }
            Self::HeadDiffers => write!(
                f,
                "lm_head.weight is not equal to model.embed_tokens.weight, but the config ties them (tie_word_embeddings is true)"
            ),
            Self::Frequencies { tensor, file } => {
                write!(f, "{tensor} in {file} are not the rotary frequencies of the config (rope_theta, head_dim)")
            }
        }
    }
}

struct Faults<'a>(&'a [Fault]);

impl fmt::Display for Faults<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in self.0.iter().take(FAULTS_SHOWN) {
            write!(f, "\n  {fault}")?;
        }
        match self.0.len().saturating_sub(FAULTS_SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}
