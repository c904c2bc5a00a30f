//! The verdict in words.

use std::collections::BTreeSet;
use std::fmt;

use super::{Culprit, Cut, Doubt, Verdict, What, Why};

fn size(shape: &[u64]) -> String {
    if shape.is_empty() {
        return String::new();
    }
    format!(" {}", shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x"))
}

/// ` (number 5 of group 1 dp)`.
fn place(sequence: u64, group: &str, desc: &str) -> String {
    let desc = if desc.is_empty() || desc == group { String::new() } else { format!(" {desc}") };
    format!(" (number {sequence} of group {group}{desc})")
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, why, group, desc, operation, sequence, size: shape, waiting, scheduled, stands } = self;
        let why = match why {
            Why::NotJoined => "did not join",
            Why::NoAnswer => "did not answer and is missing in",
            Why::Unclear => "may be missing in",
            Why::Mismatch => "is in another exchange than",
            Why::Size => "has another size in",
            Why::Type => "has another type in",
            Why::Silent => "sends nothing in",
            Why::NoPartner => "has not posted its half of",
            Why::Behind => "is behind the others that are in",
            Why::Queued => "has scheduled, but not started",
        };
        write!(f, "rank {rank} {why} {operation}{}{}", size(shape), place(*sequence, group, desc))?;
        if !waiting.is_empty() {
            write!(f, "; in it wait {}", ranks(waiting))?;
        }
        if !scheduled.is_empty() {
            let have = if scheduled.len() == 1 { "has" } else { "have" };
            write!(
                f,
                "; {} {have} scheduled it and not started: their own streams have not come to it",
                ranks(scheduled)
            )?;
        }
        if self.why == Why::Queued {
            write!(f, "; rank {rank} waits for its own stream: look at the work that it queued before")?;
        }
        if let Some(stands) = stands {
            write!(f, "; {stands}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, ranks: who, group, desc, operation, sequence, size: shape, sides, lacks, waiting } = self;
        let exchange = format!("{operation}{}{}", size(shape), place(*sequence, group, desc));
        let here = place(*sequence, group, desc);
        let are = if who.len() == 1 { "is" } else { "are" };
        let sides = sides.iter().map(|(does, ranks_)| format!("{}: {does}", ranks(ranks_)));
        let sides = sides.collect::<Vec<_>>().join("; ");
        write!(f, "undecided, {} {are} suspected: ", ranks(who))?;
        match what {
            What::Operations => write!(f, "members are in different exchanges at one place{here}: {sides}")?,
            What::Sizes => write!(f, "sizes differ in {exchange}: {sides}")?,
            What::Types => write!(f, "types differ in {exchange}: {sides}")?,
            What::Totals => write!(f, "{exchange}: {sides}")?,
            What::Ring => {
                write!(f, "they wait for each other: {sides}; one of them left an exchange out, or added one")?
            }
            What::NoRecord => write!(f, "there is no record of it, and in {exchange} wait {}", ranks(waiting))?,
            What::Unreadable => write!(f, "its dump cannot be read, and in {exchange} wait {}", ranks(waiting))?,
            What::Behind => write!(f, "the other members have completed {exchange}, it has not")?,
            What::AllInside => write!(f, "all members have started {exchange}, and it does not end")?,
            What::NobodyStarted => {
                write!(f, "{exchange} is scheduled and not started: the ranks wait for their own streams")?;
            }
            What::AllJoined => write!(f, "all members have joined {exchange}, and it does not end")?,
            What::Unknown => write!(f, "the records do not tell who has joined {exchange}")?,
        }
        let advice = match what {
            What::Operations | What::Sizes | What::Types | What::Totals if !lacks.is_empty() => {
                format!("the records of {} could decide", ranks(lacks))
            }
            What::Operations | What::Sizes | What::Types => {
                "no side has a majority of the group: compare what these ranks execute".into()
            }
            What::Totals => "all-to-all does not tell which of them is wrong: compare their split sizes".into(),
            What::Ring => "compare the order of exchanges in what they execute".into(),
            What::NoRecord | What::Unreadable => {
                "whether it ended, hangs, or only failed to write is for its log".into()
            }
            What::Behind | What::AllInside => {
                "look at the links and devices of these ranks, and at their stacks".into()
            }
            What::NobodyStarted => "look at what these ranks queued before it: stacks, kernels".into(),
            What::AllJoined => "dumps made with TORCH_NCCL_ENABLE_TIMING=1 tell who has started".into(),
            What::Unknown => match lacks.is_empty() {
                true => "their stacks could decide".into(),
                false => format!("the records of {} could decide", ranks(lacks)),
            },
        };
        write!(f, ". {}{}", advice[..1].to_uppercase(), &advice[1..])
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, sent, received } = self;
        let lost = sent - received;
        write!(f, "rank {from} does not reach rank {to}: the last {lost} of {sent} messages did not come")
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = self.cut.iter().map(ToString::to_string);
        let culprits = self.culprits.iter().map(ToString::to_string);
        let mut lines: Vec<String> = cut.chain(culprits).chain(self.doubts.iter().map(ToString::to_string)).collect();
        if lines.is_empty() {
            lines.push("no rank waits in an exchange".into());
        }
        let culprits = self.culprits.iter().flat_map(|c| c.waiting.iter().copied().chain([c.rank]));
        let doubts = self.doubts.iter().flat_map(|d| d.ranks.iter().chain(&d.waiting).copied());
        let named: BTreeSet<u32> = culprits.chain(doubts).chain(self.named()).collect();
        let follow: Vec<u32> = self.waiting.iter().copied().filter(|r| !named.contains(r)).collect();
        if !follow.is_empty() && lines.len() + named.len() > 1 {
            lines.push(format!("the other waiting ranks follow from that: {}", ranks(&follow)));
        }
        let unread = |rank: &u32| self.unreadable.contains(rank);
        let mute: Vec<u32> = self.unanswered.iter().copied().filter(|r| !named.contains(r) && !unread(r)).collect();
        if !mute.is_empty() {
            lines.push(format!("no record of {}", ranks(&mute)));
        }
        let unread: Vec<u32> = self.unreadable.iter().copied().filter(|r| !named.contains(r)).collect();
        if !unread.is_empty() {
            lines.push(format!("the dump of {} cannot be read", ranks(&unread)));
        }
        f.write_str(&lines.join("\n"))
    }
}

/// `ranks 0-3 7`.
pub(super) fn ranks(list: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut at = 0;
    while at < list.len() {
        let run = (at..list.len()).take_while(|&i| list[i].wrapping_sub(list[at]) == (i - at) as u32).count();
        parts.push(match run {
            1 => list[at].to_string(),
            _ => format!("{}-{}", list[at], list[at + run - 1]),
        });
        at += run;
    }
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, parts.join(" "))
}
