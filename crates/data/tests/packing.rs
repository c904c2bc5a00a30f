//! Laws of packing: a naive twin, every target once per epoch, nothing across documents.

mod common;

use common::{Scratch, synthetic, text};
use data::{Dataset, EOD, IGNORE, PAD, Sequence, Split};
use proptest::prelude::*;

/// A token of the stream with the document that it belongs to.
type Placed = (u32, usize);

fn stream(documents: &[Vec<u8>], eod: bool) -> Vec<Placed> {
    let mut stream = Vec::new();
    for (number, document) in documents.iter().enumerate() {
        stream.extend(document.iter().map(|&byte| (u32::from(byte), number)));
        stream.extend(eod.then_some((EOD, number)));
    }
    stream
}

/// The naive twin: every sequence of the stream, token by token.
fn naive(stream: &[Placed], seq: usize, masks: bool) -> Vec<Sequence> {
    let mut sequences = Vec::new();
    for first in (0..stream.len()).step_by(seq) {
        let mut sequence = Sequence::default();
        for at in 0..seq {
            let here = stream.get(first + at);
            let next = stream.get(first + at + 1);
            let target = match (here, next) {
                (Some(here), Some(next)) if !masks || here.1 == next.1 => next.0,
                _ => IGNORE,
            };
            let document = |at: usize| stream.get(first + at).map(|token| token.1);
            let start =
                (0..=at).find(|&start| !masks || document(start) == document(at)).expect("itself at the latest");
            sequence.tokens.push(here.map_or(PAD, |here| here.0));
            sequence.targets.push(target);
            sequence.target_bytes.push(u32::from(target < EOD));
            sequence.doc_start.push(start as u32);
            sequence.positions.push((at - start) as u32);
        }
        sequences.push(sequence);
    }
    if sequences.last().is_some_and(|tail| tail.targets.iter().all(|&target| target == IGNORE))
        && !stream.len().is_multiple_of(seq)
    {
        sequences.pop();
    }
    sequences
}

fn documents() -> impl Strategy<Value = Vec<Vec<u8>>> {
    // What a text holds: anything else is refused.
    let document = prop::collection::vec(b' '..=b'~', 0..40).prop_map(|mut bytes| {
        bytes.push(b'.');
        bytes
    });
    prop::collection::vec(document, 1..12)
}

fn open(documents: &[Vec<u8>], seq: usize, eod: bool, masks: bool, seed: u64) -> Option<Dataset> {
    let folder = Scratch::new();
    for (number, document) in documents.iter().enumerate() {
        folder.write(&format!("{number:04}.txt"), document);
    }
    let config = spec::run::DataConfig { eod, masks, seed, ..text(&[&folder.path().display().to_string()]) };
    Dataset::open(&config, seq, None).ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_epoch_is_the_naive_one_in_another_order(
        documents in documents(), seq in 1usize..60, eod: bool, masks: bool, seed: u64, epoch in 0u64..5,
    ) {
        let expected = naive(&stream(&documents, eod), seq, masks);
        let dataset = open(&documents, seq, eod, masks, seed);
        let bytes: usize = documents.iter().map(Vec::len).sum();
        prop_assert_eq!(dataset.is_some(), bytes >= seq && !expected.is_empty());
        let Some(dataset) = dataset else { return Ok(()) };
        let n = dataset.sequences(Split::Train);
        prop_assert_eq!(n, expected.len() as u64);
        let mut seen = vec![false; expected.len()];
        // Backwards: no index needs its predecessors.
        for index in (epoch * n..(epoch + 1) * n).rev() {
            let place = dataset.place(Split::Train, index) as usize;
            prop_assert_eq!(&dataset.sequence(Split::Train, index), &expected[place]);
            prop_assert!(!std::mem::replace(&mut seen[place], true), "sequence {} twice in an epoch", place);
        }
        // Every token of the stream that has a target was in one of them.
        let stream = stream(&documents, eod);
        let targets = stream.windows(2).filter(|pair| !masks || pair[0].1 == pair[1].1).count();
        let cut: usize = expected.iter().flat_map(|sequence| &sequence.targets).filter(|&&target| target != IGNORE).count();
        prop_assert_eq!(cut, targets);
    }

    #[test]
    fn masked_documents_do_not_see_each_other(documents in documents(), seq in 1usize..60, eod: bool) {
        let Some(dataset) = open(&documents, seq, eod, true, 1) else { return Ok(()) };
        for index in 0..dataset.sequences(Split::Train) {
            let sequence = dataset.sequence(Split::Train, index);
            for at in 0..seq {
                let start = sequence.doc_start[at];
                prop_assert_eq!(sequence.positions[at], at as u32 - start);
                if at > 0 && start != sequence.doc_start[at - 1] {
                    prop_assert_eq!(start, at as u32);
                    prop_assert_eq!(sequence.targets[at - 1], IGNORE);
                }
                if sequence.tokens[at] == EOD {
                    prop_assert_eq!(sequence.targets[at], IGNORE);
                    prop_assert!(at == 0 || start as usize == at || sequence.targets[at - 1] == EOD);
                }
            }
        }
    }
}

