//! Sources, splits and errors.

mod common;

use std::collections::HashSet;

use common::{Scratch, synthetic, text};
use data::{DataError, Dataset, Split};
use spec::run::{DataConfig, Source};

fn refusal(config: &DataConfig, seq: usize) -> (DataError, String) {
    let error = Dataset::open(config, seq, None).expect_err("refused");
    let said = error.to_string();
    (error, said)
}

#[test]
fn folders_are_walked_in_order_and_hidden_files_left_out() {
    let folder = Scratch::new();
    for (name, content) in [("b/z.txt", "3"), ("b/a/x.txt", "2"), ("a.txt", "1"), ("c", "5"), ("b.txt", "4")] {
        folder.write(name, content);
    }
    folder.write(".hidden", "h");
    folder.write(".git/config", "g");
    folder.write("d/empty.txt", "");
    let last = folder.write("named/.also.txt", "6");
    // In a folder, `b` is before `b.txt`.
    let dataset = Dataset::open(&text(&[&folder.path().display().to_string(), &last]), 2, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), b"123456");
    assert_eq!(dataset.documents(Split::Train), 6);
    assert!(dataset.describe().iter().any(|line| line.contains("1 empty files")), "{:?}", dataset.describe());
}

#[cfg(unix)]
#[test]
fn a_link_that_leads_back_is_not_followed() {
    let folder = Scratch::new();
    folder.write("a/text", "some text");
    std::os::unix::fs::symlink(folder.path(), folder.path().join("a/back")).expect("a link");
    std::os::unix::fs::symlink(folder.path().join("a/text"), folder.path().join("b")).expect("a link");
    let dataset = Dataset::open(&text(&[&folder.path().display().to_string()]), 4, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), b"some textsome text");
}

#[test]
fn bytes_are_bytes() {
    let folder = Scratch::new();
    let garbage: Vec<u8> = (0..=255).chain([0; 40]).collect();
    let path = folder.write("garbage", &garbage);
    let dataset = Dataset::open(&text(&[&path]), 100, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), garbage);
}

#[test]
fn what_cannot_be_read_is_named() {
    let folder = Scratch::new();
    let root = folder.path().display().to_string();
    let (error, said) = refusal(&text(&[&format!("{root}/absent.txt")]), 8);
    assert!(matches!(error, DataError::Read { key: "data.paths", .. }), "{error:?}");
    assert!(
        said.contains("absent.txt") && said.contains("data.paths") && said.contains("check the spelling"),
        "{said}"
    );

    let (error, said) = refusal(&text(&[&root]), 8);
    assert!(matches!(error, DataError::NoText { seen: 0, .. }) && said.contains(&root), "{said}");
    let empty = folder.write("x/empty.txt", "");
    let (error, said) = refusal(&text(&[&root]), 8);
    assert!(matches!(error, DataError::NoText { seen: 1, .. }) && said.contains("in 1 files"), "{said}");
    let (error, said) = refusal(&text(&[&empty]), 8);
    assert!(matches!(error, DataError::Empty { .. }) && said.contains(&empty), "{said}");

    let lines = folder.write("lines.jsonl", "{\"text\": \"enough text for a sequence\"}");
    let (error, said) = refusal(&text(&[&lines]), 8);
    assert!(matches!(error, DataError::NotPlain { .. }) && said.contains("lockstep data tokenize"), "{said}");

    let good = folder.write("good.txt", "enough text for a sequence");
    let nul = folder.write("torn.txt", [0; 77]);
    let (error, said) = refusal(&text(&[&good, &nul]), 8);
    assert!(matches!(error, DataError::NulFilled { bytes: 77, .. }) && said.contains("torn.txt"), "{said}");

    let held = DataConfig { validation_paths: vec![format!("{good}x")], ..text(&[&good]) };
    let (error, said) = refusal(&held, 8);
    assert!(matches!(error, DataError::Read { key: "data.validation_paths", .. }), "{said}");
    assert!(matches!(refusal(&text(&[]), 8).0, DataError::NoPaths));
    assert!(matches!(refusal(&synthetic(), 0).0, DataError::SequenceLength { seq: 0, .. }));
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_is_refused_and_not_waited_for() {
    let (error, said) = refusal(&text(&["/dev/null"]), 8);
    assert!(matches!(error, DataError::NotAFile { .. }) && said.contains("/dev/null"), "{said}");
}

#[test]
fn too_little_text_is_counted() {
    let folder = Scratch::new();
    let path = folder.write("short.txt", "1234567");
    assert!(Dataset::open(&text(&[&path]), 7, None).is_ok());
    let (error, said) = refusal(&text(&[&path]), 8);
    assert!(matches!(error, DataError::TooLittle { found: 7, needed: 8, .. }), "{error:?}");
    assert!(said.contains("7 bytes found") && said.contains("8 needed") && said.contains("short.txt"), "{said}");
    // Two bytes at least are held out of a single document.
    let held = DataConfig { validation: 0.01, ..text(&[&path]) };
    assert!(matches!(refusal(&held, 6).0, DataError::TooLittle { found: 5, needed: 6, .. }));
    let byte = folder.write("byte.txt", "x");
    let held = DataConfig { validation_paths: vec![byte], eod: false, ..text(&[&folder.write("y.txt", "yyyyyyyy")]) };
    let (error, said) = refusal(&held, 4);
    assert!(matches!(error, DataError::NoTarget { found: 1, needed: 2, .. }), "{said}");
}

#[test]
fn a_single_document_is_held_out_by_its_end() {
    let folder = Scratch::new();
    let path = folder.write("book.txt", (0..200u8).collect::<Vec<_>>());
    let dataset = Dataset::open(&DataConfig { validation: 0.1, ..text(&[&path]) }, 50, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), (0..180).collect::<Vec<u8>>());
    assert_eq!(dataset.bytes(Split::Validation), (180..200).collect::<Vec<u8>>());
    assert_eq!(dataset.sequences(Split::Validation), 1);
}

