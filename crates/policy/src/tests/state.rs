//! State that is not what it was, and who still has it.

use super::*;

#[test]
fn corrupt_state_comes_from_elsewhere_or_from_disk() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let bad = Held { corrupt: vec![piece()], ..at(6) };
    desk.says(1, bad.clone(), Cause::Corrupt { ranks: vec![1] });
    let world = formed(&desk.says(0, at(6), Cause::Corrupt { ranks: vec![1] }));
    assert_eq!(world.processes, [Process(0), Process(1)]);
    assert_eq!(peers(&world), (6, vec![Some(0), Some(1)]), "it is a source of the rest");
    desk.load(6);
    // Two, whose pieces are others.
    let other = Held { corrupt: vec![Piece { tensor: 1, ..piece() }], ..at(6) };
    desk.says(1, bad.clone(), Cause::Corrupt { ranks: vec![0, 1] });
    let world = formed(&desk.says(0, other, Cause::Corrupt { ranks: vec![0, 1] }));
    assert_eq!(peers(&world), (6, vec![Some(0), Some(1)]));
    desk.load(6);
    // One that was found corrupt and does not know where.
    desk.says(1, at(6), Cause::Corrupt { ranks: vec![1] });
    let world = formed(&desk.says(0, at(6), Cause::Corrupt { ranks: vec![1] }));
    assert_eq!(peers(&world), (6, vec![Some(0), None]));
    desk.load(6);
    desk.on(Input::Step { step: 7 });
    desk.on(Input::Checkpoint { step: 6, path: "c/step-6".into() });
    let bad = Held { step: Some(7), ..bad };
    desk.says(1, bad.clone(), Cause::Corrupt { ranks: vec![0, 1] });
    let world = formed(&desk.says(0, bad, Cause::Corrupt { ranks: vec![0, 1] }));
    assert_eq!(world.origin, Origin::Disk("c/step-6".into()));
    let reason = &desk.seen.last().unwrap().reason;
    assert!(reason.contains("nobody holds moment1 of norm"), "{reason}");
}

#[test]
fn state_that_changes_again_and_again_restarts_its_process_and_then_ends() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let mut killed = Vec::new();
    for _ in 0..4 {
        let second = desk.policy.world().unwrap().processes[1];
        let bad = Held { corrupt: vec![piece()], ..at(6) };
        desk.says(0, at(6), Cause::Corrupt { ranks: vec![1] });
        let out = desk.says(second.0, bad, Cause::Corrupt { ranks: vec![1] });
        killed.extend(out.iter().filter(|a| matches!(a, Action::Kill { .. })).cloned());
        if let Some(new) = spawns(&out).first() {
            desk.on(Input::Ready { process: *new });
        }
        if !desk.policy.ended() {
            desk.load(6);
        }
    }
    assert_eq!(killed, [Action::Kill { process: Process(1) }]);
    assert!(desk.policy.ended());
}

/// Two faults in a row: the second while the world that answers the first one loads.
#[test]
fn what_a_loading_world_started_from_is_not_given_up() {
    let mut desk = Desk::running(&["layout.dp=4"], 6);
    desk.exits(1);
    [0, 2, 3].iter().for_each(|p| drop(desk.says(*p, at(6), Cause::Aborted)));
    let second = formed(&desk.on(Input::Ready { process: Process(4) }));
    assert_eq!(second.processes, [0, 4, 2, 3].map(Process));
    // 0 has loaded and not heard it of all; 3 has nothing new yet; 2 dies; what came to 4 is all it has.
    desk.exits(2);
    let before = |rank| Some(Box::new(Held { generation: 1, rank, settled: true, ..at(6) }));
    let loaded = |rank, before| Held { generation: 2, rank, before, ..at(6) };
    let say = |desk: &mut Desk, process, held| {
        let process = Process(process);
        desk.on(Input::Interrupted { process, generation: 2, held, cause: Cause::Aborted })
    };
    say(&mut desk, 0, loaded(0, before(0)));
    say(&mut desk, 4, loaded(1, None));
    say(&mut desk, 3, *before(3).unwrap());
    let third = formed(&desk.on(Input::Ready { process: Process(5) }));
    let Origin::Peers { generation, holders, step, .. } = &third.origin else { panic!("{:?}", third.origin) };
    assert_eq!((*generation, *step, &holders[..]), (1, 6, &[Some(0), None, None, Some(3)][..]));
    // All have theirs by the word of one: the first world counts no more.
    say_all_loaded(&mut desk, &third);
}

