// The headline, the table of all configurations, and the reasons of the rejected ones.

const MOST_ROWS = 50, MOST_REASONS = 12, MOST_NAMED = 3;

function headline(section, results) {
  const { best, base, metric, gain, configuration } = results;
  if (!best) return void section.append(make("p", { class: "text" }, "Nothing was measured, so there is no best configuration."));
  const { value } = best.metric;
  section.append(make("p", { class: "value" }, known(value) ? amount(value, metric.unit, 4) : `${metric.name} unknown`));
  let verdict = `The gain over the unchanged ${configuration} is unknown.`;
  if (best === base) verdict = `No measured configuration is better than the unchanged ${configuration}.`;
  else if (known(gain.ratio)) {
    const factor = value => digits(value, value < 1 ? 2 : 3);
    const isKnown = known(gain.low) && known(gain.high), isChance = isKnown && gain.low <= 1 && gain.high >= 1;
    verdict = `Gain over the unchanged ${configuration}: a factor of ${factor(gain.ratio)}${isKnown ? ` (${factor(gain.low)} to ${factor(gain.high)})` : ""}`;
    verdict += isChance ? ", which may be chance: the interval contains 1." : ".";
  }
  section.append(make("p", { class: "text" }, verdict));
  const facts = make("dl");
  const fact = (name, ...content) => facts.append(make("dt", null, name), make("dd", null, ...content));
  const settings = best.settings.map(([key, text]) => make("li", { class: "mono" }, `${key}: ${text}`));
  fact(`Differs from ${configuration} in`, settings.length > 0 ? make("ul", { class: "plain" }, ...settings) : "nothing");
  const runs = known(best.runs) ? `, from ${plural(best.runs, "run", "runs")}` : "";
  fact(`Measured ${metric.name}`, `${measured(best.metric, metric.unit)}${runs}`);
  if (base && base !== best && known(base.metric.value)) fact("Your configuration", measured(base.metric, metric.unit));
  if (known(best.seconds.value)) fact("Step time", measured(best.seconds, "s"));
  const limit = known(results.limit) ? `; the limit is ${amount(results.limit, "B")}` : "";
  fact("Memory per rank", `${amount(best.planned, "B")} planned, ${amount(best.used, "B")} measured${limit}`);
  section.append(facts);
}

function about(results) {
  const { counts, program, machine, date, seconds } = results;
  const words = { candidates: "in the space", refused: "refused", too_large: "too large", predicted: "predicted", measured: "measured", failed: "failed" };
  const numbers = Object.entries(words).filter(([key]) => known(counts[key])).map(([key, word]) => `${counts[key].toLocaleString("en")} ${word}`).join(", ");
  return [program, machine, date, known(seconds) ? `took ${duration(seconds)}` : "", numbers].filter(Boolean).join(" · ");
}

// States how many rows are shown (also in print), and shows all on request.
function offerRest(note, shown, all, what, show) {
  const button = make("button", { type: "button" }, `Show all ${all.toLocaleString("en")}`);
  button.addEventListener("click", () => { note.replaceChildren(); show(); });
  note.replaceChildren(`The first ${shown} of ${all.toLocaleString("en")} ${what}. `, button);
}

// Columns: heading, sort key, displayed text, and whether it is a number.
function columns(results) {
  const { rows, metric } = results;
  const [bytes, bytesName] = unitOf("B", rows.flatMap(row => [row.planned, row.used]));
  const [by, name] = unitOf(metric.unit, rows.flatMap(row => [row.metric.value, row.predicted]));
  const unit = name ? ` (${name})` : "", of = (value, divisor) => (known(value) ? value / divisor : null);
  return [
    ["Place", row => row.place, row => row.place ?? DASH, true],
    [`Settings that differ from ${results.configuration}`, row => row.words, row => row.words, false],
    [`Predicted ${metric.name}${unit}`, row => row.predicted, row => digits(of(row.predicted, by), 4), true],
    [`Measured ${metric.name}${unit}`, row => row.metric.value, row => within(of(row.metric.value, by), of(row.metric.low, by), of(row.metric.high, by)), true],
    [`Planned memory (${bytesName})`, row => row.planned, row => digits(of(row.planned, bytes)), true],
    [`Measured memory (${bytesName})`, row => row.used, row => digits(of(row.used, bytes)), true],
    ["State", row => row.state, row => row.state, false],
  ];
}

