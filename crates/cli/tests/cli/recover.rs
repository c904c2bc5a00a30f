//! A rank dies in a step; the others go on from what they hold, under this layout or another, and nothing differs in the end.

use control::fault::{Fault, FaultKind, Moment};
use control::wire::{Cause, Held, Origin, ToRank};

use crate::agent::{Process, World, form, peers};
use crate::common::Lab;

const STEPS: &str = "train.steps=40";

fn undisturbed(sets: &[&str]) -> String {
    let alone = ["train.steps=40", "grid.accumulate=reduced"];
    let reduced = sets.contains(&"grid.accumulate=reduced");
    Lab::new().train("out", &[], &alone[..1 + usize::from(reduced)]).expect(0).digest()
}

/// A fault that keeps a world at work from `step` on: all takes thirty times as long there, until it ends.
fn hold(rank: usize, step: u64) -> Fault {
    Fault { rank: rank as u32, step, kind: FaultKind::Slow { factor_percent: 3_000, steps: u64::MAX } }
}

/// Starts a world of `count` new processes, which is at work after its third step until it is ended: `victim` is slow.
fn begin(lab: &Lab, count: usize, victim: usize, sets: &[&str]) -> (Vec<Process>, World) {
    let mut all: Vec<_> = (0..count).map(|_| Process::start(lab)).collect();
    let (sets, slow) = ([&[STEPS], sets].concat(), hold(victim, 3));
    let world = form(&mut all.iter_mut().collect::<Vec<_>>(), 1, &sets, &Origin::Fresh, &[slow]);
    (all, world)
}

/// Kills rank `victim` of a world under `before`; then its survivors that `places` names (by rank of the old world) have those
/// places in a world under `after`, and new processes the others.
fn killed(before: &[&str], count: usize, victim: usize, after: &[&str], world: usize, places: &[(usize, u32)]) {
    let lab = Lab::new();
    let (mut old, first) = begin(&lab, count, victim, before);
    let speaker = &mut old[0];
    speaker.wait_for_step(5);
    old[victim].kill();
    let mut held = vec![None; count];
    for (rank, process) in old.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        let (what, cause) = process.interrupted();
        assert!(matches!(cause, Cause::PeerGone { .. }), "rank {rank}: {cause:?}");
        assert!(what.step.unwrap() >= 4, "{what:?}");
        held[rank] = places.iter().find(|(from, _)| *from == rank).map(|(_, to)| (what, *to));
    }
    let origin = peers(&first, &held);
    let mut new: Vec<Option<Process>> = (0..world).map(|_| None).collect();
    for (rank, process) in old.into_iter().enumerate() {
        if let Some((_, to)) = places.iter().find(|(from, _)| *from == rank) {
            new[*to as usize] = Some(process);
        }
    }
    let mut new: Vec<_> = new.into_iter().map(|p| p.unwrap_or_else(|| Process::start(&lab))).collect();
    let sets = [&[STEPS], after].concat();
    let _world = form(&mut new.iter_mut().collect::<Vec<_>>(), 2, &sets, &origin, &[]);
    let digests: Vec<_> = new.iter_mut().map(Process::done).collect();
    assert_eq!(digests[0].as_deref(), Some(&undisturbed(before)[..]));
    assert!(new.iter_mut().all(|process| process.exit_code() == Some(0)));
}

#[test]
fn a_new_process_takes_a_dead_ones_place() {
    killed(&["layout.dp=2"], 2, 1, &["layout.dp=2"], 2, &[(0, 0)]);
    // The one that speaks dies, and the survivor changes places.
    killed(&["layout.dp=2", "layout.transport=tcp"], 2, 1, &["layout.dp=2", "layout.transport=tcp"], 2, &[(0, 1)]);
}

#[test]
fn survivors_go_on_alone_under_another_layout() {
    killed(&["layout.dp=2"], 2, 1, &[], 1, &[(0, 0)]);
    killed(&["layout.dp=2", "layout.tp=2"], 4, 1, &["layout.pp=2"], 2, &[(0, 0), (3, 1)]);
    killed(&["layout.dp=2", "layout.pp=2"], 4, 2, &["layout.tp=2"], 2, &[(3, 0), (0, 1)]);
    killed(&["layout.dp=2", "layout.pp=2"], 4, 3, &["layout.dp=3"], 3, &[(0, 0), (1, 1), (2, 2)]);
}

