//! Compares AdamW with a loop that only reads and writes the same arrays.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use zero_optim::bench::{Arrays, adamw as rule, bytes_per_parameter};

fn adamw(criterion: &mut Criterion) {
    // 200 MB per array, far beyond any cache.
    let n = 50_000_000;
    let mut arrays = Arrays::new(n, 2);
    let mut group = criterion.benchmark_group("adamw-50M");
    group.sample_size(20).throughput(Throughput::Bytes((n * bytes_per_parameter(2)) as u64));
    group.bench_function("update", |bencher| bencher.iter(|| arrays.update(&rule())));
    group.bench_function("floor", |bencher| bencher.iter(|| arrays.floor()));
    group.finish();
}

criterion_group!(benches, adamw);
criterion_main!(benches);
