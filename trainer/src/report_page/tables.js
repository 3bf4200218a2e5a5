// Paragraphs, lists of facts, and tables that become blocks on a phone.

const MOST_ROWS = 64;

const paragraph = (words, look = null) => make("p", { class: look }, words);

// Facts without a value are left out.
function facts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) if (value) list.append(make("dt", null, name), make("dd", null, value));
  return list;
}

// The first column names the row; the others hold figures. Cells are texts.
function figures(label, headings, rows) {
  const cell = (text, index) => make("td", { class: index > 0 ? "number" : "key", "data-name": headings[index] }, String(text));
  const body = rows.slice(0, MOST_ROWS).map(row => make("tr", null, ...row.map(cell)));
  const heads = headings.map((heading, index) => make("th", { scope: "col", class: index > 0 ? "number" : null }, heading));
  const table = make("table", { class: "figures" }, make("thead", null, make("tr", null, ...heads)), make("tbody", null, ...body));
  const box = make("div", { class: "box", role: "region", tabindex: 0, "aria-label": label }, table);
  if (rows.length > MOST_ROWS) box.append(paragraph(`The first ${MOST_ROWS} of ${rows.length.toLocaleString("en")} rows.`, "note"));
  return box;
}
