//! Reading tokens: folders, Megatron files, mixtures, packings, and everything that is damaged.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Scratch, options, text, tokenize, tokens};
use data::megatron::Index;
use data::{DataError, Dataset, IGNORE, PAD, Sequence, Split, folder};
use proptest::prelude::*;
use spec::run::{DataConfig, Packing};

/// A folder of tokens, which are the bytes of `documents`.
fn written(scratch: &Scratch, name: &str, documents: &[&str]) -> String {
    let lines: String = documents.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect();
    let input = scratch.write(&format!("{name}.jsonl"), lines);
    let out = scratch.path().join(name);
    tokenize(&options(&[&input], &out), 300).expect("written");
    out.display().to_string()
}

/// Both files of Megatron, of documents that are lists of sequences, as words of type `code`.
fn megatron(folder: &Path, code: u8, documents: &[&[&[u32]]]) -> PathBuf {
    let width = [0, 1, 1, 2, 4, 8, 8, 4, 2][usize::from(code)];
    let (mut bin, mut lengths, mut offsets, mut marks) = (Vec::new(), Vec::new(), Vec::new(), vec![0u64]);
    for document in documents {
        for sequence in *document {
            lengths.extend((sequence.len() as u32).to_le_bytes());
            offsets.extend((bin.len() as u64).to_le_bytes());
            sequence.iter().for_each(|&id| bin.extend(&u64::from(id).to_le_bytes()[..width]));
        }
        marks.push(lengths.len() as u64 / 4);
    }
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(code);
    idx.extend((lengths.len() as u64 / 4).to_le_bytes());
    idx.extend((marks.len() as u64).to_le_bytes());
    idx.extend(lengths);
    idx.extend(offsets);
    marks.iter().for_each(|mark| idx.extend(mark.to_le_bytes()));
    let prefix = folder.join(format!("code{code}_text_document"));
    fs::write(prefix.with_extension("bin"), bin).expect("written");
    fs::write(prefix.with_extension("idx"), idx).expect("written");
    prefix
}

fn epoch(dataset: &Dataset) -> Vec<Sequence> {
    let mut sequences: Vec<_> = (0..dataset.sequences(Split::Train))
        .map(|index| (dataset.place(Split::Train, index), dataset.sequence(Split::Train, index)))
        .collect();
    sequences.sort_by_key(|(place, _)| *place);
    sequences.into_iter().map(|(_, sequence)| sequence).collect()
}

#[test]
fn tokens_of_bytes_are_as_text_but_for_the_end() {
    let scratch = Scratch::new();
    let documents = ["some text", "more of it, and longer", "x", "the last document"];
    let folder = written(&scratch, "tokens", &documents);
    let files: Vec<String> = documents.iter().enumerate().map(|(i, d)| scratch.write(&format!("t/{i}"), d)).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    for (masks, packing) in [(true, Packing::Stream), (false, Packing::Stream), (true, Packing::BestFit)] {
        let open = |config| Dataset::open(&DataConfig { masks, packing, ..config }, 12, None).expect("opens");
        let (of_tokens, of_text) = (open(tokens(&[&folder])), open(text(&files)));
        let as_text = |list: Vec<u32>| list.into_iter().map(|id| if id == 299 { 256 } else { id }).collect();
        let expected: Vec<_> = epoch(&of_tokens)
            .into_iter()
            .map(|s| Sequence { tokens: as_text(s.tokens), targets: as_text(s.targets), ..s })
            .collect();
        assert_eq!(expected, epoch(&of_text));
    }
}