/// One of world `third` has heard that all have their state, then a rank dies.
fn say_all_loaded(desk: &mut Desk, third: &World) {
    let gone = third.processes[1];
    desk.on(Input::Exited { process: gone, how: "signal 9".into(), by_itself: false });
    for (rank, process) in third.processes.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let before = (rank != 0).then(|| Box::new(Held { generation: 1, settled: true, ..at(6) }));
        let held = Held { generation: 3, rank: rank as u32, settled: rank == 0, before, ..at(6) };
        desk.on(Input::Interrupted { process: *process, generation: 3, held, cause: Cause::Aborted });
    }
    let fourth = formed(&desk.on(Input::Ready { process: Process(6) }));
    let Origin::Peers { generation, holders, .. } = &fourth.origin else { panic!("{:?}", fourth.origin) };
    assert_eq!((*generation, &holders[..]), (3, &[Some(0), None, Some(2), Some(3)][..]));
}

#[test]
fn what_was_held_before_a_checkpoint_was_read_is_not_believed() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.on(Input::Checkpoint { step: 6, path: "c/step-6".into() });
    let disagree = || Cause::Disagree { reason: "0 and 1".into() };
    desk.says(0, at(6), disagree());
    let second = formed(&desk.says(1, at(6), disagree()));
    assert_eq!(second.origin, Origin::Disk("c/step-6".into()));
    desk.load(6);
    // One never got so far as to give up what it had.
    let old = Held { generation: 1, rank: 0, settled: true, ..at(6) };
    let say = |desk: &mut Desk, process, held| {
        let process = Process(process);
        desk.on(Input::Interrupted { process, generation: 2, held, cause: Cause::Aborted })
    };
    say(&mut desk, 0, old);
    let third = formed(&say(&mut desk, 1, Held { generation: 2, rank: 1, ..at(6) }));
    let Origin::Peers { generation, holders, .. } = &third.origin else { panic!("{:?}", third.origin) };
    assert_eq!((*generation, &holders[..]), (2, &[None, Some(1)][..]));
}

#[test]
fn a_broken_device_is_replaced_and_its_host_counted() {
    let mut desk = Desk::running(&["layout.dp=4", "guard.recompute_every=1"], 6);
    let broken = |ranks: &[u32]| Cause::Broken { step: 7, ranks: ranks.to_vec() };
    let out = desk.says(0, at(6), broken(&[2]));
    assert!(out.contains(&Action::Kill { process: Process(2) }) && out.contains(&Action::Abort { generation: 1 }));
    let told = out.iter().find_map(|a| if let Action::Tell(trouble) = a { Some(trouble) } else { None }).unwrap();
    assert_eq!((told.kind.as_str(), told.rank, told.step), ("broken device", Some(2), 6));
    assert!(!told.detail.contains("checked"), "{told:?}");
    for p in [1, 3] {
        assert_eq!(desk.says(p, at(6), broken(&[2])), []);
    }
    let world = formed(&desk.on(Input::Ready { process: Process(4) }));
    assert_eq!(peers(&world), (6, vec![Some(0), Some(1), None, Some(3)]));
    // Among several hosts that of a broken device is left alone after some more.
    let mut desk = Desk::new(&["layout.dp=2", "guard.evict_after=1"]);
    let mut all = spawns(&desk.on(Input::HostJoined { host: "a".into(), slots: 1 }));
    all.extend(spawns(&desk.on(Input::HostJoined { host: "b".into(), slots: 2 })));
    all.iter().for_each(|p| drop(desk.on(Input::Ready { process: *p })));
    desk.load(0);
    let on_a = all.iter().copied().find(|p| desk.policy.world().unwrap().processes[0] == *p).unwrap();
    let out = desk.says(on_a.0, at(0), Cause::Broken { step: 1, ranks: vec![0] });
    assert!(out.iter().any(|a| matches!(a, Action::Evict { .. })), "{out:?}");
}

