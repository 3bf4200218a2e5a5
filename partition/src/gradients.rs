//! Gradients, from a layer's backward to the reduced sum.

use candle_core::TensorId;
use candle_core::backprop::GradStore;
use zero_comm::{Buffer, Dtype, Pending, ReduceOp, Scattered};
use zero_model::sink::{DeferredGradients, FlatBuffer, Gradients};
use zero_model::{BuiltLayer, Parameter, ParameterId};
use zero_pipeline::{LayerId, Placement, SegmentId};

use crate::error::ZeroError;
use crate::gpu::{self, Arriving};
use crate::ledger::Category;
use crate::zero::ShardedState;

/// The local gradient of one micro-batch, open while layers contribute to it.
pub(crate) struct Open {
    buffer: FlatBuffer,
    /// A download from the GPU in flight, which replaces the buffer.
    arriving: Option<Arriving>,
    /// Whether each piece has received a contribution.
    written: Vec<bool>,
}

/// An instruction that waits for gradients from the GPU. It runs after the next layer's backward has been launched.
pub(crate) enum Late {
    /// A pending [`ShardedState::accumulate`].
    Accumulate(SegmentId, Box<Open>),
    /// A pending [`ShardedState::reduce`].
    Reduce(Vec<SegmentId>, usize, Vec<Option<Open>>),
}

impl Open {
    /// Creates a gradient from a partial sum that covers every piece.
    pub(crate) fn with(buffer: FlatBuffer, pieces: usize) -> Self {
        Self::new(buffer, vec![true; pieces])
    }

    /// Returns the buffer, and whether each piece has received a contribution.
    pub(crate) fn into_parts(self) -> (FlatBuffer, Vec<bool>) {
        (self.buffer, self.written)
    }

    /// Returns whether a piece has received a contribution.
    pub(crate) fn is_written(&self, piece: usize) -> bool {
        self.written.get(piece).copied().unwrap_or(false)
    }

    pub(crate) fn new(buffer: FlatBuffer, written: Vec<bool>) -> Self {
        Self { buffer, arriving: None, written }
    }

    /// Creates a gradient from a download in flight that covers every piece.
    pub(crate) fn arriving(values: Arriving, pieces: usize) -> Self {
        Self { buffer: FlatBuffer::default(), arriving: Some(values), written: vec![true; pieces] }
    }
}

enum Reduction {
    /// With one rank, the local gradient is the sum.
    Alone(FlatBuffer),
    All(Pending<Buffer>),
    Scatter(Pending<Scattered>),
}

/// A bucket whose reduction is in flight.
pub(crate) struct PendingReduce {
    segments: Vec<SegmentId>,
    micro_batch: usize,
    started: Vec<Reduction>,
}

impl ShardedState {
    /// Runs the backward of a layer and stores the gradients of its parameters in their segments.
    ///
    /// `backward` returns candle's gradients and a value for the caller (the gradient of the input).
    ///
    /// # Errors
    /// Returns the error of `backward`, or [`ZeroError::NoGradient`] for a parameter without a gradient.
    pub fn backward<T>(
        &mut self,
        layer: LayerId,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let (mut sink, result) = self.sink_of(layer)?.capture(backward);
        let (mut store, value) = result?;
        let model = self.model.clone();
        let built = &model.layers()[layer];
        for &parameter in built.uses() {
            let parameter = &model.parameters()[parameter];
            sink.absorb(&mut store, parameter.leaf())?;
            if !self.is_written(layer, parameter, &sink) {
                if !self.options.ignore_unused {
                    return Err(no_gradient(parameter, built));
                }
                sink.zero(parameter.leaf().id())?;
            }
        }
        self.store(layer, sink)?;
        Ok(value)
    }

    /// Creates the sink of a layer's backward, on the device that computes the gradients.
    fn sink_of(&mut self, layer: LayerId) -> Result<Gradients, ZeroError> {
        if self.brings_gradients() {
            return self.sink_on_gpu(layer);
        }
        let layout = self.layout.clone();
        self.sink(&layout.shape().layers[layer].segments)
    }

    /// Stores what a backward has written into the sink of [`ShardedState::sink_of`].
    fn store(&mut self, layer: LayerId, sink: Gradients) -> Result<(), ZeroError> {
        if self.brings_gradients() {
            return self.bring(layer, sink);
        }
        let layout = self.layout.clone();
        self.keep_open(&layout.shape().layers[layer].segments, sink);
        Ok(())
    }

