//! Runs one scenario on every transport: threads, and child processes over shared memory
//! and TCP. A child is this test binary again, told by its environment which rank it plays.

#![allow(dead_code)] // each test binary uses its own half

pub mod sums;

use fabric::{Endpoint, FabricOptions, ShmWorld, TcpListenerHandle, threads};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

pub const TOKEN: [u8; 32] = *b"a token of the tests, no secret!";
pub const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// How a child ends that has played its role to the end; a test binary never does by itself.
const PLAYED: i32 = 42;
const TRANSPORTS: [&str; 3] = ["threads", "shm", "tcp"];

/// What all ranks do, on any transport.
#[derive(Clone, Copy)]
pub struct Scenario {
    pub name: &'static str,
    pub world: u32,
    pub options: fn() -> FabricOptions,
    pub body: fn(&Endpoint),
    /// The rank that ends by SIGKILL; such a scenario needs processes.
    pub killed: Option<u32>,
}

/// Runs `scenario` on all transports; panics if any rank does.
pub fn everywhere(scenario: &Scenario) {
    if scenario.killed.is_none() {
        let ends = threads(scenario.world, &(scenario.options)()).expect("memory");
        std::thread::scope(|scope| {
            for end in ends {
                scope.spawn(move || (scenario.body)(&end));
            }
        });
    }
    in_processes(scenario, "shm");
    in_processes(scenario, "tcp");
}

fn in_processes(scenario: &Scenario, transport: &str) {
    let world = ShmWorld::create(scenario.world, &(scenario.options)()).expect("memory");
    let fd = world.fd();
    let mut children: Vec<Child> = (0..scenario.world)
        .map(|rank| {
            let role = format!("{transport} {} {rank} {} {fd}", scenario.name, scenario.world);
            Command::new(std::env::current_exe().expect("own path"))
                .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
                .env("FABRIC_TEST_ROLE", role)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("start a child")
        })
        .collect();
    if transport == "tcp" {
        let addrs: Vec<String> = children.iter_mut().map(address_of).collect();
        for child in &mut children {
            writeln!(child.stdin.as_mut().expect("piped"), "{}", addrs.join(" ")).expect("tell a child");
        }
    }
    for (rank, child) in children.iter_mut().enumerate() {
        let status = child.wait().expect("a child's end");
        let wanted = if scenario.killed == Some(rank as u32) {
            status.signal() == Some(9)
        } else {
            status.code() == Some(PLAYED)
        };
        assert!(wanted, "{} over {transport}: rank {rank} ended with {status}", scenario.name);
    }
}

fn address_of(child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
    for line in lines {
        if let Some((_, addr)) = line.expect("text").split_once("@address ") {
            return addr.to_string();
        }
    }
    panic!("a child ended before it said its address");
}

/// Plays the role that the environment names, if any. Call from a test named `child_entry`.
pub fn play(scenarios: &[Scenario]) {
    let Ok(role) = std::env::var("FABRIC_TEST_ROLE") else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [transport, name, rank, world, fd] = words[..] else { panic!("role {role:?}") };
    let (rank, world): (u32, u32) = (rank.parse().expect("rank"), world.parse().expect("world"));
    let scenario = scenarios.iter().find(|s| s.name == name).expect("a known scenario");
    let options = (scenario.options)();
    let end = match transport {
        "shm" => ShmWorld::attach(fd.parse().expect("fd"), rank, world, &options).expect("attach"),
        _ => {
            let (handle, addr) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
            println!("@address {addr}");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).expect("the addresses");
            let addrs: Vec<SocketAddr> = line.split_whitespace().map(|a| a.parse().expect("an address")).collect();
            handle.connect(rank, &addrs, &TOKEN, &options).expect("connect")
        }
    };
    (scenario.body)(&end);
    drop(end);
    std::process::exit(PLAYED);
}

/// Endpoints in this process over `transport`, one per element of `options`.
pub fn local(transport: &str, options: &[FabricOptions]) -> Vec<Endpoint> {
    let world = options.len() as u32;
    if transport != "tcp" {
        let shared = ShmWorld::create(world, &options[0]).expect("memory");
        return (options.iter().enumerate())
            .map(|(rank, options)| ShmWorld::attach(shared.fd(), rank as u32, world, options).expect("attach"))
            .collect();
    }
    let (handles, addrs): (Vec<_>, Vec<_>) =
        options.iter().map(|_| TcpListenerHandle::bind(LOCALHOST).expect("bind")).unzip();
    std::thread::scope(|scope| {
        let addrs = &addrs;
        let joins: Vec<_> = (handles.into_iter().zip(options).enumerate())
            .map(|(rank, (handle, options))| {
                scope.spawn(move || handle.connect(rank as u32, addrs, &TOKEN, options).expect("connect"))
            })
            .collect();
        joins.into_iter().map(|join| join.join().expect("connected")).collect()
    })
}

/// Runs `body` for `shm` (which threads share) and `tcp`, with endpoints in this process.
pub fn both(body: impl Fn(&str)) {
    TRANSPORTS[1..].iter().for_each(|transport| body(transport));
}
