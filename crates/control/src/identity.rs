//! What makes a process one of a run: it computes the same numbers, in the same run, from the same data.
//!
//! Every process says it before it gets a place, at the start, after a failure, as a spare, or on another host, and the
//! controller compares it with the run's. Paths do not enter: what counts is what was read there.

use serde::{Deserialize, Serialize};

/// Names and values, as `train` found them: what was read, and what follows from it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity(pub Vec<(String, String)>);

impl Identity {
    /// What a process says of itself that the run, `self`, is not: each name with both values. Empty: it is of this run.
    pub fn differences(&self, of_process: &Self) -> Vec<String> {
        let find = |list: &Self, name: &str| list.0.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in self.0.iter().chain(&of_process.0) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let show = |value: Option<String>| value.unwrap_or_else(|| "nothing".into());
        let differ = names.into_iter().map(|name| (name, find(self, name), find(of_process, name)));
        let differ = differ.filter(|(_, ours, theirs)| ours != theirs);
        differ.map(|(name, ours, theirs)| format!("{name} {} there, {} in the run", show(theirs), show(ours))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_with_both_values() {
        let identity = |list: &[(&str, &str)]| {
            Identity(list.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
        };
        let run = identity(&[("numerics version", "8"), ("documents", "8"), ("bytes", "640")]);
        assert!(run.differences(&run.clone()).is_empty());
        let other = identity(&[("numerics version", "8"), ("documents", "9"), ("bytes", "640"), ("masks", "true")]);
        let want = ["documents 9 there, 8 in the run", "masks true there, nothing in the run"];
        assert_eq!(run.differences(&other), want);
        let less = identity(&[("numerics version", "8"), ("bytes", "640")]);
        assert_eq!(run.differences(&less), ["documents nothing there, 8 in the run"]);
    }
}