function table(section, results) {
  if (results.rows.length === 0) return void section.append(make("p", { class: "text" }, "There was no configuration to try."));
  const shown = columns(results);
  let sorted = results.rows, most = MOST_ROWS;
  const body = make("tbody"), rest = make("p", { class: "note" });
  const fill = () => {
    body.replaceChildren(...sorted.slice(0, most).map(row =>
      make("tr", { "data-id": String(row.id) }, ...shown.map(([name, , show, isNumber], index) => {
        const text = String(show(row));
        return make("td", { class: `${isNumber ? "number" : index === 1 ? "settings" : ""}${text === DASH ? " none" : ""}`, "data-name": name }, text);
      }))));
    if (sorted.length > most) offerRest(rest, most, sorted.length, "rows", () => { most = Infinity; fill(); });
  };
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const heads = shown.map(([name, key, , isNumber], index) => {
    const button = make("button", { type: "button" }, name);
    const head = make("th", { scope: "col", "data-name": name, class: isNumber ? "number" : null, "aria-sort": index === 0 ? "ascending" : null }, button);
    button.addEventListener("click", () => {
      // Columns where large values are interesting start in descending order; ids and text start in ascending order.
      // Unknown values are last in both.
      const before = head.getAttribute("aria-sort"), order = before ? (before === "ascending" ? "descending" : "ascending") : isNumber && index > 0 ? "descending" : "ascending";
      const sign = order === "ascending" ? 1 : -1;
      sorted = [...results.rows].sort((a, b) => {
        const [one, other] = [key(a), key(b)];
        return (one === null) - (other === null) || (one === null ? 0 : sign * compare(one, other));
      });
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      fill();
    });
    return head;
  });
  fill();
  const box = make("div", { class: "box", role: "region", tabindex: 0, "aria-label": "All configurations" },
    make("table", null, make("thead", null, make("tr", null, ...heads)), body));
  section.append(make("p", { class: "quiet hint" }, "Measured configurations come first. Select a heading to sort by its column."), box, rest);
}

function rejected(section, results) {
  const groups = GROUPS.map(([state, title]) => [state, title, results.rows.filter(row => row.state === state)]).filter(([, , rows]) => rows.length > 0);
  if (groups.length === 0) section.append(make("p", { class: "text" }, "Nothing was rejected."));
  for (const [state, title, rows] of groups) {
    const reasons = new Map();
    for (const row of rows) reasons.set(row.reason, [...(reasons.get(row.reason) ?? []), row]);
    const sorted = [...reasons].sort(([, a], [, b]) => b.length - a.length);
    const items = sorted.map(([reason, same]) => {
      const named = same.slice(0, MOST_NAMED).map(row => row.words).join("; ");
      const more = same.length > MOST_NAMED ? `; and ${(same.length - MOST_NAMED).toLocaleString("en")} more` : "";
      const count = same.length > 1 ? `${same.length.toLocaleString("en")} times: ` : "";
      return make("li", null, `${count}${reason || "no reason was given"}`, make("div", { class: "quiet" }, named + more));
    });
    const list = make("ul", { class: "reasons" }, ...items.slice(0, MOST_REASONS)), rest = make("p", { class: "note" });
    section.append(make("h3", { "data-state": state }, `${title} (${rows.length.toLocaleString("en")})`), list, rest);
    if (items.length > MOST_REASONS) offerRest(rest, MOST_REASONS, items.length, "reasons", () => list.append(...items.slice(MOST_REASONS)));
  }
}