    /// Creates a sink that adds to the open gradients of segments.
    pub(crate) fn sink(&mut self, ids: &[SegmentId]) -> Result<Gradients, ZeroError> {
        let mut sink = Gradients::default();
        for &id in ids {
            let open = self.opened(id)?;
            let pieces = &self.layout.segments()[id].pieces;
            let places = pieces.iter().zip(&open.written).map(|(p, &w)| (self.leaf(p.parameter), p.range.clone(), w));
            sink.add_buffer(open.buffer, places.collect::<Vec<_>>());
        }
        Ok(sink)
    }

    pub(crate) fn leaf(&self, parameter: ParameterId) -> TensorId {
        self.model.parameters()[parameter].leaf().id()
    }

    pub(crate) fn keep_open(&mut self, ids: &[SegmentId], sink: Gradients) {
        let layout = self.layout.clone();
        let of_segment = |&id: &SegmentId| {
            let pieces = layout.segments()[id].pieces.iter();
            pieces.map(|p| sink.is_written(self.leaf(p.parameter))).collect()
        };
        let written: Vec<Vec<bool>> = ids.iter().map(of_segment).collect();
        for ((&id, buffer), written) in ids.iter().zip(sink.into_flat()).zip(written) {
            self.segments[id].open = Some(Open::new(buffer, written));
        }
    }

    /// Runs the backward of a layer for the gradient of its input. Defers the gradients of its parameters to
    /// [`ShardedState::backward_weight`].
    ///
    /// # Errors
    /// See [`ShardedState::backward`].
    pub fn backward_input<T>(
        &mut self,
        layer: LayerId,
        micro_batch: usize,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let model = self.model.clone();
        let built = &model.layers()[layer];
        let leaves = || built.uses().iter().map(|&p| &model.parameters()[p]);
        let (mut later, result) = DeferredGradients::new(leaves().map(|p| p.leaf().id())).capture(backward);
        let (mut store, value) = result?;
        for parameter in leaves() {
            later.absorb(&mut store, parameter.leaf())?;
            if !later.has(parameter.leaf().id()) && !self.options.ignore_unused {
                return Err(no_gradient(parameter, built));
            }
        }
        self.deferred.insert((layer, micro_batch), later);
        Ok(value)
    }

    /// Computes the deferred gradients of a layer's parameters.
    ///
    /// # Errors
    /// Fails if no gradients were deferred, or if an operation fails.
    pub fn backward_weight(&mut self, layer: LayerId, micro_batch: usize) -> Result<(), ZeroError> {
        let later = self.deferred.remove(&(layer, micro_batch));
        let later = later.ok_or_else(|| ZeroError::internal("no weight gradients were put off"))?;
        let mut sink = self.sink_of(layer)?;
        later.flush(&mut sink)?;
        let model = self.model.clone();
        for &parameter in model.layers()[layer].uses() {
            let parameter = &model.parameters()[parameter];
            if !self.is_written(layer, parameter, &sink) {
                sink.zero(parameter.leaf().id())?;
            }
        }
        self.store(layer, sink)
    }

    /// Returns whether a parameter has a gradient: in the sink, or in an open buffer on the host to which the gradients
    /// of a GPU are added.
    fn is_written(&self, layer: LayerId, parameter: &Parameter, sink: &Gradients) -> bool {
        let leaf = parameter.leaf().id();
        sink.is_written(leaf)
            || self.layout.shape().layers[layer].segments.iter().any(|&id| {
                let place = self.layout.segments()[id].pieces.iter().position(|p| self.leaf(p.parameter) == leaf);
                place.zip(self.segments[id].open.as_ref()).is_some_and(|(place, open)| open.is_written(place))
            })
    }

    /// Takes a segment's partial gradient of the current micro-batch, opening a new one if necessary.
    pub(crate) fn opened(&mut self, id: SegmentId) -> Result<Open, ZeroError> {
        match self.segments[id].open.take() {
            Some(open) => self.arrived(open),
            None => self.open(id),
        }
    }

    fn open(&mut self, id: SegmentId) -> Result<Open, ZeroError> {
        let segment = &self.layout.segments()[id];
        let (elements, written) = (segment.elements(), vec![false; segment.pieces.len()]);
        self.ledger.add(Category::Staging, elements, 4);
        Ok(Open::new(self.room(id, elements)?, written))
    }

    pub(crate) fn complete(&mut self, id: SegmentId) -> Result<FlatBuffer, ZeroError> {
        let open = self.take_open(id)?;
        Ok(self.arrived(open)?.buffer)
    }

    fn take_open(&mut self, id: SegmentId) -> Result<Open, ZeroError> {
        self.segments[id].open.take().ok_or_else(|| ZeroError::internal("no gradient to take"))
    }