#[test]
fn megatron_files_are_read_as_they_are() {
    let scratch = Scratch::new();
    for code in [1, 3, 4, 5, 8] {
        let documents: [&[&[u32]]; 3] = [&[&[1, 2, 3], &[4, 100]], &[], &[&[5, 6, 7, 100]]];
        let prefix = megatron(scratch.path(), code, &documents);
        let endings: &[&str] = if code == 4 { &["", ".bin", ".idx"] } else { &[""] };
        for ending in endings {
            let path = format!("{}{ending}", prefix.display());
            let dataset = Dataset::open(&tokens(&[&path]), 9, None).expect("opens");
            assert_eq!(dataset.documents(Split::Train), 2);
            let sequence = dataset.sequence(Split::Train, 0);
            assert_eq!(sequence.tokens, [1, 2, 3, 4, 100, 5, 6, 7, 100]);
            assert_eq!(sequence.targets, [2, 3, 4, 100, IGNORE, 6, 7, 100, IGNORE]);
            assert_eq!(sequence.target_bytes, [0; 9]);
            let error = Dataset::open(&DataConfig { vocab: 100, ..tokens(&[&path]) }, 9, None).expect_err("id 100");
            assert!(matches!(error, DataError::Vocabulary { ids: 101, vocab: 100, .. }), "{error}");
        }
    }
}

#[test]
fn what_does_not_match_is_named() {
    let scratch = Scratch::new();
    let prefix = megatron(scratch.path(), 8, &[&[&[1, 2, 3]], &[&[4, 5]]]);
    let path = prefix.display().to_string();
    let (bin, idx) = (prefix.with_extension("bin"), prefix.with_extension("idx"));
    let good = fs::read(&idx).expect("read");
    let refusal = || Dataset::open(&tokens(&[&path]), 2, None).expect_err("refused").to_string();
    let edits: [(usize, u8, &str); 8] = [
        (0, b'X', "MMIDIDX"),
        (9, 2, "version 2"),
        (17, 6, "floating point"),
        (17, 77, "dtype code 77"),
        (18, 3, "3 sequences"),
        (34, 2, "sequence 1"),
        (42, 1, "sequence 0"),
        (58, 1, "document marks"),
    ];
    for (at, byte, expected) in edits {
        let mut bytes = good.clone();
        bytes[at] = byte;
        fs::write(&idx, bytes).expect("written");
        let said = refusal();
        assert!(said.contains(expected) && said.contains(".idx"), "{expected}: {said}");
    }
    fs::write(&idx, &good).expect("written");
    fs::write(&bin, [0; 8]).expect("written");
    let said = refusal();
    assert!(said.contains("does not match") && said.contains("are 10 bytes") && said.contains("has 8"), "{said}");
    fs::remove_file(&bin).expect("removed");
    assert!(refusal().contains(".bin"));
    let said = Dataset::open(&tokens(&["/no/such"]), 2, None).expect_err("refused").to_string();
    assert!(said.contains("/no/such") && said.contains("data tokenize"), "{said}");
}

