//! A mock of the driver, NCCL, cuBLAS and cuRAND for machines without them. It is compiled from C and loaded under the
//! libraries' names before the tests of a program run.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use zero_cuda::{Device, Library, Module};

/// The environment variable that runs the tests on this machine's real devices instead.
pub(crate) const REAL: &str = "ZERO_TRAIN_CUDA_TESTS";

/// Whether the tests have devices to run on; prints the reason if not. Panics if real devices are requested and
/// missing.
///
/// On real devices a test may only print `skipped: needs N GPUs` or `skipped: only the mock can do this`:
/// `scripts/card.sh` treats every other message about skipping as a failure.
pub(crate) fn ready() -> bool {
    static READY: OnceLock<Result<(), String>> = OnceLock::new();
    match READY.get_or_init(prepare) {
        Ok(()) => true,
        Err(reason) => {
            println!("skipped: {reason}");
            false
        }
    }
}

/// Whether the tests run on real devices.
pub(crate) fn is_real() -> bool {
    env::var_os(REAL).is_some()
}

/// Whether the mock runs; prints a message if not. For tests of faults that cannot be provoked on real devices.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn only_the_mock() -> bool {
    if is_real() {
        println!("skipped: only the mock can do this");
    }
    !is_real() && ready()
}

/// Whether `count` devices exist; prints a message if not.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn has_gpus(count: usize) -> bool {
    let is_enough = ready() && Device::count().expect("a driver") >= count;
    if !is_enough {
        println!("skipped: needs {count} GPUs");
    }
    is_enough
}

/// Whether NCCL can connect `ranks` ranks: each has its own device, or NCCL is configured to let ranks share one.
/// Prints a message if not.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn connects(ranks: usize) -> bool {
    let may_share = env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|is_set| is_set == "1");
    if may_share { ready() } else { has_gpus(ranks) }
}

/// Whether an error says that the program was built without kernels; prints the error if so. Panics on real devices,
/// because a program without kernels would pass all tests by skipping them.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn has_no_kernels(error: &dyn std::fmt::Display) -> bool {
    let said = error.to_string();
    let is_empty = said.contains("CUDA_ERROR_INVALID_IMAGE");
    assert!(!(is_empty && is_real()), "{REAL} is set, and this program has no kernels for the device: {said}");
    if is_empty {
        println!("skipped: built without kernels; cuda/emulator/nvcc makes some");
    }
    is_empty
}

/// The device of a rank; ranks share devices if there are too few.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn device_of(rank: usize) -> Arc<Device> {
    let devices = Device::count().expect("a driver");
    Device::open(rank % devices).expect("a device")
}

fn prepare() -> Result<(), String> {
    if is_real() {
        for library in [Library::Cuda, Library::Nccl] {
            library.available().unwrap_or_else(|reason| panic!("{REAL} is set: {reason}"));
        }
        return Ok(());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mock");
    build(&folder).map(|files| files.iter().for_each(|file| load(file)))
}

const SCRIPT: &str = "cuda/emulator/mock/build.sh";

/// The root of the repository. Several crates include this file, so it is searched for.
fn root() -> &'static Path {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join(SCRIPT).exists()).expect("the sources of the mock")
}

fn build(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let compiler = env::var("CC").unwrap_or("cc".into());
    Command::new(&compiler)
        .arg("--version")
        .output()
        .map_err(|error| format!("no C compiler for the mock: {error}"))?;
    let output = Command::new(root().join(SCRIPT))
        .arg(folder)
        .output()
        .map_err(|error| format!("no shell for the mock: {error}"))?;
    // If a compiler exists, it must accept the sources.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Once a library is loaded under its name, later lookups of that name return it. The mock has no cudart and no
    // NVRTC.
    let libraries = [Library::Cuda, Library::Nccl, Library::Cublas, Library::CublasLt, Library::Curand];
    Ok(libraries.map(|library| folder.join(library.file())).into())
}

