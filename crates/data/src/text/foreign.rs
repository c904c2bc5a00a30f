//! What is no text, told by its first bytes.

use std::fmt;

/// Control characters that text files hold: backspace, tab, line feed, vertical tab, form feed, return, escape.
const IN_TEXT: [u8; 7] = [0x08, b'\t', b'\n', 0x0b, 0x0c, b'\r', 0x1b];
/// One byte in so many may be another control character.
const CONTROL_EVERY: usize = 32;
/// One byte in so many that is NUL, all on one side of each pair, is UTF-16 of mostly Latin letters.
const WIDE_EVERY: usize = 4;
/// Where a tar archive says that it is one.
const TAR_AT: usize = 257;

/// Something that is not text, and how to make text of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    pub(crate) what: String,
    pub(crate) remedy: String,
}

impl Foreign {
    pub(crate) fn new(what: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { what: what.to_string(), remedy: remedy.to_string() }
    }
}

const PARQUET: &str = "write its text as JSON lines, such as with pandas: \
                       pandas.read_parquet(\"FILE\").to_json(\"FILE.jsonl\", orient=\"records\", lines=True)";
const UNPACK: &str = "unpack it, and name the folder with what was in it";
const REPACK: &str = "unpack it, or pack it with gzip, xz or zstd";
const EXTRACT: &str = "extract its text into a text file, or leave the file out";
const EXPORT: &str = "write its text as JSON lines, an object with the field \"text\" per line";
const REMOVE: &str = "leave the file out: move it to another folder, or name the files that are text";

/// What a file begins with, what that is, and what to do.
const BEGINS: &[(&[u8], &str, &str)] = &[
    (b"PAR1", "a parquet file", PARQUET),
    (b"ARROW1", "an Arrow file", EXPORT),
    (b"\xff\xff\xff\xff", "an Arrow stream or other binary data", EXPORT),
    (b"ORC", "an ORC file", EXPORT),
    (b"Obj\x01", "an Avro file", EXPORT),
    (b"SQLite format 3\0", "an SQLite data base", EXPORT),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", EXPORT),
    (b"\x93NUMPY", "a NumPy array; tokens of NumPy are no documents", EXPORT),
    (b"PK\x03\x04", "a zip archive (.zip, .npz, .docx, .epub, ...)", UNPACK),
    (b"PK\x05\x06", "an empty zip archive", REMOVE),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (b"BZh", "compressed with bzip2", REPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", REPACK),
    (b"\xff\x06\0\0sNaPpY", "compressed with snappy", REPACK),
    (b"\x1f\x9d", "compressed with compress", REPACK),
    (b"LZIP", "compressed with lzip", REPACK),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", REMOVE),
    (b"\xff\xd8\xff", "a JPEG image", REMOVE),
    (b"GIF8", "a GIF image", REMOVE),
    (b"RIFF", "a RIFF file (.wav, .webp, .avi)", REMOVE),
    (b"OggS", "an Ogg file", REMOVE),
    (b"%PDF-", "a PDF file", EXTRACT),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of Microsoft Office", EXTRACT),
    (b"{\\rtf", "a document of rich text", EXTRACT),
    (b"\x7fELF", "a program", REMOVE),
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the file itself",
        "fetch it with `git lfs pull`",
    ),
    (b"/annex/objects/", "a pointer of git-annex, not the file itself", "fetch it with `git annex get FILE`"),
    (b"\xff\xfe\0\0", "text in UTF-32", "convert it with `iconv -f UTF-32 -t UTF-8 FILE > FILE.txt`"),
    (b"\0\0\xfe\xff", "text in UTF-32", "convert it with `iconv -f UTF-32 -t UTF-8 FILE > FILE.txt`"),
    (b"\xff\xfe", "text in UTF-16", "convert it with `iconv -f UTF-16 -t UTF-8 FILE > FILE.txt`"),
    (b"\xfe\xff", "text in UTF-16", "convert it with `iconv -f UTF-16 -t UTF-8 FILE > FILE.txt`"),
];

/// What the content that begins with `head` is, if it is not text.
pub(crate) fn of_head(head: &[u8]) -> Option<Foreign> {
    let mut known = BEGINS.iter().filter(|(magic, ..)| head.starts_with(magic) && sure(magic, head));
    if let Some((_, what, remedy)) = known.next() {
        return Some(Foreign::new(what, remedy));
    }
    if head.get(TAR_AT..).is_some_and(|rest| rest.starts_with(b"ustar")) {
        return Some(Foreign::new("a tar archive", UNPACK));
    }
    wide(head).or_else(|| binary(head))
}

