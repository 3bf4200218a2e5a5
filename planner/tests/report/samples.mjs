// Writes the results that the page is tested with: node samples.mjs FOLDER
//
// `sample.json` resembles a run on a small machine; the others test that unusual data do not break the page.
import { writeFileSync } from "node:fs";
import { join } from "node:path";

// A fixed random sequence, so that every run tests the same pages.
function numbers(seed) {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) % 2 ** 32;
    return state / 2 ** 32;
  };
}

const GIB = 2 ** 30;

/// A space of stages, micro-batches, recomputation, offload and pipelines over two ranks; `copies` multiplies it by
/// bucket sizes.
function realistic(copies) {
  const random = numbers(7), rows = [], limit = 11.5 * GIB;
  const base = { stage: 1, micro: 4, interval: 0, offload: "none", pipe: 1, bucket: 0 };
  for (let bucket = 0; bucket < copies; bucket++)
    for (const stage of [0, 1, 2, 3]) for (const micro of [1, 2, 4, 8]) for (const interval of [0, 1]) for (const offload of ["none", "cpu", "nvme"]) for (const pipe of [1, 2]) {
      const settings = {};
      if (stage !== base.stage) settings["zero_optimization.stage"] = String(stage);
      if (micro !== base.micro) settings["train_micro_batch_size_per_gpu"] = String(micro);
      if (interval !== base.interval) settings["activation_checkpointing.interval"] = String(interval);
      if (offload !== base.offload) settings["zero_optimization.offload_optimizer.device"] = offload;
      if (stage === 3 && offload === "nvme") settings["zero_optimization.offload_param.device"] = offload;
      if (pipe !== base.pipe) settings["pipeline.stages"] = String(pipe);
      if (bucket > 0) settings["zero_optimization.reduce_bucket_size"] = String(bucket * 250000);
      const shards = stage === 0 ? 1 : stage === 3 ? 0.5 : 1 - stage * 0.17;
      const planned = Math.round(GIB * ((offload === "none" ? 6 : 3.2) * shards + micro * (interval ? 0.45 : 1.35) / pipe));
      const predicted = (0.52 + stage * 0.035 + interval * 0.13 + (offload === "cpu" ? 0.06 : offload === "nvme" ? 0.31 : 0) + 0.6 / micro - (pipe === 2 ? 0.05 : 0)) * (1 + random() * 0.06);
      const row = { id: rows.length, settings, state: "predicted", reason: null, planned_bytes: planned, measured_bytes: null, predicted_seconds: predicted,
        seconds: null, runs: 0, metric: null, predicted_metric: 1024 / predicted };
      if (offload !== "none" && stage === 0)
        Object.assign(row, { state: "refused", planned_bytes: null, predicted_seconds: null, predicted_metric: null,
          reason: `zero_optimization.offload_optimizer: offload needs zero_optimization.stage 1, 2 or 3, and the stage is 0` });
      else if (planned > limit)
        Object.assign(row, { state: "too large", reason: `needs ${(planned / GIB).toFixed(1)} GiB of memory on rank 0, and there are 11.5 GiB` });
      rows.push(row);
    }
  const fits = rows.filter(row => row.state === "predicted").sort((a, b) => a.predicted_seconds - b.predicted_seconds);
  const own = rows.find(row => Object.keys(row.settings).length === 0);
  for (const row of new Set([...fits.slice(0, 9), fits[20], fits[30], own])) {
    const median = row.predicted_seconds * (0.9 + random() * 0.22), spread = 0.005 + random() * 0.015;
    row.state = "measured";
    row.measured_bytes = Math.round(row.planned_bytes * (0.93 + random() * 0.06));
    row.seconds = { median, low: median * (1 - spread), high: median * (1 + spread) };
    row.runs = 4;
    row.metric = { value: 1024 / median, low: 1024 / row.seconds.high, high: 1024 / row.seconds.low };
  }
  Object.assign(fits[10], { state: "failed", reason: "rank 1 ended with status 3: error: no space left on device\n  in: zero_optimization.offload_optimizer.nvme_path" });
  Object.assign(fits[11], { state: "timed out", reason: "no step was done within 120 s" });
  Object.assign(fits[12], { state: "stopped early", reason: "evaluation loss 5.91 above the median 5.42 at step 40" });
  const best = rows.filter(row => row.metric).reduce((a, b) => (b.metric.value > a.metric.value ? b : a));
  const count = (...states) => rows.filter(row => states.includes(row.state)).length;
  return { version: 1, configuration: "ds.yaml", machine: "2 cores of an Intel Xeon, 23.4 GiB", program: "zero-train 0.1.0", date: "2026-11-22", seconds: 312.4,
    metric: { name: "throughput", unit: "tokens/s", higher_is_better: true }, limit_bytes: limit, base: own.id, best: best.id,
    gain: { ratio: best.metric.value / own.metric.value, low: best.metric.low / own.metric.high, high: best.metric.high / own.metric.low },
    counts: { candidates: rows.length, refused: count("refused"), too_large: count("too large"), predicted: count("predicted"), measured: count("measured"), failed: count("failed") },
    median_error: 0.061, rows, timeline: timeline(2, 6, 4, best.seconds.median) };
}

