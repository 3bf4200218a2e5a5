// Checks report pages against their data, in a real browser: node check.mjs FOLDER
//
// FOLDER has NAME.json and NAME.html; the printed pages are written to FOLDER/pictures, and screenshots as well with
// ZERO_TRAIN_PICTURES=1. Exits with 77 without a browser.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { contents, faults, showAll, sortBy } from "./inside.mjs";
import { checkPages } from "./pages.mjs";

// A4 without margins, in CSS pixels.
const PAPER = { width: 688, height: 1016 };
const VIEWS = [
  { name: "phone", width: 360, height: 740 },
  { name: "tablet", width: 768 },
  { name: "desktop", width: 1280 },
  { name: "phone-dark", width: 360, height: 740, isDark: true },
  { name: "desktop-dark", width: 1280, isDark: true },
  { name: "print", ...PAPER, media: "print" },
  { name: "print-dark", ...PAPER, media: "print", isDark: true },
];

const HEADINGS = ["Best configuration", "Speed against memory", "Predicted against measured", "A step of the best configuration", "All configurations", "What was rejected, and why"];

const isNumber = value => typeof value === "number";

await checkPages(VIEWS, 15, async ({ page, name, view, folder, pictures, attempt, wrong }) => {
  const data = JSON.parse(readFileSync(join(folder, `${name}.json`), "utf8")), shown = await page.evaluate(contents);
  await attempt(() => matches(data, shown));
  if (name === "sample") await attempt(() => sample(data, shown));
  if (name === "uncertain") await attempt(() => uncertain(shown));
  if (view.media === "print") await attempt(() => paper(page, join(pictures, `${name}.pdf`)));
  else await attempt(() => interaction(page, data, shown));
  // The page must also pass after the controls have been used.
  wrong.push(...(await page.evaluate(faults)));
});

/// The page has all six sections, with as many marks as the results have.
function matches(data, shown) {
  const rows = (data?.rows ?? []).map(row => row ?? {}), is = state => row => row.state === state;
  assert.deepEqual(shown.headings.slice(1), HEADINGS);
  const isMeasured = row => row.state === "measured" && isNumber(row.metric?.value);
  const isSpecial = row => row.id !== undefined && row.id !== null && (row.id === data.best || row.id === data.base);
  const placed = rows.filter(row => isNumber(row.planned_bytes) && (isMeasured(row) || isNumber(row.predicted_metric)));
  const limit = isNumber(data?.limit_bytes) ? data.limit_bytes : null;
  const drawn = placed.filter(row => limit === null || isMeasured(row) || row.planned_bytes <= 1.25 * limit);
  const others = drawn.filter(row => !isSpecial(row));
  assert.equal(shown.memory.measured, others.filter(isMeasured).length, "measured marks");
  assert.equal(shown.memory.predicted, others.filter(is("predicted")).length, "predicted marks");
  assert.equal(shown.memory.leftOut, others.filter(row => row.state !== "measured" && row.state !== "predicted").length, "crosses");
  assert.equal(shown.memory.best + shown.memory.own, drawn.filter(isSpecial).length, "best and own");
  assert.equal(shown.memory.front, drawn.some(isMeasured) ? 1 : 0, "Pareto front");
  if (drawn.length < placed.length) assert.match(shown.memory.text, /Not drawn/);
  const both = rows.filter(row => row.predicted_seconds > 0 && row.seconds?.median > 0);
  assert.equal(shown.accuracy.marks, both.length, "predicted and measured");
  assert.deepEqual([shown.accuracy.diagonal, shown.accuracy.band], both.length > 0 ? [1, 1] : [0, 0]);
  const lanes = (data?.timeline?.rows ?? []).filter(row => row?.spans?.some(span => span && isNumber(span.start) && isNumber(span.end) && span.end >= span.start));
  const drawnLanes = shown.timeline.tracks;
  assert.ok(drawnLanes === lanes.length || (drawnLanes >= 16 && shown.timeline.text.includes(`first ${drawnLanes} of ${lanes.length} lanes`)), `${drawnLanes} lanes of ${lanes.length}`);
  const spans = lanes.slice(0, drawnLanes).flatMap(lane => lane.spans).length;
  const isSaid = /are drawn as one|Not drawn/.test(shown.timeline.text);
  assert.ok(isSaid ? shown.timeline.rectangles < spans : shown.timeline.rectangles === spans, `${shown.timeline.rectangles} rectangles of ${spans} spans`);
  assert.equal(shown.rows.length, Math.min(50, rows.length), "rows of the table");
  const count = rows.filter(row => isMeasured(row)).length;
  assert.ok(shown.rows.slice(0, count).every(cells => cells[6] === "measured"), "measured ones first");
  assert.deepEqual(shown.groups.map(([state]) => state), ["too large", "refused", "failed", "timed out", "stopped early"].filter(state => rows.some(is(state))));
  for (const [state, text] of shown.groups) assert.ok(text.includes(`(${rows.filter(is(state)).length.toLocaleString("en")})`), text);
}

