// Puts the page together, and draws the charts again whenever their width changes: on a turned phone, and on paper.

const results = read(JSON.parse(document.getElementById("data").textContent));
const section = id => document.getElementById(id);

function draw() {
  for (const [id, one] of [["memory", drawMemory], ["accuracy", drawAccuracy], ["timeline", drawTimeline]]) {
    const figure = section(id).querySelector("figure"), text = section(id).querySelector(".text");
    // Readers of the page have the marks' text from the table too, so a chart may be drawn anew under them.
    figure.replaceChildren();
    one(figure, text, results, Math.max(240, Math.floor(figure.clientWidth)));
  }
}

section("title").textContent = `Autotuning of ${results.configuration}`;
document.title = `Autotuning report: ${results.configuration}`;
section("about").textContent = results.isThere ? about(results) : "This page holds no results.";
headline(section("best"), results);
table(section("rows"), results);
rejected(section("rejected"), results);
section("main").hidden = false;
draw();
let drawnAt = section("main").clientWidth;
new ResizeObserver(() => {
  if (section("main").clientWidth === drawnAt) return;
  drawnAt = section("main").clientWidth;
  draw();
}).observe(section("main"));
