//! Compares the memory of layers with formulas derived by hand. `engine/tests/layer_memory/` compares it with actual
//! allocations.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use zero_model::memory::{Form, LayerMemory, on_gpu};
use zero_model::zoo::{Gpt2Config, LlamaConfig, gpt2, llama};
use zero_model::{Layers, Model};

fn memory(model: &Model, layer: usize, shape: [usize; 3], dtype: DType) -> LayerMemory {
    model.layer_memory(layer, &[Form::new(shape.to_vec(), dtype)]).expect("known")
}

/// Asserts that `bytes` is the size of `floats` f32 values, plus at most the bookkeeping.
fn assert_is(bytes: u64, floats: usize, what: &str) {
    let floats = 4 * floats as u64;
    assert!(bytes >= floats && bytes - floats <= 4096, "{what}: {bytes} bytes instead of {floats}");
}

#[test]
fn a_dry_run_of_a_trillion_parameters_needs_no_memory() {
    let (batch, time, width, heads) = (4, 2048, 25_600, 160);
    let config = Gpt2Config { n_positions: time, n_embd: width, n_layer: 128, n_head: heads, ..Gpt2Config::default() };
    let model = gpt2(&config).build(DType::F32).expect("a model");
    assert!(model.elements() > 1_000_000_000_000);
    let rows = batch * time;
    for layer in [1, 64, 128] {
        let memory = memory(&model, layer, [batch, time, width], DType::F32);
        assert_eq!(memory.outputs, [Form::new((batch, time, width), DType::F32)]);
        assert_eq!(memory.leaves, (4 * rows * width) as u64);
        assert_eq!(memory.input_gradients, (4 * rows * width) as u64);
        // Kept: two norms, q, k, v, the attended values, the sum in the middle, and the inner rows of the MLP before
        // and after GELU. Also kept: ln Σ e^score for every row of a head, and for each position 8 bytes with the first
        // position that it attends to.
        let kept = rows * width * (2 + 3 + 1 + 1 + 4 + 4) + rows * heads + 2 * rows;
        assert_is(memory.kept, kept, "kept");
        // In addition to the kept tensors: the outputs of the two branches, and the sum that is the output of the
        // layer.
        assert_is(memory.forward_peak, kept + rows * width * 3, "forward");
        // At the start of the MLP's backward: the gradient of the inner rows, before and after GELU, and the sums over
        // blocks of rows for the bias.
        assert!(memory.backward_peak > (4 * rows * width * 8) as u64);
    }
}

#[test]
fn a_block_of_llama_keeps_what_its_backward_reads() {
    let (batch, time, width, inner, heads, kv_heads) = (3, 100, 512, 1376, 8, 2);
    let config = LlamaConfig {
        vocab_size: 100,
        hidden_size: width,
        intermediate_size: inner,
        num_hidden_layers: 1,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        max_position_embeddings: time,
        ..LlamaConfig::default()
    };
    let model = llama(&config).build(DType::F32).expect("a model");
    let rows = batch * time;
    // Kept: two norms, q, the attended values and the sum in the middle; k and v; gate, up and their product.
    let kept = rows * (5 * width + 2 * width * kv_heads / heads + 3 * inner) + rows * heads + 2 * rows;
    assert_is(memory(&model, 1, [batch, time, width], DType::F32).kept, kept, "kept");
}

