//! The kernels on a card: a mock of the driver that runs emulated kernels on streams of its own, or with `ZERO_TRAIN_CUDA_TESTS=1` the
//! driver and the GPU of this machine.
#![allow(dead_code, reason = "not all of the programs that include this file need all of it")]

#[path = "../../../tests/mock/mod.rs"]
pub(crate) mod mock;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use zero_cuda::{Allocation, CudaError, Device, Pinned, Stream};
use zero_kernels::{Kernels, Launch, Source, emulated};

/// A device with its kernels.
pub(crate) struct Card {
    pub(crate) kernels: Kernels,
    pub(crate) device: Arc<Device>,
}

impl Card {
    /// The one that all tests of a program share; `None` where a mock lacks what it needs, and that is printed.
    ///
    /// # Panics
    /// The GPU of this machine is asked for, and cannot run the kernels in this program.
    pub(crate) fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Card>> = OnceLock::new();
        if !mock::ready() {
            return None;
        }
        let card = SHARED.get_or_init(Self::new).as_ref();
        if card.is_none() {
            println!("skipped: no C++ compiler (c++, or what CXX names)");
        }
        card
    }

    fn new() -> Option<Self> {
        let device = mock::device_of(0);
        let kernels = if mock::is_real() {
            Kernels::new(&device)
        } else {
            emulated_images()?;
            // SAFETY: the mock takes these libraries for modules.
            unsafe { Kernels::of_images(&device, |source| &emulated_images().expect("looked at before")[&source]) }
        };
        Some(Self { kernels, device })
    }

    /// Memory of the device with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8], stream: &Stream) -> Allocation {
        let mut pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        pinned.copy_from_slice(bytes);
        let mut allocation = Allocation::new(&self.device, bytes.len()).unwrap();
        // SAFETY: both live until the stream is waited for.
        unsafe { allocation.fill_from(&pinned, stream) }.unwrap();
        stream.synchronize().unwrap();
        allocation
    }

    /// Puts a launch behind what is on the stream. Tests hold memory of the sizes that their launches ask for until they have waited.
    pub(crate) fn launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: as said above.
        unsafe { self.kernels.launch(launch, stream) }
    }
}

fn emulated_images() -> Option<&'static HashMap<Source, Vec<u8>>> {
    static IMAGES: OnceLock<Option<HashMap<Source, Vec<u8>>>> = OnceLock::new();
    let compile = || Source::ALL.into_iter().map(|source| Some((source, emulated::image(source).unwrap()?))).collect();
    IMAGES.get_or_init(compile).as_ref()
}
