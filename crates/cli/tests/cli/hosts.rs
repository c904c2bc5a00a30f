//! A run on several hosts: agents and a controller over TCP, on loopback.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cluster::{Cluster, DIGEST, TINY};
use crate::common::{Lab, Out, gone_within, hold, runs};

#[test]
fn a_controller_that_is_killed_goes_on_where_it_was_and_no_rank_notices() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2", "layout.pp=2", "checkpoint.every=6"]);
    // Slow, so that ranks are at work still when a busy machine lets this test go on.
    let mut first = cluster.controller_with(&["--inject", "slow:0@2x6"]);
    let agents = [cluster.agent(1, 2, &[]), cluster.agent(2, 2, &[])];
    let pids = first.ranks(4);
    first.wait_for_step(4);
    first.signal(Signal::KILL);
    drop(first.end());
    assert!(pids.iter().all(|pid| runs(*pid)), "ranks step on");
    let second = cluster.controller().end().expect(0);
    assert_eq!(second.digest(), DIGEST, "{second}");
    assert!(second.stdout.contains("restarts 0") && second.stdout.contains("epoch 2"), "{second}");
    assert!(cluster.steps().iter().all(|n| *n == 1), "{:?}", cluster.steps());
    // What ranks did while nobody heard them is their work, too.
    let account = cluster.lab.lockstep(&["goodput", "run", "--json"]).expect(0).stdout;
    let account: serde_json::Value = serde_json::from_str(account.trim()).unwrap();
    let trained = account["run"]["time_s"].as_array().unwrap().iter().find(|part| part[0] == "train").unwrap();
    let (trained, took) = (trained[1].as_f64().unwrap(), cluster.step_seconds());
    assert!((trained - took).abs() < 0.1 * took, "{trained} of {took}: {account}");
    for agent in agents {
        let out = agent.end().expect(0);
        assert!(out.stdout.contains("of epoch 2 is heard"), "{out}");
    }
    gone_within(Duration::from_secs(20), &pids);
    // What has ended is not gone on with.
    let out = cluster.lab.lockstep(&["controller", TINY, "--run-dir", "run", "--listen", "127.0.0.1:0"]);
    out.expect(2).says(&["--resume"]);
}

#[test]
fn what_a_controller_decided_and_did_not_live_to_write_down_the_next_one_does() {
    let sets = ["layout.dp=2", "train.steps=60", "checkpoint.every=5", "guard.skip_batches=1"];
    // The checkpoint of step 5 is there when step 8 fails, also on a busy machine.
    let sets = [&sets[..], &["checkpoint.background=false"]].concat();
    let mut cluster = Cluster::new(None, 1, &sets);
    let inject = format!("poison:1@8,{}", hold(0, 13, Some(10)));
    let mut first = cluster.controller_with(&["--inject", &inject]);
    let agent = cluster.agent(1, 2, &[]);
    first.wait_for(|line| line.starts_with("intervention from step 6"));
    first.wait_for_step(12);
    first.signal(Signal::KILL);
    drop(first.end());
    let path = cluster.lab.path("run/interventions.jsonl");
    let line = std::fs::read_to_string(&path).unwrap();
    assert_eq!(line.lines().count(), 1, "{line}");
    std::fs::write(&path, "").unwrap();
    let second = cluster.controller_with(&["--inject", &inject]);
    second.end().expect(0);
    agent.end().expect(0);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), line);
}

#[test]
fn who_stood_by_for_a_run_that_ends_has_nothing_to_do() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2"]);
    let first = cluster.controller();
    let args = cluster.controller_args("127.0.0.1:0", &["--standby"]);
    let mut second = cluster.lab.start(&args.iter().map(String::as_str).collect::<Vec<_>>());
    second.wait_for(|line| line.contains("takes over when it is dead"));
    let agent = cluster.agent(1, 2, &[]);
    assert_eq!(first.end().expect(0).digest(), DIGEST);
    agent.end().expect(0);
    let out = second.end().expect(0);
    assert!(out.stdout.contains("has ended, there is nothing to take over"), "{out}");
}

