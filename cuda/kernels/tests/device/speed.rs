//! Measures the speed of each kernel on the card at the sizes of two models, and compares it with the card's maximum
//! speeds. `device --ignored --nocapture speed` prints a line of JSON for each kernel. On the mock (without a GPU, or
//! with `CARD_MOCK`), sizes are tiny and times are meaningless.
//!
//! Events time many launches, which cycle through different memory so that the L2 cache does not help. A kernel's bytes
//! are those that it must read and write once. Its operations are those that its mathematics requires, two per
//! multiply-add. The host's launch time limits the shortest kernels.

use std::env;

use zero_cuda::{Allocation, Event};
use zero_kernels::activation::{self, Function};
use zero_kernels::attention::{self, Geometry, Saved};
use zero_kernels::block_codes::{Coded, Senders, dequantize, quantize};
use zero_kernels::cross_entropy::{self, Counted, Logits, Upstream};
use zero_kernels::dropout::{Mask, SampleLayout, dropout};
use zero_kernels::embedding::{self, Lookup};
use zero_kernels::gradient_norm::{SQUARES, Squared, square_sums};
use zero_kernels::norm::{self, Parameter, Rows, Weights};
use zero_kernels::optimizer::{self, Updated, add_to, narrow, widen};
use zero_kernels::rotary::{Turn, rotary};
use zero_kernels::rows::{self, Onto};
use zero_kernels::{Address, Dtype, Launch};
use zero_optim::{AdamW, BlockCodes, Optimizer, Step};

use crate::card::mock;
use crate::{Bench, numbers};

/// Dense bf16 throughput of an H100 SXM or H200, from their data sheets.
const NOMINAL_TFLOPS: f64 = 989.0;

/// The sizes of a model, for its kernel launches.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    batch: u32,
    time: u32,
    width: u32,
    hidden: u32,
    vocab: u32,
    /// Query heads, and key and value heads; 64 elements each.
    heads: [u32; 2],
    /// Number of rows of logits in memory at a time.
    rows: u32,
}

const MODELS: [Model; 2] = [
    Model {
        name: "gpt2-1.5b",
        batch: 4,
        time: 1024,
        width: 1600,
        hidden: 6400,
        vocab: 50257,
        heads: [25, 25],
        rows: 1024,
    },
    Model {
        name: "llama-1b",
        batch: 2,
        time: 2048,
        width: 2048,
        hidden: 8192,
        vocab: 50257,
        heads: [32, 8],
        rows: 1024,
    },
];
const TINY: Model =
    Model { name: "tiny", batch: 1, time: 40, width: 128, hidden: 96, vocab: 130, heads: [2, 1], rows: 8 };

/// Allocates consecutive ranges of the device's memory.
struct Room {
    next: Address,
}

impl Room {
    fn take(&mut self, bytes: u64) -> Address {
        let here = self.next;
        self.next += bytes.next_multiple_of(256);
        here
    }

    /// Allocates several ranges of one size.
    fn take_each<const N: usize>(&mut self, bytes: u64) -> [Address; N] {
        [(); N].map(|()| self.take(bytes))
    }
}

/// Enqueues a kernel's launches on the stream.
type Work<'a> = Box<dyn Fn() + 'a>;

/// The setup in which a kernel is measured.
struct Bed<'a> {
    bench: &'a Bench,
    model: Model,
    /// The memory of the kernels' operands. Its bytes are valid numbers in −1..1 in every type.
    memory: &'a Allocation,
    warm_up: u32,
    launches: u32,
    copy_gb_s: f64,
}

impl<'a> Bed<'a> {
    fn work<A: 'a>(&self, launches: impl IntoIterator<Item = Launch<A>>) -> Work<'a> {
        let (bench, launches) = (self.bench, launches.into_iter().collect::<Vec<_>>());
        Box::new(move || launches.iter().for_each(|launch| bench.launch(launch)))
    }

