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
            assert!(matches!(error, DataError::Id { id: 100, token: 4, document: 0, bad: 2, .. }), "{error}");
            let said = error.to_string();
            for part in [".bin", "model.vocab", "below 100", "at least 101"] {
                assert!(said.contains(part), "{part}: {said}");
            }
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

#[test]
fn negative_ids_are_named_as_such() {
    let scratch = Scratch::new();
    for (code, minus) in [(2, 0xffu32), (3, 0xffff), (4, u32::MAX)] {
        let prefix = megatron(scratch.path(), code, &[&[&[1, 2]], &[&[3, minus]]]);
        let config = DataConfig { vocab: 1 << 20, ..tokens(&[&prefix.display().to_string()]) };
        let error = Dataset::open(&config, 2, None).expect_err("no id");
        assert!(matches!(error, DataError::Id { id: -1, token: 3, document: 1, place: 1, bad: 1, .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("padding") && !said.contains("set model.vocab"), "{said}");
    }
}

/// The folder's content under other hashes: what a person writes by hand.
fn rehashed(path: &str, edit: impl Fn(&mut serde_json::Value)) {
    let name = Path::new(path).join(folder::HEADER);
    let mut header: serde_json::Value = serde_json::from_slice(&fs::read(&name).expect("read")).expect("JSON");
    let hash = |file| blake3::hash(&fs::read(Path::new(path).join(file)).expect("read")).to_hex().to_string();
    header["tokens_blake3"] = hash(folder::TOKENS).into();
    header["documents_blake3"] = hash(folder::DOCUMENTS).into();
    edit(&mut header);
    fs::write(name, header.to_string()).expect("written");
}

#[test]
fn a_folder_is_what_its_header_says_or_it_is_refused() {
    let scratch = Scratch::new();
    let path = written(&scratch, "tokens", &["one two three", "four and five", "six"]);
    let file = |name: &str| Path::new(&path).join(name);
    let open = || Dataset::open(&tokens(&[&path]), 4, None);
    let refusal = || open().expect_err("refused").to_string();
    let first = open().expect("opens").hash();
    // Other tokens of the same number behind the same header.
    let good = fs::read(file(folder::TOKENS)).expect("read");
    let mut other = good.clone();
    other[4] ^= 1;
    fs::write(file(folder::TOKENS), &other).expect("written");
    let said = refusal();
    assert!(said.contains("tokens.bin") && said.contains("header.json says") && said.contains("blake3"), "{said}");
    // A header that fits makes other data of it, also where nothing is held out.
    rehashed(&path, |_| ());
    assert_ne!(open().expect("opens").hash(), first);
    fs::write(file(folder::TOKENS), &good).expect("written");
    rehashed(&path, |_| ());
    assert_eq!(open().expect("opens").hash(), first);
    // Bytes of text in the index say nothing about tokens, and are part of it all the same.
    let mut index = fs::read(file(folder::DOCUMENTS)).expect("read");
    index[8] -= 1;
    let untouched = fs::read(file(folder::DOCUMENTS)).expect("read");
    fs::write(file(folder::DOCUMENTS), &index).expect("written");
    let said = refusal();
    assert!(said.contains("documents.bin") && said.contains("header.json says"), "{said}");
    fs::write(file(folder::DOCUMENTS), &untouched).expect("written");
    // An id that the header denies, whatever the model has.
    let mut large = good.clone();
    large[30..32].copy_from_slice(&298u16.to_le_bytes());
    fs::write(file(folder::TOKENS), &large).expect("written");
    rehashed(&path, |header| header["vocab"] = 257.into());
    rehashed(&path, |header| header["eod"] = serde_json::Value::Null);
    rehashed(&path, |header| header["eod_token"] = serde_json::Value::Null);
    let error = Dataset::open(&DataConfig { eod: false, ..tokens(&[&path]) }, 4, None).expect_err("refused");
    assert!(matches!(error, DataError::Id { id: 298, token: 15, document: 1, place: 2, bad: 1, .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("by header.json ids are below 257") && said.contains("tokens.bin"), "{said}");
}

#[test]
fn what_has_no_target_is_neither_trained_on_nor_scored() {
    let scratch = Scratch::new();
    let ones: Vec<&[&[u32]]> = vec![&[&[7]]; 40];
    let path = megatron(scratch.path(), 8, &ones).display().to_string();
    let open = |config: DataConfig| Dataset::open(&config, 8, None);
    for packing in [Packing::Stream, Packing::BestFit] {
        let error = open(DataConfig { packing, ..tokens(&[&path]) }).expect_err("no target");
        assert!(matches!(error, DataError::NoTarget { split: "train", needed: 2, .. }), "{error}");
    }
    // Without masks each token is the target of the one before it.
    let dataset = open(DataConfig { masks: false, ..tokens(&[&path]) }).expect("opens");
    assert!(dataset.has_targets(Split::Train) && !dataset.has_targets(Split::Validation));
    // A document of two among them is enough, but not as a part of a mixture for the others.
    let mut some = ones.clone();
    some[30] = &[&[1, 2]];
    let more = scratch.path().join("more");
    fs::create_dir(&more).expect("made");
    let some = megatron(&more, 8, &some).display().to_string();
    let dataset = open(tokens(&[&some])).expect("opens");
    let targets = |i| dataset.sequence(Split::Train, i).targets.iter().filter(|&&t| t != IGNORE).count();
    assert_eq!((0..dataset.sequences(Split::Train)).map(targets).sum::<usize>(), 1);
    let error = open(DataConfig { weights: vec![1.0, 1.0], ..tokens(&[&some, &path]) }).expect_err("no target");
    assert!(error.to_string().contains(&path), "{error}");
    let held = DataConfig { validation_paths: vec![path.clone()], ..tokens(&[&some]) };
    let error = open(held).expect_err("no target");
    assert!(matches!(error, DataError::NoTarget { split: "validate", .. }), "{error}");
    // Text of one byte a document.
    let files: Vec<String> = (0..9).map(|i| scratch.write(&format!("t/{i}"), "x")).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let error = open(DataConfig { eod: false, ..text(&files) }).expect_err("no target");
    assert!(matches!(error, DataError::NoTarget { split: "train", .. }), "{error}");
    open(text(&files)).expect("the end of each is a target");
}

#[test]
fn files_that_are_written_to_are_noticed_before_their_tokens_are_believed() {
    let scratch = Scratch::new();
    let path = written(&scratch, "tokens", &["one two three", "four and five", "six"]);
    let dataset = Dataset::open(&tokens(&[&path]), 4, None).expect("opens");
    drop(dataset.sequence(Split::Train, 0));
    dataset.unchanged().expect("as it was");
    let name = Path::new(&path).join(folder::TOKENS);
    std::os::unix::fs::FileExt::write_all_at(&fs::File::options().write(true).open(&name).expect("opens"), b"z", 8)
        .expect("written");
    dataset.unchanged().expect("nothing was taken since");
    drop(dataset.sequence(Split::Train, 0));
    let said = dataset.unchanged().expect_err("changed").to_string();
    assert!(said.contains("tokens.bin") && said.contains("written to"), "{said}");
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
