//! Compares the memory that a dry run plans for each layer with the bytes that the allocator counts. These tests are a
//! program of their own, because the allocator would also count the allocations of tests that run at the same time.

use std::alloc::System;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, DType, Device, Result, Tensor};
use candle_nn::Module;
use half::{bf16, f16};
use zero_comm::heap;
use zero_model::memory::{Form, LayerMemory, room_of_a_thread};
use zero_model::sink::{DeferredGradients, Gradients};
use zero_model::{Activations, Model, Pass, backward_from, hand_on, ops, sink};

mod cases;

use cases::Case;

#[global_allocator]
static ALLOCATOR: heap::Counted<System> = heap::Counted(System);

/// A plan must be at least the measurement, and may exceed it by 1 % plus this many bytes.
const SLACK: u64 = 16 * 1024;

#[derive(Debug, Default)]
struct Comparison {
    too_low: Vec<String>,
    too_high: Vec<String>,
}

impl Comparison {
    fn compare(&mut self, what: &str, planned: u64, measured: u64) {
        let line = format!("{what}: planned {planned}, measured {measured}");
        if planned < measured {
            self.too_low.push(line);
        } else if planned > measured + measured / 100 + SLACK && ops::threads() == 1 {
            // With several threads, the plan assumes that all threads reach their peaks at the same time. Whether they
            // do depends on scheduling.
            self.too_high.push(line);
        }
    }

    fn check(self) {
        let Self { too_low, too_high } = self;
        assert!(too_low.is_empty() && too_high.is_empty(), "too low: {too_low:#?}, too high: {too_high:#?}");
    }
}

/// Runs `run`. Returns its result, the peak of the bytes that it adds, and the bytes that it leaves allocated.
fn measured<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, u64, u64)> {
    let before = heap::now();
    heap::reset_peak();
    let result = run()?;
    let peak = heap::peak() - before;
    // Callers drop earlier values outside of `run`, so the difference is what `run` leaves allocated.
    Ok((result, peak as u64, heap::now().saturating_sub(before) as u64))
}

/// Runs a model's forward and backward layer by layer, as the engine does, with the graph cut between layers.
struct Run<'a> {
    name: &'a str,
    model: &'a Model,
    comparison: Comparison,
}

