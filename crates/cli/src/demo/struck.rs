//! The demo's last run: one of its processes is killed and a bit of its state flips, and it goes on.

use std::time::{Duration, Instant};

use events::Event;
use rustix::process::{Pid, Signal, kill_process};
use train::TrainError;
use train::launch::Request;

use super::{Ran, one};
use crate::show::line;
use crate::trouble;

/// What the run is called.
pub const NAME: &str = "the second one, struck";
/// How long the person may strike first.
const INVITATION: Duration = Duration::from_secs(15);

/// Runs it: the person is invited to kill a process, else the demo does; near the end a bit of a moment flips.
///
/// # Errors
/// What ended the run.
pub fn run(mut request: Request) -> Result<Ran, TrainError> {
    let steps = request.run.train.steps;
    // Late enough that whoever wants to strike first can, and before the flip.
    let (last_call, flip) = (steps * 2 / 3, (steps * 5 / 6).max(1));
    request.inject = format!("flip:0@{flip}");
    line(&format!("  a bit of rank 0's optimizer state will flip before step {flip}"));
    line(&format!("  kill -9 any of these processes within {} s; else the demo kills one", INVITATION.as_secs()));
    let mut alive: Vec<u32> = Vec::new();
    let (mut began, mut troubled, mut struck) = (None, false, false);
    let mut also = |event: &Event| {
        match event {
            Event::RankStarted { pid, .. } => alive.push(*pid),
            Event::Trouble(_) => troubled = true,
            Event::Step(step) => {
                let began: &Instant = began.get_or_insert_with(Instant::now);
                if !troubled && !struck && (began.elapsed() >= INVITATION || step.step >= last_call) {
                    struck = true;
                    kill(alive.last());
                }
            }
            _ => {}
        }
        if let Some(text) = trouble::text(event).filter(|_| !matches!(event, Event::World(_) | Event::Decided { .. })) {
            line(&format!("  {text}"));
        }
    };
    let ran = one(NAME, &request, &mut also)?;
    let parts: Vec<_> = ran.summary.time.iter().map(|(class, s)| format!("{class} {s:.2} s")).collect();
    line(&format!("  wall {:.2} s = {}", ran.summary.wall, parts.join(" + ")));
    Ok(ran)
}

/// Ends a process that this demo has started.
fn kill(pid: Option<&u32>) {
    let Some(pid) = pid.and_then(|pid| Pid::from_raw(*pid as i32)) else { return };
    line(&format!("  nobody did: kill -9 {}", pid.as_raw_nonzero()));
    if let Err(e) = kill_process(pid, Signal::KILL) {
        line(&format!("  it could not be killed: {e}"));
    }
}
