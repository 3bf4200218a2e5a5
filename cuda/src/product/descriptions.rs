//! Descriptors for cuBLASLt: matrix layouts, the computation, and constraints on the algorithm.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::sys::{
    self as lt, cublasComputeType_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Wanted, cublasLtReductionScheme_t, cudaDataType,
};

use super::{ALIGNMENT, Element, Epilogue, ProductError, done};
use crate::MOST_WORKSPACE;

/// The memory layout of a matrix.
pub(super) struct Layout(pub(super) lt::cublasLtMatrixLayout_t);

impl Layout {
    /// Describes a column-major matrix.
    pub(super) fn new(element: Element, [rows, columns]: [usize; 2], stride: usize) -> Result<Self, ProductError> {
        let mut layout = std::ptr::null_mut();
        let (rows, columns, stride) = (rows as u64, columns as u64, i64::try_from(stride).unwrap_or(i64::MAX));
        // SAFETY: writes one pointer.
        done("cublasLtMatrixLayoutCreate", unsafe {
            lt::cublasLtMatrixLayoutCreate(&raw mut layout, element.data_type(), rows, columns, stride)
        })?;
        Ok(Self(layout))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { lt::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// The computation: transposes, compute type and epilogue.
pub(super) struct Description(pub(super) lt::cublasLtMatmulDesc_t);

impl Description {
    /// Describes a product of factors that are transposed or not, in cuBLASLt's order of the factors.
    pub(super) fn new(turned: [bool; 2], epilogue: Epilogue, columns: usize) -> Result<Self, ProductError> {
        let mut raw = std::ptr::null_mut();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: writes one pointer.
        done("cublasLtMatmulDescCreate", unsafe { lt::cublasLtMatmulDescCreate(&raw mut raw, compute, scale) })?;
        let this = Self(raw);
        for (attribute, turned) in
            [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB].into_iter().zip(turned)
        {
            let operation = if turned { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N };
            this.set(attribute, &operation)?;
        }
        this.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue.kind())?;
        if epilogue.sum().is_some() {
            let stride = i64::try_from(columns).unwrap_or(i64::MAX);
            this.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride)?;
        }
        this.point(epilogue)?;
        Ok(this)
    }

    /// Sets the pointers to the epilogue's inputs and outputs.
    pub(super) fn point(&self, epilogue: Epilogue) -> Result<(), ProductError> {
        if let Some(bias) = epilogue.bias() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        if let Some(sum) = epilogue.sum() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &sum)?;
        }
        Ok(())
    }

    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<(), ProductError> {
        let from = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the description lives; cuBLASLt copies the value during the call and rejects a wrong size.
        done("cublasLtMatmulDescSetAttribute", unsafe {
            lt::cublasLtMatmulDescSetAttribute(self.0, attribute, from, size_of::<T>())
        })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { lt::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// Constraints on the algorithm.
pub(super) struct Preference(pub(super) lt::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new() -> Result<Self, ProductError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        done("cublasLtMatmulPreferenceCreate", unsafe { lt::cublasLtMatmulPreferenceCreate(&raw mut raw) })?;
        let this = Self(raw);
        this.set(Wanted::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &MOST_WORKSPACE)?;
        let in_f32 = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        this.set(Wanted::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_f32)?;
        for attribute in [
            Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            this.set(attribute, &(ALIGNMENT as u32))?;
        }
        Ok(this)
    }

    fn set<T>(&self, attribute: Wanted, value: &T) -> Result<(), ProductError> {
        let from = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the preference lives; cuBLASLt copies the value during the call and rejects a wrong size.
        done("cublasLtMatmulPreferenceSetAttribute", unsafe {
            lt::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, from, size_of::<T>())
        })
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { lt::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}
