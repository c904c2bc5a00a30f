//! The command line before it is parsed, and errors as the person, or a program, gets them.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use serde_json::json;
use train::TrainError;

use crate::show;

/// The option that takes several words.
const SET: &str = "--set";

/// The command line with one `--set=KEY=VALUE` for each word of `--set`. Its words end with the first that has no `=`: in
/// `train --set a=1 b=2 RUN.toml` the last word is the run file. `exists`: there is a file or folder of that name.
pub fn settled(args: Vec<OsString>, exists: impl Fn(&Path) -> bool) -> Vec<OsString> {
    let mut settled = Vec::with_capacity(args.len());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        if arg == "--" {
            settled.push(arg);
            settled.extend(args);
            break;
        }
        if arg != SET {
            settled.push(arg);
            continue;
        }
        let has = |word: &OsString, c: char| word.to_string_lossy().contains(c);
        let is_option = |word: &OsString| word.to_string_lossy().starts_with('-');
        let (mut words, mut others) = (Vec::new(), Vec::new());
        while let Some(word) = args.next_if(|word| {
            // A first word that is no file is most likely a KEY=VALUE that was mistyped, and the error says so.
            !is_option(word) && (has(word, '=') || words.is_empty() && others.is_empty())
        }) {
            if has(&word, '=') || !exists(Path::new(&word)) {
                words.push(word);
            } else {
                others.push(word);
            }
        }
        settled.extend(others);
        if words.is_empty() {
            // The parser says what is missing.
            settled.push(SET.into());
        }
        for word in words {
            let mut set = OsString::from("--set=");
            set.push(word);
            settled.push(set);
        }
    }
    settled
}

/// True if the person asked for JSON.
pub fn wants_json(args: impl Iterator<Item = OsString>) -> bool {
    args.take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

/// Says what ended a command: as text on standard error, or as an object of kind `error` among those on standard output.
pub fn tell(error: &TrainError, json: bool) {
    let each = match error {
        TrainError::Spec(error) => error.each().iter().map(ToString::to_string).collect(),
        other => vec![other.to_string()],
    };
    say(&error.to_string(), &each, error.exit_code(), json);
}

fn say(text: &str, each: &[String], code: i32, json: bool) {
    if json {
        let object =
            json!({ "kind": "error", "schema": events::SCHEMA, "exit_code": code, "error": text, "errors": each });
        show::line(&object.to_string());
    } else {
        // That nobody listens must not change the exit code.
        let _ = writeln!(std::io::stderr(), "error: {text}");
    }
}

/// Says why a command line is none, and the exit code of that. Help and version are no errors.
pub fn refuse(mut error: clap::Error, command: &clap::Command, json: bool) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    without_hidden(&mut error, command);
    if json {
        let text = error.render().to_string();
        let text = text.trim_end().trim_start_matches("error: ").to_owned();
        say(&text, std::slice::from_ref(&text), 2, true);
    } else {
        let _ = error.print();
    }
    ExitCode::from(2)
}

/// "Did you mean" names nothing that help hides.
fn without_hidden(error: &mut clap::Error, command: &clap::Command) {
    let hidden = hidden(command);
    let is_hidden = |word: &str| hidden.iter().any(|hidden| hidden == word.trim_start_matches('-'));
    for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue] {
        match error.remove(kind) {
            Some(ContextValue::String(word)) if !is_hidden(&word) => {
                error.insert(kind, ContextValue::String(word));
            }
            Some(ContextValue::Strings(words)) => {
                let shown: Vec<_> = words.into_iter().filter(|word| !is_hidden(word)).collect();
                if !shown.is_empty() {
                    error.insert(kind, ContextValue::Strings(shown));
                }
            }
            Some(ContextValue::String(_)) | None => {}
            Some(other) => {
                error.insert(kind, other);
            }
        }
    }
}

/// Names of commands and options that help does not show.
fn hidden(command: &clap::Command) -> Vec<String> {
    let options = command.get_arguments().filter(|arg| arg.is_hide_set()).filter_map(|arg| arg.get_long());
    let mut names: Vec<String> = options.map(str::to_owned).collect();
    for inner in command.get_subcommands() {
        if inner.is_hide_set() {
            names.push(inner.get_name().into());
        }
        names.extend(hidden(inner));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_set_end_where_there_is_no_equals_sign() {
        let of = |line: &str| {
            let args = line.split(' ').map(OsString::from).collect();
            let words = settled(args, |path| path == Path::new("run.toml") || path == Path::new("dir"));
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        for (written, meant) in [
            ("train --set a=1 b=2 run.toml", "train --set=a=1 --set=b=2 run.toml"),
            ("train run.toml --set a=1 b=2", "train run.toml --set=a=1 --set=b=2"),
            ("train --set a=1 no.toml --json", "train --set=a=1 no.toml --json"),
            ("train --set run.toml a=1", "train run.toml --set=a=1"),
            ("train --set run.toml", "train run.toml --set"),
            ("train run.toml --set layout.dp", "train run.toml --set=layout.dp"),
            ("train --set --json run.toml", "train --set --json run.toml"),
            ("train --set=a=1 run.toml", "train --set=a=1 run.toml"),
            ("reload --set a=1 dir --set b=2 c=3", "reload --set=a=1 dir --set=b=2 --set=c=3"),
            ("train --set a=1 -- --set b=2 c", "train --set=a=1 -- --set b=2 c"),
            ("train --set", "train --set"),
        ] {
            assert_eq!(of(written), meant, "{written}");
        }
    }
}
