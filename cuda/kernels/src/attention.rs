//! Causal attention, forward and backward, in memory that grows with the sequence and not with its square.

use std::fmt;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `AttentionArgs` of `cu/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Args {
    q: Address,
    k: Address,
    v: Address,
    out: Address,
    d_out: Address,
    dq: Address,
    dk: Address,
    dv: Address,
    log_sums: Address,
    deltas: Address,
    firsts: Address,
    q_row: u64,
    k_row: u64,
    v_row: u64,
    out_row: u64,
    time: u32,
    heads: u32,
    kv_heads: u32,
    size: u32,
    scale: f32,
    in_pieces: u32,
    together: u32,
}

/// Sizes of q, `[batch, time, heads, size]`, and of k and v, `[batch, time, kv_heads, size]`, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    /// Sequences, at least 1.
    pub batch: u32,
    /// Positions of each, at least 1.
    pub time: u32,
    /// A multiple of `kv_heads`.
    pub heads: u32,
    /// At least 1.
    pub kv_heads: u32,
    /// Of a head, at most [`LARGEST_HEAD`].
    pub size: u32,
    /// Of all but statistics.
    pub dtype: Dtype,
    /// Whether q, k and v are one buffer of `[batch, time, 3, heads, size]`, as then their gradients are.
    pub packed: bool,
    /// u32 of `[batch, time]`: the first position that each sees, never more than itself and never decreasing in a sequence. 0 where
    /// all see from position 0 on.
    pub firsts: Address,
}

/// Floats of the largest head.
pub const LARGEST_HEAD: u32 = 128;

/// A geometry that no kernel is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unfit {
    size: u32,
    heads: [u32; 2],
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, [heads, kv_heads]) = (self.size, self.heads);
        match size {
            1..=LARGEST_HEAD => write!(f, "attention on a GPU: {heads} heads are no multiple of {kv_heads}"),
            _ => write!(f, "attention on a GPU: a head has 1 to {LARGEST_HEAD} elements, not {size}"),
        }
    }
}

impl std::error::Error for Unfit {}

/// Queries or keys that a block takes, and the bytes of shared memory that it needs.
#[derive(Clone, Copy)]
struct Block {
    rows: u32,
    shared_bytes: u32,
}

/// The kernels for heads up to some size.
struct Kernels {
    source: Source,
    threads: u32,
    size: u32,
    /// Of the result times its gradient, where the kernel of queries does not do it.
    deltas: Option<Block>,
    forward: Block,
    queries: Block,
    keys: Block,
}

impl Kernels {
    /// Those of `cu/attention.cu`: tiles of floats, each row with one beside it.
    fn of_floats(size: u32) -> Self {
        const KEYS: u32 = 32;
        let rows = if size <= 64 { 64 } else { 32 };
        let block = |rows, tiles: &[(u32, u32)]| {
            let bytes = tiles.iter().map(|(rows, width)| 4 * rows * (width + 1)).sum();
            Block { rows, shared_bytes: bytes }
        };
        Self {
            source: Source::Attention,
            threads: THREADS,
            size,
            // A warp takes a position.
            deltas: Some(Block { rows: THREADS / 32, shared_bytes: 0 }),
            forward: block(rows, &[(rows + 2 * KEYS, size), (rows, KEYS)]),
            queries: block(rows, &[(2 * rows + 2 * KEYS, size), (rows, KEYS)]),
            keys: block(KEYS, &[(4 * KEYS, size), (2 * KEYS, KEYS)]),
        }
    }

    /// Those of `cu/attention_tensor.cu`: two stages of two tiles of 16-bit numbers, each row with 16 bytes beside it.
    fn of_halves(size: u32) -> Self {
        const ROWS: u32 = 64;
        let stages = 2 * 2 * ROWS * (size + 8) * 2;
        let rows = if size <= 64 { 2 * ROWS } else { ROWS };
        let block = Block { rows, shared_bytes: stages };
        Self {
            source: Source::AttentionTensor,
            threads: 128,
            size,
            deltas: None,
            forward: block,
            queries: block,
            // And of each query of a stage two floats and its first key.
            keys: Block { shared_bytes: stages + 2 * ROWS * 3 * 4, ..block },
        }
    }
}

impl Geometry {
    fn kernels(&self) -> Result<Kernels, Unfit> {
        let fit = [32, 64, LARGEST_HEAD].into_iter().find(|&size| (1..=size).contains(&self.size));
        let is_grouped = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        let size = fit.filter(|_| is_grouped).ok_or(Unfit { size: self.size, heads: [self.heads, self.kv_heads] })?;
        Ok(match self.dtype {
            Dtype::F32 => Kernels::of_floats(size),
            Dtype::Bf16 | Dtype::F16 => Kernels::of_halves(size),
        })
    }

    fn args(&self, [q, k, v]: [Address; 3], out: Address, log_sums: Address) -> Args {
        let (size, heads) = (u64::from(self.size), [self.heads, self.kv_heads].map(u64::from));
        let [q_row, kv_row] = if self.packed { [3 * heads[0] * size; 2] } else { heads.map(|heads| heads * size) };
        Args {
            q,
            k,
            v,
            out,
            log_sums,
            firsts: self.firsts,
            q_row,
            k_row: kv_row,
            v_row: kv_row,
            out_row: heads[0] * size,
            time: self.time,
            heads: self.heads,
            kv_heads: self.kv_heads,
            size: self.size,
            scale: 1.0 / (self.size as f32).sqrt(),
            ..Args::default()
        }
    }

    /// `kernel` of `heads` of each sample, by blocks of which each takes some positions of one.
    fn launch(&self, kernels: &Kernels, kernel: &str, block: Block, heads: u32, args: Args) -> Launch<Args> {
        let heads = self.batch * heads;
        let grid = [self.time.div_ceil(block.rows) * heads, 1, 1];
        let args = Args { together: self.together(heads), ..args };
        let (threads, shared_bytes) = (kernels.threads, block.shared_bytes);
        Launch { threads, shared_bytes, ..Launch::new(kernels.source, kernel, self.dtype, grid, args) }
    }

    /// How many of `heads` heads run with their blocks interleaved. The heads are split into groups of about equal size, so that the operands that
    /// the blocks of one group share fit into the L2 cache.
    fn together(&self, heads: u32) -> u32 {
        const CACHE: u64 = 32 << 20;
        // Two numbers of each element: k and v, or q and the gradient of the result.
        let bytes = 2 * u64::from(self.time) * u64::from(self.size) * if self.dtype == Dtype::F32 { 4 } else { 2 };
        // Each key head serves several query heads.
        let bytes = bytes * u64::from((self.batch * self.heads).div_ceil(heads));
        let most = u32::try_from(CACHE / bytes).map_or(heads, |most| most.clamp(1, heads));
        heads.div_ceil(heads.div_ceil(most))
    }
}

impl Launch<Args> {
    /// The same with the blocks of other numbers of heads mixed than fit a cache: another order of blocks, and the same bits.
    #[must_use]
    pub fn with_heads_together(self, heads: u32) -> Self {
        Self { args: Args { together: heads.max(1), ..self.args }, ..self }
    }
}

impl Args {
    /// With `in_pieces` as it is for these addresses.
    fn checked(self) -> Self {
        const PIECE: u64 = 16;
        let numbers = [self.q_row, self.k_row, self.v_row, self.out_row, self.size.into()].map(|count| 2 * count);
        let addresses = [self.q, self.k, self.v, self.out, self.d_out, self.dq, self.dk, self.dv];
        let in_pieces = numbers.iter().chain(&addresses).all(|bytes| bytes.is_multiple_of(PIECE));
        Self { in_pieces: in_pieces.into(), ..self }
    }
}

/// Writes `out`, `[batch, time, heads, size]`, and `log_sums`, f32 of `[batch, heads, time]`, which the backward reads.
///
/// # Errors
/// No kernel is for this geometry.
pub fn forward(of: &Geometry, qkv: [Address; 3], out: Address, log_sums: Address) -> Result<Launch<Args>, Unfit> {
    let kernels = of.kernels()?;
    let kernel = format!("attention_{}", kernels.size);
    Ok(of.launch(&kernels, &kernel, kernels.forward, of.heads, of.args(qkv, out, log_sums).checked()))
}

/// What [`backward`] reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    /// As for [`forward`].
    pub qkv: [Address; 3],
    /// What that wrote.
    pub out: Address,
    /// What that wrote.
    pub log_sums: Address,
    /// The gradient of `out`.
    pub d_out: Address,
}

/// Launches in this order: Σ out·d_out into `deltas`, f32 of `[batch, heads, time]`, of f32 only; the gradient of q, and of 16-bit types
/// `deltas` too; the gradients of k and v. All lie as what they are of, and not in its place.
///
/// # Errors
/// No kernel is for this geometry.
pub fn backward(
    of: &Geometry,
    saved: &Saved,
    [dq, dk, dv]: [Address; 3],
    deltas: Address,
) -> Result<Vec<Launch<Args>>, Unfit> {
    let kernels = of.kernels()?;
    let args = of.args(saved.qkv, saved.out, saved.log_sums);
    let args = Args { d_out: saved.d_out, dq, dk, dv, deltas, ..args }.checked();
    let launch = |kernel: &str, block, heads| of.launch(&kernels, kernel, block, heads, args);
    let size = kernels.size;
    let deltas = kernels.deltas.map(|block| launch("attention_deltas", block, of.heads));
    let queries = launch(&format!("attention_queries_{size}"), kernels.queries, of.heads);
    let keys = launch(&format!("attention_keys_{size}"), kernels.keys, of.kv_heads);
    Ok(deltas.into_iter().chain([queries, keys]).collect())
}
