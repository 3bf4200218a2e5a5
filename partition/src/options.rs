//! Options of a rank's sharded state, and the bytes per element that they imply.

use std::ops::Range;
use std::path::PathBuf;

use candle_core::DType;
use zero_comm::even_counts;
use zero_model::Parameter;
use zero_optim::norm::Clipping;
use zero_optim::{Average, Optimizer};

use crate::accumulator::Order;

/// Options of a rank's sharded state.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptions {
    /// The optimizers and their hyperparameters. Each segment has the index of its optimizer. A schedule-free optimizer
    /// must be the only one.
    pub optimizers: Vec<Optimizer>,
    /// How gradients are clipped by the norms of groups. [`Tuning::clipping`](zero_model::Tuning::clipping) counts
    /// these clippings from 1. Not supported on a GPU.
    pub clippings: Vec<Clipping>,
    /// The moving average of the weights, if there is one.
    pub average: Option<Average>,
    /// The outer optimizer of replicates that train independently; `None` if all data-parallel ranks sum their
    /// gradients. Not supported with state on a disk or on a GPU, or for 16-bit parameters without an f32 copy.
    pub outer: Option<OuterOptions>,
    /// Dtype of the optimizer's states: f32 or bf16. The average is f32.
    pub state_dtype: DType,
    /// Dtype in which gradients are kept until the update and summed over micro-batches: f32 or bf16. Bf16 is not
    /// supported on a disk, on a GPU, or for optimizers that update whole parameters.
    pub gradient_dtype: DType,
    /// Whether 16-bit parameters have an f32 copy, which the optimizer updates.
    pub has_master: bool,
    /// Seed of random rounding of bf16 parameters without an f32 copy; `None` rounds to nearest.
    pub stochastic_rounding: Option<u64>,
    /// The order of the sum over this rank's micro-batches.
    pub order: Order,
    /// Whether to sum the squared norms of the gradients of each micro-batch.
    pub sums_micro_batches: bool,
    /// Dtype of gradients in collectives: f32, bf16 or f16.
    pub communication: DType,
    /// Which values collectives send as codes of 8 or 4 bits.
    pub coded: Coded,
    /// Whether sharded gradients use reduce-scatter. With `reduce_scatter: false` they use all-reduce, and each rank
    /// keeps only its shard.
    pub reduce_scatter: bool,
    /// Whether weight decay also applies to biases and norms (parameters of fewer than two dimensions).
    pub decay_all: bool,
    /// Whether a parameter without a gradient gets a zero gradient instead of causing an error.
    pub ignore_unused: bool,
    /// Location and I/O options of offloaded state.
    pub disk: DiskOptions,
    /// State kept on the GPU that runs the layers.
    pub on_gpu: OnGpu,
}

impl ZeroOptions {
    /// Returns the names of the values that are kept for an element in addition to the parameter: the average of the
    /// weights, then the states of all optimizers.
    #[must_use]
    pub fn states(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = self.average.map(|_| Average::STATE).into_iter().collect();
        for name in self.optimizers.iter().flat_map(Optimizer::states) {
            if !names.contains(name) {
                names.push(name);
            }
        }
        names
    }

    /// Returns the names of the values in `ZeroOptions::states` that a parameter has: the average of the weights, then
    /// the states of its optimizer. A matrix that is updated as a whole may lack the last states.
    #[must_use]
    pub fn states_of(&self, parameter: &Parameter) -> Vec<&'static str> {
        let states = self.optimizer(parameter.tuning().optimizer).states();
        let held = parameter.matrix().map_or(states.len(), |matrix| matrix.values.len());
        self.average.map(|_| Average::STATE).into_iter().chain(states.iter().copied().take(held)).collect()
    }

    /// Returns the optimizer with this index.
    pub(crate) fn optimizer(&self, index: usize) -> &Optimizer {
        &self.optimizers[index]
    }

    /// Returns the bytes per element of each kind of value. `parameter` is the width of the working dtype.
    #[must_use]
    pub fn widths(&self, parameter: usize) -> Widths {
        Widths {
            parameter,
            gradient: self.gradient_dtype.size_in_bytes(),
            master: if self.has_master && parameter < 4 { 4 } else { 0 },
            average: if self.average.is_some() { 4 } else { 0 },
            state: self.state_dtype.size_in_bytes(),
            states: self.optimizers.iter().map(|optimizer| optimizer.states().len()).collect(),
            kept: if self.is_schedule_free() { 4 } else { 0 },
            outer: self.outer.map(|outer| outer.share),
        }
    }

    /// Returns how many states precede those of the optimizer: 1 if there is an average of the weights, else 0.
    pub(crate) fn averages(&self) -> usize {
        usize::from(self.average.is_some())
    }

    /// Returns whether the first state gives averages that can replace the weights.
    #[must_use]
    pub fn has_averages(&self) -> bool {
        self.average.is_some() || self.is_schedule_free()
    }

    /// Returns whether the optimizer is schedule-free. Its averages are then the weights plus the first state.
    #[must_use]
    pub fn is_schedule_free(&self) -> bool {
        matches!(self.optimizers[..], [Optimizer::ScheduleFree(_)])
    }

    /// Returns the weight of the new parameters in the moving average after this optimizer step; 0 without an average.
    pub(crate) fn average_weight(&self, step: u64) -> f32 {
        self.average.map_or(0.0, |average| average.weight(step))
    }

    /// Returns whether weight decay applies to a parameter.
    pub(crate) fn decays(&self, parameter: &Parameter) -> bool {
        self.decay_all || parameter.tuning().weight_decay.is_some() || parameter.shape().rank() >= 2
    }
}

