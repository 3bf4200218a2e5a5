//! Compiled kernels: loaded into a device, found by name, started on a stream.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUresult};

use crate::{CudaError, Device, Stream, check};

/// Kernels in the memory of a device.
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
    /// Loads what a compiler has made.
    ///
    /// # Safety
    /// `image` is a whole fat binary or cubin that begins at a multiple of 8, PTX with a zero behind it, or empty.
    ///
    /// # Errors
    /// There is nothing in it for this device, as in an empty one, or no memory for it.
    pub unsafe fn load(device: &Arc<Device>, image: &[u8]) -> Result<Arc<Module>, CudaError> {
        device.make_current()?;
        if image.is_empty() {
            // A stand-in for the compiler makes such; the driver would read beyond it.
            check("cuModuleLoadData", CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer; the caller answers for the image, which is read during the call.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Arc::new(Module { device: Arc::clone(device), raw }))
    }

    /// One of its kernels.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<Function, CudaError> {
        self.device.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer; the module lives, and the name is a C string.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        Ok(Function { module: Arc::clone(self), raw })
    }

    /// All of its kernels, with their names.
    ///
    /// # Errors
    /// What the driver says.
    pub fn functions(self: &Arc<Self>) -> Result<Vec<(String, Function)>, CudaError> {
        self.device.make_current()?;
        let mut count = 0;
        // SAFETY: writes one number; the module lives.
        check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&raw mut count, self.raw) })?;
        let mut all = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: writes `count` handles, for which there is room; the module lives.
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
            // SAFETY: loaded once, unloaded once; functions keep it. The driver waits for what runs.
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

/// What a kernel takes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Of a thread.
    pub registers: u32,
    /// Of a thread, in memory: what does not fit into registers, and arrays that are indexed at run time.
    pub local_bytes: u32,
    /// Of a block, without what a launch asks for.
    pub shared_bytes: u32,
    /// Of a block.
    pub most_threads: u32,
}

impl Function {
    /// Loads it now. The driver loads a kernel when it is first used, and may wait for the device to be idle then.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn load(&self) -> Result<(), CudaError> {
        self.module.device.make_current()?;
        // SAFETY: the function lives as long as its module, which this keeps.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(self.raw) })
    }

    /// What it takes of a device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn footprint(&self) -> Result<Footprint, CudaError> {
        self.module.device.make_current()?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one number; the function lives as long as its module, which this keeps.
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
        // SAFETY: writes one pointer, to text that lives as long as the module.
        check("cuFuncGetName", unsafe { sys::cuFuncGetName(&raw mut name, self.raw) })?;
        // SAFETY: as above; it is copied at once.
        Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// Lets a launch ask for so many bytes of shared memory; without this 48 KiB are the most.
    ///
    /// # Errors
    /// The device has not as much.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        self.module.device.make_current()?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function lives as long as its module, which this keeps.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.raw, attribute, bytes) })
    }
}

impl Stream {
    /// Puts a kernel that takes one argument on this stream: `grid` blocks of `threads`, each block with `shared_bytes`. Returns before it runs.
    ///
    /// # Safety
    /// The kernel takes an `A` by value. What that points to is there, and nobody else's as far as the kernel writes, until the kernel is done.
    ///
    /// # Errors
    /// What the driver says of the launch. What goes wrong in the kernel shows in later calls.
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
        // SAFETY: function and stream live; the driver copies the argument, whose type the caller answers for, during the call.
        let launched = unsafe {
            let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function.raw, x, y, z, threads, 1, 1, shared_bytes, self.raw(), parameters, extra)
        };
        check("cuLaunchKernel", launched)
    }
}
