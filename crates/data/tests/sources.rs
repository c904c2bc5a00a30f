//! Sources, splits and errors.

mod common;

use std::collections::HashSet;
use std::io::Write;

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
fn text_of_any_encoding_is_its_bytes_and_that_is_said() {
    let folder = Scratch::new();
    let latin: Vec<u8> = (32..=126).chain(160..=255).chain(*b"\r\n\t").collect();
    let path = folder.write("latin", &latin);
    let dataset = Dataset::open(&text(&[&path]), 100, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), latin);
    assert!(dataset.describe().iter().any(|line| line.contains("1 file not in UTF-8")), "{:?}", dataset.describe());
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
    let path = folder.write("book.txt", (32..232u8).collect::<Vec<_>>());
    let dataset = Dataset::open(&DataConfig { validation: 0.1, ..text(&[&path]) }, 50, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), (32..212).collect::<Vec<u8>>());
    assert_eq!(dataset.bytes(Split::Validation), (212..232).collect::<Vec<u8>>());
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

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).expect("in memory");
    encoder.finish().expect("in memory")
}

fn xz(content: &[u8]) -> Vec<u8> {
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).expect("in memory");
    encoder.write_all(content).expect("in memory");
    encoder.finish().expect("in memory")
}

fn zstd(content: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(content, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Files in many wrappings, and the text that is in each.
fn containers() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let lines = b"{\"id\": NaN, \"text\": \"one \"}\n\n{\"text\": \"two \", \"x\": [-Infinity]}\r\n{\"text\":\"\"}\n";
    let marked = [b"\xef\xbb\xbf".as_slice(), lines].concat();
    vec![
        ("a.jsonl", lines.to_vec(), "one two "),
        ("b.JSONL", lines.to_vec(), "one two "),
        ("c.json", lines.to_vec(), "one two "),
        ("d.json.gz", gzip(lines), "one two "),
        ("e.ndjson.xz", xz(lines), "one two "),
        ("f.jsonl.zst", zstd(lines), "one two "),
        ("g", lines.to_vec(), "one two "),
        ("h.txt", lines.to_vec(), "one two "),
        ("i.jsonl", marked, "one two "),
        ("j.json", b"{\"text\": \"alone \"}".to_vec(), "alone "),
        ("k.txt.gz", gzip(b"text "), "text "),
        ("l.txt", b"\xef\xbb\xbfmarked ".to_vec(), "marked "),
        ("m", xz(b"without an ending "), "without an ending "),
        ("n.GZ", [gzip(b"two "), gzip(b"members ")].concat(), "two members "),
        ("o.md", b"{\"a\": 1}\nand text ".to_vec(), "{\"a\": 1}\nand text "),
        ("p.toml", b"[section]\n".to_vec(), "[section]\n"),
    ]
}

#[test]
fn containers_are_read_as_what_they_hold_by_runs_and_by_tokenize() {
    let folder = Scratch::new();
    for (name, content, _) in containers() {
        folder.write(&format!("in/{name}"), content);
    }
    let expected: String = containers().iter().map(|(.., text)| *text).collect();
    let input = folder.path().join("in").display().to_string();
    let dataset = Dataset::open(&text(&[&input]), 8, None).expect("opens");
    assert_eq!(String::from_utf8(dataset.bytes(Split::Train)).expect("UTF-8"), expected);
    let said = dataset.describe().join("\n");
    for line in [
        "data: read as text, a document each: 6 files (",
        "data: read as JSON lines, the text in field `text`: 10 files (.json 2, .jsonl 2, ",
        ".jsonl.zst 1, .ndjson.xz 1, others 2), 19 documents",
        "data: 9 lines with an empty text left out",
        "data: the byte order marks of 2 files are left out",
    ] {
        assert!(said.contains(line), "{line} is not in {said}");
    }
    let out = folder.path().join("out");
    let mut kinds = Vec::new();
    let vocabulary = data::tokenize::Vocabulary { ids: 300, eod: None, hash: [7; 32], files: Vec::new() };
    let mut watch = |progress: data::tokenize::Progress<'_>| {
        if let data::tokenize::Progress::Begin(lines) = progress {
            kinds = lines.to_vec();
        }
    };
    let encoders: &(dyn Fn() -> Box<dyn data::tokenize::Encode> + Sync) = &|| Box::new(common::Bytes);
    let report = data::tokenize::run(&common::options(&[&input], &out), &vocabulary, encoders, &mut watch);
    assert_eq!(report.expect("written").header.bytes as usize, expected.len());
    let tokens = std::fs::read(out.join("tokens.bin")).expect("tokens");
    assert_eq!(tokens.chunks_exact(2).map(|pair| char::from(pair[0])).collect::<String>(), expected);
    assert!(kinds[0].starts_with("read as text, a document each: 6 files ("), "{kinds:?}");
    assert!(kinds[1].starts_with("read as JSON lines, the text in field `text`: 10 files ("), "{kinds:?}");
}

