//! Runs the kernels on a card. By default, the card is the mock driver with emulated kernels on its own streams. With
//! `ZERO_TRAIN_CUDA_TESTS=1`, it is the real driver with a GPU of this machine.
#![allow(dead_code, reason = "not all of the programs that include this file need all of it")]

#[path = "../../../emulator/mock/mod.rs"]
pub(crate) mod mock;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use zero_cuda::{Allocation, CudaError, Device, Pinned, Stream};
use zero_kernels::{Kernels, Launch, Source};

/// A device with its kernels.
pub(crate) struct Card {
    pub(crate) kernels: Kernels,
    pub(crate) device: Arc<Device>,
}

impl Card {
    /// Returns the card that all tests of a program share, or prints why there is none and returns `None`.
    ///
    /// # Panics
    /// Panics if the tests should use this machine's GPU, but the GPU cannot run the kernels in this program.
    pub(crate) fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Card>> = OnceLock::new();
        if !mock::ready() {
            return None;
        }
        let card = SHARED.get_or_init(Self::new).as_ref();
        if card.is_none() {
            println!("skipped: no C++ compiler (`c++`, or the one in CXX)");
        }
        card
    }

    fn new() -> Option<Self> {
        let device = mock::device_of(0);
        let kernels = if mock::is_real() {
            Kernels::new(&device)
        } else {
            emulated_images()?;
            // SAFETY: the mock loads these libraries as modules.
            unsafe { Kernels::of_images(&device, |source| &emulated_images().expect("compiled above")[&source]) }
        };
        Some(Self { kernels, device })
    }

    /// Allocates device memory with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8], stream: &Stream) -> Allocation {
        let mut pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        pinned.copy_from_slice(bytes);
        let mut allocation = Allocation::new(&self.device, bytes.len()).unwrap();
        // SAFETY: both live until the stream is synchronized below.
        unsafe { allocation.fill_from(&pinned, stream) }.unwrap();
        stream.synchronize().unwrap();
        allocation
    }

    /// Enqueues a launch. The caller allocates the memory that the launch needs, and keeps it until it has synchronized
    /// the stream.
    pub(crate) fn launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the tests uphold the contract above.
        unsafe { self.kernels.launch(launch, stream) }
    }
}

fn emulated_images() -> Option<&'static HashMap<Source, Vec<u8>>> {
    static IMAGES: OnceLock<Option<HashMap<Source, Vec<u8>>>> = OnceLock::new();
    let compile =
        || Source::ALL.into_iter().map(|source| Some((source, zero_emulator::image(source).unwrap()?))).collect();
    IMAGES.get_or_init(compile).as_ref()
}
