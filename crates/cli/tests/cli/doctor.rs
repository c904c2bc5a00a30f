//! `doctor`: what it looks at, what it calls a problem, and the file that it writes.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::{Lab, same_tree};

const CHECKS: [&str; 8] = ["cores", "load", "simd", "memory", "shared memory", "open files", "loopback", "clock"];

#[test]
fn it_looks_at_everything_and_writes_nothing() {
    let lab = Lab::new();
    let before = lab.tree();
    let text = lab.lockstep(&["doctor"]).expect(0);
    let lines: Vec<_> = text.stdout.lines().take(CHECKS.len()).collect();
    assert!(lines.iter().zip(CHECKS).all(|(line, name)| line.starts_with(name)), "{text}");
    let json = lab.lockstep(&["doctor", "--json"]).expect(0);
    let object: Value = serde_json::from_str(json.stdout.trim()).unwrap();
    let names: Vec<_> = object["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!((names, &object["kind"], &object["measured"]), (CHECKS.to_vec(), &"doctor".into(), &Value::Null));
    same_tree(&before, &lab.tree());
}

#[test]
fn problems_come_with_remedies_and_decide_the_exit_code() {
    let under = |limit: &str| {
        let shell = format!("ulimit -n {limit}; exec \"$0\" doctor");
        let mut command = Command::new("sh");
        let command = command.args(["-c", &shell, env!("CARGO_BIN_EXE_lockstep")]).stdin(Stdio::null());
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap())
    };
    let (code, text) = under("256");
    assert!(text.contains("warning: a process may have 256 files open") && text.contains("ulimit -n 1024"), "{text}");
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = under("32");
    assert!(text.contains("PROBLEM: a process may have 32 files open"), "{text}");
    assert_eq!(code, Some(2), "{text}");
}

#[test]
fn what_is_measured_is_saved_and_only_our_own_file_is_written_anew() {
    let lab = Lab::new();
    lab.write("mine.toml", "[servers]\nname = \"here\"\n");
    let before = lab.tree();
    let refused = lab.lockstep(&["doctor", "--measure", "--out", "mine.toml"]).expect(2);
    refused.says(&["mine.toml is not a cluster file", "nothing was measured", "--out"]);
    lab.lockstep(&["doctor", "--measure", "--out", "."]).expect(2).says(&["choose another file with --out"]);
    lab.lockstep(&["doctor", "--out", "x.toml"]).expect(2).says(&["--measure"]);
    let homeless = lab.command(&["doctor", "--measure"]).env_remove("HOME").env_remove("XDG_CONFIG_HOME").output();
    let homeless = homeless.unwrap();
    assert_eq!(homeless.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&homeless.stderr).contains("name the file with --out"));
    same_tree(&before, &lab.tree());

    let old = "kind = \"lockstep-cluster\"\nschema = 0\n";
    fs::create_dir_all(lab.path("config/lockstep/clusters")).unwrap();
    lab.write("config/lockstep/clusters/here.toml", old);
    let mut command = lab.command(&["doctor", "--measure", "--json"]);
    let out = command.env("XDG_CONFIG_HOME", lab.path("config")).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let object: Value = serde_json::from_slice(&out.stdout).unwrap();
    let file = fs::read_to_string(lab.path("config/lockstep/clusters/here.toml")).unwrap();
    let cluster = spec::cluster::Cluster::parse(&file, "here.toml").unwrap();
    assert_eq!((cluster.name.as_str(), cluster.product.len()), ("here", 4));
    let links: Vec<_> = cluster.link.iter().map(|l| l.transport.as_str()).collect();
    assert_eq!(links, ["shm", "tcp", "threads"]);
    assert_eq!(object["measured"]["peak_gflops"].as_f64(), Some(cluster.peak_gflops), "the same is told and saved");
    let sensible = cluster.product.iter().all(|p| p.gflops_core < 1.5 * cluster.peak_gflops_core);
    assert!(sensible && cluster.link.iter().all(|l| l.latency_us < 1e5 && l.gb_s < 1e3), "{file}");
    assert_eq!(fs::read_dir(lab.path("config/lockstep/clusters")).unwrap().count(), 1, "nothing is left beside it");
}