#[test]
fn what_is_no_text_is_refused_with_a_remedy_by_runs_and_by_tokenize() {
    let wide: Vec<u8> =
        "in UTF-16, of which every second byte is 0".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let noise: Vec<u8> = (0..2000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let object = "{\n  \"text\": \"over several lines\"\n}\n";
    let table: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("a.parquet", b"PAR1\x15\x04\x15\x80\0\0PAR1".to_vec(), &["a parquet file", "to_json", "lines=True"]),
        ("renamed.txt", b"PAR1\x15\x04\x15\x80\0\0PAR1".to_vec(), &["a parquet file"]),
        ("wide.txt", [b"\xff\xfe".to_vec(), wide.clone()].concat(), &["UTF-16", "iconv"]),
        ("wide.jsonl", wide, &["UTF-16LE", "iconv"]),
        ("image.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec(), &["a PNG image", "leave the file out"]),
        ("noise", noise, &["binary data", "leave the file out"]),
        ("late.txt", [vec![b'x'; 100_000], vec![0], vec![b'x'; 9]].concat(), &["binary data (byte 100000 is NUL)"]),
        ("a.zip", b"PK\x03\x04\x14\0\0\0".to_vec(), &["a zip archive", "unpack"]),
        ("a.txt.bz2", b"BZh91AY&SY\x12\x34".to_vec(), &["bzip2", "gzip, xz or zstd"]),
        ("a.tar.gz", gzip(&[&[b'f'; 257][..], b"ustar\x0000", &[0; 300]].concat()), &["a tar archive", "unpack"]),
        ("a.jsonl.gz.gz", gzip(&gzip(b"{\"text\":\"a\"}")), &["compressed twice"]),
        ("no.txt.gz", b"no gzip".to_vec(), &["damaged", "not compressed in the way that its name says"]),
        ("torn.txt.xz", xz(&[b'x'; 9999])[..40].to_vec(), &["damaged"]),
        ("array.json", b"[{\"text\": \"a\"},\n {\"text\": \"b\"}]".to_vec(), &["a JSON array", "jq -c '.[]'"]),
        ("array.jsonl", b"[{\"text\": \"a\"},\n {\"text\": \"b\"}]".to_vec(), &["a JSON array", "jq -c '.[]'"]),
        ("object.json", object.into(), &["a JSON document over several lines", "jq -c ."]),
        ("string.json", b"\"text\"".to_vec(), &["not an object per line"]),
        (
            "lfs.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n".to_vec(),
            &["Git LFS", "git lfs pull"],
        ),
        (
            "field.jsonl",
            b"{\"text\": \"a\"}\n{\"body\": \"b\"}\n".to_vec(),
            &["line 2", "no field `text`", "data.field"],
        ),
        ("broken.jsonl", b"{\"text\": \"a\"}\n{\"text\": \n".to_vec(), &["line 2", "data.field"]),
    ];
    for (name, content, expected) in table {
        let folder = Scratch::new();
        folder.write("in/enough.txt", "enough text for a sequence or two");
        let path = folder.write(&format!("in/{name}"), content);
        let root = folder.path().join("in").display().to_string();
        for input in [&path, &root] {
            let said = refusal(&text(&[input]), 8).1;
            assert!(said.contains(&path) && expected.iter().all(|word| said.contains(word)), "{name}: {said}");
        }
        // Broken lines and what stands far behind are left out there, and counted.
        if !["field.jsonl", "broken.jsonl", "late.txt"].contains(&name) {
            let said = common::tokenize(&common::options(&[&root], &folder.path().join("out")), 300);
            let said = said.expect_err(name).to_string();
            assert!(said.contains(&path) && expected.iter().all(|word| said.contains(word)), "{name}: {said}");
            assert!(!folder.path().join("out").exists(), "{name}: nothing is written");
        }
    }
}

#[test]
fn the_field_of_a_line_may_have_another_name() {
    let folder = Scratch::new();
    let path = folder.write("a.jsonl", "{\"text\": 3, \"content\": \"what is meant\"}\n");
    let config = DataConfig { field: "content".into(), ..text(&[&path]) };
    assert_eq!(Dataset::open(&config, 4, None).expect("opens").bytes(Split::Train), b"what is meant");
}

#[test]
fn what_only_goes_with_a_data_set_is_left_out_of_folders_and_named() {
    let folder = Scratch::new();
    for name in ["README.md", "LICENSE", "dataset_infos.json", "data/README", "CITATION.cff"] {
        folder.write(&format!("set/{name}"), "not of the data");
    }
    folder.write("set/data/train.jsonl", "{\"text\": \"of the data\"}\n");
    let set = folder.path().join("set").display().to_string();
    let dataset = Dataset::open(&text(&[&set]), 4, None).expect("opens");
    assert_eq!(dataset.bytes(Split::Train), b"of the data");
    let said = dataset.describe().join("\n");
    assert!(said.contains("left out: 5 files such as README or LICENSE") && said.contains("LICENSE"), "{said}");
    let readme = format!("{set}/README.md");
    assert_eq!(Dataset::open(&text(&[&readme]), 4, None).expect("opens").bytes(Split::Train), b"not of the data");
}
