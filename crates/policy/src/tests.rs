//! The ladder, rung by rung.

mod ends;
mod hosts;
mod intervene;
mod state;
mod unfit;

use spec::Run;

use crate::*;

pub(crate) struct Anything;
impl Laws for Anything {
    fn fits(&self, _: &Run) -> Result<(), String> {
        Ok(())
    }
    // As plain data parallelism: somebody holds something.
    fn lost(&self, _: &Run, holds: &[Option<&[Piece]>], _: &Run) -> Option<String> {
        let holders: Vec<_> = holds.iter().flatten().collect();
        let Some(first) = holders.first() else { return Some("moments of everything".into()) };
        first.iter().find(|piece| holders.iter().all(|bad| bad.contains(piece))).map(|piece| piece.what.clone())
    }
}

pub(crate) fn run(sets: &[&str]) -> Run {
    let text = "[model]\npreset = \"tiny\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 24\nbatch = 16\nseq = 64\n[grid]\ndp = 4\ntp = 2\nmicrobatch = 2\n";
    let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
    Run::parse(text, "test", &sets, 2).unwrap()
}

/// A policy and a clock.
struct Desk {
    policy: Policy,
    now: u64,
    seen: Vec<Decision>,
    /// The folder of checkpoints.
    folder: std::collections::BTreeMap<u64, std::path::PathBuf>,
}

impl Desk {
    fn new(sets: &[&str]) -> Self {
        let start = Start { run: run(sets), cores: 2, from: None, unchecked: None };
        Self { policy: Policy::new(start, Box::new(Anything)), now: 0, seen: Vec::new(), folder: Default::default() }
    }

    fn on(&mut self, input: Input) -> Vec<Action> {
        self.now += 10;
        if let Input::Checkpoint { step, path } = &input {
            self.folder.insert(*step, path.clone());
        }
        let out = self.policy.on(self.now, input);
        assert!(out.iter().all(|d| !d.reason.is_empty()), "{out:?}");
        self.seen.extend(out.clone());
        let mut actions: Vec<_> = out.into_iter().map(|d| d.action).collect();
        for action in &actions {
            if let Action::Distrust { after } = action {
                self.folder.retain(|step, _| step <= after);
            }
        }
        if actions.contains(&Action::Survey) {
            let saved = self.folder.clone().into_iter().collect();
            actions.extend(self.on(Input::Found { saved }));
        }
        actions
    }

    /// All processes come up, the first world runs and has committed `step`.
    fn running(sets: &[&str], step: u64) -> Self {
        let mut desk = Self::new(sets);
        let slots = run(sets).layout.world() + run(sets).guard.spares;
        let spawned = desk.on(Input::HostJoined { host: "a".into(), slots });
        let processes = spawns(&spawned);
        let formed = processes.iter().flat_map(|p| desk.on(Input::Ready { process: *p })).collect::<Vec<_>>();
        assert!(matches!(&formed[0], Action::Form(w) if w.generation == 1 && w.origin == Origin::Fresh), "{formed:?}");
        desk.load(0);
        (1..=step).for_each(|step| drop(desk.on(Input::Step { step })));
        desk
    }

    fn load(&mut self, step: u64) {
        let world = self.policy.world().unwrap().clone();
        for process in world.processes {
            assert_eq!(self.on(Input::Connected { process, generation: world.generation }), []);
            let _ = self.on(Input::Loaded { process, generation: world.generation, step });
        }
    }

    fn says(&mut self, process: u64, held: Held, cause: Cause) -> Vec<Action> {
        let world = self.policy.world().unwrap().clone();
        let rank = world.processes.iter().position(|p| *p == Process(process)).unwrap() as u32;
        let (generation, settled) = (world.generation, true);
        let held = Held { generation, rank, settled, ..held };
        self.on(Input::Interrupted { process: Process(process), generation, held, cause })
    }

    fn exits(&mut self, process: u64) -> Vec<Action> {
        self.on(Input::Exited { process: Process(process), how: "signal 9".into(), by_itself: false })
    }
}

fn spawns(actions: &[Action]) -> Vec<Process> {
    actions.iter().filter_map(|a| if let Action::Spawn { process, .. } = a { Some(*process) } else { None }).collect()
}

fn formed(actions: &[Action]) -> World {
    let world = actions.iter().find_map(|a| if let Action::Form(w) = a { Some(w.clone()) } else { None });
    world.unwrap_or_else(|| panic!("no world: {actions:?}"))
}