#[test]
fn the_only_host_dies_and_the_run_goes_on_when_it_is_back() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2", "checkpoint.every=6"]);
    let mut controller = cluster.controller_with(&["--inject", &hold(0, 8, None)]);
    let agent = cluster.agent(1, 2, &[]);
    controller.wait_for_step(8);
    agent.signal(Signal::KILL);
    drop(agent);
    controller.wait_for(|line| line.contains("host h1 is gone"));
    std::thread::sleep(Duration::from_millis(300));
    let agent = cluster.agent(1, 2, &[]);
    controller.wait_for(|line| line.starts_with("world 2 of 2 ranks"));
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), DIGEST, "{out}");
    agent.end().expect(0);
}

#[test]
fn who_does_not_belong_here_is_turned_away_and_the_run_goes_on() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2", "train.steps=24"]);
    let mut controller = cluster.controller();
    let at = cluster.at.clone();
    let stranger = |said: &[u8]| {
        let mut stream = TcpStream::connect(&at).unwrap();
        let _ = stream.write_all(said);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    };
    stranger(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody who took this for a web server\r\n\r\n");
    stranger(&[0xff; 1 << 16]);
    stranger(b"");
    // A good answer's beginning, then a frame that claims four gigabytes.
    stranger(&[b"lockagnt".as_slice(), &control::remote::VERSION.to_le_bytes(), &[7; 64], &[0xff; 64]].concat());
    for word in ["does not speak this protocol", "hung up", "wrong token"] {
        controller.wait_for(|line| line.contains("turned away") && line.contains(word));
    }
    let wrong = cluster.lab.lockstep(&["agent", "--controller", &at, "--token-file", "wrong", "--host", "x"]);
    wrong.expect(2).says(&["wrong token", "--token-file"]);
    let first = cluster.agent(1, 1, &[]);
    controller.wait_for(|line| line.contains("host h1 is here"));
    // Of the same name.
    let second = cluster.agent(1, 1, &[]);
    controller.wait_for(|line| line.contains("turned away") && line.contains("h1 is here already"));
    drop(second);
    // Two controllers of one run.
    let args = ["controller", TINY, "--run-dir", "run", "--listen", "127.0.0.1:0", "--token-file", "token"];
    cluster.lab.lockstep(&args).expect(2).says(&["a controller is at work", &at, "--standby"]);
    let third = cluster.agent(2, 1, &[]);
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), DIGEST);
    assert!(out.stdout.contains("restarts 0"), "{out}");
    first.end().expect(0);
    third.end().expect(0);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_written() {
    let lab = Lab::new();
    lab.write("short", "secret\n");
    let before = lab.tree();
    let refused = |args: &[&str], words: &[&str]| {
        let all: Vec<_> = ["controller", TINY, "--run-dir", "run"].iter().chain(args).copied().collect();
        let out = lab.lockstep(&all).expect(2);
        out.says(words);
        assert!(!out.stdout.contains("run directory"), "{out}");
        crate::common::same_tree(&before, &lab.tree());
    };
    refused(&["--listen", "0.0.0.0:0"], &["--token-file", "127.0.0.1"]);
    refused(&["--listen", "127.0.0.1:0", "--token-file", "short"], &["could be guessed"]);
    refused(&["--listen", "127.0.0.1:0", "--token-file", "none"], &["make one with"]);
    refused(&["--listen", "127.0.0.1:0", "--set=layout.transport=shm"], &["layout.transport=tcp"]);
    refused(&["--listen", "127.0.0.1:0", "--hosts", "0"], &["--hosts 0"]);
    lab.lockstep(&["controller", TINY]).expect(2).says(&["--run-dir"]);
    let agent = |args: &[&str], words: &[&str]| {
        let all: Vec<_> =
            ["agent", "--controller", "127.0.0.1:1", "--call-limit-s", "1"].iter().chain(args).copied().collect();
        lab.lockstep(&all).expect(2).says(words);
    };
    agent(&["--ranks", "0"], &["--ranks 0"]);
    for name in ["../x", "", "..", "a b", "h/1", "h\u{e9}"] {
        agent(&["--host", name], &["no host's name", "--host"]);
    }
    agent(&["--idle-limit-s", "0"], &["--idle-limit-s", "1.."]);
    agent(&["--idle-limit-s", "18446744073709551615"], &["--idle-limit-s"]);
    let never = ["agent", "--controller", "127.0.0.1:1", "--call-limit-s", "18446744073709551615"];
    lab.lockstep(&never).expect(2).says(&["--call-limit-s"]);
    for nowhere in ["nowhere", "10.0.0.1", ":7070", "host:0", "host:99999"] {
        lab.lockstep(&["agent", "--controller", nowhere]).expect(2).says(&["--controller", nowhere, "10.0.0.1:7070"]);
    }
}

