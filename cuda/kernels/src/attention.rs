//! Causal attention, forward and backward, with memory linear in the sequence length.

use std::fmt;
use std::ops::Range;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// Matches `AttentionArgs` of `cu/attention.cuh`.
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
    from: u32,
    time: u32,
    keys: u32,
    heads: u32,
    kv_heads: u32,
    size: u32,
    scale: f32,
    in_pieces: u32,
    together: u32,
    unused: u32,
}

/// Sizes and memory layout of q, `[batch, time − from, heads, size]`, and of k and v, `[batch, keys, kv_heads, size]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    /// Number of sequences, at least 1.
    pub batch: u32,
    /// Position of the first query; 0 for whole sequences and with `packed`.
    pub from: u32,
    /// Position after the last query, at least `from` + 1.
    pub time: u32,
    /// Number of keys and values of each sequence, at least 1; their positions begin at 0. No query sees the keys from
    /// position `time` on, and their gradients are not written. With `packed`, this must equal `time`.
    pub keys: u32,
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: u32,
    /// Number of key and value heads, at least 1.
    pub kv_heads: u32,
    /// Number of elements per head, at most [`LARGEST_HEAD`].
    pub size: u32,
    /// Type of all tensors except the statistics.
    pub dtype: Dtype,
    /// Whether q, k and v are one buffer of `[batch, time, 3, heads, size]`; their gradients then have the same layout.
    pub packed: bool,
    /// Address of the first key that each position attends to, u32 of `[batch, max(time, keys)]`. It is never after the
    /// attending position, and it does not decrease within a sequence. A query whose first key is `keys` attends to
    /// none: its result is 0. An address of 0 means that all positions attend from position 0 on.
    pub firsts: Address,
}

/// The largest supported head size, in elements.
pub const LARGEST_HEAD: u32 = 128;

/// A geometry that no kernel supports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unfit {
    size: u32,
    heads: [u32; 2],
    is_packed_part: bool,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, [heads, kv_heads]) = (self.size, self.heads);
        match size {
            _ if self.is_packed_part => {
                f.write_str("attention on a GPU: packed queries, keys and values must be those of whole sequences")
            }
            1..=LARGEST_HEAD => {
                write!(f, "attention on a GPU: {heads} heads are not a multiple of {kv_heads} key and value heads")
            }
            _ => write!(f, "attention on a GPU: a head must have 1 to {LARGEST_HEAD} elements, got {size}"),
        }
    }
}

impl std::error::Error for Unfit {}

/// The number of queries or keys that a block processes, and the bytes of shared memory that it needs.
#[derive(Clone, Copy)]
struct Block {
    rows: u32,
    shared_bytes: u32,
}

/// The kernels for heads of at most `size` elements.
struct Kernels {
    source: Source,
    threads: u32,
    size: u32,
    /// The kernel for Σ out·d_out, if the kernel of queries does not compute it.
    deltas: Option<Block>,
    forward: Block,
    queries: Block,
    keys: Block,
}

impl Kernels {
    /// Returns the kernels of `cu/attention.cu`: tiles of f32, each row padded by one element.
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
            // One warp per position.
            deltas: Some(Block { rows: THREADS / 32, shared_bytes: 0 }),
            forward: block(rows, &[(rows + 2 * KEYS, size), (rows, KEYS)]),
            queries: block(rows, &[(2 * rows + 2 * KEYS, size), (rows, KEYS)]),
            keys: block(KEYS, &[(4 * KEYS, size), (2 * KEYS, KEYS)]),
        }
    }

    /// Returns the kernels of `cu/attention_tensor.cu`: two stages of two tiles of 16-bit numbers, each row padded by
    /// 16 bytes.
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
            // A stage also has two floats and the index of the first key for each query.
            keys: Block { shared_bytes: stages + 2 * ROWS * 3 * 4, ..block },
        }
    }
}

