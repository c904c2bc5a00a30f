//! Changes of what the run is: each begins with a step, and is written down before anybody acts on it.

use super::*;

fn reload(sets: &[&str]) -> Input {
    Input::Reload { sets: sets.iter().map(ToString::to_string).collect() }
}

/// The step, and what a run file says for it.
fn intervenes(actions: &[Action]) -> (u64, String) {
    // Where the run goes on from disk that is looked at first.
    match actions {
        [Action::Intervene { step, set, .. }] | [Action::Survey, Action::Intervene { step, set, .. }] => {
            (*step, set.clone())
        }
        _ => panic!("{actions:?}"),
    }
}

fn recipe(world: &World, step: u64) -> spec::Recipe {
    Run::parse(&world.run_toml, "world", &[], 2).unwrap().train.recipe.at(step)
}

#[test]
fn a_change_of_the_recipe_begins_with_the_step_after_the_last_one_and_waits_for_the_record() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let out = desk.on(reload(&["train.lr=1e-4", "layout.dp=1", "train.clip=2"]));
    assert!(matches!(out[..], [Action::Abort { generation: 1 }]), "{out:?}");
    desk.says(0, at(6), Cause::Aborted);
    // One has come a step further than was told.
    let seven = Held { decided: Some(Decided { step: 7, decision: serde_json::Value::Null }), ..at(7) };
    let out = desk.says(1, seven, Cause::Aborted);
    let set = "train.changes=[\"8: train.lr=0.0001\", \"8: train.clip=2.0\"]";
    assert_eq!(intervenes(&out), (8, set.into()));
    for input in [Input::Tick, Input::Ready { process: Process(7) }] {
        assert_eq!(desk.on(input), []);
    }
    let world = formed(&desk.on(Input::Recorded { refused: None }));
    assert_eq!((world.processes.len(), recipe(&world, 7).lr, recipe(&world, 8).lr), (1, 1e-3, 1e-4));
    assert_eq!(recipe(&world, 8).clip, 2.0);
}

#[test]
fn what_cannot_be_written_down_changes_nothing() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let before = desk.policy.wanted().definition();
    desk.on(reload(&["train.lr=1e-4", "layout.dp=1"]));
    desk.says(0, at(6), Cause::Aborted);
    assert_eq!(intervenes(&desk.says(1, at(6), Cause::Aborted)).0, 7);
    let world = formed(&desk.on(Input::Recorded { refused: Some("the disk is full".into()) }));
    assert_eq!((world.processes.len(), recipe(&world, 7).lr), (2, 1e-3));
    assert_eq!(desk.policy.wanted().definition(), before);
    // Batches that are left out are no such choice: the run ends as it does where none may be.
    let mut desk = Desk::running(&["layout.dp=2", "guard.skip_batches=1"], 6);
    let cause = || Cause::NotFinite { step: 7, reason: "training diverged".into() };
    desk.says(0, at(6), cause());
    assert_eq!(intervenes(&desk.says(1, at(6), cause())).0, 1);
    let out = desk.on(Input::Recorded { refused: Some("the disk is full".into()) });
    assert_eq!(out, [Action::Stop { code: DIVERGED }]);
    let reason = &desk.seen.last().unwrap().reason;
    assert!(reason.contains("training diverged") && reason.contains("the disk is full"), "{reason}");
}

/// All die after two steps with the new rate: those that were computed before it are computed again as they were.
#[test]
fn after_going_back_each_step_has_the_recipe_that_it_had() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.on(Input::Checkpoint { step: 5, path: "c/5".into() });
    desk.on(reload(&["train.lr=1e-4"]));
    desk.says(0, at(6), Cause::Aborted);
    desk.says(1, at(6), Cause::Aborted);
    formed(&desk.on(Input::Recorded { refused: None }));
    desk.load(6);
    (7..=8).for_each(|step| drop(desk.on(Input::Step { step })));
    desk.exits(0);
    desk.exits(1);
    desk.on(Input::Ready { process: Process(2) });
    let world = formed(&desk.on(Input::Ready { process: Process(3) }));
    assert_eq!(world.origin, Origin::Disk("c/5".into()));
    assert_eq!([5, 6, 7, 8].map(|step| recipe(&world, step).lr), [1e-3, 1e-3, 1e-4, 1e-4]);
}