#[test]
fn damaged_folders_are_named() {
    let scratch = Scratch::new();
    let path = written(&scratch, "tokens", &["one", "two and more"]);
    let file = |name: &str| Path::new(&path).join(name);
    let refusal = |config: DataConfig| Dataset::open(&config, 4, None).expect_err("refused").to_string();
    let said = refusal(DataConfig { vocab: 299, ..tokens(&[&path]) });
    assert!(said.contains("300 token ids") && said.contains("model.vocab is 299") && said.contains(&path), "{said}");
    for name in [folder::TOKENS, folder::DOCUMENTS] {
        let good = fs::read(file(name)).expect("read");
        fs::write(file(name), &good[..good.len() - 1]).expect("written");
        let said = refusal(tokens(&[&path]));
        assert!(said.contains(name) && said.contains("bytes found"), "{said}");
        fs::write(file(name), good).expect("written");
    }
    let good = fs::read(file(folder::DOCUMENTS)).expect("read");
    for at in [0, 8, 16, 24] {
        let mut bytes = good.clone();
        bytes[at] = 200;
        fs::write(file(folder::DOCUMENTS), bytes).expect("written");
        assert!(refusal(tokens(&[&path])).contains(folder::DOCUMENTS));
    }
    fs::write(file(folder::DOCUMENTS), good).expect("written");
    let header = fs::read_to_string(file(folder::HEADER)).expect("read");
    let edits = [
        ("lockstep tokens", "other tokens"),
        ("\"version\": 1", "\"version\": 2"),
        ("u16", "f32"),
        ("\"eod\": 299", "\"eod\": 300"),
        ("\"tokens\": 15", "\"tokens\": 16"),
        ("\"magic\"", "\"unknown\""),
        ("{", ""),
    ];
    for (from, to) in edits {
        assert!(header.contains(from), "{from} in {header}");
        fs::write(file(folder::HEADER), header.replacen(from, to, 1)).expect("written");
        refusal(tokens(&[&path]));
    }
    fs::write(file(folder::HEADER), header.replace("\"eod\": 299", "\"eod\": null")).expect("written");
    let error = Dataset::open(&tokens(&[&path]), 4, None).expect_err("no end");
    assert!(matches!(error, DataError::NoEod { .. }), "{error}");
    Dataset::open(&DataConfig { eod: false, ..tokens(&[&path]) }, 4, None).expect("without ends");
    fs::write(file(folder::HEADER), &header).expect("written");
    let other = written(&scratch, "other", &["three"]);
    let changed = fs::read_to_string(Path::new(&other).join(folder::HEADER)).expect("read").replace("0707", "0808");
    fs::write(Path::new(&other).join(folder::HEADER), changed).expect("written");
    let error = Dataset::open(&tokens(&[&path, &other]), 4, None).expect_err("two tokenizers");
    assert!(matches!(error, DataError::Tokenizers { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_an_index_or_a_reason(bytes: Vec<u8>, edits in prop::collection::vec((0usize..90, any::<u8>()), 0..4)) {
        let _ = Index::parse(&bytes);
        let _ = folder::Header::parse(&bytes, Path::new("header.json"));
        let mut near = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        near.extend([1, 0, 0, 0, 2, 0, 0, 0]);
        near.extend([0u64, 2, 0, 2].iter().flat_map(|n| n.to_le_bytes()));
        assert!(Index::parse(&near).is_ok());
        for (at, byte) in edits {
            if let Some(place) = near.get_mut(at) {
                *place = byte;
            }
            let _ = Index::parse(&near);
        }
    }
}

fn open_text(documents: &[Vec<u8>], seq: usize, eod: bool) -> Option<Dataset> {
    let scratch = Scratch::new();
    for (number, document) in documents.iter().enumerate() {
        scratch.write(&format!("{number:04}"), document);
    }
    let config = DataConfig { packing: Packing::BestFit, eod, ..text(&[&scratch.path().display().to_string()]) };
    Dataset::open(&config, seq, None).ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn best_fit_has_every_target_once_and_cuts_only_what_is_longer(
        lengths in prop::collection::vec(1usize..50, 1..30), seq in 2usize..40, eod: bool,
    ) {
        // Documents that can be told apart: two bytes of number, then counting.
        let document = |(number, &len): (usize, &usize)| -> Vec<u8> {
            (0..len).map(|at| if at == 0 { 65 + number as u8 } else { 128 + at as u8 }).collect()
        };
        let documents: Vec<Vec<u8>> = lengths.iter().enumerate().map(document).collect();
        let Some(dataset) = open_text(&documents, seq, eod) else { return Ok(()) };
        let sequences = epoch(&dataset);
        let mut targets = 0;
        let mut whole = 0;
        for sequence in &sequences {
            let mut at = 0;
            while at < seq {
                let start = sequence.doc_start[at];
                prop_assert_eq!(start as usize, at);
                let end = (at..seq).find(|&i| sequence.doc_start[i] != start).unwrap_or(seq);
                for i in at..end {
                    prop_assert_eq!(sequence.positions[i], (i - at) as u32);
                    if i + 1 < end && sequence.tokens[at] != PAD {
                        prop_assert_eq!(sequence.targets[i], sequence.tokens[i + 1]);
                    }
                }
                targets += sequence.targets[at..end].iter().filter(|&&target| target != IGNORE).count();
                let first = sequence.tokens[at];
                if (65..128).contains(&first) {
                    let len = documents[first as usize - 65].len() + usize::from(eod);
                    whole += usize::from(len <= seq);
                    prop_assert!(len > seq || end - at == len, "a document of {} is cut to {}", len, end - at);
                }
                at = end;
            }
        }
        let all = documents.iter().map(|d| d.len() + usize::from(eod));
        prop_assert_eq!(targets, all.clone().map(|len| len - 1).sum::<usize>());
        prop_assert_eq!(whole, all.filter(|&len| (2..=seq).contains(&len)).count());
        // No two sequences could be one.
        let used = |s: &Sequence| seq - s.doc_start.iter().zip(&s.tokens).rev().take_while(|(_, t)| **t == PAD).count();
        let mut rooms: Vec<usize> = sequences.iter().map(used).collect();
        rooms.sort_unstable();
        if let [a, b, ..] = rooms.as_slice() {
            prop_assert!(a + b > seq, "{} and {} of {} fit into one", a, b, seq);
        }
    }
}

#[test]
fn a_mixture_obeys_its_weights_and_counts_epochs() {
    let scratch = Scratch::new();
    let many: Vec<String> = (0..40).map(|n| format!("document number {n:02} of the first source")).collect();
    let a = written(&scratch, "a", &many.iter().map(String::as_str).collect::<Vec<_>>());
    let b = written(&scratch, "b", &["SHORT SECOND SOURCE", "WITH CAPITALS ALL THE WAY", "AND A THIRD DOCUMENT"]);
    let config = DataConfig { weights: vec![3.0, 1.0], validation: 0.2, ..tokens(&[&a, &b]) };
    let dataset = Dataset::open(&config, 16, None).expect("opens");
    let of_b = |sequence: &Sequence| !sequence.tokens.iter().any(|&t| (97..123).contains(&t));
    let order = |seed| {
        let dataset = Dataset::open(&DataConfig { seed, ..config.clone() }, 16, None).expect("opens");
        (0..4096).map(|index| dataset.sequence(Split::Train, index)).collect::<Vec<_>>()
    };
    let first = order(1);
    assert_eq!(first.iter().filter(|s| of_b(s)).count(), 1024);
    // Any index alone, far out and backwards.
    for index in [4095, 17, 0] {
        assert_eq!(dataset.sequence(Split::Train, index), first[index as usize]);
    }
    assert_ne!(first, order(2));
    let epochs = dataset.epochs(4096);
    let all = dataset.sequences(Split::Train);
    assert!(epochs[1] > 3.0 * epochs[0] && epochs[0] > 1024.0 / all as f64, "{epochs:?} of {all}");
    assert!(dataset.sequences(Split::Validation) > 1);
    let parts = dataset.fingerprint_parts();
    assert!(parts.iter().any(|(name, value)| *name == "data.weights" && value == "[3.0, 1.0]"), "{parts:?}");
    assert!(dataset.describe().iter().any(|line| line.contains("75.00% of the sequences")), "{:?}", dataset.describe());

    // Each epoch of a source visits each of its sequences once.
    let of_b =
        Dataset::open(&DataConfig { weights: Vec::new(), paths: vec![b], ..config.clone() }, 16, None).expect("opens");
    let (all, own) = (dataset.sequences(Split::Train), of_b.sequences(Split::Train));
    let places: Vec<u64> = (0..4096).map(|i| dataset.place(Split::Train, i)).filter(|&p| p >= all - own).collect();
    for epoch in places.chunks_exact(own as usize) {
        let mut epoch = epoch.to_vec();
        epoch.sort_unstable();
        assert_eq!(epoch, (all - own..all).collect::<Vec<_>>());
    }
    assert!((epochs[1] - places.len() as f64 / own as f64).abs() < 1e-9, "{epochs:?}");
}
