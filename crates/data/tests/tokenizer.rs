//! Tokenizers: the golden cases, and the fast way against the crate's own.

#![cfg(feature = "tokenizers")]

mod common;

use std::path::{Path, PathBuf};

use data::tokenizer::Tokenizer;
use data::{DataError, Speech};
use proptest::prelude::*;
use serde_json::Value;

/// The folder of golden cases, where it lies beside the workspace.
fn golden() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden/tokenizer_bpe512");
    if !folder.is_dir() {
        eprintln!("skipped: {} is not there", folder.display());
        return None;
    }
    Some(folder)
}

/// A byte-level BPE of 256 bytes and a few merges, split by `pre`, with `normalizer`.
fn small(normalizer: &str, pre: &str) -> Tokenizer {
    Tokenizer::parse(small_file(normalizer, pre).as_bytes(), Path::new("small.json")).expect("a tokenizer")
}

/// The file of [`small`].
fn small_file(normalizer: &str, pre: &str) -> String {
    let mut next = 256;
    let mut vocab: Vec<String> = (0..256u32)
        .map(|byte| {
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable { byte } else { next };
            next += u32::from(!printable);
            char::from_u32(code).expect("a character").to_string()
        })
        .collect();
    let merges = [["t", "h"], ["th", "e"], ["\u{120}", "a"], ["\u{c3}", "\u{a9}"], ["0", "0"], ["\u{120}", "\u{120}"]];
    vocab.extend(merges.iter().map(|pair| pair.concat()));
    let vocab: serde_json::Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"normalizer":{normalizer},"pre_tokenizer":{pre},
        "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "added_tokens":[{{"id":262,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}}],
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
        "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
        "vocab":{},"merges":{}}}}}"#,
        Value::Object(vocab),
        serde_json::to_string(&merges).expect("JSON"),
    )
}

const BYTE_LEVEL: &str = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;

fn split(pattern: &str) -> String {
    format!(
        r#"{{"type":"Sequence","pretokenizers":[{{"type":"Split","pattern":{{"Regex":{}}},"behavior":"Isolated",
        "invert":false}},{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}}]}}"#,
        Value::from(pattern)
    )
}

/// The pattern of Qwen2 and Qwen3; Llama 3 has `\p{N}{1,3}` in it.
fn pattern(digits: &str) -> String {
    format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

fn both_ways(tokenizer: &Tokenizer, text: &str) -> (Vec<u32>, Vec<u32>) {
    let mut encoder = tokenizer.encoder();
    let (mut fast, mut slow) = (Vec::new(), Vec::new());
    encoder.encode(text, &mut fast).expect("encodes");
    encoder.encode_slowly(text, &mut slow).expect("encodes");
    (fast, slow)
}

#[test]
fn golden_cases_come_out() {
    let Some(folder) = golden() else { return };
    let tokenizer = Tokenizer::open(&folder.join("tokenizer.json")).expect("opens");
    assert!(tokenizer.is_fast());
    let eod = tokenizer.eod().expect("readable").expect("one");
    assert_eq!((tokenizer.ids(), eod.id, eod.name.as_str()), (512, 0, "<|endoftext|>"));
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).expect("cases")).expect("JSON");
    let ids = |v: &Value| -> Vec<u32> {
        v.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let list = cases["cases"].as_array().expect("cases");
    assert_eq!(list.len(), 20);
    for case in list {
        let text = case["text"].as_str().expect("text");
        let (fast, slow) = both_ways(&tokenizer, text);
        assert_eq!((&fast, &slow), (&ids(&case["ids"]), &ids(&case["ids"])), "{}", case["name"]);
        assert_eq!(tokenizer.decode(&fast, true).expect("decodes"), case["decoded"].as_str().expect("text"));
        let skipped = tokenizer.decode(&fast, false).expect("decodes");
        assert_eq!(skipped, case["decoded_skip_special"].as_str().expect("text"));
    }
    for case in cases["decode_only"].as_array().expect("cases") {
        let decoded = tokenizer.decode(&ids(&case["ids"]), true).expect("decodes");
        assert_eq!(decoded, case["decoded"].as_str().expect("text"), "{}", case["name"]);
    }
    let corpus = std::fs::read_to_string(folder.join("corpus.txt")).expect("corpus");
    let (fast, slow) = both_ways(&tokenizer, &corpus);
    assert_eq!(fast, slow);
    let hash = fast.iter().fold(0u128, |h, &id| (h * 31 + u128::from(id)) % ((1 << 61) - 1));
    let expected = &cases["corpus"];
    assert_eq!(
        (fast.len() as u64, hash as u64),
        (expected["n_ids"].as_u64().unwrap(), expected["hash"].as_u64().unwrap())
    );
    assert_eq!(fast[..32], ids(&expected["first_ids"]));
}

