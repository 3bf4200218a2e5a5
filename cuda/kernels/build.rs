//! Compiles the kernels with nvcc if the feature `cuda` is enabled: for sm_80 and sm_90, and to PTX for newer devices.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=cu");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let nvcc = nvcc();
    // A change of `PATH` matters only if the compiler is looked up in it: Python's launchers, for example, extend it.
    let names = ["NVCC", "CUDA_HOME", "PATH"];
    for name in &names[..if nvcc.is_absolute() { 2 } else { 3 }] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let mut sources: Vec<PathBuf> =
        fs::read_dir("cu").expect("the sources are there").map(|entry| entry.expect("an entry").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    // Compile all files in parallel: there are few, and each takes seconds.
    let failures: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = sources.iter().map(|source| scope.spawn(|| compile(&nvcc, source, &out))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no panic").err()).collect()
    });
    if let Some(first) = failures.first() {
        println!("cargo::error={}", first.replace('\n', " "));
        std::process::exit(1);
    }
}

/// Returns the nvcc that `NVCC` names, else the nvcc in `CUDA_HOME`, else the nvcc in `PATH`.
fn nvcc() -> PathBuf {
    if let Some(named) = env::var_os("NVCC") {
        return named.into();
    }
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    home.filter(|path| path.exists()).unwrap_or_else(|| "nvcc".into())
}

fn compile(nvcc: &Path, source: &Path, out: &Path) -> Result<(), String> {
    let to = out.join(source.file_stem().expect("a file")).with_extension("fatbin");
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fmad=false", "-Wno-deprecated-gpu-targets", "-fatbin"]);
    for code in ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"] {
        command.args(["-gencode", code]);
    }
    let output = command.arg(source).arg("-o").arg(&to).output().map_err(|error| {
        format!("{}: {error}: the feature `cuda` needs nvcc of CUDA 12 or 13; see docs/gpu.md", nvcc.display())
    })?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{}: nvcc failed: {}", source.display(), String::from_utf8_lossy(&output.stderr))),
    }
}