/// Rank `broken` of four is found broken in step 8, gradients being checked every fourth step; the others have `others` to say.
fn found_broken(desk: &mut Desk, others: impl Fn() -> Cause) -> (Vec<Action>, World) {
    let members = desk.policy.world().unwrap().processes.clone();
    let cause = || Cause::Broken { step: 8, ranks: vec![2] };
    let mut out = desk.says(members[0].0, at(7), others());
    out.extend(desk.says(members[1].0, at(7), cause()));
    out.extend(desk.says(members[3].0, at(7), cause()));
    if desk.policy.ended() {
        return (out, desk.policy.world().unwrap().clone());
    }
    let new = *spawns(&out).first().expect("another process");
    out.extend(desk.on(Input::Ready { process: new }));
    let world = formed(&out);
    (out, world)
}

#[test]
fn what_a_device_may_have_spoilt_since_the_last_check_is_computed_again() {
    let sets = ["layout.dp=4", "guard.recompute_every=4"];
    let broken = || Cause::Broken { step: 8, ranks: vec![2] };
    // Whoever speaks first: also where a world was left for another reason before all had said it.
    for others in [broken, || Cause::PeerGone { rank: 2, reason: "gone".into() }] {
        let mut desk = Desk::running(&sets, 7);
        for step in [2, 4, 6] {
            desk.on(Input::Checkpoint { step, path: format!("c/{step}").into() });
        }
        let (out, world) = found_broken(&mut desk, others);
        assert_eq!(out.iter().filter(|a| matches!(a, Action::Kill { .. })).count(), 1, "{out:?}");
        let told = out.iter().find_map(|a| if let Action::Tell(told) = a { Some(told) } else { None }).unwrap();
        let text = "steps 5 to 7 were not checked (guard.recompute_every = 4) and are computed again, from the checkpoint of step 4";
        assert!(told.detail.contains(text), "{told:?}");
        let at = |wanted: &dyn Fn(&Action) -> bool| out.iter().position(wanted).unwrap();
        assert!(at(&|a| *a == Action::Distrust { after: 4 }) < at(&|a| matches!(a, Action::Form(_))), "{out:?}");
        assert_eq!((world.origin, desk.policy.reached()), (Origin::Disk("c/4".into()), 4));
        assert!(desk.seen.last().unwrap().reason.contains("steps 5 to 7 may be spoilt"), "{:?}", desk.seen.last());
        // Later it goes back to what was written since, and no further than needed.
        desk.load(4);
        (5..=7).for_each(|step| drop(desk.on(Input::Step { step })));
        desk.on(Input::Checkpoint { step: 6, path: "c/6".into() });
        let lost = || Cause::Lost { reason: "0 and 1".into() };
        let members = desk.policy.world().unwrap().processes.clone();
        let last = members.iter().map(|p| desk.says(p.0, super::at(7), lost())).last().unwrap();
        assert_eq!(formed(&last).origin, Origin::Disk("c/6".into()));
    }
}

/// A check was clean, then another trouble sets the run back to before it: the check says nothing of the steps that follow.
#[test]
fn what_was_checked_before_the_run_went_back_is_not_checked_after_it() {
    let sets = ["layout.dp=4", "guard.recompute_every=6"];
    let kill_all = |desk: &mut Desk| {
        let members = desk.policy.world().unwrap().processes.clone();
        let mut out: Vec<_> = members.iter().flat_map(|p| desk.exits(p.0)).collect();
        let new = spawns(&out);
        out.extend(new.iter().flat_map(|p| desk.on(Input::Ready { process: *p })));
        out
    };
    for to in [0, 4, 8] {
        let mut desk = Desk::running(&sets, 8);
        if to > 0 {
            desk.on(Input::Checkpoint { step: to, path: format!("c/{to}").into() });
        }
        let world = formed(&kill_all(&mut desk));
        assert_eq!((matches!(world.origin, Origin::Peers { .. }), desk.policy.reached()), (false, to));
        desk.load(to);
        let found = if to < 6 { 6 } else { 12 };
        (to + 1..found).for_each(|step| drop(desk.on(Input::Step { step })));
        let out = desk.says(world.processes[0].0, at(found - 1), Cause::Broken { step: found, ranks: vec![2] });
        assert!(out.contains(&Action::Distrust { after: to.min(6) }), "back to {to}: {out:?}");
        for p in [1, 3] {
            let cause = Cause::Broken { step: found, ranks: vec![2] };
            desk.says(world.processes[p].0, at(found - 1), cause);
        }
        let new = *spawns(&out).first().expect("another process");
        let world = formed(&desk.on(Input::Ready { process: new }));
        let origin = if to == 4 { Origin::Disk("c/4".into()) } else { Origin::Fresh };
        assert_eq!(world.origin, origin, "back to {to}");
    }
}

