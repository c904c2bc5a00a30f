//! What was read as what, for people.

use std::collections::BTreeMap;
use std::path::Path;

use super::look::{Form, Look};
use super::unpack::Wrapping;

/// Endings of names that are told; the rest are counted.
const ENDINGS_MAX: usize = 6;
/// Files of each kind of exception that are named.
const NAMES_MAX: usize = 3;
/// Longer endings are none.
const ENDING_BYTES_MAX: usize = 12;

/// Files of one kind that are told by name: how many, and the first ones.
#[derive(Debug, Default)]
struct Named {
    count: u64,
    first: Vec<String>,
}

impl Named {
    fn add(&mut self, path: &Path) {
        self.count += 1;
        if self.first.len() < NAMES_MAX {
            self.first.push(path.display().to_string());
        }
    }

    fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.first.extend(other.first);
        self.first.truncate(NAMES_MAX);
    }

    fn names(&self) -> String {
        let more = self.count - self.first.len() as u64;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        self.first.join(", ") + &more
    }
}

/// Counts of files by what they were read as, and of what was left out.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    /// Files of each form by the endings of their names.
    forms: BTreeMap<Form, BTreeMap<String, u64>>,
    /// README and the like in folders.
    companions: Named,
    /// Files with a byte order mark.
    marks: u64,
    /// Files whose bytes are not UTF-8.
    not_utf8: Named,
    /// Files without a byte, in folders.
    pub(crate) empty_files: u64,
    /// Lines whose text is empty.
    pub(crate) empty_lines: u64,
    /// Documents in lines of JSON.
    pub(crate) line_documents: u64,
}

impl Kinds {
    /// A file that is read as `look` says.
    pub(crate) fn file(&mut self, path: &Path, look: &Look) {
        *self.forms.entry(look.form).or_default().entry(ending(path, look.wrapping)).or_default() += 1;
        self.marks += u64::from(look.mark);
    }

    pub(crate) fn companion(&mut self, path: &Path) {
        self.companions.add(path);
    }

    pub(crate) fn not_utf8(&mut self, path: &Path) {
        self.not_utf8.add(path);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        for (form, endings) in other.forms {
            let into = self.forms.entry(form).or_default();
            endings.into_iter().for_each(|(ending, files)| *into.entry(ending).or_default() += files);
        }
        self.companions.merge(other.companions);
        self.marks += other.marks;
        self.not_utf8.merge(other.not_utf8);
        self.empty_files += other.empty_files;
        self.empty_lines += other.empty_lines;
        self.line_documents += other.line_documents;
    }

    /// A line for each kind; `field` is the one with the text of a line of JSON.
    pub(crate) fn describe(&self, field: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for (form, endings) in &self.forms {
            let files = plural(endings.values().sum(), "file");
            let endings = told(endings);
            lines.push(match form {
                Form::Text => format!("read as text, a document each: {files} ({endings})"),
                Form::Lines => {
                    let documents = match self.line_documents {
                        0 => String::new(),
                        documents => format!(", {}", plural(documents, "document")),
                    };
                    format!("read as JSON lines, the text in field `{field}`: {files} ({endings}){documents}")
                }
            });
        }
        if self.companions.count > 0 {
            let files = plural(self.companions.count, "file");
            let names = self.companions.names();
            lines.push(format!("left out: {files} such as README or LICENSE ({names}); name them to read them"));
        }
        if self.empty_files > 0 {
            lines.push(format!("{} empty files in folders left out", self.empty_files));
        }
        if self.empty_lines > 0 {
            lines.push(format!("{} lines with an empty text left out", self.empty_lines));
        }
        if self.not_utf8.count > 0 {
            let files = plural(self.not_utf8.count, "file");
            let names = self.not_utf8.names();
            lines.push(format!("{files} not in UTF-8, whose bytes are taken as they are ({names})"));
        }
        if self.marks > 0 {
            lines.push(format!("the byte order marks of {} are left out", plural(self.marks, "file")));
        }
        lines
    }
}

fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The most frequent endings with their counts.
fn told(endings: &BTreeMap<String, u64>) -> String {
    let mut sorted: Vec<_> = endings.iter().collect();
    sorted.sort_by_key(|&(ending, &count)| (std::cmp::Reverse(count), ending));
    let rest: u64 = sorted.iter().skip(ENDINGS_MAX).map(|(_, count)| **count).sum();
    let named = sorted.iter().take(ENDINGS_MAX).map(|(ending, count)| format!("{ending} {count}"));
    named.chain((rest > 0).then(|| format!("others {rest}"))).collect::<Vec<_>>().join(", ")
}

/// The end of a name, with what its compression adds: `.jsonl.gz`.
fn ending(path: &Path, wrapping: Wrapping) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let (stem, last) = match name.rsplit_once('.') {
        Some((stem, last)) if !stem.is_empty() && last.len() <= ENDING_BYTES_MAX => (stem, last),
        _ => return "no ending".into(),
    };
    match stem.rsplit_once('.') {
        Some((_, before)) if wrapping != Wrapping::None && before.len() <= ENDING_BYTES_MAX => {
            format!(".{before}.{last}")
        }
        _ => format!(".{last}"),
    }
}
