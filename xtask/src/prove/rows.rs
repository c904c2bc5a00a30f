//! The table: for each grid the layouts that must give its digest, and runs that change layout in the middle.

/// How a run gets to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Course {
    /// In one go.
    Straight,
    /// Asked to stop by a signal in the middle; goes on under these keys instead.
    Stopped(Vec<String>),
    /// Loses all but the checkpoint in the middle; goes on from there under these keys instead.
    Restored(Vec<String>),
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Index into [`super::grids::GRIDS`].
    pub grid: usize,
    /// Keys of the layout, as `--set` takes them.
    pub sets: Vec<String>,
    /// The instruction path; `None`: the widest.
    pub simd: Option<&'static str>,
    /// How it ends.
    pub course: Course,
}

impl Row {
    /// Its name in the table.
    pub fn label(&self) -> String {
        let mut label = short(&self.sets);
        if let Some(simd) = self.simd {
            label = format!("{label} {simd}");
        }
        match &self.course {
            Course::Straight => label,
            Course::Stopped(then) => format!("{label}, SIGTERM, then {}", short(then)),
            Course::Restored(then) => format!("{label}, half, then {}", short(then)),
        }
    }
}

/// The keys without their sections.
pub fn short(sets: &[String]) -> String {
    let word = |set: &String| {
        let word = set.split_once('.').map_or(set.as_str(), |(_, word)| word);
        // Of a path its name is enough.
        match word.split_once('=') {
            Some((key, path)) if path.contains('/') => {
                format!("{key}={}", path.rsplit('/').next().unwrap_or(path))
            }
            _ => word.replace(' ', ""),
        }
    };
    let words = sets.iter().map(word);
    words.collect::<Vec<_>>().join(" ")
}

/// `dp=2 cells=[3,1]` as keys; bare keys are those of the layout.
pub fn sets(text: &str) -> Vec<String> {
    let key = |word: &str| match word.starts_with("ranks_per_host") {
        true => format!("cluster.{word}"),
        false => format!("layout.{word}"),
    };
    // Schedule files lie beside this one.
    let place = |word: String| {
        word.replace("schedule_file=", concat!("schedule_file=", env!("CARGO_MANIFEST_DIR"), "/src/prove/"))
    };
    text.split_whitespace().map(key).map(place).collect()
}

