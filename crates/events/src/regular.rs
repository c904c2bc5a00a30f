//! Files of a run's folder are regular ones. A pipe in the place of one would stop whoever opens it, for ever.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// That what is at `path` is a regular file, or a link to one, or that nothing is there.
///
/// # Errors
/// What it is instead.
pub fn check(path: &Path) -> io::Result<()> {
    // What cannot be looked at says so when it is opened, and does not block.
    let Ok(kind) = fs::metadata(path).map(|found| found.file_type()) else { return Ok(()) };
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::other(format!("it is {what}, where a file must be; move it away")))
}

/// Opens a regular file.
///
/// # Errors
/// As [`check`], and those of the file system.
pub fn open(options: &OpenOptions, path: &Path) -> io::Result<File> {
    check(path)?;
    options.open(path)
}

/// The bytes of a regular file.
///
/// # Errors
/// As [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    check(path)?;
    fs::read(path)
}

/// The text of a regular file.
///
/// # Errors
/// As [`open`], and text that is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    check(path)?;
    fs::read_to_string(path)
}

/// Makes `bytes` the content of a regular file.
///
/// # Errors
/// As [`open`].
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    check(path)?;
    fs::write(path, bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_no_file_is_named_and_not_opened() {
        let folder = std::env::temp_dir().join(format!("lockstep-regular-{}", std::process::id()));
        drop(fs::remove_dir_all(&folder));
        fs::create_dir_all(folder.join("folder")).unwrap();
        let _socket = UnixListener::bind(folder.join("socket")).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap();
        assert!(pipe.success());
        for (name, what) in [("folder", "a folder"), ("socket", "a socket"), ("pipe", "a named pipe")] {
            let path = folder.join(name);
            for error in [
                read(&path).unwrap_err(),
                read_to_string(&path).unwrap_err(),
                write(&path, "x").unwrap_err(),
                open(File::options().append(true), &path).unwrap_err(),
            ] {
                assert!(error.to_string().contains(what), "{name}: {error}");
            }
        }
        let path = folder.join("file");
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        write(&path, "text").unwrap();
        std::os::unix::fs::symlink(&path, folder.join("link")).unwrap();
        assert_eq!(read_to_string(&folder.join("link")).unwrap(), "text");
        fs::remove_dir_all(&folder).unwrap();
    }
}