fn at(step: u64) -> Held {
    Held { step: Some(step), ..Held::default() }
}

fn piece() -> Piece {
    Piece { tensor: 0, slice: 0, elements: 0..4, mirror: false, what: "moment1 of norm".into() }
}

fn peers(world: &World) -> (u64, Vec<Option<u32>>) {
    let Origin::Peers { holders, step, .. } = &world.origin else { panic!("{:?}", world.origin) };
    (*step, holders.clone())
}

#[test]
fn a_killed_process_is_started_again_and_the_others_keep_theirs() {
    let mut desk = Desk::running(&["layout.dp=4"], 6);
    let out = desk.exits(1);
    assert!(out.contains(&Action::Abort { generation: 1 }));
    assert_eq!(spawns(&out), [Process(4)]);
    for p in [0, 2, 3] {
        assert_eq!(desk.says(p, at(6), Cause::Aborted), []);
    }
    let world = formed(&desk.on(Input::Ready { process: Process(4) }));
    assert_eq!(world.processes, [0, 4, 2, 3].map(Process));
    assert_eq!(peers(&world), (6, vec![Some(0), None, Some(2), Some(3)]));
    // Late words of the old world change nothing.
    let late = Input::Interrupted { process: Process(0), generation: 1, held: at(5), cause: Cause::Aborted };
    assert_eq!(desk.on(late), []);
}

#[test]
fn a_spare_takes_the_place_at_once() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.spares=1"], 3);
    let spare = Process(2);
    desk.on(Input::Ready { process: spare });
    assert_eq!(spawns(&desk.exits(0)), [Process(3)]);
    let out = desk.says(1, at(3), Cause::PeerGone { rank: 0, reason: "gone".into() });
    // The next spare is still starting; nobody waits for it.
    let world = formed(&out);
    assert_eq!(world.processes, [spare, Process(1)]);
}

#[test]
fn fewer_go_on_while_a_place_is_empty_and_more_when_it_is_not() {
    let mut desk = Desk::running(&["layout.dp=4", "guard.respawn_after_ms=1000"], 6);
    assert_eq!(spawns(&desk.exits(3)), []);
    desk.says(0, at(6), Cause::Aborted);
    desk.says(1, at(6), Cause::Aborted);
    let world = formed(&desk.says(2, at(6), Cause::Aborted));
    assert_eq!(world.processes.len(), 3);
    assert!(world.layout.starts_with("dp3 "), "{}", world.layout);
    desk.load(6);
    desk.on(Input::Step { step: 7 });
    assert_eq!(desk.on(Input::Tick), []);
    desk.now += 1000;
    let out = desk.on(Input::Tick);
    assert_eq!(spawns(&out), [Process(4)]);
    let out = desk.on(Input::Ready { process: Process(4) });
    assert!(matches!(out[..], [Action::Abort { generation: 2 }]), "{out:?}");
    desk.says(0, at(7), Cause::Aborted);
    desk.says(1, at(7), Cause::Aborted);
    let world = formed(&desk.says(2, at(7), Cause::Aborted));
    assert!(world.layout.starts_with("dp4 "), "{}", world.layout);
    assert_eq!(peers(&world), (7, vec![Some(0), Some(1), Some(2)]));
    // Growing is no failure.
    assert_eq!(desk.policy.recoveries(), 1);
}

#[test]
fn a_stopped_process_is_named_and_ended() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let out = desk.on(Input::Silent { process: Process(1), age_ms: 600, stopped: true });
    assert!(out.contains(&Action::Kill { process: Process(1) }));
    assert!(out.iter().any(|a| matches!(a, Action::Tell(t) if t.kind == "stopped" && t.rank == Some(1))), "{out:?}");
    // The exit that follows is no second trouble.
    assert_eq!(desk.exits(1), []);
}

#[test]
fn a_bad_message_is_a_replay_but_not_for_ever() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    for round in 0..3 {
        let bad = || Cause::BadMessage { rank: 1, reason: "checksum".into() };
        desk.says(0, at(6), bad());
        let out = desk.says(1, at(6), Cause::Aborted);
        if round < 2 {
            assert_eq!(formed(&out).processes, [Process(0), Process(1)]);
            desk.load(6);
        } else {
            assert!(out.contains(&Action::Kill { process: Process(1) }), "{out:?}");
            assert_eq!(spawns(&out), [Process(2)]);
        }
    }
}

