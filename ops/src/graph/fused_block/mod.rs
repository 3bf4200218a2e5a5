//! Runs several operations as one node of candle's graph.
//!
//! candle's backward allocates zeros for the gradient of every tensor and adds each contribution to them. These three
//! additional passes over memory take a twelfth of the time of a training step. A fused block records the operations of
//! this crate instead, and the backward of each operation passes its gradient directly to the next. Gradients are added
//! only where a tensor was used twice; on a GPU, the backward of a norm adds them in the same pass. Values that no
//! backward reads are freed at the end of the forward, and the memory that an operation saved is freed as soon as its
//! own backward is done.
//!
//! A fused block can pass the gradients of its parameters only to the [`sink`], so it requires a promised sink. Without
//! a promised sink, its operations are separate nodes of candle's graph.

use crate::flag::Replaced;
use crate::graph::addend::offer;
use crate::graph::apply::{added, untracked};
use crate::graph::op::Taped;
use crate::graph::operand::View;
use crate::graph::remade::Remakes;
use crate::graph::storage::take;
use crate::meta;
use crate::meta::footprint::Reads;
use crate::sink;
use crate::sink::deferred::until_exchange;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor, TensorId, bail};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError, Weak};

/// The operations of a fused block, in order.
#[derive(Default)]
struct Tape(Vec<Record>);

pub(super) struct Record {
    pub(super) operation: Operation,
    reads: Reads,
    pub(super) output: Tensor,
}

pub(crate) enum Operation {
    Of(Box<dyn Taped>, Vec<Tensor>),
    /// An operation whose output is freed at the end of the block's forward and restored in its backward.
    Remade(Arc<dyn Taped>, Tensor),
    Sum([Tensor; 2]),
    /// The same elements in a different shape.
    View(Tensor),
}

impl Operation {
    fn inputs(&self) -> &[Tensor] {
        match self {
            Self::Of(_, inputs) => inputs,
            Self::Remade(_, x) | Self::View(x) => std::slice::from_ref(x),
            Self::Sum(inputs) => inputs,
        }
    }
}

