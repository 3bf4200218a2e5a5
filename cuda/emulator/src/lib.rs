//! Runs kernels on the host for tests: the host's C++ compiler compiles them, and `headers/emulator.h` runs their
//! threads. It needs a C++ compiler when it runs. README.md lists the other parts of this folder.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use half::{bf16, f16};
use libloading::Library;
use tempfile::TempDir;

use zero_kernels::indices::Fault;
use zero_kernels::{Address, Dtype, Launch, Source};

/// Orders in which blocks, and the threads of a block between two barriers, may run: first to last, last to first, and
/// two mixed orders. In mixed orders, several blocks run at a time and take turns at barriers. A kernel whose result
/// depends on the order has a race. In the first two orders the emulator also checks all memory accesses.
pub const ORDERS: [u32; 4] = [0, 1, 2, 3];

/// All kernels, compiled for this machine.
pub struct Emulator {
    sources: HashMap<Source, Compiled>,
}

impl Emulator {
    /// Compiles the kernels. Returns `None` without a C++ compiler, which is `CXX` or `c++`.
    ///
    /// # Errors
    /// Returns the compiler's messages.
    fn new() -> Result<Option<Self>, String> {
        let compiled = std::thread::scope(|scope| {
            let threads = Source::ALL.map(|source| (source, scope.spawn(move || Compiled::new(&file(source)))));
            threads.map(|(source, thread)| (source, thread.join().expect("no panic")))
        });
        let mut sources = HashMap::new();
        for (source, compiled) in compiled {
            match compiled? {
                Some(compiled) => sources.insert(source, compiled),
                None => return Ok(None),
            };
        }
        Ok(Some(Self { sources }))
    }

    /// Returns the emulator that all tests of a program share. Without a C++ compiler, prints a message and returns
    /// `None`.
    ///
    /// # Panics
    /// Fails if the kernels do not compile.
    pub fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Emulator>> = OnceLock::new();
        let compile = || Self::new().unwrap_or_else(|said| panic!("{said}"));
        let emulator = SHARED.get_or_init(compile).as_ref();
        if emulator.is_none() {
            println!("skipped: no C++ compiler (`c++`, or the one in CXX)");
        }
        emulator
    }

    /// Runs a launch; see [`Compiled::run`].
    ///
    /// # Errors
    /// See [`Compiled::run`].
    ///
    /// # Safety
    /// See [`Compiled::run`].
    pub unsafe fn run<A>(&self, launch: &Launch<A>, order: u32) -> Result<(), String> {
        let compiled = &self.sources[&launch.source];
        let how = if order < 2 { How::Watched } else { How::Plain };
        // SAFETY: the caller upholds the contract of `Compiled::run`.
        unsafe { compiled.run(launch, order, how) }
    }
}

/// Returns the bytes of a library with the kernels of a file, which the mock driver loads as a module. Returns `None`
/// without a C++ compiler.
///
/// # Errors
/// Returns the compiler's messages.
pub fn image(source: Source) -> Result<Option<Vec<u8>>, String> {
    let Some((_folder, library)) = compile(&file(source), How::Plain)? else { return Ok(None) };
    std::fs::read(library).map(Some).map_err(|error| error.to_string())
}

/// Returns the path of the source file, in the folder that `ZERO_TRAIN_KERNEL_SOURCES` names, or else in
/// `zero-kernels`.
fn file(source: Source) -> PathBuf {
    let named = std::env::var_os("ZERO_TRAIN_KERNEL_SOURCES").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/cu"));
    folder.join(source.name()).with_extension("cu")
}

/// How kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Fast. A wrong access is detected only if it changes the results.
    Plain,
    /// Checked. An access outside of all [`Memory`] ends the launch, and so do two conflicting accesses that no barrier
    /// orders.
    Watched,
}

