// Normalizes the data that Rust wrote: missing values get defaults.

const GROUPS = [
  ["too large", "Does not fit into memory"],
  ["refused", "Invalid configuration"],
  ["failed", "Failed"],
  ["timed out", "Timed out"],
  ["stopped early", "Stopped early"],
];

function read(raw) {
  const object = value => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
  const list = value => (Array.isArray(value) ? value : []);
  const number = value => (known(value) ? value : null);
  const text = value => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
  const data = object(raw), metric = object(data.metric), timeline = object(data.timeline);
  const interval = (value, middle) => ({ value: number(object(value)[middle]), low: number(object(value).low), high: number(object(value).high) });
  const rows = list(data.rows).map(object).map(row => ({
    id: row.id,
    settings: Object.entries(object(row.settings)).map(([key, value]) => [key, text(value)]),
    state: text(row.state) || "unknown",
    reason: text(row.reason),
    planned: number(row.planned_bytes),
    used: number(row.measured_bytes),
    predictedSeconds: number(row.predicted_seconds),
    seconds: interval(row.seconds, "median"),
    runs: number(row.runs),
    metric: interval(row.metric, "value"),
    predicted: number(row.predicted_metric),
  }));
  const find = id => (id === null || id === undefined ? undefined : rows.find(row => row.id === id));
  const keys = [...new Set(rows.flatMap(row => row.settings.map(([key]) => key)))];
  const results = {
    isThere: raw !== null && typeof raw === "object",
    configuration: text(data.configuration) || "the configuration",
    machine: text(data.machine), program: text(data.program), date: text(data.date), seconds: number(data.seconds),
    metric: { name: text(metric.name) || "metric", unit: text(metric.unit), isHigherBetter: metric.higher_is_better !== false },
    limit: number(data.limit_bytes),
    base: find(data.base), best: find(data.best),
    gain: { ratio: number(object(data.gain).ratio), low: number(object(data.gain).low), high: number(object(data.gain).high) },
    counts: object(data.counts), medianError: number(data.median_error),
    rows, short: shortKeys(keys),
    timeline: {
      title: "A step of the best configuration", seconds: number(timeline.seconds),
      rows: list(timeline.rows).map(object).map(row => ({
        rank: text(row.rank), lane: text(row.lane),
        spans: list(row.spans).map(object).filter(span => known(span.start) && known(span.end) && span.end >= span.start)
          .map(span => ({ name: text(span.name), kind: text(span.kind), start: span.start, end: span.end })),
      })),
    },
  };
  for (const row of rows) row.words = settingsOf(row, results);
  place(results);
  return results;
}

// The differences to the user's own file, on one line.
function settingsOf(row, results) {
  if (row.settings.length === 0) return row === results.base ? `${results.configuration}, unchanged` : "no difference";
  return row.settings.map(([key, value]) => `${results.short.get(key)}:\u00a0${value}`).join(", ");
}

// Sorts measured rows first, the best of them at the top; then predicted rows; then the rest in their original order.
function place(results) {
  const sign = results.metric.isHigherBetter ? -1 : 1;
  const group = row => (row.state === "measured" ? 0 : row.state === "predicted" ? 1 : 2);
  const value = row => (group(row) === 0 ? row.metric.value : row.predicted) ?? sign * -Infinity;
  results.rows.sort((a, b) => group(a) - group(b) || (group(a) < 2 ? sign * (value(a) - value(b)) || 0 : 0));
  let next = 1;
  for (const row of results.rows) row.place = group(row) < 2 ? next++ : null;
}
