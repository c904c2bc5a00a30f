//! Random layouts, random deaths: every wanted piece comes once, from somebody who has it, or is told to be lost.

use proptest::prelude::*;

use super::*;

const BASE: &str = "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 4\ntp = 2\naccumulate = \"reduced\"\n";

fn run(sets: &[String]) -> Run {
    Run::parse(BASE, "t", sets, 1).unwrap()
}

fn layout() -> impl Strategy<Value = Vec<String>> {
    let mirror = prop_oneof![Just("layout.mirror=true"), Just("layout.mirror=false")];
    (1usize..=4, 1usize..=2, 1usize..=2, 0usize..=3, mirror).prop_map(|(dp, tp, pp, zero, mirror)| {
        let set = |key: &str, value: usize| format!("layout.{key}={value}");
        vec![set("dp", dp), set("tp", tp), set("pp", pp), set("zero", if dp == 1 { 0 } else { zero }), mirror.into()]
    })
}

/// Every element that is wanted, once each.
fn wanted(run: &Run) -> Vec<(What, bool, usize, Slot)> {
    let of = |(rank, held): (usize, Holdings)| {
        wants(held).map(move |(what, mirror, slot)| (what, mirror, rank, slot)).collect::<Vec<_>>()
    };
    holdings(run).into_iter().enumerate().flat_map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_wanted_piece_comes_once_or_is_lost(
        before in layout(), after in layout(), tied in any::<bool>(), alive in any::<u16>(), turn in 0usize..8,
    ) {
        let with = |sets: &[String]| run(&[sets, &[format!("model.tied={tied}")]].concat());
        let (before, after) = (with(&before), with(&after));
        let world = after.layout.world();
        // Survivors take any places of the new world, nobody two.
        let mut free: Vec<usize> = (0..world).map(|i| (i + turn) % world).collect();
        let holders: Vec<Option<usize>> = (0..before.layout.world())
            .map(|rank| if alive >> rank & 1 == 1 { free.pop() } else { None })
            .collect();
        let plan = plan(&before, &holders, &[], &after);
        let has = holdings(&before);
        for m in &plan.moves {
            prop_assert_eq!(holders[m.from.before], Some(m.from.now));
            let from = &has[m.from.before];
            let held = if m.from.mirror { &from.mirrored } else { &from.owned }.iter().any(|s| {
                (s.chunk, s.tensor, s.slice) == (m.from.chunk, m.slot.tensor, m.slot.slice)
                    && s.elements.start <= m.slot.elements.start
                    && m.slot.elements.end <= s.elements.end
            });
            prop_assert!(held, "{:?} is not there", m);
            prop_assert!(m.slot.elements.len() <= MOVE_MAX);
            prop_assert!(m.slot.elements.start.is_multiple_of(STATE_CHUNK), "cut at state chunks");
        }
        // A piece is lost only if no survivor has it.
        for lost in &plan.lost {
            let somewhere = has.iter().zip(&holders).filter(|(_, now)| now.is_some()).any(|(held, _)| {
                held.owned.iter().chain(&held.mirrored).any(|s| (s.tensor, s.slice) == (lost.slot.tensor, lost.slot.slice)
                    && s.elements.start < lost.slot.elements.end && lost.slot.elements.start < s.elements.end)
            });
            prop_assert!(!somewhere, "{:?} is not lost", lost);
        }
        let moves = plan.moves.iter().map(|m| (m.what, m.mirror, m.to, m.slot.clone()));
        let come: Vec<_> = moves.chain(plan.lost.iter().map(|l| (l.what, l.mirror, l.to, l.slot.clone()))).collect();
        for (what, mirror, to, slot) in wanted(&after) {
            let mut parts: Vec<_> = come
                .iter()
                .filter(|(w, m, t, s)| (*w, *m, *t, s.chunk, s.tensor, s.slice) == (what, mirror, to, slot.chunk, slot.tensor, slot.slice))
                .filter(|(.., s)| s.elements.start < slot.elements.end && slot.elements.start < s.elements.end)
                .map(|(.., s)| s.elements.clone())
                .collect();
            parts.sort_by_key(|part| part.start);
            let mut at = slot.elements.start;
            for part in parts {
                prop_assert_eq!(part.start, at);
                at = part.end;
            }
            prop_assert_eq!(at, slot.elements.end);
        }
        let elements = |of: &mut dyn Iterator<Item = &Slot>| of.map(|s| s.elements.len()).sum::<usize>();
        prop_assert_eq!(
            elements(&mut come.iter().map(|(.., s)| s)),
            elements(&mut wanted(&after).iter().map(|(.., s)| s)),
            "nothing else comes"
        );
    }
}