/// Compiles a file to a library in a temporary folder, which is deleted when the value is dropped.
fn compile(source: &Path, how: How) -> Result<Option<(TempDir, PathBuf)>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let to = folder.path().join("kernels.so");
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("nvcc/nvcc"));
    match how {
        How::Plain => command.env_remove("EMULATED_NVCC_CHECKS"),
        How::Watched => command.env("EMULATED_NVCC_CHECKS", "1"),
    };
    let output = command.arg("-fatbin").arg(source).arg("-o").arg(&to).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr)));
    }
    // Without a C++ compiler the script writes an empty file.
    let made = std::fs::metadata(&to).map_err(|error| error.to_string())?;
    Ok((made.len() > 0).then_some((folder, to)))
}

/// One source file of kernels, compiled for this machine.
pub struct Compiled {
    plain: Library,
    watched: Library,
    /// The folders of the libraries.
    _folders: [TempDir; 2],
}

impl Compiled {
    /// Compiles a file. Returns `None` without a C++ compiler, which is `CXX` or `c++`.
    ///
    /// # Errors
    /// Returns the compiler's messages.
    pub fn new(source: &Path) -> Result<Option<Self>, String> {
        let Some((plain_folder, plain)) = compile(source, How::Plain)? else { return Ok(None) };
        let Some((watched_folder, watched)) = compile(source, How::Watched)? else { return Ok(None) };
        // SAFETY: the library was just compiled from a source that runs no code when it is loaded.
        let load = |path: PathBuf| unsafe { Library::new(path) }.map_err(|error| error.to_string());
        let (plain, watched) = (load(plain)?, load(watched)?);
        // SAFETY: `emulated_memory` of check.h has this type, and nothing reads it before a launch.
        unsafe {
            let memory = watched.get::<*mut extern "C" fn() -> Ranges>(b"emulated_memory");
            **memory.map_err(|error| error.to_string())? = all_memory;
        }
        Ok(Some(Self { plain, watched, _folders: [plain_folder, watched_folder] }))
    }

    /// Runs a launch to its end, with threads in one of the [`ORDERS`].
    ///
    /// # Errors
    /// A fault that the emulator detected: a grid that is too large, a barrier that not all threads reach, a write
    /// beyond the shared memory, arguments of the wrong size, or a fault that [`How::Watched`] detects.
    ///
    /// # Safety
    /// The addresses in the arguments must point to live [`Memory`] that contains everything the kernel reads and
    /// writes.
    pub unsafe fn run<A>(&self, launch: &Launch<A>, order: u32, how: How) -> Result<(), String> {
        launch.check_grid()?;
        let name = &launch.entry;
        let library = match how {
            How::Plain => &self.plain,
            How::Watched => &self.watched,
        };
        // SAFETY: the emulator's macro ENTRY defines a value of this type and name for every entry.
        let entry = unsafe { library.get::<*const Entry>(format!("{name}_entry").as_bytes()) };
        let entry = entry.map_err(|error| error.to_string())?;
        let args = std::ptr::from_ref(&launch.args).cast();
        let (bytes, block, shared) = (size_of::<A>(), [launch.threads, 1, 1], launch.shared_bytes as usize);
        // SAFETY: the value lives as long as the library; the arguments are only read during the call; the caller
        // ensures that the addresses in them are valid.
        let failure = unsafe { ((**entry).run)(args, bytes, launch.grid.as_ptr(), block.as_ptr(), shared, order) };
        if failure.is_null() {
            return Ok(());
        }
        // SAFETY: the library, which is still loaded, returns a C string that is never freed.
        Err(format!("{name}: {}", unsafe { CStr::from_ptr(failure) }.to_string_lossy()))
    }
}

/// Matches `emulator::Entry` of the emulator.
#[repr(C)]
struct Entry {
    bytes: usize,
    _collect: unsafe extern "C" fn(*const *mut c_void, *mut c_void),
    run: unsafe extern "C" fn(*const c_void, usize, *const u32, *const u32, usize, u32) -> *const c_char,
}

/// Matches `emulator::Range` of the emulator.
#[derive(Clone, Copy)]
#[repr(C)]
struct Range {
    start: usize,
    bytes: usize,
}

/// Matches `emulator::Ranges` of the emulator.
#[repr(C)]
struct Ranges {
    of: *const Range,
    count: usize,
}

