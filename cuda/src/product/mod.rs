//! Matrix products with a fused epilogue, by cuBLASLt.
//!
//! The epilogue applies a bias, an activation or an activation's derivative to the sums before they are written, which
//! saves a pass over memory. cuBLASLt's heuristic chooses the algorithm once per shape, without timing candidates. A
//! product of one shape therefore uses the same algorithm, and gives the same bits, in every run. Sums are in f32, and
//! partial sums are never rounded to a narrower type. Algorithms that combine partial sums in place or in a narrower
//! type are excluded.
#![allow(unsafe_code)]

mod descriptions;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{self as lt, cublasLtEpilogue_t, cublasStatus_t, cudaDataType};
use cudarc::driver::sys;
use descriptions::{Description, Layout, Preference};

use crate::{CudaError, Device, Stream, check};

/// Alignment of addresses and row strides in bytes. The heuristic is told this alignment even if the actual one is
/// larger, so that the choice of algorithm does not depend on the matrices' addresses.
const ALIGNMENT: usize = 16;
/// The row stride of GELU's operand is a multiple of this many elements.
const AUX_ALIGNMENT: usize = 8;

/// A failed call of cuBLASLt, or of the driver for a product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProductError {
    /// The driver's error.
    Driver(CudaError),
    /// cuBLASLt's error.
    CublasLt {
        /// The name of the function.
        call: &'static str,
        /// The status that it returned.
        status: cublasStatus_t,
    },
}

impl std::fmt::Display for ProductError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Driver(error) => error.fmt(f),
            Self::CublasLt { call, status } => write!(f, "{call}: {status:?}"),
        }
    }
}

impl std::error::Error for ProductError {}

impl From<CudaError> for ProductError {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}

fn done(call: &'static str, status: cublasStatus_t) -> Result<(), ProductError> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(ProductError::CublasLt { call, status }),
    }
}

/// Element type of all matrices of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// bfloat16, the upper half of f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    fn data_type(self) -> cudaDataType {
        match self {
            Self::F32 => cudaDataType::CUDA_R_32F,
            Self::Bf16 => cudaDataType::CUDA_R_16BF,
            Self::F16 => cudaDataType::CUDA_R_16F,
        }
    }
}

/// A row-major matrix, or the transpose of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Device address of the first element.
    pub address: u64,
    /// Row stride in elements, before the transposition.
    pub stride: usize,
    /// Whether the factor is the transpose of the stored matrix.
    pub is_turned: bool,
}

/// The operation on the sums before they are rounded and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Adds a row vector to all rows.
    Bias {
        /// Device address of the row.
        bias: u64,
    },
    /// Adds a row vector to all rows, then applies GELU in its tanh form.
    BiasGelu {
        /// Device address of the row.
        bias: u64,
        /// Device address for the rounded operand of GELU: an output with the shape of the result. GELU itself is
        /// computed from the operand before rounding.
        sum: u64,
    },
    /// Multiplies by the derivative of GELU's tanh form.
    GeluSlope {
        /// Device address of the matrix at which the derivative is taken; shaped like the result.
        sum: u64,
    },
}

impl Epilogue {
    fn kind(self) -> cublasLtEpilogue_t {
        match self {
            Self::Bias { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Self::BiasGelu { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Self::GeluSlope { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    fn bias(self) -> Option<u64> {
        match self {
            Self::Bias { bias } | Self::BiasGelu { bias, .. } => Some(bias),
            Self::GeluSlope { .. } => None,
        }
    }

    fn sum(self) -> Option<u64> {
        match self {
            Self::BiasGelu { sum, .. } | Self::GeluSlope { sum } => Some(sum),
            Self::Bias { .. } => None,
        }
    }
}

/// A product of a `rows` × `inner` and an `inner` × `columns` matrix. The result is a contiguous row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Element type of all matrices.
    pub element: Element,
    /// Number of rows of the left factor and the result.
    pub rows: usize,
    /// Number of columns of the right factor and the result.
    pub columns: usize,
    /// Number of columns of the left factor and rows of the right one.
    pub inner: usize,
    /// The left factor.
    pub left: Factor,
    /// The right factor.
    pub right: Factor,
    /// Device address of the result.
    pub to: u64,
    /// The operation on the sums.
    pub epilogue: Epilogue,
}

/// The key by which algorithms are cached.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    element: Element,
    sizes: [usize; 3],
    strides: [usize; 2],
    is_turned: [bool; 2],
    epilogue: cublasLtEpilogue_t,
}

impl Product {
    fn shape(&self) -> Shape {
        Shape {
            element: self.element,
            sizes: [self.rows, self.columns, self.inner],
            strides: [self.left.stride, self.right.stride],
            is_turned: [self.left.is_turned, self.right.is_turned],
            epilogue: self.epilogue.kind(),
        }
    }

    /// Returns whether all addresses and strides are aligned for tensor cores.
    fn is_aligned(&self) -> bool {
        let Self { epilogue, left, right, .. } = self;
        let addresses = [Some(left.address), Some(right.address), Some(self.to), epilogue.bias(), epilogue.sum()];
        let rows = [left.stride, right.stride, self.columns].map(|stride| stride * self.element.bytes());
        addresses.into_iter().flatten().all(|address| address.is_multiple_of(ALIGNMENT as u64))
            && rows.into_iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT))
            && (epilogue.sum().is_none() || self.columns.is_multiple_of(AUX_ALIGNMENT))
    }
}

/// cuBLASLt on a device, with a cache of the algorithms chosen per shape.
pub struct CublasLt {
    device: Arc<Device>,
    handle: lt::cublasLtHandle_t,
    /// `None` if cuBLASLt has no algorithm for the shape.
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
}

// SAFETY: cuBLASLt may be called with one handle from every thread.
unsafe impl Send for CublasLt {}
// SAFETY: cuBLASLt may be called with one handle from every thread, and descriptions are changed only while the lock is
// held.
unsafe impl Sync for CublasLt {}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CublasLt").field("device", &self.device).finish_non_exhaustive()
    }
}

