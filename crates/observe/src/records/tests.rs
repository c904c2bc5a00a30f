use serde_json::{Value, json};

use super::*;
use crate::hang::{self, What, Why};

/// A dump of a rank in one group of `world`: its exchanges as (number, operation, state), the first at `from_ns`.
fn dump(world: u32, from_ns: u64, exchanges: &[(u64, &str, &str)]) -> Value {
    let entries: Vec<Value> = (exchanges.iter().enumerate())
        .map(|(i, (sequence, operation, state))| {
            json!({
                "record_id": i, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": sequence,
                "p2p_seq_id": 0, "profiling_name": format!("nccl:{operation}"), "time_created_ns": from_ns + 1000 * i as u64,
                "input_sizes": [[1024]], "output_sizes": [[1024]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
                "state": state, "is_p2p": false, "timeout_ms": 600_000,
            })
        })
        .collect();
    let ranks = format!("{:?}", (0..world).collect::<Vec<_>>());
    json!({ "version": "2.10", "pg_config": { "0": { "name": "0", "desc": "default_pg", "ranks": ranks } }, "entries": entries })
}

const OVER: (u64, &str, &str) = (1, "all_reduce", "completed");
const IN: (u64, &str, &str) = (2, "all_reduce", "started");

/// Rank 2 of 4 has not joined the second all-reduce.
fn of_rank(rank: u32) -> Value {
    dump(4, 0, if rank == 2 { &[OVER] } else { &[OVER, IN] })
}

fn file(path: &str, text: impl ToString) -> File {
    File { path: path.into(), text: Ok(text.to_string()) }
}

fn named(attempt: &Attempt) -> Vec<(u32, Why)> {
    hang::verdict(&attempt.views, &attempt.unreadable).culprits.iter().map(|c| (c.rank, c.why)).collect()
}

#[test]
fn ranks_are_read_where_the_name_says_rank_and_not_from_its_last_digits() {
    let files = (0..4).map(|rank| file(&format!("rank_{rank}_node-0{}.json", rank / 2 + 1), of_rank(rank))).collect();
    let found = sort(files).unwrap();
    assert_eq!((found.attempts.len(), found.notes.len()), (1, 0));
    assert_eq!(named(&found.attempts[0]), [(2, Why::NotJoined)]);
}

#[test]
fn a_dump_whose_rank_nothing_tells_is_left_out_and_named() {
    let mut files: Vec<File> = (0..4).map(|rank| file(&format!("_dump_{rank}.json"), of_rank(rank))).collect();
    files[2].path = "node-02.json".into();
    let found = sort(files).unwrap();
    assert!(
        found.notes[0].contains("node-02.json is left out") && found.notes[0].contains("_dump_RANK"),
        "{:?}",
        found.notes
    );
    let verdict = hang::verdict(&found.attempts[0].views, &BTreeSet::new());
    assert!(verdict.culprits.is_empty(), "{verdict}");
    assert_eq!((verdict.doubts[0].what, verdict.doubts[0].ranks.as_slice()), (What::NoRecord, &[2][..]), "{verdict}");
    // Two ranks in one name, and a rank that is in none of the groups.
    let found = sort(vec![file("rank_1_rank_2.json", of_rank(0)), file("_dump_7.json", of_rank(0))]).unwrap();
    assert!(found.attempts.is_empty());
    assert!(
        found.notes[0].contains("rank 1 or 2?") && found.notes[1].contains("its groups are of ranks 0 1 2 3"),
        "{:?}",
        found.notes
    );
}

#[test]
fn what_the_content_tells_is_believed_before_the_name() {
    // Members of {0, 1} and of {1, 3}: rank 1.
    let mut two = dump(4, 0, &[OVER]);
    two["pg_config"]["7"] = json!({ "name": "7", "desc": "tp", "ranks": "[0, 1]" });
    two["pg_config"]["9"] = json!({ "name": "9", "desc": "dp", "ranks": [1, 3] });
    let found = sort(vec![file("host-3.json", &two), file("_dump_3.json", of_rank(3))]).unwrap();
    assert_eq!(found.attempts[0].views.iter().map(|v| v.rank).collect::<Vec<_>>(), [1, 3]);
    let found = sort(vec![file("_dump_3.json", &two)]).unwrap();
    assert_eq!(found.attempts[0].views[0].rank, 1);
    assert!(found.notes[0].contains("its name says rank 3, its content is rank 1's"), "{:?}", found.notes);
    // Its own side of a send.
    let mut sends = dump(4, 0, &[(1, "send 2->0", "completed")]);
    sends["entries"][0]["is_p2p"] = json!(true);
    let found = sort(vec![file("x.json", sends)]).unwrap();
    assert_eq!(found.attempts[0].views[0].rank, 2);
}

#[test]
fn a_half_written_dump_is_evidence_and_does_not_refuse_the_others() {
    let mut files: Vec<File> = (0..4).map(|rank| file(&format!("_dump_{rank}.json"), of_rank(rank))).collect();
    for text in [of_rank(2).to_string()[..200].to_owned(), String::new(), "[1, 2]".into()] {
        files[2].text = Ok(text);
        let found = sort(files.clone()).unwrap();
        assert!(found.notes[0].contains("rank 2's dump cannot be read"), "{:?}", found.notes);
        let attempt = &found.attempts[0];
        let verdict = hang::verdict(&attempt.views, &attempt.unreadable);
        assert!(verdict.culprits.is_empty(), "{verdict}");
        assert_eq!(
            (verdict.doubts[0].what, verdict.doubts[0].ranks.as_slice()),
            (What::Unreadable, &[2][..]),
            "{verdict}"
        );
        assert_eq!((verdict.unreadable.as_slice(), verdict.unanswered.as_slice()), (&[2][..], &[2][..]));
    }
    // Where another one is missed for sure that one is named, and this one only told.
    files[1].text = Ok(dump(4, 0, &[OVER]).to_string());
    let found = sort(files).unwrap();
    assert_eq!(named(&found.attempts[0]), [(1, Why::NotJoined)]);
}

/// Attempts as their ranks.
fn ranks(found: &Found) -> Vec<Vec<u32>> {
    found.attempts.iter().map(|a| a.views.iter().map(|v| v.rank).collect()).collect()
}

const HOUR: u64 = 3_600_000_000_000;

#[test]
fn two_attempts_are_judged_apart() {
    let all: [u32; 4] = [0, 1, 2, 3];
    let set = |prefix: &str, of: &dyn Fn(u32) -> Value| {
        all.map(|rank| file(&format!("{prefix}{rank}.json"), of(rank))).to_vec()
    };
    let second = |rank| dump(4, 5000, if rank == 1 { &[OVER] } else { &[OVER, IN] });
    let check = |files: Vec<File>| {
        let found = sort(files).unwrap();
        assert_eq!(ranks(&found), [all, all], "{:?}", found.attempts);
        assert_eq!(
            (named(&found.attempts[0]), named(&found.attempts[1])),
            (vec![(2, Why::NotJoined)], vec![(1, Why::NotJoined)])
        );
        assert!(found.attempts.iter().all(|attempt| !attempt.label.is_empty()));
    };
    // By folder, by name, by the number of the attempt in the name, by version.
    check([set("a/_dump_", &of_rank), set("b/_dump_", &second)].concat());
    check([set("a/node/_dump_", &of_rank), set("b/node/_dump_", &second)].concat());
    check([set("_dump_", &of_rank), set("nccl_trace_rank_", &second)].concat());
    check([set("attempt_1_rank_", &of_rank), set("attempt_2_rank_", &second)].concat());
    let newer = |rank| {
        let mut dump = second(rank);
        dump["version"] = json!("2.11");
        dump
    };
    check([set("rank_", &of_rank), set("again_rank_", &newer)].concat());
    // Dumps of several hosts are of one attempt.
    let hosts = all.map(|rank| file(&format!("host{}/_dump_{rank}.json", rank / 2), of_rank(rank)));
    assert_eq!(ranks(&sort(hosts.to_vec()).unwrap()), [all]);
    // Nothing tells them apart.
    let twins =
        vec![file("_dump_1.json", of_rank(1)), file("_dump-1.json", of_rank(1)), file("_dump.1.json", of_rank(1))];
    let refused = sort(twins);
    assert!(
        refused.as_ref().is_err_and(|e| e.contains("_dump_1.json") || e.contains("a folder of its own")),
        "{refused:?}"
    );
}

#[test]
fn a_dump_that_was_left_from_an_earlier_attempt_is_no_record_of_this_one() {
    // An hour older; of another number of ranks; ahead of what the others have, or behind what they completed with it.
    let seen: Vec<(u64, &str, &str)> = (1..=9).map(|n| (n, "all_reduce", "completed")).collect();
    let older = dump(4, 0, &[OVER, IN]);
    let smaller = dump(5, HOUR, &[OVER, IN]);
    let ahead = dump(4, HOUR, &seen);
    for (stale, first) in [(older, true), (smaller, false), (ahead, false)] {
        let mut files: Vec<File> =
            (0..3).map(|rank| file(&format!("_dump_{rank}.json"), dump(4, HOUR, &[OVER, IN]))).collect();
        files.push(file("_dump_3.json", stale));
        let found = sort(files).unwrap();
        let mut parts = ranks(&found);
        assert_eq!(parts.len(), 2, "{parts:?}");
        assert!(!first || parts[0] == [3]);
        parts.sort();
        assert_eq!(parts, [vec![0, 1, 2], vec![3]]);
        let attempt = found.attempts.iter().find(|a| a.views.len() == 3).unwrap();
        let verdict = hang::verdict(&attempt.views, &attempt.unreadable);
        assert_eq!(
            (verdict.doubts[0].what, verdict.doubts[0].ranks.as_slice()),
            (What::NoRecord, &[3][..]),
            "{verdict}"
        );
    }
    let files: Vec<File> = (0..4)
        .map(|rank| file(&format!("_dump_{rank}.json"), dump(4, HOUR, if rank == 3 { &[OVER] } else { &seen })))
        .collect();
    assert_eq!(ranks(&sort(files).unwrap()).len(), 2);
    // As two processes of one attempt may begin: no contradiction.
    let late = [file("_dump_0.json", dump(2, 0, &[OVER, IN])), file("_dump_1.json", dump(2, HOUR / 90, &[OVER]))];
    let found = sort(late.to_vec()).unwrap();
    assert_eq!(ranks(&found), [[0, 1]]);
}

#[test]
fn who_scheduled_is_told_from_who_started() {
    let of = |states: [&'static str; 4]| {
        let text = |rank: usize| dump(4, 0, &[OVER, (2, "all_reduce", states[rank])]);
        let files = (0..4).map(|rank| file(&format!("_dump_{rank}.json"), text(rank))).collect();
        let found = sort(files).unwrap();
        hang::verdict(&found.attempts[0].views, &BTreeSet::new())
    };
    let one = of(["started", "started", "scheduled", "started"]);
    assert_eq!((one.culprits[0].rank, one.culprits[0].why), (2, Why::Queued));
    assert!(one.to_string().contains("rank 2 has scheduled, but not started nccl:all_reduce"), "{one}");
    assert!(one.to_string().contains("waits for its own stream"), "{one}");
    let inside = of(["started"; 4]);
    assert_eq!((inside.culprits.len(), inside.doubts[0].what), (0, What::AllInside), "{inside}");
    // Nothing shows that a dump would tell who has started.
    let queued = of(["scheduled"; 4]);
    assert_eq!((queued.culprits.len(), queued.doubts[0].what), (0, What::AllJoined), "{queued}");
    let behind = of(["completed", "completed", "started", "completed"]);
    assert_eq!(
        (behind.culprits.len(), behind.doubts[0].what, behind.doubts[0].ranks.as_slice()),
        (0, What::Behind, &[2][..])
    );
    // Who is missing is named before who is late; who is late is told.
    let files: Vec<File> = (0..4)
        .map(|rank| {
            let state = if rank == 0 { "scheduled" } else { "started" };
            let both = [OVER, (2, "all_reduce", state)];
            file(&format!("_dump_{rank}.json"), dump(4, 0, if rank == 3 { &both[..1] } else { &both }))
        })
        .collect();
    let found = sort(files).unwrap();
    let verdict = hang::verdict(&found.attempts[0].views, &BTreeSet::new());
    assert_eq!(named(&found.attempts[0]), [(3, Why::NotJoined)]);
    assert!(verdict.to_string().contains("in it wait ranks 1-2; rank 0 has scheduled it and not started"), "{verdict}");
}

#[test]
fn members_that_differ_are_named_by_majority_and_suspected_without_one() {
    let of = |world: u32, odd: Value| {
        let text = |rank: u32| if rank == 1 { odd.clone() } else { dump(world, 0, &[OVER, IN]) };
        let files = (0..world).map(|rank| file(&format!("_dump_{rank}.json"), text(rank))).collect();
        hang::verdict(&sort(files).unwrap().attempts[0].views, &BTreeSet::new())
    };
    let operation = |world| dump(world, 0, &[OVER, (2, "broadcast", "started")]);
    let mut size = dump(3, 0, &[OVER, IN]);
    size["entries"][1]["input_sizes"] = json!([[1025]]);
    let mut kind = dump(3, 0, &[OVER, IN]);
    kind["entries"][1]["input_dtypes"] = json!(["Half"]);
    for (odd, why) in [(operation(3), Why::Mismatch), (size.clone(), Why::Size), (kind, Why::Type)] {
        let verdict = of(3, odd);
        assert_eq!(verdict.culprits.iter().map(|c| (c.rank, c.why)).collect::<Vec<_>>(), [(1, why)], "{verdict}");
    }
    let half = of(2, operation(2));
    assert_eq!(
        (half.culprits.len(), half.doubts[0].what, half.doubts[0].ranks.as_slice()),
        (0, What::Operations, &[0, 1][..])
    );
    assert!(half.to_string().contains("rank 0: nccl:all_reduce; rank 1: nccl:broadcast"), "{half}");
    // A minority of those who are there may be a majority of all.
    let files = vec![file("_dump_0.json", dump(4, 0, &[OVER, IN])), file("_dump_1.json", operation(4))];
    let few = hang::verdict(&sort(files).unwrap().attempts[0].views, &BTreeSet::new());
    assert_eq!((few.culprits.len(), few.doubts[0].lacks.as_slice()), (0, &[2, 3][..]), "{few}");
    // What all have completed holds nobody up.
    let over = (2, "all_reduce", "completed");
    let mut done = dump(3, 0, &[OVER, over]);
    done["entries"][1]["input_sizes"] = json!([[1025]]);
    let files = [dump(3, 0, &[OVER, over]), done, dump(3, 0, &[OVER, over])];
    let files = files.iter().enumerate().map(|(rank, dump)| file(&format!("_dump_{rank}.json"), dump)).collect();
    let verdict = hang::verdict(&sort(files).unwrap().attempts[0].views, &BTreeSet::new());
    assert_eq!(verdict.to_string(), "no rank waits in an exchange");
}

#[test]
fn sends_and_receives_are_matched() {
    let p2p = |ops: &[(&str, &str, u64)]| {
        let mut dump = dump(2, 0, &ops.iter().map(|(name, state, _)| (0, *name, *state)).collect::<Vec<_>>());
        for (i, (_, _, size)) in ops.iter().enumerate() {
            let entry = &mut dump["entries"][i];
            entry["is_p2p"] = json!(true);
            entry["p2p_seq_id"] = json!(i + 1);
            (entry["input_sizes"], entry["output_sizes"]) = (json!([[size]]), json!([[size]]));
        }
        dump
    };
    let of = |zero: Value, one: Value| {
        let found = sort(vec![file("_dump_0.json", zero), file("_dump_1.json", one)]).unwrap();
        hang::verdict(&found.attempts[0].views, &BTreeSet::new())
    };
    let lacks =
        of(p2p(&[("send 0->1", "completed", 8), ("recv 0<-1", "started", 8)]), p2p(&[("recv 1<-0", "completed", 8)]));
    assert_eq!(lacks.culprits.iter().map(|c| (c.rank, c.why)).collect::<Vec<_>>(), [(1, Why::NoPartner)], "{lacks}");
    assert!(lacks.to_string().contains("rank 1 has not posted its half of nccl:recv 0<-1"), "{lacks}");
    let sizes = of(p2p(&[("send 0->1", "started", 8)]), p2p(&[("recv 1<-0", "started", 9)]));
    assert_eq!(
        (sizes.culprits.len(), sizes.doubts[0].what, sizes.doubts[0].ranks.as_slice()),
        (0, What::Sizes, &[0, 1][..])
    );
    let both = of(p2p(&[("recv 0<-1", "started", 8)]), p2p(&[("recv 1<-0", "started", 8)]));
    assert_eq!((both.culprits.len(), both.doubts[0].what), (0, What::Ring), "{both}");
    let inside = of(p2p(&[("send 0->1", "started", 8)]), p2p(&[("recv 1<-0", "started", 8)]));
    assert_eq!((inside.culprits.len(), inside.doubts.len()), (0, 1), "{inside}");
    // Those that were put together have the state of what ends them, not their own.
    let mut together =
        p2p(&[("send 0->1", "scheduled", 8), ("recv 0<-1", "scheduled", 8), ("coalesced", "completed", 8)]);
    (0..3).for_each(|i| together["entries"][i]["p2p_seq_id"] = json!(1));
    let mut other = p2p(&[("send 1->0", "scheduled", 8), ("recv 1<-0", "scheduled", 8), ("coalesced", "completed", 8)]);
    (0..3).for_each(|i| other["entries"][i]["p2p_seq_id"] = json!(1));
    assert_eq!(of(together, other).to_string(), "no rank waits in an exchange");
}
