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
            forward: block(rows, &[(rows + 2 * KEYS, size), (rows, KEYS)]),
            queries: block(rows, &[(2 * rows + 2 * KEYS, size), (rows, KEYS)]),
            keys: block(KEYS, &[(4 * KEYS, size), (2 * KEYS, KEYS)]),
        }
    }

    /// Those of `cu/attention_tensor.cu`: two stages of two tiles of 16-bit numbers, each row with 16 bytes beside it.
    fn of_halves(size: u32) -> Self {
        const ROWS: u32 = 64;
        let stages = 2 * 2 * ROWS * (size + 8) * 2;
        let block = |rows| Block { rows, shared_bytes: stages };
        Self {
            source: Source::AttentionTensor,
            threads: 128,
            size,
            forward: block(if size <= 64 { 2 * ROWS } else { ROWS }),
            queries: block(ROWS),
            // And of each query of a stage two floats and its first key.
            keys: Block { shared_bytes: stages + 2 * ROWS * 3 * 4, ..block(ROWS) },
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

    fn launch(&self, kernels: &Kernels, kernel: &str, block: Block, heads: u32, args: Args) -> Launch<Args> {
        let grid = [self.time.div_ceil(block.rows), self.batch * heads, 1];
        let kernel = format!("{kernel}_{}", kernels.size);
        let (threads, shared_bytes) = (kernels.threads, block.shared_bytes);
        Launch { threads, shared_bytes, ..Launch::new(kernels.source, &kernel, self.dtype, grid, args) }
    }
}

impl Args {
    /// With `in_pieces` as it is for these addresses.
    fn checked(self) -> Self {
        const PIECE: u64 = 16;
        let numbers = [self.q_row, self.k_row, self.v_row, self.out_row, self.size.into()].map(|count| 2 * count);
        let addresses = [self.q, self.k, self.v, self.d_out];
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
    Ok(of.launch(&kernels, "attention", kernels.forward, of.heads, of.args(qkv, out, log_sums).checked()))
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

/// Three launches in this order: Σ out·d_out into `deltas`, f32 of `[batch, heads, time]`; the gradient of q; those of k and v. The
/// gradients lie as what they are of, and not in their place.
///
/// # Errors
/// No kernel is for this geometry.
pub fn backward(
    of: &Geometry,
    saved: &Saved,
    [dq, dk, dv]: [Address; 3],
    deltas: Address,
) -> Result<[Launch<Args>; 3], Unfit> {
    let kernels = of.kernels()?;
    let args = of.args(saved.qkv, saved.out, saved.log_sums);
    let args = Args { d_out: saved.d_out, dq, dk, dv, deltas, ..args }.checked();
    // A warp takes a position.
    let positions = [of.time.div_ceil(THREADS / 32), of.batch * of.heads, 1];
    Ok([
        Launch::new(Source::Attention, "attention_deltas", of.dtype, positions, args),
        of.launch(&kernels, "attention_queries", kernels.queries, of.heads, args),
        of.launch(&kernels, "attention_keys", kernels.keys, of.kv_heads, args),
    ])
}