impl CublasLt {
    /// Opens cuBLASLt.
    ///
    /// # Errors
    /// Fails if the library is missing or does not support this device.
    pub fn new(device: &Arc<Device>) -> Result<Self, ProductError> {
        device.make_current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        done("cublasLtCreate", unsafe { lt::cublasLtCreate(&raw mut handle) })?;
        Ok(Self { device: Arc::clone(device), handle, plans: Mutex::default() })
    }

    /// Enqueues a product on a stream, without waiting for it. Returns false, without enqueuing anything, if cuBLASLt
    /// does not support the product's sizes or alignment.
    ///
    /// # Safety
    /// When the stream reaches the product, all matrices must be at their addresses and have the product's sizes. No
    /// other code may access the memory that the product writes.
    ///
    /// # Errors
    /// Fails if cuBLASLt or the driver rejects a supported product.
    pub unsafe fn multiply(&self, product: &Product, stream: &Stream) -> Result<bool, ProductError> {
        if !product.is_aligned() {
            return Ok(false);
        }
        self.device.make_current()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(product.shape()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(self.plan(product)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        plan.description.point(product.epilogue)?;
        let (one, zero, stream) = (1f32, 0f32, stream.raw());
        let number = |x: &f32| std::ptr::from_ref(x).cast::<c_void>();
        let mut workspace = 0;
        // SAFETY: the handle and the plan live, scalars are read during the call, and the caller ensures that the
        // matrices are valid. The workspace is allocated and freed in stream order.
        unsafe {
            if plan.workspace > 0 {
                check("cuMemAllocAsync", sys::cuMemAllocAsync(&raw mut workspace, plan.workspace, stream))?;
            }
            let begun = lt::cublasLtMatmul(
                self.handle,
                plan.description.0,
                number(&one),
                product.right.address as *const c_void,
                plan.right.0,
                product.left.address as *const c_void,
                plan.left.0,
                number(&zero),
                product.to as *const c_void,
                plan.to.0,
                product.to as *mut c_void,
                plan.to.0,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                plan.workspace,
                stream.cast(),
            );
            if plan.workspace > 0 {
                check("cuMemFreeAsync", sys::cuMemFreeAsync(workspace, stream))?;
            }
            done("cublasLtMatmul", begun)?;
        }
        Ok(true)
    }

    /// Chooses an algorithm for this shape; `None` if cuBLASLt has none.
    fn plan(&self, product: &Product) -> Result<Option<Plan>, ProductError> {
        let Product { element, rows, columns, inner, left, right, .. } = *product;
        // cuBLASLt's matrices are column-major, so it reads each row-major matrix as its transpose. It therefore
        // computes rightᵀ·leftᵀ, the transpose of the result.
        let lies = |turned: bool, [rows, columns]: [usize; 2]| if turned { [rows, columns] } else { [columns, rows] };
        let right_of = Layout::new(element, lies(right.is_turned, [inner, columns]), right.stride)?;
        let left_of = Layout::new(element, lies(left.is_turned, [rows, inner]), left.stride)?;
        let to = Layout::new(element, [columns, rows], columns)?;
        let description = Description::new([right.is_turned, left.is_turned], product.epilogue, columns)?;
        let wanted = Preference::new()?;
        // SAFETY: the result consists of plain numbers, for which all bit patterns are valid.
        let (mut found, mut count) = (unsafe { std::mem::zeroed::<lt::cublasLtMatmulHeuristicResult_t>() }, 0);
        // SAFETY: all descriptions live; the call writes one result and one number.
        let said = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                right_of.0,
                left_of.0,
                to.0,
                to.0,
                wanted.0,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        // For unsupported products, some releases of the library return the first of these statuses and others the
        // second.
        let is_refused =
            matches!(said, cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE);
        if !is_refused {
            done("cublasLtMatmulAlgoGetHeuristic", said)?;
        }
        if is_refused || count < 1 || found.state != cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(None);
        }
        let (algorithm, workspace) = (found.algo, found.workspaceSize);
        Ok(Some(Plan { description, left: left_of, right: right_of, to, algorithm, workspace }))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: created once, destroyed once.
            unsafe { lt::cublasLtDestroy(self.handle) };
        }
    }
}

/// The algorithm for a shape.
struct Plan {
    description: Description,
    left: Layout,
    right: Layout,
    to: Layout,
    algorithm: lt::cublasLtMatmulAlgo_t,
    /// Size of the workspace in bytes.
    workspace: usize,
}