    /// Returns the microseconds per turn, over many turns.
    fn time(&self, mut turn: impl FnMut(u32)) -> f64 {
        let [start, end] = [(); 2].map(|()| Event::timed(&self.bench.card.device).unwrap());
        (0..self.warm_up).for_each(&mut turn);
        self.bench.stream.record(&start).unwrap();
        (0..self.launches).for_each(&mut turn);
        self.bench.stream.record(&end).unwrap();
        end.wait().unwrap();
        1e3 * f64::from(start.milliseconds_until(&end).unwrap()) / f64::from(self.launches)
    }

    /// Measures a kernel and prints a line. The kernel moves at least `bytes` bytes and takes at least `flops`
    /// operations. `make` allocates its operands in a room and returns its launches.
    fn measure(&self, kernel: &str, bytes: u64, flops: u64, make: impl Fn(&mut Room) -> Work<'a>) {
        let mut room = Room { next: 0 };
        drop(make(&mut room));
        let (each, all) = (room.next, self.memory.len() as u64);
        assert!(each <= all, "{kernel} needs {each} bytes of {all}");
        let places = (all / each.max(1)).min(16);
        let works: Vec<Work<'a>> =
            (0..places).map(|i| make(&mut Room { next: self.memory.address() + i * each })).collect();
        let us = self.time(|i| works[i as usize % works.len()]());
        let (gb_s, tflops) = (bytes as f64 / us / 1e3, flops as f64 / us / 1e6);
        let share = (gb_s / self.copy_gb_s).max(tflops / NOMINAL_TFLOPS);
        println!(
            r#"{{"kernel": "{kernel}", "model": "{}", "us": {us:.2}, "bytes": {bytes}, "gb_s": {gb_s:.1}, "flops": {flops}, "tflops": {tflops:.2}, "share": {share:.3}}}"#,
            self.model.name
        );
    }

    fn all(&self, indices: Address, cos_sin: Address) {
        self.elementwise(cos_sin);
        self.norms_and_rows();
        self.head(indices);
        self.table(indices);
        self.update();
        self.attention();
    }

    fn elementwise(&self, cos_sin: Address) {
        let Model { batch, time, width, hidden, heads, .. } = self.model;
        let (tokens, t) = (u64::from(batch * time), Dtype::Bf16);
        let (n, w) = (tokens * u64::from(hidden), tokens * u64::from(width));
        for f in Function::ALL {
            self.measure(&format!("{f:?}"), 4 * n, 0, |room| {
                let [x, y] = room.take_each(2 * n);
                self.work(activation::forward(f, t, n, x, y))
            });
            self.measure(&format!("{f:?} backward"), 6 * n, 0, |room| {
                let [x, dy, dx] = room.take_each(2 * n);
                self.work(activation::backward(f, t, n, x, dy, dx))
            });
        }
        self.measure("swiglu", 6 * n, 0, |room| {
            let [gate, up, y] = room.take_each(2 * n);
            self.work(activation::swiglu(t, n, [gate, up], y))
        });
        self.measure("swiglu backward", 10 * n, 0, |room| {
            let [gate, up, dy, d_gate, d_up] = room.take_each(2 * n);
            self.work(activation::swiglu_backward(t, n, [gate, up], dy, [d_gate, d_up]))
        });
        self.measure("sum", 6 * w, 0, |room| {
            let [a, b, y] = room.take_each(2 * w);
            self.work(activation::add(t, w, [a, b], y))
        });
        let mask = Mask { key: [1, 2], first_sample: 0, probability: 0.1, scale: 1.0 / 0.9 };
        self.measure("dropout", 4 * w, 0, |room| {
            let [x, y] = room.take_each(2 * w);
            self.work(dropout(t, &SampleLayout::whole([tokens, width.into()]), &mask, [x, y]))
        });
        let q = tokens * u64::from(heads[0]) * 64;
        self.measure("rotary", 4 * q, 0, |room| {
            let x = room.take(2 * q);
            self.work(rotary(t, [batch, time, heads[0], 64], [cos_sin; 2], 0, [x; 2], Turn::Forth))
        });
    }

