//! What the facts mean: pure judgement, with a remedy for each problem.

use super::facts::Facts;

/// Memory below which hardly anything can be trained.
const MEMORY_MIN: u64 = 1 << 30;
/// Open files with which ranks hardly start (a process has its standard ones, pipes to 8 ranks and sockets to them).
const FILES_MIN: u64 = 64;
/// Open files for a few hundred ranks over TCP.
const FILES_WANTED: u64 = 1024;
/// A reading of the clock that takes longer shows in profiles.
const READING_MAX_NS: u64 = 1_000;

/// One look at the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// What was found.
    pub found: String,
    /// What is wrong with it.
    pub problem: Option<Problem>,
}

/// Something that a person should mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Nothing can be trained before it is mended.
    pub fatal: bool,
    /// What it is.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

fn warn(what: impl Into<String>, remedy: impl Into<String>) -> Option<Problem> {
    Some(Problem { fatal: false, what: what.into(), remedy: remedy.into() })
}

fn fatal(what: impl Into<String>, remedy: impl Into<String>) -> Option<Problem> {
    Some(Problem { fatal: true, what: what.into(), remedy: remedy.into() })
}

/// All checks, in the order of the report.
pub fn judge(facts: &Facts) -> Vec<Check> {
    vec![
        cores(facts),
        load(facts),
        simd(facts),
        memory(facts),
        shared(facts),
        files(facts),
        loopback(facts),
        clock(facts),
    ]
}

fn cores(f: &Facts) -> Check {
    let (there, allowed) = (f.cores_there, f.cores_allowed.len());
    let problem = match f.cores_granted {
        Some(granted) if granted + 0.01 < allowed as f64 => warn(
            format!("{allowed} cores are allowed, but the control group grants the time of {granted:.1}"),
            format!(
                "raise its cpu.max, or set layout.threads and the number of ranks to at most {:.0} together",
                granted.max(1.0)
            ),
        ),
        _ if allowed < there => warn(
            format!("{allowed} of {there} cores may be used ({})", train::pin::named(&f.cores_allowed)),
            "widen `taskset` or the container's set of cores, if the others are meant for this too",
        ),
        _ => None,
    };
    Check { name: "cores", found: format!("{allowed} allowed of {there}, {}", f.cpu), problem }
}

fn load(f: &Facts) -> Check {
    let busy = f.load > 0.5 * f.cores_allowed.len() as f64;
    let problem = busy.then(|| Problem {
        fatal: false,
        what: format!("the load is {:.1}: other programs are at work", f.load),
        remedy: "stop them before measuring; ranks that share a core slow all others down".into(),
    });
    Check { name: "load", found: format!("{:.1} in the last minute", f.load), problem }
}

fn simd(f: &Facts) -> Check {
    let widest = f.simd.last().map_or("none", String::as_str);
    let problem = match widest {
        "scalar" | "none" => warn(
            "the CPU has no fused multiply-add on vectors: kernels run scalar, many times slower",
            "use a CPU with AVX2, or in a virtual machine pass the host's CPU through",
        ),
        _ => None,
    };
    Check { name: "simd", found: f.simd.join(", "), problem }
}

fn memory(f: &Facts) -> Check {
    let low = f.memory_available < MEMORY_MIN;
    let problem = low.then(|| Problem {
        fatal: false,
        what: format!("{} of memory are left", size(f.memory_available)),
        remedy: "end other programs, or raise the memory limit; `lockstep train` needs 16 bytes a parameter and its activations".into(),
    });
    Check { name: "memory", found: format!("{}, {} available", size(f.memory), size(f.memory_available)), problem }
}

fn shared(f: &Facts) -> Check {
    let shm = f.shm.map_or("no /dev/shm".into(), |(all, free)| format!("/dev/shm {}, {} free", size(all), size(free)));
    // The rings are memfds, which no mount limits; /dev/shm matters to other programs only.
    match &f.memfd {
        None => Check { name: "shared memory", found: format!("memfd works; {shm} (not used)"), problem: None },
        Some(e) => Check {
            name: "shared memory",
            found: format!("memfd fails; {shm}"),
            problem: warn(
                format!("shared memory cannot be made: memfd_create: {e}"),
                "allow memfd_create in the container's seccomp profile, or set layout.transport to tcp",
            ),
        },
    }
}

