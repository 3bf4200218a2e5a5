//! Stands in for the driver, NCCL, cuBLAS and cuRAND where there are none: compiled from C and loaded under their names, for all tests of a
//! program.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use zero_cuda::{Device, Library, Module};

/// Runs on the devices of this machine instead.
pub(crate) const REAL: &str = "ZERO_TRAIN_CUDA_TESTS";

/// Whether there is something to test on; if not, why is printed. On real devices there is, or the test fails.
///
/// On real devices a test says `skipped: needs N GPUs` or `skipped: only the mock can do this`, and nothing else: `scripts/card.sh` takes
/// every other word about skipping for a failure.
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

/// Whether these are real devices.
pub(crate) fn is_real() -> bool {
    env::var_os(REAL).is_some()
}

/// Whether the mock runs, for what real devices cannot be told to do; if not, that is printed.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn only_the_mock() -> bool {
    if is_real() {
        println!("skipped: only the mock can do this");
    }
    !is_real() && ready()
}

/// Whether there are `count` devices; prints it if not.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn has_gpus(count: usize) -> bool {
    let is_enough = ready() && Device::count().expect("a driver") >= count;
    if !is_enough {
        println!("skipped: needs {count} GPUs");
    }
    is_enough
}

/// Whether NCCL connects `ranks` ranks: each has a device of its own, or NCCL was told that they may share one. Prints it if not.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn connects(ranks: usize) -> bool {
    let may_share = env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|is_set| is_set == "1");
    if may_share { ready() } else { has_gpus(ranks) }
}

/// Whether an error says that the program was built without kernels, which is printed. On real devices that is a failure: a program without
/// kernels would pass all tests by skipping them.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn has_no_kernels(error: &dyn std::fmt::Display) -> bool {
    let said = error.to_string();
    let is_empty = said.contains("CUDA_ERROR_INVALID_IMAGE");
    assert!(!(is_empty && is_real()), "{REAL} is set, and this program has no kernels for the device: {said}");
    if is_empty {
        println!("skipped: built without kernels; scripts/emulated-nvcc makes some");
    }
    is_empty
}

/// The device of a rank: its own, as long as there are as many.
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

const SCRIPT: &str = "cuda/tests/mock/build.sh";

/// The root of the repository: several crates include this file.
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
    // A compiler that is there must like it.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Whoever asks for a library of such a name gets this one, once it is loaded; the others use the driver.
    let libraries = [Library::Cuda, Library::Nccl, Library::Cublas, Library::CublasLt, Library::Curand];
    Ok(libraries.map(|library| folder.join(library.file())).into())
}

fn load(file: &Path) {
    let name = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path");
    // SAFETY: the library was made for this, and does nothing when it is loaded.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "{} does not load", file.display());
}

/// A variable of the mock, by which a test makes something go wrong.
fn variable<T>(name: &CStr) -> *mut T {
    // SAFETY: a C string; the libraries were loaded for all to see.
    let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "the mock has no {name:?}");
    found.cast()
}

/// Sets a number of the mock's.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn set(name: &CStr, value: c_int) {
    // SAFETY: all that tests set are of that type; the mock's threads read it as a whole.
    unsafe { variable::<c_int>(name).write_volatile(value) };
}

/// A count of the mock's.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn read(name: &CStr) -> c_long {
    // SAFETY: all that tests read are of that type; the mock's threads write it as a whole.
    unsafe { variable::<c_long>(name).read_volatile() }
}

/// Compiles kernels of ours that check and count what they read and write; with `mock_watches` set they run instead of those that are loaded from
/// now on. False where there is no C++ compiler, which is printed.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn watch_kernels() -> bool {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watched");
    std::fs::create_dir_all(&folder).expect("a folder");
    let sources = std::fs::read_dir(root().join("cuda/kernels/cu")).expect("the sources of the kernels");
    let sources = sources.map(|entry| entry.expect("an entry").path());
    let sources: Vec<PathBuf> = sources.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    let compile = |source: &Path| {
        let to = folder.join(source.file_stem().expect("a file")).with_extension("so");
        let mut command = Command::new(root().join("scripts/emulated-nvcc/nvcc"));
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
        if std::fs::metadata(&file).expect("it was made").len() == 0 {
            println!("skipped: no C++ compiler (c++, or what CXX names)");
            return false;
        }
        let name = CString::new(file.as_os_str().as_encoded_bytes()).expect("a path");
        assert_eq!(watch(name.as_ptr()), 0, "{} does not load", file.display());
    }
    true
}

/// By name of each kernel that was looked up: launches so far, and bytes that it has read, written and accessed if it is watched.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn kernels() -> BTreeMap<String, [i64; 4]> {
    type Next = extern "C" fn(*const c_void, *mut *const c_char, *mut *const [c_long; 4]) -> *const c_void;
    // SAFETY: the mock's function of that name has this type.
    let next: Next = unsafe { std::mem::transmute(variable::<c_void>(c"mock_function")) };
    let (mut name, mut counts, mut all) = (std::ptr::null(), std::ptr::null(), BTreeMap::<String, [i64; 4]>::new());
    let mut function = next(std::ptr::null(), &raw mut name, &raw mut counts);
    while !function.is_null() {
        // SAFETY: a function of the mock's lives for good; its threads write each count as a whole.
        let (name_of, counts_of) = unsafe { (CStr::from_ptr(name), counts.read_volatile()) };
        let sums = all.entry(name_of.to_str().expect("names are ASCII").into()).or_default();
        sums.iter_mut().zip(counts_of).for_each(|(sum, count)| *sum += count);
        function = next(function, &raw mut name, &raw mut counts);
    }
    all
}

/// What the driver answers to kernels that are none.
#[allow(dead_code, reason = "not all of the programs that include this file need it")]
pub(crate) fn load_nothing(device: &Arc<Device>) -> String {
    // SAFETY: an image that is only zeros is refused.
    unsafe { Module::load(device, &[0; 64]) }.map(|_| ()).expect_err("no image").to_string()
}