    fn norms_and_rows(&self) {
        let Model { batch, time, width, hidden, .. } = self.model;
        let (tokens, t) = (batch * time, Dtype::Bf16);
        let of = Rows { rows: tokens, size: width, dtype: t, eps: 1e-5 };
        let (w, n) = (u64::from(tokens) * u64::from(width), u64::from(tokens) * u64::from(hidden));
        let row = 2 * u64::from(width);
        for is_layer in [true, false] {
            let name = if is_layer { "layer norm" } else { "rms norm" };
            let weights = |room: &mut Room| match room.take_each(row) {
                [weight, bias] if is_layer => Weights::Layer { weight, bias },
                [weight, _] => Weights::Rms { weight },
            };
            self.measure(name, 4 * w, 0, |room| {
                let [x, y] = room.take_each(2 * w);
                self.work([norm::forward(&of, weights(room), x, y)])
            });
            self.measure(&format!("{name} residual"), 8 * w, 0, |room| {
                let [x, branch, total, y] = room.take_each(2 * w);
                self.work([norm::forward_residual(&of, weights(room), [x, branch], [total, y])])
            });
            let nowhere = if is_layer { Weights::Layer { weight: 0, bias: 0 } } else { Weights::Rms { weight: 0 } };
            let partials = 4 * of.partials(nowhere) as u64;
            // The gradient is written alone, or added to an existing one.
            for (is_added, what) in [(false, "backward"), (true, "backward added")] {
                let bytes = if is_added { 8 } else { 6 } * w + partials;
                self.measure(&format!("{name} {what}"), bytes, 0, |room| {
                    let ([x, dy, dx, before], to) = (room.take_each(2 * w), room.take(partials));
                    let before = if is_added { before } else { 0 };
                    self.work([norm::backward(&of, weights(room), [x, dy, before], [dx, to])])
                });
            }
            self.measure(&format!("{name} sums"), partials / if is_layer { 2 } else { 1 }, 0, |room| {
                let at = [room.take(partials), room.take(2 * row)];
                self.work([norm::sums(&of, nowhere, Parameter::Weight, at, true)])
            });
        }
        let partials = u64::from(tokens.div_ceil(rows::BLOCK)) * 4 * u64::from(hidden);
        self.measure("spread", 2 * n, 0, |room| {
            let (from, y) = (room.take(2 * u64::from(hidden)), room.take(2 * n));
            self.work(rows::spread(t, [tokens, hidden], from, y))
        });
        self.measure("row sums", 2 * n + partials, 0, |room| {
            let (x, to) = (room.take(2 * n), room.take(partials));
            self.work([rows::sums(t, [tokens, hidden], x, to)])
        });
        self.measure("row total", partials, 0, |room| {
            let (from, to) = (room.take(partials), room.take(4 * u64::from(hidden)));
            self.work([rows::total([tokens, hidden], from, to, Onto::Sum)])
        });
    }

    /// Measures the cross-entropy with logits in f32 and in bf16, with gradients in bf16.
    fn head(&self, targets: Address) {
        let Model { rows, vocab: classes, .. } = self.model;
        // The same stride as in the model's head.
        let stride = u64::from(classes.next_multiple_of(8));
        let n = u64::from(rows) * stride;
        for (dtype, size) in [(Dtype::F32, 4), (Dtype::Bf16, 2)] {
            let make = |room: &mut Room| {
                let (logits, statistics) = (room.take(size * n), room.take(12 * u64::from(rows)));
                (Logits { rows, classes, stride, dtype, logits, targets, z_loss: 0.0 }, statistics)
            };
            self.measure(&format!("cross-entropy of {dtype:?}"), size * n, 0, |room| {
                let (of, statistics) = make(room);
                self.work([cross_entropy::forward(&of, statistics)])
            });
            self.measure(&format!("cross-entropy of {dtype:?} backward"), (size + 2) * n, 0, |room| {
                let (of, statistics) = make(room);
                let (upstream, out) = ((Upstream::Known(1.0), Counted::Known(rows)), (Dtype::Bf16, of.logits));
                self.work([cross_entropy::backward(&of, statistics, upstream, out)])
            });
        }
        self.measure("mean loss", 12 * u64::from(rows), 0, |room| {
            let (statistics, loss) = (room.take(12 * u64::from(rows)), room.take(4));
            self.work([cross_entropy::mean_loss(rows, Counted::Known(rows), statistics, 0.0, [loss, 0])])
        });
    }