fn files(f: &Facts) -> Check {
    let limit = f.open_files.unwrap_or(u64::MAX);
    let remedy = format!("raise it, such as with `ulimit -n {FILES_WANTED}`");
    let problem = if limit < FILES_MIN {
        fatal(format!("a process may have {limit} files open, and ranks need {FILES_MIN}"), remedy)
    } else if limit < FILES_WANTED {
        let what = format!("a process may have {limit} files open: too few for hundreds of ranks over TCP");
        warn(what, remedy)
    } else {
        None
    };
    let found = f.open_files.map_or("any number".into(), |limit| format!("at most {limit}"));
    Check { name: "open files", found, problem }
}

fn loopback(f: &Facts) -> Check {
    match &f.loopback {
        None => Check { name: "loopback", found: "127.0.0.1 answers".into(), problem: None },
        Some(e) => Check {
            name: "loopback",
            found: "127.0.0.1 does not answer".into(),
            problem: warn(
                format!("a connection to 127.0.0.1 fails: {e}"),
                "bring the interface `lo` up, or keep layout.transport at shm",
            ),
        },
    }
}

fn clock(f: &Facts) -> Check {
    let source = if f.clock_source.is_empty() { "unknown source" } else { &f.clock_source };
    let problem = if f.clock_backwards {
        warn("the monotonic clock runs backwards", "choose another clock source under /sys/devices/system/clocksource")
    } else if f.clock_reading_ns > READING_MAX_NS {
        warn(
            format!("a reading of the clock takes {} ns with {source}: profiles are distorted", f.clock_reading_ns),
            "choose tsc or kvm-clock in /sys/devices/system/clocksource/clocksource0/current_clocksource",
        )
    } else {
        None
    };
    let (step, reading) = (f.clock_step_ns, f.clock_reading_ns);
    Check { name: "clock", found: format!("monotonic, steps of {step} ns, {reading} ns a reading, {source}"), problem }
}

/// Such as `12.3 GB`.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Facts {
        Facts {
            cpu: "a CPU".into(),
            cores_there: 4,
            cores_allowed: vec![0, 1, 2, 3],
            cores_granted: None,
            load: 0.1,
            simd: vec!["scalar".into(), "avx2".into()],
            memory: 16 << 30,
            memory_available: 12 << 30,
            shm: Some((64 << 20, 64 << 20)),
            memfd: None,
            open_files: Some(20_000),
            loopback: None,
            clock_step_ns: 1,
            clock_reading_ns: 30,
            clock_backwards: false,
            clock_source: "tsc".into(),
        }
    }

    #[test]
    fn a_sound_machine_has_no_problems() {
        assert!(judge(&sound()).iter().all(|check| check.problem.is_none()));
        let granted = Facts { cores_granted: Some(4.0), open_files: None, shm: None, ..sound() };
        assert!(judge(&granted).iter().all(|check| check.problem.is_none()));
    }

    #[test]
    fn every_problem_is_named_with_its_remedy() {
        let one = |change: &dyn Fn(&mut Facts)| {
            let mut facts = sound();
            change(&mut facts);
            let mut found: Vec<_> = judge(&facts).into_iter().filter(|check| check.problem.is_some()).collect();
            assert_eq!(found.len(), 1, "{found:?}");
            let check = found.remove(0);
            (check.name, check.problem.unwrap())
        };
        let is = |change: &dyn Fn(&mut Facts), name: &str, fatal: bool, words: &[&str]| {
            let (found, problem) = one(change);
            assert_eq!((found, problem.fatal), (name, fatal));
            let text = format!("{} {}", problem.what, problem.remedy);
            words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in {text}"));
        };
        is(&|f| f.cores_allowed = vec![1, 2], "cores", false, &["2 of 4 cores", "cores 1-2", "taskset"]);
        is(&|f| f.cores_granted = Some(1.5), "cores", false, &["time of 1.5", "cpu.max", "at most 2 together"]);
        is(&|f| f.load = 3.0, "load", false, &["load is 3.0", "stop them"]);
        is(&|f| f.simd = vec!["scalar".into()], "simd", false, &["scalar", "AVX2"]);
        is(&|f| f.memory_available = 5 << 20, "memory", false, &["5 MB", "memory limit"]);
        is(&|f| f.memfd = Some("denied".into()), "shared memory", false, &["denied", "layout.transport to tcp"]);
        is(&|f| f.open_files = Some(256), "open files", false, &["256", "ulimit -n 1024"]);
        is(&|f| f.open_files = Some(20), "open files", true, &["20 files", "ulimit"]);
        is(&|f| f.loopback = Some("refused".into()), "loopback", false, &["refused", "`lo`"]);
        is(&|f| f.clock_reading_ns = 5_000, "clock", false, &["5000 ns with tsc", "kvm-clock"]);
        is(&|f| f.clock_backwards = true, "clock", false, &["backwards"]);
    }
}
