//! Loads the kernels into a device and launches them on a stream.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zero_cuda::{CudaError, Device, Footprint, Function, Module, Stream};

use crate::launch::{Launch, Source};

/// Dynamic shared memory, in bytes, that every launch may use without raising a limit.
const ALWAYS_ALLOWED: u32 = 48 << 10;

/// The kernels on one device. A source file's module is loaded at the first launch of one of its kernels.
#[derive(Debug)]
pub struct Kernels {
    device: Arc<Device>,
    images: fn(Source) -> &'static [u8],
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<Source, Arc<Module>>,
    functions: HashMap<String, Known>,
}

#[derive(Debug)]
struct Known {
    function: Function,
    /// The current limit on dynamic shared memory, in bytes.
    shared_bytes: u32,
}

impl From<Function> for Known {
    fn from(function: Function) -> Self {
        Self { function, shared_bytes: ALWAYS_ALLOWED }
    }
}

impl Loaded {
    fn module(&mut self, of: &Kernels, source: Source) -> Result<Arc<Module>, CudaError> {
        if let Some(module) = self.modules.get(&source) {
            return Ok(Arc::clone(module));
        }
        // SAFETY: the creator of the `Kernels` has promised that the images are valid.
        let module = unsafe { Module::load(&of.device, (of.images)(source)) }?;
        self.modules.insert(source, Arc::clone(&module));
        Ok(module)
    }
}

impl Kernels {
    /// Returns the kernels that nvcc compiled into this program.
    pub fn new(device: &Arc<Device>) -> Self {
        // SAFETY: nvcc's `-fatbin` output is a whole fat binary.
        unsafe { Self::of_images(device, Source::image) }
    }

    /// Returns kernels from other images.
    ///
    /// # Safety
    /// Each image must meet the requirements of [`Module::load`] and be compiled from the file of that name in `cu/`.
    pub unsafe fn of_images(device: &Arc<Device>, images: fn(Source) -> &'static [u8]) -> Self {
        Self { device: Arc::clone(device), images, loaded: Mutex::default() }
    }

    /// Returns the device of the kernels.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Loads all kernels now. Loading a kernel may wait until the device is idle. A collective may keep the device busy
    /// until another rank launches its part, and that rank may itself wait to load a kernel. To avoid such a deadlock,
    /// call this before the first collective.
    ///
    /// # Errors
    /// Fails if the kernels have no code for this device, or the device is out of memory.
    pub fn load_all(&self) -> Result<(), CudaError> {
        let mut loaded = self.lock();
        for source in Source::ALL {
            for (name, function) in loaded.module(self, source)?.functions()? {
                function.load()?;
                loaded.functions.entry(name).or_insert_with(|| function.into());
            }
        }
        Ok(())
    }

    /// Returns the resources that each entry of a source needs.
    ///
    /// # Errors
    /// See [`load_all`](Self::load_all).
    pub fn footprints(&self, source: Source) -> Result<Vec<(String, Footprint)>, CudaError> {
        let functions = self.lock().module(self, source)?.functions()?;
        functions.into_iter().map(|(name, function)| Ok((name, function.footprint()?))).collect()
    }

    /// Enqueues a launch on a stream of the same device, without waiting for it.
    ///
    /// # Safety
    /// Until the stream has run the launch, its addresses must be valid, as documented at the function that created the
    /// launch. Until then, no other code may access the memory that the launch writes.
    ///
    /// # Errors
    /// Fails if the driver has no code for this device, a block needs more shared memory than the device has, or the
    /// grid is too large.
    pub unsafe fn launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        launch.check_grid().map_err(|words| CudaError::invalid("cuLaunchKernel", words))?;
        let function = self.function(launch)?;
        // SAFETY: every entry takes the struct of its launch, as the tests verify by size; the caller ensures that the
        // addresses are valid.
        unsafe { stream.launch(&function, launch.grid, launch.threads, launch.shared_bytes, &launch.args) }
    }

    fn lock(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn function<A>(&self, launch: &Launch<A>) -> Result<Function, CudaError> {
        let mut loaded = self.lock();
        if !loaded.functions.contains_key(&launch.entry) {
            let name = CString::new(launch.entry.as_str()).expect("an entry's name contains no NUL byte");
            let function = loaded.module(self, launch.source)?.function(&name)?;
            loaded.functions.insert(launch.entry.clone(), function.into());
        }
        let known = loaded.functions.get_mut(&launch.entry).expect("inserted above");
        if launch.shared_bytes > known.shared_bytes {
            known.function.allow_shared(launch.shared_bytes)?;
            known.shared_bytes = launch.shared_bytes;
        }
        Ok(known.function.clone())
    }
}