#[test]
fn replicas_give_alike_and_nobody_fetches_what_it_has() {
    let (three, four) = (run(&["layout.dp=3".into()]), run(&["layout.dp=4".into()]));
    let plan = plan(&three, &[Some(2), Some(0), Some(1)], &[], &four);
    assert_eq!(plan.lost, []);
    let mut given = [0usize; 4];
    for m in plan.moves.iter().filter(|m| m.from.now != m.to) {
        assert_eq!(m.to, 3, "only the newcomer needs something: {m:?}");
        given[m.from.now] += m.what.bytes() * m.slot.elements.len();
    }
    let all = 12 * holdings(&four)[3].owned.iter().map(|s| s.elements.len()).sum::<usize>();
    assert_eq!(given.iter().sum::<usize>(), all);
    assert!(given[..3].iter().all(|bytes| *bytes > 0 && *bytes <= all / 2), "{given:?}");
}

#[test]
fn a_shard_is_lost_with_its_rank_unless_it_has_a_mirror() {
    let sharded =
        |mirror: bool| run(&["layout.dp=2".into(), "layout.zero=1".into(), format!("layout.mirror={mirror}")]);
    let alone = sharded(false);
    let plan = plan(&alone, &[Some(0), None], &[], &alone);
    let lost: usize = plan.lost.iter().filter(|l| l.what == What::Moments).map(|l| l.slot.elements.len()).sum();
    assert_eq!(lost, holdings(&alone)[1].owned.iter().map(|s| s.elements.len()).sum::<usize>());
    for sets in
        [&["layout.dp=4", "layout.zero=3"][..], &["layout.tp=2"], &["layout.pp=2"], &["layout.tp=2", "layout.pp=2"]]
    {
        let run = run(&sets.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        for dead in 0..run.layout.world() {
            let holders: Vec<_> = (0..run.layout.world()).map(|rank| (rank != dead).then_some(rank)).collect();
            assert_eq!(super::plan(&run, &holders, &[], &run).lost, [], "{sets:?} without {dead}");
        }
    }
}

/// Owner and mirror have a bad piece each, of different state: neither gives its own, and nothing is lost.
#[test]
fn a_corrupt_piece_comes_from_its_other_holder_and_the_rest_from_anybody() {
    let run = run(&["layout.dp=2".into(), "layout.zero=1".into(), "layout.mirror=true".into()]);
    let has = holdings(&run);
    let piece = |slot: &Slot, mirror| {
        let elements = slot.elements.start..slot.elements.start + slot.elements.len() / 2;
        Piece { tensor: slot.tensor, slice: slot.slice, elements, mirror, what: String::new() }
    };
    let bad = [vec![piece(&has[0].owned[0], false)], vec![piece(&has[1].owned[0], false)]];
    let holders = [Some(0), Some(1)];
    let corrupt: Vec<_> = bad.iter().map(Vec::as_slice).collect();
    let mended = super::plan(&run, &holders, &corrupt, &run);
    assert_eq!(mended.lost, []);
    let touches = |m: &Move, p: &Piece| {
        (m.slot.tensor, m.slot.slice, m.from.mirror) == (p.tensor, p.slice, p.mirror)
            && m.slot.elements.start < p.elements.end
            && p.elements.start < m.slot.elements.end
    };
    assert!(mended.moves.iter().all(|m| bad[m.from.before].iter().all(|p| !touches(m, p))));
    let from = |rank: usize| mended.moves.iter().filter(|m| m.from.before == rank).count();
    assert!(from(0) > 0 && from(1) > 0, "both are sources");
    // Where the mirror's copy of it is bad, too, nobody has it.
    let both = [bad[0].clone(), vec![piece(&has[0].owned[0], true)]];
    let corrupt: Vec<_> = both.iter().map(Vec::as_slice).collect();
    let lost = super::plan(&run, &holders, &corrupt, &run).lost;
    assert!(!lost.is_empty() && lost.iter().all(|l| l.slot.elements.end <= both[0][0].elements.end), "{lost:?}");
    assert!(lost.iter().all(|l| (l.slot.tensor, l.slot.slice) == (both[0][0].tensor, both[0][0].slice)));
}
