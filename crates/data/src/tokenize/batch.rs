//! Batches: read on one thread, encoded on any.

use std::io::{BufRead, Read};
use std::sync::atomic::AtomicU64;

use super::filter::Reason;
use super::input::File;
use super::{Encode, Options};
use crate::DataError;
use crate::text::lines::text_of;

/// Bytes of lines in a batch.
const BATCH_BYTES: usize = 1 << 20;
/// A line may be so many times longer than the longest document, since JSON escapes characters.
const ESCAPE_FACTOR: u64 = 6;
/// And have so much beside its text.
const LINE_EXTRA_BYTES: u64 = 1 << 20;

/// Part of a file.
pub(super) struct Batch {
    file: usize,
    content: Content,
}

enum Content {
    /// A document.
    Text(Vec<u8>),
    /// Whole lines, and the number of the first.
    Lines(Vec<u8>, u64),
    /// A document too long to be read, and its place.
    TooLong(String),
}

/// A batch as tokens.
pub(super) struct Done {
    pub(super) file: usize,
    pub(super) tokens: Vec<u32>,
    /// Tokens and bytes of text of each document.
    pub(super) documents: Vec<(u64, u64)>,
    /// Why, and where in the file.
    pub(super) left_out: Vec<(Reason, String)>,
    /// Number of the line, and what is wrong with it.
    pub(super) bad_lines: Vec<(u64, String)>,
}

/// Reads `file`, the one with that index, into batches; `send` says whether to go on.
pub(super) fn read(
    index: usize,
    file: &File,
    options: &Options,
    read: &AtomicU64,
    send: &mut dyn FnMut(Result<Batch, DataError>) -> bool,
) -> Result<(), DataError> {
    let mut source = file.open(read)?;
    let fail = |e| file.fail(e);
    let mut send = |content| send(Ok(Batch { file: index, content }));
    let limit = options.limits.document_bytes_max;
    if !file.lines() {
        let mut text = Vec::new();
        source.take(limit.saturating_add(1)).read_to_end(&mut text).map_err(fail)?;
        let content = if text.len() as u64 > limit { Content::TooLong(String::new()) } else { Content::Text(text) };
        send(content);
        return Ok(());
    }
    let line_max = limit.saturating_mul(ESCAPE_FACTOR).saturating_add(LINE_EXTRA_BYTES);
    let (mut lines, mut first, mut number) = (Vec::new(), 1, 1);
    loop {
        let before = lines.len();
        source.by_ref().take(line_max).read_until(b'\n', &mut lines).map_err(fail)?;
        let taken = (lines.len() - before) as u64;
        let long = taken == line_max && lines.last() != Some(&b'\n');
        if long {
            lines.truncate(before);
            skip_line(&mut source).map_err(fail)?;
        }
        number += u64::from(taken > 0);
        if (taken == 0 || long || lines.len() >= BATCH_BYTES) && !lines.is_empty() {
            if !send(Content::Lines(std::mem::take(&mut lines), first)) {
                return Ok(());
            }
            first = number;
        }
        if long {
            first = number;
            if !send(Content::TooLong(format!(":{}", number - 1))) {
                return Ok(());
            }
        }
        if taken == 0 {
            return Ok(());
        }
    }
}

/// Reads on behind the next line end.
fn skip_line(source: &mut dyn BufRead) -> std::io::Result<()> {
    loop {
        let buffer = source.fill_buf()?;
        let (len, end) = match buffer.iter().position(|&byte| byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (buffer.len(), buffer.is_empty()),
        };
        source.consume(len);
        if end {
            return Ok(());
        }
    }
}

/// Encodes a batch.
pub(super) fn encode(batch: Batch, options: &Options, encoder: &mut dyn Encode) -> Result<Done, DataError> {
    let mut done = Done {
        file: batch.file,
        tokens: Vec::new(),
        documents: Vec::new(),
        left_out: Vec::new(),
        bad_lines: Vec::new(),
    };
    match batch.content {
        Content::TooLong(place) => done.left_out.push((Reason::TooLong, place)),
        Content::Text(bytes) => match std::str::from_utf8(&bytes) {
            Ok(text) => done.document(text, String::new, options, encoder)?,
            Err(e) => done.left_out.push((Reason::InvalidText, format!(" at byte {}", e.valid_up_to()))),
        },
        Content::Lines(bytes, first) => {
            for (number, line) in (first..).zip(bytes.split_inclusive(|&byte| byte == b'\n')) {
                if line.trim_ascii().is_empty() {
                    continue;
                }
                match text_of(line, &options.field) {
                    Ok(text) => done.document(&text, || format!(":{number}"), options, encoder)?,
                    Err(what) => done.bad_lines.push((number, what)),
                }
            }
        }
    }
    Ok(done)
}

impl Done {
    fn document(
        &mut self,
        text: &str,
        place: impl Fn() -> String,
        options: &Options,
        encoder: &mut dyn Encode,
    ) -> Result<(), DataError> {
        if let Some(reason) = options.limits.text(text) {
            self.left_out.push((reason, place()));
            return Ok(());
        }
        let before = self.tokens.len();
        encoder.encode(text, &mut self.tokens)?;
        if let Some(reason) = options.limits.tokens(&self.tokens[before..]) {
            self.tokens.truncate(before);
            self.left_out.push((reason, place()));
            return Ok(());
        }
        self.documents.push(((self.tokens.len() - before) as u64, text.len() as u64));
        Ok(())
    }
}
