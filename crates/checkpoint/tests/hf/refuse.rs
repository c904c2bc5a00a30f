//! Everything that is refused, by name.

use std::fs;
use std::path::Path;

use checkpoint::hf::{Fault, HfError, HfFolder};
use safetensors::Dtype;
use spec::Model;
use tempfile::TempDir;

use crate::build::{Stored, file, model, weights, write, write_shards};

struct Case {
    dir: TempDir,
    model: Model,
    stored: Vec<Stored>,
}

impl Case {
    fn new(tied: bool) -> Self {
        let model = model(tied, true);
        let stored = weights(&model, Dtype::F32, 9);
        Self { dir: tempfile::tempdir().unwrap(), model, stored }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn get(&mut self, name: &str) -> &mut Stored {
        self.stored.iter_mut().find(|stored| stored.name == name).unwrap()
    }

    fn error(&self) -> HfError {
        HfFolder::open(self.path(), &self.model).unwrap_err()
    }

    /// The faults of the folder with `stored` in one file.
    fn faults(&self) -> Vec<Fault> {
        write(self.path(), &self.stored);
        faults(self.error())
    }
}

fn faults(error: HfError) -> Vec<Fault> {
    let shown = error.to_string();
    let HfError::Tensors { faults, .. } = error else { panic!("{shown}") };
    for fault in faults.iter().take(12) {
        assert!(shown.contains(&fault.to_string()), "{shown}");
    }
    faults
}

const FILE: &str = "model.safetensors";
const UP: &str = "model.layers.1.mlp.up_proj.weight";
const NORM: &str = "model.layers.0.self_attn.q_norm.weight";

fn name(text: &str) -> String {
    text.into()
}

#[test]
fn tensors_that_do_not_fit_are_all_named() {
    let mut case = Case::new(false);
    case.stored.retain(|stored| stored.name != UP);
    assert_eq!(case.faults(), [Fault::Missing { tensor: name(UP) }]);
    let bias = Stored { name: name("model.layers.0.self_attn.q_proj.bias"), ..case.stored[1].clone() };
    case.stored.push(bias.clone());
    case.get(NORM).shape = vec![1, 6];
    let odd = &mut case.stored[0];
    (odd.shape, odd.dtype) = (vec![70, 24], Dtype::I32);
    let found = case.faults();
    let file = || name(FILE);
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found.contains(&Fault::Missing { tensor: name(UP) }));
    assert!(found.contains(&Fault::Extra { tensor: bias.name, file: file() }));
    assert!(found.contains(&Fault::Shape { tensor: name(NORM), file: file(), found: vec![1, 6], want: vec![6] }));
    let tensor = name("model.embed_tokens.weight");
    assert!(found.contains(&Fault::Dtype { tensor, file: file(), found: name("I32") }));
}

#[test]
fn the_padding_is_not_in_the_files() {
    let mut case = Case::new(false);
    let embed = case.get("model.embed_tokens.weight");
    (embed.shape, embed.bytes) = (vec![128, 24], vec![0; 128 * 24 * 4]);
    assert!(matches!(&case.faults()[..], [Fault::Shape { want, .. }] if *want == [70, 24]));
    let embed = case.get("model.embed_tokens.weight");
    embed.shape = vec![24, 128];
    assert_eq!(case.faults().len(), 1);
    // Many faults are cut short in the text, not in the list.
    case.stored.clear();
    let found = case.faults();
    assert_eq!(found.len(), 25, "{found:?}");
}

#[test]
fn a_head_that_is_tied_or_not() {
    let mut case = Case::new(false);
    let head = case.stored.pop().unwrap();
    assert_eq!(head.name, "lm_head.weight");
    assert_eq!(case.faults(), [Fault::HeadMissing]);
    // Tied, with a head of its own.
    let mut case = Case::new(true);
    case.stored.push(head);
    assert_eq!(case.faults(), [Fault::HeadDiffers]);
    // Tied, with an equal head: said, not refused; unless one bit differs, or the type.
    let same = Stored { name: name("lm_head.weight"), ..case.stored[0].clone() };
    *case.stored.last_mut().unwrap() = same;
    write(case.path(), &case.stored);
    let folder = HfFolder::open(case.path(), &case.model).unwrap();
    assert!(matches!(folder.notes(), [note] if note.contains("lm_head")));
    drop(folder);
    *case.stored.last_mut().unwrap().bytes.last_mut().unwrap() ^= 1;
    assert_eq!(case.faults(), [Fault::HeadDiffers]);
    let head = case.stored.last_mut().unwrap();
    (head.dtype, head.bytes) = (Dtype::BF16, vec![0; 70 * 24 * 2]);
    assert_eq!(case.faults(), [Fault::HeadDiffers]);
}

#[test]
fn old_tables_of_frequencies_must_agree() {
    let mut case = Case::new(false);
    let table: Vec<f32> = (0..3).map(|i| 10_000f32.powf(-2.0 * i as f32 / 6.0)).collect();
    let stored = |table: &[f32]| Stored {
        name: name("model.layers.0.self_attn.rotary_emb.inv_freq"),
        dtype: Dtype::BF16,
        shape: vec![table.len()],
        bytes: table.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    };
    case.stored.push(stored(&table));
    write(case.path(), &case.stored);
    HfFolder::open(case.path(), &case.model).unwrap();
    for bad in [&table[..2], &[table[0], table[1], table[2] * 2.0]] {
        *case.stored.last_mut().unwrap() = stored(bad);
        assert!(matches!(&case.faults()[..], [Fault::Frequencies { .. }]));
    }
}

