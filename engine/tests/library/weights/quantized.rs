//! Quantized frozen weights: the codes of bitsandbytes, bit-identical training at every layout, and checkpoints.
//! `peft.rs` compares QLoRA with PEFT.

use crate::sharding::bytes::widths;
use crate::weights::adapter::layouts_are_equal;
use crate::{python, world};

use python::python;
use tempfile::TempDir;
use world::{assert_same, config, engine_of, llama_config, resume, trajectory, world};
use zero_engine::{Engine, Layers, zoo};
use zero_model::ops::{FourBit, Quantization, QuantizedFormat};
use zero_partition::expected_state;
use zero_pipeline::Tier;

const ADAPTER: &str = "adapter: {r: 4, lora_dropout: 0.1, init_lora_weights: false}";
const NF4: &str = "quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}";
const DOUBLE: &str =
    "quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}";
const DORA: &str = "adapter: {r: 4, use_dora: true, lora_dropout: 0.1}";
const INT8: &str = "quantization_config: {load_in_8bit: true, llm_int8_skip_modules: [layers.1.mlp]}";

fn llama() -> Layers {
    zoo::llama(&zoo::LlamaConfig { hidden_size: 64, intermediate_size: 384, initializer_range: 0.05, ..llama_config() })
}

fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { resid_pdrop: 0.1, ..world::gpt2_config() })
}

#[test]
fn every_layout_of_nf4_is_bit_identical() {
    layouts_are_equal(llama, &format!("{ADAPTER}\n{NF4}"));
}

#[test]
fn every_layout_of_double_quantization_is_bit_identical() {
    layouts_are_equal(llama, &format!("{ADAPTER}\n{DOUBLE}"));
    layouts_are_equal(gpt2, &format!("{DORA}\n{DOUBLE}"));
}

#[test]
fn every_layout_of_int8_is_bit_identical() {
    layouts_are_equal(llama, &format!("{ADAPTER}\n{INT8}"));
    layouts_are_equal(gpt2, &format!("{ADAPTER}\nquantization_config: {{load_in_8bit: true}}"));
}

/// Quantized weights have the bytes of the formula. Their shards can also be on a disk.
#[test]
fn state_is_a_few_bits_per_element() {
    let folder = TempDir::new().unwrap();
    // Bytes of a weight with this many elements and inputs.
    type Bytes = fn(usize, usize) -> usize;
    let formulas: [(&str, Bytes); 2] = [
        (NF4, |elements, _| elements / 2 + elements / 64 * 4),
        (INT8, |elements, inputs| elements + elements / inputs * 4),
    ];
    for (quantization, formula) in formulas {
        for nvme in [false, true] {
            let offload = format!(", offload_param: {{device: nvme, nvme_path: '{}'}}", folder.path().display());
            let text = format!(
                "train_micro_batch_size_per_gpu: 2\n{ADAPTER}\n{quantization}\naio: {{block_size: 4096}}\n\
                 zero_optimization: {{stage: 3{}}}",
                if nvme { &offload } else { "" }
            );
            let counted = world(2, |comm| {
                let engine = engine_of(llama(), comm, &text);
                let zero = engine.zero();
                let at = engine.zero().groups().at();
                let state = expected_state(zero.layout(), zero.stages(), at, &widths(4));
                let held = zero.ledger().now(zero_partition::Category::Parameters);
                assert_eq!(held, state.parameters, "{text}");
                let quantized = zero.layout().segments().iter().filter(|segment| segment.quantization.is_some());
                let wide = quantized.clone().filter(|segment| segment.parameters() == 64 * 384);
                assert!(wide.clone().all(|segment| (segment.tiers.parameters == Tier::Nvme) == nvme), "{text}");
                assert!(wide.count() >= 3);
                let expected = quantized.clone().map(|segment| {
                    let parameter = &engine.model().parameters()[segment.pieces[0].parameter];
                    formula(segment.parameters(), parameter.shape().dims()[1])
                });
                let own = quantized.clone().map(|segment| segment.shard(at.shard).len());
                (own.sum::<usize>(), expected.sum::<usize>())
            });
            let (bytes, expected) = (counted.iter().map(|rank| rank.0).sum::<usize>(), counted[0].1);
            assert!((bytes as f64 / expected as f64 - 1.0).abs() < 0.01, "{quantization}: {bytes} for {expected}");
        }
    }
}

#[test]
fn a_checkpoint_resumes_at_any_layout() {
    for quantization in [DOUBLE, INT8] {
        let folder = TempDir::new().unwrap();
        let text = |stage: u8, accumulation: usize, seed: u64| {
            format!(
                "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {accumulation}\n\
                 adapter: {{r: 4}}\n{quantization}\ntraining: {{reproducible: true, seed: {seed}}}\nzero_optimization: {{stage: {stage}}}"
            )
        };
        let whole = world(2, |comm| {
            let mut engine = engine_of(llama(), comm, &text(3, 1, 1));
            trajectory(&mut engine, 2);
            engine.save_checkpoint(folder.path()).unwrap();
            trajectory(&mut engine, 2)
        });
        for (ranks, stage) in [(1, 0), (2, 3)] {
            // These initial weights differ from those of the saved run. The checkpoint replaces them.
            let text = text(stage, 2 / ranks, 7);
            let rest = resume((ranks, 2), folder.path(), |comm| engine_of(llama(), comm, &text));
            assert_same(&whole[0], &rest, &format!("{quantization} on {ranks} ranks"));
        }
        let other = world(1, |comm| {
            let text = format!("train_micro_batch_size_per_gpu: 2\nadapter: {{r: 4}}\n{NF4}");
            let mut engine = engine_of(llama(), comm, &text);
            engine.resume(folder.path()).map(drop).unwrap_err().to_string()
        });
        assert!(other[0].contains("`quantization_config`") && other[0].contains("nf4"), "{}", other[0]);
    }
}

