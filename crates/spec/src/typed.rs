//! A value as the kind that its key takes.

use toml::Value;

use crate::keys::{COUNT_MAX, Key, Kind};

/// `value` as `known` keeps it.
///
/// # Errors
/// The value as written, where it does not fit.
pub(crate) fn typed(known: &Key, value: Result<Value, String>) -> Result<Value, String> {
    let value = match (known.kind, value) {
        // TOML's whole numbers have no room for half of all seeds.
        (Kind::Seed, Err(given)) => Value::String(given),
        (_, value) => value?,
    };
    let given = value.to_string();
    let fits = match (known.kind, value) {
        (Kind::IntOrAuto, Value::String(s)) if s == "auto" => Value::String(s),
        (Kind::Int | Kind::IntOrAuto, Value::Integer(n)) if (0..=COUNT_MAX).contains(&n) => Value::Integer(n),
        (Kind::Int | Kind::IntOrAuto, Value::String(s)) => {
            Value::Integer(suffixed(&s).filter(|n| *n <= COUNT_MAX).ok_or(given)?)
        }
        (Kind::Seed, Value::Integer(n)) if n >= 0 => Value::Integer(n),
        (Kind::Seed, Value::String(s)) => seed(s.trim()).ok_or(given)?,
        (Kind::Float, Value::Float(x)) if x.is_finite() => Value::Float(x),
        (Kind::Float, Value::Integer(n)) => Value::Float(n as f64),
        (Kind::Bool, Value::Boolean(b)) => Value::Boolean(b),
        (Kind::Text, Value::String(s)) => Value::String(s),
        // `--set layout.schedule=1f1b` reads as a word, a lone digit would not.
        (Kind::Texts, Value::Array(a)) if a.iter().all(Value::is_str) => Value::Array(a),
        (Kind::Ints, Value::Array(a)) if a.iter().all(is_count) => Value::Array(a),
        (Kind::Floats, Value::Array(a)) => {
            let float = |v| match v {
                Value::Float(x) if x.is_finite() => Some(Value::Float(x)),
                Value::Integer(n) => Some(Value::Float(n as f64)),
                _ => None,
            };
            Value::Array(a.into_iter().map(float).collect::<Option<_>>().ok_or(given)?)
        }
        _ => return Err(given),
    };
    Ok(fits)
}

fn is_count(value: &Value) -> bool {
    value.as_integer().is_some_and(|n| (0..=COUNT_MAX).contains(&n))
}

/// A seed below 2^64: a number where TOML has room for it, so that one seed has one form in the run's definition.
fn seed(text: &str) -> Option<Value> {
    let digits = text.replace('_', "");
    let n = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.strip_prefix('+').unwrap_or(&digits).parse::<u64>(),
    };
    n.ok().map(|n| i64::try_from(n).map_or_else(|_| Value::String(n.to_string()), Value::Integer))
}

fn suffixed(text: &str) -> Option<i64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale: i64 = match &text[digits.len()..] {
        "" => 1,
        "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    digits.parse::<i64>().ok().filter(|n| *n >= 0)?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use crate::Run;

    fn run(set: &str) -> Result<Run, String> {
        let text =
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";
        let file = format!("{text}{}\n", set.replace("train.", ""));
        let sets = [set.replace(" = ", "=")];
        let by_set = Run::parse(text, "t", &sets, 1).map_err(|e| e.to_string());
        let by_file = Run::parse(&file, "t", &[], 1).map_err(|e| e.to_string());
        assert_eq!(by_set.as_ref().map(Run::definition).ok(), by_file.map(|run| run.definition()).ok(), "{set}");
        by_set
    }

    #[test]
    fn seeds_have_all_64_bits_in_a_file_and_on_the_command_line() {
        for (written, seed) in [
            ("0", 0),
            ("7", 7),
            ("\"7\"", 7),
            ("9223372036854775807", (1 << 63) - 1),
            ("9223372036854775808", 1 << 63),
            ("\"9223372036854775808\"", 1 << 63),
            ("0x8000000000000001", (1 << 63) + 1),
            ("18_446_744_073_709_551_615", u64::MAX),
        ] {
            let run = run(&format!("train.seed = {written}")).unwrap();
            assert_eq!(run.train.seed, seed, "{written}");
            let again = Run::parse(&run.values.to_toml(), "t", &[], 1).unwrap();
            assert_eq!((again.train.seed, again.definition()), (seed, run.definition()), "{written}");
        }
        // One seed is one definition, however it is written.
        assert_eq!(run("train.seed = \"7\"").unwrap().definition(), run("train.seed = 7").unwrap().definition());
        for wrong in ["18446744073709551616", "-1", "1.5", "\"7K\"", "\"\"", "true"] {
            let error = run(&format!("train.seed = {wrong}")).unwrap_err();
            assert!(error.contains("train.seed") && error.contains("18446744073709551615"), "{error}");
        }
    }

    #[test]
    fn numbers_without_room_are_refused_as_written() {
        for (key, value) in
            [("train.steps", "99999999999999999999"), ("train.lr", "1e999"), ("train.seq", "0xffffffffffffffffff")]
        {
            let error = run(&format!("{key} = {value}")).unwrap_err();
            assert!(error.contains(key) && error.contains(value), "{error}");
        }
    }
}
