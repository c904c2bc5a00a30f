//! A pipeline schedule given as a file: one line per pipeline position, operations in order, separated by commas.
//!
//! An operation is `[stage]KIND[microbatch]`, such as `0F0`: the stage is the chunk of layers, and may be left out
//! where each position has one. Kinds: `F` forward; `B` backward; `I` its input part, `W` its weight part. `B` beside a
//! `W` of the same stage and microbatch is the input part, as papers on zero-bubble schedules write it. Empty fields are
//! idle slots. This is the form in which `torch.distributed.pipelining` writes and reads compute-only schedules.
//!
//! What a file says is complete (each microbatch passes each stage once each way), ascending (gradients add up in the
//! order of microbatches) and cannot wait for ever; or it is refused with line and column.

use std::collections::{HashMap, HashSet};

use crate::error::SpecError;
use crate::schedule::Turn;

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action {
    /// What.
    pub turn: Turn,
    /// The stage.
    pub chunk: usize,
    /// Number of the microbatch among those of a data position.
    pub microbatch: usize,
}

/// The order of work of all pipeline positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orders {
    /// By position.
    pub positions: Vec<Vec<Action>>,
    /// The position of each stage.
    pub placement: Vec<usize>,
    /// Microbatches that each stage turns on.
    pub microbatches: usize,
}

/// Most fields of a file.
const FIELDS_MAX: usize = 1 << 22;

/// An operation as it stands in the file.
#[derive(Clone)]
struct Field {
    action: Action,
    text: String,
    /// Counted from 1.
    column: usize,
}

impl Orders {
    /// Reads `text`, a file called `name`.
    ///
    /// # Errors
    /// The first operation that is unknown, missing, doubled or out of order; the cycle of a deadlock.
    pub fn parse(name: &str, text: &str) -> Result<Self, SpecError> {
        let reader = Reader { name };
        let mut lines = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let fields = reader.line(number, line)?;
            lines.push(fields);
        }
        while lines.last().is_some_and(Vec::is_empty) {
            lines.pop();
        }
        if lines.iter().map(Vec::len).sum::<usize>() > FIELDS_MAX {
            return Err(reader.refuse(format!("it holds more than {FIELDS_MAX} operations"), "shorten it"));
        }
        lines.iter_mut().for_each(|line| name_parts(line));
        let placement = reader.placement(&lines)?;
        let microbatches = 1 + lines.iter().flatten().map(|f| f.action.microbatch).max().unwrap_or(0);
        for chunk in 0..placement.len() {
            reader.complete(&lines[placement[chunk]], placement[chunk], chunk, microbatches)?;
        }
        reader.ends(&lines, &placement)?;
        let positions = lines.into_iter().map(|line| line.into_iter().map(|f| f.action).collect()).collect();
        Ok(Self { positions, placement, microbatches })
    }
}

/// `B` is the whole backward, unless the line has a `W` of the same stage and microbatch.
fn name_parts(line: &mut [Field]) {
    let key = |a: &Action| (a.chunk, a.microbatch);
    let apart: HashSet<_> =
        line.iter().filter(|f| f.action.turn == Turn::BackwardWeight).map(|f| key(&f.action)).collect();
    for field in line {
        if field.action.turn == Turn::Backward && apart.contains(&key(&field.action)) {
            field.action.turn = Turn::BackwardInput;
        }
    }
}

struct Reader<'a> {
    name: &'a str,
}