fn load(file: &Path) {
    let name = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path");
    // SAFETY: the mock library runs no code when it is loaded.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "{} does not load", file.display());
}

/// A variable of the mock, through which a test injects faults.
fn variable<T>(name: &CStr) -> *mut T {
    // SAFETY: the name is a C string; the libraries were loaded with global visibility.
    let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "the mock has no {name:?}");
    found.cast()
}

/// Sets an integer variable of the mock.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn set(name: &CStr, value: c_int) {
    // SAFETY: all variables that tests set are of that type; the mock's threads read them without tearing.
    unsafe { variable::<c_int>(name).write_volatile(value) };
}

/// Reads a counter of the mock.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn read(name: &CStr) -> c_long {
    // SAFETY: all counters that tests read are of that type; the mock's threads write them without tearing.
    unsafe { variable::<c_long>(name).read_volatile() }
}

/// Compiles our kernels so that they check and count their memory accesses. While `mock_watches` is set, each kernel
/// that is loaded is replaced by its compiled copy. Returns false and prints a message if the machine has no C++
/// compiler.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn watch_kernels() -> bool {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watched");
    std::fs::create_dir_all(&folder).expect("a folder");
    let sources = std::fs::read_dir(root().join("cuda/kernels/cu")).expect("the sources of the kernels");
    let sources = sources.map(|entry| entry.expect("an entry").path());
    let sources: Vec<PathBuf> = sources.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    let compile = |source: &Path| {
        let to = folder.join(source.file_stem().expect("a file")).with_extension("so");
        let mut command = Command::new(root().join("cuda/emulator/nvcc/nvcc"));
        command.env("EMULATED_NVCC_CHECKS", "1").arg("-fatbin").arg(source).arg("-o").arg(&to);
        let output = command.output().expect("a shell");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        to
    };
    let made: Vec<PathBuf> = std::thread::scope(|scope| {
        let threads: Vec<_> = sources.iter().map(|source| scope.spawn(|| compile(source))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    // SAFETY: the mock's function of that name has this type.
    let watch: extern "C" fn(*const c_char) -> c_int =
        unsafe { std::mem::transmute(variable::<c_void>(c"mock_watch")) };
    for file in made {
        if std::fs::metadata(&file).expect("the compiled library exists").len() == 0 {
            println!("skipped: no C++ compiler (`c++`, or the one in CXX)");
            return false;
        }
        let name = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path");
        assert_eq!(watch(name.as_ptr()), 0, "{} does not load", file.display());
    }
    true
}

/// Returns, by the name of each kernel that was looked up, the number of launches and the bytes read, written and
/// accessed (0 unless the kernel is watched).
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn kernels() -> BTreeMap<String, [i64; 4]> {
    type Next = extern "C" fn(*const c_void, *mut *const c_char, *mut *const [c_long; 4]) -> *const c_void;
    // SAFETY: the mock's function of that name has this type.
    let next: Next = unsafe { std::mem::transmute(variable::<c_void>(c"mock_function")) };
    let (mut name, mut counts, mut all) = (std::ptr::null(), std::ptr::null(), BTreeMap::<String, [i64; 4]>::new());
    let mut function = next(std::ptr::null(), &raw mut name, &raw mut counts);
    while !function.is_null() {
        // SAFETY: the mock never frees functions, and its threads write each count without tearing.
        let (name_of, counts_of) = unsafe { (CStr::from_ptr(name), counts.read_volatile()) };
        let sums = all.entry(name_of.to_str().expect("names are ASCII").into()).or_default();
        sums.iter_mut().zip(counts_of).for_each(|(sum, count)| *sum += count);
        function = next(function, &raw mut name, &raw mut counts);
    }
    all
}

/// Returns the driver's error for an image that is not a module.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn load_nothing(device: &Arc<Device>) -> String {
    // SAFETY: the driver rejects an image of zeros.
    unsafe { Module::load(device, &[0; 64]) }.map(|_| ()).expect_err("an image of zeros is rejected").to_string()
}