#[test]
fn an_agent_that_is_refused_backs_off_and_ends_with_one_error() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2"]);
    let mut controller = cluster.controller();
    let first = cluster.agent(1, 1, &[]);
    controller.wait_for(|line| line.contains("host h1 is here"));
    // Of the same name; asks for three seconds.
    let out = cluster.agent(1, 1, &["--call-limit-s", "3"]).end().expect(2);
    out.says(&["error: the controller refuses this agent: an agent of host h1 is here already", "--host", "refused"]);
    let lines = out.stdout.lines().filter(|line| line.contains("is here already")).count();
    let errors = |out: &Out| out.stderr.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!((lines, errors(&out)), (1, 1), "{out}");
    assert!(!out.stdout.contains("no controller"), "it is there, and refuses: {out}");
    // Twice as long each time, from 50 ms: not 20 calls a second.
    let told = out.stderr.rsplit_once("(refused ").unwrap().1.split(' ').next().unwrap();
    assert!((2..=8).contains(&told.parse::<usize>().unwrap()), "{out}");
    // A wrong token is none the next time either.
    let wrong = ["agent", "--controller", &cluster.at.clone(), "--token-file", "wrong", "--host", "x"];
    let out = cluster.lab.lockstep(&wrong).expect(2);
    assert_eq!(errors(&out), 1, "{out}");
    let second = cluster.agent(2, 1, &[]);
    assert_eq!(controller.end().expect(0).digest(), DIGEST);
    [first, second].into_iter().for_each(|agent| drop(agent.end().expect(0)));
}

#[test]
fn a_dropped_session_stops_a_controller_after_a_checkpoint_and_an_agent_with_its_ranks() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2", "train.steps=100000"]);
    let mut controller = cluster.controller();
    let agent = cluster.agent(1, 2, &[]);
    controller.wait_for_step(4);
    controller.signal(Signal::HUP);
    let out = controller.end().expect(3);
    let names = std::fs::read_dir(cluster.lab.path("run/checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_string_lossy().starts_with("step-")).count(), 1, "{out}");
    agent.end().expect(0);
    let mut controller = Cluster::new(None, 1, &["layout.dp=2", "train.steps=100000"]);
    let mut leads = controller.controller();
    let agent = controller.agent(1, 2, &[]);
    let pids = leads.ranks(2);
    leads.wait_for_step(2);
    agent.signal(Signal::HUP);
    assert!(agent.end().expect(0).stdout.contains("asked to stop"));
    gone_within(Duration::from_secs(20), &pids);
}

#[test]
fn a_controller_listens_at_a_name() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2"]);
    cluster.at = "localhost:0".into();
    let controller = cluster.controller();
    assert!(cluster.at.starts_with("127.0.0.1:"), "{}", cluster.at);
    let agent = cluster.agent(1, 2, &[]);
    assert_eq!(controller.end().expect(0).digest(), DIGEST);
    agent.end().expect(0);
    for (at, word) in [
        ("no-such-name.invalid:7070", "is not known"),
        ("localhost", "localhost:7070"),
        ("localhost:99999", "localhost:7070"),
        (":7070", "localhost:7070"),
        ("192.0.2.1:7070", "cannot listen at 192.0.2.1:7070"),
    ] {
        let args = ["controller", TINY, "--run-dir", "other", "--token-file", "token", "--listen", at];
        cluster.lab.lockstep(&args).expect(2).says(&["--listen", at, word]);
    }
}

