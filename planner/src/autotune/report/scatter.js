// The two scatter charts: speed against memory with the Pareto front, and predicted against measured step times.

const rangeOf = (values, pad) => {
  const low = Math.min(...values), high = Math.max(...values), more = (high - low || Math.abs(high) || 1) * pad;
  return [low - more < 0 && low >= 0 ? 0 : low - more, high + more];
};

// The range of measured values. Intervals widen it by at most half, so that a wide one (from two runs, say) does not
// squeeze the marks together.
const rangeOfMeasured = (values, rows, by, pad) => {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) / 5) / 2;
  const ends = rows.flatMap(row => [row.low, row.high]).filter(known), near = ends.map(end => clamp(low - room, end, high + room));
  const range = rangeOf([low, high, ...near].map(v => v / by), pad);
  return [...range, ends.some(end => end / by < range[0] || end / by > range[1]) ? ["Intervals that end at an edge extend beyond it."] : []];
};

// A value with its interval, as text.
function measured({ value, low, high }, unit) {
  const [by] = unitOf(unit, [value]);
  return amount(value, unit, 4) + (known(low) && known(high) ? ` (${digits(low / by, 4)} to ${digits(high / by, 4)})` : "");
}

// The Pareto front: measured rows that no other row beats in both speed and memory, in order of memory.
function front(rows, metric) {
  const sign = metric.isHigherBetter ? 1 : -1, found = [];
  for (const row of [...rows].sort((a, b) => a.planned - b.planned || sign * (b.metric.value - a.metric.value)))
    if (found.length === 0 || sign * (row.metric.value - found[found.length - 1].metric.value) > 0) found.push(row);
  return found;
}

function drawMemory(figure, text, results, width) {
  const { metric, limit } = results;
  const isDone = row => row.state === "measured" && known(row.metric.value);
  const value = row => (isDone(row) ? row.metric.value : row.predicted);
  const all = results.rows.filter(row => known(row.planned) && known(value(row)));
  if (all.length === 0) return void (text.textContent = "No configuration has both a known memory and a known speed.");
  // Rows that need far more memory than available would squeeze the others into a corner.
  const drawn = known(limit) ? all.filter(row => isDone(row) || row.planned <= limit * 1.25) : all;
  const [shown, beyond] = drawn.length > 0 ? [drawn, all.length - drawn.length] : [all, 0];
  const planned = shown.map(row => row.planned), largest = Math.max(...planned);
  const isLimitShown = known(limit) && limit > 0 && limit <= 3 * largest;
  const [bytes, bytesName] = unitOf("B", planned);
  const values = shown.map(value);
  const [by, name] = unitOf(metric.unit, values);
  const [low, high, cut] = rangeOfMeasured(values, shown.filter(isDone).map(row => row.metric), by, 0.08);
  const [least, most] = rangeOf([...planned, ...(isLimitShown ? [limit] : [])].map(v => v / bytes), 0.04);
  const height = Math.round(clamp(300, width * 0.45, 400));
  const y = linear(low, high, height - 40, 40);
  const gutter = 10 + 7.2 * Math.max(...y.ticks(height / 50).map(([, label]) => label.length), 2);
  const x = linear(least, most, gutter, width - 8);
  const svg = chart(`${metric.name} against planned memory`, `${shown.length} configurations; the line is the Pareto front of those measured.`,
    x, y, `planned memory per rank (${bytesName})`, `${metric.name} (${name ? `${name}, ` : ""}${metric.isHigherBetter ? "higher" : "lower"} is better)`, width, height);
  if (isLimitShown) {
    const right = x.of(limit / bytes), label = `limit ${amount(limit, "B")}`;
    svg.append(make("line", { class: "limit", x1: right, x2: right, y1: 34, y2: y.from }));
    svg.append(make("text", { x: Math.max(right + 2, label.length * 7), y: 30, "text-anchor": "end" }, label));
  }
  const done = shown.filter(isDone), edge = front(done, metric);
  const spot = row => [x.of(row.planned / bytes), y.of(value(row) / by)];
  if (edge.length > 0) {
    const steps = edge.map((row, index) => (index === 0 ? `M${spot(row).join(" ")}` : `H${spot(row)[0]}V${spot(row)[1]}`));
    svg.append(make("path", { class: "front", d: steps.join("") }));
  }
  for (const row of done) drawInterval(svg, spot(row), y, row.metric, by);
  // Rows with more information are drawn later, so that nothing hides them.
  const weight = row => (row === results.best ? 4 : row === results.base ? 3 : isDone(row) ? 2 : row.state === "predicted" ? 1 : 0);
  for (const row of [...shown].sort((a, b) => weight(a) - weight(b))) svg.append(shape(markOf(row, results), ...spot(row)));
  const label = (row, words) => row && shown.includes(row) ? { x: spot(row)[0], y: spot(row)[1], label: words } : null;
  const isSame = results.best === results.base;
  nameMarks(svg, [label(results.best, isSame ? "your own, the best" : "best"), isSame ? null : label(results.base, "your own")], width, 34, y.from);
  const marks = [...shown].sort((a, b) => a.planned - b.planned).map(row => pointAt(spot(row), () => {
    const speed = isDone(row) ? measured(row.metric, metric.unit) : `predicted ${amount(value(row), metric.unit, 4)}`;
    return `${row.words}: ${speed}, planned ${amount(row.planned, "B")}, ${row.state}`;
  }));
  const states = usualMarks(results, shown);
  if (edge.length > 1) states.push(["Pareto front of the measured", make("path", { class: "front", d: "M1 10H9V3H17" })]);
  const readout = explore(svg, marks, width);
  figure.append(svg, legend(states), readout);
  const notes = [`Every mark is a configuration; marks further ${metric.isHigherBetter ? "up" : "down"} and to the left are better.`];
  if (beyond > 0) notes.push(`Not drawn: ${beyond} whose planned memory exceeds 1.25 times the limit.`);
  notes.push(...cut);
  if (known(limit) && !isLimitShown) notes.push(`The limit, ${amount(limit, "B")}, lies beyond the right edge.`);
  text.textContent = notes.join(" ");
}

