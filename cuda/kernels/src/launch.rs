//! Kernel launches: an entry of a source file, with arguments.

/// A device address; 0 is null.
pub type Address = u64;

/// Types that parameters and activations are stored in. Kernels compute in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16, the upper half of f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Returns the type's number in `Communicated` of `cu/gradient_norm.cuh`.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::F16 => 2,
        }
    }

    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Elements in sixteen bytes, the widest access of a thread.
    pub(crate) fn pack(self) -> u32 {
        16 / self.bytes() as u32
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// A source file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// `cu/activation.cu`
    Activation,
    /// `cu/attention.cu`
    Attention,
    /// `cu/attention_tensor.cu`
    AttentionTensor,
    /// `cu/block_codes.cu`
    BlockCodes,
    /// `cu/cross_entropy.cu`
    CrossEntropy,
    /// `cu/dropout.cu`
    Dropout,
    /// `cu/embedding.cu`
    Embedding,
    /// `cu/indices.cu`
    Indices,
    /// `cu/norm.cu`
    Norm,
    /// `cu/optimizer.cu`
    Optimizer,
    /// `cu/rotary.cu`
    Rotary,
    /// `cu/rows.cu`
    Rows,
}

impl Source {
    /// All source files.
    pub const ALL: [Self; 12] = [
        Self::Activation,
        Self::Attention,
        Self::AttentionTensor,
        Self::BlockCodes,
        Self::CrossEntropy,
        Self::Dropout,
        Self::Embedding,
        Self::Indices,
        Self::Norm,
        Self::Optimizer,
        Self::Rotary,
        Self::Rows,
    ];

    /// Returns the file name without the extension.
    pub fn name(self) -> &'static str {
        match self {
            Self::Activation => "activation",
            Self::Attention => "attention",
            Self::AttentionTensor => "attention_tensor",
            Self::BlockCodes => "block_codes",
            Self::CrossEntropy => "cross_entropy",
            Self::Dropout => "dropout",
            Self::Embedding => "embedding",
            Self::Indices => "indices",
            Self::Norm => "norm",
            Self::Optimizer => "optimizer",
            Self::Rotary => "rotary",
            Self::Rows => "rows",
        }
    }

    /// nvcc's output: a fat binary for `cuModuleLoadData`, aligned to 16 bytes.
    #[cfg(feature = "cuda")]
    pub fn image(self) -> &'static [u8] {
        macro_rules! image {
            ($name:literal) => {
                &(const { &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))) }).0
            };
        }
        match self {
            Self::Activation => image!("activation"),
            Self::Attention => image!("attention"),
            Self::AttentionTensor => image!("attention_tensor"),
            Self::BlockCodes => image!("block_codes"),
            Self::CrossEntropy => image!("cross_entropy"),
            Self::Dropout => image!("dropout"),
            Self::Embedding => image!("embedding"),
            Self::Indices => image!("indices"),
            Self::Norm => image!("norm"),
            Self::Optimizer => image!("optimizer"),
            Self::Rotary => image!("rotary"),
            Self::Rows => image!("rows"),
        }
    }
}

/// Aligns images, which the driver reads as words.
#[cfg(feature = "cuda")]
#[repr(align(16))]
struct Aligned<B>(B);

/// A kernel launch, for `cuLaunchKernel` with one argument.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch<A> {
    /// The source file of the entry.
    pub source: Source,
    /// The name of the entry.
    pub entry: String,
    /// Number of blocks in x, y and z.
    pub grid: [u32; 3],
    /// Number of threads per block, all in x.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes. Above 48 KiB the function's attribute must be raised first.
    pub shared_bytes: u32,
    /// The argument, passed by value.
    pub args: A,
}

/// The largest grid in x, y and z.
pub(crate) const MOST: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Maximum number of blocks of a launch whose threads stride over the elements: enough to fill any device.
const MOST_BLOCKS: u64 = 4096;
/// Number of packs that a thread loads at a time, as in `cu/pack.cuh`.
const IN_FLIGHT: u32 = 2;
/// Number of threads per block of most launches.
pub(crate) const THREADS: u32 = 256;
/// Returns the number of threads of a block that processes `packs` packs: whole warps, at most `most` threads.
pub(crate) fn threads_for(packs: u32, most: u32) -> u32 {
    packs.clamp(1, most).next_multiple_of(32)
}

/// Bytes of shared memory for the partial sums of a block: one f32 for each of at most 32 warps.
pub(crate) const SUMS_BYTES: u32 = 32 * 4;

impl<A> Launch<A> {
    /// Checks the grid against the limits of a device.
    ///
    /// # Errors
    /// Names the entry and the limits.
    pub fn check_grid(&self) -> Result<(), String> {
        let ([x, y, z], [most_x, most, _]) = (self.grid, MOST);
        let fits = self.grid.iter().zip(MOST).all(|(&blocks, most)| (1..=most).contains(&blocks));
        let words =
            || format!("{}: a grid of {x} × {y} × {z} blocks; the maximum is {most_x} × {most} × {most}", self.entry);
        fits.then_some(()).ok_or_else(words)
    }

    /// Returns a launch of `kernel` for a type and `count` elements, over which the threads stride; `None` if `count`
    /// is 0.
    pub(crate) fn over(source: Source, kernel: &str, dtype: Dtype, count: u64, args: A) -> Option<Self> {
        let blocks = count.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32;
        let launch = Self::new(source, kernel, dtype, [blocks, 1, 1], args);
        (count > 0).then_some(launch)
    }

    /// Like [`over`](Self::over), but each thread processes packs of elements.
    pub(crate) fn over_packs(source: Source, kernel: &str, dtype: Dtype, count: u64, args: A) -> Option<Self> {
        Self::over(source, kernel, dtype, count.div_ceil(u64::from(IN_FLIGHT * dtype.pack())), args)
    }

    /// Returns a launch of `kernel` for a type, with blocks of the usual size and no shared memory.
    pub(crate) fn new(source: Source, kernel: &str, dtype: Dtype, grid: [u32; 3], args: A) -> Self {
        let entry = format!("{kernel}_{}", dtype.suffix());
        Self { source, entry, grid, threads: THREADS, shared_bytes: 0, args }
    }
}