const STRAIGHT: &[&[&str]] = &[
    &[
        "dp=2",
        "dp=3",
        "dp=4",
        "dp=2 cells=[3,1]",
        "dp=3 cells=[1,1,2] transport=threads",
        "tp=2",
        "tp=2 transport=threads",
        "pp=2",
        "pp=4",
        "pp=2 stages=[1,3] schedule=gpipe",
        "pp=3 schedule=gpipe",
        "pp=2 schedule=interleaved",
        "dp=2 zero=1",
        "dp=2 tp=2 transport=tcp",
        "dp=2 tp=2 pp=2",
        "dp=4 ranks_per_host=2",
        "dp=2 tp=2 pp=2 zero=1 ranks_per_host=4",
        "dp=3 tp=2 cells=[1,2,1] zero=1 ranks_per_host=3",
        "threads=2",
        "dp=2 threads=2",
        "pp=4 schedule=zb-h1",
        "pp=2 schedule=zbv",
        "pp=2 schedule=zbv keep_packed=true threads=2",
        "dp=2 tp=2 pp=2 zero=1 keep_packed=true",
        "keep_packed=true threads=1",
        "dp=2 tp=2 pp=2 schedule=dualpipe-v",
        "recompute=full threads=1",
        "tp=2 recompute=selective",
        "tp=2 tp_overlap=false",
        "tp=2 tp_pairs=true",
        "dp=2 tp=2 zero=1 tp_pairs=true recompute=selective",
        "tp=2 transport=tcp",
        "tp=2 ranks_per_host=1 transport=tcp",
        "dp=2 tp=2 pp=2 recompute=full recompute_layers=[0,3]",
        "dp=2 zero=2",
        "dp=3 zero=3",
        "dp=4 tp=2 zero=3 shard=2",
        "offload=optimizer threads=1",
        "dp=2 pp=2 zero=1 offload=optimizer",
        "offload=activations threads=1",
        "tp=2 pp=2 schedule=gpipe offload=optimizer+activations",
        "pp=2 schedule=zb-h1 recompute=selective offload=activations",
        "pp=2 schedule=csv schedule_file=v.csv",
        "tp=2 pp=2 schedule=csv schedule_file=v.csv recompute=full transport=tcp",
    ],
    &[
        "dp=2 zero=1",
        "dp=3 zero=1",
        "dp=4 zero=1 transport=tcp",
        "dp=3 cells=[1,2,1] zero=1 transport=threads",
        "pp=2 transport=tcp",
        "pp=3 stages=[1,2,3]",
        "pp=4 stages=[2,1,1,2] schedule=gpipe",
        "dp=2 pp=2 zero=1",
        "dp=2 pp=2 cells=[1,3] stages=[4,2] zero=1",
        "dp=2 pp=2 zero=1 transport=threads ranks_per_host=2",
        "pp=3 schedule=interleaved",
        "dp=4 pp=2 schedule=interleaved vpp=3",
        "dp=4 pp=2 schedule=interleaved stages=[1,2,2,1] zero=1",
        "pp=2 schedule=zb-h1",
        "dp=2 pp=3 schedule=zb-h1 stages=[1,2,3] zero=1 transport=tcp",
        "pp=3 schedule=zbv",
        "dp=3 pp=2 schedule=zbv cells=[1,2,1] stages=[1,2,2,1] zero=1",
        "pp=3 schedule=dualpipe-v transport=threads",
        "dp=2 pp=2 recompute=full zero=1",
        "pp=3 schedule=zbv recompute=selective",
    ],
    &[
        "tp=2",
        "tp=4",
        "tp=4 transport=tcp",
        "tp=4 transport=threads",
        "tp=4 ranks_per_host=2",
        "tp=2 threads=2",
        "pp=4",
        "tp=2 pp=2 stages=[3,1]",
        "tp=4 pp=2 schedule=gpipe",
        "tp=2 pp=2 schedule=interleaved",
        "tp=2 pp=2 schedule=zbv",
        "tp=4 pp=2 schedule=dualpipe-v",
        "tp=2 pp=2 recompute=full schedule=zb-h1",
    ],
    &[
        "dp=5",
        "dp=8",
        "dp=5 cells=[1,2,1,3,1] zero=1",
        "dp=6 ranks_per_host=3",
        "dp=3 tp=2 cells=[5,2,1]",
        "dp=4 tp=2 zero=1 ranks_per_host=2",
        "pp=4 schedule=gpipe",
        "dp=2 pp=3 stages=[2,1,1]",
        "dp=2 pp=2 schedule=interleaved",
        "dp=2 tp=2 pp=2 schedule=interleaved zero=1 transport=tcp",
        "dp=2 tp=2 pp=2 schedule=zb-h1 zero=1",
        "pp=2 schedule=dualpipe-v",
    ],
    &[
        "tp=2",
        "tp=2 transport=tcp",
        "dp=2",
        "dp=3 cells=[1,2,1] zero=1",
        "pp=2",
        "pp=4 schedule=gpipe transport=threads",
        "dp=2 tp=2 pp=2 zero=1",
        "tp=2 pp=2 schedule=interleaved",
        "threads=2",
        "recompute=full threads=1",
        "dp=2 tp=2 pp=2 recompute=full",
    ],
    &[
        "dp=4 zero=1",
        "dp=2 pp=3",
        "pp=3 schedule=gpipe",
        "dp=2 ranks_per_host=1",
        "pp=2 stages=[1,2]",
        "dp=2 recompute=full",
        "pp=3 recompute=full recompute_layers=[0,2]",
    ],
    &[
        "cp=2",
        "cp=2 transport=tcp",
        "cp=2 threads=2",
        "cp=2 zero=1",
        "dp=2",
        "dp=2 cp=2",
        "dp=2 cp=2 zero=1 ranks_per_host=2",
        "cp=2 tp=2",
        "dp=2 cp=2 tp=2",
        "cp=2 pp=2",
        "cp=2 pp=2 schedule=interleaved transport=threads",
        "cp=2 tp=2 pp=2 schedule=zb-h1 zero=1",
        "dp=2 cp=2 pp=2 schedule=zbv",
        "dp=2 tp=2 pp=2 schedule=dualpipe-v",
    ],
    &[
        "cp=2",
        "cp=4",
        "cp=4 transport=threads",
        "cp=4 ranks_per_host=2",
        "dp=4",
        "dp=2 cp=2",
        "dp=2 cp=4 zero=1",
        "dp=3 cp=2 cells=[1,2,1] zero=1 transport=threads",
        "cp=4 pp=2 schedule=gpipe",
        "dp=2 cp=2 pp=2 schedule=zb-h1 zero=1",
    ],
    &[
        "cp=2",
        "dp=2 cp=2 zero=1 shard=2",
        "cp=2 tp=2 zero=1",
        "dp=2 cp=2 pp=2",
        "tp=2 pp=2 schedule=interleaved",
        "cp=2 recompute=full",
    ],
    &[
        "dp=2",
        "dp=3 pp=2",
        "tp=2 pp=2",
        "dp=4 zero=1 shard=2",
        "dp=2 zero=2",
        "dp=3 zero=2",
        "dp=4 zero=2 transport=tcp",
        "dp=4 zero=2 shard=2",
        "dp=2 zero=3",
        "dp=3 cells=[1,2,1] zero=3",
        "dp=4 zero=3 transport=threads",
        "dp=4 zero=3 shard=2 reshard=after_backward",
        "dp=2 tp=2 zero=3",
        "dp=2 pp=2 zero=3 reshard=after_backward",
        "dp=2 tp=2 pp=2 zero=3",
        "dp=2 pp=2 cells=[3,1] schedule=interleaved zero=3",
        "dp=4 zero=3 ranks_per_host=2",
        "dp=2 pp=2 schedule=zbv zero=3",
        "dp=2 cp=2 zero=3",
        "dp=2 cp=2 tp=2 zero=2 shard=2",
        "dp=2 pp=4 cells=[1,3] schedule=zb-h1 zero=2",
    ],
    &[
        "tp=2",
        "dp=2",
        "dp=4",
        "dp=4 transport=tcp",
        "dp=4 tp=2 zero=1",
        "pp=2",
        "dp=2 pp=2 zero=1",
        "dp=2 tp=2 pp=2 schedule=interleaved",
        "dp=4 ranks_per_host=2",
        "dp=4 transport=threads",
        "cp=2 tp=2",
        "cp=2 tp=2 tp_pairs=true",
        "dp=2 tp=2 tp_pairs=true zero=1",
        "cp=2 dp=2",
        "cp=2 tp=2 dp=4",
        "pp=2 schedule=zb-h1",
        "pp=2 schedule=zbv",
        "pp=2 schedule=dualpipe-v",
        "dp=4 recompute=full",
        "dp=2 cp=2 tp=2 recompute=full",
        "dp=2 pp=2 schedule=zb-h1 recompute=full",
        "pp=2 schedule=dualpipe-v recompute=full",
    ],
    &[
        "dp=2 zero=3",
        "dp=4 zero=2",
        "dp=4",
        "dp=4 zero=1",
        "dp=4 zero=1 shard=2 transport=tcp",
        "dp=4 tp=2 pp=2 zero=1",
        "dp=4 zero=3",
        "dp=4 zero=3 recompute=full",
        "dp=2 tp=2 zero=3 recompute=full reshard=after_backward",
        "dp=2 pp=2 zero=3 recompute=full",
    ],
];

