//! Buffers of modules: BatchNorm's running statistics are loaded and saved, but not trained.

use candle_core::{Device, Result, Tensor};
use candle_nn::{BatchNorm, Func, Module, ModuleT, VarBuilder, batch_norm, linear};
use zero_engine::ops::cross_entropy;
use zero_engine::{Batch, Engine, Layers};

use crate::world::{config, world};

/// A linear map, a BatchNorm in training or evaluation mode, and a linear map.
fn model(trains_norm: bool) -> Layers {
    let norm = move |vb: VarBuilder<'static>| {
        let norm: BatchNorm = batch_norm(8, 1e-5, vb)?;
        Ok(Func::new(move |x| norm.forward_t(x, trains_norm)))
    };
    let head = |vb: VarBuilder<'static>| -> Result<Func<'static>> {
        let last = linear(8, 3, vb)?;
        Ok(Func::new(move |x| last.forward(x)))
    };
    Layers::new().layer("first", |vb| linear(4, 8, vb)).layer("norm", norm).layer("head", head).loss(cross_entropy)
}

fn batch() -> Batch {
    let values: Vec<f32> = (0..16).map(|i| (i * 7 % 5) as f32 - 2.0).collect();
    let classes = Tensor::new(&[0u32, 1, 2, 1], &Device::Cpu).unwrap();
    Batch::new(Tensor::from_vec(values, (4, 4), &Device::Cpu).unwrap(), classes)
}

const STAGE_3: &str = "train_batch_size: 4\nzero_optimization: {stage: 3}\n";

#[test]
fn they_are_loaded_saved_and_restored() {
    let root = tempfile::tempdir().unwrap();
    let weights = root.path().join("weights.safetensors");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
    let mean = [0.5f32, -0.25, 0.125, 0.0, 1.0, 0.1, 0.2, 0.3];
    let tensors = [
        ("first.weight", Tensor::arange(0f32, 32.0, &Device::Cpu).unwrap().reshape((8, 4)).unwrap()),
        ("first.bias", zeros(&[8])),
        ("norm.weight", zeros(&[8]).affine(1.0, 1.0).unwrap()),
        ("norm.bias", zeros(&[8])),
        ("norm.running_mean", Tensor::new(&mean, &Device::Cpu).unwrap()),
        ("norm.running_var", zeros(&[8]).affine(1.0, 4.0).unwrap()),
        ("norm.num_batches_tracked", Tensor::new(7i64, &Device::Cpu).unwrap()),
        ("head.weight", zeros(&[3, 8])),
        ("head.bias", zeros(&[3])),
    ];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &weights).unwrap();
    let text = format!("{STAGE_3}training: {{initial_weights: [\"{}\"]}}\n", weights.display());
    world(2, |comm| {
        let mut engine = Engine::with_communicator(config(2, &text), model(false), comm.clone()).unwrap();
        assert_eq!(
            engine.model().buffers().iter().map(|b| b.name()).collect::<Vec<_>>(),
            ["norm.running_mean", "norm.running_var"]
        );
        assert_eq!(engine.model().buffers()[0].values(), mean);
        assert_eq!(engine.model().parameters().len(), 6, "buffers are no parameters");
        engine.train_batch(&batch()).unwrap();
        engine.save_checkpoint(root.path()).unwrap();
        let next = engine.train_batch(&batch()).unwrap();
        // Another engine starts from zeros and ones, and takes the statistics from the checkpoint.
        let mut resumed = Engine::with_communicator(config(2, STAGE_3), model(false), comm).unwrap();
        assert_eq!(resumed.model().buffers()[1].values(), [1.0; 8]);
        resumed.resume(root.path()).unwrap();
        assert_eq!(resumed.model().buffers()[0].values(), mean);
        assert_eq!(resumed.model().buffers()[1].values(), [4.0; 8]);
        assert_eq!(resumed.train_batch(&batch()).unwrap().loss.to_bits(), next.loss.to_bits());
    });
}

#[test]
fn a_module_that_updates_them_is_refused() {
    let errors = world(2, |comm| {
        let mut engine = Engine::with_communicator(config(2, STAGE_3), model(true), comm).unwrap();
        engine.train_batch(&batch()).map(|step| step.loss).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("the step changed the buffer `norm.running_mean`")), "{errors:?}");
}
