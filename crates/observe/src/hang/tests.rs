use super::*;

/// Recorded dumps, where they are; a test without them says so.
fn data(folder: &str) -> Option<std::path::PathBuf> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let root = std::env::var_os("LOCKSTEP_SHARED_DATA").map_or(root, Into::into);
    let path = root.join(folder);
    if !path.is_dir() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn dumps(case: &str) -> Option<Vec<RankView>> {
    let folder = data("nvrx_fr_traces")?.join(case);
    let read = |rank| {
        let text = std::fs::read_to_string(folder.join(format!("_dump_{rank}.json"))).expect("a dump");
        pytorch::read(&text, Some(rank)).expect("readable")
    };
    Some((0..16).map(read).collect())
}

#[test]
fn recorded_hangs_are_attributed_as_expected() {
    let Some(views) = dumps("gpu_error_1st") else { return };
    let found = verdict(&views);
    assert_eq!(found.culprits.len(), 1, "{found}");
    let culprit = &found.culprits[0];
    assert_eq!((culprit.rank, culprit.why, culprit.group.as_str()), (12, Why::NotJoined, "74"), "{found}");
    assert_eq!(
        (culprit.operation.as_str(), culprit.size.as_slice()),
        ("nccl:all_to_all", &[4027, 5120][..]),
        "{found}"
    );

    let views = dumps("lock_gil_2nd").expect("the other case");
    let found = verdict(&views);
    let ranks: Vec<u32> = found.culprits.iter().map(|c| c.rank).collect();
    assert_eq!(ranks, [10, 15], "{found}");
    let groups: Vec<&str> = found.culprits.iter().map(|c| c.group.as_str()).collect();
    assert_eq!(groups, ["73", "74"], "{found}");
    assert!(found.culprits.iter().all(|c| c.operation == "nccl:all_to_all" && c.size == [4096, 5120]), "{found}");
}

#[test]
fn nobody_is_believed_more_than_others() {
    let Some(views) = dumps("lock_gil_2nd") else { return };
    let without = |ranks: &[u32]| {
        let kept: Vec<RankView> = views.iter().filter(|v| !ranks.contains(&v.rank)).cloned().collect();
        let found = verdict(&kept);
        found.culprits.iter().map(|c| (c.rank, c.why)).collect::<Vec<_>>()
    };
    assert_eq!(without(&[0]), [(10, Why::NotJoined), (15, Why::NotJoined)]);
    assert_eq!(without(&[10, 15]), [(10, Why::NoAnswer), (15, Why::NoAnswer)]);
}

#[test]
fn a_recorded_hang_is_seen_in_its_stacks() {
    let Some(folder) = data("reliability") else { return };
    let text = std::fs::read_to_string(folder.join("bloom_hang_2022-04-30_stacks.json")).expect("stacks");
    let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let suspect = all["suspect_thread"].as_u64().expect("a thread");
    let stacks: Vec<(u64, Vec<String>)> = (all["processes"].as_array().expect("a list").iter())
        .map(|p| {
            let frames = p["stack"].as_array().expect("frames").iter().map(|f| f.as_str().expect("text").to_owned());
            (p["thread"].as_u64().expect("a thread"), frames.collect())
        })
        .collect();
    let groups = rarest(&stacks);
    let sizes: Vec<usize> = groups.iter().map(|(who, _)| who.len()).collect();
    assert_eq!((groups[0].0.as_slice(), sizes), (&[suspect][..], vec![1, 3, 4, 4, 4]));
}

/// A rank of one group of `world`, with `begun` collectives, the last of them under way if `stuck`.
fn rank(rank: u32, world: u32, begun: u64, stuck: bool) -> RankView {
    let of = GroupOf { desc: "dp".into(), ranks: (0..world).collect(), begun };
    let exchange = |sequence: u64| Exchange {
        group: "1".into(),
        operation: "all_reduce".into(),
        sequence,
        ended: !stuck || sequence < begun,
        began_ns: sequence,
        ..Exchange::default()
    };
    RankView {
        rank,
        groups: [("1".to_owned(), of)].into(),
        exchanges: (1..=begun).map(exchange).collect(),
        ..RankView::default()
    }
}

#[test]
fn rank_0_can_be_the_one() {
    let views: Vec<_> = (0..4).map(|r| rank(r, 4, if r == 0 { 4 } else { 5 }, r != 0)).collect();
    let found = verdict(&views);
    assert_eq!(found.culprits.iter().map(|c| (c.rank, c.sequence)).collect::<Vec<_>>(), [(0, 5)]);
    assert_eq!(found.culprits[0].waiting, [1, 2, 3]);
    assert_eq!(found.to_string(), "rank 0 did not join all_reduce  (number 5 of group 1 dp); in it wait ranks 1-3");
}

#[test]
fn who_is_in_another_exchange_is_named_by_majority() {
    let mut views: Vec<_> = (0..3).map(|r| rank(r, 3, 5, true)).collect();
    views[0].exchanges[4].operation = "barrier".into();
    let found = verdict(&views);
    assert_eq!(found.culprits.iter().map(|c| (c.rank, c.why)).collect::<Vec<_>>(), [(0, Why::Mismatch)]);
}