#[test]
fn a_tiled_mlp_keeps_no_inner_activations() {
    let (time, width, inner, tile) = (16_384, 64, 512, 1024);
    let of = |tiled_mlp_rows| {
        let config = Gpt2Config {
            n_positions: time,
            n_embd: width,
            n_inner: Some(inner),
            n_layer: 1,
            n_head: 1,
            tiled_mlp_rows,
            ..Gpt2Config::default()
        };
        memory(&gpt2(&config).build(DType::F32).expect("a model"), 1, [1, time, width], DType::F32)
    };
    let (whole, tiled) = (of(None), of(Some(tile)));
    assert_eq!(whole.kept - tiled.kept, (4 * time * inner * 2) as u64);
    // Kept: a norm, q, k, v, the attended values, the sum in the middle and the second norm; 12 bytes per row of
    // attention.
    assert_is(tiled.kept, time * width * (1 + 3 + 1 + 1 + 1) + time * 3, "kept");
    // The output of the MLP, and the inner rows of one tile before and after GELU.
    assert!(tiled.forward_peak < tiled.kept + (4 * (time * width * 3 + tile * inner * 2)) as u64);
    assert!(tiled.backward_peak < (4 * (time * width * 12 + tile * (inner * 4 + width * 4))) as u64);
    assert!(whole.backward_peak > (4 * time * inner * 2) as u64);
}

struct Picky;

impl Module for Picky {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let values = x.flatten_all()?.to_vec1::<f32>().expect("values");
        x * f64::from(values[0])
    }
}

/// On a GPU, cuBLASLt needs a workspace for each product with a bias. GPT-2 has such products, Llama has none.
#[test]
fn a_product_with_a_bias_takes_a_workspace_of_the_gpu() {
    let gpt2 = gpt2(&Gpt2Config { n_positions: 16, n_embd: 64, n_layer: 1, n_head: 1, ..Gpt2Config::default() });
    let llama =
        llama(&LlamaConfig { hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, ..LlamaConfig::default() });
    for (layers, workspace) in [(gpt2, zero_cuda::MOST_WORKSPACE), (llama, 0)] {
        let model = layers.build(DType::F32).expect("a model");
        let of_block = || memory(&model, 1, [1, 16, 64], DType::F32);
        let (host, gpu) = (of_block(), on_gpu(of_block));
        assert_eq!((gpu.kept, gpu.input_gradients), (host.kept, host.input_gradients));
        for (gpu, host) in [(gpu.forward_peak, host.forward_peak), (gpu.backward_peak, host.backward_peak)] {
            assert!(gpu >= host.max(workspace) && gpu <= host + workspace, "{gpu} bytes, on the host {host}");
        }
    }
}

#[test]
fn layers_without_a_dry_run_are_errors() -> Result<()> {
    let linear = |vb: VarBuilder| candle_nn::linear(8, 8, vb);
    let layers = Layers::new().layer("first", linear).layer("last", linear);
    let model = layers.loss(zero_model::ops::cross_entropy).build(DType::F32).expect("a model");
    let x = [Form::new((2, 8), DType::F32)];
    assert!(model.layer_memory(0, &x).is_err());
    assert!(model.evaluation_memory(0, &x).is_err());
    assert!(model.loss_memory(&x, &[Form::new(2, DType::U32)]).is_err());

    let config = Gpt2Config { n_embd: 64, n_head: 2, n_layer: 1, vocab_size: 10, ..Gpt2Config::default() };
    let model = gpt2(&config).build(DType::F32).expect("a model");
    for wrong in [vec![], vec![64], vec![2, 8, 63], vec![2, 8, 64, 1]] {
        assert!(model.layer_memory(1, &[Form::new(wrong, DType::F32)]).is_err());
    }
    assert!(model.layer_memory(1, &[Form::new((2, 8, 64), DType::F64)]).is_err());
    assert!(model.layer_memory(1, &[]).is_err());
    assert!(model.layer_memory(7, &[Form::new((2, 8, 64), DType::F32)]).is_err());
    // This layer needs values. Its panic becomes an error.
    let layers = Layers::new().layer("picky", |_| Ok(Picky)).layer("last", linear).loss(zero_model::ops::cross_entropy);
    let picky = layers.build(DType::F32).expect("a model");
    assert!(picky.layer_memory(0, &x).is_err());

    // A failed dry run leaves no state behind.
    assert!(model.layer_memory(1, &[Form::new((2, 8, 64), DType::F32)]).is_ok());
    Ok(())
}
