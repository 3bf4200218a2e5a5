// Building blocks of charts: elements, scales, axes, legends, and a line of text that describes the mark under the
// pointer or selected by the arrow keys.

function make(name, attributes, ...children) {
  const isShape = /^(svg|g|path|rect|circle|line|text|title|desc|defs|pattern)$/.test(name);
  const element = isShape ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) if (value !== null) element.setAttribute(key, value);
  element.append(...children.filter(child => child !== null));
  return element;
}

const at = pixels => Math.round(pixels * 100) / 100;

function linear(low, high, from, to) {
  const span = high - low || Math.abs(high) || 1;
  const by = (to - from) / span;
  return { low, high, from, to, of: value => at(from + (value - low) * by), ticks: count => {
    const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough) ?? rough;
    const decimals = clamp(0, -Math.floor(Math.log10(step) + 1e-9), 9);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 50; n++) {
      const value = n * step || 0; // not -0
      found.push([value, step >= 1e9 ? digits(value, 2) : fixed(value, decimals)]);
    }
    return found;
  } };
}

// An empty chart with its axes. The name of the vertical axis stands above it, where it takes no width.
function chart(title, description, x, y, xName, yName, width, height) {
  const id = title.replace(/\W+/g, "-").toLowerCase();
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "application", tabindex: 0,
    "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-text`, style: `max-width:${width}px` },
    make("title", { id: `${id}-title` }, title), make("desc", { id: `${id}-text` }, description));
  for (const [value, label] of y?.ticks(Math.abs(y.to - y.from) / 50) ?? []) {
    svg.append(make("line", { class: "grid", x1: x.from, x2: x.to, y1: y.of(value), y2: y.of(value) }));
    svg.append(make("text", { class: "tick", x: x.from - 6, y: y.of(value) + 4, "text-anchor": "end" }, label));
  }
  const bottom = y ? y.from : height - 36, top = y ? y.to : 0;
  for (const [value, label] of x.ticks(Math.abs(x.to - x.from) / 80)) {
    svg.append(make("line", { class: "grid", x1: x.of(value), x2: x.of(value), y1: top, y2: bottom }));
    const half = label.length * 4.2, middle = Math.min(x.of(value), width - half);
    svg.append(make("text", { class: "tick", x: middle, y: bottom + 16, "text-anchor": "middle" }, label));
  }
  svg.append(make("text", { class: "tick", x: x.to, y: bottom + 32, "text-anchor": "end" }, xName));
  if (yName) svg.append(make("text", { class: "tick", x: 0, y: 12 }, yName));
  return svg;
}

const SHAPES = {
  circle: (x, y, r) => `M${at(x - r)} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  diamond: (x, y, r) => `M${x} ${at(y - r)}L${at(x + r)} ${y}L${x} ${at(y + r)}L${at(x - r)} ${y}z`,
  square: (x, y, r) => `M${at(x - r)} ${at(y - r)}h${2 * r}v${2 * r}h${-2 * r}z`,
  cross: (x, y, r) => `M${at(x - r)} ${at(y - r)}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
};

// The style of a row: the best and the user's own stand out, unmeasured rows are hollow.
function markOf(row, results) {
  const hollow = row.state === "measured" ? "" : " hollow";
  if (row === results.best) return ["diamond", `best${hollow}`, 7];
  if (row === results.base) return ["square", `own${hollow}`, 5];
  if (row.state === "measured") return ["circle", "measured", 4.5];
  return row.state === "predicted" ? ["circle", "predicted", 3] : ["cross", "left-out", 3];
}

const shape = ([kind, name, size], x, y) => make("path", { class: `mark ${name}`, d: SHAPES[kind](x, y, size) });

