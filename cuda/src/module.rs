//! Compiled kernels: load modules into a device, look up kernels by name, launch them on a stream.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUresult};

use crate::{CudaError, Device, Stream, check};

/// A module: kernels loaded into a device.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    raw: CUmodule,
}

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a compiled module.
    ///
    /// # Safety
    /// `image` must be a whole fat binary or cubin aligned to 8 bytes, PTX with a terminating zero, or empty.
    ///
    /// # Errors
    /// Fails if the image is empty or has no code for this device, or the device is out of memory.
    pub unsafe fn load(device: &Arc<Device>, image: &[u8]) -> Result<Arc<Module>, CudaError> {
        device.make_current()?;
        if image.is_empty() {
            // The stand-in compiler `fake-nvcc` produces empty images; the driver would read past their end.
            check("cuModuleLoadData", CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer; the caller ensures that the image is valid, and the driver reads it during the
        // call.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Arc::new(Module { device: Arc::clone(device), raw }))
    }

    /// Looks up a kernel by name.
    ///
    /// # Errors
    /// Fails if the module has no kernel of this name.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<Function, CudaError> {
        self.device.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer; the module is loaded, and the name is a C string.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        Ok(Function { module: Arc::clone(self), raw })
    }

    /// Returns all kernels with their names.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn functions(self: &Arc<Self>) -> Result<Vec<(String, Function)>, CudaError> {
        self.device.make_current()?;
        let mut count = 0;
        // SAFETY: writes one number; the module is loaded.
        check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&raw mut count, self.raw) })?;
        let mut all = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: writes `count` handles, for which the vector has room; the module is loaded.
        let found = unsafe { sys::cuModuleEnumerateFunctions(all.as_mut_ptr(), count, self.raw) };
        check("cuModuleEnumerateFunctions", found)?;
        let named = |raw| {
            let function = Function { module: Arc::clone(self), raw };
            function.name().map(|name| (name, function))
        };
        all.into_iter().map(named).collect()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: loaded once, unloaded once; functions keep the module alive. The driver waits for running
            // kernels.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Function {
    module: Arc<Module>,
    raw: CUfunction,
}

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The resources that a kernel needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread, in bytes: register spills, and arrays that are indexed at run time.
    pub local_bytes: u32,
    /// Static shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// The largest number of threads per block.
    pub most_threads: u32,
}

impl Function {
    /// Loads the kernel now. By default, the driver loads a kernel at its first use, and may then have to wait until
    /// the device is idle.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn load(&self) -> Result<(), CudaError> {
        self.module.device.make_current()?;
        // SAFETY: the module, which `self` keeps alive, keeps the function valid.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(self.raw) })
    }

    /// Returns the resources that the kernel needs.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn footprint(&self) -> Result<Footprint, CudaError> {
        self.module.device.make_current()?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one number; the module, which `self` keeps alive, keeps the function valid.
            check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, self.raw) })?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(Footprint {
            registers: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            most_threads: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    fn name(&self) -> Result<String, CudaError> {
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to text that lives as long as the module.
        check("cuFuncGetName", unsafe { sys::cuFuncGetName(&raw mut name, self.raw) })?;
        // SAFETY: the text lives as long as the module, and it is copied immediately.
        Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// Raises the limit on dynamic shared memory per block to `bytes`; the default limit is 48 KiB.
    ///
    /// # Errors
    /// Fails if the device has less shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        self.module.device.make_current()?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the module, which `self` keeps alive, keeps the function valid.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.raw, attribute, bytes) })
    }
}

impl Stream {
    /// Launches a kernel with one argument on this stream: `grid` blocks of `threads` threads, each block with
    /// `shared_bytes` of dynamic shared memory. Returns before the kernel runs.
    ///
    /// # Safety
    /// The kernel must take an `A` by value. The memory that `args` points to must stay valid until the kernel is done.
    /// Until then, no other code may access the memory that the kernel writes.
    ///
    /// # Errors
    /// Fails if the driver rejects the launch. Errors inside the kernel surface in later calls.
    pub unsafe fn launch<A>(
        &self,
        function: &Function,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<(), CudaError> {
        self.device().make_current()?;
        let [x, y, z] = grid;
        let mut parameters = [std::ptr::from_ref(args).cast_mut().cast()];
        // SAFETY: function and stream live; the caller ensures the argument's type, and the driver copies the argument
        // during the call.
        let launched = unsafe {
            let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function.raw, x, y, z, threads, 1, 1, shared_bytes, self.raw(), parameters, extra)
        };
        check("cuLaunchKernel", launched)
    }
}
