// Opens every page of the folder in argv, in several views of a real browser. With ZERO_TRAIN_PICTURES=1, writes screenshots
// to FOLDER/pictures: taking them needs several times the processor time of all checks.
//
// Exits with 0 if all pages are right, with 1 if not, and with 77 without a browser.
import { mkdirSync, readdirSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { findBrowser, open, start } from "./browser.mjs";
import { faults } from "./inside.mjs";

const PICTURES = process.env.ZERO_TRAIN_PICTURES === "1";

/// Runs `check({ page, name, view, folder, pictures, attempt, wrong })` for each page and view. It reports what is wrong by
/// `wrong.push(text)`, or by an error that it throws in `attempt(test)`.
export async function checkPages(views, minutes, check) {
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
    console.log(`gave up after ${minutes} minutes`);
    process.exit(1);
  }, minutes * 60_000).unref();
  let failed = 0;
  try {
    for (const name of readdirSync(folder).filter(file => file.endsWith(".html")).map(file => file.slice(0, -5)))
      for (const view of views) failed += (await isRight(browser, { folder, pictures, name, view }, check)) ? 0 : 1;
  } finally {
    await browser.close();
  }
  console.log(failed === 0 ? `all pages are right; ${PICTURES ? `pictures in ${pictures}` : "no pictures without ZERO_TRAIN_PICTURES=1"}` : `${failed} pages are not right`);
  process.exit(failed === 0 ? 0 : 1);
}

async function isRight(browser, place, check) {
  const { folder, pictures, name, view } = place, address = pathToFileURL(join(folder, `${name}.html`)).href;
  const page = await open(browser, address, view);
  if (PICTURES) await picture(page, join(pictures, `${name}-${view.name}`), view.width);
  const wrong = await page.evaluate(faults);
  const attempt = async test => {
    try {
      await test();
    } catch (error) {
      wrong.push(error.message);
    }
  };
  await check({ ...place, page, attempt, wrong });
  wrong.push(...page.complaints);
  const asked = page.requests.filter(url => url !== address);
  if (asked.length > 0) wrong.push(`asked for ${asked}`);
  await page.close();
  for (const text of new Set(wrong)) console.log(`${name}, ${view.name}: ${text}`);
  return wrong.length === 0;
}

/// Screenshots of the whole page from the top, in pieces of readable size.
async function picture(page, path, width) {
  const height = await page.evaluate(() => document.documentElement.scrollHeight), piece = 1500;
  for (let y = 0; y < Math.min(height, 4 * piece); y += piece) {
    const clip = { x: 0, y, width, height: Math.min(piece, height - y), scale: 1 };
    const { data } = await page.call("Page.captureScreenshot", { captureBeyondViewport: true, clip });
    writeFileSync(`${path}-${1 + y / piece}.png`, Buffer.from(data, "base64"));
  }
}
