//! A place in a bucket of S3, or of what speaks its protocol.

use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::future::try_join_all;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::path::Path as Key;
use object_store::{BackoffConfig, Error, ObjectStore, ObjectStoreExt, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use super::objects::Objects;

/// Bytes of one request: a larger file goes in parts.
const PART: u64 = 8 << 20;
/// A file has at most so many parts; S3's own limit is 10,000.
const PARTS_MAX: u64 = 9_000;
/// Parts that are under way at a time.
const PARTS_AT_ONCE: u64 = 4;
/// Tries of one request before the whole copy is tried again later.
const RETRIES_MAX: usize = 5;
/// No request is tried for longer.
const RETRY_LIMIT: Duration = Duration::from_secs(60);

/// The place.
pub struct S3 {
    store: AmazonS3,
    prefix: Key,
    runtime: Runtime,
}

impl S3 {
    /// `prefix` in `bucket`, by `settings`: those that every program for S3 knows, such as `AWS_ACCESS_KEY_ID`, `AWS_REGION`,
    /// `AWS_ENDPOINT` and `AWS_ALLOW_HTTP`; others are passed over. Nothing is asked of the store yet.
    ///
    /// # Errors
    /// Settings that cannot be.
    pub fn open(
        bucket: &str,
        prefix: &str,
        settings: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, String> {
        let backoff =
            BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
        let retry = RetryConfig { backoff, max_retries: RETRIES_MAX, retry_timeout: RETRY_LIMIT };
        let known = |(name, value): (String, String)| {
            let name = name.to_ascii_lowercase();
            let key = name.starts_with("aws_").then(|| AmazonS3ConfigKey::from_str(&name).ok()).flatten()?;
            Some((key, value))
        };
        let store = settings
            .into_iter()
            .filter_map(known)
            .fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value))
            .with_bucket_name(bucket)
            // The store refuses what is not what was sent.
            .with_checksum_algorithm(Checksum::SHA256)
            .with_disable_bulk_delete(true)
            .with_retry(retry)
            .build()
            .map_err(|e| e.to_string())?;
        let prefix = Key::parse(prefix).map_err(|e| e.to_string())?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        Ok(Self { store, prefix, runtime })
    }

    fn key(&self, name: &str) -> Key {
        name.split('/').fold(self.prefix.clone(), |key, part| key.join(part))
    }

    fn wait<T>(&self, asked: impl Future<Output = Result<T, Error>>) -> io::Result<T> {
        self.runtime.block_on(asked).map_err(|e| match e {
            Error::NotFound { .. } => io::Error::new(io::ErrorKind::NotFound, e),
            other => io::Error::other(other),
        })
    }

    fn put_parts(&self, key: &Key, file: &File, bytes: u64) -> io::Result<()> {
        let part = PART.max(bytes.div_ceil(PARTS_MAX));
        let mut upload = self.wait(self.store.put_multipart(key))?;
        let mut sent = || {
            let mut at = 0;
            while at < bytes {
                let mut under_way = Vec::new();
                for _ in 0..PARTS_AT_ONCE {
                    let len = part.min(bytes - at);
                    if len > 0 {
                        under_way.push(upload.put_part(read(file, at, len)?.into()));
                        at += len;
                    }
                }
                self.wait(try_join_all(under_way))?;
            }
            self.wait(upload.complete()).map(drop)
        };
        sent().inspect_err(|_| {
            // The first error counts; what was sent is no object.
            let _ = self.wait(upload.abort());
        })
    }
}

fn read(file: &File, at: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

impl Objects for S3 {
    fn put(&self, name: &str, from: &Path) -> io::Result<()> {
        let file = File::open(from)?;
        let (key, bytes) = (self.key(name), file.metadata()?.len());
        if bytes > PART {
            return self.put_parts(&key, &file, bytes);
        }
        let payload = read(&file, 0, bytes)?;
        self.wait(self.store.put(&key, payload.into())).map(drop)
    }

    fn get(&self, name: &str, to: &mut dyn Write) -> io::Result<()> {
        let key = self.key(name);
        let bytes = self.wait(self.store.head(&key))?.size;
        let mut at = 0;
        while at < bytes {
            let end = (at + PART).min(bytes);
            let part = self.wait(self.store.get_range(&key, at..end))?;
            if part.len() as u64 != end - at {
                return Err(io::Error::other(format!("{} bytes came of the {at}..{end} of {key}", part.len())));
            }
            to.write_all(&part)?;
            at = end;
        }
        Ok(())
    }

    fn size(&self, name: &str) -> io::Result<Option<u64>> {
        match self.wait(self.store.head(&self.key(name))) {
            Ok(found) => Ok(Some(found.size)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn list(&self) -> io::Result<BTreeMap<String, u64>> {
        let found: Vec<_> = self.wait(self.store.list(Some(&self.prefix)).try_collect())?;
        let prefix = format!("{}/", self.prefix);
        let named = found.into_iter().filter_map(|meta| {
            let name = meta.location.as_ref().strip_prefix(&prefix)?.to_owned();
            Some((name, meta.size))
        });
        Ok(named.collect())
    }

    fn copy(&self, from: &str, to: &str) -> io::Result<()> {
        self.wait(self.store.copy(&self.key(from), &self.key(to)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match self.wait(self.store.delete(&self.key(name))) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}