#[test]
fn where_batches_may_be_left_out_the_run_goes_back_and_on_without_them() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.skip_batches=2"], 6);
    desk.on(Input::Checkpoint { step: 4, path: "c/step-4".into() });
    let cause = || Cause::NotFinite { step: 7, reason: "training diverged".into() };
    desk.says(0, at(6), cause());
    let out = desk.says(1, at(6), cause());
    // Those of steps 5 and 6, that of 7, and one more. Nothing follows before that is written down.
    let [Action::Survey, Action::Intervene { step: 5, set, asked: false, .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!(set, "train.skip=[\"5+4\"]");
    assert_eq!(desk.on(Input::Tick), []);
    let out = desk.on(Input::Recorded { refused: None });
    let world = formed(&out);
    assert_eq!(world.origin, Origin::Disk("c/step-4".into()));
    assert!(world.run_toml.contains("skip = [\"5+4\"]"), "{}", world.run_toml);
    // At once, since it may take long until there is a world; and before it, since somebody may have written on meanwhile.
    let went: Vec<_> = out.iter().filter(|a| matches!(a, Action::Distrust { after: 4 } | Action::Form(_))).collect();
    assert!(matches!(went[..], [Action::Distrust { .. }, Action::Distrust { .. }, Action::Form(_)]), "{out:?}");
    desk.load(4);
    desk.on(Input::Step { step: 5 });
    assert_eq!((desk.policy.reached(), desk.policy.committed()), (5, 6));
}

#[test]
fn the_same_failure_at_the_same_step_is_not_tried_for_ever() {
    // Two holders disagree whatever is done; the budget would last longer.
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let disagree = || Cause::Disagree { reason: "norm/moment differs on 0 and 1".into() };
    for round in 1..=4 {
        desk.says(0, at(6), disagree());
        let out = desk.says(1, at(6), disagree());
        if round < 4 {
            formed(&out);
            desk.load(0);
            // The way back to where it fails is no progress.
            (1..=6).for_each(|step| drop(desk.on(Input::Step { step })));
        }
    }
    let stop = desk.seen.last().unwrap();
    assert_eq!(stop.action, Action::Stop { code: 5 });
    for word in ["the same failure at the same step", "step 7", "4 times", "norm/moment differs"] {
        assert!(stop.reason.contains(word), "{word}: {}", stop.reason);
    }
    // Steps that get on are no such thing.
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    for step in 6..12 {
        desk.says(0, at(step), disagree());
        formed(&desk.says(1, at(step), disagree()));
        desk.load(step);
        desk.on(Input::Step { step: step + 1 });
    }
    assert!(!desk.policy.ended());
}

#[test]
fn no_number_on_every_rank_is_the_users() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let cause = || Cause::NotFinite { step: 7, reason: "training diverged".into() };
    desk.says(0, at(6), cause());
    let out = desk.says(1, at(6), cause());
    assert_eq!(out, [Action::Stop { code: 4 }]);
}

#[test]
fn the_budget_ends() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.restarts_max=1"], 6);
    desk.exits(0);
    desk.says(1, at(6), Cause::Aborted);
    desk.on(Input::Ready { process: Process(2) });
    desk.load(6);
    let out = desk.exits(2);
    assert!(out.contains(&Action::Stop { code: 5 }), "{out:?}");
    assert!(desk.policy.ended());
    let reason = &desk.seen.last().unwrap().reason;
    assert!(
        reason.contains("rank 0 ended without finishing: signal 9") && reason.contains("restarts_max = 1"),
        "{reason}"
    );
}

#[test]
fn the_budget_is_per_window() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.restarts_max=1", "guard.restarts_window_s=10"], 6);
    desk.exits(0);
    desk.says(1, at(6), Cause::Aborted);
    desk.on(Input::Ready { process: Process(2) });
    desk.load(6);
    desk.now += 20_000;
    desk.on(Input::Step { step: 7 });
    assert!(desk.exits(2).contains(&Action::Abort { generation: 2 }));
}