    /// Waits for the gradient to arrive from the GPU, if it is in flight.
    fn arrived(&mut self, open: Open) -> Result<Open, ZeroError> {
        let Open { arriving: Some(arriving), written, .. } = open else { return Ok(open) };
        let mut values = self.pool.take(arriving.len());
        self.gpu_mut()?.await_download(arriving, &mut values)?;
        Ok(Open::new(FlatBuffer::Host(values), written))
    }

    /// Runs the instructions that wait for gradients from the GPU.
    ///
    /// # Errors
    /// Returns the error of the GPU or of one of those instructions.
    pub(crate) fn catch_up(&mut self) -> Result<(), ZeroError> {
        while let Some(late) = self.late.pop_front() {
            match late {
                Late::Accumulate(id, open) => {
                    let summand = self.arrived(*open)?.buffer;
                    self.add_up(id, summand)?;
                }
                Late::Reduce(ids, micro_batch, opens) => self.start_reduce(&ids, micro_batch, opens)?,
            }
        }
        Ok(())
    }

    /// Adds the micro-batch's complete gradient to this rank's accumulator.
    ///
    /// # Errors
    /// Fails if the segment has no gradient.
    pub fn accumulate(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let open = self.take_open(id)?;
        self.late.push_back(Late::Accumulate(id, Box::new(open)));
        self.unless_on_their_way()
    }

    /// Runs the pending instructions immediately, unless gradients come from a GPU. Those run once the next layer's
    /// backward has been launched.
    fn unless_on_their_way(&mut self) -> Result<(), ZeroError> {
        if self.brings_gradients() { Ok(()) } else { self.catch_up() }
    }

    /// Adds a summand, which the ledger counts as staging, to the accumulator. The summand's memory moves to the
    /// gradients only if it opens a partial sum; in order of arrival, only the first summand does.
    fn add_up(&mut self, id: SegmentId, summand: FlatBuffer) -> Result<(), ZeroError> {
        let (elements, mut merged) = (summand.len(), 0);
        let pool = &mut self.pool;
        self.segments[id].gradients.add(summand, |done| {
            merged += 1;
            pool.give_back(done);
        })?;
        self.ledger.remove(Category::Staging, elements, 4);
        match merged {
            0 => self.ledger.add(Category::Gradients, elements, 4),
            _ => self.ledger.remove(Category::Gradients, (merged - 1) * elements, 4),
        }
        Ok(())
    }

    fn total(&mut self, id: SegmentId) -> Result<FlatBuffer, ZeroError> {
        let (pool, ledger) = (&mut self.pool, &mut self.ledger);
        let total = self.segments[id].gradients.take(|done| {
            ledger.remove(Category::Gradients, done.len(), 4);
            pool.give_back(done);
        })?;
        total.ok_or_else(|| ZeroError::internal("no gradient was accumulated"))
    }

    /// Starts reducing a bucket over the ranks: the micro-batch's gradients if they are sharded, or the accumulated
    /// ones if they are replicated.
    ///
    /// # Errors
    /// Fails if a gradient is incomplete.
    pub fn reduce(&mut self, ids: &[SegmentId], micro_batch: usize) -> Result<(), ZeroError> {
        let mut opens = Vec::with_capacity(ids.len());
        for &id in ids {
            let is_sharded = self.layout.segments()[id].placements.gradients == Placement::Sharded;
            opens.push(if is_sharded { Some(self.take_open(id)?) } else { None });
        }
        self.late.push_back(Late::Reduce(ids.to_vec(), micro_batch, opens));
        self.unless_on_their_way()
    }

    fn start_reduce(
        &mut self,
        ids: &[SegmentId],
        micro_batch: usize,
        opens: Vec<Option<Open>>,
    ) -> Result<(), ZeroError> {
        let mut started = Vec::with_capacity(ids.len());
        for (&id, open) in ids.iter().zip(opens) {
            let placements = self.layout.segments()[id].placements;
            let local = match open {
                Some(open) => self.arrived(open)?.buffer,
                None => self.total(id)?,
            };
            // With one rank, the local gradient is the sum.
            let is_shared = self.comm.size() > 1;
            let scatters = placements.optimizer == Placement::Sharded && self.options.reduce_scatter && is_shared;
            started.push(match scatters {
                false if !is_shared && local.host().is_none() => {
                    // Rounded to the communication dtype, when it is read.
                    Reduction::Alone(gpu::travelled(local, self.options.communication)?)
                }
                false => {
                    let local = self.packed(local)?;
                    Reduction::All(self.comm.all_reduce(local, ReduceOp::Sum))
                }
                true => Reduction::Scatter(self.scatter(id, local)?),
            });
        }
        self.reducing.push_back(PendingReduce { segments: ids.to_vec(), micro_batch, started });
        Ok(())
    }

