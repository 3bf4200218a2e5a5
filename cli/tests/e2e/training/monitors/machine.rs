//! The monitor of the machine: processor, memory and GPUs, the latter through a mock of NVML.

use crate::case;
use crate::training::nvml;

use std::fs;
use std::path::Path;

use super::{events, page};
use case::{Case, signal, wait_for};

/// Returns the values that the machine monitor has written under a name so far, without an incomplete last line.
fn machine(case: &Case, out: &str, name: &str) -> Vec<f64> {
    let path = case.path(&format!("{out}/csv_monitor/DeepSpeedJobName/Machine_{name}.csv"));
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    lines.lines().skip(1).map(|line| line.split_once(',').unwrap().1.parse().unwrap()).collect()
}

/// Runs training with the machine monitor until `until` holds. Returns standard output and standard error.
fn watched(
    case: &Case,
    out: &str,
    more: &[&str],
    variables: &[(&str, &str)],
    mut until: impl FnMut() -> bool,
) -> [String; 2] {
    let set = ["--set", "machine_monitor={enabled: true, interval_seconds: 0.02}", "--set", "csv_monitor.enabled=true"];
    let args = ["--config", "ds.yaml", "--plain", "-n", "2", "--max-steps", "1000000", "--out", out];
    let mut command = case.command(&[&args[..], &set, &["--set", "training.save_last=false"], more].concat());
    command.env_remove("CUDA_VISIBLE_DEVICES").envs(variables.iter().copied());
    let files = ["stdout", "stderr"].map(|name| case.path(&format!("{out}.{name}")));
    let [stdout, stderr] = files.clone().map(|path| fs::File::create(path).unwrap());
    let mut child = command.stdout(stdout).stderr(stderr).spawn().unwrap();
    wait_for(|| until() || child.try_wait().unwrap().is_some());
    signal(child.id(), "TERM");
    let status = child.wait().unwrap();
    let said = files.map(|path| fs::read_to_string(path).unwrap());
    assert_eq!(status.code(), Some(143), "{said:?}");
    said
}

#[test]
fn the_machine_is_monitored() {
    let case = Case::new();
    let last = |name: &str| machine(&case, "run", name).last().copied();
    watched(&case, "run", &[], &[], || last("process_cpu_percent").is_some_and(|percent| percent > 0.0));
    assert!(last("cpu_percent").unwrap() > 0.0 && last("cpu_percent").unwrap() <= 100.0);
    assert!(last("process_resident_bytes").unwrap() > 1e6 && last("memory_available_bytes").unwrap() > 1e6);
    case.train(&["--quiet", "-n", "2", "--out", "without"]);
    let (with, without) = (case.losses("run"), case.losses("without"));
    assert!(with.len() > 1 && with.iter().zip(&without).all(|(one, other)| one == other), "not bit-identical");
}

#[test]
fn gpus_are_monitored_through_nvml() {
    let case = Case::new();
    if !nvml::mock(&case.path("")) {
        return;
    }
    let here = case.path("").display().to_string();
    // Monitors all three GPUs first, then the two in CUDA_VISIBLE_DEVICES, one of them given by a prefix of its UUID.
    let port = case::port();
    let prometheus = format!("prometheus={{enabled: true, port: {port}}}");
    let more = ["--set", &prometheus, "--set", "tensorboard.enabled=true"];
    let mut seen = String::new();
    let [out, errors] = watched(&case, "all", &more, &[("LD_LIBRARY_PATH", &here)], || {
        seen = page(port).unwrap_or_default();
        seen.contains("zero_train_machine_gpu_temperature_celsius")
    });
    assert!(errors.is_empty() && !out.contains("machine_monitor"), "{out}{errors}");
    for line in [
        "zero_train_machine_gpu_utilization_ratio{gpu=\"1\"} 0.51",
        "zero_train_machine_gpu_memory_used_bytes{gpu=\"2\"} 3221225472",
        "zero_train_machine_gpu_power_watts{gpu=\"0\"} 300.5",
        "zero_train_machine_gpu_temperature_celsius{gpu=\"2\"} 62",
        "# TYPE zero_train_machine_gpu_power_watts gauge",
    ] {
        assert_eq!(seen.lines().filter(|known| *known == line).count(), 1, "{line}: {seen}");
    }
    let of_gpus = |out: &str, gpu: usize| {
        let names = ["utilization_percent", "memory_used_bytes", "power_watts", "temperature_celsius"];
        names.map(|name| machine(&case, out, &format!("gpu_{gpu}_{name}")).last().copied())
    };
    let of = |gpu: usize| {
        let x = gpu as f64;
        [50.0 + x, (x + 1.0) * f64::from(1 << 30), 300.5 + x, 60.0 + x].map(Some)
    };
    assert_eq!([0, 1, 2].map(|gpu| of_gpus("all", gpu)), [of(0), of(1), of(2)]);
    if let Some(events) = events(&case.path("all/tensorboard/DeepSpeedJobName")) {
        let temperature =
            |line: &String| line.starts_with("Machine/gpu_1_temperature_celsius ") && line.ends_with(" 61.0");
        assert!(events.iter().any(temperature), "{events:?}");
    }
    let variables = [("LD_LIBRARY_PATH", here.as_str()), ("CUDA_VISIBLE_DEVICES", "2,GPU-10000000")];
    watched(&case, "two", &[], &variables, || of_gpus("two", 2)[3].is_some());
    assert_eq!([0, 1, 2].map(|gpu| of_gpus("two", gpu)), [of(0), [None; 4], of(2)]);
    case.train(&["--quiet", "-n", "2", "--out", "without"]);
    let without = case.losses("without");
    for out in ["all", "two"] {
        let with = case.losses(out);
        assert!(with.len() > 1 && with.iter().zip(&without).all(|(one, other)| one == other), "{out} is not identical");
    }
}

