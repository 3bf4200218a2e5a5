//! NVIDIA's libraries, opened when something of them is first asked for.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// A library that a program with the feature `cuda` may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver.
    Cuda = 0,
    /// Collectives between GPUs.
    Nccl = 1,
    /// The run time that NVIDIA's compiler counts on.
    Cudart = 2,
    /// Matrix products.
    Cublas = 3,
    /// Matrix products with an epilogue.
    CublasLt = 4,
    /// Random numbers.
    Curand = 5,
    /// The compiler at run time.
    Nvrtc = 6,
}

impl Library {
    /// All of them, in the order of their numbers.
    pub const ALL: [Library; 7] = [
        Library::Cuda,
        Library::Nccl,
        Library::Cudart,
        Library::Cublas,
        Library::CublasLt,
        Library::Curand,
        Library::Nvrtc,
    ];

    /// The file that is looked for where the dynamic linker looks: of the release that the bindings were made from.
    pub fn file(self) -> &'static str {
        self.soname().to_str().unwrap_or_default()
    }

    fn soname(self) -> &'static CStr {
        match self {
            Library::Cuda => c"libcuda.so.1",
            Library::Nccl => c"libnccl.so.2",
            Library::Cudart => c"libcudart.so.13",
            Library::Cublas => c"libcublas.so.13",
            Library::CublasLt => c"libcublasLt.so.13",
            Library::Curand => c"libcurand.so.10",
            Library::Nvrtc => c"libnvrtc.so.13",
        }
    }

    /// What a function of an absent library gives: the code that comes nearest to "there is none", of the library's own codes.
    pub(crate) fn absent(self) -> i32 {
        match self {
            // CUDA_ERROR_STUB_LIBRARY, and cudaErrorStubLibrary.
            Library::Cuda | Library::Cudart => 34,
            // ncclSystemError.
            Library::Nccl => 2,
            // CUBLAS_STATUS_NOT_INITIALIZED.
            Library::Cublas | Library::CublasLt => 1,
            // CURAND_STATUS_NOT_INITIALIZED.
            Library::Curand => 101,
            // NVRTC_ERROR_BUILTIN_OPERATION_FAILURE; it has none that comes nearer.
            Library::Nvrtc => 7,
        }
    }

    /// Whether it is here.
    ///
    /// # Errors
    /// What the dynamic linker says.
    pub fn available(self) -> Result<(), String> {
        self.handle().map(|_| ())
    }

    fn handle(self) -> Result<*mut c_void, String> {
        static OPEN: [OnceLock<Result<usize, String>>; 7] = [const { OnceLock::new() }; 7];
        let open = || {
            // SAFETY: the name is a C string. What the library does when it is loaded is NVIDIA's.
            let handle = unsafe { libc::dlopen(self.soname().as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            if handle.is_null() { Err(self.complaint()) } else { Ok(handle as usize) }
        };
        OPEN[self as usize].get_or_init(open).clone().map(|handle| handle as *mut c_void)
    }

    fn complaint(self) -> String {
        // SAFETY: it gives a C string that is valid until this thread's next call, or null.
        let said: *const c_char = unsafe { libc::dlerror() };
        match said.is_null() {
            true => format!("{} is not here", self.file()),
            // SAFETY: as above; it is copied at once.
            false => unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned(),
        }
    }

    /// The address of a function; `None` where the library is absent or has no such function.
    pub(crate) fn symbol(self, name: &CStr) -> Option<*const c_void> {
        let handle = self.handle().ok()?;
        // SAFETY: a handle of dlopen that is never closed, and a C string.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }
}