impl Run<'_> {
    fn pass(layer: usize) -> Pass {
        Pass { training: true, seed: 1, step: 1, sample: 0, layer: layer as u32 }
    }

    /// Creates gradient buffers for a layer's parameters. If a later layer also uses a parameter, the parameter's
    /// buffer counts as written.
    fn sink(&self, layer: usize) -> Gradients {
        let mut sink = Gradients::default();
        for &id in self.model.layers()[layer].uses() {
            let parameter = &self.model.parameters()[id];
            let written = self.model.layers()[layer + 1..].iter().any(|later| later.uses().contains(&id));
            let place = (parameter.leaf().id(), 0..parameter.elements(), written);
            sink.add_buffer(vec![0.0; parameter.elements()], [place]);
        }
        sink
    }

    fn forms(x: &Activations) -> Vec<Form> {
        x.tensors().iter().map(|x| Form::new(x.shape(), x.dtype())).collect()
    }

    /// Runs all layers once, so that later measurements do not include values that layers compute once and keep.
    fn first(&mut self, inputs: &Tensor) -> Result<()> {
        let mut flow = Activations::from(inputs.clone());
        let mut known = BTreeSet::new();
        let model = self.model;
        for (layer, built) in model.layers().split_last().expect("a layer").1.iter().enumerate() {
            let memory = self.model.evaluation_memory(layer, &Self::forms(&flow))?;
            let pass = Pass { training: false, ..Self::pass(layer) };
            let (outputs, _, stays) = measured(|| built.run(&flow, &pass))?;
            let new = memory.kept_once.into_iter().filter(|(key, _)| known.insert(*key));
            let planned = new.map(|(_, bytes)| bytes).chain(memory.outputs.iter().map(Form::bytes)).sum();
            self.comparison.compare(&format!("{}, {}, kept for ever", self.name, built.name()), planned, stays);
            flow = outputs;
        }
        Ok(())
    }

    fn step(&mut self, (inputs, targets): &(Tensor, Tensor), defers: bool) -> Result<()> {
        let last = self.model.layers().len() - 1;
        let mut flow = Activations::from(inputs.clone());
        let mut saved = vec![];
        for layer in 0..last {
            let built = &self.model.layers()[layer];
            let memory = self.model.layer_memory(layer, &Self::forms(&flow))?;
            let ((leaves, outputs), peak, stays) = measured(|| {
                let (inputs, leaves) = cut(&flow, layer);
                Ok((leaves, sink::promise(|| built.run(&inputs, &Self::pass(layer)))?))
            })?;
            let name = format!("{}, {}", self.name, built.name());
            assert_eq!(Self::forms(&outputs), memory.outputs, "{name}");
            let outputs_bytes: u64 = memory.outputs.iter().map(Form::bytes).sum();
            self.comparison.compare(&format!("{name}, forward"), memory.forward_peak, peak);
            self.comparison.compare(&format!("{name}, kept"), memory.kept + outputs_bytes, stays);
            flow = hand_on(&outputs)?;
            saved.push((memory, leaves, outputs));
        }
        let mut upstream = self.loss(flow, targets)?;
        for (layer, (memory, leaves, outputs)) in saved.into_iter().enumerate().rev() {
            upstream = self.backward(layer, &memory, leaves, outputs, upstream, defers)?;
        }
        Ok(())
    }

    /// Runs an evaluation, which keeps nothing.
    fn evaluate(&mut self, (inputs, targets): &(Tensor, Tensor)) -> Result<()> {
        let (model, last) = (self.model, self.model.layers().len() - 1);
        let pass = |layer| Pass { training: false, ..Self::pass(layer) };
        let mut flow = Activations::from(inputs.clone());
        for layer in 0..last {
            let (built, memory) = (&model.layers()[layer], model.evaluation_memory(layer, &Self::forms(&flow))?);
            let (outputs, peak, stays) = measured(|| built.run(&flow, &pass(layer)))?;
            let name = format!("{}, {}, evaluation", self.name, built.name());
            assert_eq!(Self::forms(&outputs), memory.outputs, "{name}");
            self.comparison.compare(&name, memory.peak, peak);
            let outputs_bytes: u64 = memory.outputs.iter().map(Form::bytes).sum();
            assert!(stays <= outputs_bytes, "{name} keeps {stays}");
            flow = outputs;
        }
        let planned =
            model.evaluation_loss_memory(&Self::forms(&flow), &[Form::new(targets.shape(), targets.dtype())])?;
        let (_, peak, stays) = measured(|| model.loss(&flow, std::slice::from_ref(targets), &pass(last), 0.0))?;
        self.comparison.compare(&format!("{}, loss, evaluation", self.name), planned, peak);
        assert_eq!(stays, 0);
        Ok(())
    }

    fn loss(&mut self, flow: Activations, targets: &Tensor) -> Result<Vec<Tensor>> {
        let (model, last) = (self.model, self.model.layers().len() - 1);
        let memory = model.loss_memory(&Self::forms(&flow), &[Form::new(targets.shape(), targets.dtype())])?;
        let sink = self.sink(last);
        let ((upstream, sink), peak, stays) = measured(|| {
            let (inputs, leaves) = cut(&flow, last);
            let (sink, gradients) = sink.capture(|| -> Result<Vec<Tensor>> {
                let loss = model.loss(&inputs, std::slice::from_ref(targets), &Self::pass(last), 0.5)?;
                let seed = Tensor::new(0.5f32, &Device::Cpu)?.to_dtype(loss.dtype())?;
                gradients(&[(loss, seed)], &leaves)
            });
            Ok((gradients?, sink))
        })?;
        drop(sink);
        self.comparison.compare(&format!("{}, loss", self.name), memory.peak, peak);
        assert!(memory.input_gradients >= stays && memory.input_gradients < stays + SLACK, "{}", self.name);
        Ok(upstream)
    }

    fn backward(
        &mut self,
        layer: usize,
        memory: &LayerMemory,
        leaves: Vec<Tensor>,
        outputs: Activations,
        upstream: Vec<Tensor>,
        defers: bool,
    ) -> Result<Vec<Tensor>> {
        let built = &self.model.layers()[layer];
        let name = format!("{}, {}, backward", self.name, built.name());
        let sink = self.sink(layer);
        let seeds: Vec<(Tensor, Tensor)> = outputs.tensors().iter().cloned().zip(upstream).collect();
        drop(outputs);
        if defers && built.splits() {
            let uses = built.uses().iter().map(|&id| self.model.parameters()[id].leaf().id());
            let later = DeferredGradients::new(uses);
            let ((later, given), peak, _) = measured(|| {
                let (later, given) = later.capture(|| gradients(&seeds, &leaves));
                Ok((later, given?))
            })?;
            self.comparison.compare(&format!("{name}, deferring gradients"), memory.deferred_peak, peak);
            drop((seeds, leaves));
            let with = heap::now();
            heap::reset_peak();
            let mut sink = sink;
            later.flush(&mut sink)?;
            assert_eq!(heap::peak(), with, "{name}: computing deferred gradients allocates more");
            self.comparison.compare(
                &format!("{name}, deferred gradients"),
                memory.deferred,
                (with - heap::now()) as u64,
            );
            return Ok(given);
        }
        let ((given, sink), peak, _) = measured(|| {
            let (sink, given) = sink.capture(|| gradients(&seeds, &leaves));
            Ok((given?, sink))
        })?;
        self.comparison.compare(&name, memory.backward_peak, peak);
        drop(sink);
        Ok(given)
    }
}

