//! A controller with agents that only remember what they were told.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use events::wall::Wall;
use events::{Event, Step};
use fabric::FabricOptions;
use policy::{Laws, Piece, Process};
use spec::Run;

use super::{Config, Controller, Judgement, Survey, Trade};
use crate::agent::{Agents, Heard, News};
use crate::identity::Identity;
use crate::wire::{FabricSpec, FromRank, ToRank};

struct Anything;

impl Laws for Anything {
    fn fits(&self, _: &Run) -> Result<(), String> {
        Ok(())
    }

    fn lost(&self, _: &Run, holds: &[Option<&[Piece]>], _: &Run) -> Option<String> {
        holds.iter().all(Option::is_none).then(|| "everything".into())
    }
}

impl Trade for Anything {
    fn laws(&self) -> Box<dyn Laws> {
        Box::new(Anything)
    }
    fn fabric(&self, _: &Run, _: u64) -> FabricOptions {
        FabricOptions::default()
    }
    fn cores(&self, _: &Run) -> Vec<Vec<usize>> {
        Vec::new()
    }
    fn verdict(&self, _: &Run, _: &[Option<serde_json::Value>]) -> Judgement {
        Judgement { ranks: Vec::new(), reason: String::new(), still_ms: 0 }
    }
    fn hold(&self, _: &[u64], _: Option<u64>) {}
    fn survey(&self, _: &Run) -> Survey {
        Survey::default()
    }
    fn record(&self, _: &events::Intervention, _: &str) -> Result<(), String> {
        Ok(())
    }
    fn distrust(&self, _: &Run, _: u64) -> Vec<String> {
        Vec::new()
    }
}

struct Recorder {
    silent: Receiver<News>,
    said: Vec<(Process, ToRank)>,
}

impl Agents for Recorder {
    fn news(&self) -> &Receiver<News> {
        &self.silent
    }
    fn spawn(&mut self, _: &str, _: Process, _: u64, _: &serde_json::Value) {}
    fn say(&mut self, process: Process, word: &ToRank) {
        self.said.push((process, word.clone()));
    }
    fn kill(&mut self, _: Process) {}
    fn stop(&mut self, _: Process) {}
    fn strike(&mut self, _: Process) {}
    fn fabric(&mut self, processes: &[Process], _: bool, _: &FabricOptions) -> io::Result<Vec<FabricSpec>> {
        Ok(vec![FabricSpec::Shm("nowhere".into()); processes.len()])
    }
}

fn config(folder: &std::path::Path, sets: &[&str]) -> Config {
    let text = "[model]\npreset = \"tiny\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 24\nbatch = 16\nseq = 64\n[grid]\ndp = 4\n";
    let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
    Config {
        run: Run::parse(text, "test", &sets, 2).unwrap(),
        cores: 2,
        identity: Identity(vec![("documents".into(), "8".into())]),
        from: None,
        unchecked: None,
        job: serde_json::Value::Null,
        journal: folder.join("journal.jsonl"),
        faults: Vec::new(),
        began: Instant::now(),
        wall: Wall::default(),
        hosts: 0,
    }
}

/// A process that has read so many documents.
fn ready(documents: &str) -> FromRank {
    FromRank::Ready { identity: Identity(vec![("documents".into(), documents.into())]) }
}

fn step(step: u64) -> FromRank {
    let text = format!(
        "{{\"step\":{step},\"steps\":24,\"loss\":1.0,\"grad_norm\":1.0,\"lr\":0.1,\"tokens\":1,\"seconds\":0.1,\"tokens_per_s\":1.0,\"tokens_per_s_rank\":1.0,\"mfu\":0.1}}"
    );
    FromRank::Event(Event::Step(serde_json::from_str::<Step>(&text).unwrap()))
}

