//! `[guard]`: the limits by which failures are noticed and answered. None of them changes a number of the run.

use crate::error::SpecError;
use crate::faults::Faults;
use crate::runfile::Values;

/// `[guard]`, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct Guard {
    /// A rank process says that it lives so often.
    pub beat_ms: u64,
    /// A process that was silent for so long is taken for dead.
    pub heartbeat_timeout_ms: u64,
    /// A process that the system shows as stopped is taken for dead after so long.
    pub stopped_timeout_ms: u64,
    /// No step for this many times the longest step seen is a hang.
    pub progress_factor: f64,
    /// But never before so long.
    pub progress_floor_ms: u64,
    /// All ranks wait, and no byte comes or goes at any of them, for so long and the longest step: a hang.
    pub still_floor_ms: u64,
    /// A world must have its links and its state within this time.
    pub assemble_timeout_ms: u64,
    /// Recoveries within the window before the run gives up.
    pub restarts_max: usize,
    /// The window.
    pub restarts_window_s: u64,
    /// Processes that wait to take a place.
    pub spares: usize,
    /// While they wait they compute gradients of the step after each checkpoint again.
    pub spares_check: bool,
    /// Failures of a host within the window before nothing is placed there any more.
    pub evict_after: usize,
    /// How long the place of a process that died stays empty; 0: a new one is started at once.
    pub respawn_after_ms: u64,
    /// Each rank hashes what it wrote, and looks again before the next step is committed.
    pub hash_state: bool,
    /// After a step without a number so many batches are left out from its own on, and those back to the newest checkpoint; 0:
    /// the run ends.
    pub skip_batches: u64,
    /// Every so many steps gradients are computed by another rank, too, and applied if both have the same; 0: never.
    pub recompute_every: u64,
}

/// A year in milliseconds: the longest time that a key may ask for, so that sums of times are times.
pub const TIME_MAX_MS: u64 = 31_536_000_000;

/// That a key's time is at most a year.
///
/// # Errors
/// That it is longer.
pub(crate) fn at_most_a_year(key: &str, value: u64) -> Result<(), SpecError> {
    let most = if key.ends_with("_s") { TIME_MAX_MS / 1000 } else { TIME_MAX_MS };
    if value <= most {
        return Ok(());
    }
    Err(SpecError::law(
        format!("{key} = {value} is more than a year"),
        format!("{key} is at most {most}"),
        format!("set {key} to {most} or less"),
    ))
}

/// Most processes that wait.
const SPARES_MAX: usize = 64;

pub(crate) fn guard(values: &Values) -> Result<Guard, SpecError> {
    let mut faults = Faults::default();
    let count = |faults: &mut Faults, path| faults.or_default(values.need(path));
    let ms = |faults: &mut Faults, path| count(faults, path) as u64;
    let guard = Guard {
        beat_ms: ms(&mut faults, "guard.beat_ms"),
        heartbeat_timeout_ms: ms(&mut faults, "guard.heartbeat_timeout_ms"),
        stopped_timeout_ms: ms(&mut faults, "guard.stopped_timeout_ms"),
        progress_factor: values.float("guard.progress_factor").expect("has a default"),
        progress_floor_ms: ms(&mut faults, "guard.progress_floor_ms"),
        still_floor_ms: ms(&mut faults, "guard.still_floor_ms"),
        assemble_timeout_ms: ms(&mut faults, "guard.assemble_timeout_ms"),
        restarts_max: count(&mut faults, "guard.restarts_max"),
        restarts_window_s: ms(&mut faults, "guard.restarts_window_s"),
        spares: count(&mut faults, "guard.spares"),
        spares_check: values.bool("guard.spares_check").expect("has a default"),
        evict_after: count(&mut faults, "guard.evict_after"),
        respawn_after_ms: ms(&mut faults, "guard.respawn_after_ms"),
        hash_state: values.bool("guard.hash_state").expect("has a default"),
        skip_batches: ms(&mut faults, "guard.skip_batches"),
        recompute_every: ms(&mut faults, "guard.recompute_every"),
    };
    law(&guard, &mut faults);
    faults.end(guard)
}