/// Copies that are not alike where steps were never checked: the run goes back before these, and not to what was saved since.
#[test]
fn copies_that_differ_are_the_fault_of_what_was_never_checked() {
    let mut desk = Desk::running(&["layout.dp=4", "guard.recompute_every=4"], 7);
    [2, 4, 6]
        .iter()
        .for_each(|step| drop(desk.on(Input::Checkpoint { step: *step, path: format!("c/{step}").into() })));
    let new = spawns(&desk.exits(1))[0];
    [0, 2, 3].iter().for_each(|p| drop(desk.says(*p, at(7), Cause::Aborted)));
    let world = formed(&desk.on(Input::Ready { process: new }));
    desk.load(7);
    for step in 8..=12 {
        desk.on(Input::Step { step });
        desk.on(Input::Checkpoint { step, path: format!("c/{step}").into() });
    }
    assert_eq!((desk.policy.checked(), desk.policy.unseen(), desk.policy.vouched()), (Some(12), Some(5), Some(4)));
    let cause = || Cause::Disagree { reason: "norm differs on 0 and 1".into() };
    let said: Vec<_> = world.processes.iter().flat_map(|p| desk.says(p.0, at(12), cause())).collect();
    assert!(said.contains(&Action::Distrust { after: 4 }), "{said:?}");
    let world = formed(&said);
    assert_eq!((&world.origin, desk.policy.reached(), desk.policy.unseen()), (&Origin::Disk("c/4".into()), 4, None));
    assert!(world.recheck);
}

#[test]
fn what_nobody_can_check_any_more_is_said_once() {
    let said = |sets: &[&str], step| {
        let mut desk = Desk::running(sets, step);
        let new = spawns(&desk.exits(1))[0];
        [0, 2, 3].iter().for_each(|p| drop(desk.says(*p, at(step), Cause::Aborted)));
        formed(&desk.on(Input::Ready { process: new }));
        let all: Vec<_> = desk.seen.iter().filter(|d| d.reason.contains("not checked")).collect();
        assert!(all.len() < 2, "{all:?}");
        all.first().map(|d| d.reason.clone())
    };
    let text = said(&["layout.dp=4", "guard.recompute_every=4"], 7).unwrap();
    assert!(text.contains("; steps 5 to 7 of rank 1 were not checked before it ended"), "{text}");
    assert_eq!(said(&["layout.dp=4", "guard.recompute_every=4"], 8), None);
    assert_eq!(said(&["layout.dp=4", "guard.recompute_every=1"], 7), None);
    assert_eq!(said(&["layout.dp=4"], 7), None);
}

/// Fewer go on for a while, and none of them has another one's state: that they agree with themselves is no check.
#[test]
fn a_step_that_ranks_could_only_check_themselves_is_not_checked() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.recompute_every=4", "guard.respawn_after_ms=1000"], 7);
    desk.on(Input::Checkpoint { step: 4, path: "c/4".into() });
    desk.exits(1);
    let world = formed(&desk.says(0, at(7), Cause::Aborted));
    assert_eq!(world.processes.len(), 1);
    desk.load(7);
    (8..=9).for_each(|step| drop(desk.on(Input::Step { step })));
    desk.on(Input::Checkpoint { step: 8, path: "c/8".into() });
    desk.now += 1000;
    let new = spawns(&desk.on(Input::Tick))[0];
    desk.on(Input::Ready { process: new });
    let world = formed(&desk.says(0, at(9), Cause::Aborted));
    assert_eq!(world.processes.len(), 2);
    desk.load(9);
    (10..=11).for_each(|step| drop(desk.on(Input::Step { step })));
    let broken = || Cause::Broken { step: 12, ranks: vec![0] };
    let out = desk.says(0, at(11), broken());
    assert!(out.contains(&Action::Distrust { after: 4 }), "{out:?}");
    let world = formed(&desk.says(new.0, at(11), broken()));
    assert_eq!(world.origin, Origin::Disk("c/4".into()));
}

