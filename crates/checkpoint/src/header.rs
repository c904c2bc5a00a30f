//! Names of tensors inside a file, and the safetensors header.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::manifest::FileEntry;
use crate::tensor::Kind;

/// The name of a piece inside its file, such as
/// `param/model.layers.0.self_attn.q_proj.weight/t1/e16384-32768`.
pub(crate) fn piece_name(tensor: &str, kind: Kind, slice: usize, elements: &Range<usize>) -> String {
    format!("{kind}/{tensor}/t{slice}/e{}-{}", elements.start, elements.end)
}

/// The header of a file with these pieces (name, elements), in this order: the length word
/// and the JSON text, padded so that the data begins at a multiple of 8 bytes.
///
/// The bytes are a function of the arguments alone.
pub(crate) fn encode(pieces: &[(String, usize)]) -> Result<Vec<u8>, String> {
    let mut end = 0;
    let infos = pieces.iter().map(|(name, elements)| {
        let start = end;
        end += elements * 4;
        (name.clone(), TensorInfo { dtype: Dtype::F32, shape: vec![*elements], data_offsets: (start, end) })
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

/// Checks that `header`, the first bytes of the file up to its data, is the safetensors
/// header of what `file` lists. `Err` says what differs.
pub(crate) fn check(header: &[u8], file: &FileEntry) -> Result<(), String> {
    if blake3::hash(header) != file.header_hash {
        return Err("its header does not have the hash that was written".into());
    }
    let (length, json) = header.split_first_chunk().ok_or("its header is cut off")?;
    if u64::from_le_bytes(*length) != json.len() as u64 {
        return Err(format!("its length word is not that of a header of {} bytes", json.len()));
    }
    let metadata: Metadata = serde_json::from_slice(json).map_err(|e| format!("its header is not safetensors: {e}"))?;
    if metadata.data_len() as u64 != file.bytes - header.len() as u64 {
        return Err(format!("its header lists {} bytes of data", metadata.data_len()));
    }
    for piece in &file.pieces {
        let name = piece_name(&piece.tensor, piece.kind, piece.slice, &piece.elements);
        let info = metadata.info(&name).ok_or_else(|| format!("its header lacks {name}"))?;
        let start = piece.offset.checked_sub(header.len() as u64);
        if info.dtype != Dtype::F32 || Some(info.data_offsets.0 as u64) != start || info.shape != [piece.elements.len()]
        {
            return Err(format!("its header places {name} elsewhere"));
        }
    }
    Ok(())
}