fn law(guard: &Guard, faults: &mut Faults) {
    let least = [
        ("guard.beat_ms", guard.beat_ms, 1),
        ("guard.stopped_timeout_ms", guard.stopped_timeout_ms, 1),
        ("guard.progress_floor_ms", guard.progress_floor_ms, 1),
        ("guard.still_floor_ms", guard.still_floor_ms, 1),
        ("guard.assemble_timeout_ms", guard.assemble_timeout_ms, 1),
        ("guard.evict_after", guard.evict_after as u64, 1),
    ];
    for (key, value, least) in least.into_iter().filter(|(_, value, least)| value < least) {
        faults.law(
            format!("{key} = {value}"),
            format!("{key} is a limit"),
            format!("set it to at least {least}, or leave it unset"),
        );
    }
    let longest = [
        ("guard.beat_ms", guard.beat_ms),
        ("guard.heartbeat_timeout_ms", guard.heartbeat_timeout_ms),
        ("guard.stopped_timeout_ms", guard.stopped_timeout_ms),
        ("guard.progress_floor_ms", guard.progress_floor_ms),
        ("guard.still_floor_ms", guard.still_floor_ms),
        ("guard.assemble_timeout_ms", guard.assemble_timeout_ms),
        ("guard.restarts_window_s", guard.restarts_window_s),
        ("guard.respawn_after_ms", guard.respawn_after_ms),
    ];
    for (key, value) in longest {
        faults.take(at_most_a_year(key, value));
    }
    if guard.spares > SPARES_MAX {
        faults.law(
            format!("guard.spares = {} processes would be started, to wait", guard.spares),
            format!("at most {SPARES_MAX} spares"),
            "set guard.spares to the failures that may come at once, such as 1",
        );
    }
    let (beat, timeout) = (guard.beat_ms, guard.heartbeat_timeout_ms);
    if timeout < beat.saturating_mul(3) {
        faults.law(
            format!("guard.heartbeat_timeout_ms = {timeout} is less than three beats"),
            format!("guard.beat_ms {beat}, guard.heartbeat_timeout_ms {timeout}"),
            format!("set guard.heartbeat_timeout_ms to at least {}, or lower guard.beat_ms", beat.saturating_mul(3)),
        );
    }
    if guard.progress_factor < 1.0 {
        faults.law(
            format!("guard.progress_factor = {} would call an ordinary step a hang", guard.progress_factor),
            "the longest step seen times this factor is the limit of a step",
            "set guard.progress_factor to such as 10",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::Run;

    #[test]
    fn spares_check_where_they_can() {
        let text = "[model]\npreset = \"nano\"\nexperts = 4\nexperts_per_token = 2\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n[grid]\ndp = 2\nep = 2\n[checkpoint]\nevery = 2\n";
        let of = |sets: &[&str]| {
            let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
            Run::parse(text, "t", &sets, 1).unwrap().spares_check()
        };
        assert_eq!(of(&[]), Ok(false));
        assert_eq!(of(&["guard.spares=1"]), Ok(true));
        assert_eq!(of(&["guard.spares=1", "guard.spares_check=false", "checkpoint.every=0"]), Ok(false));
        assert!(of(&["guard.spares=1", "checkpoint.every=0"]).unwrap_err().contains("checkpoint.every = 0"));
        assert!(of(&["guard.spares=1", "layout.dp=2", "layout.ep=2"]).unwrap_err().contains("layout.ep"));
    }

    #[test]
    fn a_time_is_at_most_a_year() {
        let text =
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";
        let parse = |set: String| Run::parse(text, "t", &[set], 1).map(drop).map_err(|e| e.to_string());
        let ms = ["guard.heartbeat_timeout_ms", "layout.exchange_timeout_ms", "checkpoint.stagger_ms"];
        for (key, most) in
            ms.map(|key| (key, 31_536_000_000_u64)).into_iter().chain([("guard.restarts_window_s", 31_536_000)])
        {
            assert_eq!(parse(format!("{key}={most}")), Ok(()));
            let refused = parse(format!("{key}={}", most + 1)).unwrap_err();
            assert!(refused.contains(key) && refused.contains("more than a year"), "{refused}");
        }
    }
}
