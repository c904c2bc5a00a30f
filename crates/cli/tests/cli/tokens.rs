//! Runs on tokens: what is known of their bytes, and which tokenizer speaks for them.

use crate::common::Lab;

/// `NAME.bin` and `NAME.idx` of documents of 16-bit tokens; by `code` 3 they are signed, by 8 they are not.
pub fn megatron(lab: &Lab, name: &str, code: u8, documents: &[Vec<u16>]) {
    let (mut bin, mut lengths, mut offsets, mut marks) = (Vec::new(), Vec::new(), Vec::new(), vec![0u64]);
    for document in documents {
        lengths.extend((document.len() as u32).to_le_bytes());
        offsets.extend((bin.len() as u64).to_le_bytes());
        document.iter().for_each(|id| bin.extend(id.to_le_bytes()));
        marks.push(marks.len() as u64);
    }
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(code);
    idx.extend((documents.len() as u64).to_le_bytes());
    idx.extend((marks.len() as u64).to_le_bytes());
    idx.extend(lengths);
    idx.extend(offsets);
    marks.iter().for_each(|mark| idx.extend(mark.to_le_bytes()));
    lab.write(&format!("{name}.bin"), bin);
    lab.write(&format!("{name}.idx"), idx);
}

/// A token folder of these documents, whose header says that there are `vocab` ids.
pub fn folder(lab: &Lab, name: &str, documents: &[Vec<u16>], vocab: u64) {
    let tokens: Vec<u8> = documents.iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
    let mut ends = Vec::new();
    let mut end = 0u64;
    for document in documents {
        end += document.len() as u64;
        ends.extend([end, end].map(u64::to_le_bytes).as_flattened());
    }
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    let header = serde_json::json!({
        "magic": "lockstep tokens", "version": 1, "dtype": "u16", "documents": documents.len(), "tokens": end,
        "bytes": end, "vocab": vocab, "eod": null, "eod_token": null, "tokenizer_blake3": hash(b"by hand"),
        "tokens_blake3": hash(&tokens), "documents_blake3": hash(&ends),
    });
    std::fs::create_dir_all(lab.path(name)).unwrap();
    lab.write(&format!("{name}/tokens.bin"), tokens);
    lab.write(&format!("{name}/documents.bin"), ends);
    lab.write(&format!("{name}/header.json"), header.to_string());
}

#[test]
fn bits_per_byte_are_told_only_where_bytes_are_known() {
    let lab = Lab::new();
    let documents: Vec<Vec<u16>> = (0..40).map(|d| (0..50).map(|i| (d * 7 + i * i) % 257).collect()).collect();
    megatron(&lab, "mega", 8, &documents);
    let sets = ["data.source=tokens", "data.paths=[\"mega\"]", "data.validation=0.2", "train.eval_every=2"];
    let text = lab.train("text", &[], &sets).expect(0);
    assert!(text.stdout.contains("validation after step 2 | loss ") && !text.stdout.contains("bits"), "{text}");
    let json = lab.train("json", &["--json"], &sets).expect(0);
    let null = |line: &&str| line.contains("\"kind\":\"validation\"") && line.contains("\"bits_per_byte\":null");
    assert_eq!(json.stdout.lines().filter(null).count(), 2, "{json}");
    let summary = std::fs::read_to_string(lab.path("json/summary.json")).unwrap();
    assert!(summary.contains("\"validation_bits_per_byte\": null"), "{summary}");

    lab.lockstep(&["ckpt", "export", "text", "--hf", "hf"]).expect(0);
    let eval = |args: &[&str]| {
        let words = ["eval", "--model", "hf", "--seq", "16", "--sequences", "2", "--data"];
        lab.lockstep(&[&words[..], args].concat()).expect(0)
    };
    let text = eval(&["mega"]);
    assert!(text.stdout.contains(" | perplexity ") && !text.stdout.contains("bits"), "{text}");
    let json = eval(&["mega", "--json"]);
    assert!(json.stdout.contains("\"bits_per_byte\":null") && json.stdout.contains("\"bytes\":null"), "{json}");
    lab.write("words.txt", "some text that is long enough for a sequence or two of tokens");
    assert!(eval(&["words.txt"]).stdout.contains(" bits per byte | "));
}

