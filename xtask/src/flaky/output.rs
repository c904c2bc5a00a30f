//! Reads what a test program prints.

/// A test that failed.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its name, with its modules.
    pub test: String,
    /// What it said.
    pub output: String,
}

/// The failed tests, each with its output.
pub fn failures(said: &str) -> Vec<Failure> {
    let name = |line: &str| line.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(str::to_owned);
    let mut names: Vec<String> = said.lines().filter_map(name).collect();
    names.sort();
    names.dedup();
    names.into_iter().map(|test| Failure { output: section(said, &test), test }).collect()
}

/// How many passed.
pub fn passed(said: &str) -> usize {
    said.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ... ok")).count()
}

/// What stands under the title of `test`.
fn section(said: &str, test: &str) -> String {
    let title = |line: &str| line.starts_with("---- ") && line.ends_with(" stdout ----");
    let own = format!("---- {test} stdout ----");
    let lines = said.lines().skip_while(|line| *line != own).skip(1);
    let lines: Vec<_> = lines.take_while(|line| !title(line) && *line != "failures:").collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_their_output_and_others_none() {
        let said = "\nrunning 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n\nfailures:\n\n\
                    ---- a::c stdout ----\none\ntwo\n\n---- d stdout ----\nthree\n\nfailures:\n    a::c\n    d\n\n\
                    test result: FAILED. 1 passed; 2 failed\n";
        let found = failures(said);
        let shown: Vec<_> = found.iter().map(|f| (f.test.as_str(), f.output.trim_end())).collect();
        assert_eq!(shown, [("a::c", "one\ntwo"), ("d", "three")]);
        assert_eq!(passed(said), 1);
        assert_eq!(failures("test a ... ok\n"), []);
    }
}
