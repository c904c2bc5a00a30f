//! Bits that may not change: a change here changes every digest, and asks for another data order version.

mod common;

use common::{Scratch, synthetic, text};
use data::{Dataset, Sequence, Split};
use spec::run::DataConfig;

fn hash(sequences: impl Iterator<Item = Sequence>) -> String {
    let mut hasher = blake3::Hasher::new();
    for sequence in sequences {
        for list in [&sequence.tokens, &sequence.targets, &sequence.doc_start, &sequence.positions] {
            for number in list {
                hasher.update(&number.to_le_bytes());
            }
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_synthetic_language_is_what_it_was() {
    let dataset = Dataset::open(&synthetic(), 256, None).expect("opens");
    assert_eq!(hex(&dataset.hash()), "63b9827c62258e429b7c3adb9055812c16331875a5973ad279b6e88c6646a454");
    assert_eq!(format!("{:.6}", dataset.floor_bits_per_byte().expect("known")), "2.465578");
    let another = Dataset::open(&DataConfig { seed: 9, ..synthetic() }, 256, None).expect("opens");
    assert_eq!(another.hash(), dataset.hash(), "the seed is of the order, not of the language");
}

#[test]
fn the_order_is_what_it_was() {
    let open = |masks, eod| Dataset::open(&DataConfig { masks, eod, ..synthetic() }, 256, None).expect("opens");
    let first = |dataset: Dataset, split| hash((0..100).map(|index| dataset.sequence(split, index)));
    assert_eq!(first(open(true, true), Split::Train), "0f5cc2d8d49bfae5");
    assert_eq!(first(open(false, false), Split::Train), "6153676727acfc53");
    assert_eq!(first(open(true, true), Split::Validation), "62d91ecb7b00a93a");
    let far = open(true, true);
    let places: Vec<u64> = (0..4).map(|index| far.place(Split::Train, (1 << 50) + index)).collect();
    assert_eq!(places, [2419, 2320, 2434, 273]);
    assert_eq!(hex(&far.fingerprint()), "92831fee7694484368f7cc2912fb0d6f4fe5ccea98b9083f2d165e5673fac8b1");
}

#[test]
fn the_hash_is_over_lengths_and_bytes() {
    let folder = Scratch::new();
    folder.write("a", "one");
    folder.write("b", "three");
    let dataset = Dataset::open(&text(&[&folder.path().display().to_string()]), 4, None).expect("opens");
    let expected = blake3::hash(b"\x03\0\0\0\0\0\0\0one\x05\0\0\0\0\0\0\0three");
    assert_eq!(dataset.hash(), *expected.as_bytes());
}

#[test]
fn a_data_set_may_be_shared() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Dataset>();
}
