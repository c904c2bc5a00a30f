use fabric::*;
#[test]
fn threads_reduce() {
    let ends = threads(3, &FabricOptions::default()).unwrap();
    let plan = ReducePlan::even(5, 3, 200_000);
    let group = Group::new(1, "dp", vec![0, 1, 2]);
    std::thread::scope(|s| {
        for e in &ends {
            let (plan, group) = (&plan, &group);
            s.spawn(move || {
                let me = e.rank() as usize;
                let trees = plan.subtrees(me);
                let vecs: Vec<Vec<f32>> = trees
                    .iter()
                    .map(|t| (0..200_000).map(|i| t.clone().map(|l| (l * 10 + i % 7) as f32).sum()).collect())
                    .collect();
                let mine: Vec<_> = trees.iter().cloned().zip(vecs.iter().map(|v| &v[..])).collect();
                let mut out = vec![0.0; 200_000];
                e.all_reduce(group, plan, &mine, &mut out).unwrap();
                for (i, o) in out.iter().enumerate() {
                    assert_eq!(*o, (0..5).map(|l| (l * 10 + i % 7) as f32).sum::<f32>());
                }
                e.barrier(group).unwrap();
            });
        }
    });
}