#[test]
fn a_hang_is_dumped_and_its_culprit_named() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.progress_floor_ms=100"], 6);
    desk.now += 200;
    assert_eq!(desk.on(Input::Tick), [Action::Dump { generation: 1 }]);
    let out = desk.on(Input::Verdict { ranks: vec![1], reason: "rank 1 is behind".into(), still_ms: 0 });
    assert!(
        out.iter().any(|a| matches!(a, Action::Tell(t) if t.rank == Some(1) && t.kind == "no progress")),
        "{out:?}"
    );
    assert!(out.contains(&Action::Abort { generation: 1 }));
    // Who does not leave its world is ended.
    desk.says(0, at(6), Cause::Aborted);
    desk.now += 5_000;
    let out = desk.on(Input::Tick);
    assert!(out.contains(&Action::Kill { process: Process(1) }), "{out:?}");
}

#[test]
fn a_world_in_which_nothing_moves_is_ended_when_the_records_say_so_too() {
    let mut desk = Desk::running(&["layout.dp=3"], 6);
    let limit = 700 + 10;
    assert_eq!(desk.on(Input::Still { ms: limit - 1 }), []);
    assert_eq!(desk.on(Input::Still { ms: limit }), [Action::Dump { generation: 1 }]);
    assert_eq!(desk.on(Input::Still { ms: limit + 10 }), []);
    // Somebody moved after all: nobody is named, and nobody is asked again at once.
    let verdict = |still_ms| Input::Verdict { ranks: vec![0, 2], reason: "0 does not reach 2".into(), still_ms };
    assert_eq!(desk.on(verdict(limit - 1)), []);
    assert_eq!(desk.on(Input::Still { ms: limit }), []);
    desk.now += 1000;
    assert_eq!(desk.on(Input::Still { ms: limit }), [Action::Dump { generation: 1 }]);
    let out = desk.on(verdict(limit));
    assert!(matches!(&out[0], Action::Tell(t) if t.rank == Some(0) && t.kind == "no progress"), "{out:?}");
    assert_eq!(out[1], Action::Abort { generation: 1 });
    assert_eq!(desk.on(Input::Still { ms: 9_000 }), [], "the world is ending");
}

#[test]
fn a_world_that_is_loading_may_stand_still() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.exits(1);
    let formed_now = |desk: &mut Desk| {
        desk.says(0, at(6), Cause::Aborted);
        desk.on(Input::Ready { process: Process(2) })
    };
    assert!(matches!(formed_now(&mut desk)[..], [Action::Form(_)]));
    assert_eq!(desk.on(Input::Still { ms: 9_000 }), []);
}

#[test]
fn a_host_that_fails_again_and_again_gets_nothing() {
    let mut desk = Desk::new(&["layout.dp=2", "guard.evict_after=2"]);
    let out = desk.on(Input::HostJoined { host: "a".into(), slots: 1 });
    assert_eq!(spawns(&out), [Process(0)]);
    let out = desk.on(Input::HostJoined { host: "b".into(), slots: 2 });
    assert_eq!(spawns(&out), [Process(1)]);
    desk.on(Input::Ready { process: Process(0) });
    formed(&desk.on(Input::Ready { process: Process(1) }));
    desk.load(0);
    desk.on(Input::Step { step: 1 });
    // b has more room, but a's is the one that dies.
    let mut victim = Process(0);
    for round in 0..2 {
        let out = desk.exits(victim.0);
        if round == 0 {
            victim = spawns(&out)[0];
        }
        let evicted = out.iter().any(|a| matches!(a, Action::Evict { host } if host == "a"));
        let host = desk.seen.iter().rev().find_map(|d| match &d.action {
            Action::Spawn { host, .. } => Some(host.clone()),
            _ => None,
        });
        if evicted {
            assert_eq!(host.as_deref(), Some("b"));
            return;
        }
        desk.says(1, at(1), Cause::Aborted);
        let world = formed(&desk.on(Input::Ready { process: victim }));
        assert_eq!(world.processes.len(), 2);
        desk.load(1);
    }
}

#[test]
fn a_second_death_while_the_first_is_repaired() {
    let mut desk = Desk::running(&["layout.dp=4"], 6);
    desk.exits(0);
    let out = desk.exits(1);
    // Told, but the world is ending already.
    assert!(!out.iter().any(|a| matches!(a, Action::Abort { .. })), "{out:?}");
    desk.says(2, at(6), Cause::Aborted);
    desk.says(3, at(6), Cause::Aborted);
    assert_eq!(desk.on(Input::Ready { process: Process(4) }), []);
    let world = formed(&desk.on(Input::Ready { process: Process(5) }));
    assert_eq!(peers(&world), (6, vec![None, None, Some(2), Some(3)]));
}

