//! Compares the symbol lists with the sources of the linked bindings, and checks how calls behave without the
//! libraries.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::ncclResult_t;
use zero_cuda::{Device, Library, inventory};

/// Each list with the module of the bindings that it was generated from.
const MODULES: [(&str, &str); 7] = [
    ("cuda", "driver"),
    ("nccl", "nccl"),
    ("cudart", "runtime"),
    ("cublas", "cublas"),
    ("cublasLt", "cublaslt"),
    ("curand", "curand"),
    ("nvrtc", "nvrtc"),
];

/// The source folder of the locked version of the bindings in cargo's registry.
fn bindings() -> PathBuf {
    let about = Command::new(env!("CARGO")).arg("-vV").output().expect("cargo runs");
    let about = String::from_utf8_lossy(&about.stdout).into_owned();
    let host = about.lines().find_map(|line| line.strip_prefix("host: ")).expect("cargo names its host");
    // Lists only the dependencies for this host: those for other systems may not have been fetched.
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--all-features", "--filter-platform", host])
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .expect("cargo runs");
    let text = String::from_utf8_lossy(&metadata.stdout);
    // The only manifest of the bindings: two versions would not link, because both set `links` to the same libraries.
    let end = text.match_indices("/Cargo.toml\"").map(|(at, _)| at);
    let start = |end: usize| text[..end].rfind('"').map_or(0, |at| at + 1);
    let folders: Vec<&str> = end.map(|end| &text[start(end)..end]).filter(|path| path.contains("/cudarc-")).collect();
    let folder = folders.first().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&metadata.stderr)));
    PathBuf::from(folder)
}

/// The functions that a module declares, with their return kinds as the lists name them.
fn declared(text: &str) -> BTreeMap<String, &'static str> {
    let mut functions = BTreeMap::new();
    let mut of_loader = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("pub unsafe fn ") {
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let result = rest.rsplit_once("-> ").map_or("", |(_, result)| result.trim_end_matches(" {"));
            let gives = match result {
                "*const ::core::ffi::c_char" => "text",
                "usize" => "number",
                _ => "status",
            };
            if !of_loader {
                functions.insert(name, gives);
            }
        }
        of_loader = line.contains("cfg(feature = \"dynamic-loading\")");
    }
    functions
}

#[test]
fn symbol_lists_match_the_bindings() {
    let source = bindings();
    for (list, module) in MODULES {
        let path = source.join(format!("src/{module}/sys/mod.rs"));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let declared = declared(&text);
        assert!(declared.len() > 20, "{module}: {} functions", declared.len());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("symbols/{list}.txt"));
        let listed = fs::read_to_string(path).expect("a list");
        let listed: BTreeMap<String, &str> = listed
            .lines()
            .map(|line| line.split_once(' ').unwrap_or((line, "status")))
            // The bindings do not declare the launch functions that `nvcc` generates calls to, nor the variants for the
            // default stream.
            .filter(|(name, _)| !name.starts_with("__") && !name.ends_with("_ptsz") && !name.ends_with("_ptds"))
            .map(|(name, gives)| (name.to_string(), gives))
            .collect();
        assert_eq!(listed, declared, "symbols/{list}.txt is not what cudarc declares");
    }
}

#[test]
fn calls_without_a_library_return_error_codes_and_inventory_gives_the_reason() {
    if Library::Cuda.available().is_ok() {
        println!("skipped: there is a driver");
        return;
    }
    for library in Library::ALL {
        if let Err(reason) = library.available() {
            assert!(reason.contains(library.file()), "{reason}");
        }
    }
    let reason = inventory().expect_err("no driver");
    assert!(reason.contains("libcuda.so.1") && !reason.contains('\n'), "{reason}");
    for _ in 0..2 {
        let error = Device::open(0).expect_err("no driver");
        assert_eq!(error.code, CUresult::CUDA_ERROR_STUB_LIBRARY, "{error}");
    }
    // Libraries that candle calls besides the driver.
    if Library::Cublas.available().is_err() {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes at most one pointer.
        let result = unsafe { cudarc::cublas::sys::cublasCreate_v2(&raw mut handle) };
        assert_eq!(result, cudarc::cublas::sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED);
    }
    if Library::CublasLt.available().is_err() {
        let mut handle = std::ptr::null_mut();
        // SAFETY: as above.
        let result = unsafe { cudarc::cublaslt::sys::cublasLtCreate(&raw mut handle) };
        assert_eq!(result, cudarc::cublaslt::sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED);
        // SAFETY: takes nothing.
        assert_eq!(unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() }, 0);
    }
    if Library::Curand.available().is_err() {
        let error = cudarc::curand::result::create_generator().expect_err("no library");
        assert_eq!(error.0, cudarc::curand::sys::curandStatus_t::CURAND_STATUS_NOT_INITIALIZED);
    }
    if Library::Nvrtc.available().is_err() {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers, if anything.
        let result = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
        assert_ne!(result, cudarc::nvrtc::sys::nvrtcResult::NVRTC_SUCCESS);
    }
    if Library::Nccl.available().is_err() {
        let mut version = 7;
        // SAFETY: writes one number, if anything.
        let result = unsafe { cudarc::nccl::sys::ncclGetVersion(&raw mut version) };
        assert_eq!((result, version), (ncclResult_t::ncclSystemError, 7));
        // SAFETY: returns text or null.
        let text = unsafe { cudarc::nccl::sys::ncclGetErrorString(result) };
        assert!(!text.is_null());
    }
}