impl Reader<'_> {
    fn refuse(&self, what: impl Into<String>, remedy: impl Into<String>) -> SpecError {
        let factors = format!("layout.schedule_file {}, layout.schedule csv", self.name);
        SpecError::law(format!("{}: {}", self.name, what.into()), factors, remedy)
    }

    fn line(&self, number: usize, line: &str) -> Result<Vec<Field>, SpecError> {
        let mut fields = Vec::new();
        let mut column = 1;
        for raw in line.split(',') {
            let text = raw.trim();
            let start = column + raw.chars().take_while(|c| c.is_whitespace()).count();
            column += raw.chars().count() + 1;
            if text.is_empty() {
                continue;
            }
            let action = action(text, number).ok_or_else(|| {
                self.refuse(
                    format!("line {} column {start}: `{text}` is no operation", number + 1),
                    "write operations such as 0F0 (stage, F, B, I or W, microbatch), separated by commas",
                )
            })?;
            fields.push(Field { action, text: text.into(), column: start });
        }
        Ok(fields)
    }

    /// The position of each stage: each on one line, all lines with equally many.
    fn placement(&self, lines: &[Vec<Field>]) -> Result<Vec<usize>, SpecError> {
        let mut found: HashMap<usize, usize> = HashMap::new();
        for (position, line) in lines.iter().enumerate() {
            for field in line {
                let first = *found.entry(field.action.chunk).or_insert(position);
                if first != position {
                    return Err(self.refuse(
                        format!(
                            "line {} column {}: `{}` is of stage {}, which line {} has",
                            position + 1,
                            field.column,
                            field.text,
                            field.action.chunk,
                            first + 1
                        ),
                        "put all operations of a stage on one line",
                    ));
                }
            }
        }
        let stages = found.len();
        if let Some(gap) = (0..stages).find(|s| !found.contains_key(s)) {
            return Err(self.refuse(format!("no line has stage {gap}"), "number the stages from 0 without a gap"));
        }
        let placement: Vec<usize> = (0..stages).map(|s| found[&s]).collect();
        let held = |line: usize| placement.iter().filter(|p| **p == line).count();
        if let Some(line) = (0..lines.len()).find(|line| held(*line) * lines.len() != stages || stages == 0) {
            return Err(self.refuse(
                format!("line {} has {} of {stages} stages over {} lines", line + 1, held(line), lines.len()),
                "give every line (pipeline position) equally many stages",
            ));
        }
        Ok(placement)
    }

    /// Every microbatch of the stage once each way, ascending.
    fn complete(&self, line: &[Field], position: usize, chunk: usize, microbatches: usize) -> Result<(), SpecError> {
        let of = |turn: Turn| line.iter().filter(move |f| f.action.chunk == chunk && f.action.turn == turn);
        let at = |f: &Field| format!("line {} column {}: `{}`", position + 1, f.column, f.text);
        let mut done: HashSet<(Turn, usize)> = HashSet::new();
        for field in line.iter().filter(|f| f.action.chunk == chunk) {
            let Action { turn, microbatch, .. } = field.action;
            let whole_too = match turn {
                Turn::Backward => done.contains(&(Turn::BackwardInput, microbatch)),
                Turn::BackwardInput => done.contains(&(Turn::Backward, microbatch)),
                _ => false,
            };
            if !done.insert((turn, microbatch)) || whole_too {
                return Err(
                    self.refuse(format!("{} is there twice", at(field)), "name each operation of a microbatch once")
                );
            }
        }
        for microbatch in 0..microbatches {
            let has = |turn| done.contains(&(turn, microbatch));
            let missing = match () {
                () if !has(Turn::Forward) => "F",
                () if !has(Turn::Backward) && !has(Turn::BackwardInput) => "B",
                () if has(Turn::BackwardInput) && !has(Turn::BackwardWeight) => "W",
                () => continue,
            };
            return Err(self.refuse(
                format!("line {} lacks `{chunk}{missing}{microbatch}`", position + 1),
                format!("name every microbatch of stage {chunk} from 0 to {} once each way", microbatches - 1),
            ));
        }
        // Input parts and whole backwards both add to norms; weight parts and whole ones to matrices.
        for turns in
            [&[Turn::Forward][..], &[Turn::Backward, Turn::BackwardInput], &[Turn::Backward, Turn::BackwardWeight]]
        {
            let mut last: Option<&Field> = None;
            for field in line.iter().filter(|f| f.action.chunk == chunk && turns.contains(&f.action.turn)) {
                if let Some(before) = last.filter(|l| l.action.microbatch > field.action.microbatch) {
                    return Err(self.refuse(
                        format!("{} comes after `{}`: the microbatches of a stage ascend", at(field), before.text),
                        "sort the operations of each kind: gradients add up in the order of microbatches",
                    ));
                }
                last = Some(field);
            }
        }
        debug_assert!(of(Turn::Forward).count() == microbatches);
        Ok(())
    }

    /// All lines together come to an end.
    fn ends(&self, lines: &[Vec<Field>], placement: &[usize]) -> Result<(), SpecError> {
        let mut done: HashSet<Action> = HashSet::new();
        let mut at = vec![0; lines.len()];
        loop {
            let mut moved = false;
            for (line, at) in lines.iter().zip(&mut at) {
                while let Some(field) = line.get(*at).filter(|f| needs(&f.action, placement, &done).is_none()) {
                    done.insert(field.action);
                    *at += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let Some(first) = (0..lines.len()).find(|i| at[*i] < lines[*i].len()) else { return Ok(()) };
        // Who waits for whom, until one comes back.
        let mut chain: Vec<(usize, String)> = Vec::new();
        let mut position = first;
        while chain.iter().all(|(seen, _)| *seen != position) {
            let field = &lines[position][at[position]];
            let wanted = needs(&field.action, placement, &done).expect("it waits");
            let next = placement[wanted.chunk];
            let words = format!(
                "line {} waits at column {} `{}` for {} of line {}",
                position + 1,
                field.column,
                field.text,
                name(&wanted),
                next + 1
            );
            chain.push((position, words));
            position = next;
        }
        let from = chain.iter().position(|(seen, _)| *seen == position).unwrap_or(0);
        let words: Vec<_> = chain[from..].iter().map(|(_, words)| words.as_str()).collect();
        Err(self.refuse(
            format!("it waits for ever, in a cycle: {}", words.join("; ")),
            "put each operation after those that it needs: a forward after that of the stage before, a backward after \
             that of the stage behind, on every line",
        ))
    }
}

/// `12F3`, or `F3` of the stage with the number of its line.
fn action(text: &str, line: usize) -> Option<Action> {
    let kind = text.find(|c: char| !c.is_ascii_digit())?;
    let (stage, rest) = text.split_at(kind);
    let (kind, microbatch) = rest.split_at(rest.chars().next()?.len_utf8());
    let turn = match kind {
        "F" => Turn::Forward,
        "B" => Turn::Backward,
        "I" => Turn::BackwardInput,
        "W" => Turn::BackwardWeight,
        _ => return None,
    };
    let number = |digits: &str| {
        let all_digits = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        if all_digits { digits.parse::<usize>().ok().filter(|n| *n < FIELDS_MAX) } else { None }
    };
    let chunk = if stage.is_empty() { line } else { number(stage)? };
    Some(Action { turn, chunk, microbatch: number(microbatch)? })
}

/// The operation in the words of a file.
fn name(action: &Action) -> String {
    let kind = match action.turn {
        Turn::Forward => "F",
        Turn::Backward => "B",
        Turn::BackwardInput => "I",
        Turn::BackwardWeight => "W",
    };
    format!("`{}{kind}{}`", action.chunk, action.microbatch)
}

/// What `action` still waits for.
fn needs(action: &Action, placement: &[usize], done: &HashSet<Action>) -> Option<Action> {
    let Action { turn, chunk, .. } = *action;
    let is = |turn: Turn, chunk: usize| Action { turn, chunk, ..*action };
    let last = placement.len() - 1;
    let wanted = match turn {
        Turn::Forward if chunk == 0 => return None,
        Turn::Forward => vec![is(Turn::Forward, chunk - 1)],
        Turn::BackwardWeight => vec![is(Turn::BackwardInput, chunk)],
        Turn::Backward | Turn::BackwardInput if chunk == last => vec![is(Turn::Forward, chunk)],
        Turn::Backward | Turn::BackwardInput => {
            let behind = [Turn::Backward, Turn::BackwardInput].map(|turn| is(turn, chunk + 1));
            if behind.iter().any(|b| done.contains(b)) { vec![is(Turn::Forward, chunk)] } else { vec![behind[0]] }
        }
    };
    wanted.into_iter().find(|w| !done.contains(w))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Orders::parse("s.csv", text).unwrap_err().to_string()
    }

    #[test]
    fn both_forms_read_the_same() {
        let short = Orders::parse("s.csv", "F0,F1,B0,B1\nF0,B0,F1,B1\n").unwrap();
        let long = Orders::parse("s.csv", "0F0, 0F1,, 0B0,0B1\n,1F0,1B0,1F1,1B1\n\n").unwrap();
        assert_eq!(short, long);
        assert_eq!((short.microbatches, &short.placement[..]), (2, &[0, 1][..]));
        assert_eq!(short.positions[1][1].turn, Turn::Backward);
    }

    #[test]
    fn a_b_beside_a_w_is_the_input_part() {
        let papers = Orders::parse("s.csv", "F0,B0,W0,F1,B1").unwrap();
        let torch = Orders::parse("s.csv", "0F0,0I0,0W0,0F1,0B1").unwrap();
        assert_eq!(papers, torch);
        assert_eq!(papers.positions[0][1].turn, Turn::BackwardInput);
        assert_eq!(papers.positions[0][4].turn, Turn::Backward);
    }

    #[test]
    fn a_v_of_two_stages_a_line() {
        let orders = Orders::parse("s.csv", "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n").unwrap();
        assert_eq!(orders.placement, [0, 1, 1, 0]);
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_column() {
        for (text, words) in [
            ("0F0,0X0", "line 1 column 5: `0X0` is no operation"),
            ("F0,B0\nF0, F,B0", "line 2 column 5: `F` is no operation"),
            ("F0,(0F1;1B0)OVERLAP_F_B", "is no operation"),
            ("F0,F1,B0", "line 1 lacks `0B1`"),
            ("F0,I0", "line 1 lacks `0W0`"),
            ("F0,B0,F1,B1\nF0,B0,B1", "line 2 lacks `1F1`"),
            ("F0,B0,F0", "line 1 column 7: `F0` is there twice"),
            ("F0,I0,W0,B0", "is there twice"),
            ("F1,F0,B0,B1", "line 1 column 4: `F0` comes after `F1`"),
            ("F0,F1,B1,B0", "`B0` comes after `B1`"),
            ("0F0,0B0\n0F1,0B1", "line 2 column 1: `0F1` is of stage 0, which line 1 has"),
            ("0F0,0B0\n2F0,2B0", "no line has stage 1"),
            ("0F0,0B0,1F0,1B0,2F0,2B0\n3F0,3B0", "equally many stages"),
            ("", "0 stages"),
        ] {
            let got = if text.is_empty() { "0 stages".into() } else { refused(text) };
            assert!(got.contains(words), "{text}: {got}");
        }
        assert!(Orders::parse("s.csv", "").is_err() || Orders::parse("s.csv", "").unwrap().placement.is_empty());
    }

    #[test]
    fn a_deadlock_names_its_cycle() {
        let text = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1");
        assert!(text.contains("line 1 waits at column 5 `0B0` for `1B0` of line 2"), "{text}");
        assert!(text.contains("line 2 waits at column 5 `1F1` for `0F1` of line 1"), "{text}");
        // A line that waits for itself.
        let text = refused("B0,F0");
        assert!(text.contains("line 1 waits at column 1 `B0` for `0F0` of line 1"), "{text}");
        let text = refused("F0,W0,I0");
        assert!(text.contains("line 1 waits at column 4 `W0` for `0I0` of line 1"), "{text}");
    }
}
