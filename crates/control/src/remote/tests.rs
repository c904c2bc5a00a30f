//! Agents and controllers in one process, over loopback.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use fabric::FabricOptions;
use policy::{Origin, Process};

use super::client::{Agent, Ended, run};
use super::handshake::Key;
use super::server::{Door, Remote};
use crate::agent::{Agents, Heard, News};
use crate::wire::{Assignment, FabricSpec, ToRank};

const PATIENCE: Duration = Duration::from_secs(20);

fn door(epoch: u64, known: Vec<(String, u64, u64)>) -> Door {
    Door { key: Key::new(b"a token of this test"), epoch, run: "test".into(), beat_ms: 20, silence_ms: 600, known }
}

/// An agent whose ranks are `program`, and what it says.
fn agent(at: String, program: &str) -> (std::thread::JoinHandle<Ended>, Receiver<String>, Arc<AtomicBool>) {
    let (tell, said) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let agent = Agent {
        controllers: vec![at],
        key: Key::new(b"a token of this test"),
        host: "h".into(),
        slots: 2,
        address: None,
        program: PathBuf::from(program),
        patience: None,
        idle: PATIENCE,
        stop: stop.clone(),
    };
    let life = std::thread::spawn(move || run(&agent, &|text| drop(tell.send(text.to_owned()))).unwrap());
    (life, said, stop)
}

#[track_caller]
fn wait<T>(inbox: &Receiver<T>, wanted: impl Fn(&T) -> bool) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let word = inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())).expect("it comes");
        if wanted(&word) {
            return word;
        }
    }
}

fn mark(news: &News) -> bool {
    matches!(news, News::Mark { seq, .. } if *seq > 0)
}

#[test]
fn news_outlive_a_controller_and_an_older_one_is_not_obeyed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut first = Remote::listen(listener, door(5, Vec::new())).unwrap();
    // It ends at once, with words that are no protocol.
    let (life, said, _) = agent(at.to_string(), "/bin/echo");
    wait(first.news(), |news| matches!(news, News::Joined { slots: 2, .. }));
    first.spawn("h", Process(7), 50, &serde_json::json!({}));
    wait(first.news(), |news| matches!(news, News::Process(Process(7), Heard::Exited { .. })));
    // Nothing was written down: the next one hears it again.
    drop(first);
    let rebind = || {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match TcpListener::bind(at) {
                Ok(listener) => return listener,
                Err(e) => assert!(Instant::now() < deadline, "{e}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let old = Remote::listen(rebind(), door(4, Vec::new())).unwrap();
    wait(&said, |text| text.contains("a controller of epoch 4, but one of epoch 5 has taken over"));
    assert!(old.news().try_iter().all(|news| matches!(news, News::Notice(_))));
    drop(old);
    let mut next = Remote::listen(rebind(), door(6, Vec::new())).unwrap();
    let present = wait(next.news(), |news| matches!(news, News::Present { .. }));
    assert_eq!(present, News::Present { host: "h".into(), started: vec![Process(7)], running: vec![] });
    wait(next.news(), |news| matches!(news, News::Process(Process(7), Heard::Exited { .. })));
    let News::Mark { host, session, seq } = wait(next.news(), mark) else { unreachable!() };
    next.written(&host, seq);
    std::thread::sleep(Duration::from_millis(100));
    drop(next);
    // What is written down is not told again; what was ordered before is not done again.
    let mut last = Remote::listen(rebind(), door(7, vec![(host, session, seq)])).unwrap();
    wait(last.news(), |news| matches!(news, News::Present { .. }));
    last.spawn("h", Process(7), 50, &serde_json::json!({}));
    std::thread::sleep(Duration::from_millis(200));
    let late: Vec<_> = last.news().try_iter().filter(|news| matches!(news, News::Process(..))).collect();
    assert_eq!(late, []);
    last.end(3, "enough");
    assert_eq!(life.join().unwrap(), Ended::Run { code: 3, reason: "enough".into() });
}

#[test]
fn an_agent_that_stays_away_is_lost_and_its_next_life_is_another() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    // An earlier controller knew of a host that does not come.
    let remote = Remote::listen(listener, door(2, vec![("gone".into(), 1, 9)])).unwrap();
    let lost = |name: &'static str| move |news: &News| matches!(news, News::Lost { host, .. } if host == name);
    wait(remote.news(), lost("gone"));
    let (life, _, stop) = agent(at.to_string(), "/bin/echo");
    wait(remote.news(), |news| matches!(news, News::Joined { .. }));
    stop.store(true, Ordering::Relaxed);
    assert_eq!(life.join().unwrap(), Ended::Stopped);
    let (life, _, stop) = agent(at.to_string(), "/bin/echo");
    wait(remote.news(), lost("h"));
    wait(remote.news(), |news| matches!(news, News::Joined { .. }));
    stop.store(true, Ordering::Relaxed);
    drop(life.join());
}

#[test]
fn the_token_of_a_world_does_not_travel() {
    let folder = tempfile::tempdir().unwrap();
    // It says what it is told.
    let rank = folder.path().join("rank");
    std::fs::write(&rank, "#!/bin/sh\nexec cat\n").unwrap();
    std::fs::set_permissions(&rank, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut remote = Remote::listen(listener, door(1, Vec::new())).unwrap();
    let (life, _, stop) = agent(remote.address().to_string(), rank.to_str().unwrap());
    wait(remote.news(), |news| matches!(news, News::Joined { .. }));
    remote.spawn("h", Process(1), 50, &serde_json::json!({}));
    let options = FabricOptions { generation: 3, ..FabricOptions::default() };
    let fabric = remote.fabric(&[Process(1)], false, &options).unwrap().remove(0);
    assert!(matches!(fabric, FabricSpec::Keyed { .. }), "{fabric:?}");
    let (run_toml, cores, faults) = (String::new(), Vec::new(), Vec::new());
    let place = Assignment {
        generation: 3,
        rank: 0,
        world: 1,
        run_toml,
        fabric,
        cores,
        origin: Origin::Fresh,
        faults,
        recheck: false,
        checked: None,
        unseen: None,
    };
    remote.say(Process(1), &ToRank::Assign(Box::new(place)));
    let told = |news: &News| matches!(news, News::Process(_, Heard::Line(line)) if line.contains("Assign"));
    let News::Process(_, Heard::Line(line)) = wait(remote.news(), told) else { unreachable!() };
    let ToRank::Assign(place) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
    let token = Key::new(b"a token of this test").secret("test world 3");
    let bind = std::net::Ipv4Addr::LOCALHOST.into();
    assert_eq!(place.fabric, FabricSpec::Tcp { token, bind });
    stop.store(true, Ordering::Relaxed);
    drop(life.join());
}
