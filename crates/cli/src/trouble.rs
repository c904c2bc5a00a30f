//! Trouble and recovery as lines.

use events::{Anatomy, Event, Trouble};

/// The line of an event about trouble; none for the others.
pub fn text(event: &Event) -> Option<String> {
    Some(match event {
        Event::FaultFired { rank, step, fault } => format!("fault: rank {rank} suffers {fault} in step {step}"),
        Event::Trouble(trouble) => {
            let whom = trouble.rank.map_or(String::new(), |rank| format!(" of rank {rank}"));
            let host = trouble.host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
            let since = trouble.since_fault_ms.map_or(String::new(), |ms| format!(" | {ms:.0} ms after the fault"));
            let Trouble { id, kind, step, detail, .. } = trouble;
            format!("trouble {id}: {kind}{whom}{host} after step {step}: {detail}{since}")
        }
        Event::Decided { id: 0, action, reason } => format!("decided: {action}, because {reason}"),
        Event::Decided { id, action, reason } => format!("decided on trouble {id}: {action}, because {reason}"),
        Event::World(world) => format!(
            "world {} of {} ranks | {} | state from {}",
            world.generation, world.ranks, world.layout, world.origin
        ),
        Event::Recovery(anatomy) => recovery(anatomy),
        Event::Checked { step, leaves, process, seconds } => format!(
            "step {step} checked by a spare (process #{process}): {leaves} leaves computed again in {:.0} ms, all alike",
            1000.0 * seconds
        ),
        Event::ClockJumped { rank, seconds } => {
            let whose = rank.map_or("the process that leads the run".into(), |rank| format!("rank {rank}"));
            format!("the wall clock jumped by {seconds:+.1} s, as {whose} reads it: nothing waits or measures by it")
        }
        Event::Replayed { step, reason } => format!("step {step} replayed: {reason}"),
        Event::Intervention(i) => {
            format!("intervention from step {}: {}, {} (by {})", i.step, i.action, i.detail, i.by)
        }
        Event::Straggler(s) => format!(
            "straggler: rank {} works {:.2}x as long as its peers and costs {:.0}% of the step (seen at step {}): {}",
            s.rank,
            s.slowdown,
            100.0 * s.share,
            s.step,
            s.detail
        ),
        _ => return None,
    })
}

/// `recovered in 812 ms (exit of rank 3; restart): detected 3 + decided 0 + ... ms | ...`
pub fn recovery(anatomy: &Anatomy) -> String {
    let phases: Vec<_> =
        anatomy.phases().iter().map(|(name, seconds)| format!("{name} {:.0}", 1000.0 * seconds)).collect();
    let whole = anatomy.seconds().map_or("not recovered".into(), |s| format!("recovered in {:.0} ms", 1000.0 * s));
    format!(
        "{whole} ({}; {}): {} ms | {:.1} MB moved, {} steps redone, on from step {}",
        anatomy.cause,
        anatomy.remedy,
        phases.join(" + "),
        anatomy.bytes_moved as f64 / 1e6,
        anatomy.steps_redone,
        anatomy.resumed_at
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_is_one_line_that_adds_up() {
        let anatomy = Anatomy {
            cause: "exit of rank 3".into(),
            remedy: "hot spare".into(),
            fault: Some(10.0),
            detected: Some(10.003),
            loaded: Some(10.5),
            first_step: Some(10.812),
            bytes_moved: 1_500_000,
            resumed_at: 7,
            ..Anatomy::default()
        };
        let want = "recovered in 812 ms (exit of rank 3; hot spare): detected 3 + loaded 497 + first step 312 ms | 1.5 MB moved, 0 steps redone, on from step 7";
        assert_eq!(text(&Event::Recovery(Box::new(anatomy))).unwrap(), want);
    }
}
