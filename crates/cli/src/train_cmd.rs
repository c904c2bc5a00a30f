//! `lockstep train`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kernels::Simd;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use train::TrainError;
use train::launch::{self, Hosts, Request, Resuming, Window};
use train::rank::Ended;

use crate::RunArgs;
use crate::show::Show;

/// Exit code of a run that was stopped on request, after a checkpoint.
const STOPPED: u8 = 3;

/// What [`Args::resume`] goes on from.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Which {
    /// The newest checkpoint.
    Newest,
    /// The newest one of which all steps were checked.
    Checked,
}

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// The run's folder [default: runs/NAME-UTC]
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Go on from the newest checkpoint in the run's folder, under any layout; --resume=checked: from the newest one of which all
    /// steps were checked (guard.recompute_every, guard.spares_check).
    #[arg(long, requires = "run_dir", value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "newest")]
    resume: Option<Which>,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
    /// Record a hash of every tensor each N steps; 0: never.
    #[arg(long, value_name = "N", default_value_t = 0)]
    digest_every: u64,
    /// Instruction path of the kernels: scalar, avx2, avx512; the bits are the same [default: the widest there is]
    #[arg(long)]
    simd: Option<String>,
    /// Print where a step's time goes, and write a trace of all ranks to trace/trace.json in the run's folder.
    #[arg(long)]
    profile: bool,
    /// With --profile: steps at the start of the run that do not count.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "profile")]
    profile_warmup: u64,
    /// With --profile: steps that count, at most.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "profile")]
    profile_steps: u64,
    /// Deliberate faults that the run must survive: `kill:R@S[:load]`, stop:R@S, nan:R@S, poison:R@S, diskfull:R@S,
    /// flip:R@S[:moment|weight|message|gradient|device], `slow:R@SxF[:N]`, partition:A-B@S, controller@S, clock:+SECONDS@S,
    /// clock:-SECONDS@S, random:seed=N,every=5s (R a rank, S a step; separated by commas).
    #[arg(long, value_name = "FAULTS", default_value = "", hide_default_value = true)]
    inject: String,
    /// A deliberate fault, for proofs.
    #[arg(long, hide = true)]
    mutant: Option<String>,
}

impl Args {
    /// For what is said beside a run.
    pub fn show(&self) -> Show {
        Show::new(self.json, 0)
    }
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    go(args, None)
}

/// Trains on this machine, or where agents call from.
pub fn go(args: &Args, hosts: Option<Hosts>) -> Result<u8, TrainError> {
    let run = match hosts {
        None => args.run.load()?,
        // What ranks of several hosts need unless the person says otherwise.
        Some(_) => args.run.load_with("layout.transport=tcp")?,
    };
    let simd = match &args.simd {
        Some(word) => word.parse()?,
        None => Simd::detect(),
    };
    let mutant = args.mutant.as_deref().map(str::parse).transpose()?;
    let stop = stop_flag()?;
    let folder = args.run_dir.clone().unwrap_or_else(|| default_folder(&args.run.name()));
    let show = Show::new(args.json, run.train.steps);
    let mut head = Vec::new();
    if !args.json {
        let parameters = spec::tensors::parameters(&run.model);
        head.push(format!(
            "{parameters} parameters | {} | grid dp{}{} x tp{}, {} microbatches of {} sequences per cell | {simd} | numerics {}",
            run.layout,
            run.grid.dp,
            if run.grid.cp > 1 { format!(" x cp{}", run.grid.cp) } else { String::new() },
            run.grid.tp,
            run.grid.microbatches,
            run.grid.microbatch,
            kernels::NUMERICS_VERSION
        ));
        head.push(format!("run directory {}", folder.display()));
    }
    let request = Request {
        run,
        simd,
        folder,
        resume: match args.resume {
            None => Resuming::No,
            Some(Which::Newest) => Resuming::Newest,
            Some(Which::Checked) => Resuming::Checked,
        },
        digest_every: args.digest_every,
        profile: args.profile.then_some(Window { warmup: args.profile_warmup, steps: args.profile_steps }),
        stop,
        program: own_binary()?,
        inject: args.inject.clone(),
        hosts,
    };
    // Who is refused is not told of a folder that is not made.
    let summary = launch::train_mutant(&request, mutant, &mut |event| {
        head.drain(..).for_each(|text| show.line(&text));
        show.event(event);
    })?;
    show.summary(&summary);
    Ok(match summary.ended {
        Ended::Finished | Ended::Exhausted(_) => 0,
        Ended::Stopped(_) => STOPPED,
    })
}

/// Set by SIGTERM, SIGINT and SIGHUP (the terminal or the ssh session is gone).
pub fn stop_flag() -> Result<Arc<AtomicBool>, TrainError> {
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let catch = |signal: i32, flag: &Arc<AtomicBool>| {
        signal_hook::flag::register(signal, flag.clone())
            .map_err(|e| TrainError::Internal(format!("cannot catch signal {signal}: {e}")))
    };
    for signal in [SIGTERM, SIGINT] {
        // The second one ends the process at once; the ranks end with it.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())
            .map_err(|e| TrainError::Internal(format!("cannot catch signal {signal}: {e}")))?;
        catch(signal, &asked)?;
        catch(signal, &stop)?;
    }
    // A hangup comes more than once, from the terminal and from the shell. `nohup` asks for none of this.
    if !is_ignored(SIGHUP) {
        catch(SIGHUP, &stop)?;
    }
    Ok(stop)
}

/// Whether this process was started with the signal ignored, as `nohup` does with SIGHUP.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// This binary, which is also the rank.
pub fn own_binary() -> Result<PathBuf, TrainError> {
    std::env::current_exe().map_err(|e| TrainError::Internal(format!("this binary's path is unknown: {e}")))
}

/// `runs/NAME-20260101T120000Z`, with a number behind it if that exists.
pub fn default_folder(name: &str) -> PathBuf {
    let base = format!("{name}-{}", utc_now());
    let named = |n: u32| PathBuf::from("runs").join(if n == 1 { base.clone() } else { format!("{base}-{n}") });
    (1..).map(named).find(|path| !path.exists()).expect("there are many numbers")
}

/// Now, as 20260101T120000Z.
pub fn utc_now() -> String {
    utc(events::wall::Wall::default().since_1970().as_secs())
}

/// Seconds since 1970 as 20260101T120000Z (civil-from-days of the proleptic Gregorian calendar).
fn utc(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86_400) as i64, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates_are_right_on_leap_days_and_year_ends() {
        assert_eq!(utc(0), "19700101T000000Z");
        assert_eq!(utc(951_782_400), "20000229T000000Z");
        assert_eq!(utc(1_767_225_599), "20251231T235959Z");
        assert_eq!(utc(1_796_000_000), "20261130T005320Z");
    }
}
