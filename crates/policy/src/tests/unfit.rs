//! Processes that are not of the run.

use super::*;

fn unfit(process: u64) -> Input {
    Input::Unfit { process: Process(process), reason: "it has other data".into() }
}

fn ready(process: u64) -> Input {
    Input::Ready { process: Process(process) }
}

#[test]
fn who_is_at_work_goes_on_without_a_process_that_is_not_of_the_run() {
    let mut desk = Desk::running(&["layout.dp=3"], 4);
    let started = desk.exits(1);
    let newcomer = spawns(&started);
    let held = || Held { step: Some(4), ..Held::default() };
    drop((desk.says(0, held(), Cause::Aborted), desk.says(2, held(), Cause::Aborted)));
    let newcomer = newcomer.first().copied().unwrap_or(Process(3));
    let actions = desk.on(Input::Unfit { process: newcomer, reason: "it has other data".into() });
    assert!(actions.contains(&Action::Kill { process: newcomer }), "{actions:?}");
    assert!(actions.contains(&Action::Evict { host: "a".into() }), "{actions:?}");
    let world = formed(&actions);
    assert_eq!(world.processes, [Process(0), Process(2)]);
    assert!(spawns(&actions).is_empty(), "nobody is started where it would read the same: {actions:?}");
    // Nor later.
    desk.load(4);
    for step in 5..9 {
        for _ in 0..60 {
            desk.now += 1_000;
            assert_eq!(desk.on(Input::Working), []);
            assert_eq!(desk.on(Input::Tick), []);
        }
        assert_eq!(desk.on(Input::Step { step }), []);
    }
    // The last one that has the data dies: nobody can go on.
    drop((desk.exits(0), desk.says(2, Held { step: Some(8), ..Held::default() }, Cause::Aborted)));
    let actions = desk.exits(2);
    assert!(matches!(actions[..], [.., Action::Stop { code: CHANGED }]), "{actions:?}");
    assert!(desk.seen.last().unwrap().reason.contains("it has other data"));
}

#[test]
fn a_run_that_has_not_begun_ends_with_the_first_process_that_is_not_of_it() {
    let mut desk = Desk::new(&["layout.dp=2"]);
    drop(desk.on(Input::HostJoined { host: "a".into(), slots: 1 }));
    drop(desk.on(Input::HostJoined { host: "b".into(), slots: 1 }));
    assert_eq!(desk.on(ready(0)), []);
    let actions = desk.on(unfit(1));
    assert!(matches!(actions[..], [Action::Kill { .. }, Action::Stop { code: CHANGED }]), "{actions:?}");
}

#[test]
fn a_host_that_was_mended_is_asked_again_when_its_agent_comes_back() {
    let mut desk = Desk::new(&["layout.dp=2"]);
    for host in ["a", "b"] {
        drop(desk.on(Input::HostJoined { host: host.into(), slots: 1 }));
    }
    drop((desk.on(ready(0)), desk.on(ready(1))));
    desk.load(0);
    drop(desk.on(Input::Step { step: 1 }));
    let lost = |desk: &mut Desk| desk.on(Input::HostLost { host: "b".into(), reason: "gone".into() });
    drop(lost(&mut desk));
    let on_b = desk.policy.world().unwrap().processes.iter().position(|p| {
        desk.seen.iter().any(|d| matches!(&d.action, Action::Spawn { process, host } if process == p && host == "b"))
    });
    let stays = 1 - on_b.unwrap() as u64;
    drop(desk.says(stays, Held { step: Some(1), ..Held::default() }, Cause::Aborted));
    desk.load(1);
    drop(desk.on(Input::Step { step: 2 }));
    let joined = |desk: &mut Desk| desk.on(Input::HostJoined { host: "b".into(), slots: 1 });
    let started = spawns(&joined(&mut desk));
    assert_eq!(started.len(), 1);
    let actions = desk.on(Input::Unfit { process: started[0], reason: "it has other data".into() });
    assert!(actions.contains(&Action::Evict { host: "b".into() }), "{actions:?}");
    // A link that broke and came back mends nothing.
    assert!(spawns(&joined(&mut desk)).is_empty());
    drop(lost(&mut desk));
    assert_eq!(spawns(&joined(&mut desk)).len(), 1);
}

#[test]
fn who_says_that_it_reads_is_waited_for() {
    let mut desk = Desk::new(&["layout.dp=2"]);
    drop(desk.on(Input::HostJoined { host: "a".into(), slots: 2 }));
    for _ in 0..100 {
        desk.now += 50_000;
        for process in 0..2 {
            assert_eq!(desk.on(Input::Reading { process: Process(process) }), []);
        }
        assert_eq!(desk.on(Input::Tick), []);
    }
    desk.now += 61_000;
    let actions = desk.on(Input::Tick);
    assert!(actions.contains(&Action::Kill { process: Process(0) }), "{actions:?}");
}
