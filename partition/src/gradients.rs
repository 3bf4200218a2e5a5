//! Gradients from a layer's backward to the reduced sum.

use candle_core::DType;
use candle_core::backprop::GradStore;
use half::{bf16, f16};
use zero_comm::{Buffer, Pending, ReduceOp, Scattered};
use zero_model::sink::{Gradients, PutOff};
use zero_model::{BuiltLayer, Parameter};
use zero_optim::{HalfFloat, read_half, rounded};
use zero_pipeline::{LayerId, Placement, SegmentId};

use crate::error::ZeroError;
use crate::ledger::Category;
use crate::zero::Zero;

/// The local gradient of one micro-batch while its backward runs.
pub(crate) struct Open {
    buffer: Vec<f32>,
    /// For each piece, whether a contribution arrived.
    written: Vec<bool>,
}

impl Open {
    /// Begins with a sum of which every piece has a part.
    pub(crate) fn with(buffer: Vec<f32>, pieces: usize) -> Self {
        Self { buffer, written: vec![true; pieces] }
    }
}

enum Reduction {
    All(Pending<Buffer>),
    Scatter(Pending<Scattered>),
}

/// A bucket whose reduction is under way.
pub(crate) struct PendingReduce {
    segments: Vec<SegmentId>,
    micro_batch: usize,
    started: Vec<Reduction>,
}

impl Zero {
    /// Runs the backward of a layer so that the gradients of its parameters land in their segments.
    ///
    /// `backward` returns candle's gradients and whatever the caller wants of them (the gradient of the input).
    ///
    /// # Errors
    /// What `backward` says, or [`ZeroError::NoGradient`].
    pub fn backward<T>(
        &mut self,
        layer: LayerId,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let (ids, sink) = self.sink(layer);
        #[cfg(feature = "cuda")]
        if self.model.device().is_cuda() {
            return self.backward_on_gpu(layer, (ids, sink), backward);
        }
        let (mut sink, result) = sink.capture(backward);
        let (mut store, value) = result?;
        let model = self.model.clone();
        let built = &model.layers()[layer];
        for &parameter in built.uses() {
            let parameter = &model.parameters()[parameter];
            let leaf = parameter.leaf();
            sink.absorb(&mut store, leaf)?;
            if !sink.is_written(leaf.id()) {
                if !self.options.ignore_unused {
                    return Err(no_gradient(parameter, built));
                }
                sink.zero(leaf.id())?;
            }
        }
        self.keep_open(ids, sink);
        Ok(value)
    }

    /// Places for the gradients of a layer's parameters: in the segments' open gradients, as far as they are added up.
    pub(crate) fn sink(&mut self, layer: LayerId) -> (Vec<SegmentId>, Gradients) {
        let ids = self.layout.shape().layers[layer].segments.clone();
        let mut sink = Gradients::default();
        for &id in &ids {
            let open = match self.segments[id].open.take() {
                Some(open) => open,
                None => self.open(id),
            };
            let pieces = &self.layout.segments()[id].pieces;
            let leaf = |p: usize| self.model.parameters()[p].leaf().id();
            let places = pieces.iter().zip(&open.written).map(|(p, &w)| (leaf(p.parameter), p.range.clone(), w));
            sink.add_buffer(open.buffer, places.collect::<Vec<_>>());
        }
        (ids, sink)
    }

    pub(crate) fn keep_open(&mut self, ids: Vec<SegmentId>, sink: Gradients) {
        let written: Vec<Vec<bool>> = ids
            .iter()
            .map(|&id| {
                let pieces = self.layout.segments()[id].pieces.iter();
                pieces.map(|p| sink.is_written(self.model.parameters()[p.parameter].leaf().id())).collect()
            })
            .collect();
        for ((id, buffer), written) in ids.into_iter().zip(sink.into_buffers()).zip(written) {
            self.segments[id].open = Some(Open { buffer, written });
        }
    }

    /// Runs the backward of a layer for the gradient of its input; what it takes for those of its parameters is kept until
    /// [`Zero::backward_weight`].
    ///
    /// # Errors
    /// As [`Zero::backward`].
    pub fn backward_input<T>(
        &mut self,
        layer: LayerId,
        micro_batch: usize,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let model = self.model.clone();
        let built = &model.layers()[layer];
        let leaves = || built.uses().iter().map(|&p| &model.parameters()[p]);
        let (mut later, result) = PutOff::new(leaves().map(|p| p.leaf().id())).capture(backward);
        let (mut store, value) = result?;
        for parameter in leaves() {
            later.absorb(&mut store, parameter.leaf())?;
            if !later.has(parameter.leaf().id()) && !self.options.ignore_unused {
                return Err(no_gradient(parameter, built));
            }
        }
        self.put_off.insert((layer, micro_batch), later);
        Ok(value)
    }

