//! Products with an epilogue on a GPU's stream.

use std::sync::{Arc, Mutex};

use candle_core::{Error, Result};
use zero_cuda::Stream;
use zero_cuda::product::{CublasLt, Product};

use super::{Gpu, known};

/// cuBLASLt of each GPU that has been asked for.
static CUBLASLT: Mutex<Vec<(usize, Arc<CublasLt>)>> = Mutex::new(vec![]);

impl Gpu {
    /// Puts a product on the stream. False: cuBLASLt cannot do this one, and nothing was put there.
    ///
    /// # Safety
    /// All matrices are where the product says, of its sizes, when the stream gets to it.
    pub(crate) unsafe fn multiply(&self, product: &Product) -> Result<bool> {
        let of = self.kernels.device();
        let blas = known(&CUBLASLT, of.ordinal(), || CublasLt::new(of).map_err(Error::wrap))?;
        let stream = self.device.cuda_stream();
        // SAFETY: candle's stream is one of its device, and lives until the end of the call; the caller answers for the matrices.
        unsafe { blas.multiply(product, &Stream::borrow(of, stream.cu_stream())) }.map_err(Error::wrap)
    }
}
