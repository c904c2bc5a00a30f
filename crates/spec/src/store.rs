//! Where copies of checkpoints go: the URL of a folder or of a bucket.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `checkpoint.store`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `file:///FOLDER`.
    Folder(PathBuf),
    /// `s3://BUCKET/PREFIX`.
    S3 {
        /// The bucket.
        bucket: String,
        /// What the names of its objects begin with, without slashes at its ends; not empty.
        prefix: String,
    },
}

impl FromStr for StoreUrl {
    type Err = String;

    /// The error says what it must be.
    fn from_str(url: &str) -> Result<Self, String> {
        let wanted =
            "the URL of a folder or of a place in a bucket, such as \"file:///backup/run-1\" or \"s3://bucket/run-1\"";
        let file = url.strip_prefix("file://");
        let file = file.map(|path| path.strip_prefix("localhost").filter(|p| p.starts_with('/')).unwrap_or(path));
        if let Some(path) = file.filter(|path| path.starts_with('/')) {
            let decoded = decoded(path).ok_or_else(|| {
                format!("{wanted}: in {path:?} a `%` is not followed by two hex digits of a byte of a name; write %25 for `%` itself")
            })?;
            return Ok(Self::Folder(OsString::from_vec(decoded).into()));
        }
        let (bucket, prefix) = url.strip_prefix("s3://").and_then(|rest| rest.split_once('/')).ok_or(wanted)?;
        let prefix = prefix.trim_end_matches('/');
        let of_bucket = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-_".contains(c);
        let of_name = |c: char| c.is_ascii_alphanumeric() || "/.-_=".contains(c);
        if bucket.is_empty() || !bucket.chars().all(of_bucket) {
            return Err(format!("{wanted}: a bucket's name has lower case letters, digits, dots and dashes"));
        }
        if !prefix.chars().all(of_name) || prefix.split('/').any(|part| ["", ".", ".."].contains(&part)) {
            return Err(format!("{wanted}: a place in a bucket has letters, digits and .-_= between single slashes"));
        }
        Ok(Self::S3 { bucket: bucket.into(), prefix: prefix.into() })
    }
}

/// The bytes of a URL's path; none where an escape is broken, or is of a byte that no path has.
fn decoded(path: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut rest) = (Vec::new(), path.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        let byte = digits.iter().try_fold(0, |byte, digit| Some(16 * byte + (*digit as char).to_digit(16)?))?;
        bytes.push(u8::try_from(byte).ok().filter(|byte| *byte != 0)?);
        rest = tail;
    }
    Some(bytes)
}

/// As a URL has it: what is no plain character is escaped.
fn encoded(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"%\"<>\\^`{|}".contains(&byte);
    let bytes = path.as_os_str().as_bytes().iter();
    bytes.map(|byte| if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "file://{}", encoded(path)),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_go_there_and_back_and_others_are_refused() {
        for url in ["file:///backup/run-1", "s3://my-bucket.x/runs/a_b=1"] {
            assert_eq!(url.parse::<StoreUrl>().unwrap().to_string(), url);
        }
        let folder = |url: &str| match url.parse() {
            Ok(StoreUrl::Folder(path)) => path,
            other => panic!("{url:?}: {other:?}"),
        };
        for (url, path, shown) in [
            ("file:///a%20b", "/a b", "file:///a%20b"),
            ("file:///a b", "/a b", "file:///a%20b"),
            ("file:///100%25/%c3%a9", "/100%/\u{e9}", "file:///100%25/%C3%A9"),
            ("file:///\u{e9}", "/\u{e9}", "file:///%C3%A9"),
            ("file://localhost/backup", "/backup", "file:///backup"),
        ] {
            assert_eq!(folder(url), Path::new(path), "{url}");
            assert_eq!(url.parse::<StoreUrl>().unwrap().to_string(), shown);
            assert_eq!(folder(shown), Path::new(path), "{shown}");
        }
        assert_eq!("s3://b/p/".parse::<StoreUrl>().unwrap().to_string(), "s3://b/p");
        for url in [
            "",
            "/backup",
            "file://backup",
            "file:///100%",
            "file:///a%2",
            "file:///a%zz",
            "file:///a%00b",
            "file:///a%+1",
            "file://localhost",
            "s3://b",
            "s3://b/",
            "s3:///p",
            "s3://B/p",
            "s3://b/a//c",
            "s3://b/../c",
            "s3://b/a?x",
            "gs://b/p",
        ] {
            assert!(url.parse::<StoreUrl>().is_err(), "{url:?}");
        }
    }
}