thread_local! {
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Runs `run` on `x`, as one node of candle's graph if possible. `run` may only apply operations of this crate.
pub fn fused_block(x: &Tensor, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if !x.track_op() || !sink::promised() || recording() {
        return run(x);
    }
    let (tape, output) = recorded(x, run);
    let (output, x) = (output?, x.clone());
    let values = tape.keep_what_is_read(&output)?;
    let recorded = Arc::new(Recorded { tape: Mutex::new(Some(tape)), x, output, node: OnceLock::new() });
    let node = recorded.x.apply_op1(FusedBlock { recorded: Arc::clone(&recorded), values: Mutex::new(values) })?;
    if meta::tracing() {
        take(&node)?;
    }
    let _ = recorded.node.set(node.id());
    ALIVE.lock().unwrap_or_else(PoisonError::into_inner).insert(node.id(), Arc::downgrade(&recorded));
    Ok(node)
}

/// Runs `run` without recording its operations or keeping anything for a backward.
pub(crate) fn unrecorded<T>(run: impl FnOnce() -> T) -> T {
    let _paused = Replaced::with(&TAPE, None);
    untracked(run)
}

/// Runs `run` on `x` and then its backward from the gradient `dy` of the output. Returns the gradient of `x`, if it
/// has one. `run` may only apply operations of this crate.
pub(crate) fn run_backward(
    x: &Tensor,
    dy: Tensor,
    run: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let (tape, output) = recorded(x, run);
    // No values were freed, so nothing is restored.
    tape.backward(x, &output?, dy, Remakes::default())
}

/// Runs `run` on `x` and records its operations.
fn recorded(x: &Tensor, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> (Tape, Result<Tensor>) {
    let (tape, output) = Replaced::during(&TAPE, Some(Tape::default()), || run(x));
    (tape.unwrap_or_default(), output)
}

impl Tape {
    /// Frees the values that no backward reads. Returns the values of `output` so that they can be moved elsewhere, or
    /// `None` if a backward reads them.
    fn keep_what_is_read(&self, output: &Tensor) -> Result<Option<Storage>> {
        // A view shares the values of its source.
        let mut views: HashMap<TensorId, TensorId> = HashMap::new();
        let mut read: HashSet<TensorId> = HashSet::new();
        let of = |views: &HashMap<TensorId, TensorId>, tensor: &Tensor| {
            views.get(&tensor.id()).copied().unwrap_or_else(|| tensor.id())
        };
        let mut remade: HashSet<TensorId> = HashSet::new();
        for Record { operation, reads, output } in &self.0 {
            match operation {
                Operation::View(x) => drop(views.insert(output.id(), of(&views, x))),
                Operation::Remade(_, x) => {
                    read.insert(of(&views, x));
                    remade.insert(output.id());
                }
                _ => {}
            }
            let inputs = operation.inputs().iter().zip(reads.inputs);
            read.extend(inputs.filter(|(_, reads)| *reads).map(|(input, _)| of(&views, input)));
            if reads.output {
                read.insert(of(&views, output));
            }
        }
        let result = of(&views, output);
        read.retain(|id| !remade.contains(id) || *id == result);
        let mut values = None;
        for Record { operation, output, .. } in &self.0 {
            if read.contains(&output.id()) || matches!(operation, Operation::View(_)) {
                continue;
            }
            if output.id() != result {
                meta::let_go(output);
                take(output)?;
            } else if meta::tracing() {
                values = Some(Storage::Cpu(meta::nothing(output.dtype())?));
            } else {
                values = Some(take(output)?);
            }
        }
        if values.is_none() && meta::tracing() {
            bail!("{OP}: the memory of an output that is kept twice is not counted");
        }
        Ok(values)
    }
}

/// Runs the backward of the fused block whose node is `output`, without candle. Returns the block's input and its
/// gradient, or `None` if `output` does not come from a fused block.
///
/// candle would add the gradients of output and input to zeros, which takes a fifth of the time of a bf16 training
/// step.
pub(crate) fn backward(output: &Tensor, gradient: &Tensor) -> Result<Option<(Tensor, Option<Tensor>)>> {
    let recorded = ALIVE.lock().unwrap_or_else(PoisonError::into_inner).get(&output.id()).and_then(Weak::upgrade);
    recorded.map(|block| Ok((block.x.clone(), block.backward(gradient)?))).transpose()
}

/// Takes the values of a fused block's output, which its backward does not need. Returns `None` if `output` does not
/// come from a fused block.
pub fn take_values(output: &Tensor) -> Result<Option<Storage>> {
    let is_block = ALIVE.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&output.id());
    is_block.then(|| take(output)).transpose()
}

pub(crate) fn recording() -> bool {
    TAPE.with_borrow(Option::is_some)
}

/// Records an operation if a fused block is running.
pub(crate) fn record(operation: Operation, reads: Reads, output: &Tensor) {
    TAPE.with_borrow_mut(|tape| {
        if let Some(Tape(records)) = tape {
            let reads = reads.with(operation.inputs());
            records.push(Record { operation, reads, output: output.clone() });
        }
    });
}

/// The record of a fused block that its backward needs.
struct Recorded {
    /// Present until the backward takes it.
    tape: Mutex<Option<Tape>>,
    x: Tensor,
    output: Tensor,
    /// The block's node in candle's graph.
    node: OnceLock<TensorId>,
}

/// The fused blocks that a graph still holds, keyed by node, since a tensor does not expose the operation that made it.
static ALIVE: LazyLock<Mutex<HashMap<TensorId, Weak<Recorded>>>> = LazyLock::new(Mutex::default);

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(node) = self.node.get() {
            ALIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
        }
    }
}

impl Recorded {
    /// Runs the backward. Returns the gradient of the input, if it has one.
    fn backward(&self, dy: &Tensor) -> Result<Option<Tensor>> {
        let tape = self.tape.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(tape) = tape else { bail!("{OP}: the backward ran twice") };
        let remakes = Remakes::of(&tape.0);
        tape.backward(&self.x, &self.output, dy.clone(), remakes)
    }
}