/// A pipeline with one rank per stage: `layers` per stage, `micros` micro-batches, with overlapping collectives,
/// messages and disk transfers.
function timeline(ranks, layers, micros, seconds) {
  const random = numbers(3), rows = [];
  for (let rank = 0; rank < ranks; rank++) {
    const lanes = { compute: [], collectives: [], [rank === 0 ? "activations to 1" : "gradients to 0"]: [], disk: [] };
    const message = Object.keys(lanes)[2];
    let now = 0;
    const add = (lane, kind, name, start, long) => lanes[lane].push({ name, kind, start, end: start + long });
    const run = (kind, name, long) => { add("compute", kind, name, now, long); now += long; };
    if (rank > 0) run("await_receive", "await_receive activations of micro-batch 0", 6);
    for (let micro = 0; micro < micros; micro++) {
      for (let layer = 0; layer < layers; layer++) {
        add("collectives", "gather", `gather segment ${layer}`, now, 0.7);
        run("forward", `forward transformer.h.${layer} of micro-batch ${micro}`, 1 + random() * 0.2);
      }
      if (rank === 0) add(message, "send", `send activations of micro-batch ${micro}`, now, 0.8);
      for (let layer = layers - 1; layer >= 0; layer--) {
        run("recompute", `recompute transformer.h.${layer} of micro-batch ${micro}`, 0.9);
        run("backward", `backward transformer.h.${layer} of micro-batch ${micro}`, 2 + random() * 0.3);
        add("collectives", "reduce", `reduce segment ${layer}`, now, 0.6);
      }
      if (rank > 0) add(message, "send", `send gradients of micro-batch ${micro}`, now, 0.8);
      run("await_reduce", "await_reduce", 0.5);
    }
    add("disk", "fetch", "fetch segment 0", now - 6, 5);
    run("gradient_norm", "gradient_norm", 0.3);
    for (let layer = 0; layer < layers; layer++) {
      add("disk", "offload", `offload segment ${layer}`, now + 0.5, 0.6);
      run("update", `update segment ${layer}`, 0.7);
    }
    for (const [lane, spans] of Object.entries(lanes)) rows.push({ rank, lane, spans });
  }
  const end = Math.max(...rows.flatMap(row => row.spans.map(span => span.end)));
  for (const row of rows) for (const span of row.spans) { span.start *= seconds / end; span.end *= seconds / end; }
  return { seconds, rows };
}

function hostile() {
  const name = `</script><script>window.hacked = true</script><img src=x onerror="window.hacked = true"><!--`;
  const data = realistic(1);
  const best = data.rows.find(row => row.id === data.best);
  for (const field of ["configuration", "machine", "program", "date"]) data[field] = name;
  data.metric = { name: "latency", unit: "s", higher_is_better: false };
  for (const row of data.rows) {
    if (row.predicted_metric) row.predicted_metric = row.predicted_seconds;
    if (row.metric) row.metric = { value: row.seconds.median, low: row.seconds.low, high: row.seconds.high };
    if (row.reason) row.reason += name;
  }
  data.gain = { ratio: 1.01, low: 0.97, high: 1.05 };
  best.settings = { [name]: name, [`${"very_long_key_".repeat(12)}.${"x".repeat(90)}`]: "y".repeat(200), __proto__x: "1" };
  Object.assign(data.rows[0], { settings: null, state: null, planned_bytes: "12", predicted_seconds: -1, seconds: {}, metric: { value: null } });
  Object.assign(data.rows[1], { planned_bytes: null, measured_bytes: null, runs: null, metric: null });
  data.rows[2] = null;
  data.rows[3] = { id: null };
  Object.assign(data.rows[5], { settings: { "a.b": { c: [1] } }, predicted_metric: 1e30, planned_bytes: 0 });
  data.limit_bytes = null;
  data.median_error = null;
  data.timeline.rows[0].spans.push({ name: null, kind: null, start: null, end: 3 }, { name, kind: name, start: 0, end: 0 }, null, { start: 2, end: 1 });
  data.timeline.rows.push(null, { rank: null, lane: null, spans: null }, { rank: name, lane: name, spans: [{ name, kind: "gather", start: 0, end: 0.1 }] });
  return data;
}

/// Sixteen ranks with so many spans that most are narrower than a pixel.
function large() {
  const data = realistic(11);
  data.timeline = timeline(16, 12, 10, 1.2);
  return data;
}

const nothing = () => ({ version: 1, configuration: null, machine: null, program: null, date: null, seconds: null, metric: null, limit_bytes: null, base: null,
  best: null, gain: null, counts: null, median_error: null, rows: [], timeline: null });

/// A single measured configuration, the user's own, by operations per second, without a memory limit.
function alone() {
  const data = realistic(1), own = data.rows.find(row => row.id === data.base);
  own.metric = { value: 1.9e11, low: 1.88e11, high: 1.93e11 };
  own.predicted_metric = 2.02e11;
  return { ...data, metric: { name: "flops", unit: "FLOP/s", higher_is_better: true }, limit_bytes: 900 * GIB, best: own.id, rows: [own], median_error: null,
    gain: { ratio: 1, low: 1, high: 1 }, counts: { candidates: 1, measured: 1 }, timeline: { seconds: null, rows: [] } };
}

/// Two runs each, so that intervals are much wider than the differences between medians.
function uncertain() {
  const data = realistic(1);
  for (const row of data.rows.filter(row => row.metric)) {
    row.seconds = { ...row.seconds, low: row.seconds.median / 3, high: row.seconds.median * 4 };
    row.metric = { ...row.metric, low: row.metric.value / 4, high: row.metric.value * 3 };
  }
  return data;
}

const folder = process.argv[2];
for (const [name, data] of Object.entries({ sample: realistic(1), hostile: hostile(), large: large(), nothing: nothing(), alone: alone(), uncertain: uncertain(), null: null }))
  writeFileSync(join(folder, `${name}.json`), JSON.stringify(data));