#[test]
fn missing_gpu_metrics_are_reported_once() {
    let case = Case::new();
    if !nvml::mock(&case.path("")) {
        return;
    }
    let here = case.path("").display().to_string();
    let samples = |out: &str, name: &str| machine(&case, out, name).len();
    // GPU 0 never reports its power, and GPU 1 is lost after a while. The other metrics are still written.
    let variables = [("LD_LIBRARY_PATH", here.as_str()), ("MOCK_NVML_FAILS", "power:0,lost:1")];
    let [out, errors] =
        watched(&case, "failing", &[], &variables, || samples("failing", "gpu_0_temperature_celsius") > 30);
    let lines: Vec<&str> = errors.lines().collect();
    let start = |gpu: usize| format!("warning: `machine_monitor` cannot read all metrics of GPU {gpu}: ");
    assert_eq!(lines.len(), 2, "{errors}{out}");
    assert_eq!(lines[0], start(0) + "power: the requested operation is not available on the target device");
    assert!(lines[1].starts_with(&(start(1) + "device fell off the bus")), "{errors}");
    assert_eq!(samples("failing", "gpu_0_power_watts"), 0);
    assert!((1..=11).contains(&samples("failing", "gpu_1_power_watts")));
    assert!(samples("failing", "gpu_2_power_watts") > 20);
    // The monitor prints a line if the library is broken or missing, or if there is no driver, no GPU or no visible
    // GPU. If the driver fails, the monitor prints a warning.
    let broken = case.path("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("libnvidia-ml.so.1"), "").unwrap();
    let broken = broken.display().to_string();
    let path = ("LD_LIBRARY_PATH", here.as_str());
    let no_gpu = |why: &str| format!("`machine_monitor` found no GPU: {why}\n");
    let mut cases = vec![
        (vec![("LD_LIBRARY_PATH", broken.as_str())], no_gpu(&format!("{broken}/libnvidia-ml.so.1: file too short")), false),
        (vec![path, ("MOCK_NVML_INIT", "9")], no_gpu("NVIDIA driver is not loaded"), false),
        (vec![path, ("MOCK_NVML_GPUS", "0")], no_gpu("the driver lists none"), false),
        (vec![path, ("CUDA_VISIBLE_DEVICES", "")], no_gpu("CUDA_VISIBLE_DEVICES=\"\" hides all 3"), false),
        (
            vec![path, ("MOCK_NVML_INIT", "18")],
            "warning: `machine_monitor` cannot monitor GPUs: NVML: RM detects a driver/library version mismatch; training continues\n".into(),
            true,
        ),
    ];
    if Path::new("/proc/driver/nvidia").exists() {
        println!("skipped: a machine without NVIDIA's library");
    } else {
        let why = "libnvidia-ml.so.1: cannot open shared object file: No such file or directory";
        cases.push((vec![], no_gpu(why), false));
    }
    for (index, (variables, expected, is_warning)) in cases.iter().enumerate() {
        let out = format!("none{index}");
        let said = watched(&case, &out, &[], variables, || samples(&out, "cpu_percent") > 3);
        let [said, nothing] = if *is_warning { [&said[1], ""] } else { [&said[0], said[1].as_str()] };
        assert_eq!(said.matches(expected.as_str()).count(), 1, "{expected}: {said}");
        assert_eq!(said.matches("machine_monitor").count(), 1, "{said}");
        assert_eq!(nothing, "", "{expected}");
        assert_eq!(samples(&out, "gpu_0_temperature_celsius"), 0);
    }
}
