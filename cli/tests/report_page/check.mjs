// Checks report pages of runs in a real browser: node check.mjs FOLDER
//
// FOLDER has NAME.html; screenshots of all pages are written to FOLDER/pictures. Exits with 77 without a browser.
import assert from "node:assert/strict";
import { mkdirSync, readdirSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { findBrowser, open, start } from "../../../planner/tests/report/browser.mjs";
import { faults } from "../../../planner/tests/report/inside.mjs";

const VIEWS = [
  { name: "phone", width: 390, height: 844 },
  { name: "phone-dark", width: 390, height: 844, isDark: true },
  { name: "desktop", width: 1280 },
  { name: "desktop-dark", width: 1280, isDark: true },
  { name: "print", width: 688, height: 1016, media: "print" },
];
const SECTIONS = ["result", "loss", "gradient", "rate", "speed", "memory", "timeline", "traffic", "time", "configuration"];

const folder = resolve(process.argv[2]), pictures = join(folder, "pictures");
const program = findBrowser();
if (!program) {
  console.log("skipped: no Chromium starts; scripts/install-browser.sh installs one, or ZERO_TRAIN_BROWSER names it");
  process.exit(77);
}
mkdirSync(pictures, { recursive: true });
const browser = start(program);
// A browser that does not answer must not block the tests forever. It exits when its pipe closes.
setTimeout(() => {
  console.log("gave up after 10 minutes");
  process.exit(1);
}, 600_000).unref();
let failed = 0;
try {
  for (const name of readdirSync(folder).filter(file => file.endsWith(".html")).map(file => file.slice(0, -5)))
    for (const view of VIEWS) await check(name, view);
} finally {
  await browser.close();
}
console.log(failed === 0 ? `all pages are right; pictures in ${pictures}` : `${failed} pages are not right`);
process.exit(failed === 0 ? 0 : 1);

async function check(name, view) {
  const address = pathToFileURL(join(folder, `${name}.html`)).href;
  const page = await open(browser, address, view);
  await picture(page, `${name}-${view.name}`, view.width);
  const wrong = await page.evaluate(faults);
  try {
    const shown = await page.evaluate(contents);
    assert.deepEqual(shown.sections.map(([id]) => id), SECTIONS);
    for (const [id, children] of shown.sections) assert.ok(children > 0, `section ${id} is empty`);
    assert.equal(shown.data, shown.drawn, "curves");
    assert.equal(new Set(shown.titles).size, shown.titles.length, `titles of charts: ${shown.titles}`);
    if (view.media !== "print" && shown.steps > 1) await keys(page);
  } catch (error) {
    wrong.push(error.message);
  }
  wrong.push(...page.complaints);
  const asked = page.requests.filter(url => url !== address);
  if (asked.length > 0) wrong.push(`asked for ${asked}`);
  await page.close();
  for (const text of new Set(wrong)) console.log(`${name}, ${view.name}: ${text}`);
  failed += wrong.length > 0 ? 1 : 0;
}

/// Screenshots of the whole page from the top, in pieces of readable size.
async function picture(page, name, width) {
  const height = await page.evaluate(() => document.documentElement.scrollHeight), piece = 1500;
  for (let y = 0; y < Math.min(height, 4 * piece); y += piece) {
    const clip = { x: 0, y, width, height: Math.min(piece, height - y), scale: 1 };
    const { data } = await page.call("Page.captureScreenshot", { captureBeyondViewport: true, clip });
    writeFileSync(join(pictures, `${name}-${1 + y / piece}.png`), Buffer.from(data, "base64"));
  }
}

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
