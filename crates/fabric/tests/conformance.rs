//! One body, every transport: what all of them must do alike.

mod common;

use common::sums::{Case, Random};
use common::{Scenario, everywhere, play};
use fabric::{Endpoint, FabricError, FabricOptions, Group, Operation, threads};
use proptest::prelude::*;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const SCENARIOS: [Scenario; 10] = [
    Scenario { name: "order", world: 3, options: small_rings, body: order, killed: None },
    Scenario { name: "big", world: 2, options: FabricOptions::default, body: big, killed: None },
    Scenario { name: "chain", world: 3, options: FabricOptions::default, body: chain, killed: None },
    Scenario { name: "sums", world: 4, options: FabricOptions::default, body: sums, killed: None },
    Scenario { name: "sums_unsummed", world: 3, options: no_checksum, body: sums, killed: None },
    Scenario { name: "together", world: 4, options: FabricOptions::default, body: together, killed: None },
    Scenario { name: "parcels", world: 3, options: small_rings, body: parcels, killed: None },
    Scenario { name: "posted", world: 4, options: small_rings, body: posted, killed: None },
    Scenario { name: "outbox", world: 3, options: small_rings, body: outbox, killed: None },
    Scenario { name: "killed", world: 3, options: FabricOptions::default, body: killed, killed: Some(1) },
];

fn run(name: &str) {
    everywhere(SCENARIOS.iter().find(|s| s.name == name).expect("a scenario"));
}

#[test]
fn child_entry() {
    play(&SCENARIOS);
}

#[test]
fn point_to_point_keeps_order_and_groups_do_not_block_each_other() {
    run("order");
}

#[test]
fn big_messages_cross_in_both_directions_at_once() {
    run("big");
}

#[test]
fn a_waiting_receiver_takes_in_what_others_send() {
    run("chain");
}

#[test]
fn sums_have_the_bits_of_the_serial_tree_and_the_bytes_of_the_formula() {
    run("sums");
    run("sums_unsummed");
}

#[test]
fn sums_and_gathers_in_two_halves_have_the_same_bits_and_bytes() {
    run("posted");
}

#[test]
fn posted_messages_never_wait_for_room() {
    run("outbox");
}

#[test]
fn barrier_broadcast_and_byte_gather() {
    run("together");
}

#[test]
fn everyone_has_something_else_for_everyone() {
    run("parcels");
}

#[test]
fn a_killed_process_is_gone_for_its_peers() {
    run("killed");
}

fn small_rings() -> FabricOptions {
    FabricOptions { ring_bytes: 4096, ..FabricOptions::default() }
}

fn no_checksum() -> FabricOptions {
    FabricOptions { checksum: false, ..FabricOptions::default() }
}

fn world(end: &Endpoint) -> Group {
    Group::new(1, "world", (0..end.world()).collect())
}

/// Bytes that tell who sent them, where and as which.
fn letter(source: u32, group: u32, number: usize) -> Vec<u8> {
    let mut random = Random(u64::from(source) << 40 | u64::from(group) << 32 | number as u64);
    let len = match random.below(8) {
        0 => 0,
        1 => 30_000 + random.below(40_000),
        _ => random.below(600),
    };
    (0..len).map(|_| random.next() as u8).collect()
}

fn order(end: &Endpoint) {
    let groups = [world(end), Group::new(2, "twin", (0..end.world()).collect())];
    let me = end.rank() as usize;
    let count = 60;
    for number in 0..count {
        for group in &groups {
            for to in (0..3).filter(|&m| m != me) {
                end.send_bytes(group, to, &letter(end.rank(), group.id, number)).expect("send");
            }
        }
    }
    // The other group first, the last sender first: all of the rest must wait in the mailbox.
    for group in groups.iter().rev() {
        for from in (0..3).rev().filter(|&m| m != me) {
            for number in 0..count {
                let got = end.recv_bytes(group, from).expect("receive");
                assert_eq!(got, letter(from as u32, group.id, number), "group {}, {number}", group.id);
            }
        }
    }
    // To itself, too.
    end.send(&groups[0], me, &[1.0, 2.0]).expect("send");
    let mut own = [0.0; 2];
    end.recv(&groups[0], me, &mut own).expect("receive");
    assert_eq!(own, [1.0, 2.0]);
    end.barrier(&groups[0]).expect("barrier");
}

