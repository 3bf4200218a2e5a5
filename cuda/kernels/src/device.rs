//! The kernels in the memory of a device, and their launch on a stream.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use zero_cuda::{CudaError, Device, Function, Module, Stream};

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
    functions: HashMap<String, Function>,
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

    /// Puts a launch on a stream of the same device. Returns before it runs.
    ///
    /// # Safety
    /// What the functions that made the launch say of its addresses is so until the stream has done it, and nobody else writes there.
    ///
    /// # Errors
    /// What the driver says: there is no code for this device, or a block has not as much shared memory.
    pub unsafe fn launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        let function = self.function(launch)?;
        // SAFETY: every entry takes the struct that its launch has, whose size the tests compare; the caller answers for the addresses.
        unsafe { stream.launch(&function, launch.grid, launch.threads, launch.shared_bytes, &launch.args) }
    }

    fn function<A>(&self, launch: &Launch<A>) -> Result<Function, CudaError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(&launch.entry) {
            return Ok(function.clone());
        }
        let module = match loaded.modules.get(&launch.source) {
            Some(module) => Arc::clone(module),
            None => {
                // SAFETY: who made this has answered for the images.
                let module = unsafe { Module::load(&self.device, (self.images)(launch.source)) }?;
                loaded.modules.insert(launch.source, Arc::clone(&module));
                module
            }
        };
        let name = CString::new(launch.entry.as_str()).expect("names of entries hold no zero");
        let function = module.function(&name)?;
        // All launches of an entry ask for the same.
        if launch.shared_bytes > ALWAYS_ALLOWED {
            function.allow_shared(launch.shared_bytes)?;
        }
        loaded.functions.insert(launch.entry.clone(), function.clone());
        Ok(function)
    }
}