#[test]
fn shards_with_replicas_survive_one() {
    let before = ["layout.dp=4", "layout.zero=3", "layout.shard=2", "grid.accumulate=reduced"];
    let after = ["layout.dp=3", "layout.zero=1", "grid.accumulate=reduced"];
    killed(&before, 4, 2, &after, 3, &[(0, 2), (1, 1), (3, 0)]);
}

#[test]
fn state_without_a_replica_comes_from_its_mirror() {
    for sets in [&["layout.dp=2", "layout.zero=1"][..], &["layout.tp=2"], &["layout.pp=2", "layout.transport=tcp"]] {
        killed(sets, 2, 1, sets, 2, &[(0, 0)]);
        killed(sets, 2, 1, &[], 1, &[(0, 0)]);
    }
    let fully = ["layout.dp=4", "layout.zero=3", "grid.accumulate=reduced"];
    killed(&fully, 4, 2, &fully, 4, &[(0, 3), (1, 1), (3, 2)]);
    let cube = ["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"];
    killed(
        &cube,
        8,
        5,
        &["layout.dp=3", "layout.tp=2", "layout.zero=1"],
        6,
        &[(0, 0), (1, 1), (2, 5), (3, 2), (6, 3), (7, 4)],
    );
}

#[test]
fn a_world_shrinks_and_grows_again() {
    let lab = Lab::new();
    let (mut all, first) = begin(&lab, 2, 1, &["layout.dp=2"]);
    all[0].wait_for_step(3);
    all[1].kill();
    let (held, _) = all[0].interrupted();
    let before = peers(&first, &[Some((held, 0)), None]);
    let alone = form(&mut [&mut all[0]], 2, &[STEPS], &before, &[hold(0, 12)]);
    all[0].wait_for_step(12);
    all[1] = Process::start(&lab);
    all[0].tell(&ToRank::Abort { generation: alone.generation, reason: "a rank comes back".into() });
    // One rank exchanges nothing with others, but its operations still ask whether they are aborted.
    let (held, cause) = all[0].interrupted();
    assert_eq!(cause, Cause::Aborted);
    let origin = peers(&alone, &[Some((held, 1))]);
    let [a, b] = &mut all[..] else { panic!("two") };
    let _world = form(&mut [b, a], 3, &[STEPS, "layout.dp=2"], &origin, &[]);
    assert_eq!(all[1].done().as_deref(), Some(&undisturbed(&[])[..]));
    all[0].done();
}

#[test]
fn what_nobody_holds_is_told_and_nothing_given_up() {
    let lab = Lab::new();
    let sets = [STEPS, "layout.tp=2", "layout.mirror=false"];
    let (mut all, first) = begin(&lab, 2, 1, &sets[1..]);
    all[0].wait_for_step(3);
    all[1].kill();
    let (held, _) = all[0].interrupted();
    all[1] = Process::start(&lab);
    let origin = peers(&first, &[Some((held.clone(), 0)), None]);
    let _world = form(&mut all.iter_mut().collect::<Vec<_>>(), 2, &sets, &origin, &[]);
    for (process, has) in all.iter_mut().zip([Some(held), None]) {
        let (now, cause) = process.interrupted();
        assert!(matches!(&cause, Cause::Lost { reason } if reason.contains("nobody holds")), "{cause:?}");
        assert_eq!(now, has.unwrap_or_default());
    }
}