#[test]
fn a_sequence_by_hand() {
    let documents = [b"ab".to_vec(), b"cde".to_vec(), b"f".to_vec()];
    let dataset = open(&documents, 6, true, true, 1).expect("enough text");
    let sequences: Vec<Sequence> = (0..2).map(|index| dataset.sequence(Split::Train, index)).collect();
    let at = |place| &sequences[(0..2).find(|&index| dataset.place(Split::Train, index) == place).unwrap() as usize];
    let [a, b, c, d, e, f] = [97, 98, 99, 100, 101, 102];
    assert_eq!(at(0).tokens, [a, b, EOD, c, d, e]);
    assert_eq!(at(0).targets, [b, EOD, IGNORE, d, e, EOD]);
    assert_eq!(at(0).doc_start, [0, 0, 0, 3, 3, 3]);
    assert_eq!(at(0).positions, [0, 1, 2, 0, 1, 2]);
    assert_eq!(at(1).tokens, [EOD, f, EOD, PAD, PAD, PAD]);
    assert_eq!(at(1).targets, [IGNORE, EOD, IGNORE, IGNORE, IGNORE, IGNORE]);
    assert_eq!(at(1).doc_start, [0, 1, 1, 3, 3, 3]);
    assert_eq!(at(1).positions, [0, 0, 1, 0, 1, 2]);
}

#[test]
fn epochs_and_seeds_differ_in_order_only() {
    let order = |seed, epoch| {
        let dataset =
            Dataset::open(&spec::run::DataConfig { seed, validation: 0.0, ..synthetic() }, 512, None).expect("opens");
        let n = dataset.sequences(Split::Train);
        (epoch * n..(epoch + 1) * n).map(|index| dataset.place(Split::Train, index)).collect::<Vec<_>>()
    };
    let orders = [order(1, 0), order(1, 1), order(2, 0), order(1, 1 << 40)];
    for (i, a) in orders.iter().enumerate() {
        for b in &orders[i + 1..] {
            let same = a.iter().zip(b).filter(|(a, b)| a == b).count();
            assert!(same < 12, "{same} of {} sequences at the same index; about 1 is expected", a.len());
        }
    }
}

#[test]
fn validation_is_in_file_order_and_begins_again() {
    let dataset = Dataset::open(&synthetic(), 128, None).expect("opens");
    let n = dataset.sequences(Split::Validation);
    let text: Vec<u32> = (0..n).flat_map(|index| dataset.sequence(Split::Validation, index).tokens).collect();
    let bytes: Vec<u8> = text.iter().filter_map(|&token| u8::try_from(token).ok().filter(|&byte| byte != 0)).collect();
    assert_eq!(bytes, dataset.bytes(Split::Validation));
    assert_eq!(dataset.sequence(Split::Validation, n + 3), dataset.sequence(Split::Validation, 3));
}

#[test]
fn threads_that_ask_in_any_order_get_the_same() {
    let dataset = Dataset::open(&synthetic(), 200, None).expect("opens");
    let alone: Vec<Sequence> = (0..64).map(|index| dataset.sequence(Split::Train, index)).collect();
    std::thread::scope(|scope| {
        for stride in [1, 3, 5, 7] {
            let (dataset, alone) = (&dataset, &alone);
            scope.spawn(move || {
                for step in 0..64 {
                    let index = step * stride % 64;
                    assert_eq!(dataset.sequence(Split::Train, index as u64), alone[index]);
                }
            });
        }
    });
}
