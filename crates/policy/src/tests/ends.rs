//! The end of a run, whoever is struck then, and what a run goes back to when nobody lived to tell of it.

use super::*;

/// What becomes of a member at the end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Done,
    Killed,
    Stopped,
    LeftBehind,
    Fails,
    Mute,
}

const FATES: [Fate; 6] = [Fate::Done, Fate::Killed, Fate::Stopped, Fate::LeftBehind, Fate::Fails, Fate::Mute];

impl Desk {
    fn meets(&mut self, process: u64, fate: Fate) {
        let (generation, id) = (1, Process(process));
        let input = match fate {
            Fate::Done => Input::Done { process: id },
            Fate::Killed => Input::Exited { process: id, how: "signal 9".into(), by_itself: false },
            Fate::Stopped => Input::Silent { process: id, age_ms: 600, stopped: true },
            Fate::LeftBehind => {
                let held = Held { generation, rank: process as u32, settled: true, ..at(6) };
                let cause = Cause::PeerGone { rank: (process as u32 + 1) % 3, reason: "gone".into() };
                Input::Interrupted { process: id, generation, held, cause }
            }
            Fate::Fails => {
                let reason = "its last words could not be written".into();
                Input::Failed { process: id, code: INTERNAL, reason, alike: false }
            }
            Fate::Mute => Input::Tick,
        };
        self.on(input);
    }

    /// Time passes until the run is over, at most so long; the exit code.
    fn ends_within(&mut self, ms: u64) -> Option<i32> {
        let until = self.now + ms;
        while self.now < until && !self.policy.ended() {
            self.now += 500;
            self.on(Input::Tick);
        }
        self.seen.iter().find_map(|d| if let Action::Stop { code } = d.action { Some(code) } else { None })
    }
}

/// Every fate of each of three ranks, in every order: 1296 ends.
#[test]
fn a_run_of_which_one_rank_is_done_ends_well_whatever_becomes_of_the_others() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for number in 0..FATES.len().pow(3) {
        let fates = [number % 6, number / 6 % 6, number / 36].map(|at| FATES[at]);
        if !fates.contains(&Fate::Done) {
            continue;
        }
        for order in orders {
            let mut desk = Desk::running(&["layout.dp=3"], 6);
            order.iter().for_each(|rank| desk.meets(*rank as u64, fates[*rank]));
            assert_eq!(desk.ends_within(60_000), Some(0), "{fates:?} in the order {order:?}: {:?}", desk.seen);
        }
    }
}

#[test]
fn a_host_that_is_lost_at_the_end_changes_nothing() {
    let mut desk = Desk::running(&["layout.dp=2"], 6);
    desk.on(Input::Done { process: Process(0) });
    let out = desk.on(Input::HostLost { host: "a".into(), reason: "its link is down".into() });
    assert!(matches!(out[..], [Action::Stop { code: 0 }]), "{out:?}");
}

#[test]
fn a_checkpoint_that_nobody_lived_to_tell_of_is_gone_on_from() {
    let mut desk = Desk::running(&["layout.dp=2"], 7);
    desk.on(Input::Checkpoint { step: 3, path: "c/3".into() });
    // Retention has removed the older one, and the newest is damaged.
    desk.folder = [(6, "c/6".into())].into();
    desk.exits(0);
    let spawned = spawns(&desk.exits(1));
    let actions: Vec<_> = [2, 3].iter().flat_map(|p| desk.on(Input::Ready { process: Process(*p) })).collect();
    let survey = desk.seen.iter().position(|d| d.action == Action::Survey);
    let aside = desk.seen.iter().position(|d| matches!(d.action, Action::Distrust { .. }));
    assert!(survey.is_some() && survey < aside, "the folder is looked at before anything is set aside: {spawned:?}");
    assert_eq!(formed(&actions).origin, Origin::Disk("c/6".into()));
    assert!(actions.contains(&Action::Distrust { after: 6 }), "{actions:?}");
    assert_eq!(desk.policy.reached(), 6);
}

#[test]
fn what_was_told_of_and_is_not_there_is_not_gone_on_from() {
    let mut desk = Desk::running(&["layout.dp=2"], 7);
    for step in [2, 4, 6] {
        desk.on(Input::Checkpoint { step, path: format!("c/{step}").into() });
    }
    // The two newest are damaged.
    desk.folder = [(2, "c/2".into())].into();
    desk.exits(0);
    desk.exits(1);
    let actions: Vec<_> = [2, 3].iter().flat_map(|p| desk.on(Input::Ready { process: Process(*p) })).collect();
    assert_eq!(formed(&actions).origin, Origin::Disk("c/2".into()));
}

#[test]
fn a_stop_ends_a_run_whose_world_does_not_come_together() {
    let mut desk = Desk::running(&["layout.dp=2", "guard.assemble_timeout_ms=5000", "guard.restarts_max=1000"], 6);
    desk.exits(0);
    desk.on(Input::Stop);
    // Nobody is ever ready; processes that are started are given up and started again.
    assert_eq!(desk.ends_within(20_000), Some(STOPPED), "{:?}", desk.seen);
}