/// The text and figures of the page of a usual run.
function sample(data, shown) {
  const best = data.rows.find(row => row.id === data.best), whole = value => Math.round(value).toLocaleString("en");
  assert.equal(shown.title, "Autotuning report: ds.yaml");
  assert.ok(shown.headline.includes(`${whole(best.metric.value)} tokens/s`), shown.headline);
  assert.ok(shown.headline.includes(`${whole(best.metric.value)} tokens/s (${whole(best.metric.low)} to ${whole(best.metric.high)}), from 4 runs`), shown.headline);
  const { ratio, low, high } = data.gain;
  assert.ok(shown.headline.includes(`Gain over the unchanged ds.yaml: a factor of ${ratio.toFixed(2)} (${low.toFixed(2)} to ${high.toFixed(2)}).`), shown.headline);
  for (const [key, value] of Object.entries(best.settings)) assert.ok(shown.headline.includes(`${key}: ${value}`), key);
  assert.match(shown.about, /zero-train 0\.1\.0 · 2 cores of an Intel Xeon, 23\.4 GiB · 2026-11-22 · took 5 min 12 s · 192 in the space/);
  assert.match(shown.accuracy.text, /median error of the predicted step time is 6\.1 %; within ±15\u00a0%: \d+ of 12\./);
  assert.deepEqual([shown.memory.names.sort(), shown.memory.limit], [["best", "your own"], 1]);
  assert.deepEqual(shown.timeline.kinds, ["forward", "recompute", "backward", "update", "gather", "reduce", "send", "disk", "wait"]);
  assert.ok(shown.reasons.some(text => text.startsWith("32 times: zero_optimization.offload_optimizer")), "equal reasons are one");
  assert.equal(shown.rows[0][0], "1");
  assert.match(shown.rows[0][3], /^[\d,.]+ ± [\d.]+$/);
}

/// Marks stay apart however wide their intervals are, and the page says so.
function uncertain(shown) {
  for (const [index, section] of ["memory", "accuracy"].entries()) {
    assert.ok(shown.spread[index] > 0.3, `marks of ${section} lie in ${shown.spread[index]} of the chart's height`);
    assert.match(shown[section].text, /Intervals that end at an edge extend beyond it\./);
  }
}

/// Sorting, showing all rows, and reading marks with the keyboard.
async function interaction(page, data, shown) {
  const rows = (data?.rows ?? []).length, numbers = cells => cells.map(cell => (cell === "–" ? null : parseFloat(cell.replaceAll(",", ""))));
  if (rows > 1) {
    if (rows > 50) await page.evaluate(showAll, "rows");
    for (const [column, order] of [[4, "descending"], [4, "ascending"], [2, "descending"]]) {
      await page.evaluate(sortBy, column);
      const { rows: cells, sorted } = await page.evaluate(contents);
      assert.equal(cells.length, rows, "all rows are shown");
      assert.deepEqual(sorted.map(([, how]) => how), [order]);
      const values = numbers(cells.map(row => row[column])), some = values.filter(value => value !== null);
      assert.ok(values.slice(some.length).every(value => value === null), "unknown is last");
      const sign = order === "ascending" ? 1 : -1;
      assert.ok(some.every((value, i) => i === 0 || sign * (value - some[i - 1]) >= 0), `column ${column} is ${order}`);
    }
    await page.evaluate(sortBy, 0);
    assert.deepEqual((await page.evaluate(contents)).rows.slice(0, 50), shown.rows, "back in their places");
  }
  const press = async (section, key) => {
    await page.evaluate(id => document.querySelector(`#${id} svg.chart`)?.focus(), section);
    await page.call("Input.dispatchKeyEvent", { type: "keyDown", key, code: key, windowsVirtualKeyCode: { ArrowRight: 39, ArrowDown: 40 }[key] });
    return page.evaluate(id => document.querySelector(`#${id} output`)?.textContent, section);
  };
  const hint = /^Point at a mark/;
  for (const section of ["memory", "accuracy", "timeline"]) {
    const first = await press(section, "ArrowRight");
    if (first === undefined || first === null) continue;
    assert.doesNotMatch(first, hint, `${section} reads its first mark`);
    if (rows > 1) assert.notEqual(await press(section, "ArrowRight"), first, `${section} goes on`);
    if (section === "timeline") assert.match(await press(section, "ArrowDown"), /^rank .+, .+: .+, from .+ to .+/);
  }
}

/// In print: no controls, black on white, and no chart larger than a page. Writes a PDF next to the screenshots.
async function paper(page, path) {
  const seen = await page.evaluate(height => ({
    controls: [...document.querySelectorAll("button, output, .hint")].filter(e => e.getClientRects().length > 0).length,
    colors: [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color],
    cut: [...document.querySelectorAll("figure")].filter(e => getComputedStyle(e).breakInside !== "avoid" || e.getBoundingClientRect().height > height).length,
    scrolled: [...document.querySelectorAll(".box")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
  }), PAPER.height);
  assert.deepEqual(seen, { controls: 0, colors: ["rgb(255, 255, 255)", "rgb(26, 26, 26)"], cut: 0, scrolled: 0 });
  const { data } = await page.call("Page.printToPDF", { preferCSSPageSize: true, printBackground: false });
  writeFileSync(path, Buffer.from(data, "base64"));
}
