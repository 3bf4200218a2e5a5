// The timeline of one step: a row for each lane of each rank, a rectangle for each instruction.

// How each kind of instruction is drawn. `await_*` in the compute lane is communication time that was not hidden.
const KINDS = [
  ["forward", "forward", /^(forward|keep|discard)/],
  ["recompute", "recomputation", /^recompu/],
  ["backward", "backward", /^backward/],
  ["update", "norm and update", /^(update|gradient_norm|accumulate)/],
  ["gather", "gather", /^(gather|refresh|all_gather)/],
  ["reduce", "reduce", /^(reduce|all_reduce)/],
  ["send", "sending", /^(send|receive)/],
  ["disk", "disk", /^(fetch|offload|disk|read|write)/],
  ["wait", "waiting", /^(await|wait|communication)/],
  ["other", "other", /^/],
];
// The height in pixels that fits on a printed page with the surrounding text.
const MOST_HEIGHT = 720;
const THIRD = 1 / 3, NARROW = 3;

function drawTimeline(figure, text, results, width) {
  const { rows, seconds, title } = results.timeline;
  const lanes = rows.filter(row => row.spans.length > 0);
  if (lanes.length === 0) return void (text.textContent = "No timeline was recorded.");
  // A heading for each rank, followed by its lanes.
  let y = 0, rank = null;
  const places = lanes.map(row => {
    const heading = row.rank !== rank ? (y += rank === null ? 14 : 24) : null, top = y + 4;
    rank = row.rank;
    y += 20;
    return { row, heading, top, height: 16 };
  }).filter(({ top, height }) => top + height <= MOST_HEIGHT);
  const shown = places.map(({ row }) => row);
  const last = shown.reduce((end, row) => row.spans.reduce((later, span) => Math.max(later, span.end), end), seconds ?? 0) || 1;
  const [by, name] = unitOf("s", [last]);
  const letters = Math.max(5, Math.min(Math.max(...shown.map(row => row.lane.length)), Math.floor((width * 0.3) / 7)));
  const x = linear(0, last / by, letters * 7 + 8, width - 8), bottom = places[places.length - 1].top + 20;
  const svg = chart(title, `${plural(shown.length, "lane", "lanes")} over ${amount(last, "s")}.`,
    x, null, `time (${name})`, null, width, bottom + 40);
  svg.querySelector("desc").after(make("defs", null, hatch("recompute", "M-2 2L2 -2M0 8L8 0M6 10L10 6"), hatch("reduce", "M-2 6L2 10M0 0L8 8M6 -2L10 2")));
  const paths = new Map(), marks = [];
  let joined = 0, dropped = 0;
  places.forEach(({ row, heading, top, height }, index) => {
    if (heading !== null) svg.append(make("text", { class: "named", x: 0, y: heading }, cut(`rank ${row.rank || "unknown"}`, width / 8)));
    svg.append(make("text", { x: 0, y: top + 12 }, cut(row.lane, letters)));
    svg.append(make("rect", { class: "track", x: x.from, y: top, width: at(x.to - x.from), height }));
    const open = new Map();
    const close = (kind, [from, to]) => {
      if (to - from < THIRD) return void dropped++;
      // Wide spans get a gap to their neighbour.
      const [over, under] = kind === "wait" ? [5.5, 10.5] : [0, height], end = at(to - (to - from > NARROW ? 0.75 : 0));
      paths.set(kind, `${paths.get(kind) ?? ""}M${at(from)} ${top + over}H${end}V${top + under}H${at(from)}z`);
    };
    for (const span of [...row.spans].sort((a, b) => a.start - b.start)) {
      const [kind] = KINDS.find(([, , test]) => test.test(span.kind));
      const from = x.of(Math.max(0, span.start) / by), to = Math.max(from, x.of(span.end / by)), before = open.get(kind);
      if (before && from - before[1] < THIRD && Math.max(before[2], to - from) < NARROW) {
        before[1] = Math.max(before[1], to);
        before[2] = to - from;
        joined++;
      } else {
        if (before) close(kind, before);
        open.set(kind, [from, to, to - from]);
      }
      marks.push({ x0: from, x1: to, y0: top, y1: top + height, row: index,
        text: () => `rank ${row.rank}, ${row.lane}: ${span.name || span.kind}, ${amount(span.end - span.start, "s")}, from ${amount(span.start, "s")} to ${amount(span.end, "s")}` });
    }
    open.forEach((span, kind) => close(kind, span));
  });
  const kinds = KINDS.filter(([kind]) => paths.has(kind));
  for (const [kind] of kinds) svg.append(make("path", { class: `span ${kind}`, d: paths.get(kind) }));
  const swatch = kind => make("rect", { class: kind, x: 1, y: kind === "wait" ? 4 : 1, width: 16, height: kind === "wait" ? 4 : 10 });
  const readout = explore(svg, marks, width);
  figure.append(svg, legend(kinds.map(([kind, words]) => [words, swatch(kind)])), readout);
  const notes = [`One step takes ${amount(seconds ?? last, "s")}.`];
  if (joined > 0) notes.push(`Of ${plural(marks.length, "span", "spans")}, neighbours of one kind that are narrower than ${NARROW} pixels here are drawn as one.`);
  if (dropped > 0) notes.push(`Not drawn: ${plural(dropped, "span", "spans")} narrower than a third of a pixel.`);
  if (lanes.length > shown.length) notes.push(`The first ${shown.length} of ${lanes.length} lanes are drawn.`);
  text.textContent = notes.join(" ");
}

const cut = (text, letters) => (text.length > letters ? `${text.slice(0, Math.floor(letters) - 1)}…` : text);

const hatch = (kind, lines) =>
  make("pattern", { id: `hatch-${kind}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
    make("rect", { width: 8, height: 8 }), make("path", { d: lines, "stroke-width": 3.2, fill: "none" }));
