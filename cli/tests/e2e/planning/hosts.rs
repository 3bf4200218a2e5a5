//! `plan --hosts`: layouts, their bytes between hosts, and the recommendation.

use std::process::Stdio;

use crate::case;

use case::{Case, sets, text};
use serde_json::Value;

fn plan(case: &Case, args: &[&str]) -> String {
    let ranks: &[&str] = if args.contains(&"--world-size") { &[] } else { &["-n", "4"] };
    case.succeed(&[&["plan", "--config", "ds.yaml"], ranks, args].concat())
}

fn layouts(case: &Case, args: &[&str]) -> Vec<Value> {
    let plan: Value = serde_json::from_str(&plan(case, &[&["--json"], args].concat())).unwrap();
    plan["hosts"]["layouts"].as_array().unwrap().clone()
}

#[test]
fn plan_compares_layouts_over_hosts() {
    let case = Case::new();
    let bytes = |layout: &Value| layout["network_bytes_per_step"].as_u64();
    let all = layouts(&case, &["--hosts", "2", "--link", "1Gb"]);
    let names: Vec<&str> = all.iter().map(|layout| layout["name"].as_str().unwrap()).collect();
    assert_eq!(names[0], "as configured");
    for name in [
        "stage 1",
        "stage 2",
        "stage 3, a shard group per host (HSDP)",
        "stage 3, secondary shards per host (hpZ)",
        "stage 3, secondary shards per host (hpZ), codes (qwZ, qgZ)",
        "stage 2, a pipeline stage per host",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    assert!(!names.contains(&"stage 3"), "the configuration is listed twice");
    assert!(all[1..].is_sorted_by_key(bytes), "{all:?}");
    for layout in &all {
        let seconds = bytes(layout).unwrap() as f64 / 2.0 / 125e6;
        assert!((layout["link_seconds"].as_f64().unwrap() / seconds - 1.0).abs() < 1e-9, "{layout}");
        // The settings of a layout select this layout, with the same global batch.
        let settings = layout["settings"].as_array().unwrap().iter().map(|setting| setting.as_str().unwrap());
        let settings = sets(&settings.collect::<Vec<_>>());
        let selected = &layouts(&case, &[&["--hosts", "2"], &settings[..]].concat())[0];
        assert_eq!(
            (bytes(selected), &selected["planned_peak_bytes"]),
            (bytes(layout), &layout["planned_peak_bytes"]),
            "{layout}"
        );
        assert_eq!(layout["rounds"], layout["name"].as_str().unwrap().contains("codes"), "{layout}");
    }
    // The layout with quantized codes sends the fewest bytes. It is recommended only if the configuration already sends
    // codes.
    let told = plan(&case, &["--hosts", "2", "--device-memory", "1GiB"]);
    let least = all.iter().filter(|layout| layout["rounds"] == false).min_by_key(|layout| bytes(layout)).unwrap();
    let recommended = format!("recommended: {}; of the layouts", least["name"].as_str().unwrap());
    assert!(
        all[1]["rounds"] == true
            && told.contains(&format!("{recommended} that fit and send no quantized values, it sends")),
        "{told}"
    );
    // The same layout is recommended for ranks on other machines, whose memory is unknown.
    let told = plan(&case, &["--world-size", "4", "--hosts", "2"]);
    assert!(told.contains(&format!("{recommended} that send no quantized values, it sends")), "{told}");
    assert!(told.contains("\n  help: give --device-memory SIZE"), "{told}");
    let told = plan(&case, &["--hosts", "2", "--device-memory", "1KiB"]);
    assert!(told.contains("no recommendation: each layout") && told.contains(", too much"), "{told}");
    // A single host sends nothing. With one rank on each host, no layout has a group within a host.
    assert!(layouts(&case, &["--hosts", "1"]).iter().all(|layout| bytes(layout) == Some(0)));
    assert!(
        layouts(&case, &["--hosts", "4"]).iter().all(|layout| !layout["name"].as_str().unwrap().contains("per host ("))
    );
    // The plan does not know the bytes if the ranks of a host do not use shared memory.
    let flat = layouts(&case, &["--hosts", "2", "--set", "launcher.transport=tcp"]);
    assert!(flat.iter().all(|layout| bytes(layout).is_none()), "{flat:?}");
}

/// The ranks of one host share its memory, not the ranks of all hosts.
#[test]
fn a_rank_may_use_its_share_of_one_host() {
    let case = Case::new();
    let may_use = |args: &[&str]| {
        let told = case.succeed(&[&["plan", "--config", "ds.yaml"], args].concat());
        let (_, limit) = told.split_once("may use ").unwrap_or_else(|| panic!("{told}"));
        limit.split(':').next().unwrap().to_string()
    };
    assert_eq!(may_use(&["-n", "4", "--hosts", "2"]), may_use(&["-n", "2"]));
    assert_ne!(may_use(&["-n", "4"]), may_use(&["-n", "2"]));
}

#[test]
fn uneven_hosts_are_rejected_and_plan_reads_standard_input() {
    let case = Case::new();
    let output = case.command(&["plan", "--config", "ds.yaml", "-n", "4", "--hosts", "3"]).output().unwrap();
    let told = text(&output.stderr);
    assert!(
        told.starts_with("error: 4 ranks cannot be divided evenly among 3 hosts") && told.contains("help: "),
        "{told}"
    );
    let file = std::fs::File::open(case.path("ds.yaml")).unwrap();
    let mut command = case.command(&["plan", "--config", "-", "-n", "4", "--hosts", "2", "--json"]);
    let output = command.stdin(Stdio::from(file)).output().unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["hosts"]["layouts"], Value::from(layouts(&case, &["--hosts", "2"])));
}