/// The request comes, then all die: what was computed before it stays as it was, although it has to be computed again.
#[test]
fn a_change_before_all_died_begins_after_the_steps_that_were_computed() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.on(Input::Checkpoint { step: 4, path: "c/4".into() });
    desk.on(reload(&["train.lr=1e-4"]));
    desk.exits(0);
    let out = desk.exits(1);
    let steps: Vec<_> = out.iter().filter(|a| matches!(a, Action::Intervene { step: 7, .. })).collect();
    assert_eq!(steps.len(), 1, "{out:?}");
    assert!(!out.iter().any(|a| matches!(a, Action::Form(_))));
    desk.on(Input::Recorded { refused: None });
    desk.on(Input::Ready { process: Process(2) });
    let world = formed(&desk.on(Input::Ready { process: Process(3) }));
    assert_eq!((world.origin.clone(), recipe(&world, 6).lr), (Origin::Disk("c/4".into()), 1e-3));
}

/// Step 7 was computed and saved by ranks that did not live to tell of it, nor heard of the change.
#[test]
fn a_change_begins_after_the_checkpoint_that_nobody_lived_to_tell_of() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.folder.insert(7, "c/7".into());
    desk.on(reload(&["train.lr=1e-4"]));
    desk.exits(0);
    let out = desk.exits(1);
    assert!(out.iter().any(|a| matches!(a, Action::Intervene { step: 8, .. })), "{out:?}");
    desk.on(Input::Recorded { refused: None });
    desk.on(Input::Ready { process: Process(2) });
    let world = formed(&desk.on(Input::Ready { process: Process(3) }));
    assert_eq!((world.origin.clone(), recipe(&world, 7).lr), (Origin::Disk("c/7".into()), 1e-3));
}

#[test]
fn a_change_without_a_step_to_hold_for_is_refused() {
    let mut desk = Desk::running(&["layout.dp=2", "train.steps=6"], 6);
    desk.on(reload(&["train.lr=1e-4"]));
    desk.says(0, at(6), Cause::Aborted);
    let out = desk.says(1, at(6), Cause::Aborted);
    assert!(matches!(out[..], [Action::Refuse, Action::Form(_)]), "{out:?}");
    assert!(desk.seen.iter().any(|d| d.action == Action::Refuse && d.reason.contains("no step is left")));
}

/// Going back twice to one checkpoint: what is left out adds up, and what was planned for later stays.
#[test]
fn batches_left_out_before_one_step_add_up() {
    let sets = ["layout.dp=2", "guard.skip_batches=1", "train.skip=[\"3+1\", \"20+5\"]"];
    let mut desk = Desk::running(&sets, 6);
    desk.on(Input::Checkpoint { step: 4, path: "c/4".into() });
    let mut fails = |step: u64| {
        let cause = || Cause::NotFinite { step, reason: "training diverged".into() };
        desk.says(0, at(step - 1), cause());
        let out = intervenes(&desk.says(1, at(step - 1), cause()));
        let world = formed(&desk.on(Input::Recorded { refused: None }));
        desk.load(4);
        desk.on(Input::Step { step: 5 });
        let run = Run::parse(&world.run_toml, "world", &[], 2).unwrap();
        (out, run.first_sequence(5) / run.grid.batch() as u64, run.train.skip.to_string())
    };
    // Step 7 has the batch of number 7 (from 0), as one is left out before: step 5 goes on with number 8.
    assert_eq!(fails(7), ((5, "train.skip=[\"5+3\"]".into()), 8, "[\"3+1\", \"5+3\", \"20+5\"]".into()));
    // Now step 6 has number 9.
    assert_eq!(fails(6), ((5, "train.skip=[\"5+5\"]".into()), 10, "[\"3+1\", \"5+5\", \"20+5\"]".into()));
}
