//! Runs the operation on a GPU: gathers keys and values there, and launches one attention for each of the two parts of
//! the queries.

use super::{Gathered, Geometry, OP};
use crate::attention::state::{chunk_of, not_on_gpu};
use crate::device::{Gpu, Operand};
use crate::gpu::attention::{SavedForward, backward, forward};
use crate::gpu::{copied, places, storage, tensor};
use crate::graph::storage::take;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor, bail};

impl Gathered {
    pub(super) fn forward_on_gpu(&self, [q, k, v]: [(&CudaStorage, &Layout); 3]) -> Result<CudaStorage> {
        not_on_gpu(self.state.mask.as_ref())?;
        let g = self.geometry(q.1.shape(), k.1.shape(), v.1.shape())?;
        let (gpu, dtype) = (Gpu::new(&q.0.device)?, candle_core::backend::BackendStorage::dtype(q.0));
        let q = copied(OP, q.0, q.1)?;
        let [k, v] = self.whole_on_gpu(g, [&copied(OP, k.0, k.1)?, &copied(OP, v.0, v.1)?])?;
        let of_part = |part: usize| -> Result<(Tensor, SavedForward)> {
            let own = chunk_of(&q, part)?;
            let operands = [Operand::of(OP, &own)?, Operand::of(OP, &k)?, Operand::of(OP, &v)?];
            let of = Geometry { queries: g.queries.part(part), ..g };
            let (out, kept) = forward(OP, &gpu, of, dtype, &operands, &self.state.firsts)?;
            Ok((tensor(out, own.shape()), kept))
        };
        let [(first, of_first), (second, of_second)] = [of_part(0)?, of_part(1)?];
        let _ = self.kept.set([of_first, of_second]);
        storage(take(&Tensor::cat(&[first, second], 1)?)?)
    }

    pub(super) fn backward_on_gpu(
        &self,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let g = self.geometry(q.shape(), k.shape(), v.shape())?;
        let (Some(kept), gpu, dtype) = (self.kept.get(), Gpu::of(OP, q)?, q.dtype()) else {
            bail!("{OP}: the backward ran before the forward");
        };
        let whole = self.whole_on_gpu(g, [k, v])?;
        let of_part = |part: usize| -> Result<[Tensor; 3]> {
            let [own, out, d_out] = [chunk_of(q, part)?, chunk_of(out, part)?, chunk_of(d_out, part)?];
            let operands = [Operand::of(OP, &own)?, Operand::of(OP, &whole[0])?, Operand::of(OP, &whole[1])?];
            let of = Geometry { queries: g.queries.part(part), ..g };
            let upstream = [&Operand::of(OP, &out)?, &Operand::of(OP, &d_out)?];
            let [dq, dk, dv] = backward(OP, &gpu, of, dtype, &operands, upstream, &kept[part])?;
            let wide = |of: CudaStorage, like: &Tensor| tensor(of, like.shape()).to_dtype(DType::F32);
            Ok([tensor(dq, own.shape()), wide(dk, &whole[0])?, wide(dv, &whole[1])?])
        };
        let [[dq, dk, dv], [later_dq, later_dk, later_dv]] = [of_part(0)?, of_part(1)?];
        let [dk, dv] = self.give_back_on_gpu(g, [&(dk + later_dk)?, &(dv + later_dv)?])?;
        let gradient =
            |of: &Tensor, own: Tensor| of.track_op().then(|| own.reshape(of.shape())?.to_dtype(dtype)).transpose();
        let dq = q.track_op().then(|| Tensor::cat(&[dq, later_dq], 1)).transpose()?;
        Ok([dq, gradient(k, dk)?, gradient(v, dv)?])
    }

    /// Gathers the keys and the values of whole sequences.
    fn whole_on_gpu(&self, g: Geometry, [k, v]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let (ranks, row) = (self.parts.len(), g.time * g.kv_heads * g.size / (2 * self.parts.len()));
        let all = self.group.gather_on_gpu(&Tensor::stack(&[k.detach(), v.detach()], 0)?)?()?;
        let all = all.reshape((ranks, 2, g.batch, 2, row))?.permute((1, 2, 0, 3, 4))?.contiguous()?;
        let all = all.reshape((2, g.batch, 2 * ranks, row))?;
        let mut order = vec![0; 2 * ranks];
        self.chunks().for_each(|(stored, place)| order[place] = stored);
        let all =
            all.index_select(&places(&order, all.device())?, 2)?.reshape((2, g.batch, g.time, g.kv_heads, g.size))?;
        Ok([all.get(0)?, all.get(1)?])
    }

    /// Sums the gradients of whole keys and values over the ranks, and returns the gradients of this rank's slice. Each
    /// rank rounds its gradients to the dtype of the keys before they are summed in f32.
    fn give_back_on_gpu(&self, g: Geometry, [dk, dv]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let (ranks, row) = (self.parts.len(), g.time * g.kv_heads * g.size / (2 * self.parts.len()));
        let all = Tensor::stack(&[dk, dv], 0)?.reshape((2, g.batch, 2 * ranks, row))?;
        let mut order = vec![0; 2 * ranks];
        self.chunks().for_each(|(stored, place)| order[stored] = place);
        let all = all.index_select(&places(&order, all.device())?, 2)?.reshape((2, g.batch, ranks, 2, row))?;
        let own = self.group.reduce_scatter_on_gpu(&all.permute((2, 0, 1, 3, 4))?.contiguous()?)?()?;
        Ok([own.get(0)?, own.get(1)?])
    }

    /// Returns each chunk's index in rank order and its index in the sequence.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize)> {
        let parts = self.parts.iter().flatten().enumerate();
        parts.map(|(stored, part)| (stored, part.start / part.len()))
    }
}