    /// Makes the gradients of a layer's parameters that were put off.
    ///
    /// # Errors
    /// If none were, or an operation says so.
    pub fn backward_weight(&mut self, layer: LayerId, micro_batch: usize) -> Result<(), ZeroError> {
        let later = self.put_off.remove(&(layer, micro_batch));
        let later = later.ok_or_else(|| ZeroError::internal("no weight gradients were put off"))?;
        let (ids, mut sink) = self.sink(layer);
        #[cfg(feature = "cuda")]
        if self.model.device().is_cuda() {
            let mut on_gpu = self.sink_on_gpu(layer)?;
            later.make_up(&mut on_gpu)?;
            self.bring(layer, on_gpu, &mut sink)?;
            self.keep_open(ids, sink);
            return Ok(());
        }
        later.make_up(&mut sink)?;
        let model = self.model.clone();
        for &parameter in model.layers()[layer].uses() {
            let leaf = model.parameters()[parameter].leaf().id();
            if !sink.is_written(leaf) {
                sink.zero(leaf)?;
            }
        }
        self.keep_open(ids, sink);
        Ok(())
    }

    fn open(&mut self, id: SegmentId) -> Open {
        let segment = &self.layout.segments()[id];
        self.ledger.add(Category::Staging, segment.elements(), 4);
        Open { buffer: self.pool.take(segment.elements()), written: vec![false; segment.pieces.len()] }
    }

    pub(crate) fn complete(&mut self, id: SegmentId) -> Result<Vec<f32>, ZeroError> {
        let open = self.segments[id].open.take().ok_or_else(|| ZeroError::internal("no gradient to take"))?;
        Ok(open.buffer)
    }

    /// Adds the micro-batch's complete gradient to this rank's accumulator.
    ///
    /// # Errors
    /// If there is none.
    pub fn accumulate(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let summand = self.complete(id)?;
        self.add_up(id, summand);
        Ok(())
    }

    /// Adds a summand, which is counted as staging, to the accumulator. It stays only where it opens a partial sum: in
    /// order of arrival the first one.
    fn add_up(&mut self, id: SegmentId, summand: Vec<f32>) {
        let (elements, mut merged) = (summand.len(), 0);
        let pool = &mut self.pool;
        self.segments[id].gradients.add(summand, |done| {
            merged += 1;
            pool.give(done);
        });
        self.ledger.remove(Category::Staging, elements, 4);
        match merged {
            0 => self.ledger.add(Category::Gradients, elements, 4),
            _ => self.ledger.remove(Category::Gradients, (merged - 1) * elements, 4),
        }
    }

    fn total(&mut self, id: SegmentId) -> Result<Vec<f32>, ZeroError> {
        let (pool, ledger) = (&mut self.pool, &mut self.ledger);
        let total = self.segments[id].gradients.take(|done| {
            ledger.remove(Category::Gradients, done.len(), 4);
            pool.give(done);
        });
        total.ok_or_else(|| ZeroError::internal("no gradient was accumulated"))
    }

    /// Starts reducing a bucket over the ranks: the micro-batch's gradients where they are sharded, the
    /// accumulated ones where they are replicated.
    ///
    /// # Errors
    /// If a gradient is not complete.
    pub fn reduce(&mut self, ids: &[SegmentId], micro_batch: usize) -> Result<(), ZeroError> {
        let mut started = Vec::with_capacity(ids.len());
        for &id in ids {
            let placements = self.layout.segments()[id].placements;
            let local = match placements.gradients {
                Placement::Sharded => self.complete(id)?,
                Placement::Replicated => self.total(id)?,
            };
            // A rank alone has all of it already.
            let is_shared = self.comm.size() > 1;
            let scatters = placements.optimizer == Placement::Sharded && self.options.reduce_scatter && is_shared;
            started.push(match scatters {
                false => {
                    let local = self.packed(local);
                    Reduction::All(self.comm.all_reduce(local, ReduceOp::Sum))
                }
                true => Reduction::Scatter(self.scatter(id, local)?),
            });
        }
        self.reducing.push_back(PendingReduce { segments: ids.to_vec(), micro_batch, started });
        Ok(())
    }

    fn scatter(&mut self, id: SegmentId, local: Vec<f32>) -> Result<Pending<Scattered>, ZeroError> {
        let counts = self.layout.segments()[id].counts();
        let own = counts[self.comm.rank()];
        self.ledger.add(Category::Staging, own, 4);
        let shard = match self.options.communication {
            DType::BF16 => Buffer::Bf16(vec![bf16::ZERO; own]),
            DType::F16 => Buffer::F16(vec![f16::ZERO; own]),
            _ => Buffer::F32(self.pool.take(own)),
        };
        let input = self.packed(local);
        Ok(self.comm.reduce_scatter(input, shard, &counts, ReduceOp::Sum))
    }

