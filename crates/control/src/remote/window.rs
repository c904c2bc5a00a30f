//! What was said and not yet acknowledged is kept, in order, and said again on the next link. Pure.

use std::collections::VecDeque;

/// The side that speaks.
#[derive(Debug, Clone)]
pub struct Outbox<T> {
    next: u64,
    kept: VecDeque<(u64, usize, T)>,
    bytes: usize,
    bytes_max: usize,
    left_out: u64,
}

impl<T> Outbox<T> {
    /// Keeps up to `bytes_max` bytes of what may be left out; what may not is kept in any case.
    pub fn new(bytes_max: usize) -> Self {
        Self { next: 1, kept: VecDeque::new(), bytes: 0, bytes_max, left_out: 0 }
    }

    /// The number of the next word.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Keeps `word` of so many `bytes`; its number. If there is too much, the oldest words of which `minor` is true are left out.
    pub fn push(&mut self, word: T, bytes: usize, minor: impl Fn(&T) -> bool) -> u64 {
        let seq = self.next;
        self.next += 1;
        self.bytes += bytes;
        self.kept.push_back((seq, bytes, word));
        while self.bytes > self.bytes_max {
            let Some(at) = self.kept.iter().position(|(_, _, word)| minor(word)) else { break };
            let (_, bytes, _) = self.kept.remove(at).expect("it was found");
            self.bytes -= bytes;
            self.left_out += 1;
        }
        seq
    }

    /// The other side has everything up to `seq`.
    pub fn ack(&mut self, seq: u64) {
        while self.kept.front().is_some_and(|(first, ..)| *first <= seq) {
            let (_, bytes, _) = self.kept.pop_front().expect("it was seen");
            self.bytes -= bytes;
        }
    }

    /// What is to be said again on a new link, ascending.
    pub fn after(&self, seq: u64) -> impl Iterator<Item = (u64, &T)> {
        self.kept.iter().filter(move |(n, ..)| *n > seq).map(|(n, _, word)| (*n, word))
    }

    /// How many words were left out since the last question.
    pub fn left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// The side that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inbox {
    last: u64,
}

impl Inbox {
    /// Everything up to `last` is here.
    pub fn new(last: u64) -> Self {
        Self { last }
    }

    /// True if word `seq` is new. Gaps are words that were left out.
    pub fn take(&mut self, seq: u64) -> bool {
        let new = seq > self.last;
        self.last = self.last.max(seq);
        new
    }

    /// The newest number.
    pub fn last(self) -> u64 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // Links break at any point, acknowledgements get lost: each word is taken once, in order.
        #[test]
        fn every_word_arrives_once_and_in_order(script in proptest::collection::vec(0u8..5, 0..80)) {
            let (mut out, mut inbox) = (Outbox::new(usize::MAX), Inbox::new(0));
            let (mut said, mut heard) = (Vec::new(), Vec::new());
            let mut on_the_way: VecDeque<(u64, u32)> = VecDeque::new();
            let deliver = |way: &mut VecDeque<(u64, u32)>, inbox: &mut Inbox, heard: &mut Vec<u32>| {
                if let Some((seq, word)) = way.pop_front() && inbox.take(seq) {
                    heard.push(word);
                }
            };
            for (word, what) in (0u32..).zip(script) {
                match what {
                    0 | 1 => {
                        said.push(word);
                        on_the_way.push_back((out.push(word, 1, |_| false), word));
                    }
                    2 => deliver(&mut on_the_way, &mut inbox, &mut heard),
                    3 => out.ack(inbox.last()),
                    _ => {
                        // A new link: what was on the way is lost, the other side says what it has.
                        on_the_way = out.after(inbox.last()).map(|(seq, word)| (seq, *word)).collect();
                    }
                }
            }
            on_the_way = out.after(inbox.last()).map(|(seq, word)| (seq, *word)).collect();
            while !on_the_way.is_empty() {
                deliver(&mut on_the_way, &mut inbox, &mut heard);
            }
            prop_assert_eq!(heard, said);
        }
    }

    #[test]
    fn where_there_is_too_much_minor_words_go_the_oldest_first() {
        let mut out = Outbox::new(30);
        for word in 0..10 {
            out.push(word, 10, |word| word % 2 == 0);
        }
        let left: Vec<_> = out.after(0).map(|(_, word)| *word).collect();
        // The others are kept although they are too many.
        assert_eq!(left, [1, 3, 5, 7, 9]);
        assert_eq!((out.left_out(), out.left_out()), (5, 0));
        let mut inbox = Inbox::new(0);
        assert!(out.after(0).map(|(seq, _)| seq).collect::<Vec<_>>().into_iter().all(|seq| inbox.take(seq)));
        assert!(!inbox.take(4));
        out.ack(10);
        assert_eq!(out.after(0).count(), 0);
    }
}
