//! Zstandard files of any number of frames as one stream of bytes.

use std::io::{self, BufRead, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The content of all frames, one after another; skippable frames are skipped, checksums are checked.
pub(crate) struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// Within a frame.
    inside: bool,
}

impl<R: BufRead> Frames<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), inside: false }
    }

    /// Begins the next frame; false at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut self.source.by_ref().take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
    }

    /// Checks the frame that ended.
    fn end(&mut self) -> io::Result<()> {
        self.inside = false;
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(written), Some(found)) if written != found => {
                Err(io::Error::other(format!("the checksum of a frame is {found:08x}, {written:08x} was written")))
            }
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.inside {
                self.inside = self.begin()?;
                if !self.inside {
                    return Ok(0);
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, blocks).map_err(|e| io::Error::other(e.to_string()))?;
            }
            let bytes = self.decoder.read(into)?;
            if bytes > 0 || into.is_empty() {
                return Ok(bytes);
            }
            self.end()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn decode(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Frames::new(bytes).read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn frames_follow_each_other() {
        let text: Vec<u8> = (0..300_000u32).map(|i| (i / 7 % 251) as u8).collect();
        let frame = |text: &[u8]| compress_to_vec(text, CompressionLevel::Fastest);
        let mut file = frame(&text);
        file.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        file.extend(frame(b""));
        file.extend(frame(b"end"));
        let mut expected = text.clone();
        expected.extend(b"end");
        assert_eq!(decode(&file).expect("decodes"), expected);
        assert!(decode(b"").expect("no frame").is_empty());
        for cut in [1, 3, 7, 20, file.len() - 1] {
            assert!(decode(&file[..cut]).is_err(), "cut at {cut}");
        }
        assert!(decode(b"this is not zstandard").is_err());
    }
}