/// Text in which every rule of the patterns meets every other.
fn text() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "a",
        "the",
        "THE",
        "'s",
        "'LL",
        "'",
        "1",
        "2024",
        "\u{bd}",
        "\u{2167}",
        "\u{e9}",
        "e\u{301}",
        "\u{1100}\u{1161}",
        "\u{345}",
        "\u{4e2d}\u{6587}",
        "\u{1f600}",
        "!",
        "...",
        "_",
        "\u{200b}",
        "<|endoftext|>",
        "<|end",
        "\u{0}",
        "\u{2028}",
        "\u{85}",
    ]);
    prop_oneof![
        4 => prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat()),
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_fast_way_is_the_crates(texts in prop::collection::vec(text(), 1..4)) {
        thread_local! {
            static TOKENIZERS: Vec<Tokenizer> = vec![
                small("null", BYTE_LEVEL),
                small(r#"{"type":"NFC"}"#, &split(&pattern(""))),
                small("null", &split(&pattern("{1,3}"))),
            ];
        }
        TOKENIZERS.with(|all| for tokenizer in all {
            assert!(tokenizer.is_fast());
            let mut encoder = tokenizer.encoder();
            for text in &texts {
                let (mut fast, mut slow) = (Vec::new(), Vec::new());
                encoder.encode(text, &mut fast).expect("encodes");
                encoder.encode_slowly(text, &mut slow).expect("encodes");
                assert_eq!(fast, slow, "{text:?}");
            }
        });
    }
}

