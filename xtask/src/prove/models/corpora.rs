//! Data that the search writes for its models: texts, folders of tokens and files as Megatron has them.

use std::fs;
use std::path::Path;

use data::DataError;
use data::tokenize::{self, Encode, Limits, Options, Vocabulary};

use super::super::random::Random;

/// Token ids of what is written as tokens; the last one ends documents.
const IDS: usize = 97;
/// Words of the language of the texts.
const WORDS: [&str; 12] =
    ["a", "the", "of", "wind", "stone", "under", "river", "carries", "is", "no", "longer", "evening"];

/// Where it lies.
pub struct Corpora {
    /// Texts: files and a folder.
    pub texts: Vec<String>,
    /// Texts that are held out.
    pub held_out: Vec<String>,
    /// Folders of tokens, and a Megatron prefix.
    pub tokens: Vec<String>,
    /// Token ids of the latter.
    pub ids: usize,
}

impl Corpora {
    /// Writes all of it below `folder`.
    ///
    /// # Errors
    /// What the system or the writer of tokens refuses.
    pub fn write(folder: &Path, random: &mut Random) -> Result<Self, String> {
        let put = |name: String, text: String| {
            let path = folder.join(name);
            let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, text));
            made.map_err(|e| format!("cannot write {}: {e}", path.display()))?;
            Ok::<_, String>(path.display().to_string())
        };
        let mut texts = vec![put("long.txt".into(), prose(random, 2_000))?];
        for number in 0..12 {
            put(format!("many/{number}.txt"), prose(random, 10 + 40 * (number % 4)))?;
        }
        texts.push(folder.join("many").display().to_string());
        let held_out = vec![put("held-out.txt".into(), prose(random, 300))?];
        let mut tokens = Vec::new();
        for (name, documents, words) in [("short", 60, 12), ("mixed", 15, 90)] {
            let lines = (0..documents).map(|_| {
                let words = random.upto(words);
                serde_json::json!({ "text": prose(random, words) }).to_string() + "\n"
            });
            let input = put(format!("{name}.jsonl"), lines.collect())?;
            let out = folder.join(format!("tokens-{name}"));
            tokenized(&input, &out).map_err(|e| format!("cannot write tokens: {e}"))?;
            tokens.push(out.display().to_string());
        }
        tokens.push(megatron(folder, random)?);
        Ok(Self { texts, held_out, tokens, ids: IDS })
    }
}

/// `words` words in sentences.
fn prose(random: &mut Random, words: usize) -> String {
    let mut out = String::new();
    for number in 0..words {
        out += random.one(&WORDS);
        out += if (number + 1).is_multiple_of(11) { ".\n" } else { " " };
    }
    out
}

/// Bytes of text, folded into few ids.
struct Folded;

impl Encode for Folded {
    fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), DataError> {
        into.extend(text.bytes().map(|byte| u32::from(byte) % (IDS as u32 - 1)));
        Ok(())
    }
}

fn tokenized(input: &str, out: &Path) -> Result<(), DataError> {
    let options = Options {
        inputs: vec![input.to_owned()],
        field: "text".into(),
        out: out.to_owned(),
        jobs: 1,
        limits: Limits::default(),
        bad_lines_max: 0,
    };
    let eod = Some((IDS as u32 - 1, "<end>".into()));
    let vocabulary = Vocabulary { ids: IDS, eod, hash: [7; 32], files: Vec::new() };
    tokenize::run(&options, &vocabulary, &|| Box::new(Folded), &mut |_| {}).map(|_| ())
}

/// Both files of Megatron, documents of one sequence each, ids of two bytes; the prefix.
fn megatron(folder: &Path, random: &mut Random) -> Result<String, String> {
    /// Its code of `u16`.
    const U16: u8 = 8;
    let documents: Vec<usize> = (0..40).map(|_| 2 + random.upto(60)).collect();
    let mut bin: Vec<u8> = Vec::new();
    let (mut lengths, mut offsets, mut marks) = (Vec::new(), Vec::new(), 0u64.to_le_bytes().to_vec());
    for (number, len) in documents.iter().enumerate() {
        lengths.extend((*len as u32).to_le_bytes());
        offsets.extend((bin.len() as u64).to_le_bytes());
        marks.extend((number as u64 + 1).to_le_bytes());
        (0..*len).for_each(|_| bin.extend((random.upto(IDS) as u16 - 1).to_le_bytes()));
    }
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(U16);
    idx.extend((documents.len() as u64).to_le_bytes());
    idx.extend((documents.len() as u64 + 1).to_le_bytes());
    [lengths, offsets, marks].into_iter().for_each(|part| idx.extend(part));
    let prefix = folder.join("megatron_text_document");
    for (ending, bytes) in [("bin", bin), ("idx", idx)] {
        let path = prefix.with_extension(ending);
        fs::write(&path, bytes).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(prefix.display().to_string())
}
