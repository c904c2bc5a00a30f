//! A disk that fails, or a process that dies, at any point of an export: no half folder.

use std::cell::Cell;
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;

use checkpoint::hf::{Dtype, ExportOptions, Exported, HfError, HfFolder, export_to};
use checkpoint::{Disk, Storage, StorageFile};
use safetensors::Dtype as Stored;
use spec::Model;
use spec::hf::Style;

use crate::build::{config_json, model, stored_in, weights, write};

/// The file system, of which one operation fails, or all from there on.
#[derive(Clone)]
struct Faulty {
    left: Rc<Cell<usize>>,
    dies: bool,
}

impl Faulty {
    fn new(left: usize, dies: bool) -> Self {
        Self { left: Rc::new(Cell::new(left)), dies }
    }

    fn step(&self) -> io::Result<()> {
        match self.left.get() {
            0 => {
                self.left.set(if self.dies { 0 } else { usize::MAX });
                Err(io::ErrorKind::StorageFull.into())
            }
            left => {
                self.left.set(left - 1);
                Ok(())
            }
        }
    }
}

struct FaultyFile(Box<dyn StorageFile>, Faulty);

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.step()?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.step()
    }
}

impl Storage for Faulty {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.step()?;
        Ok(Box::new(FaultyFile(Disk.create(path)?, self.clone())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Disk.remove(path)
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        self.step()
    }
}

fn copy(storage: &dyn Storage, from: &HfFolder, model: &Model, to: &Path, max: u64) -> Result<Exported, HfError> {
    let options = ExportOptions { dtype: Dtype::F32, shard_bytes_max: max };
    let json = config_json(model, None, options, Style::Public);
    export_to(storage, to, model, &json, options, &mut |tensor, rows, values| {
        let cols = from.tensors()[tensor].cols;
        Ok(from.read(tensor, 0, 1, rows.start * cols..rows.end * cols, values)?)
    })
}

#[test]
fn every_operation_may_fail() {
    let model = Model { layers: 1, ..model(true, false) };
    let stored = weights(&model, Stored::F32, 12);
    let source = tempfile::tempdir().unwrap();
    write(source.path(), &stored);
    let from = HfFolder::open(source.path(), &model).unwrap();
    let expected = stored_in(source.path());
    for (max, dies) in [(u64::MAX, false), (u64::MAX, true), (9000, false), (9000, true)] {
        let mut failures = 0;
        loop {
            let root = tempfile::tempdir().unwrap();
            let to = root.path().join("out");
            match copy(&Faulty::new(failures, dies), &from, &model, &to, max) {
                Ok(_) => {
                    assert_eq!(stored_in(&to), expected);
                    break;
                }
                Err(error) => assert!(matches!(error, HfError::Io { .. }), "{error}"),
            }
            match HfFolder::open(&to, &model) {
                // Died after the last name was given: the folder is whole.
                Ok(_) => assert!(dies && stored_in(&to) == expected, "after {failures} operations"),
                Err(_) => assert!(dies || !to.exists(), "after {failures} operations"),
            }
            failures += 1;
        }
        assert!(failures > 10, "{failures}");
    }
}
