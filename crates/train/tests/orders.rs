//! Lists in other orders than those that are lowered: a rank may leave a unit in the middle and go on with another.

mod common;

use common::BASE;
use fabric::FabricOptions;
use program::{Bucket, Instr, Mode, Op, Program, Value};
use spec::Run;
use train::corpus::Corpus;
use train::virtual_ranks;

fn run(sets: &[&str]) -> Run {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    Run::parse(BASE, "base", &sets, 1).unwrap()
}

fn digest(run: &Run, programs: &[Program]) -> String {
    virtual_ranks::digest(run, programs, 2, &Corpus::open(run).unwrap(), &FabricOptions::default()).unwrap()
}

/// The forwards of neighbouring units instruction by instruction in turn.
fn braid(program: &Program) -> Program {
    let ends =
        |i: &Instr| matches!(i.op, Op::Send { value: Value::Activation, .. } | Op::Close { bucket: Bucket::Norms, .. });
    let mut tasks: Vec<Vec<Instr>> = vec![Vec::new()];
    for instr in &program.instrs {
        tasks.last_mut().unwrap().push(*instr);
        if ends(instr) {
            tasks.push(Vec::new());
        }
    }
    let forward = |task: &[Instr]| matches!(task.last().map(|i| i.op), Some(Op::Send { value: Value::Activation, .. }));
    let mut out = Vec::new();
    let mut tasks = tasks.into_iter().peekable();
    while let Some(task) = tasks.next() {
        match tasks.next_if(|next| forward(&task) && forward(next)) {
            Some(next) => {
                let longer = task.len().max(next.len());
                out.extend((0..longer).flat_map(|i| [task.get(i), next.get(i)]).flatten().copied());
            }
            None => out.extend(task),
        }
    }
    Program { rank: program.rank, instrs: out }
}

#[test]
fn braided_units_change_no_bit() {
    let run = run(&["layout.pp=2", "layout.schedule=gpipe", "model.tied=true"]);
    let plain = program::lower_all(&run, Mode::Train);
    let braided: Vec<_> = plain.iter().map(braid).collect();
    assert_ne!(plain, braided);
    let verdict = program::check(&braided, &run.model, &run.grid, &run.layout, run.train.seq, Mode::Train);
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!(digest(&run, &braided), digest(&run, &plain));
}

/// A value that nobody uses does not go unseen.
#[test]
fn a_lost_send_is_refused_at_the_end() {
    let run = run(&["grid.dp=1", "layout.pp=1"]);
    let mut programs = program::lower_all(&run, Mode::Train);
    let is = |i: &Instr| matches!(i.op, Op::Collective { value: Value::NormGrads, .. });
    programs[0].instrs.retain(|i| !is(i));
    let outcome = virtual_ranks::digest(&run, &programs, 1, &Corpus::open(&run).unwrap(), &FabricOptions::default());
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("never used"), "{text}");
}
