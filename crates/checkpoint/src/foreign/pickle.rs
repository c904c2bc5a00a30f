//! Pickled data as plain values. Nothing is looked up or called: classes are names, objects are what they were made from.

use std::collections::HashMap;

/// Items of all lists and dictionaries together, at most.
const ITEMS_MAX: usize = 50_000_000;

/// Longer names are refused, bytes: one that is used often is copied often.
pub(super) const NAME_BYTES_MAX: usize = 4096;

/// A value, by its place in [`Pickle::values`]; several may share one.
pub(super) type Id = usize;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// What the reader has no use for: floats, bytes, long integers.
    Other,
    Text(String),
    /// Lists, tuples and sets.
    Items(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// Module and name.
    Class(String, String),
    /// Class or function, arguments, state.
    Object {
        class: Id,
        args: Id,
        state: Option<Id>,
    },
}

/// What a pickle holds.
#[derive(Debug)]
pub(super) struct Pickle {
    pub values: Vec<Value>,
    pub root: Id,
}

struct Reader<'a> {
    rest: &'a [u8],
    len: usize,
    values: Vec<Value>,
    /// Items of all containers so far.
    items: usize,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl Pickle {
    /// Reads protocols 2 to 5. `Err` says at which byte and what.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader {
            rest: bytes,
            len: bytes.len(),
            values: Vec::new(),
            items: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        loop {
            let at = reader.len - reader.rest.len();
            match reader.step().map_err(|what| format!("byte {at} of the pickle: {what}"))? {
                None => {}
                Some(root) => return Ok(Self { values: reader.values, root }),
            }
        }
    }
}

type Step<T> = Result<T, String>;