impl Tape {
    /// Runs the backward from the gradient of `output`. Returns the gradient of `x`, if it has one.
    fn backward(self, x: &Tensor, output: &Tensor, dy: Tensor, mut remakes: Remakes) -> Result<Option<Tensor>> {
        let Self(records) = self;
        let mut gradients = Gradients::new(x, &records);
        gradients.add(output, Some(dy))?;
        for Record { operation, reads, output } in records.into_iter().rev() {
            let Some(dy) = gradients.of.remove(&output.id()) else { continue };
            let exchanged = if reads.for_weight { remakes.start(&operation.inputs()[0])? } else { None };
            let Some(exchanged) = exchanged else {
                remakes.make(&read_of(&operation, reads))?;
                gradients.pass_through(operation, &output, dy, &mut remakes)?;
                continue;
            };
            let (passed, waiting) = until_exchange(|| gradients.pass_through(operation, &output, dy, &mut remakes));
            passed?;
            remakes.wait(exchanged, waiting);
        }
        Ok(gradients.of.remove(&x.id()))
    }
}

/// Returns those inputs of an operation whose values its backward reads.
fn read_of(operation: &Operation, reads: Reads) -> Vec<Tensor> {
    operation.inputs().iter().zip(reads.inputs).filter(|(_, reads)| *reads).map(|(input, _)| input.clone()).collect()
}

/// The node of a fused block in candle's graph.
struct FusedBlock {
    recorded: Arc<Recorded>,
    /// The values of the output, unless a backward reads them.
    values: Mutex<Option<Storage>>,
}

const OP: &str = "fused-block";

impl FusedBlock {
    fn values(&self) -> Option<Storage> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl CustomOp1 for FusedBlock {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let output = &self.recorded.output;
        let values = match self.values() {
            Some(Storage::Cpu(values)) => values,
            _ => View::of(OP, &output.storage_and_layout())?.into_storage(),
        };
        Ok((values, output.shape().clone()))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let output = &self.recorded.output;
        let values = match self.values() {
            Some(values) => values,
            None => take(&output.copy()?)?,
        };
        match values {
            Storage::Cuda(values) => Ok((values, output.shape().clone())),
            _ => bail!("{OP}: the output on the GPU has lost its values"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        self.recorded.backward(dy)
    }
}

/// Gradients of the tensors whose operations have not run their backward yet.
struct Gradients {
    of: HashMap<TensorId, Tensor>,
    inside: HashSet<TensorId>,
}

impl Gradients {
    fn new(x: &Tensor, records: &[Record]) -> Self {
        let inside = records.iter().map(|record| record.output.id()).chain([x.id()]).collect();
        Self { of: HashMap::new(), inside }
    }

    /// Runs a backward that may take the existing gradient of `x` and return the sum.
    fn offered<R>(&mut self, x: &Tensor, backward: impl FnOnce() -> Result<R>) -> Result<R> {
        let (result, left) = offer(x, self.of.remove(&x.id()), backward);
        if let Some(left) = left {
            self.of.insert(x.id(), left);
        }
        result
    }

    /// Runs the backward of an operation from the gradient of its output.
    fn pass_through(&mut self, operation: Operation, output: &Tensor, dy: Tensor, remakes: &mut Remakes) -> Result<()> {
        match operation {
            Operation::Of(op, inputs) => {
                let all: Vec<&Tensor> = inputs.iter().collect();
                let gradients = self.offered(all[0], || op.gradients(&all, output, &dy))?;
                all.into_iter().zip(gradients).try_for_each(|(input, gradient)| self.add(input, gradient))
            }
            Operation::Remade(op, x) => self.add(&x, remakes.backward(&*op, [&x, output, &dy])?),
            Operation::Sum([x, y]) => {
                self.add(&x, Some(dy.clone()))?;
                self.add(&y, Some(dy))
            }
            Operation::View(x) => {
                let dx = dy.reshape(x.shape())?;
                self.add(&x, Some(dx))
            }
        }
    }

    fn add(&mut self, tensor: &Tensor, gradient: Option<Tensor>) -> Result<()> {
        let Some(gradient) = gradient else { return Ok(()) };
        if !self.inside.contains(&tensor.id()) {
            bail!("{OP}: a parameter of shape {:?} has no gradient buffer", tensor.shape());
        }
        let gradient = match self.of.remove(&tensor.id()) {
            None => gradient,
            Some(before) => added(&before, &gradient, false)?,
        };
        self.of.insert(tensor.id(), gradient);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
