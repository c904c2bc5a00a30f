//! Hosts in network namespaces: cut off, back, dead; and controllers that take over.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cluster::{Cluster, DIGEST, TINY, net};
use crate::common::{Lab, Running, gone_within, runs};

/// Long enough for hosts to come back.
const STEPS: &str = "train.steps=240";

fn undisturbed() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| Lab::new().lockstep(&["train", TINY, "--run-dir", "run", "--set", STEPS]).expect(0).digest())
}

/// Waits for the next step; since `from`.
fn next_step(controller: &mut Running, from: Instant) -> Duration {
    controller.wait_for(|line| line.starts_with("step "));
    from.elapsed()
}

#[test]
fn three_hosts_end_with_the_digest_of_one() {
    let Some(net) = net(4) else { return };
    let mut cluster = Cluster::new(Some(net), 3, &["layout.dp=3"]);
    let controller = cluster.controller();
    let agents: Vec<_> = (1..4).map(|host| cluster.agent(host, 1, &[])).collect();
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), DIGEST, "{out}");
    assert!(out.stdout.contains("restarts 0"), "{out}");
    for agent in agents {
        agent.end().expect(0);
    }
}

#[test]
fn a_host_is_cut_off_and_comes_back_another_dies_with_its_ranks() {
    let Some(net) = net(4) else { return };
    let mut cluster = Cluster::new(Some(net), 3, &["layout.dp=3", "layout.zero=1", STEPS]);
    let mut controller = cluster.controller();
    let agents: Vec<_> = (1..4).map(|host| cluster.agent(host, 1, &[])).collect();
    let pids = controller.ranks(3);
    controller.wait_for_step(3);
    // Cut off: two go on. A rank there is fenced, and ended when its host is back.
    let cut = Instant::now();
    cluster.plug(1, false);
    controller.wait_for(|line| line.contains("host h1 is gone"));
    let noticed = cut.elapsed();
    let went_on = next_step(&mut controller, cut);
    cluster.plug(1, true);
    controller.wait_for(|line| line.contains("host h1 is here"));
    controller.wait_for(|line| line.contains("form world 3"));
    // Killed, with its ranks.
    let killed = Instant::now();
    let mut agents = agents.into_iter();
    let (first, second, third) = (agents.next().unwrap(), agents.next().unwrap(), agents.next().unwrap());
    second.signal(Signal::KILL);
    drop(second);
    controller.wait_for(|line| line.contains("host h2 is gone"));
    let after_kill = next_step(&mut controller, killed);
    println!(
        "cut noticed after {noticed:?}, next step after {went_on:?}; killed agent: next step after {after_kill:?}"
    );
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    first.end().expect(0);
    third.end().expect(0);
    gone_within(Duration::from_secs(20), &pids);
}

#[test]
fn a_host_that_fails_again_and_again_gets_no_ranks_any_more() {
    let Some(net) = net(4) else { return };
    let mut cluster = Cluster::new(Some(net), 3, &["layout.dp=3", "guard.evict_after=2", STEPS]);
    let mut controller = cluster.controller();
    let mut agents: Vec<_> = (1..4).map(|host| cluster.agent(host, 1, &[])).collect();
    controller.wait_for_step(3);
    for time in 1..=2 {
        agents[1].signal(Signal::KILL);
        controller.wait_for(|line| line.starts_with("trouble ") && line.contains("host h2 is gone"));
        if time == 2 {
            let reason = "place nothing on host h2 any more, because 2 failures there within";
            controller.wait_for(|line| line.contains(reason));
        }
        controller.wait_for(|line| line.starts_with("world ") && line.contains(" of 2 ranks"));
        // Back at once: used after the first time, and only heard after the second.
        agents[1] = cluster.agent(2, 1, &[]);
        controller.wait_for(|line| line.contains("host h2 is here"));
        if time == 1 {
            controller.wait_for(|line| line.starts_with("world ") && line.contains(" of 3 ranks"));
            controller.wait_for(|line| line.starts_with("step "));
        }
    }
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    let last = out.stdout.lines().rfind(|line| line.starts_with("world ")).unwrap();
    assert!(last.contains(" of 2 ranks"), "{last}");
    for agent in agents {
        agent.end().expect(0);
    }
}

