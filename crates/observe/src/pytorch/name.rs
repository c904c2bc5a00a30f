//! Whose dump a file is, by its name.

/// What a file's name tells of its rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// This one.
    Rank(u32),
    /// It could be any of these.
    Several(Vec<u32>),
    /// It is not named as dumps are.
    No,
}

/// What comes before "rank" where the number is not the rank among all.
const OTHER_RANKS: [&str; 4] = ["local", "node", "group", "role"];

/// Reads `_dump_12.json`, `nccl_trace_rank_12`, `fr_trace_rank_12.json`, `rank_12_node-03.json`, `trace_12` and the like: the
/// number behind "rank", or where there is no such word behind "dump" or "trace". Any other number in a name (a host, a job, a
/// date) is no rank, wherever it stands.
pub fn rank_of(file_name: &str) -> Named {
    let lower = file_name.to_ascii_lowercase();
    let mut stem = lower.as_str();
    while let Some((head, _)) = stem.rsplit_once('.').filter(|(_, end)| ENDINGS.contains(end)) {
        stem = head;
    }
    let ranks = numbers(stem, "rank");
    let of_all: Vec<u32> = ranks.iter().filter(|(_, before)| !other(before)).map(|(n, _)| *n).collect();
    let found = match (of_all.is_empty(), ranks.is_empty()) {
        (false, _) => of_all,
        // Only ranks among others.
        (true, false) => return Named::Several(ranks.into_iter().map(|(n, _)| n).collect()),
        (true, true) => ["dump", "trace"].iter().flat_map(|word| numbers(stem, word)).map(|(n, _)| n).collect(),
    };
    match found.as_slice() {
        [] => Named::No,
        [first, rest @ ..] if rest.iter().all(|n| n == first) => Named::Rank(*first),
        _ => Named::Several(found),
    }
}

const ENDINGS: [&str; 6] = ["json", "pickle", "pkl", "txt", "gz", "tmp"];

fn other(before: &str) -> bool {
    let before = before.trim_end_matches(['_', '-', '.']);
    OTHER_RANKS.iter().any(|word| before.ends_with(word))
}

/// Numbers that follow `word` in `stem`, each with what stands before the word. A word is no part of a longer one, and a number
/// that another number follows (`dump_20261201_3`) is none of ours.
fn numbers<'a>(stem: &'a str, word: &str) -> Vec<(u32, &'a str)> {
    let mut found = Vec::new();
    for (at, _) in stem.match_indices(word) {
        let (before, after) = (&stem[..at], &stem[at + word.len()..]);
        if before.ends_with(|c: char| c.is_ascii_alphanumeric()) {
            continue;
        }
        let after = after.strip_prefix(['_', '-', '.', '=']).unwrap_or(after);
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        let rest = after[digits..].trim_start_matches(['_', '-', '.']);
        if rest.starts_with(|c: char| c.is_ascii_digit()) && word != "rank" {
            continue;
        }
        found.extend(after[..digits].parse().ok().map(|n| (n, before)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_from_the_word_before_them() {
        let rank = [
            ("_dump_12.json", 12),
            ("fr_trace_rank_0.json", 0),
            ("nccl_trace_rank_7", 7),
            ("comm_lib_trace_rank_31", 31),
            ("rank_2_node-02.json", 2),
            ("rank3.json", 3),
            ("node-17_rank-4.json", 4),
            ("trace_20261201_rank_5.json", 5),
            ("local_rank_1_rank_9.json", 9),
            ("host12_dump_6.pickle", 6),
            ("_dump_2_node-01.json", 2),
            ("trace_8", 8),
            ("rank_1_of_rank_1.json", 1),
        ];
        for (name, n) in rank {
            assert_eq!(rank_of(name), Named::Rank(n), "{name}");
        }
        for name in [
            "node-02.json",
            "job_17.json",
            "3.json",
            "dump_20261201_3.json",
            "drank_4.json",
            "summary.json",
            "rank.json",
        ] {
            assert_eq!(rank_of(name), Named::No, "{name}");
        }
        assert_eq!(rank_of("rank_1_rank_2.json"), Named::Several(vec![1, 2]));
        assert_eq!(rank_of("node_rank_1.json"), Named::Several(vec![1]));
        assert_eq!(rank_of("rank_99999999999.json"), Named::No);
    }
}
