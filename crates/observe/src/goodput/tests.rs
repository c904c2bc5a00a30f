use events::Step;

use super::*;

fn step(step: u64, seconds: f64) -> Event {
    let (steps, tokens) = (10, 1);
    Event::Step(Step {
        step,
        steps,
        loss: 1.0,
        grad_norm: 1.0,
        lr: 1.0,
        tokens,
        seconds,
        tokens_per_s: 1.0,
        tokens_per_s_rank: 1.0,
        mfu: 0.1,
        targets: None,
        experts: None,
    })
}

fn saved(seconds: f64) -> Event {
    Event::Checkpoint { step: 1, path: String::new(), bytes: 1, seconds, written_s: None }
}

fn digest() -> Event {
    Event::Digest { step: 1, digest: String::new(), numerics_version: 1 }
}

fn validation() -> Event {
    Event::Validation { step: 1, set: None, loss: 1.0, bits_per_byte: None, tokens: 1, best: true, kept: false }
}

fn account(events: &[(f64, Event)], wall: f64) -> Account {
    let mut ledger = Ledger::default();
    events.iter().for_each(|(at, event)| ledger.take(*at, event));
    let account = ledger.account(wall);
    let sum: f64 = account.time_s.iter().map(|(_, s)| s).sum();
    assert!((sum - account.wall_s).abs() < 1e-9, "{account:?}");
    account
}

#[track_caller]
fn is(account: &Account, wanted: &[(Class, f64)]) {
    assert_eq!(account.time_s.len(), wanted.len(), "{account:?}");
    for (class, seconds) in wanted {
        assert!((account.seconds(*class) - seconds).abs() < 1e-9, "{class:?}: {account:?}");
    }
}

#[test]
fn an_undisturbed_run_adds_up() {
    let events = [
        (0.1, Event::Notice { text: String::new() }),
        (3.0, step(1, 1.0)),
        (4.0, step(2, 1.0)),
        (4.5, validation()),
        (4.8, saved(0.3)),
        (6.0, step(3, 1.0)),
        (6.5, digest()),
    ];
    let got = account(&events, 7.0);
    let wanted = [
        (Class::Startup, 2.0),
        (Class::Train, 3.0),
        (Class::Validation, 0.5),
        (Class::Checkpoint, 0.3),
        (Class::Unknown, 0.2),
        (Class::Digest, 0.5),
        (Class::Shutdown, 0.5),
    ];
    is(&got, &wanted);
    assert!((got.goodput - 3.0 / 7.0).abs() < 1e-9);
    assert_eq!(
        got.line(),
        "wall 7.00 s = startup 2.00 s + train 3.00 s + validation 0.50 s + checkpoint 0.30 s + digest 0.50 s + shutdown 0.50 s + unknown 0.20 s | goodput 42.9%"
    );
}

#[test]
fn a_checkpoint_beside_steps_costs_only_what_ranks_waited() {
    // It ends in the middle of step 2, for which ranks waited 0.1 s.
    let got = account(&[(1.0, step(1, 1.0)), (1.6, saved(0.1)), (2.1, step(2, 1.0))], 2.1);
    is(&got, &[(Class::Train, 2.0), (Class::Checkpoint, 0.1)]);
}

#[test]
fn a_recovery_is_taken_apart() {
    let anatomy = Anatomy {
        fault: Some(2.5),
        detected: Some(2.7),
        decided: Some(2.7),
        aborted: Some(2.9),
        placed: Some(3.0),
        connected: Some(3.1),
        loaded: Some(3.5),
        first_step: Some(4.5),
        caught_up: Some(4.5),
        resumed_at: 3,
        last_committed: 2,
        ..Anatomy::default()
    };
    let events = [
        (1.0, step(1, 1.0)),
        (2.0, step(2, 1.0)),
        (2.7, Event::Trouble(events::Trouble::default())),
        (4.5, step(3, 0.9)),
        (4.5, Event::Recovery(Box::new(anatomy))),
        (5.5, step(4, 1.0)),
    ];
    let got = account(&events, 5.5);
    let wanted = [
        (Class::Train, 3.9),
        (Class::Wasted, 0.5),
        (Class::Detection, 0.2),
        (Class::Recovery, 0.4),
        (Class::Restore, 0.4),
        (Class::Unknown, 0.1),
    ];
    is(&got, &wanted);
    assert_eq!((got.restarts.len(), got.steps, got.steps_redone), (1, 4, 0));
}

