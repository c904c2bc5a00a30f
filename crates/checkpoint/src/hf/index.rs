//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::HfError;

/// Larger files are refused, bytes.
const INDEX_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// File of each tensor.
    pub weight_map: BTreeMap<String, String>,
}

impl Index {
    pub fn read(path: &Path) -> Result<Self, HfError> {
        let bad = |reason| HfError::Index { path: path.into(), reason };
        let size = fs::metadata(path).map_err(HfError::io("read", path))?.len();
        if size > INDEX_BYTES_MAX {
            return Err(bad(format!("it has {size} bytes, at most {INDEX_BYTES_MAX} are read")));
        }
        Self::parse(&fs::read(path).map_err(HfError::io("read", path))?).map_err(bad)
    }

    /// `Err` is the reason why the text is not an index.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let index: Self = serde_json::from_slice(text).map_err(|e| format!("it is not an index of shards: {e}"))?;
        if index.weight_map.is_empty() {
            return Err("its weight_map is empty".into());
        }
        for (tensor, file) in &index.weight_map {
            if Path::new(file).file_name().is_none_or(|plain| plain != file.as_str()) {
                return Err(format!("it places {tensor} in {file:?}, which is not the name of a file in the folder"));
            }
        }
        Ok(index)
    }

    /// Bytes of all tensors, if it says.
    pub fn total_size(&self) -> Option<u64> {
        self.metadata.get("total_size")?.as_f64().map(|bytes| bytes as u64)
    }

    /// The files, each once, by name.
    pub fn files(&self) -> Vec<&str> {
        let mut files: Vec<_> = self.weight_map.values().map(String::as_str).collect();
        files.sort_unstable();
        files.dedup();
        files
    }
}
