//! Every place in the protocol of a step at which one party, then two, can be killed, stopped or cut off; all of them are
//! explored, and what must never happen does not. Each way to get the protocol wrong is found.

mod explore;
mod model;
mod parts;

use explore::explore;
use parts::{Mutant, Setup, Violation};

const ALL: [bool; 4] = [true; 4];

fn holds(setup: Setup) {
    let began = std::time::Instant::now();
    match explore(&setup) {
        Ok(count) => println!("{count:?} in {:.1} s of {setup:?}", began.elapsed().as_secs_f64()),
        Err((violation, way)) => panic!("{violation:?}, by way of {way:?}, of {setup:?}"),
    }
}

#[test]
fn nothing_goes_wrong_where_nothing_happens() {
    holds(Setup { ranks: 3, spares: 0, faults: 0, kinds: ALL, mutant: None });
}

#[test]
fn one_party_killed_stopped_or_cut_off_anywhere() {
    for (ranks, spares) in [(2, 0), (2, 1), (3, 0), (3, 1)] {
        holds(Setup { ranks, spares, faults: 1, kinds: ALL, mutant: None });
    }
}

#[test]
fn two_parties_killed_or_two_alarms_anywhere() {
    for (ranks, spares) in [(3, 0), (3, 1)] {
        holds(Setup { ranks, spares, faults: 2, kinds: [true, false, false, true], mutant: None });
    }
}

#[test]
fn two_parties_killed_stopped_or_cut_off_anywhere() {
    holds(Setup { ranks: 2, spares: 1, faults: 2, kinds: ALL, mutant: None });
    holds(Setup { ranks: 3, spares: 0, faults: 2, kinds: [true, true, false, false], mutant: None });
}

#[test]
fn each_wrong_protocol_is_found() {
    for mutant in [
        Mutant::ApplyBeforeVote,
        Mutant::NoFence,
        Mutant::StayAlthoughApplied,
        Mutant::MirrorNotPrepared,
        Mutant::ForgetsTooEarly,
        Mutant::SettlesUnheard,
        Mutant::ForwardWithoutVote,
    ] {
        let found = (1..=2).find_map(|faults| {
            let spares = usize::from(matches!(mutant, Mutant::ForgetsTooEarly | Mutant::SettlesUnheard));
            let setup =
                Setup { ranks: 3, spares, faults, kinds: [true, spares == 0, spares == 0, true], mutant: Some(mutant) };
            explore(&setup).err().map(|(violation, way)| (faults, violation, way))
        });
        let Some((faults, violation, way)) = found else { panic!("{mutant:?} was not found") };
        println!("{mutant:?}: {violation:?} with {faults} faults after {} moves", way.len());
        let fits = match mutant {
            Mutant::ApplyBeforeVote | Mutant::StayAlthoughApplied => {
                matches!(violation, Violation::Applied { .. } | Violation::Lost { .. } | Violation::Mixed { .. })
            }
            Mutant::NoFence => matches!(violation, Violation::Zombie { .. }),
            Mutant::MirrorNotPrepared | Mutant::ForgetsTooEarly | Mutant::SettlesUnheard => {
                matches!(violation, Violation::Unavailable { .. })
            }
            Mutant::ForwardWithoutVote => matches!(violation, Violation::NoGradient { .. }),
        };
        assert!(fits, "{mutant:?} was found as {violation:?}");
    }
}
