//! Loads kernels into a device and launches them on its streams (`tests/card`).
#![allow(unsafe_code)]

#[path = "../card/mod.rs"]
mod card;
mod entries;
mod speed;

use card::Card;
use zero_cuda::{Allocation, CudaError, Event, Stream};
use zero_kernels::attention::{self, Geometry};
use zero_kernels::gradient_norm::{Squared, Verdict, limbs, partials, square_sums, verdict};
use zero_kernels::norm::{self, Rows, Weights};
use zero_kernels::optimizer::{Updated, widen};
use zero_kernels::{Dtype, Launch};
use zero_optim::norm::{Limits, block_square_sums};
use zero_optim::{AdamW, ExactSum, Optimizer, Step, update};

/// The card and a stream.
struct Bench {
    card: &'static Card,
    stream: Stream,
}

impl Bench {
    /// Returns `None` if neither a device nor a usable mock is available.
    fn new() -> Option<Self> {
        let card = Card::shared()?;
        Some(Self { card, stream: Stream::new(&card.device).unwrap() })
    }

    /// Allocates device memory with these numbers.
    fn upload(&self, values: &[f32]) -> Allocation {
        self.card.upload(&values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>(), &self.stream)
    }

    fn bytes<const N: usize>(&self, from: &Allocation) -> Vec<[u8; N]> {
        let mut bytes = vec![0; from.len()];
        from.copy_to(&mut bytes, &self.stream).unwrap();
        bytes.as_chunks().0.to_vec()
    }

    fn bits(&self, from: &Allocation) -> Vec<u32> {
        self.bytes(from).into_iter().map(u32::from_ne_bytes).collect()
    }

    fn launch<A>(&self, launch: &Launch<A>) {
        self.try_launch(launch, &self.stream).unwrap();
    }

    fn try_launch<A>(&self, launch: &Launch<A>, stream: &Stream) -> Result<(), CudaError> {
        self.card.launch(launch, stream)
    }
}

fn numbers(count: usize, factor: f32) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * factor).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn an_update_is_bit_identical_to_the_cpus() {
    let Some(bench) = Bench::new() else { return };
    let count = 5000;
    let rule = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    let step = Step { step: 3, lr: 1e-3, grad_scale: 0.5, grad_limit: f32::INFINITY, decay: true };
    let (mut params, grads) = (numbers(count, 1.0), numbers(count, 0.01));
    let (mut m, mut v) = (numbers(count, 0.003), vec![1e-4; count]);
    let [at_params, at_grads, at_m, at_v] = [&params, &grads, &m, &v].map(|values| bench.upload(values));
    let blocks = count.div_ceil(1024);
    let [sums, parts, made] =
        [2 * blocks, 2 * partials(blocks as u64), 6].map(|words| bench.upload(&vec![f32::NAN; words]));
    let squared = Squared { grads: at_grads.address(), count: count as u64, communicated: Dtype::F32 };
    bench.launch(&square_sums(&[squared], sums.address()).unwrap());
    bench.launch(&limbs(blocks as u64, sums.address(), parts.address()).unwrap());
    let limits = Limits { loss_scale: 1.0, max_norm: 0.1, max_value: 0.0, limit: f64::INFINITY, skips_overflow: true };
    bench.launch(&verdict(blocks as u64, parts.address(), &limits, 0, [made.address(), 0]));
    let factors = rule.factors(&step);
    let updated = Updated {
        params: at_params.address(),
        states: [at_m.address(), at_v.address()],
        grads: at_grads.address(),
        communicated: Dtype::F32,
        working: 0,
        averages: 0,
        count: count as u64,
        decay: true,
    };
    bench.launch(&zero_kernels::optimizer::update(Dtype::F32, [&factors; 2], &[updated], 0.0, made.address()).unwrap());
    let found: Vec<u64> = bench.bytes(&sums).into_iter().map(u64::from_ne_bytes).collect();
    assert_eq!(found, block_square_sums(&grads).map(f64::to_bits).collect::<Vec<_>>());
    let mut total = ExactSum::new();
    total.add_parameter_range(&grads);
    let want = limits.judge(&total);
    assert!(want.clip < 1.0);
    let found: Vec<u64> = bench.bytes(&made).into_iter().map(u64::from_ne_bytes).collect();
    assert_eq!(found, [want.norm.to_bits(), want.clip.to_bits(), 1 << 32 | u64::from(want.scale.to_bits())]);
    assert_eq!(size_of::<Verdict>(), 24);
    let step = Step { grad_scale: want.scale, ..step };
    update(&rule, &step, &mut params, &grads, &mut [&mut m, &mut v]).unwrap();
    for (name, at, want) in [("parameters", &at_params, &params), ("m", &at_m, &m), ("v", &at_v, &v)] {
        assert!(bench.bits(at) == bits(want), "{name}");
    }
}

