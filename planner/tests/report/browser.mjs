// Controls a headless Chromium over a pipe with the DevTools protocol: nothing but the browser itself must be
// installed.
import { spawn, spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell"];

/// The program that ZERO_TRAIN_BROWSER names, or the first of the usual ones that starts.
export function findBrowser() {
  const named = process.env.ZERO_TRAIN_BROWSER;
  return (named ? [named] : NAMES).find(name => spawnSync(name, ["--version"], { timeout: 60_000 }).status === 0);
}

/// Starts `program`; `send(method, parameters, session)` sends a command, `on(event, listener)` registers for events.
export function start(program) {
  const profile = mkdtempSync(join(tmpdir(), "report-browser-"));
  // The sandbox needs privileges that containers lack, and only our own pages are opened. Shared memory may be small in
  // containers.
  const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", `--user-data-dir=${profile}`];
  const child = spawn(program, [...flags, "about:blank"], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
  const waiting = new Map(), listeners = [];
  let next = 1, rest = "";
  const ended = new Promise(resolve => child.on("exit", resolve));
  child.on("exit", () => waiting.forEach(({ reject }) => reject(new Error("the browser ended"))));
  child.stdio[4].setEncoding("utf8").on("data", text => {
    const parts = (rest + text).split("\0");
    rest = parts.pop();
    for (const message of parts.map(part => JSON.parse(part))) {
      const asked = waiting.get(message.id);
      if (!asked) listeners.forEach(([event, listener]) => event === message.method && listener(message.params));
      else if (message.error) asked.reject(new Error(`${asked.method}: ${message.error.message}`));
      else asked.resolve(message.result);
      waiting.delete(message.id);
    }
  });
  const send = (method, params = {}, sessionId = undefined) => new Promise((resolve, reject) => {
    waiting.set(next, { resolve, reject, method });
    child.stdio[3].write(`${JSON.stringify({ id: next++, method, params, sessionId })}\0`);
  });
  const on = (event, listener) => listeners.push([event, listener]);
  const close = async () => {
    child.kill();
    await ended;
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
  };
  return { send, on, close };
}

/// Opens `address` in a new tab: `evaluate(f, ...arguments)` runs a function in the page, `call` sends protocol
/// commands to it.
export async function open(browser, address, { width, height = 900, isDark = false, media = "screen" }) {
  const { targetId } = await browser.send("Target.createTarget", { url: "about:blank" });
  const { sessionId } = await browser.send("Target.attachToTarget", { targetId, flatten: true });
  const call = (method, params) => browser.send(method, params, sessionId);
  const complaints = [], requests = [];
  browser.on("Runtime.consoleAPICalled", event => complaints.push(`console: ${JSON.stringify(event.args.map(arg => arg.value))}`));
  browser.on("Runtime.exceptionThrown", event => complaints.push(event.exceptionDetails.exception?.description ?? event.exceptionDetails.text));
  browser.on("Log.entryAdded", event => complaints.push(event.entry.text));
  browser.on("Network.requestWillBeSent", event => requests.push(event.request.url));
  for (const domain of ["Page", "Runtime", "Log", "Network"]) await call(`${domain}.enable`);
  await call("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: width < 500 });
  await call("Emulation.setEmulatedMedia", { media, features: [{ name: "prefers-color-scheme", value: isDark ? "dark" : "light" }] });
  const loaded = new Promise(resolve => browser.on("Page.loadEventFired", resolve));
  await call("Page.navigate", { url: address });
  await loaded;
  const evaluate = async (f, ...args) => {
    const expression = `(${f})(${args.map(arg => JSON.stringify(arg)).join(",")})`;
    const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  };
  // Two frames, so that the reactions to a change of size have been drawn.
  await evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));
  const close = () => browser.send("Target.closeTarget", { targetId });
  return { call, evaluate, close, complaints, requests };
}
