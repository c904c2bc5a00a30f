//! Random sums and their naive twins.

use fabric::{Count, Endpoint, Group, Operation, ReducePlan};
use spec::tree;
use std::ops::Range;

/// A small generator (splitmix64): the same numbers in every rank.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `0..len` cut at random into `count` ranges, some of them empty.
    pub fn cuts(&mut self, len: usize, count: usize) -> Vec<Range<usize>> {
        let mut at: Vec<usize> = (1..count).map(|_| self.below(len + 1)).collect();
        at.extend([0, len]);
        at.sort_unstable();
        at.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }
}

/// One sum: everything follows from the seed.
pub struct Case {
    pub seed: u64,
    pub plan: ReducePlan,
    pub hosts: Vec<u32>,
    pub len: usize,
}

impl Case {
    pub fn new(seed: u64, members: usize, len_max: usize) -> Self {
        let mut random = Random(seed);
        let leaves = 1 + random.below(19);
        let len = 1 + random.below(len_max);
        let mut cells: Vec<Vec<Range<usize>>> = random.cuts(leaves, members).into_iter().map(|cut| vec![cut]).collect();
        if random.below(3) == 0 {
            // Leaves dealt one by one, as context cells of several data cells.
            cells = (0..members).map(|m| (m..leaves).step_by(members).map(|leaf| leaf..leaf + 1).collect()).collect();
        }
        let parts = match random.below(3) {
            0 => random.cuts(len, members).into_iter().map(|range| vec![range]).collect(),
            // Slices of each row, as sequence slices of [batch, seq, h].
            1 => {
                let rows = 1 + random.below(4);
                let row = len / rows;
                let slices = random.cuts(row, members);
                let shift = |s: &Range<usize>, r: usize| r * row + s.start..r * row + s.end;
                slices.iter().map(|slice| (0..rows).map(|r| shift(slice, r)).collect()).collect()
            }
            // Many short ranges, dealt at random: unordered, some members without any.
            _ => {
                let mut parts = vec![Vec::new(); members];
                for range in random.cuts(len, 12) {
                    parts[random.below(members)].insert(0, range);
                }
                parts
            }
        };
        let hosts = (0..members).map(|_| random.below(3) as u32).collect();
        Self { seed, plan: ReducePlan { leaves, cells, parts }, hosts, len }
    }

