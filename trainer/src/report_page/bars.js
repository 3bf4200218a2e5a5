// Horizontal bars with their figures above them, and an outline for what was planned.

// Rows are headings {heading}, or bars {label, value, planned, look}. Values that are not known have no bar.
function drawBars(box, { title, name, unit, rows }, width) {
  const values = rows.flatMap(row => [row.value, row.planned]).filter(known);
  if (values.length === 0) return false;
  const most = Math.max(...values), [by, unitName] = unitOf(unit, [most]);
  let height = 4;
  const places = rows.map(row => {
    const top = height;
    height += row.heading ? 26 : 40;
    return { row, top };
  });
  const x = linear(0, most / by || 1, 12, width - 16);
  const svg = chart(title, `${plural(rows.length, "row", "rows")} of ${name}.`, x, null, `${name} (${unitName})`, null, width, height + 40);
  const marks = [];
  let hasPlan = false;
  places.forEach(({ row, top }, index) => {
    if (row.heading) return void svg.append(make("text", { class: "named", x: x.from, y: top + 18 }, row.heading));
    const planned = known(row.planned) ? `, ${amount(row.planned, unit)} planned` : "";
    const figure = `: ${known(row.value) ? amount(row.value, unit) : "not measured"}${planned}`;
    const label = cut(row.label, Math.max(8, width / 7.2 - figure.length));
    svg.append(make("text", { x: x.from, y: top + 14 }, label + figure));
    const end = x.of((row.value ?? 0) / by);
    if (known(row.value)) svg.append(make("rect", { class: `bar ${row.look}`, x: x.from, y: top + 20, width: at(Math.max(end - x.from, 0.5)), height: 12 }));
    if (known(row.planned)) {
      hasPlan = true;
      svg.append(make("rect", { class: "planned", x: x.from, y: top + 20, width: at(x.of(row.planned / by) - x.from), height: 12 }));
    }
    marks.push({ x0: x.from, x1: end, y0: top + 20, y1: top + 32, row: index, text: () => row.label + figure });
  });
  const readout = explore(svg, marks, width);
  const entries = [["measured", make("rect", { class: "bar run-0", x: 1, y: 1, width: 16, height: 10 })], ["planned", make("rect", { class: "planned", x: 1, y: 1, width: 16, height: 10 })]];
  box.append(make("figure", null, svg, hasPlan ? legend(entries) : null, readout));
  return true;
}
