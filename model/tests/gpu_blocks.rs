//! The backward of a residual stream is bit-identical with and without fused blocks: in a fused block the norms add to
//! the existing gradient, and otherwise candle adds the gradients.

#[path = "../../ops/tests/ops/check.rs"]
#[allow(dead_code, reason = "the tests of operations use all of it")]
mod check;
#[path = "../../cuda/emulator/mock/mod.rs"]
mod mock;

use candle_core::{DType, Device, Result, Tensor, Var};
use check::{normal, same_bits};
use zero_model::device::Array;
use zero_model::sink::{FlatBuffer, Gradients};
use zero_model::zoo::{Gpt2Config, LlamaConfig, gpt2, llama};
use zero_model::{Layers, Model, Pass};

fn block(layers: Layers, dtype: DType, gpu: &Device) -> Model {
    let model = layers.build_on(dtype, gpu).expect("a model");
    for parameter in model.parameters() {
        let values = normal(parameter.name(), parameter.shape().dims()).to_dtype(dtype).unwrap();
        let values = values.to_device(gpu).unwrap();
        let (storage, layout) = values.storage_and_layout();
        parameter.put(storage.try_clone(layout).unwrap()).unwrap();
    }
    model
}

/// Returns the output of the model's first block and the gradient of its input.
fn run(model: &Model, x: &Tensor, dy: &Tensor) -> Result<[Tensor; 2]> {
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 1 };
    let y = model.layers()[1].run(&x.clone().into(), &pass)?.single()?.clone();
    let store = zero_model::backward_from(&[(y.clone(), dy.clone())])?;
    Ok([y.to_device(&Device::Cpu)?, store.get(x).expect("a gradient").to_device(&Device::Cpu)?])
}

#[test]
fn fused_blocks_are_bit_identical() -> Result<()> {
    if !mock::ready() {
        return Ok(());
    }
    let gpu = zero_model::device::open(0)?;
    match Tensor::ones(1, DType::F32, &gpu) {
        Err(error) if mock::has_no_kernels(&error) => return Ok(()),
        ones => ones?,
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let of_gpt2 =
            Gpt2Config { vocab_size: 9, n_positions: 8, n_embd: 16, n_layer: 1, n_head: 2, ..Gpt2Config::default() };
        let of_llama = LlamaConfig {
            vocab_size: 9,
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            ..LlamaConfig::default()
        };
        for layers in [gpt2(&of_gpt2), llama(&of_llama)] {
            let model = block(layers, dtype, &gpu);
            let [x, dy] = ["x", "dy"].map(|name| normal(name, &[2, 5, 16]).to_dtype(dtype).unwrap());
            let (x, dy) = (Var::from_tensor(&x.to_device(&gpu)?)?.into_inner(), dy.to_device(&gpu)?);
            let want = run(&model, &x, &dy)?;
            let mut sink = Gradients::default();
            for parameter in model.parameters() {
                let count = parameter.elements();
                let room = FlatBuffer::Device(Array::room(gpu.as_cuda_device()?, count)?);
                sink.add_buffer(room, [(parameter.leaf().id(), 0..count, false)]);
            }
            let (_, got) = sink.capture(|| run(&model, &x, &dy));
            for (what, (got, want)) in ["y", "dx"].iter().zip(got?.iter().zip(&want)) {
                same_bits(&format!("{what} of {dtype:?}"), got, want);
            }
        }
    }
    Ok(())
}
