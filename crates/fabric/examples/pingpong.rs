//! Latency and bandwidth of an all_reduce between two ranks, per transport.
//!
//! `cargo run --release -p lockstep-fabric --example pingpong [MiB] [nosum]`
//!
//! Processes for `shm` and `tcp`, threads for `threads`. Bandwidth is vector bytes over
//! time ("algorithm") and bytes that each rank sends over time ("wire"; for two ranks the
//! same number: half the vector to reduce, half to gather).

use fabric::{Endpoint, FabricOptions, Group, ReducePlan, ShmWorld, TcpListenerHandle, threads};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const TOKEN: [u8; 32] = *b"pingpong's token, not a secret!!";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let mib = args.get(1).and_then(|a| a.parse().ok()).unwrap_or(64);
    let mut options = FabricOptions { checksum: !args.iter().any(|a| a == "nosum"), ..FabricOptions::default() };
    if let Some(kib) = std::env::var("RING_KIB").ok().and_then(|v| v.parse::<usize>().ok()) {
        options.ring_bytes = kib << 10;
    }
    match std::env::var("PINGPONG_CHILD").as_deref() {
        Ok("shm") => {
            let fd = std::env::var("PINGPONG_FD").expect("set by the parent").parse().expect("a number");
            measure("shm", mib, &ShmWorld::attach(fd, 1, 2, &options).expect("attach"));
        }
        Ok("tcp") => {
            let (handle, addr) = TcpListenerHandle::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).expect("bind");
            println!("{addr}");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).expect("the parent's address");
            let parent: SocketAddr = line.trim().parse().expect("an address");
            measure("tcp", mib, &handle.connect(1, &[parent, addr], &TOKEN, &options).expect("connect"));
        }
        _ => {
            run_threads(mib, &options);
            run_shm(mib, &options);
            run_tcp(mib, &options);
        }
    }
}

fn run_threads(mib: usize, options: &FabricOptions) {
    let ends = threads(2, options).expect("memory");
    std::thread::scope(|scope| {
        for end in &ends {
            scope.spawn(move || measure("threads", mib, end));
        }
    });
}

fn child(kind: &str, fd: i32) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(std::env::args().skip(1)).env("PINGPONG_CHILD", kind).env("PINGPONG_FD", fd.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a child")
}

fn run_shm(mib: usize, options: &FabricOptions) {
    let world = ShmWorld::create(2, options).expect("memory");
    let mut child = child("shm", world.fd());
    measure("shm", mib, &ShmWorld::attach(world.fd(), 0, 2, options).expect("attach"));
    child.wait().expect("the child");
}

fn run_tcp(mib: usize, options: &FabricOptions) {
    let (handle, addr) = TcpListenerHandle::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).expect("bind");
    let mut child = child("tcp", -1);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("the child's address");
    writeln!(child.stdin.as_mut().expect("piped"), "{addr}").expect("tell the child");
    let addrs = [addr, line.trim().parse().expect("an address")];
    measure("tcp", mib, &handle.connect(0, &addrs, &TOKEN, options).expect("connect"));
    child.wait().expect("the child");
}

fn measure(name: &str, mib: usize, end: &Endpoint) {
    let group = Group::new(0, "world", vec![0, 1]);
    let small = each(end, &group, 256, 2_000);
    let len = mib << 18;
    let big = each(end, &group, len, 5);
    let small_median = small[small.len() / 2] * 1e6;
    let big_median = big[big.len() / 2];
    if end.rank() == 0 {
        println!(
            "{name:>8}: all_reduce 1 KiB {small_median:8.1} us | {mib} MiB {:8.1} ms {:6.2} GB/s",
            big_median * 1e3,
            len as f64 * 4.0 / big_median / 1e9
        );
    }
    end.barrier(&group).expect("barrier");
}

/// Seconds of `rounds` all_reduces, sorted.
fn each(end: &Endpoint, group: &Group, len: usize, rounds: usize) -> Vec<f64> {
    let plan = ReducePlan::even(2, 2, len);
    let data = vec![1.0f32; len];
    let mut out = vec![0.0f32; len];
    let me = end.rank() as usize;
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            end.barrier(group).expect("barrier");
            let start = Instant::now();
            end.all_reduce(group, &plan, &[(me..me + 1, &data)], &mut out).expect("all_reduce");
            start.elapsed().as_secs_f64()
        })
        .collect();
    assert!(out.iter().all(|&x| x == 2.0), "wrong sum");
    times.sort_by(f64::total_cmp);
    times
}
