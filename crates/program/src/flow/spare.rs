//! Spare buffers, counted.

use std::collections::HashMap;

/// Part of its length that a loose buffer has more room than was asked for, for what the next step asks for.
const SLACK: usize = 8;

/// Numbers that a new loose buffer has room for, if it was asked for with `len`.
pub const fn loose_room(len: usize) -> usize {
    len + len / SLACK + 1
}

/// Buffers of which each length is used again. A *loose* one, whose length depends on the routers, serves any length that fits.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    /// By length: in use, and the most that were.
    lengths: HashMap<usize, (usize, usize)>,
    /// Numbers in use, and the most that were.
    used: (usize, usize),
    /// Room of the loose ones that are spare.
    loose: Vec<usize>,
    /// Of those in use, by length.
    lent: HashMap<usize, Vec<usize>>,
}

impl Spare {
    /// A buffer of `len` numbers comes into use.
    pub fn take(&mut self, len: usize) {
        let (now, most) = self.lengths.entry(len).or_default();
        *now += 1;
        *most = (*most).max(*now);
        self.comes(len);
    }

    /// One is spare.
    pub fn give(&mut self, len: usize) {
        if let Some((now, _)) = self.lengths.get_mut(&len).filter(|(now, _)| *now > 0) {
            *now -= 1;
            self.used.0 -= len;
        }
    }

    /// A loose buffer comes into use: the smallest with room, or a new one for the largest.
    pub fn take_loose(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        let spare = self.loose.iter().enumerate();
        let fits = spare.clone().filter(|(_, room)| **room > len).min_by_key(|(_, room)| **room).map(|(at, _)| at);
        let room = match (fits, spare.max_by_key(|(_, room)| **room).map(|(at, _)| at)) {
            (Some(at), _) => self.loose.swap_remove(at),
            (None, largest) => {
                if let Some(at) = largest {
                    self.loose.swap_remove(at);
                }
                loose_room(len)
            }
        };
        self.lent.entry(len).or_default().push(room);
        self.comes(len);
    }

    /// One is spare.
    pub fn give_loose(&mut self, len: usize) {
        if let Some(room) = self.lent.get_mut(&len).and_then(Vec::pop) {
            self.loose.push(room);
            self.used.0 -= len;
        }
    }

    fn comes(&mut self, len: usize) {
        self.used.0 += len;
        self.used.1 = self.used.1.max(self.used.0);
    }

    /// Numbers in all of them.
    pub fn elements(&self) -> u64 {
        let exact: u64 = self.lengths.iter().map(|(len, (_, most))| (len * most) as u64).sum();
        exact + self.loose.iter().chain(self.lent.values().flatten()).map(|room| *room as u64).sum::<u64>()
    }

    /// Most numbers in use at once.
    pub fn most(&self) -> u64 {
        self.used.1 as u64
    }

    /// Comes and goes, each in its order.
    pub fn all(&mut self, take: &[usize], give: &[usize]) {
        take.iter().for_each(|len| self.take(*len));
        give.iter().for_each(|len| self.give(*len));
    }
}
