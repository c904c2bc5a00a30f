//! Several hosts.

use super::*;

/// Three hosts with `slots` places each; all processes come up and the first world runs.
fn on_three_hosts(sets: &[&str], slots: usize) -> Desk {
    let mut desk = Desk::new(sets);
    desk.policy =
        Policy::new(Start { run: run(sets), cores: 2, from: None, unchecked: None }, Box::new(Anything)).after_hosts(3);
    let mut spawned = Vec::new();
    for host in ["a", "b", "c"] {
        assert!(spawned.is_empty(), "nothing starts before all hosts are there");
        spawned = desk.on(Input::HostJoined { host: host.into(), slots });
    }
    let out: Vec<_> = spawns(&spawned).iter().flat_map(|p| desk.on(Input::Ready { process: *p })).collect();
    assert_eq!(formed(&out).generation, 1);
    desk.load(0);
    (1..=5).for_each(|step| drop(desk.on(Input::Step { step })));
    desk
}

/// All members say what they hold, until the next world is formed.
fn all_leave(desk: &mut Desk, step: u64) {
    let world = desk.policy.world().unwrap().clone();
    for process in world.processes {
        if desk.policy.world().unwrap().generation == world.generation {
            let _ = desk.says(process.0, at(step), Cause::Aborted);
        }
    }
}

fn hosts_of(desk: &Desk) -> Vec<String> {
    let on = |d: &Decision| match &d.action {
        Action::Spawn { process, host } => Some((*process, host.clone())),
        _ => None,
    };
    let on: std::collections::BTreeMap<_, _> = desk.seen.iter().filter_map(on).collect();
    desk.policy.world().unwrap().processes.iter().map(|p| on[p].clone()).collect()
}

#[test]
fn tensor_cells_share_a_host_and_mirrors_do_not() {
    let desk = on_three_hosts(&["layout.dp=3", "layout.tp=2", "layout.transport=tcp"], 4);
    assert_eq!(hosts_of(&desk), ["a", "a", "b", "b", "c", "c"]);
    assert_eq!(desk.policy.run().layout.ranks_per_host, Some(2));
    let desk = on_three_hosts(&["layout.dp=3", "layout.zero=1", "layout.transport=tcp"], 1);
    assert_eq!((hosts_of(&desk).concat(), desk.policy.run().layout.ranks_per_host), ("abc".into(), Some(1)));
}

#[test]
fn a_lost_host_is_one_trouble_its_ranks_go_elsewhere_or_fewer_go_on_until_it_is_back() {
    let lost = |desk: &mut Desk| {
        let out = desk.on(Input::HostLost { host: "b".into(), reason: "cut off".into() });
        let told: Vec<_> = out.iter().filter(|a| matches!(a, Action::Tell(_))).collect();
        assert!(
            matches!(told[..], [Action::Tell(t)] if t.kind == "host lost" && t.host.as_deref() == Some("b")),
            "{out:?}"
        );
        assert!(out.iter().any(|a| matches!(a, Action::Abort { generation: 1 })));
        out
    };
    // There is room on the others.
    let mut desk = on_three_hosts(&["layout.dp=3", "layout.transport=tcp"], 2);
    let new = spawns(&lost(&mut desk));
    assert_eq!(new.len(), 1);
    desk.says(0, at(5), Cause::Aborted);
    desk.says(2, at(5), Cause::Aborted);
    assert_eq!(formed(&desk.on(Input::Ready { process: new[0] })).processes, [Process(0), new[0], Process(2)]);
    assert_eq!(hosts_of(&desk), ["a", "a", "c"]);
    // There is none.
    let mut desk = on_three_hosts(&["layout.dp=3", "layout.transport=tcp"], 1);
    assert_eq!(spawns(&lost(&mut desk)), []);
    desk.says(0, at(5), Cause::Aborted);
    let world = formed(&desk.says(2, at(5), Cause::Aborted));
    assert_eq!((world.processes.as_slice(), peers(&world).0), (&[Process(0), Process(2)][..], 5));
    desk.load(5);
    let _ = desk.on(Input::Step { step: 6 });
    // Late words of its old ranks change nothing; it is back and used again.
    assert_eq!(desk.on(Input::Exited { process: Process(1), how: "killed".into(), by_itself: false }), []);
    let new = spawns(&desk.on(Input::HostJoined { host: "b".into(), slots: 1 }));
    assert_eq!(desk.on(Input::Ready { process: new[0] }), [Action::Abort { generation: 2 }]);
    desk.says(0, at(6), Cause::Aborted);
    let out = desk.says(2, at(6), Cause::Aborted);
    assert_eq!(formed(&out).processes.len(), 3);
}

#[test]
fn when_all_hosts_are_away_the_run_waits_for_them_but_not_for_ever() {
    let gone = || {
        let mut desk = on_three_hosts(&["layout.dp=3", "layout.transport=tcp"], 1);
        for host in ["a", "b", "c"] {
            let out = desk.on(Input::HostLost { host: host.into(), reason: "power".into() });
            assert!(!out.iter().any(|a| matches!(a, Action::Stop { .. })), "{out:?}");
        }
        assert_eq!(desk.on(Input::Tick), []);
        desk
    };
    let mut desk = gone();
    let new = spawns(&desk.on(Input::HostJoined { host: "b".into(), slots: 1 }));
    let world = formed(&desk.on(Input::Ready { process: new[0] }));
    assert_eq!((world.processes, world.origin), (new, Origin::Fresh));
    let mut desk = gone();
    desk.now += 599_000;
    assert_eq!(desk.on(Input::Tick), []);
    desk.now += 2_000;
    assert_eq!(desk.on(Input::Tick), [Action::Stop { code: BUDGET_SPENT }]);
    assert!(desk.seen.last().unwrap().reason.contains("none came back in 600 s"));
}

#[test]
fn a_host_that_fails_again_and_again_gets_no_ranks() {
    let mut desk = on_three_hosts(&["layout.dp=3", "layout.transport=tcp", "guard.evict_after=2"], 1);
    for time in 1..=2 {
        let out = desk.on(Input::HostLost { host: "b".into(), reason: "power".into() });
        assert_eq!(out.contains(&Action::Evict { host: "b".into() }), time == 2, "{out:?}");
        let step = desk.policy.committed();
        all_leave(&mut desk, step);
        assert_eq!(hosts_of(&desk).concat(), "ac");
        desk.load(step);
        let _ = desk.on(Input::Step { step: step + 1 });
        let new = spawns(&desk.on(Input::HostJoined { host: "b".into(), slots: 1 }));
        // Back after the first failure, not after the second.
        assert_eq!(new.len(), if time == 1 { 1 } else { 0 });
        if time == 1 {
            let _ = desk.on(Input::Ready { process: new[0] });
            all_leave(&mut desk, step + 1);
            assert_eq!(desk.policy.world().unwrap().processes.len(), 3);
            desk.load(step + 1);
        }
    }
}