// Labels beside the marks; if two would overlap, one goes above and one below.
function nameMarks(svg, marks, right, top, bottom) {
  const [best, own] = marks, placed = [];
  for (const [mark, other] of [[own, best], [best, own]]) {
    if (!mark) continue;
    const isBelow = other && (mark.y === other.y ? mark === own : mark.y > other.y), toLeft = mark.x + mark.label.length * 7.5 + 12 > right;
    let y = clamp(top + 10, mark.y + (isBelow ? 17 : -8), bottom - 4);
    if (placed.some(before => Math.abs(before - y) < 14)) y -= 14;
    placed.push(y);
    svg.append(make("text", { class: "named", x: mark.x + (toLeft ? -9 : 9), y, "text-anchor": toLeft ? "end" : "start" }, mark.label));
  }
}

// Clamped to the axis.
function drawInterval(svg, [x], y, { low, high }, by) {
  const end = value => y.of(clamp(y.low, value / by, y.high));
  if (known(low) && known(high)) svg.append(make("line", { class: "interval", x1: x, x2: x, y1: end(low), y2: end(high) }));
}

const pointAt = ([x, y], text) => ({ x0: x, x1: x, y0: y, y1: y, row: 0, text });

// The legend items that both scatter charts share and that occur in the data.
function usualMarks({ best, base }, shown) {
  const entries = [[best === base ? "your own, the best" : "best", "diamond", "best", 5, row => row === best], ["your own configuration", "square", "own", 4, row => row === base && row !== best],
    ["measured", "circle", "measured", 4.5, row => row.state === "measured" && row !== best && row !== base],
    ["predicted only", "circle", "predicted", 3, row => row.state === "predicted"],
    ["predicted, but left out", "cross", "left-out", 3, row => row.state !== "measured" && row.state !== "predicted"]];
  return entries.filter(([, , , , has]) => shown.some(has)).map(([words, ...look]) => [words, shape(look, 9, 6)]);
}

function legend(entries) {
  const swatch = (label, drawn) => make("svg", { viewBox: "0 0 18 12" }, make("title", null, label), drawn);
  return make("ul", { class: "legend" }, ...entries.map(([label, drawn]) => make("li", null, swatch(label, drawn), label)));
}

// Marks are boxes {x0, x1, y0, y1, row, text}, in the order of the arrow keys.
function explore(svg, marks, width) {
  const readout = make("output", { class: "readout quiet" }, "Point at a mark, or use the arrow keys, to read it.");
  const ring = make("rect", { class: "selected", visibility: "hidden" });
  svg.append(ring);
  let now = -1;
  const select = index => {
    const mark = marks[index];
    if (!mark) return;
    now = index;
    const wide = Math.max(8, mark.x1 - mark.x0 + 4), high = Math.max(8, mark.y1 - mark.y0 + 4);
    const box = { x: at((mark.x0 + mark.x1 - wide) / 2), y: at((mark.y0 + mark.y1 - high) / 2), width: at(wide), height: at(high), visibility: "visible" };
    for (const [key, value] of Object.entries(box)) ring.setAttribute(key, value);
    readout.textContent = mark.text();
  };
  const distance = (mark, x, y) => Math.hypot(Math.max(0, mark.x0 - x, x - mark.x1), Math.max(0, mark.y0 - y, y - mark.y1));
  const nearest = (x, y, isWanted) => marks.reduce((best, mark, index) => {
    const far = isWanted(mark) ? distance(mark, x, y) : Infinity;
    return far < best[0] ? [far, index] : best;
  }, [Infinity, -1]);
  svg.addEventListener("pointermove", event => {
    const area = svg.getBoundingClientRect(), by = width / area.width;
    const [far, index] = nearest((event.clientX - area.left) * by, (event.clientY - area.top) * by, () => true);
    if (far < 24) select(index);
  });
  svg.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) select(now < 0 ? 0 : clamp(0, now + step, marks.length - 1));
    else if (turn && now < 0) select(0);
    else if (turn) {
      const { x0, x1, y0, y1, row } = marks[now];
      const next = marks.map(mark => mark.row).filter(other => (other - row) * turn > 0).reduce((a, b) => ((a - b) * turn < 0 ? a : b), Infinity * turn);
      select(nearest((x0 + x1) / 2, (y0 + y1) / 2, mark => mark.row === next)[1]);
    } else return;
    event.preventDefault();
  });
  return readout;
}
