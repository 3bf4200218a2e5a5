// Builds the page, and redraws the charts whenever their width changes: on a rotated phone, and for printing.

const results = read(JSON.parse(document.getElementById("data").textContent));
const section = id => document.getElementById(id);

function draw() {
  for (const [id, one] of [["memory", drawMemory], ["accuracy", drawAccuracy], ["timeline", drawTimeline]]) {
    const figure = section(id).querySelector("figure"), text = section(id).querySelector(".text");
    // Screen readers get the marks' text from the table as well, so charts may be redrawn at any time.
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
