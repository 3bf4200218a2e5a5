// Checks report pages of runs in a real browser: node check.mjs FOLDER
//
// FOLDER has NAME.html. With ZERO_TRAIN_PICTURES=1, screenshots of all pages are written to FOLDER/pictures. Exits with 77
// without a browser.
import assert from "node:assert/strict";
import { checkPages } from "../../../planner/tests/report/pages.mjs";

const VIEWS = [
  { name: "phone", width: 390, height: 844 },
  { name: "phone-dark", width: 390, height: 844, isDark: true },
  { name: "desktop", width: 1280 },
  { name: "desktop-dark", width: 1280, isDark: true },
  { name: "print", width: 688, height: 1016, media: "print" },
];
const SECTIONS = ["result", "loss", "gradient", "rate", "speed", "memory", "timeline", "traffic", "time", "configuration"];

await checkPages(VIEWS, 10, ({ page, view, attempt }) => attempt(async () => {
  const shown = await page.evaluate(contents);
  assert.deepEqual(shown.sections.map(([id]) => id), SECTIONS);
  for (const [id, children] of shown.sections) assert.ok(children > 0, `section ${id} is empty`);
  assert.equal(shown.data, shown.drawn, "curves");
  assert.equal(new Set(shown.titles).size, shown.titles.length, `titles of charts: ${shown.titles}`);
  if (view.media !== "print" && shown.steps > 1) await keys(page);
}));

/// The arrow keys read the points of the loss.
async function keys(page) {
  const press = async () => {
    await page.evaluate(() => document.querySelector("#loss svg.chart").focus());
    await page.call("Input.dispatchKeyEvent", { type: "keyDown", key: "ArrowRight", code: "ArrowRight", windowsVirtualKeyCode: 39 });
    return page.evaluate(() => document.querySelector("#loss output").textContent);
  };
  assert.match(await press(), /, step [\d,]+: ./);
  const first = await press();
  assert.notEqual(await press(), first, "the next point");
}

/// Runs inside the page: what it shows, and how many curves its data has.
function contents() {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const isCurve = curve => curve && curve.values.some(value => value !== null);
  return {
    sections: [...document.querySelectorAll("main section")].map(e => [e.id, e.querySelector(".body").childElementCount]),
    data: runs.flatMap(run => Object.values(run.curves)).filter(isCurve).length,
    drawn: document.querySelectorAll("svg.chart > path.curve").length,
    titles: [...document.querySelectorAll("svg.chart > title")].map(e => e.textContent),
    steps: Math.max(...runs.map(run => run.totals.steps)),
  };
}