/// Returns a layer's inputs, and the leaves among them.
fn cut(incoming: &Activations, layer: usize) -> (Activations, Vec<Tensor>) {
    if layer == 0 {
        return (incoming.clone(), vec![]);
    }
    let leaves = incoming.tensors().to_vec();
    assert!(leaves.iter().all(Tensor::is_variable));
    (incoming.clone(), leaves)
}

fn gradients(seeds: &[(Tensor, Tensor)], leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut store = backward_from(seeds)?;
    Ok(leaves.iter().filter_map(|leaf| store.remove(leaf)).collect())
}

fn fill(model: &Model) -> Result<()> {
    for parameter in model.parameters() {
        let values = (0..parameter.elements()).map(|i| ((i * 7919) % 1000) as f32 * 1e-4);
        parameter.fill(match parameter.dtype() {
            DType::BF16 => CpuStorage::BF16(values.map(bf16::from_f32).collect()),
            DType::F16 => CpuStorage::F16(values.map(f16::from_f32).collect()),
            _ => CpuStorage::F32(values.collect()),
        })?;
    }
    Ok(())
}

/// Makes the threads allocate the buffers that they keep, so that no measurement includes these buffers.
fn make_rooms(threads: usize) -> Result<()> {
    let before = heap::now();
    ops::set_threads(threads);
    let multiply = || -> Result<()> {
        let x = Tensor::ones((256, 256), DType::F32, &Device::Cpu)?;
        ops::Linear::from_tensors(x.clone(), None).forward(&x).map(drop)
    };
    let rooms = || (heap::now() - before) as u64 / room_of_a_thread();
    let started = Instant::now();
    // On a busy machine, one thread may run another thread's part before that thread starts.
    while rooms() < threads as u64 && started.elapsed() < Duration::from_secs(60) {
        multiply()?;
        std::thread::yield_now();
    }
    assert_eq!(rooms(), threads as u64);
    Ok(())
}

#[test]
fn layer_memory_matches_the_plan() -> Result<()> {
    make_rooms(2)?;
    for Case { name, layers, dtype, batch } in cases::all()? {
        let model = layers.build(dtype).expect("a model");
        fill(&model)?;
        let mut run = Run { name: &name, model: &model, comparison: Comparison::default() };
        run.first(&batch.0)?;
        run.comparison.check();
        for threads in [1, 2] {
            ops::set_threads(threads);
            for defers in [false, true] {
                let name = format!("{name}, {threads} threads");
                let mut run = Run { name: &name, model: &model, comparison: Comparison::default() };
                run.step(&batch, defers)?;
                run.evaluate(&batch)?;
                run.comparison.check();
            }
        }
    }
    Ok(())
}