#[test]
fn who_may_have_a_broken_device_does_not_go_on_unchecked() {
    let sets = ["layout.dp=2", "guard.recompute_every=1", "guard.respawn_after_ms=1000"];
    let mut desk = Desk::running(&sets, 6);
    let broken = || Cause::Broken { step: 7, ranks: vec![0, 1] };
    desk.says(0, at(6), broken());
    // The other one is left, and may be the one.
    assert_eq!(desk.says(1, at(6), broken()), []);
    desk.now += 1000;
    let new = spawns(&desk.on(Input::Tick))[0];
    assert_eq!(formed(&desk.on(Input::Ready { process: new })).processes.len(), 2);
    desk.load(6);
    desk.on(Input::Step { step: 7 });
    // They agreed: the next death finds nobody in doubt.
    desk.exits(new.0);
    assert_eq!(formed(&desk.says(1, at(7), Cause::Aborted)).processes.len(), 1);
}

#[test]
fn without_a_checkpoint_from_before_the_run_begins_again_and_says_so() {
    let mut desk = Desk::running(&["layout.dp=4", "guard.recompute_every=8"], 7);
    desk.on(Input::Checkpoint { step: 6, path: "c/6".into() });
    let (out, world) = found_broken(&mut desk, || Cause::Broken { step: 8, ranks: vec![2] });
    assert!(out.contains(&Action::Distrust { after: 0 }), "{out:?}");
    assert_eq!((world.origin, desk.policy.reached()), (Origin::Fresh, 0));
    assert!(desk.seen.last().unwrap().reason.contains("are computed again, from the start of the run"));
    // Also where the run ends by it: nobody goes on from what is spoilt.
    let mut desk = Desk::running(&["layout.dp=4", "guard.recompute_every=4", "guard.restarts_max=0"], 7);
    let (out, _) = found_broken(&mut desk, || Cause::Broken { step: 8, ranks: vec![2] });
    assert!(desk.policy.ended() && out.contains(&Action::Distrust { after: 4 }), "{out:?}");
}

/// Spares have found rank 1 of the world of the moment wrong in step 7; all leave, and are back.
fn disputed(desk: &mut Desk, step: u64) -> (Vec<Action>, World) {
    let members = desk.policy.world().unwrap().processes.clone();
    let processes = vec![members[1]];
    let mut out = desk.on(Input::Disputed { step, processes, detail: "two spares found the same".into() });
    let left: Vec<_> = members.iter().filter(|p| !out.contains(&Action::Kill { process: **p })).collect();
    for p in left {
        let reached = desk.policy.reached();
        out.extend(desk.says(p.0, at(reached), Cause::Aborted));
    }
    spawns(&out).iter().for_each(|new| out.extend(desk.on(Input::Ready { process: *new })));
    let world = formed(&out);
    (out, world)
}

#[test]
fn what_spares_dispute_is_computed_again_from_before_it_and_checked() {
    let mut desk = Desk::running(&["layout.dp=2"], 9);
    for step in [3, 6, 9] {
        desk.on(Input::Checkpoint { step, path: format!("c/{step}").into() });
    }
    assert_eq!(desk.policy.sound(), None);
    desk.on(Input::Checked { step: 4 });
    assert_eq!(desk.policy.sound(), Some(3), "it must stay");
    let (out, world) = disputed(&mut desk, 7);
    let told = out.iter().find_map(|a| if let Action::Tell(told) = a { Some(told) } else { None }).unwrap();
    assert_eq!((told.kind.as_str(), told.rank), ("disputed", Some(1)));
    assert!(told.detail.contains("steps 5 to 9 may be spoilt"), "{told:?}");
    assert!(out.contains(&Action::Distrust { after: 4 }) && !out.iter().any(|a| matches!(a, Action::Kill { .. })));
    assert_eq!((&world.origin, world.recheck, desk.policy.reached()), (&Origin::Disk("c/3".into()), true, 3));
    // A step that was computed again without a word of it is checked no more.
    desk.load(3);
    (4..=8).for_each(|step| drop(desk.on(Input::Step { step })));
    // The same one again: it is the device.
    desk.on(Input::Checkpoint { step: 6, path: "c/6".into() });
    let (out, world) = disputed(&mut desk, 7);
    assert!(out.contains(&Action::Kill { process: Process(1) }), "{out:?}");
    assert_eq!((&world.origin, world.recheck), (&Origin::Disk("c/3".into()), true));
    assert!(!world.processes.contains(&Process(1)));
    // What was gone back over already says nothing.
    desk.load(3);
    assert_eq!(desk.on(Input::Disputed { step: 7, processes: vec![], detail: "late".into() }), []);
}