    fn table(&self, indices: Address) {
        let Model { batch, time, width, vocab, .. } = self.model;
        let (count, t) = (batch * time, Dtype::Bf16);
        let of = Lookup { count, entries: vocab, size: width, dtype: t };
        let (n, table) = (u64::from(count) * u64::from(width), u64::from(vocab) * u64::from(width));
        self.measure("gather", 4 * n, 0, |room| {
            let (from, y) = (room.take(2 * table), room.take(2 * n));
            self.work(embedding::gather(&of, from, indices, y))
        });
        let keys = 8 * embedding::keys(count);
        self.measure("sort", keys, 0, |room| self.work(embedding::sort(count, indices, room.take(keys))));
        // The keys are sorted once beforehand. `_kept` reserves their place at the start of the memory.
        let sorted = Room { next: self.memory.address() }.take(keys);
        self.work(embedding::sort(count, indices, sorted))();
        self.measure("scatter", 6 * n, 0, |room| {
            let (_kept, dy, to) = (room.take(keys), room.take(2 * n), room.take(4 * table));
            self.work(embedding::scatter(&of, dy, sorted, to, false))
        });
        self.measure("rescale", 4 * table, 0, |room| {
            let ([x, y], upstream) = (room.take_each(2 * table), room.take(4));
            self.work(cross_entropy::rescale(t, table, [x, y], (1.0, upstream), false))
        });
    }

    /// Measures the update of one layer's parameters, and related kernels of the same size.
    fn update(&self) {
        let width = u64::from(self.model.width);
        let (count, t) = (12 * width * width, Dtype::Bf16);
        let rule = Optimizer::AdamW(AdamW::default());
        let factors =
            rule.factors(&Step { step: 3, lr: 1e-6, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true });
        self.measure("adamw", 30 * count, 0, |room| {
            let [params, m, v, grads] = room.take_each(4 * count);
            let (working, communicated) = (room.take(2 * count), Dtype::F32);
            let updated =
                Updated { params, states: [m, v], grads, communicated, working, averages: 0, count, decay: true };
            self.work(optimizer::update(t, [&factors; 2], &[updated], 0.0, 0))
        });
        self.measure("square sums", 4 * count, 0, |room| {
            let (grads, sums) = (room.take(4 * count), room.take(8 * count.div_ceil(SQUARES)));
            self.work(square_sums(&[Squared { grads, count, communicated: Dtype::F32 }], sums))
        });
        for (name, bytes, launch) in [
            ("widen", 6, widen as fn(Dtype, u64, Address, Address) -> Option<Launch<optimizer::CastArgs>>),
            ("narrow", 6, narrow),
            ("add to", 10, add_to),
        ] {
            self.measure(name, bytes * count, 0, |room| {
                let [from, to] = room.take_each(4 * count);
                self.work(launch(t, count, from, to))
            });
        }
        for codes in BlockCodes::ALL {
            let bytes = codes.bytes(count as usize) as u64;
            let [quantized, summed] = ["quantize to", "sum of two"].map(|name| format!("{name} {codes:?}"));
            self.measure(&quantized, 4 * count + bytes, 0, |room| {
                let coded = Coded { values: room.take(4 * count), codes: room.take(bytes), count };
                self.work(quantize(Dtype::F32, codes, &[coded]))
            });
            self.measure(&summed, 4 * count + 2 * bytes, 0, |room| {
                let coded = Coded { values: room.take(4 * count), codes: room.take(2 * bytes), count };
                self.work(dequantize(
                    Dtype::F32,
                    codes,
                    &[coded],
                    Senders { count: 2, apart: bytes as usize, adds: false },
                ))
            });
        }
    }