/// The checks of two ranks' third step go on under another controller, in the same process and in another one.
#[test]
fn a_check_by_a_spare_outlives_its_controller() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["layout.dp=2", "guard.spares=1"]);
    let mut agents = Recorder { silent: channel().1, said: Vec::new() };
    let mut seen = Vec::new();
    let mut controller = Controller::new(&config, &Anything).unwrap();
    let checked = |process, step| {
        let leaves = vec![(0, 10), (1, 11)];
        News::Process(Process(process), Heard::Said(FromRank::Checked { step, leaves, seconds: 0.1, problem: None }))
    };
    controller.hear(News::Joined { host: "a".into(), slots: 3 }, &mut agents, &mut |_| ());
    let mut says = |process, word| {
        controller.hear(News::Process(Process(process), Heard::Said(word)), &mut agents, &mut |_| ());
    };
    (0..3).for_each(|process| says(process, ready("8")));
    for process in 0..2 {
        says(process, FromRank::Loaded { generation: 1, step: 0, bytes: 0, seconds: 0.1 });
    }
    for n in 1..=3 {
        says(0, step(n));
        if n == 2 {
            let event = Event::Checkpoint { step: 2, path: "c/2".into(), bytes: 1, seconds: 0.1, written_s: None };
            says(0, FromRank::Event(event));
        }
    }
    (0..2).for_each(|rank| {
        says(rank, FromRank::Leaves { generation: 1, step: 3, leaves: vec![(rank, 10 + rank)] });
    });
    controller.tick(&mut agents, &mut |_| ());
    let asked = |said: &[(Process, ToRank)]| {
        said.iter().filter(|(p, word)| *p == Process(2) && matches!(word, ToRank::Check(o) if o.step == 3)).count()
    };
    assert_eq!(asked(&agents.said), 1);
    drop(controller);
    // The process is another one: all it has is the journal.
    let mut controller = Controller::rebuild(&config, &Anything, None).unwrap();
    controller.tick(&mut agents, &mut |_| ());
    assert_eq!(asked(&agents.said), 1, "it is under way");
    let mut controller = Controller::rebuild(&config, &Anything, Some(controller.leave())).unwrap();
    controller.hear(checked(2, 3), &mut agents, &mut |event| seen.push(event.clone()));
    assert!(matches!(seen[..], [Event::Checked { step: 3, leaves: 2, .. }]), "{seen:?}");
    // And one that is over is not made again.
    let mut controller = Controller::rebuild(&config, &Anything, Some(controller.leave())).unwrap();
    controller.tick(&mut agents, &mut |_| ());
    assert_eq!(asked(&agents.said), 1);
}

/// Before there is a world a process of other data ends the run; later it gets no place, and nobody is started where it was.
#[test]
fn a_process_that_says_it_is_another_gets_no_place() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["layout.dp=2"]);
    let mut agents = Recorder { silent: channel().1, said: Vec::new() };
    let placed = |agents: &Recorder, process| {
        agents.said.iter().filter(|(p, word)| *p == Process(process) && matches!(word, ToRank::Assign(_))).count()
    };
    let mut controller = Controller::new(&config, &Anything).unwrap();
    let mut seen = Vec::new();
    let mut hear = |controller: &mut Controller, agents: &mut Recorder, process, heard| {
        controller.hear(News::Process(Process(process), heard), agents, &mut |event| seen.push(event.clone()));
    };
    controller.hear(News::Joined { host: "a".into(), slots: 2 }, &mut agents, &mut |_| ());
    (0..2).for_each(|process| hear(&mut controller, &mut agents, process, Heard::Said(ready("8"))));
    assert_eq!([0, 1].map(|process| placed(&agents, process)), [1, 1]);
    let left = Heard::Exited { how: "signal 9".into(), by_itself: false };
    (0..2).for_each(|process| hear(&mut controller, &mut agents, process, left.clone()));
    hear(&mut controller, &mut agents, 2, Heard::Said(ready("9")));
    assert!(controller.end().is_none(), "the other one is on its way");
    hear(&mut controller, &mut agents, 3, Heard::Said(FromRank::Unfit { reason: "cannot read d".into() }));
    let end = controller.end().cloned().unwrap();
    assert_eq!(end.code, 7);
    for part in ["process #2 on host a", "documents 9 there, 8 in the run", "--resume"] {
        assert!(end.reason.contains(part), "{part}: {}", end.reason);
    }
    assert_eq!([2, 3].map(|process| placed(&agents, process)), [0, 0]);
    // What the journal tells is the same again.
    let rebuilt = Controller::rebuild(&config, &Anything, None).unwrap();
    assert_eq!(rebuilt.end().map(|end| end.code), Some(7));

    let folder = tempfile::tempdir().unwrap();
    let config = self::config(folder.path(), &["layout.dp=2"]);
    let mut controller = Controller::new(&config, &Anything).unwrap();
    controller.hear(News::Joined { host: "a".into(), slots: 2 }, &mut agents, &mut |_| ());
    hear(&mut controller, &mut agents, 0, Heard::Said(ready("8")));
    hear(&mut controller, &mut agents, 1, Heard::Said(ready("9")));
    let end = controller.end().cloned().unwrap();
    assert!(end.code == 7 && end.reason.contains("documents 9 there, 8 in the run"), "{end:?}");
}