impl<'a> Reader<'a> {
    fn take(&mut self, len: u64) -> Step<&'a [u8]> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let (taken, rest) = self.rest.split_at_checked(len).ok_or("it is cut off")?;
        self.rest = rest;
        Ok(taken)
    }

    /// A little-endian number of `width` bytes.
    fn number(&mut self, width: u64) -> Step<u64> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn line(&mut self) -> Step<String> {
        let end = self.rest.iter().position(|byte| *byte == b'\n').ok_or("a line without end")?;
        let line = self.take(end as u64 + 1)?;
        Ok(String::from_utf8_lossy(&line[..end]).into_owned())
    }

    fn text(&mut self, width: u64) -> Step<Value> {
        let len = self.number(width)?;
        // Names of tensors are UTF-8; what is not is no name.
        Ok(Value::Text(String::from_utf8_lossy(self.take(len)?).into_owned()))
    }

    fn skipped(&mut self, width: u64) -> Step<Value> {
        let len = self.number(width)?;
        self.take(len)?;
        Ok(Value::Other)
    }

    fn push(&mut self, value: Value) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    fn pop(&mut self) -> Step<Id> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= bottom {
            return Err("an operation without operand".into());
        }
        Ok(self.stack.pop().expect("longer than its bottom"))
    }

    fn top(&self) -> Step<Id> {
        self.stack.last().copied().ok_or_else(|| "an operation without operand".into())
    }

    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        let at = self.marks.pop().ok_or("no mark")?;
        let items = self.stack.split_off(at.min(self.stack.len()));
        self.items += items.len();
        if self.items > ITEMS_MAX {
            return Err(format!("more than {ITEMS_MAX} items"));
        }
        Ok(items)
    }

    fn tuple(&mut self, len: usize) -> Step<()> {
        let mut items = (0..len).map(|_| self.pop()).collect::<Step<Vec<_>>>()?;
        items.reverse();
        self.push(Value::Items(items));
        Ok(())
    }

    fn extend(&mut self, items: Vec<Id>) -> Step<()> {
        let to = self.top()?;
        match &mut self.values[to] {
            Value::Items(known) => known.extend(items),
            // A subclass of list, made by a call.
            Value::Object { .. } => {}
            _ => return Err("items for what is no list".into()),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Step<()> {
        let to = self.top()?;
        if !items.len().is_multiple_of(2) {
            return Err("a key without value".into());
        }
        let pairs: Vec<_> = items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        match &mut self.values[to] {
            Value::Dict(known) => known.extend(pairs),
            // An OrderedDict, made by a call: its entries are its state.
            Value::Object { state: Some(state), .. } => {
                let state = *state;
                match &mut self.values[state] {
                    Value::Dict(known) => known.extend(pairs),
                    _ => return Err("entries for what is no dictionary".into()),
                }
            }
            Value::Object { .. } => {
                let state = self.values.len();
                self.values.push(Value::Dict(pairs));
                if let Value::Object { state: place, .. } = &mut self.values[to] {
                    *place = Some(state);
                }
            }
            _ => return Err("entries for what is no dictionary".into()),
        }
        Ok(())
    }

    fn class(&mut self, module: String, name: String) {
        self.push(Value::Class(module, name));
    }

    fn object(&mut self) -> Step<()> {
        let args = self.pop()?;
        let class = self.pop()?;
        self.push(Value::Object { class, args, state: None });
        Ok(())
    }

    fn memoize(&mut self, key: u64) -> Step<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Step<()> {
        let id = *self.memo.get(&key).ok_or("an unknown memo")?;
        self.stack.push(id);
        Ok(())
    }

    /// One operation; the root after the last.
    fn step(&mut self) -> Step<Option<Id>> {
        let operation = self.take(1)?[0];
        match operation {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'.' => return self.pop().map(Some),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'K' => {
                let number = self.number(1)?;
                self.push(Value::Int(number as i64));
            }
            b'M' => {
                let number = self.number(2)?;
                self.push(Value::Int(number as i64));
            }
            b'J' => {
                let number = self.number(4)?;
                self.push(Value::Int(i64::from(number as u32 as i32)));
            }
            0x8a => {
                let len = self.number(1)?;
                let bytes = self.take(len)?;
                let value = match bytes.len() {
                    0 => Value::Int(0),
                    n @ 1..=8 => {
                        let number = bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
                        Value::Int(((number << (64 - 8 * n)) as i64) >> (64 - 8 * n))
                    }
                    _ => Value::Other,
                };
                self.push(value);
            }
            0x8b => {
                let value = self.skipped(4)?;
                self.push(value);
            }
            b'G' => {
                self.take(8)?;
                self.push(Value::Other);
            }
            b'X' => {
                let value = self.text(4)?;
                self.push(value);
            }
            0x8c => {
                let value = self.text(1)?;
                self.push(value);
            }
            0x8d => {
                let value = self.text(8)?;
                self.push(value);
            }
            b'C' | b'U' => {
                let value = self.skipped(1)?;
                self.push(value);
            }
            b'B' | b'T' => {
                let value = self.skipped(4)?;
                self.push(value);
            }
            0x8e | 0x96 => {
                let value = self.skipped(8)?;
                self.push(value);
            }
            b')' | b']' | 0x8f => self.push(Value::Items(Vec::new())),
            b'}' => self.push(Value::Dict(Vec::new())),
            b't' | b'l' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(Value::Items(items));
            }
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.extend(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.class(module, name);
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (&self.values[module], &self.values[name]) {
                    (Value::Text(module), Value::Text(name)) if module.len().max(name.len()) > NAME_BYTES_MAX => {
                        return Err("the name of a class is too long".into());
                    }
                    (Value::Text(module), Value::Text(name)) => self.class(module.clone(), name.clone()),
                    _ => return Err("a class without a name".into()),
                }
            }
            b'R' | 0x81 => self.object()?,
            0x92 => {
                // Named arguments are of no use here.
                self.pop()?;
                self.object()?;
            }
            b'b' => {
                let state = self.pop()?;
                let to = self.top()?;
                match &mut self.values[to] {
                    Value::Object { state: place, .. } => *place = Some(state),
                    _ => return Err("a state for what is no object".into()),
                }
            }
            0x94 => self.memoize(self.memo.len() as u64)?,
            b'q' => {
                let key = self.number(1)?;
                self.memoize(key)?;
            }
            b'r' => {
                let key = self.number(4)?;
                self.memoize(key)?;
            }
            b'h' => {
                let key = self.number(1)?;
                self.recall(key)?;
            }
            b'j' => {
                let key = self.number(4)?;
                self.recall(key)?;
            }
            other => return Err(format!("operation {other:#04x} is not one of plain data")),
        }
        Ok(None)
    }
}