const TOLERANCE = 0.15;

function drawAccuracy(figure, text, results, width) {
  const shown = results.rows.filter(row => row.predictedSeconds > 0 && row.seconds.value > 0);
  if (shown.length === 0) return void (text.textContent = "No step time was both predicted and measured.");
  const off = shown.map(row => Math.abs(row.predictedSeconds / row.seconds.value - 1)).sort((a, b) => a - b);
  const middle = results.medianError ?? (off[Math.floor((off.length - 1) / 2)] + off[Math.ceil((off.length - 1) / 2)]) / 2;
  const inside = off.filter(error => error <= TOLERANCE).length;
  text.textContent = `The median error of the predicted step time is ${percent(middle)}; within ±${TOLERANCE * 100}\u00a0%: ${inside} of ${shown.length}.`;
  const values = shown.flatMap(row => [row.predictedSeconds, row.seconds.value]);
  const [by, name] = unitOf("s", values);
  const [low, high, cut] = rangeOfMeasured(values, shown.map(row => row.seconds), by, 0.1);
  text.append(cut.map(word => ` ${word}`).join(""));
  const size = Math.min(width, 400), y = linear(low, high, size - 40, 24);
  const gutter = 10 + 7.2 * Math.max(...y.ticks(size / 50).map(([, label]) => label.length), 2);
  const x = linear(low, high, gutter, size - 8);
  const svg = chart("Predicted against measured step time", `${shown.length} measured; the diagonal is an exact prediction.`,
    x, y, `predicted step (${name})`, `measured step (${name})`, size, size);
  // The part of a line through the origin that is inside the chart; a single point if it only touches a corner.
  const line = factor => {
    const ends = [Math.max(low, low / factor), Math.min(high, high / factor)];
    return ends[0] < ends[1] ? ends.map(v => [x.of(v), y.of(v * factor)]) : [factor > 1 ? [x.of(low), y.of(high)] : [x.of(high), y.of(low)]];
  };
  const join = points => `M${points.map(point => point.join(" ")).join("L")}`;
  const corner = [x.of(high), y.of(high)], origin = [x.of(low), y.of(low)];
  const diagonal = make("path", { class: "diagonal", d: join([origin, corner]) });
  svg.append(make("path", { class: "tolerance", d: `${join([origin, ...line(1 / (1 - TOLERANCE)), corner, ...line(1 / (1 + TOLERANCE)).reverse()])}z` }), diagonal);
  const spot = row => [x.of(row.predictedSeconds / by), y.of(row.seconds.value / by)];
  for (const row of shown) drawInterval(svg, spot(row), y, row.seconds, by);
  const weight = row => (row === results.best ? 2 : row === results.base ? 1 : 0);
  for (const row of [...shown].sort((p, q) => weight(p) - weight(q))) svg.append(shape(markOf(row, results), ...spot(row)));
  const marks = [...shown].sort((p, q) => p.predictedSeconds - q.predictedSeconds).map(row => pointAt(spot(row), () => {
    const error = Math.abs(row.predictedSeconds / row.seconds.value - 1);
    return `${row.words}: predicted ${amount(row.predictedSeconds, "s")}, measured ${measured(row.seconds, "s")}, off by ${percent(error)}`;
  }));
  const entries = usualMarks(results, shown);
  entries.push(["exact", make("path", { class: "diagonal", d: "M1 11L17 1" })], [`within ±${TOLERANCE * 100} %`, make("rect", { class: "tolerance", x: 1, y: 1, width: 16, height: 10 })]);
  const readout = explore(svg, marks, size);
  figure.append(svg, legend(entries), readout);
}