/// Bytes per element, by kind of value, on the rank that updates the element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Widths {
    /// The parameter in the working dtype, as layers read it.
    pub parameter: usize,
    /// The gradient.
    pub gradient: usize,
    /// The f32 copy that the optimizer updates; 0 if there is none.
    pub master: usize,
    /// The average of the weights; 0 if there is none.
    pub average: usize,
    /// One state of an optimizer.
    pub state: usize,
    /// Number of states of each optimizer.
    pub states: Vec<usize>,
    /// The copy of the weights that is kept while the averages of a schedule-free optimizer replace them; 0 for other
    /// optimizers. The copy is on the disk if the optimizer's states are.
    pub kept: usize,
    /// The outer optimizer's state, which replicates that train independently divide among themselves; `None` without
    /// one.
    pub outer: Option<OuterShare>,
}

/// Which values collectives send as codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Coded {
    /// Trainable sharded parameters, in gathers: `zero_quantized_weights`.
    pub weights: bool,
    /// Frozen sharded parameters, in gathers: `zero_quantized_weights` or `zero_quantized_nontrainable_weights`.
    /// Parameters that are stored in 8 or 4 bits are sent unchanged.
    pub frozen_weights: bool,
    /// Sharded gradients, in reductions: `zero_quantized_gradients`.
    pub gradients: bool,
}

/// Folders and I/O options of the swap files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskOptions {
    /// Folder of the file with optimizer state, masters and gradients. Required if any of them is offloaded.
    pub optimizer: Option<PathBuf>,
    /// Folder of the file with parameters. Required if parameters are offloaded.
    pub parameters: Option<PathBuf>,
    /// I/O options: the `aio` section of the configuration.
    pub aio: zero_tier::Options,
}

/// Values kept in GPU memory. When layers run on the CPU, everything is in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OnGpu {
    /// Whether layers run on the GPU.
    pub layers: bool,
    /// Fraction of the elements, from 0 to 1, whose optimizer state, master copies and gradients are on the GPU.
    pub states: f64,
    /// Whether shards of parameters are on the GPU.
    pub parameters: bool,
    /// Whether the communicators transfer parameters directly between GPUs instead of through the host.
    pub gathers: bool,
    /// Whether gradients are reduced on the GPUs. The GPUs add in a different order than the host.
    pub sums: bool,
}

/// The outer optimizer and how its state is divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptions {
    /// Learning rate.
    pub lr: f64,
    /// Nesterov's momentum; 0 means plain SGD, which has no momentum state.
    pub momentum: f64,
    /// How the state is divided among the replicates.
    pub share: OuterShare,
}

/// One replicate's share of the state of an outer optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterShare {
    /// Number of replicates.
    pub replicates: usize,
    /// Index of this replicate.
    pub replicate: usize,
    /// Number of bytes per element, for the parameter before the inner steps and, if there is one, the momentum.
    pub width: usize,
}

impl OuterShare {
    /// Returns the number of elements in each replicate's share of `elements`. Shares differ by at most one element,
    /// and the longer ones come first.
    #[must_use]
    pub fn counts(&self, elements: usize) -> Vec<usize> {
        even_counts(elements, self.replicates).collect()
    }

    /// Returns this replicate's share of a rank's `elements` elements.
    #[must_use]
    pub fn of(&self, elements: usize) -> Range<usize> {
        let counts = self.counts(elements);
        let start = counts[..self.replicate].iter().sum();
        start..start + counts[self.replicate]
    }

    /// Returns the bytes that this replicate sends in an outer step of a rank's `elements` elements. It first sends
    /// every other replicate the share that this other replicate updates, and then sends all of them its own updated
    /// share.
    #[must_use]
    pub fn sent_bytes(&self, elements: usize) -> usize {
        let own = self.of(elements).len();
        size_of::<f32>() * (elements - own + own * (self.replicates - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_elements_once() {
        for (elements, replicates) in [(0, 2), (1, 2), (7, 3), (9, 3), (1030, 4)] {
            let of = |replicate| OuterShare { replicates, replicate, width: 8 };
            let mut next = 0;
            for replicate in 0..replicates {
                let share = of(replicate).of(elements);
                assert_eq!(share.start, next);
                next = share.end;
            }
            assert_eq!(next, elements);
            let sent: usize = (0..replicates).map(|replicate| of(replicate).sent_bytes(elements)).sum();
            assert_eq!(sent, 4 * 2 * elements * (replicates - 1));
        }
    }
}
