//! Where copies of checkpoints go: the URL of a folder or of a bucket.

use std::fmt;
use std::path::PathBuf;
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
        if let Some(path) = url.strip_prefix("file://").filter(|path| path.starts_with('/')) {
            return Ok(Self::Folder(path.into()));
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

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "file://{}", path.display()),
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
        assert_eq!("s3://b/p/".parse::<StoreUrl>().unwrap().to_string(), "s3://b/p");
        for url in [
            "",
            "/backup",
            "file://backup",
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
