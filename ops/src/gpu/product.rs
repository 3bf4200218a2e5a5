//! Matrix products by cuBLAS, and by cuBLASLt where something is done with them, with sums in f32 whatever the operands are.

use crate::device::Gpu;
use crate::measure::count_macs;
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys};
use candle_core::{Error, Result, bail};
use std::ffi::{c_int, c_void};
use zero_cuda::product::{Element, Epilogue, Factor, Product};
use zero_kernels::{Address, Dtype};

/// A matrix of `rows` × `columns`, row-major, or its transpose is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) address: Address,
    pub(super) dtype: Dtype,
    rows: usize,
    columns: usize,
    /// Elements from one row to the next, before it was turned.
    stride: usize,
    is_turned: bool,
}

impl Matrix {
    /// Row-major.
    pub(super) fn new(address: Address, dtype: Dtype, rows: usize, columns: usize) -> Self {
        Self::strided(address, dtype, [rows, columns], columns)
    }

    /// Row-major, with rows that begin `stride` elements apart.
    pub(super) fn strided(address: Address, dtype: Dtype, [rows, columns]: [usize; 2], stride: usize) -> Self {
        Self { address, dtype, rows, columns, stride, is_turned: false }
    }

    /// Its transpose.
    pub(super) fn t(self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_turned: !self.is_turned, ..self }
    }

    fn factor(self) -> Factor {
        Factor { address: self.address, stride: self.stride, is_turned: self.is_turned }
    }

    /// As cuBLAS, for which matrices are column-major, has to take it so that it is the transpose of this; and its leading dimension.
    fn operand(self) -> (sys::cublasOperation_t, usize) {
        match self.is_turned {
            false => (sys::cublasOperation_t::CUBLAS_OP_N, self.stride),
            true => (sys::cublasOperation_t::CUBLAS_OP_T, self.stride),
        }
    }
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F32 => sys::cudaDataType::CUDA_R_32F,
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Dtype::F16 => sys::cudaDataType::CUDA_R_16F,
    }
}

/// Where a product goes: row-major.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub(super) address: Address,
    pub(super) dtype: Dtype,
    /// Onto what is there; otherwise instead of it.
    pub(super) add: bool,
}

/// to = left·right, or to += left·right, rounded once.
///
/// # Safety
/// The matrices are where they say, and `to` has room for as many rows as `left` and columns as `right`, when the stream gets to it.
///
/// # Errors
/// Sizes that do not fit, or that cuBLAS cannot count.
pub(super) unsafe fn product(op: &'static str, gpu: &Gpu, left: Matrix, right: Matrix, to: To) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { product_strided(op, gpu, left, right, to, right.columns) }
}

/// to = left·right, with something done to the sums before they are rounded, for a `to` of the dtype of both. False if cuBLASLt cannot do
/// that, and nothing was done: for sizes that are odd, say.
///
/// # Safety
/// As for [`product`]; what the epilogue reads and writes is there as well.
///
/// # Errors
/// Sizes that do not fit, or what cuBLASLt says.
pub(super) unsafe fn product_with(
    op: &'static str,
    gpu: &Gpu,
    left: Matrix,
    right: Matrix,
    to: Address,
    epilogue: Epilogue,
) -> Result<bool> {
    let (rows, columns, inner) = (left.rows, right.columns, left.columns);
    if right.rows != inner {
        bail!("{op}: a matrix of {rows}×{inner} times one of {}×{columns}", right.rows);
    }
    if rows == 0 || columns == 0 {
        return Ok(true);
    }
    if left.dtype != right.dtype {
        return Ok(false);
    }
    let element = match left.dtype {
        Dtype::F32 => Element::F32,
        Dtype::Bf16 => Element::Bf16,
        Dtype::F16 => Element::F16,
    };
    let (left, right) = (left.factor(), right.factor());
    let product = Product { element, rows, columns, inner, left, right, to, epilogue };
    // SAFETY: the caller's promise.
    let is_done = unsafe { gpu.multiply(&product) }?;
    if is_done {
        count_macs((rows * columns) as u64 * inner as u64);
    }
    Ok(is_done)
}

/// [`product`] to rows that begin `stride` elements apart.
///
/// # Safety
/// As there, for as many elements.
///
/// # Errors
/// As there.
pub(super) unsafe fn product_strided(
    op: &'static str,
    gpu: &Gpu,
    left: Matrix,
    right: Matrix,
    to: To,
    stride: usize,
) -> Result<()> {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    if right.rows != k {
        bail!("{op}: a matrix of {m}×{k} times one of {}×{n}", right.rows);
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    count_macs((m * n) as u64 * k as u64);
    let int = |size: usize| c_int::try_from(size).map_err(|_| Error::Msg(format!("{op}: a matrix with {size} rows")));
    let (one, beta) = (1f32, if to.add { 1f32 } else { 0f32 });
    // The transpose of the product, which is row-major as cuBLAS sees it: rightᵀ·leftᵀ.
    let ((turn_right, ld_right), (turn_left, ld_left)) = (right.operand(), left.operand());
    let blas = gpu.device().cublas_handle();
    let number = |x: &f32| std::ptr::from_ref(x).cast::<c_void>();
    // SAFETY: the handle lives; the factors are read during the call; the caller answers for the matrices.
    unsafe {
        gemm_ex(
            *blas.handle(),
            turn_right,
            turn_left,
            int(n)?,
            int(m)?,
            int(k)?,
            number(&one),
            right.address as *const c_void,
            data_type(right.dtype),
            int(ld_right)?,
            left.address as *const c_void,
            data_type(left.dtype),
            int(ld_left)?,
            number(&beta),
            to.address as *mut c_void,
            data_type(to.dtype),
            int(stride)?,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .map_err(|error| Error::Msg(format!("{op}: cuBLAS: {error:?}")))
}
