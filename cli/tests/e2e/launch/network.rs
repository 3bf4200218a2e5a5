//! One rank on each of two hosts. The hosts are two network namespaces of this machine.
//!
//! The ranks train bit-identically to one host, survive a short interruption of the network, detect a long one, and
//! reject connections without the token. Without root or `ip`, the tests print that they are skipped.

use crate::case;
use crate::launch::namespaces;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use case::{Alone, Case};
use namespaces::Hosts;

const TOKEN: &str = "what the job's ranks know";
/// A fixed port, because each namespace has its own ports.
const PORT: u16 = 29500;

/// Starts one of the two ranks, on the host with the same index.
fn start(case: &Case, hosts: &Hosts, rank: usize, token: Option<&str>, args: &[&str]) -> Alone {
    let usual = ["--config", "ds.yaml", "--quiet", "--out", "run", "--set", "launcher.bind_cores_to_rank=false"];
    let mut command = hosts.command(case, rank, &[&usual, args].concat());
    case::place(&mut command, [rank, 2], [0, 1], (namespaces::ADDRESSES[0], PORT));
    if let Some(token) = token {
        command.env("ZERO_TRAIN_TOKEN", token);
    }
    Alone::start(command)
}

fn start_both(case: &Case, hosts: &Hosts, args: &[&str]) -> [Alone; 2] {
    let args = [&INTERFACE, args].concat();
    [0, 1].map(|rank| start(case, hosts, rank, Some(TOKEN), &args))
}

const INTERFACE: [&str; 2] = ["--set", "launcher.interface=eth0"];

/// Trains with both ranks on this host. Returns the losses, and the checksums of all parameters and optimizer state.
fn on_one_host(case: &Case, steps: u64) -> (Vec<String>, serde_json::Value) {
    case.train(&["--quiet", "-n", "2", "--out", "whole", "--max-steps", &steps.to_string()]);
    (case.losses("whole"), case.shards("whole", steps))
}

#[test]
fn two_hosts_are_bit_identical_to_one_despite_a_short_network_failure() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let ranks = start_both(&case, &hosts, &["--max-steps", "300"]);
    case.wait_for_steps("run", 20);
    assert!(case.steps("run") < 300, "training ended before the network failed");
    hosts.link("down");
    std::thread::sleep(Duration::from_secs(1));
    let standing = case.steps("run");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(case.steps("run"), standing, "training goes on without a network");
    hosts.link("up");
    for rank in ranks {
        assert_eq!(rank.end(), (Some(0), String::new()));
    }
    assert!((case.losses("run"), case.shards("run", 300)) == on_one_host(&case, 300), "not bit-identical to one host");
}

#[test]
fn without_a_network_both_ranks_time_out_and_name_each_other() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let ranks = start_both(&case, &hosts, &["--max-steps", "1000000", "--set", "launcher.timeout_seconds=3"]);
    case.wait_for_steps("run", 3);
    hosts.link("down");
    let gone = Instant::now();
    for (rank, alone) in ranks.into_iter().enumerate() {
        let (status, errors) = alone.end();
        assert_eq!(status, Some(4), "{errors}");
        // The limit is generous for busy machines. Without our timeout, the kernel would retry for a quarter of an
        // hour.
        assert!(gone.elapsed() < Duration::from_secs(60), "rank {rank} took {:?}", gone.elapsed());
        // The reported operation may differ: an operation also fails when an earlier one of the same rank has timed
        // out.
        let lost = format!("timed out after 3s waiting for rank {} in ", 1 - rank);
        assert!(errors.starts_with(&format!("error: rank {rank} ")), "{errors}");
        let (_, place) = errors.lines().next().and_then(|line| line.split_once(&lost)).expect(&errors);
        let (operation, sequence) = place.split_once(" #").unwrap_or_else(|| panic!("{errors}"));
        assert!(!operation.is_empty() && sequence.trim().parse::<u64>().is_ok(), "{errors}");
    }
}

#[test]
fn connections_without_the_token_are_rejected_and_do_not_disturb_the_job() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let args = [&INTERFACE[..], &["--max-steps", "300"]].concat();
    // While rank 0 waits for rank 1, processes without the right token or interface try to connect.
    let first = start(&case, &hosts, 0, Some(TOKEN), &args);
    for (token, args, missing) in
        [(Some("a guess"), &args[..], "token"), (None, &args[..], "token"), (None, &args[2..], "launcher.interface")]
    {
        let (status, errors) = start(&case, &hosts, 1, token, args).end();
        assert!(!matches!(status, Some(0) | None), "{errors}");
        assert!(errors.starts_with("error: ") && errors.contains(missing), "{status:?} {errors}");
    }
    let second = start(&case, &hosts, 1, Some(TOKEN), &args);
    // During training, connect to every port of rank 0 and send random bytes.
    case.wait_for_steps("run", 3);
    let doors = hosts.listening(0);
    assert!(!doors.is_empty());
    let knock = "exec 3<>/dev/tcp/$0/$1 && head -c 5000 /dev/urandom >&3; timeout 5 cat <&3 | wc -c";
    for door in &doors {
        let door = door.to_string();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", hosts.name(1), "bash", "-c", knock, namespaces::ADDRESSES[0], &door]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let heard: usize = case::text(&output.stdout).trim().parse().unwrap();
        assert!(heard < 200, "port {door} sent {heard} bytes to a client without the token");
    }
    for rank in [first, second] {
        assert_eq!(rank.end(), (Some(0), String::new()));
    }
    assert!((case.losses("run"), case.shards("run", 300)) == on_one_host(&case, 300), "not bit-identical to one host");
}
