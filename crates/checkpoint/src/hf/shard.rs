//! One safetensors file: mapped, its header checked against its size.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::error::HfError;

/// Larger headers are refused, bytes; the format's own limit.
const HEADER_BYTES_MAX: usize = 100_000_000;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    /// Name of the file.
    pub name: String,
    pub entries: BTreeMap<String, Entry>,
    map: Mmap,
}

impl Shard {
    pub fn open(path: &Path) -> Result<Self, HfError> {
        let file = File::open(path).map_err(HfError::io("open", path))?;
        if !file.metadata().map_err(HfError::io("open", path))?.is_file() {
            return Err(HfError::File { path: path.into(), reason: "it is not a file".into() });
        }
        // SAFETY: the map is read-only and private. As with every mapped file, nobody may change
        // or shorten it while it is mapped; that is asked of the caller of `HfFolder::open`.
        let map = unsafe { Mmap::map(&file) }.map_err(HfError::io("map", path))?;
        let entries = parse(&map).map_err(|reason| HfError::File { path: path.into(), reason })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { path: path.into(), name, entries, map })
    }

    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.map[range]
    }

    /// Lets the system take back the memory behind `range`: what was read is not kept twice.
    pub fn release(&self, range: Range<usize>) {
        if !range.is_empty() {
            // SAFETY: the pages are those of a file that is never written through this map: a
            // later access reads them again, with the same bytes.
            let advice =
                unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
            // A hint: if it is not taken, only memory is lost.
            let _ = advice;
        }
    }
}

/// The tensors of a file. `Err` is the reason why it is not one.
pub(super) fn parse(file: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    let len = file.len();
    let Some((length, rest)) = file.split_first_chunk() else {
        return Err(format!("it has {len} bytes: it is cut off, or not safetensors"));
    };
    let header_len = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if header_len > HEADER_BYTES_MAX {
        return Err(format!("its header would have {header_len} bytes: it is not safetensors"));
    }
    let Some(header) = rest.get(..header_len) else {
        return Err(format!("it is cut off inside its header: {len} bytes, the header ends at {}", 8 + header_len));
    };
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(|e| format!("its header is not that of safetensors: {e}"))?;
    let (start, data) = (8 + header_len, rest.len() - header_len);
    let want = metadata.data_len();
    if want != data {
        let what = if want > data { "it is cut off" } else { "it is too long" };
        return Err(format!("{what}: {data} bytes of data, its header lists {want}"));
    }
    // The offsets are contiguous and end at `data`: every sum is inside the file.
    let entry = |info: &TensorInfo| Entry {
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: start + info.data_offsets.0..start + info.data_offsets.1,
    };
    Ok(metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect())
}

/// The header of a file with these tensors (name, shape) in this order: the length word and
/// the JSON text, padded so that the data begins at a multiple of 8 bytes.
pub(super) fn header(dtype: Dtype, tensors: &[(&str, Vec<usize>)]) -> Result<Vec<u8>, String> {
    let mut end = 0;
    let infos = tensors.iter().map(|(name, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name.to_string(), TensorInfo { dtype, shape: shape.clone(), data_offsets: (start, end) })
    });
    // One key only: more would come out in the order of a hash map.
    let text = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(text), infos.collect()).map_err(|e| e.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    Ok(header)
}