/// A stream that waits for another stream's event reads the values that the other stream wrote.
#[test]
fn streams_wait_for_events() {
    let Some(bench) = Bench::new() else { return };
    let (rows, size) = (64, 256);
    let count = rows as usize * size as usize;
    let of = Rows { rows, size, dtype: Dtype::F32, eps: 1e-5 };
    let (x, w) = (bench.upload(&numbers(count, 3.0)), bench.upload(&vec![1.0; size as usize]));
    let [y, copy] = [(); 2].map(|()| bench.upload(&vec![f32::NAN; count]));
    let (other, done) = (Stream::new(&bench.card.device).unwrap(), Event::new(&bench.card.device).unwrap());
    bench.launch(&norm::forward(&of, Weights::Rms { weight: w.address() }, x.address(), y.address()));
    bench.stream.record(&done).unwrap();
    other.wait_for(&done).unwrap();
    bench.try_launch(&widen(Dtype::F32, count as u64, y.address(), copy.address()).unwrap(), &other).unwrap();
    other.synchronize().unwrap();
    let copied = bench.bits(&copy);
    assert!(copied == bench.bits(&y));
    for row in copied.chunks(size as usize) {
        let square: f32 = row.iter().map(|&bits| f32::from_bits(bits).powi(2)).sum();
        assert!((square / size as f32 - 1.0).abs() < 1e-4, "{square}");
    }
}

/// With heads of 128 elements, a block needs more shared memory than the default limit.
#[test]
fn attention_gets_the_shared_memory_that_it_needs() {
    let Some(bench) = Bench::new() else { return };
    let of = Geometry {
        batch: 1,
        time: 40,
        heads: 1,
        kv_heads: 1,
        size: 128,
        dtype: Dtype::F32,
        packed: false,
        firsts: 0,
        from: 0,
        keys: 40,
    };
    let count = 40 * 128;
    // All keys are equal, so a position's result is the mean of the values up to it.
    let [q, k, v] = [numbers(count, 1.0), vec![0.25; count], numbers(count, 2.0)];
    let at = [&q, &k, &v].map(|values| bench.upload(values));
    let (out, log_sums) = (bench.upload(&vec![f32::NAN; count]), bench.upload(&[f32::NAN; 40]));
    let launch = attention::forward(&of, at.each_ref().map(Allocation::address), out.address(), log_sums.address());
    let launch = launch.unwrap();
    assert!(launch.shared_bytes > 48 << 10);
    bench.launch(&launch);
    let found = bench.bits(&out);
    for column in 0..128 {
        let mut sum = 0.0;
        for position in 0..40 {
            sum += f64::from(v[position * 128 + column]);
            let (want, got) = (sum / (position + 1) as f64, f32::from_bits(found[position * 128 + column]));
            assert!((f64::from(got) - want).abs() < 1e-5, "{position} {column}: {got} for {want}");
        }
    }
}

#[test]
fn missing_kernels_are_errors() {
    let Some(bench) = Bench::new() else { return };
    let launch = widen(Dtype::F32, 1, 0, 0).unwrap();
    let unknown = Launch { entry: "widen_f8".into(), ..launch };
    let error = bench.try_launch(&unknown, &bench.stream).unwrap_err();
    assert_eq!(error.call, "cuModuleGetFunction", "{error}");
    let huge = Launch { shared_bytes: 1 << 20, ..unknown };
    let error = bench.try_launch(&Launch { entry: "widen_bf16".into(), ..huge }, &bench.stream).unwrap_err();
    assert_eq!(error.call, "cuFuncSetAttribute", "{error}");
}

/// Requests more rows of blocks than a grid can have.
#[test]
fn too_large_a_grid_is_rejected() {
    let Some(bench) = Bench::new() else { return };
    let launch = Launch { grid: [1, 1 << 16, 1], ..widen(Dtype::Bf16, 1, 0, 0).unwrap() };
    let error = bench.try_launch(&launch, &bench.stream).unwrap_err();
    let blocks = "widen_bf16: a grid of 1 × 65536 × 1 blocks; the maximum is 2147483647 × 65535 × 65535";
    assert_eq!((error.call, error.words.as_deref()), ("cuLaunchKernel", Some(blocks)), "{error}");
}