/// Runs `count` ranks of which `fault` strikes one; what the others, and the struck one if it lives, hold and say why. Then
/// all go on as they were, a new process in the place of a dead one, to the undisturbed end.
fn struck(sets: &[&str], count: usize, rank: u32, kind: FaultKind) -> Vec<Option<(Held, Cause)>> {
    let lab = Lab::new();
    let fault = Fault { rank, step: 6, kind };
    let mut all: Vec<_> = (0..count).map(|_| Process::start(&lab)).collect();
    let with = [&[STEPS], sets].concat();
    let first = form(&mut all.iter_mut().collect::<Vec<_>>(), 1, &with, &Origin::Fresh, &[fault]);
    all[rank as usize].fired();
    let dies = matches!(kind, FaultKind::Kill | FaultKind::KillAt(_) | FaultKind::Stop);
    let mut ends = Vec::new();
    for (at, process) in all.iter_mut().enumerate() {
        ends.push((!dies || at != rank as usize).then(|| process.interrupted()));
    }
    if dies {
        all[rank as usize] = Process::start(&lab);
    }
    let held: Vec<_> = (0..).zip(&ends).map(|(rank, end)| end.as_ref().map(|(held, _)| (held.clone(), rank))).collect();
    let _world = form(&mut all.iter_mut().collect::<Vec<_>>(), 2, &with, &peers(&first, &held), &[]);
    let digests: Vec<_> = all.iter_mut().map(Process::done).collect();
    assert_eq!(digests[0].as_deref(), Some(&undisturbed(sets)[..]), "{kind:?} {sets:?}");
    ends
}

#[test]
fn a_step_is_applied_by_all_or_by_none() {
    let three = ["layout.dp=3"];
    let steps =
        |ends: &[Option<(Held, Cause)>]| ends.iter().flatten().map(|(h, _)| h.step.unwrap()).collect::<Vec<_>>();
    // Nobody has the ballot of the dead: the step is not committed.
    let ends = struck(&three, 3, 1, FaultKind::KillAt(Moment::Vote));
    assert_eq!(steps(&ends), [5, 5]);
    assert!(ends.iter().flatten().all(|(held, _)| held.prepared), "{ends:?}");
    // One of two has it: it has applied the step, and the other rolls forward.
    let ends = struck(&three, 3, 1, FaultKind::KillAt(Moment::HalfBallot));
    let mut at = steps(&ends);
    at.sort_unstable();
    assert_eq!(at, [5, 6]);
    let behind = ends.iter().flatten().find(|(held, _)| held.step == Some(5)).unwrap();
    assert!(behind.0.prepared, "{behind:?}");
    // All have it.
    assert_eq!(steps(&struck(&three, 3, 2, FaultKind::KillAt(Moment::Apply))), [6, 6]);
    let sharded = ["layout.dp=4", "layout.zero=1", "layout.shard=2"];
    assert_eq!(steps(&struck(&sharded, 4, 3, FaultKind::KillAt(Moment::Gather))), [6, 6, 6]);
    // Mirrors roll forward, too: the dead rank's shard among them.
    let mirrored = ["layout.dp=3", "layout.zero=1"];
    struck(&mirrored, 3, 1, FaultKind::KillAt(Moment::HalfBallot));
    struck(&mirrored, 3, 0, FaultKind::KillAt(Moment::Gather));
    struck(&["layout.pp=2"], 2, 1, FaultKind::KillAt(Moment::Apply));
}

#[test]
fn a_vote_for_another_pass_is_no_step() {
    // The dead rank saw the vote of the first of two passes; nothing was applied, and nobody may count the step as done.
    let twice = ["layout.dp=2", "layout.zero=1", "guard.recompute_every=1"];
    for moment in [Moment::Apply, Moment::Gather] {
        let ends = struck(&twice, 2, 1, FaultKind::KillAt(moment));
        let (held, _) = ends[0].as_ref().unwrap();
        assert_eq!((held.step, held.prepared), (Some(5), false), "{moment:?}: {held:?}");
        let decided = held.decided.as_ref().map_or(5, |decided| decided.step);
        assert_eq!(decided, 5, "{moment:?}: {held:?}");
    }
}

#[test]
fn a_rank_that_dies_or_stands_still_anywhere_is_replaced() {
    struck(&["layout.dp=2"], 2, 1, FaultKind::Kill);
    let ends = struck(&["layout.dp=2", "layout.exchange_timeout_ms=3000"], 2, 0, FaultKind::Stop);
    assert!(matches!(ends[1], Some((_, Cause::Deadline { rank: 0, .. }))), "{ends:?}");
}