/// Whether a head that begins with `magic` is what that says: a text may begin with some of these letters.
fn sure(magic: &[u8], head: &[u8]) -> bool {
    match magic {
        b"BZh" => head.get(4..10) == Some(b"1AY&SY") || head.get(4..10) == Some(b"\x17\x72\x45\x38\x50\x90"),
        b"PAR1" | b"ARROW1" | b"ORC" | b"RIFF" | b"OggS" | b"LZIP" | b"GIF8" => binary(head).is_some(),
        _ => true,
    }
}

/// UTF-16 without a mark.
fn wide(head: &[u8]) -> Option<Foreign> {
    let nul = |side| head.iter().skip(side).step_by(2).filter(|&&byte| byte == 0).count();
    let [even, odd] = [0, 1].map(nul);
    let (most, least, name) = if even > odd { (even, odd, "UTF-16BE") } else { (odd, even, "UTF-16LE") };
    let is = head.len() >= 8 && most * WIDE_EVERY >= head.len() && least * 16 <= most;
    is.then(|| {
        let remedy = format!("convert it with `iconv -f {name} -t UTF-8 FILE > FILE.txt`");
        Foreign::new(format!("text in {name}, or binary data"), remedy)
    })
}

/// Binary data: a NUL byte anywhere, or many control characters.
pub(crate) fn binary(bytes: &[u8]) -> Option<Foreign> {
    if let Some(at) = bytes.iter().position(|&byte| byte == 0) {
        return Some(Foreign::new(format!("binary data (byte {at} is NUL)"), REMOVE));
    }
    let control = bytes.iter().filter(|&&byte| (byte < 0x20 || byte == 0x7f) && !IN_TEXT.contains(&byte)).count();
    (control * CONTROL_EVERY > bytes.len()).then(|| {
        let of = bytes.len();
        Foreign::new(format!("binary data ({control} of {of} bytes are control characters)"), REMOVE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_text_whatever_it_begins_with() {
        for text in [
            "",
            "a",
            "PAR1 is the magic of parquet",
            "BZhang wrote this",
            "RIFF RAFF",
            "ORChestra",
            "GIF8 and so on",
            "version 1",
            "\u{feff}with a mark",
            "\x1b[1mbold\x1b[0m",
            "caf\u{e9}\r\n\x0c",
        ] {
            assert_eq!(of_head(text.as_bytes()), None, "{text}");
        }
        assert_eq!(of_head(b"Latin-1: caf\xe9 cr\xe8me"), None);
    }

    #[test]
    fn what_is_no_text_is_named() {
        let wide = |mark: &[u8], big: bool| {
            let units =
                "UTF-16 text".encode_utf16().flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() });
            mark.iter().copied().chain(units).collect::<Vec<u8>>()
        };
        let mut tar = vec![b'x'; 600];
        tar[TAR_AT..TAR_AT + 5].copy_from_slice(b"ustar");
        let noise: Vec<u8> = (0..2000).map(|n| crate::random::word(7, n) as u8).collect();
        let no_nul: Vec<u8> = noise.iter().map(|&byte| byte.max(1)).collect();
        let table: Vec<(Vec<u8>, &str)> = vec![
            (b"PAR1\x15\x04\x15\0".to_vec(), "parquet"),
            (b"\x89PNG\r\n\x1a\n\0\0".to_vec(), "PNG"),
            (b"PK\x03\x04\x14\0".to_vec(), "zip"),
            (b"BZh91AY&SY\x01".to_vec(), "bzip2"),
            (b"%PDF-1.7\n".to_vec(), "PDF"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n".to_vec(), "Git LFS"),
            (wide(b"\xff\xfe", false), "UTF-16"),
            (wide(b"\xfe\xff", true), "UTF-16"),
            (wide(b"", false), "UTF-16LE"),
            (wide(b"", true), "UTF-16BE"),
            (tar, "tar"),
            (noise, "binary"),
            (no_nul, "control characters"),
        ];
        for (head, expected) in table {
            let foreign = of_head(&head).expect(expected);
            assert!(foreign.what.contains(expected) && !foreign.remedy.is_empty(), "{foreign:?}");
        }
    }
}
