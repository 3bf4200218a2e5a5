//! Runs every example with one rank and with two. The examples assert their own results.

use std::net::TcpListener;
use std::process::{Command, Stdio};

/// Runs the program as `ranks` ranks in an empty folder, with the environment variables that torchrun sets. Returns the
/// standard output of rank 0.
fn run(program: &str, ranks: usize) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let start = |rank: usize| {
        let mut command = Command::new(program);
        command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // candle's threads wait for each other in busy loops, which is slow with more threads than cores.
        command.env("CANDLE_NUM_THREADS", "1");
        for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        if ranks > 1 {
            let port = free.port().to_string();
            let [rank, ranks] = [rank, ranks].map(|number| number.to_string());
            command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &ranks);
            command.env("LOCAL_WORLD_SIZE", &ranks).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
        }
        command.spawn().expect("the example starts")
    };
    let started: Vec<_> = (0..ranks).map(start).collect();
    let ended = started.into_iter().map(|rank| rank.wait_with_output().expect("the example ends"));
    let outputs: Vec<_> = ended.collect();
    for (rank, output) in outputs.iter().enumerate() {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank} of {ranks}: {}\n{errors}", output.status);
        assert!(rank == 0 || output.stdout.is_empty(), "rank {rank} prints");
    }
    String::from_utf8_lossy(&outputs[0].stdout).into_owned()
}

#[test]
fn gpt() {
    let alone = run(env!("CARGO_BIN_EXE_gpt"), 1);
    assert!(alone.contains("## "), "{alone}");
    run(env!("CARGO_BIN_EXE_gpt"), 2);
}

#[test]
fn mlp() {
    let outputs = [1, 2].map(|ranks| run(env!("CARGO_BIN_EXE_mlp"), ranks));
    assert!(outputs.iter().all(|output| output.contains("classified right")), "{outputs:?}");
}

#[test]
fn resume() {
    let outputs = [1, 2].map(|ranks| run(env!("CARGO_BIN_EXE_resume"), ranks));
    assert!(outputs.iter().all(|output| output.contains("every bit the same")), "{outputs:?}");
}
