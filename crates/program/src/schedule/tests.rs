use super::*;
use crate::testing;
use spec::Grid;

/// All schedules on `p` positions with `v` chunks each where the schedule has chunks.
fn layouts(p: usize, v: usize) -> Vec<Layout> {
    let model = testing::model(p * v);
    let grid = Grid::new(&model, 1, 32, 1, Some(1), 1).unwrap();
    [(Schedule::GPipe, None), (Schedule::OneFOneB, None), (Schedule::Interleaved, Some(v))]
        .into_iter()
        .map(|(schedule, vpp)| testing::layout(&model, &grid, [1, 1, p], schedule, vpp))
        .collect()
}

fn units(m: usize) -> Vec<Unit> {
    (0..m).map(|mb| Unit { cell: 0, mb }).collect()
}

/// Every chunk and unit of the position once each way, ascending per chunk, forward first.
fn assert_complete(list: &[Task], layout: &Layout, pp: usize, units: &[Unit]) {
    for chunk in layout.chunks_of(pp) {
        let forwards: Vec<_> = list
            .iter()
            .filter_map(|t| matches!(t, Task::Forward { chunk: c, .. } if *c == chunk).then_some(*t))
            .collect();
        let backwards: Vec<_> = list
            .iter()
            .filter_map(|t| matches!(t, Task::Backward { chunk: c, .. } if *c == chunk).then_some(*t))
            .collect();
        assert_eq!(forwards, units.iter().map(|&unit| Task::Forward { chunk, unit }).collect::<Vec<_>>());
        assert_eq!(backwards, units.iter().map(|&unit| Task::Backward { chunk, unit }).collect::<Vec<_>>());
    }
    assert_eq!(list.len(), 2 * layout.vpp * units.len());
    for task in list {
        if let Task::Backward { chunk, unit } = *task {
            let at = |t: Task| list.iter().position(|other| *other == t).unwrap();
            assert!(at(Task::Forward { chunk, unit }) < at(*task));
        }
    }
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
                let needs = match task {
                    Task::Forward { chunk: 0, .. } => None,
                    Task::Forward { chunk, unit } => Some(Task::Forward { chunk: chunk - 1, unit }),
                    Task::Backward { chunk, unit } if chunk == last => Some(Task::Forward { chunk, unit }),
                    Task::Backward { chunk, unit } => Some(Task::Backward { chunk: chunk + 1, unit }),
                };
                if needs.is_some_and(|n| !done.contains(&n)) {
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
            .flat_map(|&unit| [Task::Forward { chunk: 0, unit }, Task::Backward { chunk: 0, unit }])
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
        .map(|t| match t {
            Task::Forward { chunk, unit } => format!("F{}{}", ["a", "b"][chunk / 4], unit.mb + 1),
            Task::Backward { chunk, unit } => format!("B{}{}", ["a", "b"][chunk / 4], unit.mb + 1),
        })
        .collect();
    let text = text.join(" ");
    assert!(text.starts_with("Fa1 Fa2 Fa3 Fa4 Fb1 Fb2 Fb3 Fb4 Fa5 Fa6 Fa7 Bb1 Fa8 Bb2 Fb5 Bb3"), "{text}");
}
