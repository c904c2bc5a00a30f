//! Lines of JSON as documents.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// What Python writes for a number that is none; JSON has no such words. Longer ones first.
const NO_NUMBERS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// The text in the field `field` of a line of JSON; else what is wrong. `NaN` and `Infinity`, which some programs
/// write, count as `null`.
pub(crate) fn text_of(line: &[u8], field: &str) -> Result<String, String> {
    let text = parse(line, field).or_else(|error| match without_no_numbers(line) {
        Some(line) => parse(&line, field),
        None => Err(error),
    });
    text?.ok_or_else(|| format!("there is no field `{field}` in it"))
}

/// True if `line` is one JSON object.
pub(crate) fn is_object(line: &[u8]) -> bool {
    let whole = |line: &[u8]| serde_json::from_slice::<IgnoredAny>(line).is_ok();
    line.trim_ascii_start().starts_with(b"{")
        && (whole(line) || without_no_numbers(line).is_some_and(|line| whole(&line)))
}

fn parse(line: &[u8], field: &str) -> Result<Option<String>, String> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let text = Field(field).deserialize(&mut json).map_err(|e| e.to_string())?;
    json.end().map_err(|e| e.to_string())?;
    Ok(text)
}

/// `line` with `null` for each of [`NO_NUMBERS`] outside of strings; `None` if there is none.
fn without_no_numbers(line: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut rest, mut inside, mut found) = (Vec::with_capacity(line.len()), line, false, false);
    while let Some(&byte) = rest.first() {
        if let Some(word) = NO_NUMBERS.iter().find(|word| !inside && rest.starts_with(word)) {
            out.extend_from_slice(b"null");
            rest = &rest[word.len()..];
            found = true;
            continue;
        }
        // What is escaped ends no string.
        let len = if inside && byte == b'\\' { rest.len().min(2) } else { 1 };
        inside ^= byte == b'"';
        out.extend_from_slice(&rest[..len]);
        rest = &rest[len..];
    }
    found.then_some(out)
}

/// Takes one field out of an object without building the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a text in its field `{}`", self.0)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut text = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if text.is_some() {
                return Err(M::Error::custom(format!("the field `{key}` stands twice in it")));
            }
            text = Some(map.next_value::<String>()?);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_give_their_field_or_a_reason() {
        assert_eq!(text_of(br#"{"id":[1,{"text":"no"}],"text":"a\u00e9\n"}"#, "text"), Ok("a\u{e9}\n".into()));
        assert_eq!(text_of(b" {\"body\":\"b\"} \n", "body"), Ok("b".into()));
        for bad in [
            "{",
            "{}",
            "[]",
            "\"text\"",
            r#"{"text":1}"#,
            r#"{"text":null}"#,
            r#"{"text":"a"} x"#,
            "nonsense",
            r#"{"text":"a","text":"b"}"#,
            "{\"text\":\"\u{1}\"}",
            r#"{"text":"\ud800"}"#,
            r#"{"text":NaN}"#,
            r#"{"text":"a","x":Nan}"#,
        ] {
            assert!(text_of(bad.as_bytes(), "text").is_err(), "{bad}");
        }
        assert!(text_of(b"{\"text\":\"\xff\"}", "text").is_err());
    }

    #[test]
    fn numbers_that_are_none_do_not_break_a_line() {
        let line = br#"{"a":NaN,"b":[-Infinity, 1],"text":"NaN \"Infinity\" \\","c":{"d":Infinity}}"#;
        assert_eq!(text_of(line, "text"), Ok("NaN \"Infinity\" \\".into()));
        assert!(
            is_object(line) && is_object(b" {} \n") && !is_object(b"{\n") && !is_object(b"[]") && !is_object(b"{} {}")
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_text_or_a_reason(line: Vec<u8>, at in 0usize..40, byte: u8) {
            let _ = text_of(&line, "text");
            let mut near = br#"{"id": 1e9, "text": "a \u0041 text", "x": [null]}"#.to_vec();
            near[at] = byte;
            let _ = text_of(&near, "text");
            let _ = is_object(&line);
        }
    }
}
