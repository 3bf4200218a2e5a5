//! Errors of driver calls.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{self, CUresult};

/// A failed driver call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError {
    /// The name of the function.
    pub call: &'static str,
    /// The driver's error code.
    pub code: CUresult,
    /// The driver's description of the code, if it has one.
    pub words: Option<String>,
}

impl CudaError {
    /// Creates the error for a call that is not made because the driver would reject an argument.
    pub fn invalid(call: &'static str, words: String) -> Self {
        Self { call, code: CUresult::CUDA_ERROR_INVALID_VALUE, words: Some(words) }
    }
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {:?}", self.call, self.code)?;
        self.words.as_ref().map_or(Ok(()), |words| write!(f, " ({words})"))
    }
}

impl std::error::Error for CudaError {}

/// Converts a driver status into a `Result`.
///
/// # Errors
/// Returns an error for every code other than `CUDA_SUCCESS`.
pub fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut words: *const c_char = std::ptr::null();
    // SAFETY: writes a pointer to text that is never freed, or leaves `words` unchanged.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut words) };
    let words = (known == CUresult::CUDA_SUCCESS && !words.is_null())
        // SAFETY: as above.
        .then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned());
    Err(CudaError { call, code, words })
}
