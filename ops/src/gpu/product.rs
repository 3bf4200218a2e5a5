//! Matrix products by cuBLAS, or by cuBLASLt if they have an epilogue, with sums in f32 for all dtypes of operands.

use crate::device::Gpu;
use crate::measure::count_macs;
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys};
use candle_core::{Error, Result, bail};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use zero_cuda::product::{Element, Epilogue, Factor, Product};
use zero_kernels::{Address, Dtype};

/// A matrix of `rows` × `columns` that is row-major or the transpose of a row-major one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) address: Address,
    pub(super) dtype: Dtype,
    rows: usize,
    columns: usize,
    /// Number of elements from one row to the next, before transposing.
    stride: usize,
    is_turned: bool,
}

impl Matrix {
    /// Describes a row-major matrix.
    pub(super) fn new(address: Address, dtype: Dtype, rows: usize, columns: usize) -> Self {
        Self::strided(address, dtype, [rows, columns], columns)
    }

    /// Describes a row-major matrix whose rows begin `stride` elements apart.
    pub(super) fn strided(address: Address, dtype: Dtype, [rows, columns]: [usize; 2], stride: usize) -> Self {
        Self { address, dtype, rows, columns, stride, is_turned: false }
    }

    /// Returns some of the rows.
    pub(super) fn rows(self, range: &Range<usize>) -> Self {
        assert!(range.end <= self.rows, "the rows of a matrix");
        let step = if self.is_turned { 1 } else { self.stride };
        let address = self.address + (range.start * step * self.dtype.bytes()) as u64;
        Self { address, rows: range.len(), ..self }
    }

    /// Returns some of the columns.
    pub(super) fn columns(self, range: &Range<usize>) -> Self {
        self.t().rows(range).t()
    }

    /// Returns the transpose.
    pub(super) fn t(self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_turned: !self.is_turned, ..self }
    }

    fn factor(self) -> Factor {
        Factor { address: self.address, stride: self.stride, is_turned: self.is_turned }
    }

    /// Returns the transposition flag and the leading dimension with which cuBLAS, whose matrices are column-major,
    /// reads the transpose of this matrix.
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

/// The destination of a product, row-major.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub(super) address: Address,
    pub(super) dtype: Dtype,
    /// Whether to add to the existing values instead of overwriting them.
    pub(super) add: bool,
}

/// Computes to = left·right, or to += left·right, rounded once.
///
/// # Safety
/// When the stream reaches the product, the matrices must be at their addresses, and `to` must have room for the rows
/// of `left` times the columns of `right`.
///
/// # Errors
/// Fails if the sizes do not match or exceed the range of cuBLAS.
pub(super) unsafe fn product(op: &'static str, gpu: &Gpu, left: Matrix, right: Matrix, to: To) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { product_strided(op, gpu, left, right, to, right.columns) }
}

/// Computes to = left·right and applies an epilogue to the sums before they are rounded. `to` has the dtype of both
/// operands. Returns false, without doing anything, if cuBLASLt does not support the product, for example because of
/// odd sizes.
///
/// # Safety
/// The requirements of [`product`] apply, and the memory that the epilogue reads and writes must be valid.
///
/// # Errors
/// Fails if the sizes do not match. Returns errors of cuBLASLt.
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
        bail!("{op}: cannot multiply a {rows}×{inner} matrix by a {}×{columns} matrix", right.rows);
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
    // SAFETY: guaranteed by the caller.
    let is_done = unsafe { gpu.multiply(&product) }?;
    if is_done {
        count_macs((rows * columns) as u64 * inner as u64);
    }
    Ok(is_done)
}

/// Computes [`product`] with result rows that begin `stride` elements apart.
///
/// # Safety
/// The requirements of [`product`] apply, with room for rows of this stride.
///
/// # Errors
/// Fails in the same cases as [`product`].
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
        bail!("{op}: cannot multiply a {m}×{k} matrix by a {}×{n} matrix", right.rows);
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    count_macs((m * n) as u64 * k as u64);
    let int = |size: usize| {
        c_int::try_from(size)
            .map_err(|_| Error::Msg(format!("{op}: a matrix dimension of {size} exceeds the maximum of cuBLAS")))
    };
    let (one, beta) = (1f32, if to.add { 1f32 } else { 0f32 });
    // Computes the transpose of the product, rightᵀ·leftᵀ, since cuBLAS reads a row-major matrix as its transpose.
    let ((turn_right, ld_right), (turn_left, ld_left)) = (right.operand(), left.operand());
    let blas = gpu.device().cublas_handle();
    let number = |x: &f32| std::ptr::from_ref(x).cast::<c_void>();
    // SAFETY: the handle is alive; the factors are read during the call; the caller guarantees that the matrices are
    // valid.
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
