//! `zero-train doctor`: its output about this machine.

use std::process::Command;

#[test]
fn doctor_describes_the_machine_and_says_why_it_has_no_gpu() {
    let output = Command::new(env!("CARGO_BIN_EXE_zero-train")).arg("doctor").output().expect("the binary");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let line = |what: &str| text.lines().find_map(|line| line.strip_prefix(what)).map(str::trim);
    assert_eq!(line("zero-train"), Some(env!("CARGO_PKG_VERSION")));
    for what in ["cores", "processor", "instructions", "memory", "shared memory", "io_uring"] {
        assert!(line(what).is_some_and(|found| !found.is_empty()), "{what}: {text}");
    }
    if cfg!(not(feature = "cuda")) {
        assert!(line("GPUs").is_some_and(|reason| reason.contains("built without CUDA")), "{text}");
    } else {
        assert!(line("driver").is_some() || line("GPUs").is_some_and(|why| why.contains("libcuda.so.1")), "{text}");
    }
}
