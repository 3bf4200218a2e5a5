// Line charts over the steps of runs.

// As linear(), for positive values.
function logarithmic(low, high, from, to) {
  const first = Math.log10(low), last = Math.log10(high), by = (to - from) / (last - first || 1);
  return { low, high, from, to, of: value => at(from + (Math.log10(value) - first) * by), ticks: count => {
    const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count))), found = [];
    for (let power = Math.ceil(first - 1e-9); power <= last + 1e-9; power += every) found.push([10 ** power, digits(10 ** power, 1)]);
    return found;
  } };
}

const extent = values => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// The vertical axis: logarithmic if values that may be drawn so differ by more than a factor of 50.
function valueAxis(values, by, { isFromZero, mayBeLogarithmic }, from, to) {
  const [low, high] = extent(values).map(value => value / by);
  if (mayBeLogarithmic && low > 0 && high > 50 * low) return [logarithmic(low / 1.2, high * 1.2, from, to), true];
  const more = (high - low || Math.abs(high) || 1) * 0.05;
  return [linear(isFromZero && low >= 0 ? 0 : low - more, high + more, from, to), false];
}

// Whole steps only.
function stepAxis(low, high, from, to) {
  const x = linear(low, high, from, to);
  return { ...x, ticks: count => x.ticks(count).filter(([step]) => Number.isInteger(step)).map(([step]) => [step, step.toLocaleString("en")]) };
}

// What a chart is drawn over.
const STEPS = { name: "step", axis: stepAxis, of: step => step.toLocaleString("en"), span: (first, last) => plural(last - first + 1, "step", "steps") };
const RATES = { name: "learning rate", axis: (low, high, from, to) => valueAxis([low, high], 1, { mayBeLogarithmic: true }, from, to)[0],
  of: rate => digits(rate, 4), span: (first, last) => `learning rates from ${digits(first)} to ${digits(last)}` };

// Points that are not finite interrupt the line. A point without neighbours is a dot.
function linePath({ steps, values }, x, y, by) {
  let path = "", length = 0;
  const close = () => { if (length === 1) path += "h0"; length = 0; };
  steps.forEach((step, index) => {
    if (!known(values[index])) return void close();
    path += `${length++ === 0 ? "M" : "L"}${x.of(step)} ${y.of(values[index] / by)}`;
  });
  close();
  return path;
}

const stepsOf = curves => extent(curves.flatMap(({ steps }) => (steps.length > 0 ? [steps[0], steps[steps.length - 1]] : [])));

// Draws curves {name, look, steps, values, isMarked} over steps, or over rates in their place; returns whether there is a point to draw.
function drawCurves(box, options, width) {
  const { title, name, unit = "", over = STEPS } = options;
  const curves = options.curves.filter(({ values }) => values.some(known));
  if (curves.length === 0) return false;
  const values = curves.flatMap(curve => curve.values.filter(known)), [by, unitName] = unitOf(unit, extent(values));
  const height = width < 480 ? 230 : 270, bottom = height - 40, top = 24;
  const [y, isLogarithmic] = valueAxis(values, by, options, bottom, top);
  const letters = Math.max(...y.ticks((bottom - top) / 50).map(([, label]) => label.length), 3);
  const [first, last] = options.steps ?? stepsOf(curves);
  const x = over.axis(first, last, letters * 7 + 8, width - 8);
  const words = [name, unitName ? `(${unitName})` : "", isLogarithmic ? "· logarithmic" : ""].filter(Boolean).join(" ");
  const svg = chart(title, `${words} over ${over.span(first, last)}, ${plural(curves.length, "curve", "curves")}.`, x, y, over.name, words, width, height);
  const marks = [];
  let gaps = 0;
  curves.forEach((curve, row) => {
    svg.append(make("path", { class: `curve ${curve.look}`, d: linePath(curve, x, y, by) }));
    const isDotted = curve.isMarked && curve.steps.length <= 80;
    curve.steps.forEach((step, index) => {
      const value = curve.values[index], isGap = !known(value), px = x.of(step), py = isGap ? y.to + 4 : y.of(value / by);
      if (isGap) gaps++;
      if (isGap || isDotted) svg.append(make("path", { class: `mark ${isGap ? "gap" : `point ${curve.look}`}`, d: isGap ? SHAPES.cross(px, py, 3) : SHAPES.diamond(px, py, 4) }));
      const words = isGap ? "not finite" : amount(value, unit, 5);
      marks.push({ ...pointAt([px, py], () => `${curve.name}, ${over.name} ${over.of(step)}: ${words}`), row });
    });
  });
  const entries = curves.map(({ name, look, isMarked }) => [name, make("g", null, make("path", { class: `curve ${look}`, d: "M0 6H18" }), isMarked ? make("path", { class: `mark point ${look}`, d: SHAPES.diamond(9, 6, 4) }) : "")]);
  if (gaps > 0) entries.push(["not finite", make("path", { class: "mark gap", d: SHAPES.cross(9, 6, 3) })]);
  const readout = explore(svg, marks, width);
  box.append(make("figure", null, svg, entries.length > 1 ? legend(entries) : null, readout));
  return true;
}
