//! A file that loses its name while it is written: its content is still there, and is given the name again.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// If nothing is at `path` any more, writes what `file` holds there, with the folders above it; returns the new file, open to be
/// read and appended to. `file` was opened there, to be read.
///
/// # Errors
/// Those of the file system.
pub fn restore(file: &File, path: &Path) -> io::Result<Option<File>> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        other => return other.map(|_| None),
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut content = vec![0; usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?];
    file.read_exact_at(&mut content, 0)?;
    fs::write(path, content)?;
    File::options().read(true).append(true).open(path).map(Some)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_was_written_comes_back_under_its_name() {
        let folder = std::env::temp_dir().join(format!("lockstep-restore-{}", std::process::id()));
        let path = folder.join("events.jsonl");
        fs::create_dir_all(&folder).unwrap();
        let mut file = File::options().create(true).read(true).append(true).open(&path).unwrap();
        file.write_all(b"one\n").unwrap();
        assert!(restore(&file, &path).unwrap().is_none());
        fs::remove_dir_all(&folder).unwrap();
        file.write_all(b"two\n").unwrap();
        let mut again = restore(&file, &path).unwrap().unwrap();
        again.write_all(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
        fs::remove_dir_all(&folder).unwrap();
    }
}
