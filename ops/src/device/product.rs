//! Products with an epilogue on a GPU's stream.

use std::sync::{Arc, Mutex};

use candle_core::{Error, Result};
use zero_cuda::Stream;
use zero_cuda::product::{CublasLt, Product};

use super::{Gpu, cached};

/// cuBLASLt for each GPU that is in use.
static CUBLASLT: Mutex<Vec<(usize, Arc<CublasLt>)>> = Mutex::new(vec![]);

impl Gpu {
    /// Enqueues a product on the stream. Returns false, without enqueuing anything, if cuBLASLt does not support this
    /// product.
    ///
    /// # Safety
    /// When the stream reaches the product, all matrices must be at its addresses and have its sizes.
    pub(crate) unsafe fn multiply(&self, product: &Product) -> Result<bool> {
        let of = self.kernels.device();
        let blas = cached(&CUBLASLT, of.ordinal(), || CublasLt::new(of).map_err(Error::wrap))?;
        let stream = self.device.cuda_stream();
        // SAFETY: candle's stream belongs to its device and outlives the call; the caller guarantees that the
        // matrices are valid.
        unsafe { blas.multiply(product, &Stream::borrow(of, stream.cu_stream())) }.map_err(Error::wrap)
    }
}