    fn scatter(&mut self, id: SegmentId, local: FlatBuffer) -> Result<Pending<Scattered>, ZeroError> {
        let counts = self.layout.segments()[id].counts();
        let own = counts[self.comm.rank()];
        self.ledger.add(Category::Staging, own, 4);
        let shard = self.room_for_packed(id, own)?;
        let input = self.packed(local)?;
        Ok(self.comm.reduce_scatter(input, shard, &counts, ReduceOp::Sum))
    }

    /// Waits for a bucket's reduction and stores the result.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_reduce(&mut self, ids: &[SegmentId], micro_batch: usize) -> Result<(), ZeroError> {
        self.catch_up()?;
        let position = self.reducing.iter().position(|p| p.segments == ids && p.micro_batch == micro_batch);
        let pending = position
            .and_then(|position| self.reducing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such reduction was started"))?;
        for (id, reduction) in pending.segments.into_iter().zip(pending.started) {
            match reduction {
                Reduction::Alone(full) => self.file_all(id, full)?,
                Reduction::All(pending) => {
                    let full = self.unpacked(id, pending.wait()?)?;
                    self.file_all(id, full)?;
                }
                Reduction::Scatter(pending) => {
                    let Scattered { input, shard } = pending.wait()?;
                    let shard = self.unpacked(id, shard)?;
                    self.file(id, input, shard)?;
                }
            }
        }
        Ok(())
    }

    /// Stores the result of an all-reduce: the whole segment, or this rank's part if gradients are sharded.
    fn file_all(&mut self, id: SegmentId, full: FlatBuffer) -> Result<(), ZeroError> {
        let segment = &self.layout.segments()[id];
        match segment.placements.gradients {
            Placement::Replicated => {
                self.segments[id].reduced = Some(full);
                Ok(())
            }
            Placement::Sharded => {
                let own = segment.shard(self.comm.rank());
                if own.len() == full.len() {
                    return self.add_up(id, full);
                }
                let mut shard = self.room(id, own.len())?;
                shard.copy(0, &full, own)?;
                self.ledger.add(Category::Staging, shard.len(), 4);
                self.ledger.remove(Category::Staging, full.len(), 4);
                self.pool.give_back(full);
                self.add_up(id, shard)
            }
        }
    }

    /// Stores this rank's part of a reduce-scatter. Reuses the memory of the input, which is in the communication
    /// dtype.
    fn file(&mut self, id: SegmentId, input: Buffer, shard: FlatBuffer) -> Result<(), ZeroError> {
        let segment = &self.layout.segments()[id];
        let (own, elements) = (segment.shard(self.comm.rank()), segment.elements());
        match segment.placements.gradients {
            Placement::Replicated => {
                self.ledger.remove(Category::Staging, shard.len(), 4);
                let mut full = match input {
                    Buffer::F32(input) if !self.is_resident(id) => FlatBuffer::Host(input),
                    Buffer::Device(_) if input.dtype() == Dtype::F32 => self.unpacked(id, input)?,
                    _ => self.room(id, elements)?,
                };
                full.copy(own.start, &shard, 0..own.len())?;
                self.pool.give_back(shard);
                self.segments[id].reduced = Some(full);
                Ok(())
            }
            Placement::Sharded => {
                self.ledger.remove(Category::Staging, elements, 4);
                if let Buffer::F32(input) = input {
                    self.pool.give(input);
                }
                self.add_up(id, shard)
            }
        }
    }

    /// Makes the accumulated sharded gradients the reduced ones, after the last micro-batch.
    pub(crate) fn settle(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        self.catch_up()?;
        if self.segments[id].reduced.is_none() {
            self.segments[id].reduced = Some(self.total(id)?);
        }
        Ok(())
    }

    /// Recycles gradients after the update. If parameters are sharded, memory matters more than the time to clear it,
    /// so the gradients are freed and the activations of the next forward can use their memory.
    pub(crate) fn done_with(&mut self, id: SegmentId, gradients: FlatBuffer) {
        match self.layout.segments()[id].placements.parameters {
            Placement::Replicated => self.pool.give_back(gradients),
            Placement::Sharded => drop(gradients),
        }
    }
}

fn no_gradient(parameter: &Parameter, layer: &BuiltLayer) -> ZeroError {
    ZeroError::NoGradient { parameter: parameter.name().to_string(), layer: layer.name().to_string() }
}
