//! The kernels in the memory of a device, and their launch on a stream.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zero_cuda::{CudaError, Device, Footprint, Function, Module, Stream};

use crate::launch::{Launch, Source};

/// Shared memory that a launch may ask for without further words.
const ALWAYS_ALLOWED: u32 = 48 << 10;

/// The kernels on one device, each file loaded when something of it is first launched.
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
    /// Bytes that a launch may ask for.
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
        // SAFETY: who made the kernels has answered for the images.
        let module = unsafe { Module::load(&of.device, (of.images)(source)) }?;
        self.modules.insert(source, Arc::clone(&module));
        Ok(module)
    }
}

impl Kernels {
    /// Those that nvcc has compiled into this program.
    pub fn new(device: &Arc<Device>) -> Self {
        // SAFETY: what nvcc writes with `-fatbin` is a whole fat binary.
        unsafe { Self::of_images(device, Source::image) }
    }

    /// Those of other images.
    ///
    /// # Safety
    /// Each is what [`Module::load`] asks for, and was made of the file of that name in `cu/`.
    pub unsafe fn of_images(device: &Arc<Device>, images: fn(Source) -> &'static [u8]) -> Self {
        Self { device: Arc::clone(device), images, loaded: Mutex::default() }
    }

    /// Their device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Loads all of them now. Loading may wait until the device is idle, and so for a collective that waits for another rank's launch, which
    /// may wait for its loading: a program calls this before its first collective.
    ///
    /// # Errors
    /// There is no code for this device, or no memory for it.
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

    /// What each entry of a source takes of the device.
    ///
    /// # Errors
    /// As of [`load_all`](Self::load_all).
    pub fn footprints(&self, source: Source) -> Result<Vec<(String, Footprint)>, CudaError> {
        let functions = self.lock().module(self, source)?.functions()?;
        functions.into_iter().map(|(name, function)| Ok((name, function.footprint()?))).collect()
    }

    /// Puts a launch on a stream of the same device. Returns before it runs.
    ///
    /// # Safety
    /// What the functions that made the launch say of its addresses is so until the stream has done it, and nobody else writes there.
    ///
    /// # Errors
    /// What the driver says: there is no code for this device, or a block has not as much shared memory. Or the grid is too large.
    pub unsafe fn launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        launch.check_grid().map_err(|words| CudaError::invalid("cuLaunchKernel", words))?;
        let function = self.function(launch)?;
        // SAFETY: every entry takes the struct that its launch has, whose size the tests compare; the caller answers for the addresses.
        unsafe { stream.launch(&function, launch.grid, launch.threads, launch.shared_bytes, &launch.args) }
    }

    fn lock(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn function<A>(&self, launch: &Launch<A>) -> Result<Function, CudaError> {
        let mut loaded = self.lock();
        if !loaded.functions.contains_key(&launch.entry) {
            let name = CString::new(launch.entry.as_str()).expect("names of entries hold no zero");
            let function = loaded.module(self, launch.source)?.function(&name)?;
            loaded.functions.insert(launch.entry.clone(), function.into());
        }
        let known = loaded.functions.get_mut(&launch.entry).expect("put there if it was not");
        if launch.shared_bytes > known.shared_bytes {
            known.function.allow_shared(launch.shared_bytes)?;
            known.shared_bytes = launch.shared_bytes;
        }
        Ok(known.function.clone())
    }
}