#[test]
fn the_split_is_by_content_disjoint_and_complete() {
    let folder = Scratch::new();
    let mut all = HashSet::new();
    for number in 0..400 {
        let content = format!("document {number:03}\n");
        folder.write(&format!("{number:03}.txt"), &content);
        folder.write(&format!("copy/{number:03}.txt"), &content);
        all.insert(content);
    }
    let root = folder.path().display().to_string();
    let lines = |dataset: &Dataset, split| -> HashSet<String> {
        let text = String::from_utf8(dataset.bytes(split)).expect("UTF-8");
        text.split_inclusive('\n').map(str::to_owned).collect()
    };
    let open =
        |seed, validation| Dataset::open(&DataConfig { validation, seed, ..text(&[&root]) }, 16, None).expect("opens");
    let dataset = open(1, 0.1);
    let (train, validation) = (lines(&dataset, Split::Train), lines(&dataset, Split::Validation));
    assert!(train.is_disjoint(&validation));
    assert_eq!(&train | &validation, all);
    assert_eq!(dataset.documents(Split::Train) + dataset.documents(Split::Validation), 800);
    assert!((20..60).contains(&validation.len()), "{} of 400 held out", validation.len());
    assert_ne!(validation, lines(&open(2, 0.1), Split::Validation), "another seed, another choice");
    // At least one, never all.
    assert_eq!(lines(&open(1, 1e-9), Split::Validation).len(), 1);
    assert_eq!(lines(&open(1, 1.0 - 1e-9), Split::Train).len(), 1);
    assert_eq!(open(1, 0.0).sequences(Split::Validation), 0);
}

#[test]
fn of_copies_of_one_document_one_is_held_out() {
    let folder = Scratch::new();
    for name in ["a", "b", "c"] {
        folder.write(name, "always the same");
    }
    for seed in 1..9 {
        let config = DataConfig { validation: 0.5, seed, ..text(&[&folder.path().display().to_string()]) };
        let dataset = Dataset::open(&config, 16, None).expect("opens");
        assert_eq!((dataset.documents(Split::Train), dataset.documents(Split::Validation)), (2, 1));
    }
}

#[test]
fn validation_paths_are_not_trained_on() {
    let folder = Scratch::new();
    folder.write("a.txt", "training text one. ");
    folder.write("z.txt", "training text two.");
    folder.write("held/v.txt", "held out");
    let (root, held) = (folder.path().display().to_string(), folder.path().join("./held").display().to_string());
    let config = DataConfig { validation_paths: vec![held], validation: 0.5, ..text(&[&root]) };
    let dataset = Dataset::open(&config, 16, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), b"training text one. training text two.");
    assert_eq!(dataset.bytes(Split::Validation), b"held out");
    let (error, said) = refusal(&DataConfig { validation_paths: vec![root.clone()], ..text(&[&root]) }, 16);
    assert!(matches!(error, DataError::AllHeldOut { documents: 3, .. }) && said.contains("3 documents"), "{said}");
}

#[test]
fn crates_that_are_not_there_are_refused() {
    let home = Scratch::new();
    let config = DataConfig { source: Source::Cargo, ..synthetic() };
    let refusal = || Dataset::open(&config, 256, Some(home.path())).expect_err("refused").to_string();
    let said = refusal();
    assert!(said.contains("cargo fetch --locked") && said.contains("austen"), "{said}");
    home.write("registry/src/any/blake3-0.0.0/src/lib.rs", "another version");
    let said = refusal();
    assert!(said.contains("blake3-") && said.contains("/src/") && said.contains("is not under"), "{said}");
}

#[test]
fn fingerprints_tell_apart_what_changes_a_sequence() {
    let base = synthetic();
    let open = |config: &DataConfig, seq| Dataset::open(config, seq, None).expect("opens");
    let reference = open(&base, 128);
    assert_eq!(reference.fingerprint(), open(&base, 128).fingerprint());
    let others = [
        open(&base, 64),
        open(&DataConfig { seed: 2, ..base.clone() }, 128),
        open(&DataConfig { masks: false, ..base.clone() }, 128),
        open(&DataConfig { eod: false, ..base.clone() }, 128),
        open(&DataConfig { validation: 0.3, ..base.clone() }, 128),
    ];
    for other in &others {
        assert_ne!(reference.fingerprint(), other.fingerprint());
        assert_eq!(reference.hash(), other.hash());
        let pairs = reference.fingerprint_parts().into_iter().zip(other.fingerprint_parts());
        assert!((1..=2).contains(&pairs.filter(|(a, b)| a != b).count()));
    }
}