#[test]
fn an_agent_that_nobody_answers_ends_and_says_so() {
    // Nobody has ever been there.
    let args = ["agent", "--controller", "127.0.0.1:9", "--call-limit-s", "1"];
    let alone = Lab::new().lockstep(&args).expect(5);
    let words = ["no controller at 127.0.0.1:9 for 1 s", "--call-limit-s"];
    assert!(words.iter().all(|word| alone.stdout.contains(word)), "{alone}");
    // Its ranks step on without a controller, to the end of the run; then nothing is left to wait for.
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2", "train.steps=60"]);
    let mut controller = cluster.controller_with(&["--inject", &hold(0, 3, Some(10))]);
    let agent = cluster.agent(1, 2, &["--call-limit-s", "1"]);
    let pids = controller.ranks(2);
    controller.wait_for_step(2);
    controller.signal(Signal::KILL);
    drop(controller);
    let out = agent.end().expect(5);
    assert!(out.stdout.contains("no rank is left here: this agent ends"), "{out}");
    assert!(cluster.lab.path("run/checkpoints/step-00000060/manifest.json").exists(), "{out}");
    gone_within(Duration::from_secs(20), &pids);
}

#[test]
fn a_controller_that_waits_for_agents_stops_at_once_and_goes_on_when_it_is_called_again() {
    let mut cluster = Cluster::new(None, 2, &["layout.dp=2"]);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        cluster.at = "127.0.0.1:0".into();
        let mut controller = cluster.controller();
        let agent = cluster.agent(1, 1, &[]);
        controller.wait_for(|line| line.contains("host h1 is here"));
        let asked = Instant::now();
        controller.signal(signal);
        let out = controller.end().expect(3);
        assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
        out.says(&["stopped on request while no rank was at work; the same command goes on"]);
        assert!(!out.stderr.contains("error"), "{out}");
        agent.end().expect(3);
    }
    cluster.at = "127.0.0.1:0".into();
    let controller = cluster.controller();
    let agents = [cluster.agent(1, 1, &[]), cluster.agent(2, 1, &[])];
    assert_eq!(controller.end().expect(0).digest(), DIGEST);
    agents.into_iter().for_each(|agent| drop(agent.end().expect(0)));
}

#[test]
fn a_secret_that_others_can_read_is_told_of() {
    let lab = Lab::new();
    lab.write("token", "0123456789abcdef0123\n");
    let told = |mode| {
        std::fs::set_permissions(lab.path("token"), std::fs::Permissions::from_mode(mode)).unwrap();
        let args = ["agent", "--controller", "127.0.0.1:9", "--token-file", "token", "--call-limit-s", "1"];
        lab.lockstep(&args).expect(5).stderr.contains("chmod 600 token")
    };
    assert_eq!([0o600, 0o640, 0o604].map(told), [false, true, true]);
}

#[test]
fn ranks_die_with_their_agent() {
    let mut cluster = Cluster::new(None, 1, &["layout.dp=2", "train.steps=100000"]);
    let mut controller = cluster.controller();
    let agent = cluster.agent(1, 2, &[]);
    let pids = controller.ranks(2);
    controller.wait_for_step(2);
    agent.signal(Signal::KILL);
    gone_within(Duration::from_secs(20), &pids);
    drop(agent);
}