#[test]
fn whom_spares_have_named_is_the_first_to_go() {
    let mut desk = Desk::running(&["layout.dp=2"], 9);
    desk.on(Input::Checkpoint { step: 6, path: "c/6".into() });
    let (_, world) = disputed(&mut desk, 7);
    assert!(world.recheck && world.origin == Origin::Fresh, "nobody has checked what is in step 6");
    desk.load(0);
    // In its first step, which both ranks compute; nobody could tell which of two it is.
    let out = desk.says(0, at(0), Cause::Broken { step: 1, ranks: vec![0, 1] });
    assert!(out.contains(&Action::Kill { process: Process(1) }), "{out:?}");
}

#[test]
fn a_spare_that_errs_is_sent_away_and_nobody_else_is_disturbed() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.spares=1"], 3);
    desk.on(Input::Ready { process: Process(2) });
    assert_eq!(desk.policy.waiting(), [Process(2)]);
    let out = desk.on(Input::Erred { process: Process(2), detail: "it alone".into() });
    assert_eq!(out[0], Action::Kill { process: Process(2) });
    assert_eq!((spawns(&out), out.len()), (vec![Process(3)], 2));
}

#[test]
fn where_nobody_can_tell_who_is_broken_they_have_their_turns() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let mut killed = Vec::new();
    for _ in 0..2 {
        let members = desk.policy.world().unwrap().processes.clone();
        let cause = Cause::Broken { step: 7, ranks: vec![0, 1] };
        let out = desk.says(members[0].0, at(6), cause.clone());
        let gone =
            out.iter().find_map(|a| if let Action::Kill { process } = a { Some(*process) } else { None }).unwrap();
        killed.push(members.iter().position(|p| *p == gone).unwrap());
        let mut ready = spawns(&out);
        for p in members.iter().filter(|p| **p != gone && **p != members[0]) {
            ready.extend(spawns(&desk.says(p.0, at(6), cause.clone())));
        }
        ready.iter().for_each(|p| drop(desk.on(Input::Ready { process: *p })));
        desk.load(6);
    }
    assert_eq!(killed, [0, 1]);
}

#[test]
fn who_goes_on_from_unchecked_steps_checks_the_first_one_and_has_where_to_go_back() {
    let resumed = || {
        let unchecked = Some(Unchecked { checked: 4, sound: Some((4, "c/4".into())), unseen: None });
        let start = Start {
            run: run(&["layout.dp=4", "guard.recompute_every=4"]),
            cores: 2,
            from: Some((6, "c/6".into())),
            unchecked,
        };
        let mut desk = Desk {
            policy: Policy::new(start, Box::new(Anything)),
            now: 0,
            seen: Vec::new(),
            folder: [(4, "c/4".into()), (6, "c/6".into())].into(),
        };
        let spawned = spawns(&desk.on(Input::HostJoined { host: "a".into(), slots: 4 }));
        let formed_by: Vec<_> = spawned.iter().flat_map(|p| desk.on(Input::Ready { process: *p })).collect();
        let world = formed(&formed_by);
        assert_eq!((&world.origin, world.recheck), (&Origin::Disk("c/6".into()), true));
        assert_eq!((desk.policy.checked(), desk.policy.sound(), desk.policy.vouched()), (Some(4), Some(4), Some(4)));
        desk.load(6);
        desk
    };
    let mut desk = resumed();
    let mut out = Vec::new();
    for process in [0, 1, 3] {
        out.extend(desk.says(process, at(6), Cause::Broken { step: 7, ranks: vec![2] }));
    }
    let new = *spawns(&out).first().expect("another process");
    out.extend(desk.on(Input::Ready { process: new }));
    let world = formed(&out);
    assert!(out.contains(&Action::Distrust { after: 4 }), "{out:?}");
    assert_eq!((&world.origin, desk.policy.vouched()), (&Origin::Disk("c/4".into()), Some(4)));
    // It agrees: what it began with is not gone back over, although nobody will ever have checked it.
    let mut desk = resumed();
    desk.on(Input::Step { step: 7 });
    assert_eq!((desk.policy.checked(), desk.policy.sound(), desk.policy.vouched()), (Some(7), Some(6), Some(4)));
    assert_eq!(desk.policy.unseen(), Some(5));
    let (out, world) = found_broken(&mut desk, || Cause::Broken { step: 8, ranks: vec![2] });
    assert!(!out.iter().any(|action| matches!(action, Action::Distrust { after } if *after < 7)), "{out:?}");
    assert!(!world.recheck);
}
