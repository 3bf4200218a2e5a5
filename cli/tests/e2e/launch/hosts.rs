//! `zero-train launch` on two hosts with two ranks each. The hosts are two network namespaces of this machine.
//!
//! Ranks of one host communicate through shared memory, ranks of different hosts over TCP. A collective reduces within
//! each host first. Without root or `ip`, the tests print that they are skipped.

use crate::case;
use crate::launch::namespaces;
use crate::launch::ranks;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use case::{Alone, Case, signal};
use namespaces::Hosts;

/// Starts the launcher of one of two hosts, with two ranks. `ip netns exec` replaces itself by the launcher, so its
/// process is the launcher.
fn start(case: &Case, hosts: &Hosts, host: usize, args: &[&str]) -> Alone {
    let index = host.to_string();
    let place = [
        "launch",
        "--nproc_per_node=2",
        "--nnodes",
        "2",
        "--node-rank",
        &index,
        "--master-addr",
        namespaces::ADDRESSES[0],
    ];
    let usual = ["--config", "ds.yaml", "--quiet", "--set", "launcher.interface=eth0"];
    let mut command = hosts.command(case, host, &[&place[..], &usual, args].concat());
    let token = case.path("token");
    if !token.exists() {
        fs::write(&token, "what the launchers know").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    }
    command.env("ZERO_TRAIN_TOKEN_FILE", &token);
    Alone::start(command)
}

pub(crate) fn start_both(case: &Case, hosts: &Hosts, args: &[&str]) -> [Alone; 2] {
    [0, 1].map(|host| start(case, hosts, host, args))
}

/// Keeps secondary shards on each host, from which the backward gathers parameters.
pub(crate) const SECONDARY: [&str; 2] = ["--set", "zero_optimization.zero_hpz_partition_size=2"];

/// Layouts in which ranks communicate in several groups: secondary shards with and without quantized collectives, shard
/// groups, and replicates that train independently between outer steps.
pub(crate) const LAYOUTS: [&[&str]; 5] = [&[], &SECONDARY, &CODED, &GROUPS, &LOCAL_STEPS];

/// Secondary shards, and quantized collectives.
pub(crate) const CODED: [&str; 2] = [
    "--set",
    "zero_optimization={stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0, \
     zero_hpz_partition_size: 2, zero_quantized_weights: true, zero_quantized_gradients: true}",
];

/// A shard group on each host.
pub(crate) const GROUPS: [&str; 2] = ["--set", "mesh={data_parallel_replicate_degree: 2}"];

const LOCAL_STEPS: [&str; 4] =
    ["--set", "mesh={data_parallel_replicate_degree: 2}", "--set", "training.local_steps={steps: 5}"];

/// Trains with four ranks on one host. Returns the losses, and the checksums of all parameters and optimizer state.
fn on_one_host(case: &Case, steps: u64, more: &[&str]) -> (Vec<String>, serde_json::Value) {
    case.train(&[&["--quiet", "-n", "4", "--out", "whole", "--max-steps", &steps.to_string()], more].concat());
    (case.losses("whole"), case.shards("whole", steps))
}

#[test]
fn two_hosts_with_two_ranks_are_bit_identical_to_one_host_with_four() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let expected = on_one_host(&case, 20, &[]);
    // Hierarchical collectives, and flat ones over TCP alone.
    for (out, transport, how) in [("run", "auto", "shared memory and tcp"), ("flat", "tcp", "tcp")] {
        let transport = format!("launcher.transport={transport}");
        let args = ["--out", out, "--max-steps", "20", "--set", &transport, "--tee", "0:2", "--log-dir", "logs"];
        for launcher in start_both(&case, &hosts, &args) {
            assert_eq!(launcher.end(), (Some(0), String::new()));
        }
        assert!((case.losses(out), case.shards(out, 20)) == expected, "not bit-identical over {how}");
        assert_eq!(case.report(out)["transport"], how);
    }
    for rank in 0..4 {
        assert!(case.path(&format!("logs/attempt_0/{rank}/stderr.log")).exists(), "rank {rank}");
    }
}

#[test]
fn a_rank_that_dies_on_the_other_host_is_restarted_bit_identically() {
    for more in LAYOUTS {
        restarts_bit_identically(more);
    }
}

fn restarts_bit_identically(more: &[&str]) {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let args = ["--out", "run", "--max-steps", "200", "--set", "training.save_every=10", "--max-restarts", "2"];
    let args = [&args[..], more].concat();
    let launchers = start_both(&case, &hosts, &args);
    case.wait_for_steps("run", 30);
    signal(ranks::of(launchers[1].id())[0], "KILL");
    for launcher in launchers {
        let (status, errors) = launcher.end();
        assert_eq!(status, Some(0), "{errors}");
        let told = errors
            .lines()
            .filter(|line| line.starts_with("restart 1 of 2: rank 2 was killed by signal 9; 4 ranks from step "));
        assert_eq!(told.count(), 1, "{errors}");
    }
    let undisturbed = on_one_host(&case, 200, more);
    assert!((case.losses("run"), case.shards("run", 200)) == undisturbed, "{more:?}: not bit-identical to one host");
    assert_eq!(case.report("run")["restarts"][0]["ranks"], 4);
}