#[test]
fn a_changed_bit_is_found_before_it_counts() {
    for (kind, what) in [(FaultKind::FlipMoment, "moment"), (FaultKind::FlipWeight, "param")] {
        let ends = struck(&["layout.dp=2"], 2, 1, kind);
        for (held, cause) in ends.iter().flatten() {
            assert_eq!(*cause, Cause::Corrupt { ranks: vec![1] });
            assert_eq!(held.step, Some(5));
        }
        let corrupt = |rank: usize| {
            let corrupt = &ends[rank].as_ref().unwrap().0.corrupt;
            corrupt.iter().map(|piece| piece.what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(corrupt(0), [""; 0]);
        assert!(!corrupt(1).is_empty() && corrupt(1).iter().all(|of| of.contains(what)), "{ends:?}");
    }
    let ends = struck(&["layout.dp=2"], 2, 1, FaultKind::FlipMessage);
    assert!(
        matches!(&ends[0], Some((_, Cause::BadMessage { rank: 1, reason })) if reason.contains("checksum")),
        "{ends:?}"
    );
}

/// A fault that the ranks live through in place; what was said about replays.
fn lived_through(rank: u32, kind: FaultKind) -> Vec<String> {
    let lab = Lab::new();
    let mut all: Vec<_> = (0..2).map(|_| Process::start(&lab)).collect();
    let sets = [STEPS, "layout.dp=2", "checkpoint.every=10"];
    let fault = Fault { rank, step: 6, kind };
    let _world = form(&mut all.iter_mut().collect::<Vec<_>>(), 1, &sets, &Origin::Fresh, &[fault]);
    let digests: Vec<_> = all.iter_mut().map(Process::done).collect();
    assert_eq!(digests[0].as_deref(), Some(&undisturbed(&[])[..]), "{kind:?}");
    assert!(all[rank as usize].said.iter().any(|said| format!("{said:?}").contains("FaultFired")), "{kind:?}");
    all[0].replayed()
}

#[test]
fn what_passes_is_lived_through() {
    let replayed = lived_through(1, FaultKind::Nan);
    assert!(replayed.len() == 1 && replayed[0].contains("otherwise"), "{replayed:?}");
    assert_eq!(lived_through(0, FaultKind::Slow { factor_percent: 400, steps: 3 }), [""; 0]);
    assert_eq!(lived_through(1, FaultKind::DiskFull), [""; 0]);
}

/// What a killed rank costs, and what hashes of state cost, at a shape where steps take a while; run by name, alone.
#[test]
#[ignore = "a measurement"]
fn what_a_killed_rank_costs() {
    let shape = [
        "model.hidden=256",
        "model.layers=4",
        "model.heads=8",
        "model.kv_heads=4",
        "model.ffn=704",
        "model.vocab=4096",
        "model.tied=false",
        "train.seq=256",
        "train.batch=8",
        "train.steps=16",
        "grid.tp=1",
    ];
    for layout in [&["layout.dp=2"][..], &["layout.dp=2", "layout.zero=1"]] {
        let sets = [&shape[..], layout].concat();
        let lab = Lab::new();
        let mut all: Vec<_> = (0..2).map(|_| Process::start(&lab)).collect();
        let first = form(&mut all.iter_mut().collect::<Vec<_>>(), 1, &sets, &Origin::Fresh, &[]);
        all[0].wait_for_step(6);
        let killed = std::time::Instant::now();
        let ms = || killed.elapsed().as_secs_f64() * 1e3;
        all[1].kill();
        let (held, _) = all[0].interrupted();
        let known = ms();
        all[1] = Process::start(&lab);
        let step = held.step.unwrap();
        let origin = peers(&first, &[Some((held, 0)), None]);
        let _world = form(&mut all.iter_mut().collect::<Vec<_>>(), 2, &sets, &origin, &[]);
        let (bytes, _) = all[1].loaded();
        let loaded = ms();
        all[0].wait_for_step(step + 1);
        let committed = ms();
        all[1].done();
        all[0].done();
        println!(
            "{layout:?}: known after {known:.0} ms, state ({:.1} MB) there after {loaded:.0} ms, step {} committed after {committed:.0} ms; {}",
            bytes as f64 / 1e6,
            step + 1,
            all[0].times()
        );
    }
}
