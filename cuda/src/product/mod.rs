//! Matrix products that do something with their sums before they write them, by cuBLASLt.
//!
//! A bias, an activation or its slope then costs no pass over memory of its own. Which of its algorithms a product takes, cuBLASLt says once
//! for each shape, by its own heuristic: nothing is timed, so a shape has the same algorithm, and the same bits, in every run. Sums are in
//! f32 and are never rounded on the way: schemes that do, and those that add up in place, are excluded.
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

/// Bytes that addresses and rows are multiples of. More is promised to no algorithm, so that none depends on where its matrices happen to be.
const ALIGNMENT: usize = 16;
/// Elements that rows of what GELU is taken of are a multiple of.
const AUX_ALIGNMENT: usize = 8;

/// A call of cuBLASLt's, or of the driver's on its behalf, that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProductError {
    /// The driver's.
    Driver(CudaError),
    /// cuBLASLt's own.
    CublasLt {
        /// The function.
        call: &'static str,
        /// What it gave.
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

/// Type of the elements of all matrices of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// The upper half of that.
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
    /// Where it begins.
    pub address: u64,
    /// Elements from one row to the next, before it was turned.
    pub stride: usize,
    /// Whether it is a transpose.
    pub is_turned: bool,
}

/// What is done with the sums before they are rounded and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// A row is added to all rows.
    Bias {
        /// Where the row is.
        bias: u64,
    },
    /// That, and then GELU in its tanh form.
    BiasGelu {
        /// Where the row is.
        bias: u64,
        /// Where the operand of GELU goes, rounded: a matrix like the result. GELU itself reads the operand before it is rounded.
        sum: u64,
    },
    /// They are multiplied by the slope of GELU's tanh form.
    GeluSlope {
        /// Where the matrix is that the slope is taken at, like the result.
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

/// A product of `rows` × `inner` and `inner` × `columns` elements to a row-major matrix without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Of all matrices.
    pub element: Element,
    /// Of the left factor and the result.
    pub rows: usize,
    /// Of the right factor and the result.
    pub columns: usize,
    /// Columns of the left factor and rows of the right one.
    pub inner: usize,
    /// The first factor.
    pub left: Factor,
    /// The second factor.
    pub right: Factor,
    /// Where the result goes.
    pub to: u64,
    /// What is done with it.
    pub epilogue: Epilogue,
}

/// What an algorithm is chosen by.
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

    /// Whether everything begins where tensor cores can read it.
    fn is_aligned(&self) -> bool {
        let Self { epilogue, left, right, .. } = self;
        let addresses = [Some(left.address), Some(right.address), Some(self.to), epilogue.bias(), epilogue.sum()];
        let rows = [left.stride, right.stride, self.columns].map(|stride| stride * self.element.bytes());
        addresses.into_iter().flatten().all(|address| address.is_multiple_of(ALIGNMENT as u64))
            && rows.into_iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT))
            && (epilogue.sum().is_none() || self.columns.is_multiple_of(AUX_ALIGNMENT))
    }
}

/// cuBLASLt on a device, with what it said of the shapes that it was asked about.
pub struct CublasLt {
    device: Arc<Device>,
    handle: lt::cublasLtHandle_t,
    /// `None`: it has no algorithm.
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
}

// SAFETY: cuBLASLt may be called with a handle from every thread.
unsafe impl Send for CublasLt {}
// SAFETY: as above; descriptions are changed behind the lock alone.
unsafe impl Sync for CublasLt {}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CublasLt").field("device", &self.device).finish_non_exhaustive()
    }
}

impl CublasLt {
    /// Opens it.
    ///
    /// # Errors
    /// The library is not here, or not for this device.
    pub fn new(device: &Arc<Device>) -> Result<Self, ProductError> {
        device.make_current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        done("cublasLtCreate", unsafe { lt::cublasLtCreate(&raw mut handle) })?;
        Ok(Self { device: Arc::clone(device), handle, plans: Mutex::default() })
    }

    /// Puts a product on a stream and returns before it is done. False: cuBLASLt cannot do this one, because of its sizes or of where its
    /// matrices begin, and nothing was put there.
    ///
    /// # Safety
    /// All matrices are where the product says, of its sizes, when the stream gets to it, and nobody else's as far as they are written.
    ///
    /// # Errors
    /// What cuBLASLt or the driver says of a product that can be done.
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
        // SAFETY: the handle and the plan live, numbers are read during the call, and the caller answers for the matrices. What the algorithm
        // takes meanwhile is taken and given back in the order of the stream.
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

    /// How a product of this shape is done; `None` if it cannot be.
    fn plan(&self, product: &Product) -> Result<Option<Plan>, ProductError> {
        let Product { element, rows, columns, inner, left, right, .. } = *product;
        // To cuBLASLt, for which matrices are column-major, all are their transposes: the result is rightᵀ·leftᵀ.
        let lies = |turned: bool, [rows, columns]: [usize; 2]| if turned { [rows, columns] } else { [columns, rows] };
        let right_of = Layout::new(element, lies(right.is_turned, [inner, columns]), right.stride)?;
        let left_of = Layout::new(element, lies(left.is_turned, [rows, inner]), left.stride)?;
        let to = Layout::new(element, [columns, rows], columns)?;
        let description = Description::new([right.is_turned, left.is_turned], product.epilogue, columns)?;
        let wanted = Preference::new()?;
        // SAFETY: an algorithm and numbers, of which any bits are some.
        let (mut found, mut count) = (unsafe { std::mem::zeroed::<lt::cublasLtMatmulHeuristicResult_t>() }, 0);
        // SAFETY: all descriptions live; writes one result and one number.
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
        // Which of the two a library says of what it has no kernel for, has changed between releases.
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

/// How products of a shape are done.
struct Plan {
    description: Description,
    left: Layout,
    right: Layout,
    to: Layout,
    algorithm: lt::cublasLtMatmulAlgo_t,
    /// Bytes.
    workspace: usize,
}