/// (grid, before, in the middle stopped by a signal?, after)
const RESUMED: &[(usize, &str, bool, &str)] = &[
    (0, "dp=2 tp=2", true, "pp=2 schedule=interleaved"),
    (0, "pp=4", false, "dp=3 zero=1 transport=threads"),
    (1, "pp=2", true, "dp=3 zero=1"),
    (1, "dp=4 zero=1", false, "dp=2 pp=3 cells=[3,1] zero=1"),
    (2, "tp=4", false, "tp=2 pp=2 transport=tcp"),
    (3, "dp=5", true, "threads=1"),
    (3, "threads=1", false, "dp=8 zero=1"),
    (4, "tp=2", true, "dp=2 pp=2"),
    (5, "pp=3", false, "dp=4 zero=1"),
    (6, "cp=2 tp=2", true, "dp=2 pp=2 zero=1"),
    (7, "dp=2", false, "cp=4"),
    (9, "dp=2 zero=3", true, "dp=4 zero=2"),
    (9, "dp=3 zero=2", false, "dp=2 tp=2 pp=2 zero=3"),
    (9, "dp=4 zero=3 shard=2", false, "threads=1"),
    (9, "dp=2 zero=3 offload=optimizer", true, "dp=4 zero=2 offload=optimizer"),
    (10, "dp=4", true, "dp=2 pp=2"),
    (11, "dp=4 zero=1", false, "dp=2 zero=3"),
    (11, "dp=4 zero=2", true, "dp=4 tp=2 zero=1"),
];