#[test]
fn a_step_computed_twice_is_productive_once() {
    // The disk tier: back from step 3 to step 1.
    let events =
        [(1.0, step(1, 1.0)), (2.0, step(2, 1.0)), (3.0, step(3, 1.0)), (4.5, step(2, 1.0)), (5.5, step(3, 1.0))];
    let got = account(&events, 5.5);
    is(&got, &[(Class::Train, 3.0), (Class::Wasted, 2.0), (Class::Unknown, 0.5)]);
    assert_eq!((got.steps, got.steps_redone), (3, 2));
}

#[test]
fn sessions_follow_each_other() {
    let events =
        [(1.5, step(1, 1.0)), (2.5, step(2, 1.0)), (0.2, Event::Notice { text: String::new() }), (2.0, step(2, 1.0))];
    let got = account(&events, 2.0);
    is(&got, &[(Class::Startup, 1.5), (Class::Train, 2.0), (Class::Wasted, 1.0)]);
    assert_eq!((got.sessions, got.wall_s, got.steps_redone), (2, 4.5, 1));
}

#[test]
fn the_window_sees_the_end() {
    let mut ledger = Ledger::default();
    for (at, event) in [(2.0, step(1, 1.0)), (3.0, step(2, 1.0)), (4.0, validation())] {
        ledger.take(at, &event);
    }
    let got = ledger.within(4.0, 2.0);
    is(&got, &[(Class::Train, 1.0), (Class::Validation, 1.0)]);
    assert_eq!((got.wall_s, got.goodput), (2.0, 0.5));
}

#[test]
fn a_log_is_read_with_its_damage() {
    let lines = [step(1, 1.0).to_line(1.5), "{\"kind\":\"from later\"}".into(), step(2, 1.0).to_line(2.5)];
    let OfLog { all, window, unread, holes } = of_log(lines.iter().map(String::as_str), 1.0);
    is(&all, &[(Class::Startup, 0.5), (Class::Train, 2.0)]);
    assert_eq!((window.wall_s, unread, holes), (1.0, 1, vec![]));
}

#[test]
fn a_log_that_lost_lines_lacks_steps() {
    // The first session resumed after step 2; steps 4, 7 and 8 are nowhere, 5 was lost once and told the second time.
    let told = [(3, 1.0), (6, 4.0), (5, 6.0), (6, 7.0), (9, 10.0)];
    let lines: Vec<_> = told.iter().map(|(n, at)| step(*n, 1.0).to_line(*at)).collect();
    assert_eq!(of_log(lines.iter().map(String::as_str), 1.0).holes, [(4, 4), (7, 8)]);
}

#[test]
fn nothing_yet_is_startup() {
    is(&account(&[(0.5, Event::Notice { text: String::new() })], 1.0), &[(Class::Startup, 1.0)]);
}

#[test]
fn steps_that_nobody_could_hear_are_counted_when_they_are_told() {
    // The controller was away from 2 to 6 s; three steps are told at once when it is back, and one more follows.
    let away =
        [(1.0, step(1, 1.0)), (2.0, step(2, 1.0)), (6.0, step(3, 1.2)), (6.001, step(4, 1.2)), (6.002, step(5, 1.2))];
    let got = account(&[&away[..], &[(7.102, step(6, 1.1))]].concat(), 7.102);
    is(&got, &[(Class::Train, 2.0 + 3.6 + 1.1), (Class::Unknown, 4.002 - 3.6)]);
    assert_eq!((got.steps, got.steps_redone), (6, 0));
    // What does not fit is not made up.
    let got = account(&[&away[..], &[(6.003, step(6, 1.2))]].concat(), 6.003);
    is(&got, &[(Class::Train, 6.003)]);
    // One that is computed again later was thrown away, although it was told late.
    let got = account(&[&away[..], &[(7.202, step(4, 1.2))]].concat(), 7.202);
    assert_eq!(got.steps_redone, 1);
    assert!((got.seconds(Class::Wasted) - 1.199).abs() < 1e-9, "{got:?}");
}
