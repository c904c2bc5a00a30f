//! Hashes of state chunks: the leaf level of the digest and what every read is checked against.

use std::ops::Range;

use spec::tensors::STATE_CHUNK;

/// A BLAKE3 hash; `Display` is 64 hex digits.
pub use blake3::Hash;

/// State chunks in `elements` elements that begin at a chunk boundary.
pub fn chunks(elements: usize) -> usize {
    elements.div_ceil(STATE_CHUNK)
}

/// Hashes of the state chunks of one piece, over the little-endian bytes of each chunk.
///
/// `data` begins at a chunk boundary of its slice and ends at one, or at the end of the slice.
pub fn chunk_hashes(data: &[f32]) -> Vec<Hash> {
    let mut bytes = Vec::with_capacity(STATE_CHUNK * 4);
    data.chunks(STATE_CHUNK)
        .map(|chunk| {
            bytes.clear();
            push_bytes(chunk, &mut bytes);
            blake3::hash(&bytes)
        })
        .collect()
}

/// Appends the little-endian bytes of `data`.
pub(crate) fn push_bytes(data: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + data.len() * 4, 0);
    for (bytes, value) in out[start..].chunks_exact_mut(4).zip(data) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// The values of little-endian `bytes`, four a value.
pub(crate) fn read_values(bytes: &[u8], out: &mut [f32]) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

/// Why `elements` is not a range of whole chunks of a slice of `slice_len` elements, if so.
pub(crate) fn range_fault(elements: &Range<usize>, slice_len: usize) -> Option<String> {
    let Range { start, end } = *elements;
    let whole = start.is_multiple_of(STATE_CHUNK) && (end.is_multiple_of(STATE_CHUNK) || end == slice_len);
    (start >= end || end > slice_len || !whole)
        .then(|| format!("elements {start}..{end} are not whole chunks of {STATE_CHUNK} in a slice of {slice_len}"))
}

/// A hash as hex text in JSON.
pub(crate) mod hex {
    use super::Hash;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(hash: &Hash, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&hash.to_hex())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Hash, D::Error> {
        let text = String::deserialize(input)?;
        Hash::from_hex(text.as_bytes())
            .map_err(|_| D::Error::custom(format!("{text:?} is not a hash of 64 hex digits")))
    }
}

/// A list of hashes as hex texts in JSON.
pub(crate) mod hex_list {
    use super::Hash;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Hex(#[serde(with = "super::hex")] Hash);

    pub fn serialize<S: Serializer>(hashes: &[Hash], out: S) -> Result<S::Ok, S::Error> {
        out.collect_seq(hashes.iter().map(|hash| Hex(*hash)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Hash>, D::Error> {
        Ok(Vec::<Hex>::deserialize(input)?.into_iter().map(|hex| hex.0).collect())
    }
}
