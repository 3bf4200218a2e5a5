//! Measures the time of linear layers with quantized weights relative to f32 weights, at the shapes of training. Run
//! `cargo bench -p zero-ops --bench quantized`. Each measurement is a forward and the backward of the input; the weight
//! is frozen.

use std::time::{Duration, Instant};

use candle_core::{Device, Module, Result, Tensor, Var};
use zero_ops::random::Stream;
use zero_ops::{FourBit, Linear, Quantization, QuantizedFormat, backward_from, set_threads};

/// Rows of a micro-batch, inputs and outputs of the linear layer.
const SHAPES: [[usize; 3]; 4] = [[128, 2048, 2048], [512, 2048, 2048], [512, 2048, 5504], [2048, 2048, 2048]];
const REPEATS: usize = 7;

fn normal(len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(1, "bench", 0).fill_normal(0, &mut values);
    values
}

/// Returns the seconds of a forward and a backward.
fn seconds(layer: &Linear, x: &Tensor) -> Result<f64> {
    let start = Instant::now();
    let y = layer.forward(x)?;
    backward_from(&[(y.clone(), y.detach())])?;
    Ok(start.elapsed().max(Duration::from_nanos(1)).as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    // `cargo bench` passes `--bench`. `cargo test` runs benches without it, only to check that they run.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    set_threads(1);
    let four = |code, double| QuantizedFormat::Four { code, double };
    let formats =
        [four(FourBit::Nf4, false), four(FourBit::Nf4, true), four(FourBit::Fp4, false), QuantizedFormat::Int8];
    println!("{:>6} {:>6} {:>7}  {:>9}  time with a quantized weight / with f32", "rows", "inputs", "outputs", "f32");
    for [rows, inputs, outputs] in if is_test { vec![[8, 64, 96]] } else { SHAPES.to_vec() } {
        let values = normal(outputs * inputs);
        let plain = Linear::from_tensors(Tensor::from_slice(&values, (outputs, inputs), &Device::Cpu)?, None);
        let x = Var::from_vec(normal(rows * inputs), (rows, inputs), &Device::Cpu)?;
        let mut layers = vec![plain];
        for format in formats {
            let is = Quantization::new(format, inputs, outputs, false);
            let read = |start: usize, out: &mut [f32]| -> Result<()> {
                out.copy_from_slice(&values[start..start + out.len()]);
                Ok(())
            };
            layers.push(Linear::from_quantized(is.quantize(0..is.bytes(), read)?, is)?);
        }
        // Runs the layers alternately, so that other load on the machine slows all of them equally.
        let mut times = vec![vec![]; layers.len()];
        for _ in 0..if is_test { 1 } else { REPEATS } {
            for (layer, times) in layers.iter().zip(&mut times) {
                times.push(seconds(layer, &x)?);
            }
        }
        let times: Vec<f64> = times.into_iter().map(median).collect();
        print!("{rows:>6} {inputs:>6} {outputs:>7}  {:>6.2} ms ", times[0] * 1e3);
        for (format, time) in formats.iter().zip(&times[1..]) {
            print!(" {} {:.2}", format.name(), time / times[0]);
        }
        println!();
    }
    Ok(())
}
