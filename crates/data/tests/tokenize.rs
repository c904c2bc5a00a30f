//! Writing folders of tokens: inputs, order, filters, broken lines, and nothing left behind.

mod common;

use std::fs;
use std::io::Write;
use std::path::Path;

use common::{Scratch, options, tokenize, tokens};
use data::tokenize::{Options, Reason};
use data::{DataError, Dataset, Split};

/// Files of a folder with their content.
fn content(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file")))
        .collect();
    files.sort();
    files
}

/// The documents of a folder of tokens, which are bytes.
fn documents(folder: &Path) -> Vec<String> {
    let read = |name| fs::read(folder.join(name)).expect("a file");
    let (tokens, index) = (read("tokens.bin"), read("documents.bin"));
    let ids: Vec<u8> = tokens.chunks_exact(2).map(|pair| pair[0]).collect();
    let mut start = 0;
    let ends = index.chunks_exact(16).map(|entry| u64::from_le_bytes(entry[..8].try_into().expect("eight")) as usize);
    ends.map(|end| String::from_utf8(ids[std::mem::replace(&mut start, end)..end].to_vec()).expect("text")).collect()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).expect("in memory");
    encoder.finish().expect("in memory")
}

fn zstd(content: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(content, ruzstd::encoding::CompressionLevel::Fastest)
}

#[test]
fn every_kind_of_input_in_order() {
    let folder = Scratch::new();
    let lines = "{\"text\":\"one\"}\n\n{\"id\":1,\"text\":\"two\\n\"}\n{\"text\":\"three\"}";
    folder.write("in/a.txt", "text\r\n");
    folder.write("in/b.jsonl", lines);
    folder.write("in/c/d.jsonl.gz", gzip(b"{\"text\":\"gz\"}\n"));
    folder.write("in/c/e.txt.zst", zstd(b"zst"));
    folder.write("in/.hidden", "no");
    folder.write("more/1.txt", "first");
    folder.write("more/2.txt", "second");
    folder.write("more/x.md", "no");
    let (input, glob) = (folder.path().join("in"), folder.path().join("more/*.txt"));
    let out = folder.path().join("new/out");
    let report =
        tokenize(&options(&[&input.display().to_string(), &glob.display().to_string()], &out), 300).expect("written");
    assert_eq!(documents(&out), ["text\r\n", "one", "two\n", "three", "gz", "zst", "first", "second"]);
    let header = &report.header;
    assert_eq!((report.files, header.documents, header.bytes, header.dtype.as_str()), (6, 8, 34, "u16"));
    assert_eq!(
        content(&out).iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["documents.bin", "header.json", "tokens.bin"]
    );
    assert_eq!(fs::read_dir(out.parent().expect("a parent")).expect("a folder").count(), 1, "no partial one is left");
}

/// A folder of lines that are more than a batch.
fn many(folder: &Scratch) -> String {
    let line = |n: usize| format!("{{\"text\":\"document {n} {}\"}}\n", "words and ".repeat(n % 97));
    let lines: String = (0..9000).map(line).collect();
    assert!(lines.len() > 3 << 20, "several batches");
    folder.write("many.jsonl", lines)
}

#[test]
fn the_number_of_threads_does_not_show() {
    let folder = Scratch::new();
    let input = many(&folder);
    let write = |jobs| {
        let out = folder.path().join(format!("out{jobs}"));
        tokenize(&Options { jobs, ..options(&[&input], &out) }, 70_000).expect("written");
        content(&out)
    };
    let one = write(1);
    assert_eq!(one, write(2));
    assert_eq!(one, write(5));
    assert!(String::from_utf8_lossy(&one[1].1).contains("\"dtype\": \"u32\""));
}