fn big(end: &Endpoint) {
    let group = world(end);
    let peer = 1 - end.rank() as usize;
    let len = 16 << 20;
    let value = |rank: usize, i: usize| (i.wrapping_mul(2 * rank + 3) & 0xffff) as f32;
    let data: Vec<f32> = (0..len).map(|i| value(1 - peer, i)).collect();
    let mut got = vec![0.0; len];
    end.send(&group, peer, &data).expect("send");
    end.recv(&group, peer, &mut got).expect("receive");
    assert!(got.iter().enumerate().all(|(i, &x)| x == value(peer, i)));
    let total = end.counters().total();
    assert_eq!((total.bytes_sent(), total.bytes_received()), (4 * len as u64, 4 * len as u64));
    end.barrier(&group).expect("barrier");
}

/// 0 fills the way to 1 before it tells 2, for whom 1 waits.
fn chain(end: &Endpoint) {
    let group = world(end);
    let load = vec![end.rank() as f32; 4 << 20];
    match end.rank() {
        0 => {
            end.send(&group, 1, &load).expect("send");
            end.send(&group, 2, &[1.0]).expect("send");
        }
        1 => {
            let (mut word, mut got) = ([0.0], vec![9.0; load.len()]);
            end.recv(&group, 2, &mut word).expect("receive");
            end.recv(&group, 0, &mut got).expect("receive");
            assert!(word == [2.0] && got.iter().all(|&x| x == 0.0));
        }
        _ => {
            end.recv(&group, 0, &mut [0.0]).expect("receive");
            end.send(&group, 1, &[2.0]).expect("send");
        }
    }
    end.barrier(&group).expect("barrier");
}

fn sums(end: &Endpoint) {
    let ranks: Vec<u32> = (0..end.world()).collect();
    let mut odd_order = false;
    for seed in 0..24 {
        let members = if seed % 6 == 5 { 1 } else { 2 + seed as usize % (ranks.len() - 1) };
        // The last members of the world; the others sit this one out.
        let group = Group::new(10 + seed as u32, "dp", ranks[ranks.len() - members..].to_vec());
        let len_max = if seed == 7 { 400_000 } else { 3_000 };
        let case = Case::new(seed, members, len_max);
        if group.member(end.rank()).is_some() {
            case.check(end, &group);
        }
        let mut serial = case.leaf(0);
        for leaf in 1..case.plan.leaves {
            serial.iter_mut().zip(case.leaf(leaf)).for_each(|(s, x)| *s += x);
        }
        odd_order |= serial != case.node(0..case.plan.leaves);
    }
    assert!(odd_order, "these leaves cannot tell one order from another");
    end.barrier(&world(end)).expect("barrier");
}

fn posted(end: &Endpoint) {
    let ranks: Vec<u32> = (0..end.world()).collect();
    for seed in 0..24 {
        let members = 2 + seed as usize % (ranks.len() - 1);
        let group = Group::new(10 + seed as u32, "dp", ranks[ranks.len() - members..].to_vec());
        let case = Case::new(seed, members, if seed == 7 { 200_000 } else { 3_000 });
        if group.member(end.rank()).is_some() {
            case.check_posted(end, &group);
            case.check_scattered(end, &group);
        }
    }
    end.barrier(&world(end)).expect("barrier");
}

/// Far more than the rings hold leaves before anybody receives; what is sent meanwhile goes between whole messages.
fn outbox(end: &Endpoint) {
    let (pipe, direct) = (world(end), Group::new(2, "direct", (0..end.world()).collect()));
    let (me, count, len) = (end.rank() as usize, 30, 5_000);
    let (next, before) = ((me + 1) % 3, (me + 2) % 3);
    for number in 0..count {
        end.post_send(&pipe, next, vec![(me * 100 + number) as f32; len]).expect("post");
    }
    let (mut word, mut got) = ([0.0], vec![0.0; len]);
    end.send(&direct, next, &[me as f32]).expect("send");
    end.recv(&direct, before, &mut word).expect("receive");
    assert_eq!(word, [before as f32]);
    for number in 0..count {
        end.recv(&pipe, before, &mut got).expect("receive");
        assert!(got.iter().all(|x| *x == (before * 100 + number) as f32), "{number}");
    }
    end.barrier(&direct).expect("barrier");
    while end.in_flight() {
        end.progress().expect("progress");
    }
    let spent = end.spent();
    assert!(spent.len() == count && spent.iter().all(|data| data.len() == len), "{} came back", spent.len());
    assert_eq!(end.counters().get("world", Operation::Send).messages_sent, count as u64);
    end.barrier(&direct).expect("barrier");
}