#[test]
fn all_dead_is_the_disk() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.on(Input::Checkpoint { step: 4, path: "c/step-4".into() });
    desk.exits(0);
    desk.exits(1);
    desk.on(Input::Ready { process: Process(2) });
    let world = formed(&desk.on(Input::Ready { process: Process(3) }));
    assert_eq!(world.origin, Origin::Disk("c/step-4".into()));
    assert_eq!((desk.policy.reached(), desk.policy.committed()), (4, 6));
    // The run goes on from there; a word that comes late changes nothing.
    let loaded = |process| Input::Loaded { process, generation: world.generation, step: 4 };
    desk.on(loaded(world.processes[0]));
    desk.on(Input::Step { step: 5 });
    desk.on(loaded(world.processes[1]));
    assert_eq!((desk.policy.reached(), desk.policy.committed()), (5, 6));
}

#[test]
fn done_stops_and_words_of_a_rank_are_the_end() {
    let mut desk = Desk::running(&["layout.dp=2"], 24);
    assert_eq!(desk.on(Input::Done { process: Process(0) }), []);
    assert_eq!(desk.on(Input::Exited { process: Process(0), how: "exit code 0".into(), by_itself: true }), []);
    assert_eq!(desk.on(Input::Done { process: Process(1) }), [Action::Stop { code: 0 }]);
    let mut desk = Desk::running(&["layout.dp=2"], 3);
    let failed = Input::Failed { process: Process(1), code: 2, reason: "no such file".into(), alike: false };
    assert_eq!(desk.on(failed), [Action::Stop { code: 2 }]);
}

#[test]
fn what_all_ranks_came_to_is_not_tried_again() {
    // Whatever its code: who comes last may still have something to tell.
    for code in [INTERNAL, 6] {
        let mut desk = Desk::running(&["layout.dp=2"], 24);
        let failed = |p| Input::Failed { process: Process(p), code, reason: "disk full".into(), alike: true };
        assert_eq!(desk.on(failed(1)), []);
        assert_eq!(desk.exits(1), []);
        assert_eq!(desk.on(failed(0)), [Action::Stop { code }]);
    }
}

#[test]
fn the_same_inputs_give_the_same_decisions() {
    let script = |desk: &mut Desk| {
        desk.exits(1);
        [0, 2, 3].into_iter().for_each(|p| drop(desk.says(p, at(6), Cause::Aborted)));
        desk.on(Input::Ready { process: Process(4) });
    };
    let (mut a, mut b) = (Desk::running(&["layout.dp=4"], 6), Desk::running(&["layout.dp=4"], 6));
    script(&mut a);
    script(&mut b);
    assert_eq!(a.seen, b.seen);
}

#[test]
fn a_stop_outlives_a_recovery() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    assert_eq!(desk.on(Input::Stop), [Action::AskStop]);
    desk.exits(0);
    desk.says(1, at(6), Cause::Aborted);
    let out = desk.on(Input::Ready { process: Process(2) });
    assert!(matches!(out[..], [Action::Form(_), Action::AskStop]), "{out:?}");
}

#[test]
fn one_death_is_one_trouble_whoever_notices_first() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let gone = || Cause::PeerGone { rank: 1, reason: "rank 1 is gone".into() };
    assert_eq!(desk.says(0, at(6), gone()), [Action::Abort { generation: 1 }]);
    let out = desk.exits(1);
    assert!(matches!(&out[0], Action::Tell(t) if t.kind == "exit" && t.rank == Some(1)), "{out:?}");
    assert_eq!(desk.policy.recoveries(), 1);
    formed(&desk.on(Input::Ready { process: Process(2) }));
    desk.load(6);
    // A link that is cut has no death that would tell.
    desk.says(0, at(6), gone());
    let out = desk.says(2, at(6), Cause::PeerGone { rank: 0, reason: "rank 0 is gone".into() });
    assert!(out.iter().any(|a| matches!(a, Action::Tell(t) if t.kind == "peer gone")), "{out:?}");
    assert_eq!(desk.policy.recoveries(), 2);
}

