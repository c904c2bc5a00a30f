//! Six novels of Jane Austen, in the binary: real text on every machine. `corpus/README.md` tells their origin.
//!
//! A document is a chapter: there are 269 of similar length, so that a small share of them can be held out, from all
//! novels, which is not so with six documents.

use std::io::Read;

use lzma_rust2::XzReader;

use crate::text::Documents;

/// The novels as one text.
const PACKED: &[u8] = include_bytes!("../corpus/austen.txt.xz");

/// The byte between two chapters; it stands nowhere else.
const SEPARATOR: u8 = 0x0c;

/// Every chapter, in the order in which the novels appeared.
pub(crate) fn read() -> Documents {
    let mut documents = Documents::default();
    unpacked().split(|&byte| byte == SEPARATOR).for_each(|chapter| documents.push(chapter));
    documents
}

fn unpacked() -> Vec<u8> {
    let mut text = Vec::new();
    XzReader::new(PACKED, false).read_to_end(&mut text).expect("the text in the binary is whole, as a test checks");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_novels_are_what_their_origin_says() {
        let text = unpacked();
        let readme = include_str!("../corpus/README.md");
        for hash in [blake3::hash(PACKED), blake3::hash(&text)].map(|hash| hash.to_hex()) {
            assert!(readme.contains(hash.as_str()), "{hash} is not in corpus/README.md");
        }
        let text = String::from_utf8(text).expect("UTF-8");
        assert!(text.starts_with("SENSE AND SENSIBILITY\n") && text.ends_with("\nFinis\n"));
        let documents = read();
        assert_eq!(documents.ends.len(), 269);
        // What is between two chapters belongs to none.
        assert_eq!(documents.bytes.len() + 268, text.len());
    }
}