impl Geometry {
    fn kernels(&self) -> Result<Kernels, Unfit> {
        let fit = [32, 64, LARGEST_HEAD].into_iter().find(|&size| (1..=size).contains(&self.size));
        let is_grouped = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        let is_packed_part = self.packed && (self.from > 0 || self.keys != self.time);
        let unfit = Unfit { size: self.size, heads: [self.heads, self.kv_heads], is_packed_part };
        let size = fit.filter(|_| is_grouped && !is_packed_part).ok_or(unfit)?;
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
            from: self.from,
            time: self.time,
            keys: self.keys,
            heads: self.heads,
            kv_heads: self.kv_heads,
            size: self.size,
            scale: 1.0 / (self.size as f32).sqrt(),
            ..Args::default()
        }
    }

    /// Builds a launch of `kernel` for `heads` heads per sample; each block processes some of the `positions` of one
    /// head.
    fn launch(
        &self,
        kernels: &Kernels,
        kernel: &str,
        block: Block,
        (heads, positions): (u32, Range<u32>),
        args: Args,
    ) -> Launch<Args> {
        let heads = self.batch * heads;
        let grid = [(positions.end.div_ceil(block.rows) - positions.start / block.rows) * heads, 1, 1];
        let args = Args { together: self.together(heads), ..args };
        let (threads, shared_bytes) = (kernels.threads, block.shared_bytes);
        Launch { threads, shared_bytes, ..Launch::new(kernels.source, kernel, self.dtype, grid, args) }
    }

    /// Returns the number of heads whose blocks run interleaved, out of `heads` heads. The heads are split into groups
    /// of about equal size. The operands that the blocks of a group share must fit into the L2 cache.
    fn together(&self, heads: u32) -> u32 {
        const CACHE: u64 = 32 << 20;
        // Two elements per position and head dimension: k and v, or q and the gradient of the result.
        let bytes = 2 * u64::from(self.time) * u64::from(self.size) * if self.dtype == Dtype::F32 { 4 } else { 2 };
        // Each key head serves several query heads.
        let bytes = bytes * u64::from((self.batch * self.heads).div_ceil(heads));
        let most = u32::try_from(CACHE / bytes).map_or(heads, |most| most.clamp(1, heads));
        heads.div_ceil(heads.div_ceil(most))
    }
}

impl Launch<Args> {
    /// Returns the launch with the blocks of `heads` heads interleaved. By default, the L2 cache determines the number
    /// of heads. This changes the order of the blocks, but not the bits of the results.
    #[must_use]
    pub fn with_heads_together(self, heads: u32) -> Self {
        Self { args: Args { together: heads.max(1), ..self.args }, ..self }
    }
}

impl Args {
    /// Sets `in_pieces` from the alignment of the addresses.
    fn checked(self) -> Self {
        const PIECE: u64 = 16;
        let numbers = [self.q_row, self.k_row, self.v_row, self.out_row, self.size.into()].map(|count| 2 * count);
        let addresses = [self.q, self.k, self.v, self.out, self.d_out, self.dq, self.dk, self.dv];
        let in_pieces = numbers.iter().chain(&addresses).all(|bytes| bytes.is_multiple_of(PIECE));
        Self { in_pieces: in_pieces.into(), ..self }
    }
}

/// Writes `out`, `[batch, time − from, heads, size]`, and `log_sums`, f32 of `[batch, heads, time − from]`, which the
/// backward reads.
///
/// # Errors
/// Fails if no kernel supports this geometry.
pub fn forward(of: &Geometry, qkv: [Address; 3], out: Address, log_sums: Address) -> Result<Launch<Args>, Unfit> {
    let kernels = of.kernels()?;
    let kernel = format!("attention_{}", kernels.size);
    let queries = (of.heads, of.from..of.time);
    Ok(of.launch(&kernels, &kernel, kernels.forward, queries, of.args(qkv, out, log_sums).checked()))
}

/// The inputs of [`backward`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    /// The q, k and v passed to [`forward`].
    pub qkv: [Address; 3],
    /// The `out` that [`forward`] wrote.
    pub out: Address,
    /// The `log_sums` that [`forward`] wrote.
    pub log_sums: Address,
    /// The gradient of `out`.
    pub d_out: Address,
}

/// Returns the launches of the backward, in order. The first, for f32 only, writes Σ out·d_out to `deltas`, f32 of
/// `[batch, heads, time − from]`. The next computes the gradient of q, and for 16-bit types also `deltas`. The last
/// computes the gradients of k and v. Each gradient has the layout of its tensor and must not overlap it.
///
/// # Errors
/// Fails if no kernel supports this geometry.
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
    let (size, queries) = (kernels.size, (of.heads, of.from..of.time));
    let deltas = kernels.deltas.map(|block| launch("attention_deltas", block, queries.clone()));
    let queries = launch(&format!("attention_queries_{size}"), kernels.queries, queries);
    let keys = launch(&format!("attention_keys_{size}"), kernels.keys, (of.kv_heads, 0..of.time.min(of.keys)));
    Ok(deltas.into_iter().chain([queries, keys]).collect())
}