#[test]
fn both_launchers_exit_with_the_status_of_the_failed_rank_and_all_survivors_name_it() {
    for more in LAYOUTS {
        // One rank, and both ranks of a host.
        for victims in [&[3][..], &[2, 3]] {
            let Some(hosts) = Hosts::new() else { return };
            let case = Case::new();
            let args = ["--out", "run", "--max-steps", "1000000", "--log-dir", "logs"];
            let launchers = start_both(&case, &hosts, &[&args[..], more].concat());
            case.wait_for_steps("run", 3);
            let ranks = ranks::of(launchers[1].id());
            victims.iter().for_each(|rank| signal(ranks[rank - 2], "KILL"));
            for launcher in launchers {
                let (status, errors) = launcher.end();
                assert_eq!(status, Some(4), "{errors}");
                let is_first = |rank| errors.contains(&format!("rank {rank} was killed by signal 9; it failed first"));
                assert!(victims.iter().any(is_first), "{more:?}: {errors}");
            }
            for named in ranks::named_by(&case, 0..victims[0]) {
                assert!(named.is_some_and(|rank| victims.contains(&rank)), "{more:?}, {victims:?}: {named:?}");
            }
        }
    }
}

#[test]
fn a_network_failure_ends_both_launchers_and_all_ranks_name_a_rank_of_the_other_host() {
    for more in LAYOUTS {
        // Replicates send each other nothing between outer steps, and may be late by one timeout per local step. With
        // an outer step after every step, a rank notices before the launchers do.
        let often = if *more == LOCAL_STEPS { &["--set", "training.local_steps={steps: 1}"][..] } else { &[] };
        both_launchers_end(&[more, often].concat());
    }
}

fn both_launchers_end(more: &[&str]) {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let args = ["--out", "run", "--max-steps", "1000000", "--set", "launcher.timeout_seconds=3", "--log-dir", "logs"];
    let launchers = start_both(&case, &hosts, &[&args[..], more].concat());
    case.wait_for_steps("run", 3);
    hosts.link("down");
    for (host, launcher) in launchers.into_iter().enumerate() {
        let (status, errors) = launcher.end();
        assert_eq!(status, Some(4), "{errors}");
        let is_named = errors.lines().filter_map(ranks::lost).any(|rank| rank / 2 == 1 - host);
        assert!(is_named, "{more:?}, host {host}: {errors}");
    }
    for (rank, named) in ranks::named_by(&case, 0..4).into_iter().enumerate() {
        assert!(named.is_some_and(|named| named / 2 == 1 - rank / 2), "{more:?}, rank {rank}: {named:?}");
    }
}

#[test]
fn a_stopped_rank_ends_both_launchers_and_all_survivors_name_it() {
    for more in LAYOUTS {
        let Some(hosts) = Hosts::new() else { return };
        let case = Case::new();
        // With `--grace 0`, the launcher kills the stopped rank as soon as another rank has failed.
        let args = ["--out", "run", "--max-steps", "1000000", "--grace", "0", "--log-dir", "logs"];
        let timeout = ["--set", "launcher.timeout_seconds=2"];
        let launchers = start_both(&case, &hosts, &[&args[..], &timeout, more].concat());
        case.wait_for_steps("run", 3);
        signal(ranks::of(launchers[1].id())[1], "STOP");
        for (host, launcher) in launchers.into_iter().enumerate() {
            let (status, errors) = launcher.end();
            assert_eq!(status, Some(4), "{errors}");
            assert!(errors.lines().any(|line| ranks::lost(line) == Some(3)), "{more:?}, host {host}: {errors}");
        }
        assert_eq!(ranks::named_by(&case, 0..3), [Some(3); 3], "{more:?}");
    }
}

#[test]
fn launchers_with_different_flags_or_without_a_token_are_rejected() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let first = start(&case, &hosts, 0, &["--max-restarts", "1"]);
    let second = start(&case, &hosts, 1, &["--max-restarts", "2"]);
    for launcher in [first, second] {
        let (status, errors) = launcher.end();
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains("--max-restarts is "), "{errors}");
    }
    let args = [
        "launch",
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        namespaces::ADDRESSES[0],
        "--config",
        "ds.yaml",
    ];
    for (more, key) in
        [(&[][..], "launcher.interface"), (&["--set", "launcher.interface=eth0"], "ZERO_TRAIN_TOKEN_FILE")]
    {
        let (status, errors) = Alone::start(hosts.command(&case, 0, &[&args[..], more].concat())).end();
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains(&format!("in: {key}")), "{errors}");
    }
}

#[test]
fn a_restarted_launcher_cannot_rejoin_a_running_job() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let args = ["--out", "run", "--max-steps", "1000000", "--set", "launcher.timeout_seconds=3"];
    let [first, second] = start_both(&case, &hosts, &args);
    case.wait_for_steps("run", 3);
    signal(second.id(), "KILL");
    let another = start(&case, &hosts, 1, &args);
    let (status, errors) = first.end();
    assert_eq!(status, Some(4), "{errors}");
    assert!(errors.ends_with("error: the launcher of host 1 was restarted\n"), "{errors}");
    // The launcher of host 0 has ended, so the replacement waits for it until the timeout.
    let (status, errors) = another.end();
    assert_eq!(status, Some(4), "{errors}");
    let last = errors.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: cannot reach the launcher of host 0: "), "{errors}");
}

#[test]
fn a_launcher_that_waits_reports_for_which_host_and_why() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let launchers = [(0, "a"), (1, "b")].map(|(host, job)| start(&case, &hosts, host, &["--rdzv-id", job]));
    // The launchers report after ten seconds.
    std::thread::sleep(Duration::from_secs(12));
    let reasons = [
        "waiting for host 1: its launcher has not joined this job at ",
        "waiting for host 0: the store at the address of host 0 belongs to another job; ",
    ];
    for (launcher, reason) in launchers.into_iter().zip(reasons) {
        signal(launcher.id(), "TERM");
        let (_, errors) = launcher.end();
        assert!(errors.starts_with(reason), "{errors}");
    }
}