#[test]
fn another_program_takes_over_one_by_one_and_nothing_counts_as_a_failure() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.spares=1", "guard.restarts_max=0"], 6);
    let _ = desk.on(Input::HostJoined { host: "a".into(), slots: 4 });
    // The spare goes at once; a new one comes, and one more.
    let out = desk.on(Input::Replace);
    assert!(out.contains(&Action::Kill { process: Process(2) }), "{out:?}");
    assert_eq!(spawns(&out), [Process(3), Process(4)]);
    assert_eq!(desk.policy.world().unwrap().generation, 1);
    let mut step = 6;
    for (new, old, stays) in [(3, 0, 1), (4, 1, 3)] {
        let out = desk.on(Input::Ready { process: Process(new) });
        let out = if out.is_empty() { desk.on(Input::Step { step: step + 1 }) } else { out };
        let generation = desk.policy.world().unwrap().generation;
        assert!(out.contains(&Action::Abort { generation }), "{old}: {out:?}");
        step += 1;
        // It goes when its last words are heard, not before.
        assert_eq!(desk.says(old, at(step), Cause::Aborted), []);
        let out = desk.says(stays, at(step), Cause::Aborted);
        assert!(out.contains(&Action::Kill { process: Process(old) }), "{old}: {out:?}");
        assert!(desk.policy.replacing() >= 1);
        let world = formed(&out);
        assert_eq!(world.generation, generation + 1);
        assert_eq!(peers(&world).0, step);
        assert!(!world.processes.contains(&Process(old)));
        desk.load(step);
    }
    let _ = desk.on(Input::Step { step: step + 1 });
    assert_eq!((desk.policy.replacing(), desk.policy.recoveries()), (0, 0));
    let world = desk.policy.world().unwrap();
    assert!(world.processes.iter().all(|p| p.0 > 2), "{world:?}");
}

#[test]
fn the_only_holder_stays_although_its_program_is_replaced_until_a_step_was_mirrored() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.spares=1"], 6);
    let _ = desk.on(Input::HostJoined { host: "a".into(), slots: 4 });
    let _ = desk.on(Input::Replace);
    assert!(desk.on(Input::Ready { process: Process(3) }).contains(&Action::Abort { generation: 1 }));
    // The one that was to stay dies, so 0 alone has the state.
    let mut out = desk.exits(1);
    out.extend(desk.says(0, at(6), Cause::Aborted));
    out.extend(desk.on(Input::Ready { process: Process(4) }));
    assert!(!out.contains(&Action::Kill { process: Process(0) }), "{out:?}");
    let world = formed(&out);
    assert_eq!(peers(&world), (6, vec![Some(0), None]));
    desk.load(6);
    assert_eq!(desk.on(Input::Tick), []);
    assert_eq!(desk.policy.world().unwrap().generation, 2);
    assert!(desk.on(Input::Step { step: 7 }).contains(&Action::Abort { generation: 2 }));
}

#[test]
fn when_all_ranks_end_by_themselves_twice_at_one_step_it_is_the_users() {
    let ends = |desk: &mut Desk, how: [&str; 2]| {
        let members = desk.policy.world().unwrap().processes.clone();
        let end = |(process, how): (&Process, &str)| {
            let by_itself = how.starts_with("exit");
            desk.on(Input::Exited { process: *process, how: how.into(), by_itself })
        };
        members.iter().zip(how).flat_map(end).collect::<Vec<_>>()
    };
    let again = |desk: &mut Desk, out: &[Action]| {
        spawns(out).iter().for_each(|p| drop(desk.on(Input::Ready { process: *p })));
        desk.load(0);
        (1..=6).for_each(|step| drop(desk.on(Input::Step { step })));
    };
    let stop = |out: &[Action]| out.iter().any(|a| matches!(a, Action::Stop { code: BUDGET_SPENT }));
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    let out = ends(&mut desk, ["exit status 101"; 2]);
    assert!(!stop(&out), "once may be an accident: {out:?}");
    again(&mut desk, &out);
    assert!(stop(&ends(&mut desk, ["exit status 101"; 2])));
    let why = &desk.seen.last().unwrap().reason;
    assert!(why.contains("step 7, 2 times") && why.contains("exit status 101") && why.contains("data"), "{why}");
    // Killed, or not all alike: an accident.
    for how in [["signal 9"; 2], ["exit status 101", "exit status 1"], ["exit status 101", "signal 9"]] {
        let mut desk = Desk::running(&["layout.dp=2"], 6);
        for _ in 0..2 {
            let out = ends(&mut desk, how);
            assert!(!stop(&out), "{how:?}: {out:?}");
            again(&mut desk, &out);
        }
    }
}
