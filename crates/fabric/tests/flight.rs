//! The flight recorder and the partition drill.

mod common;

use common::{both, local};
use fabric::{FabricError, FabricOptions, FlightState, Group, Operation, ReducePlan};
use std::time::{Duration, Instant};

fn group() -> Group {
    Group::new(3, "dp", vec![0, 1])
}

fn options(deadline_ms: u64) -> FabricOptions {
    FabricOptions { deadline_ms, generation: 4, ..FabricOptions::default() }
}

#[test]
fn a_stuck_exchange_is_seen_from_another_thread() {
    both(|transport| {
        let mut ends = local(transport, &[options(2_000), options(2_000)]);
        let (b, a) = (ends.pop().expect("two"), ends.pop().expect("two"));
        a.send(&group(), 1, &[1.0; 4]).expect("send");
        b.recv(&group(), 0, &mut [0.0; 4]).expect("receive");
        let (flight, idle) = (a.flight(), b.flight());
        std::thread::scope(|scope| {
            let stuck = scope.spawn(|| a.barrier(&group()));
            let began = Instant::now();
            let record = loop {
                let record = flight.record();
                if record.waits_for.is_some() || began.elapsed() > Duration::from_secs(1) {
                    break record;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            assert_eq!((record.rank, record.world, record.generation, record.waits_for), (0, 2, 4, Some(1)));
            let seen: Vec<_> =
                record.entries.iter().map(|e| (e.operation, e.peer, e.sequence, e.bytes, e.state)).collect();
            let wanted = [
                (Operation::Send, Some(1), 0, 16, FlightState::Completed),
                (Operation::Barrier, None, 0, 0, FlightState::Started),
            ];
            assert_eq!(seen, wanted);
            assert!(record.entries[0].ended_ns >= Some(record.entries[0].started_ns));
            let of = &record.groups[0];
            assert_eq!((of.name.as_str(), of.begun, of.sends.as_slice()), ("dp", 1, &[0, 1][..]));
            assert_eq!(idle.record().groups[0].receives, [1, 0]);
            let text = serde_json::to_string(&record).expect("plain data");
            assert_eq!(serde_json::from_str::<fabric::FlightRecord>(&text).expect("plain data"), record);
            b.barrier(&group()).expect("the other joins");
            stuck.join().expect("no panic").expect("and it goes on");
        });
        assert_eq!(flight.record().waits_for, None);
        assert!(flight.record().entries.iter().all(|e| e.state == FlightState::Completed));
    });
}

#[test]
fn the_ring_keeps_the_last_and_counts_all() {
    let mut ends = local("shm", &[options(2_000), options(2_000)]);
    let (b, a) = (ends.pop().expect("two"), ends.pop().expect("two"));
    for _ in 0..1_000 {
        a.send(&group(), 1, &[1.0]).expect("send");
        b.recv(&group(), 0, &mut [0.0]).expect("receive");
    }
    let record = a.flight().record();
    assert_eq!((record.entries.len(), record.entries[0].id, record.entries[511].id), (512, 488, 999));
    assert_eq!(record.groups[0].sends, [0, 1_000]);
}

#[test]
fn a_partition_is_silent_and_ends_at_the_deadline() {
    both(|transport| {
        let ends = local(transport, &vec![options(200); 3]);
        let all = Group::new(1, "all", vec![0, 1, 2]);
        let plan = ReducePlan::even(3, 3, 4);
        ends[0].partition(2);
        ends[2].partition(0);
        // Who is not between them still talks to both.
        let near = Group::new(2, "near", vec![0, 1]);
        ends[0].send(&near, 1, &[1.0]).expect("send");
        ends[1].recv(&near, 0, &mut [0.0]).expect("receive");
        std::thread::scope(|scope| {
            let joins: Vec<_> = (ends.iter())
                .map(|end| {
                    let (all, plan) = (&all, &plan);
                    scope.spawn(move || {
                        let tree = plan.subtrees(end.rank() as usize).remove(0);
                        end.all_reduce(all, plan, &[(tree, &[1.0; 4])], &mut [0.0; 4])
                    })
                })
                .collect();
            let ended: Vec<_> = joins.into_iter().map(|join| join.join().expect("no panic")).collect();
            for (end, other) in [(0, 2), (2, 0)] {
                let error = ended[end].as_ref().expect_err("nothing gets through");
                assert!(matches!(error, FabricError::Deadline { rank, .. } if *rank == other), "{error}");
                assert_eq!(ends[end].flight().record().waits_for, Some(other));
                let failed = ends[end].flight().record();
                assert_eq!(failed.entries.last().expect("one").state, FlightState::Failed);
            }
        });
    });
}