    /// Measures attention. The forward computes two matrix products over the lower triangle of the scores, and the
    /// backward five.
    fn attention(&self) {
        let Model { batch, time, heads: [heads, kv_heads], .. } = self.model;
        let of = Geometry {
            batch,
            time,
            heads,
            kv_heads,
            size: 64,
            dtype: Dtype::Bf16,
            packed: false,
            firsts: 0,
            from: 0,
            keys: time,
        };
        let [q, kv] = [heads, kv_heads].map(|heads| 2 * 64 * u64::from(batch * time * heads));
        let statistic = 4 * u64::from(batch * time * heads);
        let product = u64::from(batch * heads) * u64::from(time).pow(2) * 64;
        let saved = |room: &mut Room| Saved {
            qkv: [room.take(q), room.take(kv), room.take(kv)],
            out: room.take(q),
            log_sums: room.take(statistic),
            d_out: room.take(q),
        };
        self.measure("attention", 2 * q + 2 * kv + statistic, 2 * product, |room| {
            let Saved { qkv, out, log_sums, .. } = saved(room);
            self.work(attention::forward(&of, qkv, out, log_sums))
        });
        self.measure("attention backward", 4 * q + 4 * kv + 2 * statistic, 5 * product, |room| {
            let (saved, to) = (saved(room), [room.take(q), room.take(kv), room.take(kv)]);
            self.work(attention::backward(&of, &saved, to, room.take(statistic)).unwrap())
        });
    }
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let is_mock = !mock::is_real() || env::var_os("CARD_MOCK").is_some();
    let Some(bench) = Bench::new() else { return };
    let (bytes, models, warm_up, launches) =
        if is_mock { (4 << 20, &[TINY][..], 1, 2) } else { (4 << 30, &MODELS[..], 3, 32) };
    let memory = Allocation::new(&bench.card.device, bytes).unwrap();
    // Pairs of bf16 are also valid f32.
    let pattern = bench.upload(&numbers(1 << 16, 1.0));
    let rows = (bytes / pattern.len()) as u32;
    bench.launch(&rows::spread(Dtype::F32, [rows, 1 << 16], pattern.address(), memory.address()).unwrap());
    let mut bed = Bed { bench: &bench, model: TINY, memory: &memory, warm_up, launches, copy_gb_s: 0.0 };

    let copied = (bytes as u64 / 4) as usize;
    let us = bed.time(|_| {
        let (from, to) = (memory.address(), memory.address() + 2 * copied as Address);
        // SAFETY: both ranges are in memory that nothing else uses now.
        unsafe { bench.stream.copy(from, to, copied) }.unwrap();
    });
    bed.copy_gb_s = 2.0 * copied as f64 / us / 1e3;
    println!(
        r#"{{"ceiling": "copy", "bytes": {copied}, "us": {us:.1}, "gb_s": {:.1}, "nominal_tflops": {NOMINAL_TFLOPS}}}"#,
        bed.copy_gb_s
    );
    for &model in models {
        let tokens = model.batch * model.time;
        let ids: Vec<f32> = (0..tokens).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761) % model.vocab)).collect();
        let (indices, cos_sin) = (bench.upload(&ids), bench.upload(&numbers((model.time * 32) as usize, 1.0)));
        bed.model = model;
        bed.all(indices.address(), cos_sin.address());
    }
    bench.stream.synchronize().unwrap();
}