#[test]
fn ranks_of_a_host_that_stays_cut_off_end_by_themselves() {
    let Some(net) = net(3) else { return };
    let mut cluster = Cluster::new(Some(net), 2, &["layout.dp=2", STEPS]);
    let mut controller = cluster.controller();
    let mut agents = [cluster.agent(1, 1, &["--idle-limit-s", "1"]), cluster.agent(2, 1, &[])];
    let pids = controller.ranks(2);
    controller.wait_for_step(3);
    cluster.plug(1, false);
    controller.wait_for(|line| line.contains("host h1 is gone"));
    assert!(pids.iter().all(|pid| runs(*pid)), "fenced, and alive: {pids:?}");
    agents[0].wait_for(|line| line.contains("the 1 ranks of this host are ended (--idle-limit-s)"));
    let deadline = Instant::now() + Duration::from_secs(20);
    while pids.iter().filter(|pid| runs(**pid)).count() > 1 {
        assert!(Instant::now() < deadline, "{pids:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Its agent lives, and gets new ones.
    cluster.plug(1, true);
    controller.wait_for(|line| line.contains("host h1 is here"));
    controller.wait_for(|line| line.starts_with("world ") && line.contains(" of 2 ranks"));
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    for agent in agents {
        agent.end().expect(0);
    }
}

#[test]
fn a_controller_that_is_cut_off_waits_and_the_ranks_step_on() {
    let Some(net) = net(3) else { return };
    let mut cluster = Cluster::new(Some(net), 2, &["layout.dp=2", STEPS]);
    let mut controller = cluster.controller();
    let agents = [cluster.agent(1, 1, &[]), cluster.agent(2, 1, &[])];
    controller.wait_for_step(3);
    cluster.plug(0, false);
    controller.wait_for(|line| line.contains("no agent is heard: this side may be cut off"));
    // Longer than any limit.
    std::thread::sleep(Duration::from_millis(1500));
    cluster.plug(0, true);
    let out = controller.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    assert!(out.stdout.contains("restarts 0"), "{out}");
    for agent in agents {
        agent.end().expect(0);
    }
}

#[test]
fn a_controller_on_another_host_stands_by_and_takes_over() {
    let Some(net) = net(3) else { return };
    let mut cluster = Cluster::new(Some(net), 2, &["layout.dp=2", STEPS]);
    let mut first = cluster.controller();
    cluster.another(1, &[]).end().expect(2).says(&["a controller is at work", &cluster.at, "--standby"]);
    let mut second = cluster.another(1, &["--standby"]);
    second.wait_for(|line| line.contains("takes over when it is dead"));
    cluster.at = format!("{},{}", cluster.address(0), cluster.address(1));
    let agents = [cluster.agent(1, 1, &[]), cluster.agent(2, 1, &[])];
    first.wait_for_step(3);
    let killed = Instant::now();
    first.signal(Signal::KILL);
    drop(first.end());
    second.wait_for(|line| line.contains("controller of epoch 2: agents call"));
    let listens = killed.elapsed();
    println!("killed; another listens after {listens:?}, hears a step after {:?}", next_step(&mut second, killed));
    let out = second.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    assert!(out.stdout.contains("restarts 0"), "{out}");
    for agent in agents {
        let out = agent.end().expect(0);
        assert!(out.stdout.contains("of epoch 2 is heard"), "{out}");
    }
}

/// As another machine sees the run's folder: it has been started at another time, and locks are not shared.
const ELSEWHERE: &str =
    "mount --bind boot /proc/sys/kernel/random/boot_id && mount --bind lock run/run.lock && exec \"$@\"";

#[test]
fn a_lease_passes_to_another_machine_when_it_is_not_renewed_and_the_earlier_holder_steps_back() {
    let Some(net) = net(3) else { return };
    let mut cluster = Cluster::new(Some(net), 2, &["layout.dp=2", STEPS]);
    cluster.lab.write("boot", "another machine\n");
    cluster.lab.write("lock", "");
    let mut first = cluster.controller();
    let elsewhere = |more: &[&str]| {
        let mut command = cluster.net.as_ref().unwrap().command(1, "sh".as_ref());
        command.args(["-c", ELSEWHERE, "sh", env!("CARGO_BIN_EXE_lockstep")]);
        command.args(cluster.controller_args(&cluster.address(1), more));
        cluster.lab.start_command(command)
    };
    // It is renewed.
    elsewhere(&[]).end().expect(2).says(&["a controller is at work", &cluster.address(0), "--standby"]);
    let mut second = elsewhere(&["--standby"]);
    second.wait_for(|line| line.contains("takes over when it is dead"));
    let both = format!("{},{}", cluster.address(0), cluster.address(1));
    cluster.at = both;
    let agents = [cluster.agent(1, 1, &[]), cluster.agent(2, 1, &[])];
    first.wait_for_step(3);
    // Neither dead nor alive.
    let stopped = Instant::now();
    first.signal(Signal::STOP);
    second.wait_for(|line| line.contains("controller of epoch 2: agents call"));
    assert!(stopped.elapsed() > Duration::from_secs(2), "the lease had a term: {:?}", stopped.elapsed());
    first.signal(Signal::CONT);
    let deposed = first.end();
    assert_ne!(deposed.code(), Some(0), "{deposed}");
    deposed.says(&["has taken over with epoch 2", "leaves the ranks at work"]);
    let out = second.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    assert!(out.stdout.contains("restarts 0"), "{out}");
    for agent in agents {
        agent.end().expect(0);
    }
}