/// 64 ranks on 8 hosts, with one micro-batch: stage 2 reduces all gradients and gathers all parameters once. Each of
/// these two operations sends 7/8 of the elements to each of the 8 hosts, and 7/8 of them within hosts to each of the
/// 64 ranks. Shard groups and secondary shards send as few bytes between hosts as stage 2 does, but need more memory,
/// so the plan recommends stage 2, at every speed of the link.
#[test]
fn bytes_between_and_within_hosts_have_closed_forms() {
    let case = Case::new();
    let args = ["--hosts", "8", "--link", "100Gb", "--set", "train_batch_size=64"];
    let args = [&args[..], &["--set", "train_micro_batch_size_per_gpu=1", "--world-size", "64"]].concat();
    let told = plan(&case, &args);
    assert!(told.contains("\nrecommended: stage 2; of the layouts that send no quantized values, it sends the fewest"));
    assert!(told.contains("\n  help: give --costs FILE to compare predicted steps; --link does not change"), "{told}");
    let plan: Value = serde_json::from_str(&plan(&case, &[&args[..], &["--json"]].concat())).unwrap();
    let exact = plan["hosts"]["layouts"].as_array().unwrap().iter().filter(|layout| layout["rounds"] == false);
    let key = |layout: &&Value| ["network_bytes_per_step", "planned_peak_bytes"].map(|key| layout[key].as_u64());
    assert_eq!(exact.min_by_key(key).unwrap()["name"], "stage 2");
    assert_eq!(plan["hosts"]["recommended"], "stage 2");
    let parameters = plan["stages"][0]["parameters"].as_u64().unwrap();
    for name in ["stage 2", "stage 2, a shard group per host (HSDP)"] {
        let of_name = |layout: &&Value| layout["name"] == name;
        let layout = plan["hosts"]["layouts"].as_array().unwrap().iter().find(of_name).unwrap();
        let bytes = |key: &str| layout[key].as_u64().unwrap();
        assert_eq!(bytes("network_bytes_per_step"), 2 * 4 * parameters * 7, "{layout}");
        assert_eq!(bytes("bytes_within_hosts_per_step"), 2 * 4 * parameters * (64 - 8), "{layout}");
        assert_eq!(layout["link_seconds"].as_f64(), Some(bytes("network_bytes_per_step") as f64 / 8.0 / 12.5e9));
    }
}