#[test]
fn weights_that_are_not_finite_are_found_while_reading() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = Case::new(false);
        let up = case.get(UP);
        up.bytes[(39 * 24 + 23) * 4..].copy_from_slice(&bad.to_le_bytes());
        write(case.path(), &case.stored);
        let folder = HfFolder::open(case.path(), &case.model).unwrap();
        let number = folder.tensors().iter().position(|tensor| tensor.name == UP).unwrap();
        let len = 40 * 24;
        // What is before it can be read; it cannot, nor by the second of two cells.
        folder.read(number, 0, 1, 0..len - 1, &mut vec![0.0; len - 1]).unwrap();
        folder.read(number, 0, 2, 0..len / 2, &mut vec![0.0; len / 2]).unwrap();
        let errors = [
            folder.read(number, 0, 1, len - 1..len, &mut [0.0]).unwrap_err(),
            folder.read(number, 1, 2, 0..len / 2, &mut vec![0.0; len / 2]).unwrap_err(),
            folder.check_finite().unwrap_err(),
        ];
        for error in errors {
            let shown = error.to_string();
            assert!(matches!(&error, HfError::NotFinite { row: 39, col: 23, .. }), "{shown}");
            assert!(shown.contains(UP) && shown.contains(FILE), "{shown}");
        }
    }
}

#[test]
fn files_that_are_cut_off_or_garbage() {
    let case = Case::new(false);
    let path = case.path().join(FILE);
    let good = file(&case.stored);
    let reason = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = case.error();
        assert!(matches!(&error, HfError::File { path: named, .. } if *named == path), "{error}");
        error.to_string()
    };
    for (len, word) in [(0, "0 bytes"), (5, "5 bytes"), (100, "inside its header"), (good.len() - 1, "cut off")] {
        let shown = reason(&good[..len]);
        assert!(shown.contains(word), "{shown}");
    }
    assert!(reason(&[good.clone(), vec![0]].concat()).contains("too long"));
    assert!(reason(&[0xff; 64]).contains("not safetensors"));
    let version = *b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n";
    assert!(reason(&version).contains("not safetensors"));
    let mut bytes = good.clone();
    bytes[8] = b'[';
    assert!(reason(&bytes).contains("header"));
    // Offsets that overlap, and sizes that overflow.
    for header in [
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
        r#"{"a":{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 12]].concat();
        reason(&bytes);
    }
}

#[test]
fn a_folder_without_weights_or_with_two_sets() {
    let case = Case::new(false);
    assert!(matches!(case.error(), HfError::NoWeights { .. }));
    fs::write(case.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(case.error().to_string().contains("pytorch_model.bin"));
    let (a, b) = case.stored.split_at(5);
    write_shards(case.path(), &[a, b]);
    fs::write(case.path().join("adapter_model.safetensors"), "x").unwrap();
    let folder = HfFolder::open(case.path(), &case.model).unwrap();
    assert!(matches!(folder.notes(), [note] if note.contains("adapter_model")));
    write(case.path(), &case.stored);
    assert!(matches!(case.error(), HfError::Ambiguous { .. }));
    let missing = HfFolder::open(&case.path().join("nowhere"), &case.model).unwrap_err();
    assert!(missing.to_string().contains("nowhere"), "{missing}");
}

#[test]
fn an_index_and_shards_that_disagree() {
    let case = Case::new(false);
    let (a, b) = case.stored.split_at(5);
    let index = case.path().join("model.safetensors.index.json");
    let [a_name, b_name] = ["a.safetensors", "b.safetensors"].map(name);
    // A tensor in two shards.
    write_shards(case.path(), &[&case.stored[..6], b]);
    let found = faults(case.error());
    let twice = Fault::Twice { tensor: b[0].name.clone(), files: [a_name.clone(), b_name.clone()] };
    assert_eq!(found, [twice]);
    // A missing shard.
    write_shards(case.path(), &[a, b]);
    let text = fs::read_to_string(&index).unwrap();
    fs::rename(case.path().join("b.safetensors"), case.path().join("c.safetensors")).unwrap();
    let error = case.error();
    assert!(matches!(&error, HfError::File { path, .. } if path.ends_with("b.safetensors")), "{error}");
    fs::rename(case.path().join("c.safetensors"), case.path().join("b.safetensors")).unwrap();
    // A tensor that is in the other shard.
    let entry = |file: &str| format!("{:?}:{file:?}", UP);
    fs::write(&index, text.replace(&entry("b.safetensors"), &entry("a.safetensors"))).unwrap();
    assert_eq!(faults(case.error()), [Fault::NotInShard { tensor: name(UP), file: a_name }]);
    // A tensor that the index does not know, and one that only the index knows.
    fs::write(&index, text.replace(UP, "another")).unwrap();
    let found = faults(case.error());
    assert!(found.contains(&Fault::Unlisted { tensor: name(UP), file: b_name.clone() }), "{found:?}");
    assert!(found.contains(&Fault::NotInShard { tensor: name("another"), file: b_name }), "{found:?}");
    // A wrong total is told.
    fs::write(&index, text.replace("\"metadata\":{}", "\"metadata\":{\"total_size\":7}")).unwrap();
    let folder = HfFolder::open(case.path(), &case.model).unwrap();
    assert!(matches!(folder.notes(), [note] if note.contains("7 bytes")), "{:?}", folder.notes());
    // Not an index, or one that points out of the folder.
    let out = text.replace("b.safetensors", "../b.safetensors");
    for text in ["", "{}", "[]", r#"{"weight_map":{}}"#, r#"{"weight_map":{"a":1}}"#, &out, &text[..text.len() - 1]] {
        fs::write(&index, text).unwrap();
        let error = case.error();
        assert!(matches!(error, HfError::Index { .. }), "{text}: {error}");
    }
}
