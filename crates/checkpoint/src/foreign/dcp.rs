//! Folders of torch.distributed.checkpoint: `.metadata`, a pickle, says what lies where in `__R_N.distcp`.
//!
//! The format has no hashes: what can be checked is the structure, and that every entry lies inside its file.

use std::collections::BTreeMap;
use std::path::Path;

use super::pickle::{Id, NAME_BYTES_MAX, Pickle, Value};
use super::{Listed, Structure};

/// Dimensions of a tensor, at most.
const DIMENSIONS_MAX: usize = 64;

/// Larger `.metadata` is refused, bytes.
pub(super) const METADATA_BYTES_MAX: u64 = 2 << 30;

struct Tree<'a>(&'a Pickle);

impl Tree<'_> {
    fn value(&self, id: Id) -> &Value {
        &self.0.values[id]
    }

    /// Name of the class of an object.
    fn class(&self, id: Id) -> &str {
        match self.value(id) {
            Value::Object { class, .. } => match self.value(*class) {
                Value::Class(_, name) => name,
                _ => "",
            },
            _ => "",
        }
    }

    /// A field of an object's state.
    fn field(&self, id: Id, name: &str) -> Option<Id> {
        let Value::Object { state: Some(state), .. } = self.value(id) else { return None };
        let pairs = self.pairs(*state)?;
        pairs
            .iter()
            .find(|(key, _)| matches!(self.value(*key), Value::Text(text) if text == name))
            .map(|(_, value)| *value)
    }

    fn pairs(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.value(id) {
            Value::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    fn text(&self, id: Id) -> Option<&str> {
        match self.value(id) {
            Value::Text(text) if text.len() <= NAME_BYTES_MAX => Some(text),
            _ => None,
        }
    }

    fn count(&self, id: Id) -> Option<u64> {
        match self.value(id) {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// `torch.Size`, made by a call with a tuple.
    fn size(&self, id: Id) -> Option<Vec<u64>> {
        let items = match self.value(id) {
            Value::Items(items) => items,
            Value::Object { args, .. } => match self.value(*args) {
                Value::Items(args) => match self.value(*args.first()?) {
                    Value::Items(items) => items,
                    _ => return None,
                },
                _ => return None,
            },
            _ => return None,
        };
        (items.len() <= DIMENSIONS_MAX).then(|| items.iter().map(|id| self.count(*id)).collect())?
    }

    /// The type's name, from the state of `TensorProperties`.
    fn dtype(&self, properties: Id) -> Option<String> {
        let Value::Object { state: Some(state), .. } = self.value(properties) else { return None };
        let first = match self.value(*state) {
            Value::Items(items) => *items.first()?,
            Value::Dict(_) => self.field(properties, "dtype")?,
            _ => return None,
        };
        match self.value(first) {
            Value::Class(_, name) => Some(name.clone()),
            _ => None,
        }
    }
}

/// The structure that `metadata`, bytes of the file in `folder`, tells. `Err` is the reason why it does not.
pub(super) fn read(metadata: &[u8], folder: &Path) -> Result<Structure, String> {
    let pickle = Pickle::parse(metadata)?;
    let tree = Tree(&pickle);
    if tree.class(pickle.root) != "Metadata" {
        return Err("it does not hold a torch.distributed.checkpoint Metadata".into());
    }
    let field = |name: &str| tree.field(pickle.root, name).ok_or_else(|| format!("it has no {name}"));
    let dict = |name: &str| {
        let pairs = tree.pairs(field(name)?).ok_or_else(|| format!("{name} is no dictionary"))?;
        Ok::<_, String>(pairs)
    };
    let mut listed: BTreeMap<String, Listed> = BTreeMap::new();
    let mut chunks: BTreeMap<String, usize> = BTreeMap::new();
    let mut problems = Vec::new();
    for (key, value) in dict("state_dict_metadata")? {
        let name = tree.text(*key).ok_or("a tensor without a name")?.to_owned();
        let mut entry = Listed { name: name.clone(), ..Listed::default() };
        if tree.class(*value) == "TensorStorageMetadata" {
            let shape = tree.field(*value, "size").and_then(|id| tree.size(id));
            entry.shape = Some(shape.ok_or_else(|| format!("{name} has no size"))?);
            entry.dtype = tree.field(*value, "properties").and_then(|id| tree.dtype(id)).unwrap_or_default();
            if let Some(id) = tree.field(*value, "chunks")
                && let Value::Items(items) = tree.value(id)
            {
                chunks.insert(name.clone(), items.len());
            }
        } else {
            entry.dtype = "bytes".into();
            chunks.insert(name.clone(), 1);
        }
        listed.insert(name, entry);
    }
    let mut files: BTreeMap<String, u64> = BTreeMap::new();
    let mut stored: BTreeMap<String, usize> = BTreeMap::new();
    for (index, info) in dict("storage_data")? {
        let name =
            tree.field(*index, "fqn").and_then(|id| tree.text(id)).ok_or("an entry of storage_data without a name")?;
        let number = |field: &str| tree.field(*info, field).and_then(|id| tree.count(id));
        let file = tree.field(*info, "relative_path").and_then(|id| tree.text(id));
        let (Some(file), Some(offset), Some(length)) = (file, number("offset"), number("length")) else {
            return Err(format!("{name} has no place in a file"));
        };
        if Path::new(file).file_name().is_none_or(|plain| plain != file) {
            return Err(format!("{name} lies in {file:?}, which is not the name of a file in the folder"));
        }
        let end = offset.checked_add(length).ok_or_else(|| format!("{name} has an impossible place"))?;
        let known = files.entry(file.to_owned()).or_default();
        *known = (*known).max(end);
        *stored.entry(name.to_owned()).or_default() += 1;
        match listed.get_mut(name) {
            Some(entry) => {
                entry.bytes += length;
                if !entry.files.iter().any(|known| known == file) {
                    entry.files.push(file.to_owned());
                }
            }
            None => problems.push(format!("{name} is stored, but not described")),
        }
    }
    for (name, wanted) in &chunks {
        let found = stored.get(name).copied().unwrap_or(0);
        if found != *wanted {
            problems.push(format!("{name} has {wanted} chunks, {found} are stored"));
        }
    }
    let mut sizes = Vec::new();
    for (file, end) in files {
        let at = folder.join(&file);
        match std::fs::metadata(&at) {
            Ok(found) if found.is_file() && found.len() >= end => sizes.push((file, found.len())),
            Ok(found) => problems.push(format!(
                "{} has {} bytes, its entries end at {end}: it is cut off",
                at.display(),
                found.len()
            )),
            Err(e) => problems.push(format!("{} cannot be found ({e})", at.display())),
        }
    }
    Ok(Structure { format: "torch DCP", tensors: listed.into_values().collect(), files: sizes, problems })
}
