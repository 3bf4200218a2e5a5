// Builds the page, and redraws the charts whenever their width changes: on a rotated phone, and for printing.

const data = read(JSON.parse(document.getElementById("data").textContent));
const element = id => document.getElementById(id);
const CHARTS = { loss, gradient, rate, speed, memory, timeline, traffic, time };

function draw() {
  for (const [id, fill] of Object.entries(CHARTS)) {
    const body = element(id).querySelector(".body");
    body.replaceChildren();
    fill(body, data, Math.max(240, Math.floor(body.clientWidth)));
  }
}

const names = data.runs.map(run => run.name).join(", ");
element("title").textContent = data.isOne ? `Training run: ${names}` : `${plural(data.runs.length, "training run", "training runs")}`;
document.title = `Training report: ${names}`;
element("about").textContent = [data.program, data.isOne ? stateOf(data.runs[0]) : names].join(" · ");
result(element("result").querySelector(".body"), data);
configuration(element("configuration").querySelector(".body"), data);
element("main").hidden = false;
draw();
let drawnAt = element("main").clientWidth;
new ResizeObserver(() => {
  if (element("main").clientWidth === drawnAt) return;
  drawnAt = element("main").clientWidth;
  draw();
}).observe(element("main"));
