use super::*;
use crate::testing;
use spec::Grid;

/// All schedules on `p` positions with `v` chunks each where the schedule leaves it open.
fn layouts(p: usize, v: usize) -> Vec<Layout> {
    use Schedule::{DualPipeV, GPipe, Interleaved, OneFOneB, ZbH1, ZbV};
    let model = testing::model(p * v.max(2));
    let grid = Grid::new(&model, 1, 32, 1, Some(1), 1).unwrap();
    let v = (p > 1).then_some(v);
    [(GPipe, None), (OneFOneB, None), (Interleaved, v), (ZbH1, None), (ZbV, None), (DualPipeV, None)]
        .into_iter()
        .map(|(schedule, vpp)| testing::layout(&model, &grid, [1, 1, p], schedule, vpp))
        .collect()
}

fn units(m: usize) -> Vec<Unit> {
    (0..m).map(|mb| Unit { cell: 0, mb }).collect()
}

/// Every chunk and unit of the position once each way, each turn ascending.
fn assert_complete(list: &[Task], layout: &Layout, pp: usize, units: &[Unit]) {
    for chunk in layout.chunks_of(pp) {
        let of = |turns: &[Turn]| -> Vec<Unit> {
            list.iter().filter(|t| t.chunk == chunk && turns.contains(&t.turn)).map(|t| t.unit).collect()
        };
        assert_eq!(of(&[Turn::Forward]), units);
        assert_eq!(of(&[Turn::Backward, Turn::BackwardInput]), units);
        assert_eq!(of(&[Turn::Backward, Turn::BackwardWeight]), units);
        assert_eq!(of(&[Turn::BackwardInput]), of(&[Turn::BackwardWeight]));
    }
    assert!(list.iter().all(|t| layout.chunk_pp(t.chunk) == pp));
}

/// Runs the lists of all positions until nobody can go on; true if all ended.
fn ends(lists: &[Vec<Task>], layout: &Layout) -> bool {
    let last = layout.chunks() - 1;
    let mut done = std::collections::HashSet::new();
    let mut at = vec![0; lists.len()];
    loop {
        let mut moved = false;
        for (pp, list) in lists.iter().enumerate() {
            while let Some(&task) = list.get(at[pp]) {
                let has = |turn, chunk| done.contains(&Task { turn, chunk, ..task });
                let back = |chunk| has(Turn::Backward, chunk) || has(Turn::BackwardInput, chunk);
                let ready = match task.turn {
                    Turn::Forward => task.chunk == 0 || has(Turn::Forward, task.chunk - 1),
                    Turn::BackwardWeight => has(Turn::BackwardInput, task.chunk),
                    _ => has(Turn::Forward, task.chunk) && (task.chunk == last || back(task.chunk + 1)),
                };
                if !ready {
                    break;
                }
                done.insert(task);
                at[pp] += 1;
                moved = true;
            }
        }
        if !moved {
            return lists.iter().zip(at).all(|(list, at)| at == list.len());
        }
    }
}

#[test]
fn every_size_is_complete_and_ends() {
    for p in 1..=8 {
        for v in 1..=4 {
            for m in 0..=33 {
                for layout in layouts(p, v) {
                    let units = units(m);
                    let lists: Vec<_> = (0..p).map(|pp| tasks(&layout, pp, &units)).collect();
                    for (pp, list) in lists.iter().enumerate() {
                        assert_complete(list, &layout, pp, &units);
                    }
                    assert!(ends(&lists, &layout), "{layout} with {m} units waits for ever");
                }
            }
        }
    }
}

#[test]
fn one_position_is_plain_accumulation() {
    for layout in layouts(1, 1) {
        let units = units(3);
        let want: Vec<_> = units
            .iter()
            .flat_map(|&unit| {
                [Task { turn: Turn::Forward, chunk: 0, unit }, Task { turn: Turn::Backward, chunk: 0, unit }]
            })
            .collect();
        assert_eq!(tasks(&layout, 0, &units), want);
    }
}

#[test]
fn interleaved_matches_the_published_order() {
    // Narayanan et al. 2021, figure 4: p = 4, v = 2, m = 8; first device.
    let layout = &layouts(4, 2)[2];
    let list = tasks(layout, 0, &units(8));
    let text: Vec<String> = list
        .iter()
        .map(|t| {
            format!("{}{}{}", if t.turn == Turn::Forward { "F" } else { "B" }, ["a", "b"][t.chunk / 4], t.unit.mb + 1)
        })
        .collect();
    let text = text.join(" ");
    assert!(text.starts_with("Fa1 Fa2 Fa3 Fa4 Fb1 Fb2 Fb3 Fb4 Fa5 Fa6 Fa7 Bb1 Fa8 Bb2 Fb5 Bb3"), "{text}");
}

fn text(list: &[Task]) -> String {
    let letter = |turn| match turn {
        Turn::Forward => 'F',
        Turn::Backward => 'B',
        Turn::BackwardInput => 'I',
        Turn::BackwardWeight => 'W',
    };
    list.iter().map(|t| format!("{}{}{}", t.chunk, letter(t.turn), t.unit.mb)).collect::<Vec<_>>().join(" ")
}

#[test]
fn zb_h1_matches_the_published_picture() {
    // Qi et al. 2023, figure 3: p = 4; the last position puts off three weight parts, the first none.
    let layout = &layouts(4, 2)[3];
    let last = text(&tasks(layout, 3, &units(8)));
    assert!(last.starts_with("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1"), "{last}");
    assert!(last.ends_with("3I7 3W4 3W5 3W6 3W7"), "{last}");
    let first = text(&tasks(layout, 0, &units(8)));
    assert!(first.starts_with("0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1"), "{first}");
}

#[test]
fn v_schedules_begin_as_published() {
    let all = layouts(2, 2);
    let zbv = text(&tasks(&all[4], 1, &units(4)));
    assert!(zbv.starts_with("1F0 2F0 1F1 2F1 2I0 2W0"), "{zbv}");
    let dualpipe = text(&tasks(&all[5], 0, &units(4)));
    assert!(dualpipe.starts_with("0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0"), "{dualpipe}");
}

#[test]
fn a_file_with_the_order_of_a_schedule_is_that_schedule() {
    for layout in layouts(3, 2) {
        let lists: Vec<_> = (0..3).map(|pp| tasks(&layout, pp, &units(7))).collect();
        let file: String = lists.iter().map(|list| text(list).replace(' ', ",") + "\n").collect();
        let orders = Orders::parse("s.csv", &file).unwrap();
        assert_eq!(orders.placement, layout.placement);
        let again = Layout { schedule: Schedule::Csv, orders: Some(orders.into()), ..layout };
        assert_eq!((0..3).map(|pp| tasks(&again, pp, &units(7))).collect::<Vec<_>>(), lists);
    }
}
