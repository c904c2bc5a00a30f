//! What an instruction is called in profiles and traces.

use program::{Axis, Instr, Op, Value};

/// The group and name of what an instruction is accounted to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    /// See [`GROUPS`].
    pub group: &'static str,
    /// What it is, in words.
    pub name: String,
}

/// All groups, in the order of a profile.
pub const GROUPS: [&str; 9] =
    ["forward", "backward", "exchange", "waiting", "sums", "data", "vote", "optimizer", "other"];

/// The label of `instr`, without what it waits for.
pub fn label(instr: &Instr) -> Label {
    let (group, name) = match instr.op {
        Op::Load => ("data", "tokens of a microbatch".into()),
        Op::Compute(pass, segment) => (if pass == program::Pass::Forward { "forward" } else { "backward" }, {
            let pass = words(&format!("{pass:?}"));
            let more = pass.strip_prefix("forward").or(pass.strip_prefix("backward")).unwrap_or(&pass).to_owned();
            words(&format!("{segment:?}")) + &more
        }),
        Op::Drop(_) => ("other", "activations let go".into()),
        // Squares of the gradients are summed for it: the one exchange that computes.
        Op::Collective { value: Value::Ballot, .. } => ("vote", "gradient norm and ballots".into()),
        Op::Collective { bytes: 0, .. } => ("sums", "in groups of one".into()),
        Op::Collective { exchange, value, axis, .. } => {
            let [how, what, with] =
                [format!("{exchange:?}"), format!("{value:?}"), format!("{axis:?}")].map(|s| words(&s));
            ("exchange", format!("{} {what} ({with})", how.replace(' ', "-")))
        }
        Op::Post { value, axis, .. } => {
            let [what, with] = [format!("{value:?}"), format!("{axis:?}")].map(|s| words(&s));
            ("exchange", format!("post {what} ({with})"))
        }
        Op::Send { value, .. } => ("exchange", format!("send {} (pp)", words(&format!("{value:?}")))),
        Op::Recv { value, .. } => ("exchange", format!("receive {} (pp)", words(&format!("{value:?}")))),
        Op::Close { .. } => ("sums", "data cells onto the tree".into()),
        Op::Release(_) => ("sums", "free gathered parameters".into()),
        Op::Vote => ("vote", "decision".into()),
        Op::Apply => ("optimizer", "update of parameters and moments".into()),
    };
    Label { group, name }
}

/// The label of the time in which `instr` waits for other ranks.
pub fn waiting(instr: &Instr) -> Label {
    let name = match instr.op {
        Op::Collective { axis: Axis::World, .. } => "for all ranks (ballots)".into(),
        Op::Collective { axis, .. } => format!("for the ranks of {}", words(&format!("{axis:?}"))),
        _ => "for the pipeline (bubble)".into(),
    };
    Label { group: "waiting", name }
}

/// `AttnNorm(3)` as `attn norm`.
fn words(name: &str) -> String {
    let name = name.split('(').next().unwrap_or(name);
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push(' ');
        }
        out.extend(c.to_lowercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::{Bucket, Exchange, Pass, Segment};

    fn of(op: Op) -> (&'static str, String) {
        let Label { group, name } = label(&Instr { op, chunk: 0, unit: None });
        (group, name)
    }

    #[test]
    fn names_are_words() {
        assert_eq!(of(Op::Compute(Pass::Forward, Segment::AttnNorm(3))), ("forward", "attn norm".into()));
        assert_eq!(of(Op::Compute(Pass::Backward, Segment::Mlp(0))), ("backward", "mlp".into()));
        let sum = |bytes| Op::Collective {
            exchange: Exchange::ReduceScatter,
            value: Value::GradPartial,
            axis: Axis::Tp,
            bytes,
        };
        assert_eq!(of(sum(8)), ("exchange", "reduce-scatter grad partial (tp)".into()));
        assert_eq!(of(sum(0)), ("sums", "in groups of one".into()));
        let ballot =
            Op::Collective { exchange: Exchange::AllGather, value: Value::Ballot, axis: Axis::World, bytes: 0 };
        assert_eq!(of(ballot), ("vote", "gradient norm and ballots".into()));
        let from = Op::Recv { value: Value::ActivationGrad, from: 1, bytes: 4 };
        assert_eq!(of(from), ("exchange", "receive activation grad (pp)".into()));
        assert_eq!(waiting(&Instr { op: from, chunk: 0, unit: None }).name, "for the pipeline (bubble)");
        for op in [Op::Load, Op::Vote, Op::Apply, Op::Close { cell: 0, bucket: Bucket::Norms }, sum(8), sum(0), from] {
            assert!(GROUPS.contains(&of(op).0));
        }
    }
}
