//! Folders of the reference cases, saved by transformers.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::hf::{Dtype, ExportOptions, HfFolder, export_to};
use spec::hf::{HfConfig, Style};

use crate::build::{config_json, naive, stored_in};
use crate::common::NoSync;

const CASES: [&str; 5] = ["llama_gqa", "llama_tied", "llama_packed", "mixtral", "mixtral_aux"];

/// The folder of a case, if the shared data is there.
fn case(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden").join(name);
    if path.is_dir() {
        return Some(path);
    }
    println!("skipped: {} is not there", path.display());
    None
}

/// A folder with the weights alone (a case holds other safetensors files too).
fn weights_of(case: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(case.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    dir
}

#[test]
fn configs_of_both_styles_give_one_model() {
    for case in CASES.into_iter().filter_map(case) {
        let public = HfConfig::read(&case.join("config.json")).unwrap();
        let hf5 = HfConfig::read(&case.join("config_hf5.json")).unwrap();
        assert_eq!(public.model, hf5.model);
        assert_eq!((&public.notes, &hf5.notes), (&vec![], &vec![]));
    }
}

#[test]
fn weights_are_read_and_written_back_byte_for_byte() {
    for case in CASES.into_iter().filter_map(case) {
        let config = HfConfig::read(&case.join("config.json")).unwrap();
        let folder = HfFolder::open(&case, &config.model).unwrap();
        folder.check_finite().unwrap();
        assert!(folder.notes().iter().any(|note| note.contains("expected.safetensors")));
        let source = weights_of(&case);
        let originals = stored_in(source.path());
        for (number, tensor) in folder.tensors().iter().enumerate() {
            let mut whole = vec![f32::NAN; tensor.rows * tensor.cols];
            folder.read(number, 0, 1, 0..whole.len(), &mut whole).unwrap();
            assert_eq!(whole, naive(tensor, &originals[&tensor.name]), "{}", tensor.name);
        }
        for shard_bytes_max in [u64::MAX, 30_000] {
            for style in [Style::Public, Style::Hf5] {
                let options = ExportOptions { dtype: Dtype::F32, shard_bytes_max };
                let out = tempfile::tempdir().unwrap();
                let json = config_json(&config.model, Some(&config), options, style);
                let written =
                    export_to(&NoSync, out.path(), &config.model, &json, options, &mut |tensor, rows, values| {
                        let cols = folder.tensors()[tensor].cols;
                        Ok(folder.read(tensor, 0, 1, rows.start * cols..rows.end * cols, values)?)
                    })
                    .unwrap();
                assert_eq!(written.files > 1, shard_bytes_max == 30_000);
                assert_eq!(stored_in(out.path()), originals);
                let again = HfConfig::read(&out.path().join("config.json")).unwrap();
                assert_eq!(again.model, config.model);
                assert_eq!(again.key("eos_token_id"), config.key("eos_token_id"));
                HfFolder::open(out.path(), &again.model).unwrap().check_finite().unwrap();
                if written.files == 1 {
                    // The same file, header included, as transformers wrote.
                    let [ours, theirs] =
                        [out.path(), case.as_path()].map(|dir| fs::read(dir.join("model.safetensors")));
                    assert!(ours.unwrap() == theirs.unwrap(), "{}", case.display());
                }
            }
        }
    }
}
