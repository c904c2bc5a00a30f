//! Who depends on whom between ranks: each receive on its send, each collective's members on one another.

use std::collections::{BTreeMap, HashMap};

use program::{Axis, Instr, Op, Program, Value};
use spec::{Layout, Unit};

/// A dependency between instructions of different ranks, each (rank, place in its list).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flow {
    /// A message, from its send to its receive.
    Message {
        /// The send.
        from: (usize, usize),
        /// The receive.
        to: (usize, usize),
    },
    /// The members of one collective, by rank: nobody is done before the last has come.
    Together(Vec<(usize, usize)>),
}

/// A message by sender, receiver, value, the sender's chunk and unit.
type Mail = (usize, usize, Value, usize, Option<Unit>);

/// The flows of one step; exchanges in groups of one have none. An instruction without its partner, which the checker
/// refuses, has none either.
pub fn flows(programs: &[Program], layout: &Layout) -> Vec<Flow> {
    let mut sends: HashMap<Mail, (usize, usize)> = HashMap::new();
    let mut receives: Vec<(Mail, (usize, usize))> = Vec::new();
    let mut groups: BTreeMap<(Axis, usize, usize), Vec<(usize, usize)>> = BTreeMap::new();
    for program in programs {
        let mut nth: HashMap<Axis, usize> = HashMap::new();
        for (at, instr) in program.instrs.iter().enumerate() {
            let here = (program.rank, at);
            match instr.op {
                Op::Send { value, to, .. } => {
                    sends.insert((program.rank, to, value, instr.chunk, instr.unit), here);
                }
                Op::Recv { value, from, .. } => {
                    let chunk = sending_chunk(instr, value, layout.chunks() - 1);
                    receives.push(((from, program.rank, value, chunk, instr.unit), here));
                }
                Op::Collective { axis, .. } => {
                    // All members of a group meet in the same order.
                    let nth = nth.entry(axis).or_insert(0);
                    let first = axis.first(layout, program.rank);
                    groups.entry((axis, first, *nth)).or_default().push(here);
                    *nth += 1;
                }
                _ => {}
            }
        }
    }
    let message = |(mail, to): &(Mail, _)| Some(Flow::Message { from: *sends.get(mail)?, to: *to });
    let together = groups.into_values().filter(|members| members.len() > 1).map(Flow::Together);
    receives.iter().filter_map(message).chain(together).collect()
}

/// The chunk that sent what `instr` receives; `last` is the last chunk.
fn sending_chunk(instr: &Instr, value: Value, last: usize) -> usize {
    match value {
        Value::Activation => instr.chunk.saturating_sub(1),
        Value::ActivationGrad => instr.chunk + 1,
        Value::TiedGrads if instr.chunk == 0 => last,
        Value::TiedGrads => 0,
        _ => instr.chunk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    #[test]
    fn every_exchange_with_others_is_in_one_flow() {
        for ranks in [[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 4], [2, 2, 2]] {
            let world = World::new(ranks);
            let mut seen = HashMap::new();
            for flow in flows(&world.programs, &world.layout) {
                let ends = match &flow {
                    Flow::Message { from, to } => vec![*from, *to],
                    Flow::Together(members) => members.clone(),
                };
                ends.into_iter().for_each(|end| *seen.entry(end).or_insert(0) += 1);
            }
            for program in &world.programs {
                for (at, instr) in program.instrs.iter().enumerate() {
                    let want = match instr.op {
                        Op::Send { .. } | Op::Recv { .. } => 1,
                        Op::Collective { axis, .. } => usize::from(axis.size(&world.layout) > 1),
                        _ => 0,
                    };
                    let got = seen.get(&(program.rank, at)).copied().unwrap_or(0);
                    assert_eq!(got, want, "{ranks:?} rank {}: {instr}", program.rank);
                }
            }
        }
    }

    #[test]
    fn messages_join_the_same_unit_and_collectives_the_same_value() {
        let world = World::new([1, 2, 2]);
        let instr = |(rank, at): (usize, usize)| &world.programs[rank].instrs[at];
        for flow in flows(&world.programs, &world.layout) {
            match flow {
                Flow::Message { from, to } => {
                    let (Op::Send { value, to: receiver, .. }, Op::Recv { value: got, from: sender, .. }) =
                        (instr(from).op, instr(to).op)
                    else {
                        panic!("{} -> {}", instr(from), instr(to));
                    };
                    assert_eq!((value, receiver, sender, instr(from).unit), (got, to.0, from.0, instr(to).unit));
                }
                Flow::Together(members) => {
                    let what = |end| match instr(end).op {
                        Op::Collective { exchange, value, axis, .. } => (exchange, value, axis, instr(end).unit),
                        _ => panic!("{}", instr(end)),
                    };
                    assert!(members.iter().all(|end| what(*end) == what(members[0])), "{members:?}");
                }
            }
        }
    }
}