fn together(end: &Endpoint) {
    let group = world(end);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_nanos() as u64;
    let me = end.rank();
    for round in 0..4 {
        if me == round {
            std::thread::sleep(Duration::from_millis(15));
        }
        let before = now();
        end.barrier(&group).expect("barrier");
        let after = now();
        let times = end.all_gather_bytes(&group, &[before.to_le_bytes(), after.to_le_bytes()].concat());
        let times = times.expect("gather");
        let at = |i: usize| times.iter().map(move |t| u64::from_le_bytes(t[8 * i..8 * i + 8].try_into().expect("8")));
        assert!(at(1).min() >= at(0).max(), "someone left before everyone had come");
    }
    let barrier = end.counters().get("world", Operation::Barrier);
    assert_eq!((barrier.calls, barrier.bytes_sent()), (4, 0));
    assert!(barrier.waited_ns > 20_000_000, "three others slept 15 ms each: {barrier:?}");
    for root in 0..group.len() {
        let text = vec![root as u8 + 1; 100_000 * root];
        let mut buf = if me as usize == root { text.clone() } else { vec![9; 3] };
        end.broadcast(&group, root, &mut buf).expect("broadcast");
        assert_eq!(buf, text);
    }
    let mine = vec![me as u8; 1000 * me as usize];
    let all = end.all_gather_bytes(&group, &mine).expect("gather");
    for (member, bytes) in all.iter().enumerate() {
        assert_eq!(*bytes, vec![member as u8; 1000 * member]);
    }
    end.barrier(&group).expect("barrier");
}

fn parcels(end: &Endpoint) {
    let group = world(end);
    let (me, members) = (end.rank() as usize, group.len());
    // Nothing, little, and more than a block; what a round does not overwrite must not be left.
    let parcel = |round: usize, from: usize, to: usize| -> Vec<f32> {
        let len = [0, 1, 700, 200_000][(round + 2 * from + to) % 4];
        (0..len).map(|i| (from * 100 + to * 10 + i % 7) as f32).collect()
    };
    let mut recv = vec![vec![9.0; 5]; members];
    let mut sent = 0;
    for round in 0..6 {
        let send: Vec<Vec<f32>> = (0..members).map(|to| parcel(round, me, to)).collect();
        let slices: Vec<&[f32]> = send.iter().map(Vec::as_slice).collect();
        end.all_to_all(&group, &slices, &mut recv).expect("all to all");
        for (from, got) in recv.iter().enumerate() {
            assert!(*got == parcel(round, from, me), "round {round}, from {from}");
        }
        let others = |to: &usize| *to != me;
        sent += (0..members).filter(others).map(|to| 8 + 4 * send[to].len() as u64).sum::<u64>();
    }
    let count = end.counters().get("world", Operation::AllToAll);
    assert_eq!((count.calls, count.bytes_sent()), (6, sent));
    let error = end.all_to_all(&group, &[], &mut recv).expect_err("nothing for three members");
    assert!(matches!(error, FabricError::Argument { .. }), "{error}");
    end.barrier(&group).expect("barrier");
}

fn killed(end: &Endpoint) {
    let group = world(end);
    end.barrier(&group).expect("barrier");
    if end.rank() == 1 {
        end.send(&group, 0, &[5.0]).expect("a last word");
        std::thread::sleep(Duration::from_millis(60));
        let me = rustix::process::getpid();
        rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("kill myself");
        unreachable!("dead");
    }
    if end.rank() == 0 {
        let mut word = [0.0];
        end.recv(&group, 1, &mut word).expect("what was sent before death arrives");
        assert_eq!(word, [5.0]);
    }
    let start = Instant::now();
    let error = end.recv_bytes(&group, 1).expect_err("rank 1 dies");
    assert!(matches!(error, FabricError::PeerGone { rank: 1, .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "noticed after {:?}", start.elapsed());
    assert_eq!(end.barrier(&group).expect_err("it stays failed"), error);
    // Let the other survivor see the same death and not this rank's farewell.
    std::thread::sleep(Duration::from_millis(100));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any holders, any parts, any hosts, rings and messages far too small: same bits.
    #[test]
    fn sums_do_not_depend_on_the_split(seed in any::<u64>(), members in 1usize..8, limit in 128u64..4096) {
        let options = FabricOptions { message_bytes_max: limit, ..small_rings() };
        let case = Case::new(seed, members, 2_000);
        let group = Group::new(3, "dp", (0..members as u32).collect());
        let ends = threads(members as u32, &options).expect("memory");
        std::thread::scope(|scope| {
            for end in ends {
                let (case, group) = (&case, &group);
                scope.spawn(move || case.check(&end, group));
            }
        });
    }
}