    /// Waits for a bucket's reduction and files the result.
    ///
    /// # Errors
    /// What the collective says.
    pub fn await_reduce(&mut self, ids: &[SegmentId], micro_batch: usize) -> Result<(), ZeroError> {
        let position = self.reducing.iter().position(|p| p.segments == ids && p.micro_batch == micro_batch);
        let pending = position
            .and_then(|position| self.reducing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such reduction was started"))?;
        for (id, reduction) in pending.segments.into_iter().zip(pending.started) {
            match reduction {
                Reduction::All(pending) => {
                    let full = self.unpacked(pending.wait()?)?;
                    self.file_all(id, full);
                }
                Reduction::Scatter(pending) => {
                    let Scattered { input, shard } = pending.wait()?;
                    let shard = self.unpacked(shard)?;
                    self.file(id, input, shard);
                }
            }
        }
        Ok(())
    }

    /// Files what an all-reduce brought: everything, or this rank's part where gradients are sharded.
    fn file_all(&mut self, id: SegmentId, full: Vec<f32>) {
        let segment = &self.layout.segments()[id];
        match segment.placements.gradients {
            Placement::Replicated => self.segments[id].reduced = Some(full),
            Placement::Sharded => {
                let own = segment.shard(self.comm.rank());
                if own.len() == full.len() {
                    return self.add_up(id, full);
                }
                let mut shard = self.pool.take(own.len());
                shard.copy_from_slice(&full[own]);
                self.ledger.add(Category::Staging, shard.len(), 4);
                self.ledger.remove(Category::Staging, full.len(), 4);
                self.pool.give(full);
                self.add_up(id, shard);
            }
        }
    }

    /// Files this rank's part of a sum; what it was made of, in the dtype in which it travelled, is used up.
    fn file(&mut self, id: SegmentId, input: Buffer, shard: Vec<f32>) {
        let segment = &self.layout.segments()[id];
        let (own, elements) = (segment.shard(self.comm.rank()), segment.elements());
        match segment.placements.gradients {
            Placement::Replicated => {
                self.ledger.remove(Category::Staging, shard.len(), 4);
                let mut full = match input {
                    Buffer::F32(input) => input,
                    _ => self.pool.take(elements),
                };
                full[own].copy_from_slice(&shard);
                self.pool.give(shard);
                self.segments[id].reduced = Some(full);
            }
            Placement::Sharded => {
                self.ledger.remove(Category::Staging, elements, 4);
                if let Buffer::F32(input) = input {
                    self.pool.give(input);
                }
                self.add_up(id, shard);
            }
        }
    }

    /// After the last micro-batch: sharded gradients become the reduced ones.
    pub(crate) fn settle(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        if self.segments[id].reduced.is_none() {
            self.segments[id].reduced = Some(self.total(id)?);
        }
        Ok(())
    }

    /// Takes back gradients after the update. Where even the parameters are sharded, memory counts more than the time to clear it:
    /// then gradients are not kept for the next step, so that the activations of its forward can have their memory.
    pub(crate) fn done_with(&mut self, id: SegmentId, gradients: Vec<f32>) {
        match self.layout.segments()[id].placements.parameters {
            Placement::Replicated => self.pool.give(gradients),
            Placement::Sharded => drop(gradients),
        }
    }

    /// The local gradient in the dtype in which gradients travel.
    fn packed(&mut self, values: Vec<f32>) -> Buffer {
        let packed = match self.options.communication {
            DType::BF16 => Buffer::Bf16(rounded(&values)),
            DType::F16 => Buffer::F16(rounded(&values)),
            _ => return Buffer::F32(values),
        };
        self.pool.give(values);
        packed
    }

    fn unpacked(&mut self, buffer: Buffer) -> Result<Vec<f32>, ZeroError> {
        match buffer {
            Buffer::F32(values) => Ok(values),
            Buffer::Bf16(rounded) => self.widened(&rounded),
            Buffer::F16(rounded) => self.widened(&rounded),
            _ => Err(ZeroError::internal("a collective gave back another dtype")),
        }
    }

    fn widened<H: HalfFloat>(&mut self, rounded: &[H]) -> Result<Vec<f32>, ZeroError> {
        let mut values = self.pool.take(rounded.len());
        read_half(rounded, &mut values)?;
        Ok(values)
    }
}

pub(crate) fn no_gradient(parameter: &Parameter, layer: &BuiltLayer) -> ZeroError {
    ZeroError::NoGradient { parameter: parameter.name().to_string(), layer: layer.name().to_string() }
}
