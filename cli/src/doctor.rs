//! `zero-train doctor`: reports what this machine offers for training, and what is missing.

use std::fmt::Write;

use zero_cuda::Inventory;
use zero_isa::{Isa, VARIABLE};
use zero_planner::Limit;

use zero_train::process::Cores;
use zero_train::process::{CONNECTIONS, LOADING};

/// Returns the report, one line per item.
pub(crate) fn report() -> String {
    let mut text = String::new();
    let mut line = |what: &str, found: &str| writeln!(text, "{what:<14}{found}").unwrap_or(());
    line("zero-train", env!("CARGO_PKG_VERSION"));
    let cores = Cores::allowed();
    line("cores", &format!("{}, hardware threads {cores}", cores.count()));
    line(
        "processor",
        &zero_planner::processor::name().unwrap_or_else(|| "unknown: /proc/cpuinfo has no processor name".into()),
    );
    line("instructions", &instructions());
    #[cfg(target_arch = "aarch64")]
    line("vector units", &zero_planner::processor::vector_features().join(", "));
    let memory = Limit::of_machine().map_or("unknown".into(), |limit| zero_engine::bytes(limit.bytes));
    line("memory", &memory);
    line(
        "shared memory",
        &or_why(zero_comm::shared_memory(), "available between ranks on this machine", "ranks communicate over TCP"),
    );
    line("io_uring", &or_why(zero_tier::io_uring(), "available for offload to disk", "threads read and write instead"));
    match zero_cuda::inventory() {
        Err(reason) => line("GPUs", &format!("none: {reason}")),
        Ok(found) => {
            gpus(&found).iter().for_each(|(what, found)| line(what, found));
            line("CUDA settings", &driver_reads(|name| std::env::var(name).ok()));
        }
    }
    text
}

fn or_why(found: Result<(), String>, what_for: &str, instead: &str) -> String {
    found.map_or_else(|why| format!("unavailable: {why}; {instead}"), |()| what_for.to_string())
}

fn gpus(found: &Inventory) -> Vec<(&'static str, String)> {
    let (major, minor) = found.driver;
    let mut lines = vec![("driver", format!("supports CUDA {major}.{minor} and older"))];
    for (ordinal, device) in found.devices.iter().enumerate() {
        let (major, minor) = device.capability;
        let peers: Vec<String> = device.peers.iter().map(ToString::to_string).collect();
        let reach = if peers.is_empty() { "no other GPU".into() } else { peers.join(", ") };
        let memory = zero_engine::bytes(device.memory);
        let name = &device.name;
        lines.push((
            "GPU",
            format!("{ordinal}: {name}, compute capability {major}.{minor}, {memory}, peer access to {reach}"),
        ));
    }
    if found.devices.is_empty() {
        lines.push(("GPUs", "none: the driver shows no device to this process; check CUDA_VISIBLE_DEVICES".into()));
    }
    lines.push((
        "NCCL",
        match &found.nccl {
            Ok((major, minor, patch)) => format!("{major}.{minor}.{patch}"),
            Err(reason) => format!("none: {reason}"),
        },
    ));
    lines.extend(found.missing.iter().map(|said| ("missing", said.clone())));
    lines
}

/// Describes the environment variables of the driver. A run sets them unless the user has set them.
fn driver_reads(set: impl Fn(&str) -> Option<String>) -> String {
    let told = |(name, value): (&str, &str), of: &str| match set(name) {
        Some(value) => format!("{name}={value}, from this environment"),
        None => format!("{name}={value}{of}"),
    };
    format!("{}; {}", told(CONNECTIONS, ""), told(LOADING, " in runs with several ranks"))
}

/// Describes the instruction set that kernels use, and the other instruction sets that this CPU supports.
fn instructions() -> String {
    let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    format!("{}; {VARIABLE} can select {}", Isa::current(), names.join(", "))
}

#[cfg(test)]
mod tests {
    use zero_cuda::Found;

    use super::*;

    #[test]
    fn driver_variables_of_the_user_are_kept() {
        let ours = driver_reads(|_| None);
        assert_eq!(ours, "CUDA_DEVICE_MAX_CONNECTIONS=32; CUDA_MODULE_LOADING=EAGER in runs with several ranks");
        let theirs = driver_reads(|name| (name == LOADING.0).then(|| "LAZY".into()));
        assert_eq!(theirs, "CUDA_DEVICE_MAX_CONNECTIONS=32; CUDA_MODULE_LOADING=LAZY, from this environment");
    }

    #[test]
    fn every_device_and_every_missing_library_has_a_line() {
        let device = |peers| Found { name: "H200".into(), capability: (9, 0), memory: 150_000_000_000, peers };
        let found = Inventory {
            driver: (13, 0),
            devices: vec![device(vec![1]), device(vec![])],
            nccl: Err("libnccl.so.2: no such file".into()),
            missing: vec!["libcublas.so.13: no such file".into()],
        };
        let lines = gpus(&found);
        let told: Vec<&str> = lines.iter().map(|(_, told)| told.as_str()).collect();
        assert_eq!(
            told,
            [
                "supports CUDA 13.0 and older",
                "0: H200, compute capability 9.0, 150.0 GB, peer access to 1",
                "1: H200, compute capability 9.0, 150.0 GB, peer access to no other GPU",
                "none: libnccl.so.2: no such file",
                "libcublas.so.13: no such file",
            ]
        );
    }
}
