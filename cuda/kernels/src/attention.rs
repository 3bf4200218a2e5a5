//! Causal attention, forward and backward, in memory that grows with the sequence and not with its square.

use std::fmt;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `AttentionArgs` of `cu/attention.cu`.
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
    unused: u32,
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

/// Keys of a tile.
const KEYS: u32 = 32;

/// Bytes of so many tiles: rows of `width` floats, and one each beside them.
fn tiles(of: &[(u32, u32)]) -> u32 {
    of.iter().map(|(rows, width)| 4 * rows * (width + 1)).sum()
}

impl Geometry {
    /// The head size that a kernel is compiled for, and its tile of queries.
    fn padded(&self) -> Result<(u32, u32), Unfit> {
        let sizes = [(32, 64), (64, 64), (LARGEST_HEAD, 32)];
        let fit = sizes.into_iter().find(|&(size, _)| (1..=size).contains(&self.size));
        let is_grouped = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        fit.filter(|_| is_grouped).ok_or(Unfit { size: self.size, heads: [self.heads, self.kv_heads] })
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

    fn launch(&self, kernel: &str, [across, heads]: [u32; 2], shared_bytes: u32, args: Args) -> Launch<Args> {
        let grid = [across, self.batch * heads, 1];
        Launch { shared_bytes, ..Launch::new(Source::Attention, kernel, self.dtype, grid, args) }
    }
}

/// Writes `out`, `[batch, time, heads, size]`, and `log_sums`, f32 of `[batch, heads, time]`, which the backward reads.
///
/// # Errors
/// No kernel is for this geometry.
pub fn forward(of: &Geometry, qkv: [Address; 3], out: Address, log_sums: Address) -> Result<Launch<Args>, Unfit> {
    let (size, queries) = of.padded()?;
    let shared = tiles(&[(queries + 2 * KEYS, size), (queries, KEYS)]);
    let grid = [of.time.div_ceil(queries), of.heads];
    Ok(of.launch(&format!("attention_{size}"), grid, shared, of.args(qkv, out, log_sums)))
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
    let (size, queries) = of.padded()?;
    let args = of.args(saved.qkv, saved.out, saved.log_sums);
    let args = Args { d_out: saved.d_out, dq, dk, dv, deltas, ..args };
    let of_queries = tiles(&[(2 * queries + 2 * KEYS, size), (queries, KEYS)]);
    let of_keys = tiles(&[(4 * KEYS, size), (2 * KEYS, KEYS)]);
    // A warp takes a position.
    let positions = [of.time.div_ceil(THREADS / 32), of.heads];
    Ok([
        of.launch("attention_deltas", positions, 0, args),
        of.launch(&format!("attention_queries_{size}"), [of.time.div_ceil(queries), of.heads], of_queries, args),
        of.launch(&format!("attention_keys_{size}"), [of.time.div_ceil(KEYS), of.kv_heads], of_keys, args),
    ])
}