#[test]
fn keys_without_effect_are_errors() {
    let error = |more: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 2\n{more}");
        let mut all = world(1, |comm| Engine::with_communicator(config(1, &text), llama(), comm).map(drop));
        all.remove(0).unwrap_err().to_string()
    };
    let trained = error(NF4);
    assert!(trained.contains("quantization_config") && trained.contains("q_proj") && trained.contains("adapter"));
    let saved = error(&format!("adapter: {{modules_to_save: [up_proj]}}\n{NF4}"));
    assert!(saved.contains("up_proj") && saved.contains("llm_int8_skip_modules"), "{saved}");
    let skipped =
        error(&format!("{ADAPTER}\nquantization_config: {{load_in_8bit: true, llm_int8_skip_modules: [nowhere]}}"));
    assert!(skipped.contains("`nowhere`") && skipped.contains("llm_int8_skip_modules"), "{skipped}");
}

/// Quantizes weights with bitsandbytes, and writes the resulting bytes in this project's format and the dequantized
/// values.
const SCRIPT: &str = "
import sys, struct, numpy, torch
from bitsandbytes import functional as F
def show(folder, name, kind, double, shape):
    w = torch.from_numpy(numpy.fromfile(f'{folder}/{name}.f32', dtype=numpy.float32)).view(shape)
    out = bytearray()
    if kind == 'int8':
        codes, scales, _ = F.int8_vectorwise_quant(w.clone())
        for row, scale in zip(codes, scales): out += struct.pack('<f', scale.item()) + row.numpy().tobytes()
        values = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
    else:
        codes, state = F.quantize_4bit(w, blocksize=64, quant_type=kind)
        packed, absmax = codes.numpy().tobytes(), state.absmax
        if double:
            offset = numpy.fromfile(f'{folder}/{name}.ours', dtype=numpy.float32, count=1)
            mean = absmax.mean().item()
            assert abs(offset[0] - mean) <= 4e-7 * abs(mean), (offset, mean)
            scales, nested = F.quantize_blockwise(absmax - torch.from_numpy(offset), blocksize=256)
            for at in range(0, len(absmax), 256):
                head = struct.pack('<ff', offset[0], nested.absmax[at // 256].item())
                out += head + scales[at:at + 256].numpy().tobytes() + packed[at * 32:(at + 256) * 32]
            state.absmax = F.dequantize_blockwise(scales, nested) + torch.from_numpy(offset)
        else:
            for at, scale in enumerate(absmax): out += struct.pack('<f', scale.item()) + packed[at * 32:at * 32 + 32]
        # As one row: with AVX-512, bitsandbytes 0.50.2 takes wrong scales where the columns are a multiple of 32 and not
        # of 64.
        state.shape = (w.numel(),)
        values = F.dequantize_4bit(codes, state)
    open(f'{folder}/{name}.theirs', 'wb').write(bytes(out))
    values.float().contiguous().numpy().tofile(f'{folder}/{name}.values')
";

#[test]
fn quantized_values_and_scales_match_bitsandbytes() {
    let folder = TempDir::new().unwrap();
    let shapes = [(64, 64), (130, 192), (33, 50), (40, 96), (300, 200), (1, 2)];
    let formats: Vec<QuantizedFormat> = [FourBit::Nf4, FourBit::Fp4]
        .into_iter()
        .flat_map(|code| [false, true].map(|double| QuantizedFormat::Four { code, double }))
        .chain([QuantizedFormat::Int8])
        .collect();
    let mut script = String::from(SCRIPT);
    let mut cases = vec![];
    for &format in &formats {
        for (outputs, inputs) in shapes {
            let is = Quantization::new(format, inputs, outputs, false);
            let name = format!("{}-{outputs}x{inputs}", format.name());
            let mut values = vec![0.0f32; outputs * inputs];
            let normal = candle_nn::Init::Randn { mean: 0.0, stdev: 0.02 };
            zero_model::init::fill(&normal, &(outputs, inputs).into(), &name, 3, 0, &mut values);
            if outputs > 100 {
                values[..192].fill(0.0);
            }
            let read = |start: usize, out: &mut [f32]| -> candle_core::Result<()> {
                out.copy_from_slice(&values[start..start + out.len()]);
                Ok(())
            };
            let ours = is.quantize(0..is.bytes(), read).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            std::fs::write(folder.path().join(format!("{name}.f32")), bytes).unwrap();
            std::fs::write(folder.path().join(format!("{name}.ours")), &ours).unwrap();
            let (kind, double) = match format {
                QuantizedFormat::Int8 => ("int8", false),
                QuantizedFormat::Four { code: FourBit::Nf4, double } => ("nf4", double),
                QuantizedFormat::Four { code: FourBit::Fp4, double } => ("fp4", double),
            };
            let double = if double { "True" } else { "False" };
            script += &format!("show({:?}, {name:?}, {kind:?}, {double}, ({outputs}, {inputs}))\n", folder.path());
            cases.push((name, is, ours));
        }
    }
    if python(&["torch", "bitsandbytes"], &script).is_none() {
        return;
    }
    for (name, is, ours) in cases {
        let theirs = std::fs::read(folder.path().join(format!("{name}.theirs"))).unwrap();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let differing = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        assert_eq!(differing, 0, "{name}: {differing} of {} bytes differ", ours.len());
        let values = std::fs::read(folder.path().join(format!("{name}.values"))).unwrap();
        let values = values.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        let back = is.dequantize(&ours).unwrap();
        for (at, (ours, theirs)) in back.iter().zip(values).enumerate() {
            assert_eq!(*ours, theirs, "{name}: element {at}");
        }
    }
}