#[test]
fn unusual_shapes_go_the_long_way() {
    let prefix = r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#;
    for tokenizer in [
        small(r#"{"type":"Lowercase"}"#, BYTE_LEVEL),
        small("null", prefix),
        small("null", &split(r"\p{L}++|\s+(?!\S)|\s+")),
        small("null", &split(r"\p{L}+")),
        small("null", &split(r"(?U)\p{L}+|\s+(?!\S)|\s+")),
        small("null", &split(r"\p{L}*|\s+(?!\S)|\s+")),
    ] {
        assert!(!tokenizer.is_fast());
        let (fast, slow) = both_ways(&tokenizer, "The text  of 2024\n");
        assert_eq!(fast, slow);
        assert!(!fast.is_empty());
    }
}

/// The file of [`small`] with an added token more.
fn with_added(normalizer: &str, content: &str, normalized: bool) -> Tokenizer {
    let mut file: Value = serde_json::from_str(&small_file(normalizer, BYTE_LEVEL)).expect("JSON");
    let mut token = file["added_tokens"][0].clone();
    token["id"] = 263.into();
    token["content"] = content.into();
    token["normalized"] = normalized.into();
    token["special"] = false.into();
    file["added_tokens"].as_array_mut().expect("a list").push(token);
    Tokenizer::parse(file.to_string().as_bytes(), Path::new("added.json")).expect("a tokenizer")
}

#[test]
fn an_added_token_that_its_normaliser_changes_is_found_in_normalised_text() {
    let (composed, decomposed) = ("\u{d55c}\u{ad6d}", "\u{1112}\u{1161}\u{11ab}\u{1100}\u{116e}\u{11a8}");
    let nfc = r#"{"type":"NFC"}"#;
    let tokenizer = with_added(nfc, decomposed, true);
    assert!(!tokenizer.is_fast(), "the file as a whole takes the long way");
    assert_eq!(both_ways(&tokenizer, composed), (vec![263], vec![263]));
    // These are found as they are written, so the short way holds.
    for (tokenizer, text) in [
        (with_added(nfc, composed, true), decomposed),
        (with_added(nfc, decomposed, false), decomposed),
        (with_added("null", decomposed, true), decomposed),
    ] {
        assert!(tokenizer.is_fast());
        assert_eq!(both_ways(&tokenizer, text), (vec![263], vec![263]));
        let (fast, slow) = both_ways(&tokenizer, composed);
        assert_eq!(fast, slow);
    }
}

#[test]
fn the_files_beside_a_tokenizer_say_which_token_ends_a_document() {
    let folder = common::Scratch::new();
    let path = folder.write("tokenizer.json", small_file("null", BYTE_LEVEL));
    let eod = || Tokenizer::open(Path::new(&path)).unwrap().eod();
    let found = eod().unwrap().unwrap();
    assert_eq!((found.id, found.said_by.as_str()), (262, "a guess by its name"));
    folder.write("config.json", r#"{"eos_token_id": [256, 262]}"#);
    let found = eod().unwrap().unwrap();
    assert_eq!((found.id, found.name.as_str(), found.said_by.as_str()), (256, "th", "eos_token_id of config.json"));
    for (settings, id) in [(r#""the""#, 257), (r#"{"content": "the", "special": true}"#, 257), ("null", 256)] {
        folder.write("tokenizer_config.json", format!(r#"{{"eos_token": {settings}}}"#));
        assert_eq!(eod().unwrap().unwrap().id, id, "{settings}");
    }
    folder.write("tokenizer_config.json", r#"{"eos_token": "<|absent|>"}"#);
    let error = eod().unwrap_err().to_string();
    assert!(error.contains("<|absent|>") && error.contains("--eod"), "{error}");
    folder.write("tokenizer_config.json", "{");
    let error = eod().unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json is no JSON"), "{error}");
}

#[test]
fn what_is_no_tokenizer_is_refused_by_name() {
    for broken in
        ["", "{}", "[1]", r#"{"model":{}}"#, "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": []}}"]
    {
        let error = Tokenizer::parse(broken.as_bytes(), Path::new("broken.json")).expect_err(broken);
        assert!(error.to_string().contains("broken.json"), "{error}");
    }
}

#[test]
fn samples_speak_the_tokenizer_of_the_data() {
    let folder = common::Scratch::new();
    let (file, other) = (small_file("null", BYTE_LEVEL), small_file("null", &split(r"\s+")));
    let [ours, theirs] = [("a.json", file), ("b.json", other)].map(|(name, content)| folder.write(name, content));
    let input = folder.write("text.txt", "the theatre there");
    let out = folder.path().join("tokens");
    let tokenizer = Tokenizer::open(Path::new(&ours)).unwrap();
    let vocabulary = data::tokenize::Vocabulary {
        ids: tokenizer.ids(),
        eod: None,
        hash: tokenizer.hash(),
        files: tokenizer.files(),
    };
    let encoder = || Box::new(tokenizer.encoder()) as Box<dyn data::tokenize::Encode>;
    data::tokenize::run(&common::options(&[&input], &out), &vocabulary, &encoder, &mut |_| {}).unwrap();

    let config = |name: &str| spec::run::DataConfig {
        tokenizer: Some(name.to_owned()),
        ..common::tokens(&[&out.display().to_string()])
    };
    let speech = Speech::open(&config(&ours)).unwrap();
    let ids = speech.encode("the end").unwrap();
    assert!(ids.len() < 7, "pairs are merged: {ids:?}");
    assert_eq!((speech.decode(&ids).unwrap().as_str(), speech.ids()), ("the end", 263));
    let error = Speech::open(&config(&theirs)).unwrap_err();
    assert!(matches!(error, DataError::Speech { .. }) && error.to_string().contains("name that one"), "{error}");
    assert!(matches!(Speech::open(&config("absent.json")).unwrap_err(), DataError::Read { .. }));
    let bytes = Speech::open(&common::text(&[&input])).unwrap();
    assert_eq!(bytes.encode("a\u{e9}").unwrap(), [0x61, 0xc3, 0xa9]);
}