/// Returns all live [`Memory`]. The result is valid until the thread's next call.
extern "C" fn all_memory() -> Ranges {
    thread_local!(static RANGES: RefCell<Vec<Range>> = const { RefCell::new(Vec::new()) });
    RANGES.with_borrow_mut(|ranges| {
        *ranges = live().iter().map(|(&start, &bytes)| Range { start, bytes }).collect();
        Ranges { of: ranges.as_ptr(), count: ranges.len() }
    })
}

/// The start address and the size in bytes of all live [`Memory`].
static LIVE: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn live() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes before and after the memory that a kernel may access.
pub const SENTINELS: usize = 256;
const SENTINEL: u8 = 0xa5;

fn words(bytes: &[u8]) -> Vec<u128> {
    bytes.as_chunks().0.iter().map(|&word| u128::from_ne_bytes(word)).collect()
}

/// Memory that a kernel may read and write, surrounded by sentinels that must stay unchanged.
#[derive(Debug)]
pub struct Memory {
    words: Vec<u128>,
    bytes: usize,
}

impl Memory {
    /// Allocates `bytes` bytes with all bits set, which is NaN in every type.
    #[must_use]
    pub fn unwritten(bytes: usize) -> Self {
        Self::of(&vec![0xff; bytes])
    }

    /// Allocates values in a type, each rounded once.
    #[must_use]
    pub fn floats(dtype: Dtype, values: &[f32]) -> Self {
        Self::of(&match dtype {
            Dtype::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>(),
            Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        })
    }

    /// Allocates u32 values.
    #[must_use]
    pub fn integers(values: &[u32]) -> Self {
        Self::of(&values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>())
    }

    fn of(bytes: &[u8]) -> Self {
        let around = [SENTINEL; SENTINELS];
        let mut all = [&around[..], bytes, &around].concat();
        all.resize(all.len().next_multiple_of(16), SENTINEL);
        Self::placed(words(&all), bytes.len())
    }

    fn placed(words: Vec<u128>, bytes: usize) -> Self {
        let mut memory = Self { words, bytes };
        live().insert(memory.address() as usize, bytes);
        memory
    }

    /// Returns all bytes, including the sentinels at both ends, so that other memory can hold a copy.
    #[must_use]
    pub fn whole(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Returns memory of the same size with the contents of a modified copy.
    ///
    /// # Panics
    /// Fails if the sizes differ.
    #[must_use]
    pub fn with_whole(&self, whole: &[u8]) -> Self {
        assert_eq!(whole.len(), 16 * self.words.len());
        Self::placed(words(whole), self.bytes)
    }

    /// Returns the address of the first byte, a multiple of 16.
    pub fn address(&mut self) -> Address {
        (self.words.as_mut_ptr().expose_provenance() + SENTINELS) as Address
    }

    /// Returns the contents.
    ///
    /// # Panics
    /// Fails if a sentinel was overwritten.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let all = self.whole();
        let (before, rest) = all.split_at(SENTINELS);
        let (own, after) = rest.split_at(self.bytes);
        assert!(before.iter().chain(after).all(|&byte| byte == SENTINEL), "write beyond the ends of memory");
        own.to_vec()
    }

    /// Returns the contents as numbers of a type.
    #[must_use]
    pub fn to_floats(&self, dtype: Dtype) -> Vec<f32> {
        let bytes = self.bytes();
        match dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_ne_bytes(x)).collect(),
            Dtype::Bf16 => bytes.as_chunks().0.iter().map(|&x| bf16::from_ne_bytes(x).to_f32()).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_ne_bytes(x).to_f32()).collect(),
        }
    }

    /// Returns the contents as u64.
    #[must_use]
    pub fn to_integers(&self) -> Vec<u64> {
        self.bytes().as_chunks().0.iter().map(|&x| u64::from_ne_bytes(x)).collect()
    }

    /// Returns the contents as a fault record.
    ///
    /// # Panics
    /// Fails if the memory is too small for one.
    #[must_use]
    pub fn to_fault(&self) -> Fault {
        let words = self.to_integers();
        Fault { what: words[0], details: [words[1], words[2], words[3]] }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let start = self.address() as usize;
        live().remove(&start);
    }
}
