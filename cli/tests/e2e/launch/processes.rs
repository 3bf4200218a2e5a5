//! `zero-train launch` on one host: the flags of other launchers, other programs, the output of ranks, and failed
//! ranks.

use crate::case;

use std::fs;
use std::process::Output;
use std::time::{Duration, Instant};

use case::{Case, succeed, text};

fn launch(case: &Case, args: &[&str]) -> Output {
    case.command(&[&["launch"], args].concat()).output().unwrap()
}

/// Runs a shell script as two ranks. Returns the exit status, standard output and standard error.
fn shell(case: &Case, args: &[&str], script: &str) -> (Option<i32>, String, String) {
    let output = launch(case, &[&["--nproc-per-node", "2"], args, &["sh", "-c", script]].concat());
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_flags_of_three_launchers_give_bit_identical_runs() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "own"]);
    let flags = [
        &["--nproc_per_node=2", "--standalone"][..],
        &["--num_gpus", "2"],
        &["--num_processes", "2", "--num_machines", "1"],
    ];
    for (number, flags) in flags.into_iter().enumerate() {
        let out = format!("run{number}");
        case.succeed(&[&["launch"], flags, &["--config", "ds.yaml", "--quiet", "--out", &out]].concat());
        assert_eq!((case.losses(&out), case.shards(&out, 20)), (case.losses("own"), case.shards("own", 20)));
    }
    // Trains in the environment of a Kubernetes pod, and names the program explicitly.
    let mut command =
        case.command(&["launch", env!("CARGO_BIN_EXE_zero-train"), "--config", "ds.yaml", "--quiet", "--out", "pod"]);
    command.env("PET_NPROC_PER_NODE", "2").env("PET_NNODES", "1").env("RANK", "0").env("WORLD_SIZE", "7");
    succeed(&mut command);
    assert_eq!((case.losses("pod"), case.shards("pod", 20)), (case.losses("own"), case.shards("own", 20)));
}

#[test]
fn tee_prefixes_lines_with_the_rank_and_log_files_have_all_lines() {
    let case = Case::new();
    let script = "echo out of $RANK; echo errors of $RANK >&2";
    let (status, out, errors) = shell(&case, &["--tee", "0:3,1:2", "--log-dir", "logs"], script);
    let mut errors: Vec<&str> = errors.lines().collect();
    errors.sort_unstable();
    assert_eq!((status, out.as_str()), (Some(0), "[rank 0]: out of 0\n"));
    assert_eq!(errors, ["[rank 0]: errors of 0", "[rank 1]: errors of 1"]);
    for rank in 0..2 {
        let file = |name: &str| fs::read_to_string(case.path(&format!("logs/attempt_0/{rank}/{name}.log"))).unwrap();
        assert_eq!((file("stdout"), file("stderr")), (format!("out of {rank}\n"), format!("errors of {rank}\n")));
    }
    let (status, out, _) = shell(&case, &[], "echo one");
    assert_eq!((status, out.as_str()), (Some(0), "one\none\n"));
}

#[test]
fn the_first_failure_is_reported_with_its_last_lines_and_the_other_ranks_are_ended() {
    let case = Case::new();
    let started = Instant::now();
    // Rank 0 exits with status 0 on SIGTERM; rank 1 is to blame.
    let script =
        "trap 'echo told; exit 0' TERM; if [ $RANK = 1 ]; then seq 100 >&2; exit 17; fi; while :; do sleep 0.1; done";
    let (status, out, errors) = shell(&case, &["--tee", "1"], script);
    assert_eq!((status, out.as_str()), (Some(17), "[rank 0]: told\n"), "{errors}");
    assert!(errors.starts_with("61\n62\n") && errors.contains("\n100\n"), "{errors}");
    assert!(
        errors.ends_with("error: rank 1 exited with status 17; it failed first, and the other ranks were stopped\n"),
        "{errors}"
    );
    // A rank that ignores SIGTERM is killed.
    let deaf = "trap '' TERM; if [ $RANK = 1 ]; then exit 17; fi; while :; do sleep 0.1; done";
    let (status, _, errors) = shell(&case, &["--grace", "1"], deaf);
    assert_eq!(status, Some(17), "{errors}");
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

/// NVIDIA's driver reads these variables on its first call. The launcher keeps values that the user has set.
#[test]
fn ranks_get_the_environment_variables_of_the_driver() {
    let case = Case::new();
    let script = "echo $CUDA_DEVICE_MAX_CONNECTIONS $CUDA_MODULE_LOADING";
    let told = |ranks: &str, set: &[(&str, &str)]| {
        let mut command = case.command(&["launch", "--nproc-per-node", ranks, "sh", "-c", script]);
        command.env_remove("CUDA_DEVICE_MAX_CONNECTIONS").env_remove("CUDA_MODULE_LOADING");
        text(&command.envs(set.iter().copied()).output().unwrap().stdout)
    };
    assert_eq!(told("1", &[]), "32\n");
    assert_eq!(told("2", &[]), "32 EAGER\n32 EAGER\n");
    assert_eq!(told("2", &[("CUDA_MODULE_LOADING", "LAZY")]), "32 LAZY\n32 LAZY\n");
    assert_eq!(told("1", &[("CUDA_DEVICE_MAX_CONNECTIONS", "8")]), "8\n");
}

#[test]
fn another_program_is_restarted_up_to_max_restarts_times() {
    let case = Case::new();
    let script = "echo $RANK >> attempt$ZERO_TRAIN_ATTEMPT; [ $ZERO_TRAIN_ATTEMPT = 2 ] || [ $RANK = 0 ] || exit 2";
    let (status, _, errors) = shell(&case, &["--max-restarts", "5"], script);
    assert_eq!(status, Some(0), "{errors}");
    let told: Vec<&str> = errors.lines().collect();
    assert_eq!(
        told,
        [
            "restart 1 of 5: rank 1 exited with status 2; 2 ranks",
            "restart 2 of 5: rank 1 exited with status 2; 2 ranks"
        ]
    );
    let ran = |attempt: usize| case.path(&format!("attempt{attempt}")).exists();
    assert!(ran(0) && ran(1) && ran(2) && !ran(3));
}

#[test]
fn invalid_arguments_are_rejected() {
    let case = Case::new();
    let refused = |args: &[&str]| case.fail(2, &[&["launch"], args].concat());
    assert!(refused(&["--config", "ds.yaml", "sh"]).contains("give either --config or a program, not both"));
    assert!(refused(&["--max-steps", "3", "sh"]).contains("--max-steps is a training option"));
    assert!(refused(&[]).contains("--config <FILE> is missing"));
    assert!(refused(&["--nproc-per-node", "2", "-n", "3", "sh"]).contains("starts 2"));
    let threads = ["--config", "ds.yaml", "--set", "launcher.transport=threads", "--log-dir", "logs"];
    assert!(refused(&threads).contains("in: launcher.transport"));
    let output = launch(&case, &["no-such-program"]);
    assert!(text(&output.stderr).contains("cannot start rank 0, `no-such-program`"), "{}", text(&output.stderr));
}
