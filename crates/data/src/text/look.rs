//! What a file is, by its content first and its name second. Runs and `lockstep data tokenize` both look here.

use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::atomic::AtomicU64;

use super::foreign::{self, Foreign};
use super::lines::is_object;
use super::unpack::{self, Wrapping};
use crate::DataError;

/// Bytes of the content that are looked at.
const HEAD_BYTES: u64 = 1 << 16;
/// A first line that is longer is not looked at to its end.
const LINE_BYTES_MAX: u64 = 1 << 24;
/// Bytes of a file by which its compression is known.
const MAGIC_BYTES: u64 = 16;

/// A byte order mark in UTF-8, which is no text.
pub(crate) const MARK: &[u8] = b"\xef\xbb\xbf";

/// How a file's content becomes documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    /// It is one document.
    Text,
    /// A document per line, in a field of a JSON object.
    Lines,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) wrapping: Wrapping,
    pub(crate) form: Form,
    /// It begins with [`MARK`], which is left out.
    pub(crate) mark: bool,
}

/// Looks at the file at `path`; `None` if it has no content. `key` is the key of the run file, for messages.
///
/// # Errors
/// What is not text: [`DataError::Foreign`] with what it is and what to do, `NulFilled`, `Damaged`, `Read`.
pub(crate) fn look(path: &Path, key: &'static str) -> Result<Option<Look>, DataError> {
    let count = AtomicU64::new(0);
    let mut start = Vec::new();
    let plain = |e| Wrapping::None.fail(path, key, e);
    let mut source = unpack::open(path, Wrapping::None, &count).map_err(plain)?;
    source.by_ref().take(MAGIC_BYTES).read_to_end(&mut start).map_err(plain)?;
    if start.is_empty() {
        return Ok(None);
    }
    let (promised, ending) = endings(path);
    let wrapping = Wrapping::of_head(&start);
    if promised != Wrapping::None && promised != wrapping {
        let what = "its content is not compressed in the way that its name says".into();
        return Err(DataError::Damaged { path: path.to_owned(), what });
    }
    drop(source);
    let fail = |e| wrapping.fail(path, key, e);
    let mut source = unpack::open(path, wrapping, &count).map_err(fail)?;
    let mut head = Vec::new();
    source.by_ref().take(HEAD_BYTES).read_to_end(&mut head).map_err(fail)?;
    if head.is_empty() {
        return Ok(None);
    }
    if head.iter().all(|&byte| byte == 0) && nothing_but_nul(&mut source).map_err(fail)? {
        let bytes = std::fs::metadata(path).map_err(plain)?.len();
        return Err(DataError::NulFilled { path: path.to_owned(), key, bytes });
    }
    let refuse = |foreign| refuse(path, key, foreign);
    if wrapping != Wrapping::None && Wrapping::of_head(&head) != Wrapping::None {
        return Err(refuse(Foreign::new("compressed twice", "unpack it once")));
    }
    if let Some(foreign) = foreign::of_head(&head) {
        return Err(refuse(foreign));
    }
    let mark = head.starts_with(MARK);
    let form = form(&ending, &mut head.strip_prefix(MARK).unwrap_or(&head).chain(source)).map_err(fail)?;
    Ok(Some(Look { wrapping, form: form.map_err(refuse)?, mark }))
}

/// The error for a file that is not text.
pub(crate) fn refuse(path: &Path, key: &'static str, foreign: Foreign) -> DataError {
    DataError::Foreign { path: path.to_owned(), key, what: foreign.what, remedy: foreign.remedy }
}

/// The compression that the name promises, and the ending before it, in small letters; empty if there is none.
fn endings(path: &Path) -> (Wrapping, String) {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let (inner, last) = name.rsplit_once('.').unwrap_or((&name, ""));
    match Wrapping::of_ending(last) {
        Wrapping::None => (Wrapping::None, last.to_owned()),
        wrapping => (wrapping, inner.rsplit_once('.').map_or(String::new(), |(_, ending)| ending.to_owned())),
    }
}

fn nothing_but_nul(source: &mut dyn BufRead) -> std::io::Result<bool> {
    loop {
        let buffer = source.fill_buf()?;
        if buffer.is_empty() || buffer.iter().any(|&byte| byte != 0) {
            return Ok(buffer.is_empty());
        }
        let len = buffer.len();
        source.consume(len);
    }
}

/// How content under a name with that ending becomes documents, by its first two lines. JSON that is not an object per line is refused.
fn form(ending: &str, content: &mut dyn BufRead) -> std::io::Result<Result<Form, Foreign>> {
    let lines_by_name = matches!(ending, "jsonl" | "ndjson" | "jsonlines");
    let json_by_name = ending == "json";
    let refused = |what: &str, remedy: &str| Ok(Err(Foreign::new(what, remedy)));
    let per_line = "write an object per line, such as with `jq -c . FILE > FILE.jsonl`";
    let first = next_line(content)?;
    match first.trim_ascii_start().first() {
        Some(b'[') if lines_by_name || json_by_name => refused(
            "a JSON array, or lines of them, and not an object per line",
            "write an object per line, such as with `jq -c '.[]' FILE > FILE.jsonl`",
        ),
        Some(b'{') if lines_by_name => Ok(Ok(Form::Lines)),
        Some(b'{') => {
            // Cut off, it is taken for what it begins as.
            let whole = first.len() as u64 == LINE_BYTES_MAX || is_object(&first);
            let second = if whole { next_line(content)? } else { Vec::new() };
            let ends = second.is_empty();
            match json_by_name {
                true if whole && (ends || second.trim_ascii_start().starts_with(b"{")) => Ok(Ok(Form::Lines)),
                true => refused("a JSON document over several lines", per_line),
                // A text may begin with an object; one that goes on with another is made of them.
                false if whole && !ends && is_object(&second) => Ok(Ok(Form::Lines)),
                false => Ok(Ok(Form::Text)),
            }
        }
        _ if lines_by_name => Ok(Ok(Form::Lines)),
        _ if json_by_name => refused("JSON, but not an object per line", per_line),
        _ => Ok(Ok(Form::Text)),
    }
}

/// The next line that is not blank, without more than [`LINE_BYTES_MAX`] of it; empty at the end.
fn next_line(content: &mut dyn BufRead) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    while line.trim_ascii().is_empty() {
        line.clear();
        if Read::take(&mut *content, LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            break;
        }
    }
    Ok(line)
}
