//! Trains models of several inputs, named values and two tasks.

use candle_core::{Device, Result as CandleResult, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use zero_config::Config;
use zero_engine::ops::cross_entropy;
use zero_engine::{Activations, Batch, Layers};

use super::{config, fit_on, mistake, points, quiet, text};
use crate::data::{Dataset, InMemory, from_fn};
use crate::metrics::accuracy;

/// Applies a linear layer to each of two inputs and adds the results.
struct Two([candle_nn::Linear; 2]);

impl zero_engine::Layer for Two {
    fn run(&self, x: &Activations, _: &zero_engine::Pass) -> CandleResult<Activations> {
        let [first, second] = x.tensors() else { candle_core::bail!("{} inputs", x.tensors().len()) };
        Ok((self.0[0].forward(first)? + self.0[1].forward(second)?)?.into())
    }
}

#[test]
fn a_model_of_two_inputs_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let data = |samples: usize| {
        from_fn(samples, |i| {
            let (a, b) = (i as f32 * 0.37 % 1.0, i as f32 * 0.73 % 1.0);
            let inputs = [a, b].map(|x| Tensor::new(&[x], &Device::Cpu));
            let inputs = Activations::new(inputs.into_iter().collect::<CandleResult<_>>()?);
            Ok((inputs, Tensor::new(&[2.0 * a - b], &Device::Cpu)?))
        })
    };
    let trainer = || {
        let build = |vb: VarBuilder| Ok(Two([linear(1, 1, vb.pp("first"))?, linear(1, 1, vb.pp("second"))?]));
        let model = Layers::new().layer("two", build).loss(candle_nn::loss::mse);
        let trainer = quiet(config(folder.path(), "max_steps: 200, save_last: false")).model(model);
        trainer.data(data(64), data(16)).metric("absolute_error", crate::metrics::absolute_error)
    };
    let evaluation = fit_on(2, trainer).remove(0).unwrap().evaluation.unwrap();
    assert!(evaluation.metric("absolute_error").is_some_and(|error| error < 0.05), "{evaluation:?}");
}

/// Returns sample `i`, with two named inputs and two named targets.
fn named(i: usize) -> Result<Batch, crate::data::BoxError> {
    let (a, b) = (i as f32 * 0.37 % 1.0, i as f32 * 0.73 % 1.0);
    let [a, b, sum] = [a, b, a + b].map(|x| Tensor::new(&[x], &Device::Cpu));
    let larger = Tensor::new(u32::from(i as f32 * 0.37 % 1.0 > i as f32 * 0.73 % 1.0), &Device::Cpu)?;
    Ok(Batch::named([("a", a?), ("b", b?)]).target("larger", larger).target("sum", sum?))
}

/// Returns a model with two tasks, which share the hidden layer.
fn two_tasks() -> Layers {
    let build = |vb: VarBuilder| Ok(Two([linear(1, 8, vb.pp("first"))?, linear(1, 8, vb.pp("second"))?]));
    Layers::new()
        .layer("hidden", build)
        .inputs(["a", "b"])
        .layer("larger", |vb: VarBuilder| linear(8, 2, vb))
        .layer("sum", |vb: VarBuilder| linear(8, 1, vb))
        .inputs(["hidden"])
        .loss_of(["larger", "sum"], ["larger", "sum"], |[scores, output], [class, sum]| {
            cross_entropy(scores, class)? + candle_nn::loss::mse(output, sum)?
        })
}

/// The evaluation is the same on one rank, on two ranks and on two pipeline stages, for a data set in memory and for a
/// data set that a function computes.
#[test]
fn two_tasks_are_trained_and_measured_by_name() {
    let evaluations =
        [(1, ""), (2, ""), (2, "pipeline: {stages: 2}"), (4, "pipeline: {stages: 2}")].map(|(ranks, more)| {
            let folder = tempfile::tempdir().unwrap();
            let trainer = || {
                let text = text(folder.path(), "max_steps: 120, save_last: false") + more + "\n";
                let all: Vec<usize> = (0..17).map(|i| i + 100).collect();
                let valid = InMemory::of(from_fn(200, named).batch(&all).unwrap()).unwrap();
                quiet(Config::with_world_size("ds.yaml", text, ranks).unwrap())
                    .model(two_tasks())
                    .data(from_fn(64, named), valid)
                    .metric_of("accuracy", ["larger"], ["larger"], |[scores], [class]| accuracy(scores, class))
                    .metric_of("both", ["sum", "larger"], ["sum"], |[output, _], [sum]| (output - sum)?.abs())
            };
            let evaluation = fit_on(ranks, trainer).remove(0).unwrap().evaluation.unwrap();
            assert_eq!(evaluation.samples, 17);
            evaluation
        });
    assert!(evaluations.iter().all(|evaluation| *evaluation == evaluations[0]), "{evaluations:?}");
    let metric = |name: &str| evaluations[0].metric(name).unwrap();
    assert!(metric("accuracy") > 0.8 && metric("both") < 0.1, "{:?}", evaluations[0]);
}

#[test]
fn names_that_data_or_metrics_miss_are_reported_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 2, save_last: false"));
    let data = || from_fn(16, named);
    let told = mistake(|| new().model(two_tasks()).train_data(points(16)));
    assert!(told.contains("layer `hidden` takes `a`") && told.contains("the inputs 1 without a name"), "{told}");
    let without = || from_fn(16, |i| Ok(Batch::named([("a", Tensor::new(&[i as f32], &Device::Cpu)?)])));
    let told = mistake(|| new().model(two_tasks()).data(data(), without()));
    assert!(told.contains("layer `hidden` takes `b`") && told.contains("the inputs `a` and no targets"), "{told}");
    let told = mistake(|| new().model(two_tasks()).data(data(), data()).metric("accuracy", accuracy));
    assert!(told.contains("the metric `accuracy` needs one output") && told.contains("larger, sum"), "{told}");
    let metric = |output: &'static str, target: &'static str| {
        let trainer = move || new().model(two_tasks()).data(data(), data());
        mistake(move || trainer().metric_of("m", [output], [target], |[y], _| Ok(y.clone())))
    };
    assert!(metric("hidden", "sum").contains("the output `hidden`, which the loss does not receive"));
    let told = metric("sum", "total");
    assert!(told.contains("the target `total`") && told.contains("a, b, larger, sum"), "{told}");
}
