//! NVIDIA's libraries, opened at the first use of one of their functions.
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
    /// The runtime library that `nvcc`'s output depends on.
    Cudart = 2,
    /// Matrix products.
    Cublas = 3,
    /// Matrix products with an epilogue.
    CublasLt = 4,
    /// Random numbers.
    Curand = 5,
    /// The run-time compiler.
    Nvrtc = 6,
}

impl Library {
    /// All libraries, in order of their discriminants.
    pub const ALL: [Library; 7] = [
        Library::Cuda,
        Library::Nccl,
        Library::Cudart,
        Library::Cublas,
        Library::CublasLt,
        Library::Curand,
        Library::Nvrtc,
    ];

    /// Returns the file name that the dynamic linker looks up. It names the release that the bindings were generated
    /// from.
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

    /// Returns the code that functions of this library return if the library is missing: the closest of the library's
    /// own error codes.
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
            // NVRTC_ERROR_BUILTIN_OPERATION_FAILURE; NVRTC has no closer code.
            Library::Nvrtc => 7,
        }
    }

    /// Checks that the library can be opened.
    ///
    /// # Errors
    /// Returns the dynamic linker's message.
    pub fn available(self) -> Result<(), String> {
        self.handle().map(|_| ())
    }

    fn handle(self) -> Result<*mut c_void, String> {
        static OPEN: [OnceLock<Result<usize, String>>; 7] = [const { OnceLock::new() }; 7];
        let open = || {
            // SAFETY: the name is a C string. NVIDIA's libraries may be loaded at any time.
            let handle = unsafe { libc::dlopen(self.soname().as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            if handle.is_null() { Err(self.complaint()) } else { Ok(handle as usize) }
        };
        OPEN[self as usize].get_or_init(open).clone().map(|handle| handle as *mut c_void)
    }

    fn complaint(self) -> String {
        // SAFETY: dlerror returns null or a C string that is valid until this thread's next call.
        let said: *const c_char = unsafe { libc::dlerror() };
        match said.is_null() {
            true => format!("{} is not installed", self.file()),
            // SAFETY: `dlerror` returned a valid C string, which is copied immediately.
            false => unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned(),
        }
    }

    /// Returns the address of a function, or `None` if the library is missing or lacks the function.
    pub(crate) fn symbol(self, name: &CStr) -> Option<*const c_void> {
        let handle = self.handle().ok()?;
        // SAFETY: the handle comes from dlopen and is never closed; the name is a C string.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }
}