#[cfg(feature = "tokenizers")]
#[test]
fn text_goes_through_the_tokenizer_of_the_model() {
    let lab = Lab::new();
    let words: Vec<String> = (0..100).map(|id| format!("\"w{id}\":{id}")).collect();
    let tokenizer = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"Whitespace"}},"post_processor":null,"decoder":null,
        "model":{{"type":"WordLevel","vocab":{{{}}},"unk_token":"w0"}}}}"#,
        words.join(",")
    );
    lab.train("byte", &[], &[]).expect(0);
    lab.lockstep(&["ckpt", "export", "byte", "--hf", "hf"]).expect(0);
    lab.write("hf/tokenizer.json", &tokenizer);
    let text: Vec<String> = (0..64).map(|i| format!("w{}", i * 7 % 100)).collect();
    lab.write("words.txt", text.join(" "));
    let words = ["eval", "--model", "hf", "--seq", "16", "--sequences", "2", "--json", "--data", "words.txt"];
    // The end of a document by the model's config is none of this tokenizer.
    let refused = lab.lockstep(&words).expect(2);
    assert!(refused.stdout.contains("says eos_token_id = 256, which is no token of it"), "{refused}");
    let config = std::fs::read_to_string(lab.path("hf/config.json")).unwrap();
    lab.write("hf/config.json", config.replace("\"eos_token_id\": 256", "\"eos_token_id\": null"));
    let direct = lab.lockstep(&words).expect(0);
    assert!(direct.stdout.contains("\"tokens\":63"), "{direct}");
    lab.lockstep(&["data", "tokenize", "--tokenizer", "hf/tokenizer.json", "--out", "ids", "words.txt"]).expect(0);
    let twice = lab.lockstep(&[&words[..9], &["ids"]].concat()).expect(0);
    let loss = |out: &str| out.split("\"loss\":").nth(1).and_then(|rest| rest.split(',').next().map(str::to_owned));
    assert_eq!(loss(&direct.stdout), loss(&twice.stdout), "the same tokens");

    // Samples of a run on these tokens speak the same tokenizer.
    let sets = ["data.source=tokens", "data.paths=[\"ids\"]", "data.eod=false", "data.validation=0"];
    let sample = ["train.sample_every=1", "train.sample_tokens=3", "train.sample_prompt=w1 w2", "train.seq=16"];
    let refused = lab.train("mute", &[], &[&sets[..], &sample[..]].concat()).expect(2);
    assert!(refused.stderr.contains("data.tokenizer"), "{refused}");
    let with = [&sets[..], &sample[..], &["data.tokenizer=hf/tokenizer.json"]].concat();
    let spoken = lab.train("spoken", &[], &with).expect(0);
    assert!(spoken.stdout.contains("w1 w2 w"), "{spoken}");

    // The exported model has this tokenizer, also where the run file does not name it, and its end of a document.
    let exported = lab.lockstep(&["ckpt", "export", "spoken", "--hf", "own"]).expect(0);
    assert_eq!(std::fs::read_to_string(lab.path("own/tokenizer.json")).unwrap(), tokenizer, "{exported}");
    let config = std::fs::read_to_string(lab.path("own/config.json")).unwrap();
    assert!(config.contains("\"eos_token_id\": null"), "the tokenizer has none: {config}");
    let ends = ["data", "tokenize", "--tokenizer", "hf/tokenizer.json", "--out", "ends", "--eod", "w9", "words.txt"];
    let told = lab.lockstep(&ends).expect(0);
    assert!(told.stdout.contains("end of a document: w9 (id 9), by --eod"), "{told}");
    let sets = ["data.source=tokens", "data.paths=[\"ends\"]", "data.validation=0", "train.seq=16"];
    lab.train("ended", &[], &sets).expect(0);
    lab.lockstep(&["ckpt", "export", "ended", "--hf", "second"]).expect(0);
    let config = std::fs::read_to_string(lab.path("second/config.json")).unwrap();
    assert!(config.contains("\"eos_token_id\": 9"), "{config}");
    assert_eq!(std::fs::read_to_string(lab.path("second/tokenizer.json")).unwrap(), tokenizer);
    // A copy of another tokenizer is none of this model.
    lab.write("ends/tokenizer.json", "{}");
    let without = lab.lockstep(&["ckpt", "export", "ended", "--hf", "third"]).expect(0);
    assert!(without.stdout.contains("has no tokenizer.json"), "{without}");
    assert!(!lab.path("third/tokenizer.json").exists());
}
