//! Every state that can be reached, once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};

use crate::model::{Model, Move};
use crate::parts::{Setup, Violation};

/// How much was explored.
#[derive(Debug)]
pub struct Count {
    pub states: usize,
    pub moves: u64,
    pub ends: u64,
}

/// 128 bits of a state: that two of some millions share them is not to be expected.
struct Fingerprint(u64, u64);

impl Fingerprint {
    fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.1 = (self.1 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.1 ^= self.1 >> 29;
    }
}

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.word(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.word(n.into());
    }

    fn write_isize(&mut self, n: isize) {
        self.word(n as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn fingerprint(model: &Model) -> (u64, u64) {
    let mut hasher = Fingerprint(1, 2);
    model.hash(&mut hasher);
    (hasher.0, hasher.1)
}

/// Follows every move from the beginning.
///
/// # Errors
/// The first violation found, with the way to it.
pub fn explore(setup: &Setup) -> Result<Count, (Violation, Vec<Move>)> {
    let first = Model::new(setup);
    let mut known = HashMap::from([(fingerprint(&first), 0u32)]);
    // Of each state, by number: the one that it was reached from, and how.
    let mut ways: Vec<(u32, Option<Move>)> = vec![(0, None)];
    let mut open = vec![(0u32, first)];
    let mut count = Count { states: 1, moves: 0, ends: 0 };
    let way = |ways: &[(u32, Option<Move>)], mut at: u32, last: Option<Move>| {
        let mut moves: Vec<Move> = last.into_iter().collect();
        while let (before, Some(how)) = ways[at as usize] {
            moves.push(how);
            at = before;
        }
        moves.reverse();
        moves
    };
    while let Some((at, model)) = open.pop() {
        let moves = model.moves(setup);
        // Faults need not happen: what can happen without them decides whether this is an end.
        if moves.iter().all(|(how, _)| matches!(how, Move::Kill(_) | Move::Stop(_) | Move::Cut(..) | Move::Alarm)) {
            count.ends += 1;
            model.ends_well().map_err(|violation| (violation, way(&ways, at, None)))?;
        }
        for (how, next) in moves {
            count.moves += 1;
            let next = next.map_err(|violation| (violation, way(&ways, at, Some(how))))?;
            if let Entry::Vacant(entry) = known.entry(fingerprint(&next)) {
                let number = ways.len() as u32;
                entry.insert(number);
                ways.push((at, Some(how)));
                open.push((number, next));
            }
        }
    }
    count.states = known.len();
    Ok(count)
}