/// The rows that are always run; `simd`: the instruction paths of this CPU.
pub fn rows(simd: &[&'static str]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (grid, layouts) in STRAIGHT.iter().enumerate() {
        let straight = |text: &&str| Row { grid, sets: sets(text), simd: None, course: Course::Straight };
        rows.extend(layouts.iter().map(straight));
        if grid == 0 {
            let paths = simd.iter().flat_map(|path| [("threads=1", *path), ("tp=2", *path)]);
            rows.extend(paths.map(|(text, path)| Row { simd: Some(path), ..straight(&text) }));
        }
    }
    rows.extend(RESUMED.iter().map(|&(grid, before, by_signal, after)| {
        let course = if by_signal { Course::Stopped(sets(after)) } else { Course::Restored(sets(after)) };
        Row { grid, sets: sets(before), simd: None, course }
    }));
    rows.sort_by_key(|row| row.grid);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prove::grids::{GRIDS, parse};

    #[test]
    fn at_least_forty_layouts_all_sound_and_none_twice() {
        let rows = rows(&["scalar", "avx2"]);
        assert!(rows.len() >= 40);
        for (i, row) in rows.iter().enumerate() {
            assert!(!rows[..i].contains(row), "{} {} twice", GRIDS[row.grid].name, row.label());
            let then = match &row.course {
                Course::Straight => None,
                Course::Stopped(then) | Course::Restored(then) => Some(then),
            };
            for sets in std::iter::once(&row.sets).chain(then) {
                let run = parse(row.grid, sets).unwrap_or_else(|e| panic!("{}: {e}", row.label()));
                train::launch::prove(&run).unwrap_or_else(|e| panic!("{}: {e}", row.label()));
            }
        }
    }

    #[test]
    fn every_axis_is_there() {
        let all: String = rows(&[]).iter().map(|row| row.label() + "\n").collect();
        let wanted = [
            "dp=2",
            "dp=3",
            "dp=4",
            "dp=5",
            "cells=",
            "tp=2",
            "tp=4",
            "cp=2",
            "cp=4",
            "pp=2",
            "pp=3",
            "pp=4",
            "stages=",
            "zero=1",
            "zero=2",
            "zero=3",
            "shard=2",
            "reshard=after_backward",
        ];
        let more = [
            "gpipe",
            "interleaved",
            "zb-h1",
            "zbv",
            "dualpipe-v",
            "schedule_file=v.csv",
            "vpp=3",
            "threads=2",
            "=tcp",
            "=threads",
            "ranks_per_host",
            "SIGTERM",
            "half",
        ];
        for word in wanted.into_iter().chain(more) {
            assert!(all.contains(word), "{word}");
        }
    }

    #[test]
    fn labels_are_short() {
        assert_eq!(short(&sets("dp=2 cells=[3,1] ranks_per_host=1")), "dp=2 cells=[3,1] ranks_per_host=1");
    }
}