    /// Element `i` of a leaf: magnitudes differ so much that the order of additions shows.
    pub fn leaf(&self, leaf: usize) -> Vec<f32> {
        let mut random = Random(self.seed ^ ((leaf as u64 + 1) << 32));
        (0..self.len)
            .map(|_| {
                let bits = random.next();
                let unit = (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                unit * ((bits & 15) as f32 - 6.0).exp2()
            })
            .collect()
    }

    /// The serial tree, written out.
    pub fn node(&self, node: Range<usize>) -> Vec<f32> {
        if node.len() == 1 {
            return self.leaf(node.start);
        }
        let mid = node.start + tree::cut(node.len());
        let (mut left, right) = (self.node(node.start..mid), self.node(mid..node.end));
        left.iter_mut().zip(&right).for_each(|(l, r)| *l += r);
        left
    }

    fn part_of(&self, member: usize, full: &[f32]) -> Vec<u32> {
        self.plan.parts[member].iter().cloned().flatten().map(|i| full[i].to_bits()).collect()
    }

    /// Runs all sums and gathers of this case and checks bits and bytes.
    pub fn check(&self, end: &Endpoint, group: &Group) {
        let me = group.member(end.rank()).expect("a member");
        let trees = self.plan.subtrees(me);
        let vectors: Vec<Vec<f32>> = trees.iter().map(|node| self.node(node.clone())).collect();
        let mine: Vec<(Range<usize>, &[f32])> = trees.iter().cloned().zip(vectors.iter().map(Vec::as_slice)).collect();
        let total = self.node(0..self.plan.leaves);
        let two = group.clone().on_hosts(self.hosts.clone());
        for group in [group, &two] {
            let note = format!("seed {}, hosts {:?}", self.seed, group.hosts);
            end.take_counters();
            let mut out = vec![f32::NAN; self.plan.part_len(me)];
            end.reduce_scatter(group, &self.plan, &mine, &mut out).expect("reduce_scatter");
            let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert_eq!(got, self.part_of(me, &total), "reduce_scatter, {note}");
            let mut full = vec![-1.0; self.len];
            end.all_gather(group, &self.plan.parts, &out, &mut full).expect("all_gather");
            let mut reduced = vec![-1.0; self.len];
            end.all_reduce(group, &self.plan, &mine, &mut reduced).expect("all_reduce");
            for member in 0..group.len() {
                assert_eq!(self.part_of(member, &full), self.part_of(member, &total), "all_gather, {note}");
            }
            let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&reduced), bits(&full), "all_reduce, {note}");
            let inside: usize = (0..group.len()).map(|m| self.plan.part_len(m)).sum();
            let untouched = full.iter().filter(|x| x.to_bits() == (-1.0f32).to_bits()).count();
            assert_eq!(untouched, self.len - inside, "what lies in no part, {note}");
            self.check_bytes(end, group, me);
        }
    }

    /// The same in two halves: two sums and a gather are under way at once, and taken in another order.
    pub fn check_posted(&self, end: &Endpoint, group: &Group) {
        let me = group.member(end.rank()).expect("a member");
        let mine =
            || self.plan.subtrees(me).into_iter().map(|node| (node.clone(), self.node(node))).collect::<Vec<_>>();
        let total = self.node(0..self.plan.leaves);
        let two = group.clone().on_hosts(self.hosts.clone());
        for group in [group, &two] {
            let note = format!("seed {}, hosts {:?}", self.seed, group.hosts);
            let [first, second, third] = [0, 1000, 2000].map(|more| Group { id: group.id + more, ..group.clone() });
            end.take_counters();
            let part = end.post_sum(&first, &self.plan, mine(), false).expect("post");
            let whole = end.post_sum(&second, &self.plan, mine(), true).expect("post");
            let gather = group.one_level().then(|| {
                let mut full = vec![-1.0; self.len];
                self.plan.parts[me].iter().for_each(|at| full[at.clone()].copy_from_slice(&total[at.clone()]));
                end.post_gather(&third, &self.plan.parts, full).expect("post")
            });
            (0..3).for_each(|_| end.progress().expect("progress"));
            let mut out = vec![f32::NAN; self.plan.part_len(me)];
            let mut reduced = vec![-1.0; if whole.in_place() { 0 } else { self.len }];
            let in_place = whole.in_place();
            let mut taken = end.take_whole(&second, &self.plan, whole, &mut reduced).expect("take");
            let reduced = if in_place { taken.buffers.remove(0) } else { reduced };
            end.take_part(&first, &self.plan, part, &mut out).expect("take");
            let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert_eq!(got, self.part_of(me, &total), "posted reduce_scatter, {note}");
            for member in 0..group.len() {
                assert_eq!(self.part_of(member, &reduced), self.part_of(member, &total), "posted all_reduce, {note}");
            }
            if let Some(gather) = gather {
                let full = end.take_gather(&third, &self.plan.parts, gather).expect("take").buffers.remove(0);
                for member in 0..group.len() {
                    assert_eq!(self.part_of(member, &full), self.part_of(member, &total), "posted all_gather, {note}");
                }
            } else {
                let mut full = vec![-1.0; self.len];
                end.all_gather(group, &self.plan.parts, &out, &mut full).expect("all_gather");
            }
            self.check_bytes(end, group, me);
        }
    }

    /// A sum into a buffer of its own: what is brought stays as it is, and of two subtrees all is there without a hand moved.
    pub fn check_scattered(&self, end: &Endpoint, group: &Group) {
        let me = group.member(end.rank()).expect("a member");
        let total = self.node(0..self.plan.leaves);
        let two = group.clone().on_hosts(self.hosts.clone());
        for group in [group, &two] {
            let note = format!("seed {}, hosts {:?}", self.seed, group.hosts);
            let nodes = self.plan.subtrees(me).into_iter();
            let mine: Vec<_> = nodes.map(|node| (node.clone(), self.node(node))).collect();
            let out = vec![f32::NAN; self.plan.part_len(me)];
            let posted = end.post_scatter(group, &self.plan, mine.clone(), out).expect("post");
            end.progress().expect("progress");
            let mut buffers = end.take_scatter(group, &self.plan, posted).expect("take").buffers;
            let got: Vec<u32> = buffers.remove(0).iter().map(|x| x.to_bits()).collect();
            assert_eq!(got, self.part_of(me, &total), "scattered sum, {note}");
            let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            mine.iter().zip(&buffers).for_each(|((_, brought), back)| assert_eq!(bits(brought), bits(back), "{note}"));
        }
    }

    /// Byte counters against the closed forms.
    fn check_bytes(&self, end: &Endpoint, group: &Group, me: usize) {
        let counters = end.counters();
        let reduce = counters.get(&group.name, Operation::ReduceScatter);
        let gather = counters.get(&group.name, Operation::AllGather);
        let both = counters.get(&group.name, Operation::AllReduce);
        assert_eq!((reduce.calls, gather.calls, both.calls), (1, 1, 1));
        assert_eq!(both.bytes_sent(), reduce.bytes_sent() + gather.bytes_sent());
        assert_eq!(both.inter_bytes_received, reduce.inter_bytes_received + gather.inter_bytes_received);
        let own = self.plan.part_len(me) as u64;
        let vector: u64 = (0..group.len()).map(|m| self.plan.part_len(m) as u64).sum();
        if group.hosts.is_none() {
            let held = self.plan.subtrees(me).len() as u64;
            assert_eq!(reduce.intra_bytes_sent, 4 * held * (vector - own), "seed {}", self.seed);
            assert_eq!(gather.intra_bytes_sent, 4 * own * (group.len() as u64 - 1), "seed {}", self.seed);
            assert_eq!((reduce.inter_bytes_sent, gather.inter_bytes_sent), (0, 0));
            return;
        }
        // What crosses hosts towards this owner: its part, once per subtree that a host
        // cannot merge further; and once per host when it is gathered.
        let crossing = |count: &Count| count.inter_bytes_received;
        let mut others: Vec<u32> = self.hosts.iter().copied().filter(|&h| h != self.hosts[me]).collect();
        others.sort_unstable();
        others.dedup();
        let maximal: u64 = others.iter().map(|&host| self.maximal(host, 0..self.plan.leaves).1).sum();
        assert_eq!(crossing(&reduce), 4 * own * maximal, "seed {}", self.seed);
        assert_eq!(gather.inter_bytes_sent, 4 * own * others.len() as u64, "seed {}", self.seed);
    }

    /// (all leaves of `node` lie on `host`, how many subtrees cross from there): brute force.
    fn maximal(&self, host: u32, node: Range<usize>) -> (bool, u64) {
        if node.len() == 1 {
            let holder = self
                .plan
                .cells
                .iter()
                .position(|cells| cells.iter().any(|range| range.contains(&node.start)))
                .expect("held");
            let here = self.hosts[holder] == host;
            return (here, here.into());
        }
        let mid = node.start + tree::cut(node.len());
        let (left, right) = (self.maximal(host, node.start..mid), self.maximal(host, mid..node.end));
        if left.0 && right.0 { (true, 1) } else { (false, left.1 + right.1) }
    }
}
