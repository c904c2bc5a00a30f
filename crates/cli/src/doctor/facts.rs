//! What the system tells about this machine.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use kernels::Simd;
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_getres, clock_gettime};

/// Readings of the clock.
const READINGS: u64 = 2_000;

/// The machine, as far as it tells. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The model of the CPU.
    pub cpu: String,
    /// Cores of the machine.
    pub cores_there: usize,
    /// Cores that this process may use.
    pub cores_allowed: Vec<usize>,
    /// CPU time that the control group grants, in cores.
    pub cores_granted: Option<f64>,
    /// Programs that wanted a core in the last minute.
    pub load: f64,
    /// Instruction paths of the kernels, narrowest first.
    pub simd: Vec<String>,
    /// Memory of the machine, or what the control group leaves.
    pub memory: u64,
    /// Of that, what is free or can be freed.
    pub memory_available: u64,
    /// Size of /dev/shm and what is free there, where it is mounted.
    pub shm: Option<(u64, u64)>,
    /// Why anonymous shared memory cannot be made, if so.
    pub memfd: Option<String>,
    /// Files that a process may have open; none: any number.
    pub open_files: Option<u64>,
    /// Why a connection to this machine itself fails, if so.
    pub loopback: Option<String>,
    /// Resolution of the monotonic clock, nanoseconds.
    pub clock_step_ns: u64,
    /// Time that a reading takes, nanoseconds.
    pub clock_reading_ns: u64,
    /// The clock ran backwards.
    pub clock_backwards: bool,
    /// What drives it.
    pub clock_source: String,
}

impl Facts {
    /// Asks the system.
    pub fn gather() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let cpu = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
        let meminfo = read("/proc/meminfo");
        let kib =
            |key: &str| meminfo.lines().find_map(|l| l.strip_prefix(key)?.split_whitespace().next()?.parse().ok());
        let (total, available) = (1024 * kib("MemTotal:").unwrap_or(0), 1024 * kib("MemAvailable:").unwrap_or(0));
        let group = |name: &str| read(&format!("/sys/fs/cgroup/{name}"));
        let limit: u64 = group("memory.max").trim().parse().unwrap_or(u64::MAX);
        let used: u64 = group("memory.current").trim().parse().unwrap_or(0);
        let (clock_reading_ns, clock_backwards) = clock();
        let step = clock_getres(ClockId::Monotonic);
        Self {
            cpu: cpu.map_or("unknown".into(), |(_, name)| name.trim().to_owned()),
            cores_there: cpuinfo.lines().filter(|l| l.starts_with("processor")).count(),
            cores_allowed: train::pin::allowed(),
            cores_granted: granted(&group("cpu.max")),
            load: read("/proc/loadavg").split(' ').next().and_then(|l| l.parse().ok()).unwrap_or(0.0),
            simd: Simd::available().map(|simd| simd.to_string()).collect(),
            memory: total.min(limit),
            memory_available: available.min(limit.saturating_sub(used)),
            shm: rustix::fs::statvfs("/dev/shm").ok().map(|s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize)),
            memfd: memfd().err().map(|e| e.to_string()),
            open_files: getrlimit(Resource::Nofile).current,
            loopback: loopback().err().map(|e| e.to_string()),
            clock_step_ns: step.tv_sec as u64 * 1_000_000_000 + step.tv_nsec as u64,
            clock_reading_ns,
            clock_backwards,
            clock_source: read("/sys/devices/system/clocksource/clocksource0/current_clocksource").trim().to_owned(),
        }
    }
}

/// The text of a file of the system; empty where there is none.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Cores of a control group's `cpu.max`, such as `150000 100000`; none for `max`.
fn granted(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

/// As the fabric makes it.
fn memfd() -> io::Result<()> {
    let fd = rustix::fs::memfd_create("lockstep-doctor", MemfdFlags::ALLOW_SEALING)?;
    Ok(rustix::fs::ftruncate(&fd, 1 << 20)?)
}

fn loopback() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let _out = TcpStream::connect(listener.local_addr()?)?;
    listener.accept().map(drop)
}

/// Nanoseconds of a reading, and whether one was before the last.
fn clock() -> (u64, bool) {
    let ns = || {
        let now = clock_gettime(ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    };
    let (first, mut last, mut backwards) = (ns(), 0, false);
    for _ in 0..READINGS {
        let now = ns();
        backwards |= now < last;
        last = now;
    }
    (last.saturating_sub(first) / READINGS, backwards)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_cores() {
        assert_eq!(granted("150000 100000\n"), Some(1.5));
        assert_eq!(granted("max 100000\n"), None);
        assert_eq!(granted(""), None);
    }

    #[test]
    fn this_machine_tells_what_is_needed() {
        let facts = Facts::gather();
        assert!(!facts.cores_allowed.is_empty() && facts.cores_there >= facts.cores_allowed.len(), "{facts:?}");
        assert!(facts.memory > 0 && facts.memory_available > 0 && facts.memory_available <= facts.memory, "{facts:?}");
        assert!(facts.simd.contains(&"scalar".into()) && !facts.clock_backwards, "{facts:?}");
    }
}
