// Checks that run inside the page. Each function is sent to the browser as text, so it must not use anything else in
// this file.

/// Returns all visible faults: overflow, text that is cut off or overlaps other text, low contrast.
export function faults() {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > root.clientWidth + 0.5 && !e.closest(".box"));
    found.push(`the page is ${root.scrollWidth} px wide in ${root.clientWidth}: ${wide.slice(0, 3).map(e => e.outerHTML.slice(0, 80))}`);
  }
  const luminance = color => {
    const parts = color.match(/[\d.]+/g).map(Number).slice(0, 3).map(c => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) { const color = getComputedStyle(e).backgroundColor; if (!/, 0\)$|transparent/.test(color)) return color; }
    return "rgb(255, 255, 255)";
  };
  const hasText = e => [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  for (const e of document.querySelectorAll("main *")) {
    if (e.closest("title, desc, defs") || !hasText(e) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), ratio = contrast(e.closest("svg") ? style.fill : style.color, behind(e));
    if (ratio < 4.5) found.push(`contrast of ${ratio.toFixed(2)}: ${e.textContent.slice(0, 60)}`);
    if (parseFloat(style.fontSize) < 11 && !matchMedia("print").matches) found.push(`${style.fontSize}: ${e.textContent.slice(0, 60)}`);
  }
  for (const e of document.querySelectorAll("path.mark, path.span, path.front, .legend path, .legend rect, #hatch-reduce path, #hatch-recompute path")) {
    const style = getComputedStyle(e), color = [style.fill, style.stroke].find((c, i) => c !== "none" && !c.startsWith("url") && !(i === 0 && e.matches(".hollow, .tolerance")));
    const ratio = color && !e.matches(".tolerance") ? contrast(color, behind(e)) : 21;
    if (ratio < 3) found.push(`contrast of ${ratio.toFixed(2)}: ${e.getAttribute("class")} ${color}`);
  }
  for (const svg of document.querySelectorAll("svg.chart")) {
    const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, box] of texts)
      if (box.left < frame.left - 0.5 || box.right > frame.right + 0.5 || box.top < frame.top - 0.5 || box.bottom > frame.bottom + 0.5) found.push(`outside of its chart: ${text}`);
    texts.forEach(([text, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
      // Text boxes are taller than their letters.
      if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom) found.push(`“${text}” on “${other}”`);
    }));
    for (const mark of svg.querySelectorAll(".mark, .span, .front, .interval, .tolerance")) {
      const box = mark.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.push(`a mark outside of its chart: ${mark.outerHTML.slice(0, 80)}`);
    }
    if (/NaN|Infinity|undefined/.test(svg.outerHTML)) found.push(`not a number in ${svg.querySelector("title").textContent}`);
  }
  for (const svg of document.querySelectorAll("svg")) if (!svg.querySelector("title")?.textContent) found.push("a drawing without a title");
  // A table that can stack its cells must not scroll sideways.
  for (const box of document.querySelectorAll(".box")) if (root.clientWidth < 480 && box.scrollWidth > box.clientWidth) found.push(`a table of ${box.scrollWidth} px in ${box.clientWidth}`);
  const text = document.querySelector("main").innerText;
  if (/(^|\s)-0(\s|$)/m.test(document.querySelector("main").textContent) || [...document.querySelectorAll(".tick")].some(e => e.textContent.startsWith("-0"))) found.push("a negative zero");
  for (const word of ["NaN", "undefined", "Infinity", "null", "[object"]) if (text.includes(word)) found.push(`“${word}”: ${text.slice(text.indexOf(word) - 60, text.indexOf(word) + 30)}`);
  if (window.hacked) found.push("a text of the results was run");
  return found;
}

/// Returns the page's contents, for comparison with the results.
export function contents() {
  const count = selector => document.querySelectorAll(selector).length;
  const text = selector => document.querySelector(selector)?.innerText ?? "";
  return {
    title: document.title,
    headings: [...document.querySelectorAll("main h1, main h2")].map(e => e.textContent),
    headline: text("#best"), about: text("#about"),
    spread: ["#memory", "#accuracy"].map(section => {
      const chart = document.querySelector(`${section} svg.chart`), marks = [...document.querySelectorAll(`${section} svg.chart .mark`)].map(e => e.getBoundingClientRect().top);
      return chart ? (Math.max(...marks) - Math.min(...marks)) / chart.getBoundingClientRect().height : null;
    }),
    memory: { measured: count("#memory svg.chart .measured"), predicted: count("#memory svg.chart .predicted"), leftOut: count("#memory svg.chart .left-out"),
      best: count("#memory svg.chart .best"), own: count("#memory svg.chart .own"), limit: count("#memory .limit"), front: count("#memory svg.chart .front"),
      names: [...document.querySelectorAll("#memory .named")].map(e => e.textContent), text: text("#memory .text") },
    accuracy: { marks: count("#accuracy svg.chart .mark"), diagonal: count("#accuracy svg.chart .diagonal"), band: count("#accuracy svg.chart .tolerance"), text: text("#accuracy .text") },
    timeline: { tracks: count("#timeline .track"), kinds: [...document.querySelectorAll("#timeline path.span")].map(e => e.getAttribute("class").split(" ")[1]),
      rectangles: [...document.querySelectorAll("#timeline path.span")].reduce((sum, e) => sum + e.getAttribute("d").split("M").length - 1, 0), text: text("#timeline .text") },
    rows: [...document.querySelectorAll("#rows tbody tr")].map(tr => [...tr.cells].map(td => td.innerText)),
    sorted: [...document.querySelectorAll("#rows th[aria-sort]")].map(th => [th.textContent, th.getAttribute("aria-sort")]),
    groups: [...document.querySelectorAll("#rejected h3")].map(e => [e.dataset.state, e.textContent]),
    reasons: [...document.querySelectorAll("#rejected li")].map(e => e.innerText),
  };
}

/// Clicks the heading of a column; the keyboard does the same, because the heading is a button.
export function sortBy(column) {
  document.querySelectorAll("#rows th button")[column].click();
}

export function showAll(section) {
  document.querySelector(`#${section} .note button`).click();
}