#[test]
fn a_rank_that_waits_itself_is_no_culprit() {
    // 0 waits for 1 in group 1; 1 waits for 2 in group 2; 2 computes.
    let group = |ranks: &[u32], begun| GroupOf { desc: String::new(), ranks: ranks.to_vec(), begun };
    let stuck =
        |name: &str| Exchange { group: name.into(), operation: "send".into(), sequence: 1, ..Exchange::default() };
    let view = |rank, groups: &[(&str, GroupOf)], exchanges| RankView {
        rank,
        groups: groups.iter().map(|(n, g)| (n.to_string(), g.clone())).collect(),
        exchanges,
        ..RankView::default()
    };
    let views = [
        view(0, &[("1", group(&[0, 1], 1))], vec![stuck("1")]),
        view(1, &[("1", group(&[0, 1], 0)), ("2", group(&[1, 2], 1))], vec![stuck("2")]),
        view(2, &[("2", group(&[1, 2], 0))], vec![]),
    ];
    let found = verdict(&views);
    assert_eq!(found.culprits.iter().map(|c| c.rank).collect::<Vec<_>>(), [2]);
    assert_eq!(found.waiting, [0, 1]);
}

#[test]
fn when_all_have_joined_the_link_is_asked() {
    let mut views: Vec<_> = (0..3).map(|r| rank(r, 3, 5, true)).collect();
    views[0].waits_for = Some(2);
    views[1].waits_for = Some(2);
    views[2].waits_for = Some(0);
    let found = verdict(&views);
    assert_eq!(found.culprits.iter().map(|c| (c.rank, c.why)).collect::<Vec<_>>(), [(2, Why::Silent)]);
    assert_eq!(verdict(&[rank(0, 2, 3, false), rank(1, 2, 3, false)]), Verdict::default());
}

#[test]
fn a_link_that_loses_messages_is_named_by_both_of_its_ends() {
    let mut views: Vec<_> = (0..3).map(|r| rank(r, 3, 5, true)).collect();
    for view in &mut views {
        view.waits_for = Some((view.rank + 1) % 3);
        view.still_ms = 700;
        view.links = (0..3).filter(|r| *r != view.rank).map(|r| (r, (20, 20))).collect();
    }
    let before = verdict(&views);
    assert!(before.cut.is_empty() && !before.culprits.is_empty());
    // What 0 sends to 1 vanishes; who follows from that is not named.
    views[0].links.insert(1, (22, 20));
    let found = verdict(&views);
    assert_eq!(found.cut, [Cut { from: 0, to: 1, sent: 22, received: 20 }]);
    assert_eq!((found.named(), found.culprits.len()), (vec![0, 1], 0));
    assert!(found.to_string().starts_with("rank 0 does not reach rank 1: the last 2 of 22 messages"), "{found}");
    assert!(found.to_string().ends_with("follow from that: rank 2"), "{found}");
    // One that has not looked has only not taken them yet.
    views[1].still_ms = 0;
    assert!(verdict(&views).cut.is_empty());
    let answer = |ms: u64| Some(serde_json::json!({ "still_ms": ms }));
    assert_eq!(still_ms(&[answer(900), answer(700)]), 700);
    assert_eq!((still_ms(&[answer(900), None]), still_ms(&[answer(900), answer(0)])), (0, 0));
}

#[test]
fn a_record_comes_back_from_its_file() {
    let record = fabric::FlightRecord {
        rank: 1,
        world: 2,
        generation: 3,
        waits_for: Some(0),
        still_ms: 450,
        links: vec![fabric::FlightLink { peer: 0, sent: 9, received: 8 }],
        groups: vec![fabric::FlightGroup {
            id: 7,
            name: "dp".into(),
            ranks: vec![0, 1],
            begun: 2,
            sends: vec![1, 0],
            receives: vec![0, 0],
        }],
        entries: vec![
            entry(0, None, 0, fabric::FlightState::Completed),
            entry(1, Some(0), 0, fabric::FlightState::Completed),
            entry(2, None, 1, fabric::FlightState::Started),
        ],
    };
    let dump = pytorch::dump(&record);
    assert_eq!(dump["pg_status"]["7"]["last_completed_collective"], 1);
    assert_eq!(dump["pg_config"]["7"]["ranks"], "[0, 1]");
    assert_eq!(dump["entries"][1]["profiling_name"], "lockstep:send 1->0");
    let view = pytorch::read(&dump.to_string(), None).unwrap();
    assert_eq!((view.rank, view.waits_for, view.groups["7"].begun), (1, Some(0), 2));
    assert_eq!((view.still_ms, view.links[&0]), (450, (9, 8)));
    assert_eq!(view.exchanges.iter().filter(|e| !e.ended).map(|e| e.sequence).collect::<Vec<_>>(), [2]);
    assert_eq!(pytorch::rank_of(&pytorch::file_name(12)), Some(12));
    assert!(pytorch::read("{}", Some(0)).is_err());
}

fn entry(id: u64, peer: Option<u32>, sequence: u64, state: fabric::FlightState) -> fabric::FlightEntry {
    let operation = if peer.is_some() { fabric::Operation::Send } else { fabric::Operation::AllReduce };
    fabric::FlightEntry {
        id,
        group: 7,
        operation,
        peer,
        sequence,
        bytes: 64,
        state,
        started_ns: id,
        ended_ns: (state == fabric::FlightState::Completed).then_some(id + 1),
    }
}
