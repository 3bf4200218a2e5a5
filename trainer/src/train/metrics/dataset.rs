//! Metrics that need all evaluation samples and are not means over the samples, such as F1 and AUC. Each rank keeps the
//! outputs and targets of its samples in host memory. At the end, all ranks gather them and compute the same metrics.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor, safetensors::load_buffer};
use zero_comm::{Communicator, from_each_rank};
use zero_engine::{Activations, Error, Observed};

use super::{Function, Metric, Of};

/// The outputs and targets that this rank has seen, by metric and position.
pub(in crate::train) struct Predictions {
    kept: BTreeMap<String, Tensor>,
    /// Whether this rank keeps predictions. Only one rank of a tensor group does, because all have the same outputs.
    keeps: bool,
}

impl Predictions {
    pub(in crate::train) fn new(keeps: bool) -> Self {
        Self { kept: BTreeMap::new(), keeps }
    }

    /// Adds a micro-batch that begins with sample `first` of the data set `part`.
    pub(in crate::train) fn add(
        &mut self,
        metrics: &[Metric],
        seen: &Observed<'_>,
        (part, first): (usize, usize),
    ) -> std::result::Result<(), Error> {
        for (index, (metric, _)) in of_dataset(metrics).enumerate() {
            if source(metrics, metric) != index {
                continue;
            }
            // All ranks of a tensor group must call this, even one that keeps nothing: they compute the outputs
            // together.
            let (outputs, targets) = metric.selection.of(seen)?;
            if !self.keeps {
                continue;
            }
            for (kind, tensors) in [("outputs", outputs), ("targets", targets)] {
                for (number, tensor) in tensors.tensors().iter().enumerate() {
                    let tensor = tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.force_contiguous());
                    let name = format!("{} {part:04} {first:020}", column(index, kind, number));
                    self.kept.insert(name, tensor.map_err(|error| metric.located(error))?);
                }
            }
        }
        Ok(())
    }

    /// Computes the metrics from the samples of all ranks, in the order of the samples. Returns their values. A
    /// collective.
    pub(in crate::train) fn values(
        self,
        comm: &dyn Communicator,
        metrics: &[Metric],
    ) -> std::result::Result<Vec<f64>, Error> {
        if of_dataset(metrics).next().is_none() {
            return Ok(vec![]);
        }
        let own = safetensors::serialize(&self.kept, None).map_err(candle_core::Error::wrap)?;
        drop(self.kept);
        let mut all = BTreeMap::new();
        for of_rank in from_each_rank(comm, own)? {
            all.extend(load_buffer(&of_rank, &Device::Cpu)?);
        }
        let value = |(metric, function): (&Metric, &Of<f64>)| {
            let [outputs, targets] = ["outputs", "targets"].map(|kind| joined(&all, source(metrics, metric), kind));
            let value = outputs.and_then(|outputs| function(&outputs, &targets?));
            Ok(value.map_err(|error| metric.located(error))?)
        };
        of_dataset(metrics).map(value).collect()
    }
}

fn of_dataset(metrics: &[Metric]) -> impl Iterator<Item = (&Metric, &Of<f64>)> {
    metrics.iter().filter_map(|metric| match &metric.function {
        Function::Dataset(function) => Some((metric, function)),
        Function::Mean(_) => None,
    })
}

/// Returns the index of the first metric that selects the same outputs and targets. Only this metric keeps them.
fn source(metrics: &[Metric], metric: &Metric) -> usize {
    of_dataset(metrics).take_while(|(other, _)| other.selection != metric.selection).count()
}

/// Returns the beginning of the names of the kept tensors of one output or target of a metric.
fn column(metric: usize, kind: &str, number: usize) -> String {
    format!("{metric:04} {kind} {number:04}")
}

/// Concatenates the micro-batches of each output or each target.
fn joined(all: &BTreeMap<String, Tensor>, metric: usize, kind: &str) -> Result<Activations> {
    let parts = |number: usize| -> Vec<&Tensor> {
        let name = column(metric, kind, number);
        let of_column = all.range(name.clone()..).take_while(|(other, _)| other.starts_with(&name));
        of_column.map(|(_, tensor)| tensor).collect()
    };
    let columns = (0..).map(parts).take_while(|parts| !parts.is_empty());
    columns
        .map(|parts| match parts.iter().find(|part| part.dims().get(1..) != parts[0].dims().get(1..)) {
            None => Tensor::cat(&parts, 0),
            Some(other) => candle_core::bail!(
                "the {kind} of the micro-batches have different shapes, such as {:?} and {:?}; pad samples to the same length",
                parts[0].dims(),
                other.dims()
            ),
        })
        .collect::<Result<Vec<_>>>()
        .map(Activations::new)
}