#[test]
fn what_teaches_nothing_is_counted_and_named() {
    let folder = Scratch::new();
    let lines = [
        r#"{"text":"good"}"#,
        r#"{"text":" \n "}"#,
        &format!(r#"{{"text":"{}"}}"#, "same\\n".repeat(20)),
        &format!(r#"{{"text":"{}"}}"#, "z".repeat(50)),
        &format!(r#"{{"text":"{}"}}"#, "ab ".repeat(50)),
        "",
        &format!(r#"{{"text":"{}"}}"#, "long ".repeat(400_000)),
        r#"{"text":"also good"}"#,
    ];
    let a = folder.write("a.jsonl", lines.join("\n"));
    let b = folder.write("b.txt", b"text \xff text");
    let c = folder.write("c.txt", "x y ".repeat(60));
    let out = folder.path().join("out");
    let mut options = options(&[&a, &b, &c], &out);
    options.limits.document_bytes_max = 200;
    let report = tokenize(&options, 300).expect("written");
    assert_eq!(documents(&out), ["good", "ab ".repeat(50).as_str(), "also good"]);
    let named = |reason| report.left_out[&reason].first.clone();
    assert_eq!(named(Reason::Empty), [format!("{a}:2")]);
    assert_eq!(named(Reason::RepeatedLine), [format!("{a}:3")]);
    assert_eq!(named(Reason::RepeatedToken), [format!("{a}:4")]);
    assert_eq!(named(Reason::TooLong), [format!("{a}:7"), c]);
    assert_eq!(named(Reason::InvalidText), [format!("{b} at byte 5")]);
    assert_eq!(report.left_out.values().map(|kind| kind.count).sum::<u64>(), 6);
}

#[test]
fn broken_lines_are_counted_until_there_are_too_many() {
    let folder = Scratch::new();
    let bad = |count: usize| {
        let lines: String = (0..5000)
            .map(|n| if n < count { "{\"text\": oops}\n".into() } else { format!("{{\"text\":\"{n} good\"}}\n") })
            .collect();
        folder.write(&format!("{count}.jsonl"), lines)
    };
    let out = folder.path().join("out");
    let input = bad(3);
    let report = tokenize(&options(&[&input], &out), 300).expect("within the limit");
    assert_eq!((report.bad_lines.count, report.header.documents), (3, 4997));
    assert!(report.bad_lines.first[1].starts_with(&format!("{input}:2: ")), "{:?}", report.bad_lines.first);

    let input = bad(4);
    let other = folder.path().join("none/other");
    let error = tokenize(&options(&[&input], &other), 300).expect_err("too many");
    let said = error.to_string();
    assert!(matches!(error, DataError::BadLines { limit: 3, .. }), "{said}");
    assert!(said.contains(&format!("{input}:4: ")) && said.contains("--bad-lines-max"), "{said}");
    assert_eq!(fs::read_dir(other.parent().unwrap()).expect("a folder").count(), 0, "nothing is left behind");
}

#[test]
fn bad_input_is_refused_and_nothing_is_left() {
    let folder = Scratch::new();
    let root = folder.path().join("outs");
    fs::create_dir(&root).expect("a folder");
    let good = folder.write("good.txt", "good");
    let table: Vec<(&str, Vec<u8>, &str)> = vec![
        ("torn.txt.gz", gzip(&[b'x'; 9999])[..20].to_vec(), "torn.txt.gz"),
        ("no.jsonl.gz", b"no gzip".to_vec(), "no.jsonl.gz"),
        ("torn.txt.zst", zstd(&[b'x'; 9999])[..9].to_vec(), "torn.txt.zst"),
        ("empty.txt", Vec::new(), "no document is left"),
        ("field.jsonl", b"{\"body\":\"b\"}\n".to_vec(), "1 lines are broken"),
    ];
    for (name, bytes, expected) in table {
        let path = folder.write(name, bytes);
        let out = root.join(name);
        let inputs: Vec<&str> = if expected == name { vec![&good, &path] } else { vec![&path] };
        let said = tokenize(&options(&inputs, &out), 300).expect_err(name).to_string();
        assert!(said.contains(expected), "{said}");
    }
    for (input, expected) in [("/no/such/file", "/no/such/file"), ("/no/such/*.txt", "/no/such/*.txt"), ("[", "[")] {
        let said = tokenize(&options(&[input], &root.join("out")), 300).expect_err(input).to_string();
        assert!(said.contains(expected), "{said}");
    }
    let taken = folder.path().to_owned();
    let error = tokenize(&options(&[&good], &taken), 300).expect_err("not empty");
    assert!(matches!(error, DataError::OutTaken { .. }), "{error}");
    assert_eq!(fs::read_dir(&root).expect("a folder").count(), 0, "nothing is left behind");
    tokenize(&options(&[&good], &root), 300).expect("an empty folder gives way");
}

#[test]
fn a_run_reads_what_was_written() {
    let folder = Scratch::new();
    let input = many(&folder);
    let out = folder.path().join("out");
    let report = tokenize(&options(&[&input], &out), 300).expect("written");
    let path = out.display().to_string();
    let dataset = Dataset::open(&tokens(&[&path]), 128, None).expect("opens");
    assert_eq!(dataset.documents(Split::Train) as u64, report.header.documents);
    // Tokens are bytes here, so the byte counts of an epoch are those of the text less the first of each document,
    // unless a sequence begins there.
    let (mut bytes, mut targets) = (0u64, 0u64);
    for index in 0..dataset.sequences(Split::Train) {
        let sequence = dataset.sequence(Split::Train, index);
        bytes += sequence.target_bytes.iter().map(|&n| u64::from(n)).sum::<u64>();
        targets += sequence.targets.iter().filter(|&&target| target < 256).count() as u64;
    }
    assert_eq!(bytes, targets);
    assert_eq!(bytes, report.header.bytes - report.header.documents);
}
