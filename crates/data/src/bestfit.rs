//! Whole documents in sequences: longest first, each where it leaves the least room.
//!
//! Best-fit decreasing (Ding et al., "Fewer truncations improve language modeling", 2024). Documents longer than a
//! sequence are cut into sequences of their own and a rest. The plan needs lengths alone.

use std::collections::BTreeSet;

use crate::store::{Piece, Store};
use crate::{IGNORE, PAD, Sequence};

/// A part of a document, within one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// The document.
    piece: u32,
    /// Its first token there.
    from: usize,
}

/// Which parts stand in which sequence.
#[derive(Debug)]
pub(crate) struct BestFit {
    pieces: Vec<Piece>,
    /// Parts of all sequences, one sequence after another.
    parts: Vec<Part>,
    /// For each sequence, the parts up to its end.
    ends: Vec<usize>,
    seq: usize,
    eod: bool,
}

impl BestFit {
    /// Packs `pieces` into sequences of `seq` tokens. A part in which no token has a target is left out: its token was
    /// the target of the one before it, or is a document of its own.
    pub(crate) fn new(pieces: Vec<Piece>, seq: usize, eod: bool) -> Self {
        let mut plan = Self { pieces, parts: Vec::new(), ends: Vec::new(), seq, eod };
        let all: Vec<Part> = (0..plan.pieces.len())
            .flat_map(|piece| {
                let len = plan.length(piece);
                (0..len.saturating_sub(1)).step_by(seq).map(move |from| Part { piece: piece as u32, from })
            })
            .collect();
        let mut order = all;
        order.sort_by_key(|&part| std::cmp::Reverse(plan.part_len(part)));
        // Sequences by the room in them, and which amounts of room there are.
        let mut by_room: Vec<Vec<usize>> = vec![Vec::new(); seq + 1];
        let mut rooms: BTreeSet<usize> = BTreeSet::new();
        let mut sequences: Vec<Vec<Part>> = Vec::new();
        for part in order {
            let len = plan.part_len(part);
            let (at, room) = match rooms.range(len..).next() {
                Some(&room) => {
                    let at = by_room[room].pop().expect("a sequence with that room");
                    if by_room[room].is_empty() {
                        rooms.remove(&room);
                    }
                    (at, room)
                }
                None => {
                    sequences.push(Vec::new());
                    (sequences.len() - 1, seq)
                }
            };
            sequences[at].push(part);
            if room > len {
                by_room[room - len].push(at);
                rooms.insert(room - len);
            }
        }
        for parts in sequences {
            plan.parts.extend(parts);
            plan.ends.push(plan.parts.len());
        }
        plan
    }

    /// Tokens of a document with its end.
    fn length(&self, piece: usize) -> usize {
        self.pieces[piece].len() + usize::from(self.eod)
    }

    fn part_len(&self, part: Part) -> usize {
        (self.length(part.piece as usize) - part.from).min(self.seq)
    }

    fn sequence(&self, place: u64) -> &[Part] {
        let place = place as usize;
        let start = if place == 0 { 0 } else { self.ends[place - 1] };
        &self.parts[start..self.ends[place]]
    }

    /// Sequences in one pass.
    pub(crate) fn sequences(&self) -> u64 {
        self.ends.len() as u64
    }

    /// The documents.
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Tokens of each document's part of sequence `place`, in order.
    pub(crate) fn parts(&self, place: u64) -> Vec<usize> {
        self.sequence(place).iter().map(|&part| self.part_len(part)).collect()
    }

    /// Sequence `place` over `store`; `place` must be below `sequences`.
    pub(crate) fn cut(&self, store: &Store, place: u64) -> Sequence {
        let seq = self.seq;
        let (mut tokens, mut targets) = (Vec::with_capacity(seq + 1), Vec::with_capacity(seq));
        let (mut bytes, mut target_bytes) = (Vec::with_capacity(seq + 1), Vec::with_capacity(seq));
        let mut doc_start = Vec::with_capacity(seq);
        for &part in self.sequence(place) {
            let (start, len) = (tokens.len(), self.part_len(part));
            let piece = part.piece as usize;
            // One token more, where the document has it: the target of the last.
            let to = (part.from + len + 1).min(self.length(piece));
            store.cut(&self.pieces[piece], part.from, to, &mut tokens, &mut bytes);
            targets.extend_from_slice(&tokens[start + 1..]);
            target_bytes.extend_from_slice(&bytes[start + 1..]);
            tokens.truncate(start + len);
            bytes.truncate(start + len);
            targets.resize(start + len, IGNORE);
            target_bytes.resize(start + len, 0);
            doc_start.resize(start + len, start as u32);
        }
        let real = tokens.len() as u32;
        tokens.resize(seq, PAD);
        targets.resize(seq, IGNORE);
        target_bytes.resize(seq, 0);
        doc_start.resize(seq, real);
        let positions = doc_start.iter().zip(0..).map(|(start, at): (&u32, u32)| at - start).collect();
        Sequence { tokens, targets, doc_start, positions, target_bytes }
    }
}
